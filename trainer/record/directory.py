"""The run directory: where a run lives, what it goes on from, and how it ended."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeGuard

from trainer.checkpoints import transaction as checkpoint
from trainer.config.compose import to_yaml
from trainer.config.schema import Config
from trainer.distributed.launchers import Launcher
from trainer.errors import CheckpointError, ConfigError, RunError
from trainer.record.lease import NAME, Lease, check_free, last_facts

# What belongs to the run and cannot change within it: the samples follow from these.
FIXED = ("task.name", "run.seed", "data.global_batch")
_NOT_COMPARED = ("run.resume", "run.name", "run.dir")
METRICS = "metrics.jsonl"
_FILES = ("config.yaml", "exit.json", METRICS, NAME)
_FOLDERS = ("checkpoints", "tensorboard")
RESTARTS = 3  # by the launcher, without a newer checkpoint: then it is no chance


@dataclass(frozen=True)
class Origin:
    """Where a run lives and what it goes on from.

    `directory` None means a new one, named by the time; `source` is the run whose newest checkpoint counts, unless
    `checkpoint` names one; `is_resumed` says that the run goes on in its own directory.
    """

    directory: Path | None = None
    checkpoint: Path | None = None
    source: Path | None = None
    refused: str = ""  # why there is none, unless the other ranks know of one

    @property
    def is_resumed(self) -> bool:
        return self.source is not None and self.source == self.directory


@dataclass(frozen=True)
class Restored:
    """What a run goes on from: the manifest (None: a fresh start), a line for each checkpoint passed over, and
    whether it goes on in its own directory."""

    manifest: dict[str, Any] | None
    skipped: list[str]
    is_resumed: bool


def locate(config: Config, launcher: Launcher) -> Origin:
    """Read `run.dir`, `run.name` and `run.resume`; touches nothing.

    Where a launcher has started us anew, the directory of the attempt before counts, and what it has saved.

    Raises ConfigError for a directory that is taken or cannot be written, a checkpoint that is not there, and one of
    a run with another task, seed or global batch.
    """
    base = Path(config.run.dir) / config.task.name
    named = base / config.run.name if config.run.name else None
    if before := again(config, launcher):
        found = before
    else:
        try:
            found = _as_told(config.run.resume, base, named)
        except ConfigError as error:
            if not launcher.starters or launcher.variables.get("GROUP_WORLD_SIZE") == "1":
                raise
            return Origin(refused=str(error))
    _check_writable(found.directory or base)
    if found.directory is not None:
        _check_own(found.directory)
        check_free(found.directory)
    if found.source:
        _check_same_run(config, found)
    return found


def _as_told(resume: str | None, base: Path, named: Path | None) -> Origin:
    if resume is None:
        return Origin(_unused(named))
    if resume == "auto":
        directory = named or _latest(base)
        return Origin(directory, source=directory if directory and directory.is_dir() else None)
    return _from_path(Path(resume), named)


def again(config: Config, launcher: Launcher) -> Origin | None:
    """What the attempt before has left: of the same launch, and requeued or with a starter that took part in it.

    Asked again with all ranks' starters once they have met: torchrun counts no attempt where it forms the group anew
    because a machine has come, and that one may have rank 0.
    """
    if not launcher.requeues and not launcher.starters:
        return None
    base, resume = Path(config.run.dir) / config.task.name, config.run.resume
    own, one, ours, launch = None, None, {}, _identity(config, launcher)
    if _is_path(resume):
        with suppress(ConfigError):  # the one that it was begun from may be pruned by now
            own, one = _place(Path(resume))
        own = own or Path(resume).absolute().parent.parent
    for place in (
        {base / config.run.name} if config.run.name else {*base.glob("*/"), *([own] if own else [])}
    ):
        facts = last_facts(place)
        is_known = launcher.requeues or {*str(facts.get("starters", "")).split()} & {
            *launcher.starters
        }
        if facts.get("launch") == launch and is_known:
            ours[(place / NAME).stat().st_mtime] = place
    return back_to(ours[max(ours)], Origin(ours[max(ours)], one, own)) if ours else None


def _identity(config: Config, launcher: Launcher) -> str:
    """Of the command too: a job of SLURM may have several."""
    return f"{launcher.job}/{hashlib.sha256(to_yaml(config).encode()).hexdigest()[:12]}"


def _is_path(resume: str | None) -> TypeGuard[str]:
    return resume not in (None, "auto")


def back_to(directory: Path, begun: Origin) -> Origin:
    """What a run that rolls back goes on from: its own newest checkpoint, else what it began with."""
    if begun.source not in (None, directory) and not checkpoint.steps(directory / "checkpoints"):
        return Origin(directory, begun.checkpoint, begun.source)
    return Origin(directory, source=directory)


def find(resume: str | None) -> Origin:
    """The checkpoint to evaluate, without taking its run over. Raises ConfigError where there is none."""
    if resume is None:
        return Origin()
    own, one = _place(Path(resume))
    return Origin(None, one, own)


def read(origin: Origin) -> tuple[checkpoint.Loaded | None, list[str]]:
    """The verified checkpoint to go on from, None for a fresh start, and a line for each newer one that is not valid.

    Raises CheckpointError where there are checkpoints and none verifies: to start over would lose the run.
    """
    if origin.checkpoint is not None:
        return _of_run(checkpoint.load(origin.checkpoint)), []
    if origin.source is None:
        return None, []
    found, skipped = checkpoint.load_newest(origin.source / "checkpoints")
    if found is None and skipped:
        raise CheckpointError(
            f"{origin.source / 'checkpoints'}: no checkpoint is valid; {skipped[0]}"
        )
    return _of_run(found) if found else None, skipped


def _of_run(found: checkpoint.Loaded) -> checkpoint.Loaded:
    checkpoint.check_run(found.manifest, found.path)
    return found


def recorded(directory: Path, step: int) -> dict[str, float]:
    """The evaluation that metrics.jsonl already holds for `step`: it is not made, nor written, a second time."""
    found: dict[str, float] = {}
    for _, entry in entries(directory / METRICS):
        if entry["step"] == step:
            found |= {
                name: value
                for name, value in entry.items()
                if name.startswith("eval/") and value is not None
            }
    return found


def entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(line, what it says) of a metrics.jsonl, where there is one; a line that was cut off is passed over."""
    for line in _text(path).splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            yield line, entry


