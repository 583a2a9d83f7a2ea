"""The run directory: its files, created and read without following links."""

from __future__ import annotations

import itertools
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from trainer.checkpoints.files import replace_file
from trainer.config.plain_files import parse_json, read_json, read_lines
from trainer.errors import ConfigError
from trainer.record import lease

METRICS = "metrics.jsonl"
EXIT = "exit.json"
CONFIG = "config.yaml"
BAD_STEP = "bad_step"  # in metrics.jsonl: why a step was skipped
_FILES = (CONFIG, EXIT, METRICS, lease.NAME)
_FOLDERS = ("checkpoints", "tensorboard")
MOST_STEPS = 2**53
MOST_OF_EXIT = 2**20  # bytes
_EXIT: dict[str, tuple[type, ...]] = {
    **{"code": (int,), "reason": (str,), "step": (int,)},
    **{"best": (int, float), "metrics": (dict,)},
}


def make_timestamped(base: Path) -> Path:
    """Create a new directory in `base`, named by the time."""
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
    """Raise ConfigError if a run's file or folder is a link or a pipe: writes would follow it."""
    for name in (*_FILES, *_FOLDERS):
        try:
            mode = (directory / name).lstat().st_mode
        except OSError:
            continue
        is_file = name in _FILES
        if not (stat.S_ISREG(mode) if is_file else stat.S_ISDIR(mode)):
            must = f"{name} must be a plain {'file' if is_file else 'folder'}, not a link"
            advice = "remove it or give run.name=<new>"
            raise ConfigError(f"run directory {directory}: {must}; {advice}")


def check_writable(path: Path) -> None:
    """Raise ConfigError if a directory cannot be created or written; create nothing."""
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not existing.is_dir():
        why = f"{path} cannot be created, {existing} is not a directory"
        raise ConfigError(f"run.dir: {why}; choose another run.dir")
    if not os.access(existing, os.W_OK | os.X_OK):
        why = f"{path} cannot be written, {existing} is not writable"
        advice = "choose another run.dir, and with run.resume also a run.name"
        raise ConfigError(f"run.dir: {why}; {advice}")


def read_evaluation(directory: Path, step: int) -> dict[str, float]:
    """Return the evaluation of `step` in metrics.jsonl, which a resume does not repeat."""
    metrics: dict[str, float] = {}
    for _, entry in read_entries(directory / METRICS):
        if entry["step"] == step:
            metrics |= {n: v for n, v in entry.items() if n.startswith("eval/") and v is not None}
    return metrics


def read_entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (line, its values) of a metrics.jsonl, if it exists; skip a damaged line.

    Raises ConfigError for a link or a pipe, and for a file that is too large.
    """
    if not path.exists():
        return
    if path.is_symlink() or not path.is_file():
        raise ConfigError(f"{path}: must be a plain file, not a link; remove it")
    try:
        yield from parse_entries(read_lines(path))
    except OSError as error:
        advice = "move it out of the run directory"
        raise ConfigError(f"{path}: {error.strerror}; {advice}") from None


def parse_entries(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (line, its values) of lines of a metrics.jsonl; skip what is no entry."""
    for line in lines:
        with suppress(ValueError):
            entry = parse_json(line)
            step = entry.get("step") if isinstance(entry, dict) else None
            if type(step) is int and 0 <= step < MOST_STEPS:
                yield line, entry


def strict(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace numbers that JSON does not have by None, in nested mappings too."""
    plain = {k: strict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
    for key, value in plain.items():
        if isinstance(value, float) and not math.isfinite(value):
            plain[key] = None
    return plain


def write_exit(directory: Path, code: int, reason: str, **facts: Any) -> None:
    """Write exit.json, since torchrun turns every exit code other than 0 into 1."""
    content = strict({"code": code, "reason": reason, **facts})
    replace_file(directory / EXIT, json.dumps(content, indent=1) + "\n")


def read_exit(directory: Path) -> dict[str, Any]:
    """Return the facts of exit.json that have their types; none if it is missing or damaged."""
    try:
        raw = read_json(directory / EXIT, MOST_OF_EXIT)
    except (OSError, ValueError):
        return {}
    facts = raw if isinstance(raw, dict) else {}
    facts = {name: facts[name] for name in _EXIT if type(facts.get(name)) in _EXIT[name]}
    if "metrics" in facts:
        values = facts["metrics"].items()
        facts["metrics"] = {name: v for name, v in values if type(v) in (int, float, type(None))}
    return facts
