"""Composition: build a Config from YAML files and command-line overrides, with Hydra."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import hydra
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf, open_dict
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from trainer.base.errors import ConfigError, one_line
from trainer.base.folders import CONF
from trainer.base.plain_files import MOST_DEPTH, check_yaml
from trainer.core.config.copies import copy_of
from trainer.core.config.expansion import limited
from trainer.core.config.rules import check, check_path
from trainer.core.config.saved_config import CONFIG, MANIFEST, format_config, read_config
from trainer.core.config.schema import LAYOUT, Config, flatten
from trainer.core.config.stores import is_address
from trainer.core.config.targets import check_override
from trainer.core.config.typed import show, suggest, translate
from trainer.core.config.working_folder import check_saved, find_options

# Where ranks meet belongs to the start: a saved address may be another machine's.
MEETING = {"dist.init": "env", "dist.address": None, "dist.path": None}
# Kinds of Hydra sweep overrides that `-m` accepts. glob(*) is not among them.
_CHOICES = ("SIMPLE_CHOICE_SWEEP", "CHOICE_SWEEP", "RANGE_SWEEP")
SWEEPS = {"none": (), "choices": _CHOICES, "spaces": (*_CHOICES, "INTERVAL_SWEEP")}
QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")  # a string of an override
MOST_WORDS = 2_000  # of an override: 2 s, and four times as long for twice as many
# OmegaConf resolvers that read nothing but the configuration.
_RESOLVERS = ("oc.create", "oc.decode", "oc.select", "oc.dict.keys", "oc.dict.values")
_DEFAULTS = "write '- override /optim: adamw' in defaults, or '- /model: small' for your own group"
Options = Mapping[str, Mapping[str, list[Path]]]  # group -> option -> its files


@limited()
def load_config(
    overrides: Sequence[str] = (), config_dirs: Sequence[str] = (), task: type | None = None
) -> Config:
    """Return the Config from `conf/`, the folders of `--config-dir` and `key=value` overrides.

    With `run.resume=<path>` and without `task=`, return the Config of the run to resume. With a
    class as `task`, as in a notebook, no file is needed: `task.name` is the class's in lower case.
    Raises ConfigError, in one line, for invalid input.
    """
    if task is not None:
        overrides = [f"task.trainer={task.__module__}.{task.__qualname__}", *overrides]
    assignments = dict(override.split("=", 1) for override in overrides if "=" in override)
    location = assignments.get("run.resume", "auto")
    if "task" not in assignments and location not in ("auto", "null", ""):
        return load_run_config(location, overrides, config_dirs, prefix="run.resume=")
    parsed = parse(overrides)
    options = find_options(config_dirs)
    is_of_file = task is None or "task" in assignments
    config = _compose("config", parsed, config_dirs, (["~task"] if not is_of_file else []))
    if task is not None and not is_of_file:
        with open_dict(config):
            config.task.merge_with({"name": task.__name__.lower(), "trainer": None})
    for group, choice in _choose(parsed, options).items():  # they win over the task's own values
        if group == "strategy":
            config[group].merge_with(_preset(options[group][choice][0]))
        elif not (CONF / group).is_dir():  # a group of the user's own
            config.merge_with(_compose(None, [], config_dirs, [f"+{group}={choice}"]))
    return _override(config, parsed, options)


@limited()
def load_run_config(
    location: str, overrides: Sequence[str], config_dirs: Sequence[str] = (), prefix: str = ""
) -> Config:
    """Return the saved Config of a run, with `overrides` applied.

    `location` is a run directory or one of its checkpoints; `run.resume` is set to it. Overrides
    are single values or whole groups. Errors about the directory start with `prefix`.
    """
    options = find_options(config_dirs)
    home = _find_home(location, prefix)
    wrong = f"{prefix}{location}: its {CONFIG} was not written by a run"
    saved = _read_saved(home, wrong)
    parsed = [override for override in parse(overrides) if override.key_or_group != "run.resume"]
    with _explained(f"{wrong}: "):
        saved.run.resume = location
        _replace_groups(saved, parsed, options, config_dirs)
    config = _override(saved, parsed, options, prefix=f"{location}/{CONFIG}: ")
    check_saved(config, home, {override.key_or_group for override in parsed}, config_dirs)
    return config


def _replace_groups(
    saved: Any, parsed: Sequence[Any], options: Options, config_dirs: Sequence[str]
) -> None:
    """Replace whole groups of saved settings by the options that overrides choose."""
    for group, choice in _choose(parsed, options).items():
        if group in ("task", "experiment"):
            why = "the run directory already has a task; override single settings"
            raise ConfigError(f"{group}={choice}: {why}")
        composed = _compose(None, [], config_dirs, [f"+{group}={choice}"])
        if group == "strategy":  # precision and SyncBN belong to the run
            run_keys = [key for key in saved[group] if not f"strategy.{key}.".startswith(LAYOUT)]
            composed[group].merge_with({key: saved[group][key] for key in run_keys})
            composed[group].merge_with(_preset(options[group][choice][0]))
        if (CONF / group).is_dir():
            saved[group] = composed[group]
        else:  # a group of the user's own
            with _explained(f"{group}={choice}: "), open_dict(saved):
                saved.merge_with(composed)


def _preset(path: Path) -> Any:
    """Return what a file of a group sets itself, without its defaults."""
    preset: Any = OmegaConf.load(path)
    preset.pop("defaults", None)
    return preset


NAMED_BY_USERS = ("launch.resources", "launch.labels")  # groups with names that Ray knows


def _override(config: Any, parsed: Sequence[Any], options: Options, prefix: str = "") -> Config:
    """Return the checked Config of composed or saved settings, with overrides applied."""
    listed = set(OmegaConf.select(config, "task.options", default=None) or ())
    for override in parsed:
        if override.key_or_group not in options:
            _apply(override, config, options)
    with _explained(prefix):
        plain: Any = OmegaConf.to_container(config, resolve=True)
    format_config(plain)  # what it cannot hold is refused before anything is done
    checked = check(plain, find_options())
    added = {o.key_or_group for o in parsed if o.is_add() or o.is_force_add()}
    new = [name for name in checked.task.options if name not in listed]
    unlisted = [name for name in new if f"task.options.{name}" not in added]
    return dataclasses.replace(checked, unlisted=unlisted)


def _apply(override: Any, config: Any, options: Options) -> None:
    """Set, add or delete one value of `config`."""
    key = override.key_or_group
    value = override.value()
    parent, _, name = key.rpartition(".")
    block = OmegaConf.select(config, parent) if parent else config
    is_known = OmegaConf.is_list(block) or (OmegaConf.is_dict(block) and name in block)
    # `Options` of the task may declare options with defaults that its YAML does not list.
    is_option = parent in ("task.options", *NAMED_BY_USERS) and not override.is_delete()
    is_new = override.is_add() or override.is_force_add() or (is_option and not is_known)
    is_new = is_new or (key in NAMED_BY_USERS and isinstance(value, dict))
    if not is_known and not is_new:
        settings: Any = OmegaConf.to_container(config)
        near = suggest(key, [*flatten(settings), *options])
        if parent in ("optim", "schedule"):
            near = near or f"; give +{override.input_line} to add an argument of its class"
        near = near or "; use one of docs/settings.md, or of those that `--cfg job` prints"
        raise ConfigError(f"{key} is not a setting{near}")
    previous = OmegaConf.select(config, key, throw_on_resolution_failure=False)
    if override.is_add() and previous is not None and not isinstance(value, (dict, list)):
        raise ConfigError(f"{override.input_line}: {key} already exists; leave out the '+'")
    if override.is_delete():
        with open_dict(config):
            del block[name]
        return
    with _explained(line=f"{key} is a group of settings: give {key}.<name>=<value>"):
        OmegaConf.update(config, key, value, force_add=is_new)


def _find_home(location: str, prefix: str) -> Path:
    """Return a run directory, or the run directory of a checkpoint."""
    if is_address(location):
        return copy_of(location, has_checkpoints=False)
    check_path(prefix.rstrip("=") or "the run directory", location)
    home = Path(location)
    if (home / MANIFEST).is_file():
        home = home.resolve().parent.parent
    if not (home / CONFIG).is_file():
        advice = "give a run directory, or one of its checkpoints"
        if steps := [path.name for path in sorted(home.parent.glob("step-*")) if not home.exists()]:
            raise ConfigError(f"{prefix}{location}: must be one of {', '.join(steps)}")
        raise ConfigError(f"{prefix}{location}: has no {CONFIG}; {advice}")
    return home


def _read_saved(home: Path, wrong: str) -> Any:
    """Return the settings in a run directory. Raises ConfigError, beginning with `wrong`."""
    try:
        raw = read_config(home / CONFIG)
    except OSError as error:
        raise ConfigError(f"{home}/{CONFIG}: {error.strerror}; make it readable") from None
    except ValueError as error:
        raise ConfigError(f"{wrong}: {one_line(error)}; give another") from None
    for key, value in flatten(raw).items():
        if "${" in str(value):  # a run has resolved them
            raise ConfigError(f"{wrong}: {key} has an interpolation, ${{...}}; write its value")
    with _explained(f"{wrong}: "):
        saved: Any = OmegaConf.create(raw)
        groups = [field.name for field in dataclasses.fields(Config) if not field.metadata]
        if not all(OmegaConf.is_dict(block) for block in (saved, *map(saved.get, groups))):
            raise ConfigError(f"{wrong}: must have all groups of settings")
        OmegaConf.set_struct(saved, True)
        saved.run.name = None  # the directory may have been renamed or moved
        for key, value in MEETING.items():
            OmegaConf.update(saved, key, value)
    return saved


@contextmanager
def _explained(prefix: str = "", line: str = "") -> Iterator[None]:
    """Turn errors of YAML, OmegaConf and Hydra into ConfigError: `line`, or their message.

    Within the block, interpolations cannot read the environment or files: their values would be
    written to config.json.
    """
    resolvers = BaseContainer._resolvers
    BaseContainer._resolvers = {name: resolvers[name] for name in _RESOLVERS}
    try:
        yield
    except RecursionError:
        raise ConfigError(line or f"{prefix}values are nested too deep; use fewer levels") from None
    except ConfigError:
        raise
    except (YAMLError, ValueError, OmegaConfBaseException, HydraException) as error:
        if not str(error) and error.__cause__:  # Hydra's, around OmegaConf's
            error = error.__cause__
        message = one_line(error).split(" Config search path")[0]
        if key := getattr(error, "full_key", None):
            message = f"{key}: {str(error).splitlines()[0]}"
        if not isinstance(error, (OmegaConfBaseException, HydraException)):
            message = f"a YAML file cannot be read: {message}; correct it"
        if "RecursionError raised" in message:
            message = f"{message.partition(': ')[0]}: interpolations lead too far; use fewer levels"
        if re.search(r"@(task|experiment)\.", message) and "at the end of" not in message:
            first = "the first line of the task's file must be '# @package _global_'"
            message = f"{first}: {message}"
        if isinstance(error, ConfigCompositionException):
            message = f"{message.rstrip('.')}; {_DEFAULTS}"
        if resolver := re.search(r"Unsupported interpolation type (\S+)", message):
            allowed = f"must be one of {', '.join(_RESOLVERS)}, or a plain ${{key}}"
            message = f"${{{resolver[1]}:...}}: {allowed}; read other values inside the task"
        raise ConfigError(line or f"{prefix}{message}") from None
    finally:
        BaseContainer._resolvers = resolvers


def parse(
    overrides: Sequence[str], sweeps: Literal["none", "choices", "spaces"] = "none"
) -> list[Any]:
    """Return Hydra's Override objects. `sweeps`: whether one may have several values, or a space.

    Raises ConfigError for a word that is not `key=value`.
    """
    parser = OverridesParser.create()
    parsed: list[Any] = []
    for text in overrides:
        check_override(text)
        _check_size(text)
        is_pair = "=" in text or text.startswith("~")
        if is_pair and text.lstrip("+~").startswith(("hydra.", "hydra/")):
            advice = "settings of Hydra itself are of trainer.sweep only; leave it out"
            raise ConfigError(f"{text}: {advice}")
        if not is_pair or text.startswith("="):
            if "=" in overrides:
                raise ConfigError(f"{text} = ...: write key=value without spaces")
            near = suggest(text, ["--help", "--config-dir"])
            raise ConfigError(f"{text!r} is not a setting: write key=value{near}")
        key, _, value = text.partition("=")
        quoted = f"{key}='a,b'" if "'" in value else f"{key}='{value}'"
        advice = f'cannot be read as key=value; quote special characters: "{quoted}"'
        with _explained(line=f"{text}: {advice}"):
            override: Any = parser.parse_override(text)
        if override.is_sweep_override() and override.value_type.name not in SWEEPS[sweeps]:
            advice = "several values (a,b or range(1,4)) need sweep; write a list as [a,b]"
            raise ConfigError(f"{text}: {advice}")
        parsed.append(override)
    return parsed


def _check_size(text: str) -> None:
    """Raise ConfigError for an override whose list or nesting Hydra's parser takes minutes for."""
    key = text.partition("=")[0]
    text = QUOTED.sub(lambda quoted: quoted[0] if "${" in quoted[0] else "''", text)
    if text.count(",") >= MOST_WORDS:
        raise ConfigError(f"""{key}: must be at most {MOST_WORDS:,} values;
            read more from a file in the task""")
    steps = ((each in "[{(") - (each in ")}]") for each in text)
    if max(itertools.accumulate(steps), default=0) > MOST_DEPTH:
        raise ConfigError(f"{key}: values are nested more than {MOST_DEPTH} deep; use fewer levels")