def _text(path: Path) -> str:
    """Empty where there is no such file. Raises ConfigError for a link, and for a pipe, which nobody may ever write."""
    if not path.exists():
        return ""
    if path.is_symlink() or not path.is_file():
        raise ConfigError(f"{path}: must be a plain file, no link; remove it")
    return path.read_text(encoding="utf-8", errors="replace")


def strict(values: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON has no number for becomes null, in mappings within too."""
    plain = {k: strict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in plain.items()
    }


def _unused(named: Path | None) -> Path | None:
    if named is not None and named.exists() and (not named.is_dir() or any(named.iterdir())):
        check_free(named)
        advice = "add run.resume=auto or choose another run.name"
        raise ConfigError(
            f"run.name={named.name}: {named} exists and is not being resumed; {advice}"
        )
    return named


def _latest(base: Path) -> Path | None:
    """The run under `base` that saved last."""
    saved = [
        (path.stat().st_mtime, path.parent)
        for path in base.glob("*/checkpoints")
        if checkpoint.steps(path)
    ]
    return max(saved)[1] if saved else None


def _place(path: Path) -> tuple[Path, Path | None]:
    """The run directory that `path` is or lies in, and the one checkpoint that it names, if it does."""
    if (path / checkpoint.MANIFEST).is_file():
        return path.resolve().parent.parent, path
    if checkpoint.steps(path / "checkpoints"):
        return path, None
    allowed = "give auto, a run directory, or a directory step-<number> in its checkpoints"
    raise ConfigError(f"run.resume={path}: no checkpoint there; {allowed}")


def _from_path(path: Path, named: Path | None) -> Origin:
    own, one = _place(path)
    if named is not None and named.resolve() != own.resolve():
        return Origin(_unused(named), one, own)
    last = max(checkpoint.steps(own / "checkpoints"), default=0)
    if one and last > checkpoint.read_manifest(one)["step"]:
        advice = f"give run.name=<new> to branch off, or run.resume={own}"
        raise ConfigError(f"run.resume={path}: its run went on to step {last}; {advice}")
    return Origin(own, one, own)


def _check_same_run(config: Config, origin: Origin) -> None:
    root = (origin.source or Path()) / "checkpoints"
    try:
        manifest = (
            checkpoint.read_manifest(origin.checkpoint)
            if origin.checkpoint
            else checkpoint.newest_manifest(root)
        )
    except CheckpointError as error:
        raise CheckpointError(f"run.resume={config.run.resume}: {error}") from None
    ours, theirs = config.flat(), (manifest or {}).get("config", {})
    for key in FIXED:
        if key in theirs and theirs[key] != ours[key]:
            why = f"the run to resume has {theirs[key]}, and another value would change its samples"
            raise ConfigError(
                f"{key}={ours[key]}: {why}; give {key}={theirs[key]}, or start a new run"
            )


def _check_writable(path: Path) -> None:
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not existing.is_dir():
        raise ConfigError(
            f"run.dir: {path} cannot be made, {existing} is not a directory; choose another run.dir"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        advice = "choose another run.dir, and with run.resume also a run.name"
        raise ConfigError(
            f"run.dir: {path} cannot be written, {existing} is not writable; {advice}"
        )


def _check_own(directory: Path) -> None:
    """Refuse a link or a pipe where a file or folder of ours belongs: we would write wherever it leads."""
    for name in (*_FILES, *_FOLDERS):
        try:
            mode = (directory / name).lstat().st_mode
        except OSError:
            continue
        if not (stat.S_ISREG(mode) if name in _FILES else stat.S_ISDIR(mode)):
            what = "file" if name in _FILES else "folder"
            raise ConfigError(
                f"run directory {directory}: {name} must be a plain {what}, no link; remove it or give run.name=<new>"
            )


def create(config: Config, origin: Origin, step: int, launcher: Launcher) -> tuple[Path, Lease]:
    """Make the run directory, or take the resumed one, as its only writer, and write config.yaml. Rank 0 only.

    Checkpoints after `step` did not verify: they are renamed, out of the way of the steps that will be saved again.

    Raises ConfigError where the disk refuses, RunError where restarts have come no further.
    """
    base = Path(config.run.dir) / config.task.name
    try:
        directory = origin.directory or _timestamped(base)
        directory.mkdir(parents=True, exist_ok=True)
        _check_own(directory)
        lease = Lease(directory, _attempt(config, launcher, directory, step))
        (directory / "exit.json").unlink(missing_ok=True)
        replace(directory / "config.yaml", to_yaml(config) + "\n")
        root = directory / "checkpoints"
        for later in [path for other, path in checkpoint.steps(root).items() if other > step]:
            checkpoint.set_aside(later)
        checkpoint.sweep(root)
    except OSError as error:
        raise ConfigError(
            f"run.dir={config.run.dir}: {error.filename or base}: {error.strerror}; choose another run.dir"
        ) from None
    return directory, lease


def _attempt(config: Config, launcher: Launcher, directory: Path, step: int) -> dict[str, Any]:
    """What the next attempt must know of this one."""
    before, facts = last_facts(directory), {"launch": _identity(config, launcher), "step": step}
    is_vain = launcher.attempt > 0 and facts.items() <= before.items()
    vain = before.get("vain", 0) + 1 if is_vain else 0
    if vain >= RESTARTS:
        told = directory / "exit.json"
        reason = (
            json.loads(told.read_text())["reason"] if told.is_file() else "its rank 0 was killed"
        )
        raise RunError(
            f"{directory}: given up, {RESTARTS} restarts came no further than step {step}: {reason}"
        )
    return {**facts, "vain": vain, "starters": " ".join(sorted({*launcher.starters}))}


def _timestamped(base: Path) -> Path:
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for number in itertools.count(1):
        path = base / (stamp if number == 1 else f"{stamp}_{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
    raise AssertionError("unreachable")


def changes(config: Config, manifest: Mapping[str, Any]) -> list[str]:
    """What the config says otherwise than the checkpoint's, `optim.lr: 0.1 -> 0.01`."""
    ours, theirs = config.flat(), manifest.get("config", {})
    keys = [
        key
        for key in {**theirs, **ours}
        if key not in _NOT_COMPARED and ours.get(key) != theirs.get(key)
    ]
    return [f"{key}: {theirs.get(key)} -> {ours.get(key)}" for key in keys]


def write_exit(directory: Path, code: int, reason: str, **facts: Any) -> None:
    """exit.json: torchrun flattens every exit code to 1, so it is said here too."""
    told = strict({"code": code, "reason": reason, **facts})
    replace(directory / "exit.json", json.dumps(told, indent=1) + "\n")


def replace(path: Path, text: str) -> None:
    """Write a file anew, whole or not at all. A link of its name, or of the staged file's, is not followed."""
    staged = path.with_name(f".{path.name}.new")
    staged.unlink(missing_ok=True)
    with open(staged, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(staged, path)


def opener(path: str, flags: int) -> int:
    """For `open`: a link is not followed."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
