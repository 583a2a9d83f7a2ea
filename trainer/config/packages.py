"""Packages whose code a saved configuration may name: the allow list is the user's, not the file's.

A run directory may be somebody else's. What its config.yaml names in `task.trainer` and
`task.packages` counts only if the user names it too: on the command line, in lockstep.yaml, or in
the file of a task in a config folder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.config.folder import read_settings
from trainer.config.plain_files import MOST_OF_YAML, parse_yaml, read_file
from trainer.config.schema import Config
from trainer.config.targets import ALLOWED_PACKAGES, lies_under
from trainer.errors import ConfigError


def check_saved(
    config: Config, home: Path, given: Collection[str], config_dirs: Sequence[str]
) -> None:
    """Raise ConfigError if the config.yaml of the run directory `home` names code that the user
    has not named.

    `given` are the settings of the command line.
    """
    task = config.task
    words = {  # that would name the packages on the command line
        f"task.trainer={task.trainer}": [task.trainer.partition(".")[0]],
        f"task.packages=[{','.join(task.packages)}]": task.packages,
    }
    named = {*ALLOWED_PACKAGES}
    saved: dict[str, str] = {}
    for word, packages in words.items():
        if word.partition("=")[0] in given:
            named |= {*packages}
        else:
            saved |= dict.fromkeys(packages, word)
    if all(lies_under(package, named) for package in saved):
        return
    named |= set(_of_the_user(Path(config.folder), home, config_dirs, saved))
    for package, word in saved.items():
        if not lies_under(package, named):
            why = f"only this file names the package {package}, whose code would be run"
            advice = f"give {word} if you trust it, or packages: [{package}] in lockstep.yaml"
            raise ConfigError(
                f"{config.shown(home)}/config.yaml: {word.partition('=')[0]}: {why}; {advice}"
            )


def naming_words(config: Config, home: Path) -> list[str]:
    """Return the words that a later start in the same folder needs to import what `config` names.

    There are none if the user names it in that folder.
    """
    try:
        check_saved(config, home, (), read_settings(Path(config.folder)).config_dirs)
    except ConfigError:
        more = ",".join(config.task.packages)
        return [f"task.trainer={config.task.trainer}", *[f"task.packages=[{more}]"] * bool(more)]
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
    found = [path.parent.parent for path in sorted(start.glob("*/task/*.yaml"))]
    for folder in dict.fromkeys([*(start / place for place in config_dirs), *found]):
        if not _came_with(home, folder, start):
            for file in sorted(folder.glob("*/*.yaml")):
                with suppress(OSError, ValueError):
                    data = read_file(file, MOST_OF_YAML)
                    if any(top in data for top in tops):
                        yield from _named_in(parse_yaml(data))


def _came_with(home: Path, folder: Path, start: Path) -> bool:
    """Return True for a folder in a run directory, or below `start` around a run directory."""
    run = home.resolve()
    place = folder.resolve()
    is_around = run.is_relative_to(place) and not start.resolve().is_relative_to(place)
    return place.is_relative_to(run) or is_around


def _named_in(raw: Any) -> Iterator[str]:
    task = raw.get("task") if isinstance(raw, dict) else None
    if isinstance(task, dict):
        trainer = task.get("trainer")
        packages = task.get("packages")
        names = [trainer.partition(".")[0]] if isinstance(trainer, str) else []
        names += packages if isinstance(packages, list) else []
        yield from (name for name in names if isinstance(name, str) and name)
