"""The run directory: its files, made and read without following links."""

from __future__ import annotations

import itertools
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from trainer.checkpoints.files import write_file
from trainer.errors import ConfigError
from trainer.record import lease

METRICS = "metrics.jsonl"
EXIT = "exit.json"
CONFIG = "config.yaml"
_FILES = (CONFIG, EXIT, METRICS, lease.NAME)
_FOLDERS = ("checkpoints", "tensorboard")


def make_timestamped(base: Path) -> Path:
    """A new directory below `base`, named by the time."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    path = base / stamp
    numbers = itertools.count(2)
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            path = base / f"{stamp}_{next(numbers)}"


def check_plain(directory: Path) -> None:
    """Refuse a link or a pipe where a file or folder of a run belongs: writes would follow it."""
    for name in (*_FILES, *_FOLDERS):
        try:
            mode = (directory / name).lstat().st_mode
        except OSError:
            continue
        is_file = name in _FILES
        if not (stat.S_ISREG(mode) if is_file else stat.S_ISDIR(mode)):
            must = f"{name} must be a plain {'file' if is_file else 'folder'}, no link"
            advice = "remove it or give run.name=<new>"
            raise ConfigError(f"run directory {directory}: {must}; {advice}")


def check_writable(path: Path) -> None:
    """Raises ConfigError for a directory that cannot be made or written; makes nothing."""
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not existing.is_dir():
        why = f"{path} cannot be made, {existing} is not a directory"
        raise ConfigError(f"run.dir: {why}; choose another run.dir")
    if not os.access(existing, os.W_OK | os.X_OK):
        why = f"{path} cannot be written, {existing} is not writable"
        advice = "choose another run.dir, and with run.resume also a run.name"
        raise ConfigError(f"run.dir: {why}; {advice}")


def read_evaluation(directory: Path, step: int) -> dict[str, float]:
    """The evaluation that metrics.jsonl holds for `step`: a resume does not repeat it."""
    found: dict[str, float] = {}
    for _, entry in read_entries(directory / METRICS):
        if entry["step"] == step:
            found |= {n: v for n, v in entry.items() if n.startswith("eval/") and v is not None}
    return found


def read_entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(line, its values) of a metrics.jsonl, if it exists; a line that was cut off is skipped."""
    for line in _read_text(path).splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            yield line, entry


def _read_text(path: Path) -> str:
    """Raises ConfigError for a link, and for a pipe, which nobody may ever write."""
    if not path.exists():
        return ""
    if path.is_symlink() or not path.is_file():
        raise ConfigError(f"{path}: must be a plain file, no link; remove it")
    return path.read_text(encoding="utf-8", errors="replace")


def strict(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that JSON does not have become null, in nested mappings too."""
    plain = {k: strict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
    for key, value in plain.items():
        if isinstance(value, float) and not math.isfinite(value):
            plain[key] = None
    return plain


def write_exit(directory: Path, code: int, reason: str, **facts: Any) -> None:
    """Write exit.json: torchrun flattens every exit code to 1."""
    told = strict({"code": code, "reason": reason, **facts})
    replace_file(directory / EXIT, json.dumps(told, indent=1) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Write a file anew, whole or not at all. Links of its name are not followed."""
    staged = path.with_name(f".{path.name}.new")
    staged.unlink(missing_ok=True)
    write_file(staged, text.encode(), 0o666)
    os.replace(staged, path)
