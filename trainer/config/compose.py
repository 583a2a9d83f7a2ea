"""Composition: files and overrides become a Config. The only module that knows Hydra."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import OmegaConf, open_dict
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from trainer.config import CONF
from trainer.config.guard import check_override
from trainer.config.rules import check
from trainer.config.schema import ONCE, Config, flatten
from trainer.config.typed import show, suggest
from trainer.errors import ConfigError, one_line

# What several values of a setting may be: glob(*) is never one.
SWEPT = ("SIMPLE_CHOICE_SWEEP", "CHOICE_SWEEP", "RANGE_SWEEP")
SEARCHED = (*SWEPT, "INTERVAL_SWEEP")
# Resolvers that see the configuration alone.
_RESOLVERS = ("oc.create", "oc.decode", "oc.select", "oc.dict.keys", "oc.dict.values")
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
    parsed = parse(overrides)
    return _override(_compose("config", parsed, config_dirs), parsed, find_options(config_dirs))


def load_run_config(
    place: str, overrides: Sequence[str], config_dirs: Sequence[str] = (), prefix: str = ""
) -> Config:
    """The Config that a run directory, or that of a checkpoint, was written with, overridden.

    Overrides are single values or whole groups. `run.resume` is `place`; errors about the
    directory begin with `prefix`.
    """
    options = find_options(config_dirs)
    saved = _read_saved(place, prefix)
    saved.run.resume = place
    parsed = [override for override in parse(overrides) if override.key_or_group != "run.resume"]
    for group, choice in _choose(parsed, options).items():
        if group in ("task", "experiment"):
            why = "the run directory has a task already; give single values"
            raise ConfigError(f"{group}={choice}: {why}")
        saved[group] = _compose(f"{group}/{choice}", [], config_dirs)[group]
    return _override(saved, parsed, options, prefix=f"{place}/config.yaml: ")


def _override(config: Any, parsed: Sequence[Any], options: Options, prefix: str = "") -> Config:
    """The Config of composed or saved settings and the values that replace some of them."""
    for override in parsed:
        if override.key_or_group not in options:
            _apply(override, config, options)
    with _explained(prefix):
        plain = OmegaConf.to_container(config, resolve=True)
    return check(plain, find_options())


def _apply(override: Any, config: Any, options: Options) -> None:
    """Set, add or delete one value of `config`."""
    key = override.key_or_group
    value = override.value()
    parent, _, name = key.rpartition(".")
    block = OmegaConf.select(config, parent) if parent else config
    is_known = OmegaConf.is_list(block) or (OmegaConf.is_dict(block) and name in block)
    is_new = override.is_add() or override.is_force_add()
    if not is_known and not is_new:
        known: Any = OmegaConf.to_container(config)
        raise ConfigError(f"{key} is not a setting{suggest(key, [*flatten(known), *options])}")
    previous = OmegaConf.select(config, key, throw_on_resolution_failure=False)
    if override.is_add() and previous is not None and not isinstance(value, (dict, list)):
        raise ConfigError(f"{override.input_line}: {key} is there already; leave out the '+'")
    if override.is_delete():
        with open_dict(config):
            del block[name]
        return
    with _explained(line=f"{key} is a group of settings: give {key}.<name>=<value>"):
        OmegaConf.update(config, key, value, force_add=is_new)


def _read_saved(place: str, prefix: str) -> Any:
    """The config.yaml of the run directory that `place` is or lies in."""
    home = Path(place)
    if (home / "manifest.json").is_file():
        home = home.resolve().parent.parent
    if not (home / "config.yaml").is_file():
        advice = "give a run directory, or one of its checkpoints"
        raise ConfigError(f"{prefix}{place}: has no config.yaml; {advice}")
    wrong = f"{prefix}{place}: its config.yaml is not that of a run"
    with _explained(f"{wrong}: "):
        saved: Any = OmegaConf.create((home / "config.yaml").read_text(encoding="utf-8"))
        groups = [field.name for field in dataclasses.fields(Config) if not field.metadata]
        if not all(OmegaConf.is_dict(block) for block in (saved, *map(saved.get, groups))):
            raise ConfigError(f"{wrong}: it has not all groups of settings")
        for key, value in ONCE.items():
            OmegaConf.update(saved, key, OmegaConf.select(saved, key, default=value))
        OmegaConf.set_struct(saved, True)
        saved.run.name = None  # a run lives where its directory is now
    return saved


@contextmanager
def _explained(prefix: str = "", line: str = "") -> Iterator[None]:
    """Raise ConfigError for what YAML, OmegaConf or Hydra refuse: `line`, or what they say.

    Within it no interpolation looks at the machine: config.yaml would hold what it reads.
    """
    known = BaseContainer._resolvers
    BaseContainer._resolvers = {name: known[name] for name in _RESOLVERS}
    try:
        yield
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException, HydraException) as error:
        message = one_line(error).split(" Config search path")[0]
        if key := getattr(error, "full_key", None):
            message = f"{key}: {str(error).splitlines()[0]}"
        if isinstance(error, (YAMLError, UnicodeDecodeError)):
            message = f"a file in it cannot be read: {message}"
        if "@task." in message:
            message += "; is the first line of the task's file '# @package _global_'?"
        if resolver := re.search(r"Unsupported interpolation type (\S+)", message):
            allowed = f"must be one of {', '.join(_RESOLVERS)}, or a plain ${{key}}"
            message = f"${{{resolver[1]}:...}}: {allowed}; let the task read what it needs"
        raise ConfigError(line or f"{prefix}{message}") from None
    finally:
        BaseContainer._resolvers = known


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(config.plain()))


def find_options(config_dirs: Sequence[str] = ()) -> dict[str, dict[str, list[Path]]]:
    """The options of every config group and their files, `{"task": {"cifar": [...]}, ...}`."""
    options: dict[str, dict[str, list[Path]]] = {}
    for root in [CONF, *map(Path, config_dirs)]:
        for file in sorted(root.glob("*/[!_]*.yaml")):
            group = file.parent.name
            if (CONF / group).is_dir():
                options.setdefault(group, {}).setdefault(file.stem, []).append(file)
    return options


def parse(overrides: Sequence[str], sweeps: Sequence[str] = ()) -> list[Any]:
    """Hydra's Override objects; `sweeps` are the kinds of several values that may be given.

    Raises ConfigError for words that are no `key=value`.
    """
    parser = OverridesParser.create()
    parsed: list[Any] = []
    for text in overrides:
        check_override(text)
        is_pair = "=" in text or text.startswith("~")
        if not is_pair or text.startswith(("=", "hydra.", "hydra/")):
            near = suggest(text, ["--help", "--config-dir"])
            raise ConfigError(f"{text!r} is not a setting: write key=value{near}")
        advice = "cannot be read as key=value; quote special characters: key=\"'a,b'\""
        with _explained(line=f"{text}: {advice}"):
            override: Any = parser.parse_override(text)
        if override.is_sweep_override() and override.value_type.name not in sweeps:
            advice = "several values need -m, as a,b or range(1,4); a list is written [a,b]"
            raise ConfigError(f"{text}: {advice}")
        parsed.append(override)
    return parsed


def _compose(name: str, parsed: Sequence[Any], config_dirs: Sequence[str]) -> Any:
    """Hydra's composition of a file, and of the options of groups that are chosen in `parsed`."""
    for folder in config_dirs:
        if not folder or not Path(folder).is_dir():
            raise ConfigError(f"--config-dir {folder}: no such directory")
    options = find_options(config_dirs)
    _choose(parsed, options)
    words = [override.input_line for override in parsed if override.key_or_group in options]
    folders = ",".join(repr(f"file://{Path(folder).resolve()}") for folder in config_dirs)
    words.append(f"hydra.searchpath=[{folders}]")
    where = f"--config-dir {' '.join(config_dirs)}" if config_dirs else str(CONF)
    GlobalHydra.instance().clear()
    with _explained(f"{where}: "), hydra.initialize_config_dir(str(CONF), "trainer", "1.3"):
        try:
            return hydra.compose(name, words)
        except ConfigCompositionException as error:
            if "You must specify 'task'" not in str(error):
                raise
    raise ConfigError(f"task is not chosen: give task=<name>, one of {', '.join(options['task'])}")