def _compose(
    name: str | None,
    parsed: Sequence[Any],
    config_dirs: Sequence[str],
    added: Sequence[str] = (),
) -> Any:
    """Compose the file `name` with the group options that `parsed` chooses, and `added` words."""
    for folder in config_dirs:
        if not folder or not Path(folder).is_dir():
            raise ConfigError(f"--config-dir {folder}: must be a directory")
    options = find_options(config_dirs)
    _choose(parsed, options)
    words = [override.input_line for override in parsed if override.key_or_group in options]
    words += [*added, _search_path(config_dirs)]
    where = f"--config-dir {' '.join(config_dirs)}" if config_dirs else str(CONF)
    GlobalHydra.instance().clear()
    with _explained(f"{where}: "), hydra.initialize_config_dir(str(CONF), "trainer", "1.3"):
        try:
            return hydra.compose(name, words)
        except ConfigCompositionException as error:
            unused = re.search(r"Could not override '(\w+)'", str(error))
            for override in parsed:  # no override is meant if the mistake is in a file's defaults
                if unused and override.key_or_group == unused[1]:
                    advice = f"add '- /{unused[1]}: <name>' to the defaults in the task's file"
                    raise ConfigError(
                        f"{override.input_line}: the task does not use this group; {advice}"
                    ) from None
            if "You must specify 'task'" not in str(error):
                raise
    raise ConfigError(f"task is missing: give task=<name>, one of {', '.join(options['task'])}")


