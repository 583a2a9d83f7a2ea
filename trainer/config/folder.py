"""Settings of the working directory: lockstep.yaml, or [tool.lockstep] in pyproject.toml."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.config.plain_files import parse_yaml
from trainer.config.typed import build
from trainer.errors import ConfigError, one_line

NAMES = ("lockstep.yaml", "pyproject.toml")


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
    found = {}
    for name, parse in zip(NAMES, (_parse_yaml, _parse_toml), strict=True):
        if (folder / name).is_file():
            try:
                settings = parse((folder / name).read_text(encoding="utf-8"))
            except (ValueError, OSError) as error:
                raise ConfigError(f"{name} cannot be read: {one_line(error)}; fix it") from None
            if settings is not None:
                found[name] = _check(settings, name, folder)
    if len(found) > 1:
        raise ConfigError(f"config_dirs: {' and '.join(found)} both have settings; keep only one")
    return next(iter(found.values()), FolderSettings())


def _check(settings: Any, name: str, folder: Path) -> FolderSettings:
    """Return the settings in the file `name`, checked."""
    if not isinstance(settings, dict):
        raise ConfigError(f"{name}={settings}: must be a mapping")
    checked = build(FolderSettings, settings, f"{name}: ")
    places = [str(Path(place).expanduser()) for place in checked.config_dirs]
    for place in places:
        if not (folder / place).is_dir():
            raise ConfigError(f"{name}: config_dirs: {place} is not a directory; make or remove it")
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
