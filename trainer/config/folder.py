"""Settings of the working directory: lockstep.yaml, or [tool.lockstep] in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from trainer.config.typed import convert, unknown
from trainer.errors import ConfigError, one_line

NAMES = ("lockstep.yaml", "pyproject.toml")


def read_config_dirs(folder: Path) -> list[str]:
    """Return `config_dirs` of the folder's settings; empty if there are none.

    Raises ConfigError for a file that cannot be read, an unknown name, a missing folder, and if
    both files contain settings.
    """
    found = {}
    for name, read in zip(NAMES, (_read_yaml, _read_toml), strict=True):
        if (folder / name).is_file():
            try:
                settings = read((folder / name).read_text(encoding="utf-8"))
            except (ValueError, OSError) as error:
                raise ConfigError(f"{name} cannot be read: {one_line(error)}; fix it") from None
            if settings is not None:
                found[name] = _check(settings, name, folder)
    if len(found) > 1:
        raise ConfigError(f"config_dirs: {' and '.join(found)} both have settings; keep only one")
    return next(iter(found.values()), [])


def _check(settings: Any, name: str, folder: Path) -> list[str]:
    """Return `config_dirs` of the settings in the file `name`, checked."""
    settings = convert(dict[str, Any], settings, name)
    for key in settings:
        if key != "config_dirs":
            raise unknown(f"{name}: ", key, ["config_dirs"])
    places = convert(list[str], settings.get("config_dirs", []), f"{name}: config_dirs")
    places = [str(Path(place).expanduser()) for place in places]
    for place in places:
        if not (folder / place).is_dir():
            raise ConfigError(f"{name}: config_dirs: {place} is not a directory; make or remove it")
    return places


def _read_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(one_line(error)) from None


def _read_toml(text: str) -> Any:
    """Return [tool.lockstep], or None if it is missing. Raises ValueError for invalid TOML."""
    if "lockstep" not in text:
        return None
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    tools = tomllib.loads(text).get("tool")
    return tools.get("lockstep") if isinstance(tools, dict) else None
