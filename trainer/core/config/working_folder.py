"""Settings of the working directory, the user's packages, and the groups of the config folders.

A run directory may be somebody else's. What its config.json names in `task.trainer` and
`task.packages` counts only if the user names it too: on the command line, in lockstep.yaml, or in
the file of a task in a config folder.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.base.errors import ConfigError, one_line
from trainer.base.folders import CONF
from trainer.base.plain_files import MOST_OF_TOML, MOST_OF_YAML, parse_yaml, read_file, read_of_user
from trainer.core.config.saved_config import CONFIG
from trainer.core.config.schema import Config
from trainer.core.config.targets import ALLOWED_PACKAGES, lies_under
from trainer.core.config.typed import build


@dataclass(frozen=True)
class FolderSettings:
    """Folders for `--config-dir`, and packages whose code a saved run may name."""

    config_dirs: list[str] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)


def read_settings(folder: Path) -> FolderSettings:
    """Return the folder's settings; empty if there are none.

    Raises ConfigError for a file that cannot be read, an unknown name, a missing folder, and if
    both files contain settings.
    """
    by_file = {}
    for name, (parse, most) in SETTINGS_FILES.items():
        if (folder / name).is_file():
            try:
                settings = parse(read_of_user(folder / name, most).decode())
            except (ValueError, OSError) as error:
                raise ConfigError(f"{name} cannot be read: {one_line(error)}; fix it") from None
            if settings is not None:
                by_file[name] = _check(settings, name, folder)
    if len(by_file) > 1:
        raise ConfigError(f"config_dirs: {' and '.join(by_file)} both have settings; keep only one")
    return next(iter(by_file.values()), FolderSettings())


def _check(settings: Any, name: str, folder: Path) -> FolderSettings:
    """Return the settings in the file `name`, checked."""
    if not isinstance(settings, dict):
        raise ConfigError(f"{name}={settings}: must be a mapping")
    checked = build(FolderSettings, settings, f"{name}: ")
    places = [str(Path(path).expanduser()) for path in checked.config_dirs]
    for path in places:
        if not (folder / path).is_dir():
            raise ConfigError(f"{name}: config_dirs: {path} is not a directory; make or remove it")
    return replace(checked, config_dirs=places)


def _parse_yaml(text: str) -> Any:
    return parse_yaml(text) or {}


def _parse_toml(text: str) -> Any:
    """Return [tool.lockstep], or None if it is missing. Raises ValueError for invalid TOML."""
    if "lockstep" not in text:
        return None
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    tools = tomllib.loads(text).get("tool")
    return tools.get("lockstep") if isinstance(tools, dict) else None


SETTINGS_FILES = {
    "lockstep.yaml": (_parse_yaml, MOST_OF_YAML),
    "pyproject.toml": (_parse_toml, MOST_OF_TOML),
}


def check_saved(
    config: Config, home: Path, overridden_keys: Collection[str], config_dirs: Sequence[str]
) -> None:
    """Raise ConfigError if the config.json of the run directory `home` names code that the user
    has not named.

    `overridden_keys` are the settings of the command line.
    """
    task = config.task
    words = {  # that would name the packages on the command line
        f"task.trainer={task.trainer}": [task.trainer.partition(".")[0]],
        f"task.packages=[{','.join(task.packages)}]": task.packages,
    }
    named = {*ALLOWED_PACKAGES}
    saved: dict[str, str] = {}
    for word, packages in words.items():
        if word.partition("=")[0] in overridden_keys:
            named |= {*packages}
        else:
            saved |= dict.fromkeys(packages, word)
    if all(lies_under(package, named) for package in saved):
        return
    named |= set(_of_the_user(Path(config.folder), home, config_dirs, saved))
    for package, word in saved.items():
        if not lies_under(package, named):
            raise ConfigError(f"""{config.shown(home)}/{CONFIG}: {word.partition("=")[0]}:
                only this file names the package {package}, whose code would be run;
                give {shlex.quote(word)} if you trust it,
                or packages: [{package}] in lockstep.yaml""")


def naming_words(config: Config, home: Path) -> list[str]:
    """Return the words that a later start in the same folder needs to import what `config` names.

    There are none if the user names it in that folder.
    """
    try:
        check_saved(config, home, (), read_settings(Path(config.folder)).config_dirs)
    except ConfigError:
        more = ",".join(config.task.packages)
        return [
            f"task.trainer={config.task.trainer}",
            *([f"task.packages=[{more}]"] if more else []),
        ]
    return []


def _of_the_user(
    start: Path, home: Path, config_dirs: Iterable[str], wanted: Iterable[str]
) -> Iterator[str]:
    """Yield the packages that the user names, in the folder `start` and in config folders.

    A config folder counts if it is given, or lies in `start`; none that came with the run. Only
    its files that contain one of the `wanted` names are parsed.
    """
    tops = [package.partition(".")[0].encode() for package in wanted]
    if not _came_with(home, start, start):
        yield from read_settings(start).packages
    task_folders = [path.parent.parent for path in sorted(start.glob("*/task/*.yaml"))]
    for folder in dict.fromkeys([*(start / path for path in config_dirs), *task_folders]):
        if not _came_with(home, folder, start):
            for file in sorted(folder.glob("*/*.yaml")):
                with suppress(OSError, ValueError):
                    data = read_file(file, MOST_OF_YAML)
                    if any(top in data for top in tops):
                        yield from _named_in(parse_yaml(data))


def _came_with(home: Path, folder: Path, start: Path) -> bool:
    """Return True for a folder in a run directory, or below `start` around a run directory."""
    run = home.resolve()
    real_folder = folder.resolve()
    is_around = run.is_relative_to(real_folder) and not start.resolve().is_relative_to(real_folder)
    return real_folder.is_relative_to(run) or is_around


def _named_in(raw: Any) -> Iterator[str]:
    task = raw.get("task") if isinstance(raw, dict) else None
    if isinstance(task, dict):
        trainer = task.get("trainer")
        packages = task.get("packages")
        names = [trainer.partition(".")[0]] if isinstance(trainer, str) else []
        names += packages if isinstance(packages, list) else []
        yield from (name for name in names if isinstance(name, str) and name)


# Settings without a folder in conf/: a folder of that name is no group of the user's own.
_BLOCKS = ("run", "data", "checkpoint", "eval", "log", "hydra")


def find_options(config_dirs: Sequence[str] = ()) -> dict[str, dict[str, list[Path]]]:
    """Return the options of each config group with their files: `{"task": {"cifar": [...]}}`.

    A folder of the user's, such as model/, is a group too: its files begin with the line
    `# @package task.options`, or name another place for their settings. An option has several
    files only if their contents differ: the same folder may be named twice, as by `--config-dir
    conf` in the checkout, or be a copy.
    """
    options: dict[str, dict[str, list[Path]]] = {}
    for root in [CONF, *map(Path, config_dirs)]:
        for file in sorted(root.glob("*/[!_]*.yaml")):
            group = file.parent.name
            if group.isidentifier() and group not in _BLOCKS:
                files = options.setdefault(group, {}).setdefault(file.stem, [])
                if not any(_is_same(file, other) for other in files):
                    files.append(file)
    return options


def _is_same(file: Path, other: Path) -> bool:
    """Return True for two paths of one file, and for files of equal content."""
    with suppress(OSError):
        if file.samefile(other):
            return True
        return read_of_user(file, MOST_OF_YAML) == read_of_user(other, MOST_OF_YAML)
    return False
