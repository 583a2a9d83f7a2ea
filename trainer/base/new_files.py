"""Checks of a file or a folder that is to be written, before any work is done for it."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.base.errors import ConfigError


def check_name(subject: str, path: Path) -> None:
    """Raise ConfigError, which begins with `subject`, for a name that no file can have."""
    try:
        if not _exists(path):
            folder = next(each for each in path.absolute().parents if os.path.lexists(each))
            for part in path.absolute().relative_to(folder).parts:
                _exists(folder / part)  # below a folder that is not there no name is too long
    except (OSError, ValueError) as error:  # a name that is too long, or a null character
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{subject}: {why}; give another name") from None


def _exists(path: Path) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def check_creatable(subject: str, path: Path) -> None:
    """Raise ConfigError, which begins with `subject`, if `path` could not be created."""
    check_name(subject, path)
    folder = next(each for each in path.absolute().parents if os.path.lexists(each))
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "is not writable" if folder.is_dir() else "is not a directory"
        raise ConfigError(f"{subject}: cannot be written, {folder} {why}; give another name")


def check_new(subject: str, path: Path) -> None:
    """Raise ConfigError, which begins with `subject`, if `path` exists or could not be created."""
    check_creatable(subject, path)
    if os.path.lexists(path):
        raise ConfigError(f"{subject}: already exists; give another name")