class CheckedSource(FileConfigSource):
    """A folder whose files are checked as they are read: one that a run does not use may be bad."""

    @staticmethod
    def scheme() -> str:
        return "checked"

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        if path.is_file():
            check_yaml(path)
        try:
            return super().load_config(config_path)
        except OSError as error:  # OmegaConf's for a number, or a set
            if not path.is_file():
                raise
            raise ConfigError(f"""{path}: must be settings, as in 'key: value':
                {one_line(error)}""") from None


def _search_path(folders: Sequence[str]) -> str:
    """Return Hydra's setting of the user's config folders."""
    Plugins.instance().register(CheckedSource)
    places = ",".join(repr(f"checked://{Path(folder).resolve()}") for folder in folders)
    return f"hydra.searchpath=[{places}]"


def _choose(parsed: Sequence[Any], options: Options) -> dict[str, str]:
    """Return the chosen option of each overridden group.

    Raises ConfigError for unknown, ambiguous and conflicting options.
    """
    chosen: dict[str, str] = {}
    for override in parsed:
        group = override.key_or_group
        choice = override.value()
        if group not in options or override.is_delete():
            continue
        if override.is_add():
            advice = f"{group} already exists; leave out the '+'"
            raise ConfigError(f"{override.input_line}: {advice}")
        name = choice if isinstance(choice, str) else show(choice)
        files = options[group].get(name, [])
        if not files:
            own = f"; your own is <folder>/{group}/{name}.yaml, with --config-dir <folder>"
            if name.endswith((".yaml", ".py")):
                own = f"; give the name without folder and ending: {group}={Path(name).stem}"
            near = translate(group, name, options[group]) or own * (group not in ("dist", "launch"))
            raise ConfigError(f"{group}={name}: must be one of {', '.join(options[group])}{near}")
        if len(files) > 1:
            both = " and ".join(map(str, files))
            raise ConfigError(f"{group}={choice} is defined twice, in {both}; rename yours")
        if chosen.setdefault(group, choice) != choice:
            before = f"{group}={chosen[group]} was given before; give only one"
            raise ConfigError(f"{group}={choice}: {before}")
    return chosen


def answer(overrides: Sequence[str], flags: Sequence[str], config_dirs: Sequence[str] = ()) -> None:
    """Print the output of Hydra's `--cfg` or `--info`, without training.

    Raises ConfigError where Hydra would print its usage and exit.
    """
    parser = get_args_parser()
    parser.exit_on_error = False
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors, does not print them
    # argparse needs the overrides in one block, and takes one --config-dir only
    sys.argv = [sys.argv[0], *overrides, _search_path(config_dirs), *flags]
    try:
        parser.parse_known_args(sys.argv[1:])
        hydra.main(str(CONF), "config", "1.3")(lambda _: None)()
    except (argparse.ArgumentError, HydraException, ValueError) as error:
        raise ConfigError(one_line(error).removeprefix("argument ")) from None
