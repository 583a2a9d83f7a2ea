"""config.json: the settings of a run, within the limits that a resume can read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.base.errors import ConfigError, one_line
from trainer.base.plain_files import MOST_CONFIG_VALUES, parse_json, read_json
from trainer.core.config.schema import flatten

CONFIG = "config.json"
MANIFEST = "manifest.json"  # of a checkpoint
MOST_OF_CONFIG = 2**18  # bytes: with as many values as fit OmegaConf takes 80 s


def format_config(settings: Mapping[str, Any]) -> str:
    """Return groups of settings as the text of config.json.

    Raises ConfigError if a resume could not read them.
    """
    for group, values in settings.items():
        _check(f"{group}.options" if group == "task" else group, values)
    text = _format(settings) + "\n"
    if len(text.encode()) > MOST_OF_CONFIG or _count_values(_pair(settings)) > MOST_CONFIG_VALUES:
        most = f"{MOST_OF_CONFIG:,} bytes and {MOST_CONFIG_VALUES:,} values"
        must = f"all settings as JSON must be at most {most}"
        raise ConfigError(f"task.options: {must}; read long values from a file in the task")
    return text


def _check(key: str, values: Any) -> None:
    try:
        parse_json(_format(values).encode())
    except UnicodeEncodeError as error:
        why = f"the character {error.object[error.start]!r} cannot be encoded"
        raise ConfigError(f"{key}: {why}; use other characters") from None
    except (TypeError, ValueError) as error:
        why = f"a value cannot be written as JSON: {one_line(error)}"
        raise ConfigError(f"{key}: {why}; give plain values") from None


def _format(values: Any) -> str:
    return json.dumps(_pair(values), indent=1, ensure_ascii=False)


def read_config(path: Path) -> dict[str, Any]:
    """Return the groups of settings in a config.json. Raises OSError, and ValueError for what no
    run has written."""
    raw = read_json(path, MOST_OF_CONFIG)
    if _count_values(raw) > MOST_CONFIG_VALUES:
        raise ValueError(f"it has more than {MOST_CONFIG_VALUES:,} values")
    raw = _unpair(raw)
    return raw if isinstance(raw, dict) else {}


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in a config.json by full name. Raises as `read_config`."""
    return flatten(read_config(path))


def _count_values(value: Any) -> int:
    """Return the number of values, with those of lists and mappings inside."""
    parts = value.values() if isinstance(value, dict) else value
    return 1 + sum(map(_count_values, parts)) if isinstance(value, (dict, list)) else 1


def _pair(value: Any) -> Any:
    """Return a value that JSON keeps: a mapping with names of numbers becomes `{"": pairs}`."""
    if isinstance(value, (list, tuple)):
        return [_pair(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    pairs = {name: _pair(each) for name, each in value.items()}
    is_plain = all(isinstance(name, str) and name for name in pairs)
    return pairs if is_plain else {"": [[name, each] for name, each in pairs.items()]}


def _unpair(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpair(each) for each in value]
    if not isinstance(value, dict):
        return value
    if [*value] != [""]:
        return {name: _unpair(each) for name, each in value.items()}
    try:
        return {name: _unpair(each) for name, each in value[""]}
    except (TypeError, ValueError):
        raise ValueError("the name '' must have pairs of a name and a value") from None
