"""Composition: files and overrides become a Config. The only module that knows Hydra."""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.config import CONF
from trainer.config.guard import check_override, pure_resolvers
from trainer.config.rules import check
from trainer.config.schema import Config, flatten
from trainer.config.typed import show, suggest
from trainer.errors import ConfigError, one_line

# The sweep syntax that lists its values; glob(*) and interval(0,1) do not.
_LISTED = ("SIMPLE_CHOICE_SWEEP", "CHOICE_SWEEP", "RANGE_SWEEP")
Options = Mapping[str, Mapping[str, list[Path]]]  # group -> option -> its files


def load_config(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> Config:
    """The Config of `conf/`, the folders of `--config-dir` and `key=value` overrides.

    Without `task=` and with `run.resume=<path>` it is that of the run to resume, as
    `load_run_config` gives it. Raises ConfigError, one line, for whatever cannot be.
    """
    given = dict(override.split("=", 1) for override in overrides if "=" in override)
    place = given.get("run.resume", "auto")
    if "task" not in given and place not in ("auto", "null", ""):
        return load_run_config(place, overrides, config_dirs, prefix="run.resume=")
    return check(_compose("config", overrides, config_dirs), _find_options(()))


def load_run_config(
    place: str, overrides: Sequence[str], config_dirs: Sequence[str] = (), prefix: str = ""
) -> Config:
    """The Config that a run directory, or that of a checkpoint, was written with, overridden.

    Overrides are single values or whole groups. `run.resume` is `place`; errors about the
    directory begin with `prefix`.
    """
    from omegaconf import OmegaConf

    options = _find_options(config_dirs)
    saved = _read_saved(place, prefix)
    for override in parse(overrides):
        key = override.key_or_group
        value = override.value()
        if key in ("task", "experiment"):
            why = "the run directory has a task already; give single values"
            raise ConfigError(f"{key}={value}: {why}")
        if key in options:
            _check_choice(key, value, options)
            saved[key] = _compose(f"{key}/{value}", [], config_dirs)[key]
            continue
        known = flatten(typing.cast(dict, OmegaConf.to_container(saved)))
        with _explained(f"{key} is not a setting{suggest(key, known)}", is_whole=True):
            OmegaConf.update(saved, key, value, force_add=override.is_add())
    saved.run.resume = place
    with _explained(f"{place}/config.yaml"), pure_resolvers():
        return check(OmegaConf.to_container(saved, resolve=True), _find_options(()))


def _read_saved(place: str, prefix: str) -> Any:
    """The config.yaml of the run directory that `place` is or lies in."""
    from omegaconf import OmegaConf

    home = Path(place)
    if (home / "manifest.json").is_file():
        home = home.resolve().parent.parent
    if not (home / "config.yaml").is_file():
        advice = "give a run directory, or one of its checkpoints"
        raise ConfigError(f"{prefix}{place}: has no config.yaml; {advice}")
    wrong = f"{prefix}{place}: its config.yaml is not that of a run"
    with _explained(wrong):
        saved: Any = OmegaConf.create((home / "config.yaml").read_text(encoding="utf-8"))
        groups = [field.name for field in dataclasses.fields(Config)]
        is_dict = OmegaConf.is_dict(saved)
        if not is_dict or not all(OmegaConf.is_dict(saved.get(group)) for group in groups):
            raise ConfigError(f"{wrong}: it has not all groups of settings")
        OmegaConf.set_struct(saved, True)
        saved.run.name = None  # a run lives where its directory is now
    return saved


@contextmanager
def _explained(line: str, is_whole: bool = False) -> Iterator[None]:
    """Raise ConfigError `<line>: <message>`, or `line` alone, for what YAML or OmegaConf refuse."""
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(line if is_whole else f"{line}: {one_line(error)}") from None


def to_yaml(config: Config) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def list_choices(config_dirs: Sequence[str] = ()) -> dict[str, list[str]]:
    """The options of every config group, `{"task": ["cifar", "text"], ...}`."""
    return {group: sorted(options) for group, options in _find_options(config_dirs).items()}


def _find_options(config_dirs: Sequence[str]) -> dict[str, dict[str, list[Path]]]:
    options: dict[str, dict[str, list[Path]]] = {}
    for root in [CONF, *map(Path, config_dirs)]:
        for file in sorted(root.glob("*/[!_]*.yaml")):
            group = file.parent.name
            if (CONF / group).is_dir():
                options.setdefault(group, {}).setdefault(file.stem, []).append(file)
    return options


def parse(overrides: Sequence[str], is_sweep: bool = False) -> list[Any]:
    """Hydra's Override objects. Raises ConfigError for words that are no `key=value`."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    for text in overrides:
        check_override(text)
        is_pair = "=" in text or text.startswith("~")
        if not is_pair or text.startswith(("=", "hydra.", "hydra/")):
            near = suggest(text, ["--help", "--config-dir"])
            raise ConfigError(f"{text!r} is not a setting: write key=value{near}")
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException:
            advice = "cannot be read as key=value; quote special characters: key=\"'a,b'\""
            raise ConfigError(f"{text}: {advice}") from None
        is_listed = override.value_type is not None and override.value_type.name in _LISTED
        if override.is_sweep_override() and not (is_sweep and is_listed):
            advice = "several values need -m, as a,b or range(1,4); a list is written [a,b]"
            raise ConfigError(f"{text}: {advice}")
        parsed.append(override)
    return parsed


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each job of a sweep."""
    choices = []
    for override in parse(overrides, is_sweep=True):
        values = [override.input_line]
        if override.is_sweep_override():
            key = override.get_key_element()
            listed = [f"{key}={value}" for value in override.sweep_string_iterator()]
            values = listed or values
        choices.append(values)
    return [list(job) for job in itertools.product(*choices)]


def _check_choice(group: str, choice: Any, options: Options) -> None:
    known = options[group]
    if not isinstance(choice, str) or choice not in known:
        near = suggest(choice, known) if isinstance(choice, str) else ""
        if group == "task" and isinstance(choice, str):
            near = near or "; one of yours needs --config-dir"
        raise ConfigError(f"{group}={show(choice)}: must be one of {', '.join(known)}{near}")
    if len(known[choice]) > 1:
        both = " and ".join(map(str, known[choice]))
        raise ConfigError(f"{group}={choice} stands twice, in {both}; rename yours")


def _compose(name: str, overrides: Sequence[str], config_dirs: Sequence[str]) -> dict[str, Any]:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    for folder in config_dirs:
        if not folder or not Path(folder).is_dir():
            raise ConfigError(f"--config-dir {folder}: no such directory")
    options = _find_options(config_dirs)
    parsed = parse(overrides)
    groups = _check_groups(parsed, options)
    where = f"--config-dir {' '.join(config_dirs)}" if config_dirs else str(CONF)
    search = search_path(config_dirs)
    GlobalHydra.instance().clear()
    opened = initialize_config_dir(str(CONF), version_base="1.3", job_name="trainer")
    with opened, pure_resolvers("now", "hydra"):
        try:
            composed = compose(name, [*overrides, *search])
            with pure_resolvers():  # Hydra's own node, which we drop, needs those two
                return typing.cast(dict, OmegaConf.to_container(composed, resolve=True))
        except (YAMLError, UnicodeDecodeError) as error:
            line = f"{where}: a file in it cannot be read: {one_line(error)}"
            raise ConfigError(line) from None
        except (HydraException, OmegaConfBaseException) as error:
            if "You must specify 'task'" in str(error):
                names = ", ".join(options["task"])
                line = f"task is not chosen: give task=<name>, one of {names}"
                raise ConfigError(line) from None
            _name_unknown(parsed, options, where, lambda: compose(name, [*groups, *search]))
            key = getattr(error, "full_key", None)  # of an interpolation
            line = f"{key}: {str(error).splitlines()[0]}" if key else one_line(error)
            raise ConfigError(line) from None


def search_path(config_dirs: Sequence[str]) -> list[str]:
    """The override that has Hydra look into the folders of `--config-dir` too."""
    folders = ",".join(repr(f"file://{Path(folder).resolve()}") for folder in config_dirs)
    return [f"hydra.searchpath=[{folders}]"] if config_dirs else []


def _check_groups(parsed: Sequence[Any], options: Options) -> list[str]:
    """The overrides that choose an option of a group, each checked."""
    chosen: dict[str, Any] = {}
    groups = []
    for override in parsed:
        group = override.key_or_group
        if group not in options:
            continue
        groups.append(override.input_line.lstrip("+"))
        value = override.value()
        if override.is_add():
            advice = f"{group} is there already; leave out the '+'"
            raise ConfigError(f"{override.input_line}: {advice}")
        if override.is_delete():
            continue
        _check_choice(group, value, options)
        if chosen.setdefault(group, value) != value:
            before = f"{group}={chosen[group]} was given before; give one"
            raise ConfigError(f"{group}={value}: {before}")
    return groups


def _name_unknown(parsed: Sequence[Any], options: Options, where: str, compose_base: Any) -> None:
    """Raise for the first override whose key does not exist: Hydra advises to add it with `+`."""
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        base = compose_base()
    except (HydraException, OmegaConfBaseException) as error:
        hint = "; is the first line of the task's file '# @package _global_'?"
        hint = hint if "@task." in str(error) else ""
        line = one_line(error).split(" Config search path")[0]
        raise ConfigError(f"{where}: {line}{hint}") from None
    known = [*flatten(typing.cast(dict, OmegaConf.to_container(base))), *options]
    for override in parsed:
        key = override.key_or_group
        value = OmegaConf.select(base, key, default=known)
        exists = value is not known
        if override.is_add() and exists:
            raise ConfigError(f"{override.input_line}: {key} is there already; leave out the '+'")
        if isinstance(value, DictConfig) and key not in options:
            raise ConfigError(f"{key} is a group of settings: give {key}.<name>=<value>")
        if not override.is_add() and key not in options and not exists:
            raise ConfigError(f"{key} is not a setting{suggest(key, known)}")