def _choose(parsed: Sequence[Any], options: Options) -> dict[str, str]:
    """The option of each group that is given, checked."""
    chosen: dict[str, str] = {}
    for override in parsed:
        group = override.key_or_group
        choice = override.value()
        if group not in options or override.is_delete():
            continue
        if override.is_add():
            advice = f"{group} is there already; leave out the '+'"
            raise ConfigError(f"{override.input_line}: {advice}")
        name = choice if isinstance(choice, str) else show(choice)
        files = options[group].get(name, [])
        if not files:
            hint = "; one of yours needs --config-dir" if group == "task" else ""
            near = suggest(name, options[group]) or hint
            raise ConfigError(f"{group}={name}: must be one of {', '.join(options[group])}{near}")
        if len(files) > 1:
            both = " and ".join(map(str, files))
            raise ConfigError(f"{group}={choice} stands twice, in {both}; rename yours")
        if chosen.setdefault(group, choice) != choice:
            before = f"{group}={chosen[group]} was given before; give one"
            raise ConfigError(f"{group}={choice}: {before}")
    return chosen


def answer(overrides: Sequence[str], flags: Sequence[str]) -> None:
    """Print what Hydra's `--cfg` and `--info` ask for. Runs nothing.

    Raises ConfigError for what Hydra would answer with its usage.
    """
    parser = get_args_parser()
    parser.exit_on_error = False
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come through as they are
    sys.argv = [sys.argv[0], *overrides, *flags]  # argparse wants the overrides together
    try:
        parser.parse_known_args(sys.argv[1:])
        hydra.main(str(CONF), "config", "1.3")(lambda _: None)()
    except (argparse.ArgumentError, HydraException, ValueError) as error:
        raise ConfigError(one_line(error).removeprefix("argument ")) from None
