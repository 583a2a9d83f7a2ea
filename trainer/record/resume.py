"""Where a run lives and what it continues from: told by settings, or left by a previous attempt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from trainer.checkpoints import manifest, transaction
from trainer.config.compose import to_yaml
from trainer.config.schema import Config
from trainer.distributed.launchers import Launcher
from trainer.errors import CheckpointError, ConfigError, RunError
from trainer.record import directory as files
from trainer.record.lease import NAME, Lease, check_free, last_facts

# What cannot change within a run: the samples follow from these.
FIXED = ("task.name", "run.seed", "data.global_batch")
RESTARTS = 3  # by the launcher without a newer checkpoint: then it is no chance
_NOT_COMPARED = ("run.resume", "run.name", "run.dir")


@dataclass(frozen=True)
class Origin:
    """Where a run lives and what it continues from.

    `directory` None means a new one, named by the time; `source` is the run whose newest
    checkpoint counts, unless `checkpoint` names one; `is_resumed` says that the run continues
    in its own directory. `refused` tells why there is none, unless other ranks know of one.
    """

    directory: Path | None = None
    checkpoint: Path | None = None
    source: Path | None = None
    refused: str = ""

    @property
    def is_resumed(self) -> bool:
        return self.source is not None and self.source == self.directory


def locate(config: Config, launcher: Launcher) -> Origin:
    """Read `run.dir`, `run.name` and `run.resume`; touches nothing.

    After a restart by the launcher, the previous attempt's run directory counts.

    Raises ConfigError for a directory that is taken or cannot be written, a checkpoint that is
    not there, and one of a run with another task, seed or global batch.
    """
    base = base_of(config)
    named = base / config.run.name if config.run.name else None
    origin = find_previous_attempt(config, launcher)
    if origin is None:
        try:
            origin = _as_set(config.run.resume, base, named)
        except ConfigError as error:
            if not launcher.starters or launcher.variables.get("GROUP_WORLD_SIZE") == "1":
                raise
            return Origin(refused=str(error))
    files.check_writable(origin.directory or base)
    if origin.directory is not None:
        files.check_plain(origin.directory)
        check_free(origin.directory)
    if origin.source:
        _check_same_run(config, origin)
    return origin


def base_of(config: Config) -> Path:
    """The folder that holds the task's runs."""
    return Path(config.run.dir) / config.task.name


def _as_set(resume: str | None, base: Path, named: Path | None) -> Origin:
    if resume is None:
        return Origin(_check_unused(named))
    if resume == "auto":
        directory = named or _find_latest(base)
        exists = directory is not None and directory.is_dir()
        return Origin(directory, source=directory if exists else None)
    return _from_path(Path(resume), named)


def find_previous_attempt(config: Config, launcher: Launcher) -> Origin | None:
    """The previous attempt's run directory: of the same launch, requeued or restarted.

    Asked again with all ranks' starters once they have met: torchrun counts no attempt where it
    forms the group anew because a machine has come, and that one may have rank 0.
    """
    if not launcher.requeues and not launcher.starters:
        return None
    own: Path | None = None
    one: Path | None = None
    resume = config.run.resume
    if _is_path(resume):
        with suppress(ConfigError):  # the one that it was begun from may be pruned by now
            own, one = _parse_place(Path(resume))
        own = own or Path(resume).absolute().parent.parent
    launch = _identify(config, launcher)
    attempts: dict[float, Path] = {}
    for place in _candidates(config, own):
        facts = last_facts(place)
        starters = {*str(facts.get("starters", "")).split()}
        is_known = launcher.requeues or starters & {*launcher.starters}
        if facts.get("launch") == launch and is_known:
            attempts[(place / NAME).stat().st_mtime] = place
    if not attempts:
        return None
    latest = attempts[max(attempts)]
    return roll_back(latest, Origin(latest, one, own))


def _candidates(config: Config, own: Path | None) -> Iterable[Path]:
    base = base_of(config)
    if config.run.name:
        return {base / config.run.name}
    return {*base.glob("*/"), *([own] if own else [])}


def _identify(config: Config, launcher: Launcher) -> str:
    """The launch and its command: a job of SLURM may have several."""
    return f"{launcher.job}/{hashlib.sha256(to_yaml(config).encode()).hexdigest()[:12]}"


def _is_path(resume: str | None) -> TypeGuard[str]:
    return resume not in (None, "auto")


def roll_back(directory: Path, begun: Origin) -> Origin:
    """The run's own newest checkpoint, else what it began with."""
    is_elsewhere = begun.source not in (None, directory)
    if is_elsewhere and not transaction.steps(directory / "checkpoints"):
        return Origin(directory, begun.checkpoint, begun.source)
    return Origin(directory, source=directory)


def find_checkpoint(resume: str | None) -> Origin:
    """The checkpoint to evaluate; its run is not taken over.

    Raises ConfigError where there is none.
    """
    if resume is None:
        return Origin()
    own, one = _parse_place(Path(resume))
    return Origin(None, one, own)


def read(origin: Origin) -> tuple[transaction.Loaded | None, list[str]]:
    """The verified checkpoint to continue from, None for a fresh start, and what was skipped.

    The second result has a line for each newer checkpoint that is not valid. Raises
    CheckpointError where none of several verifies: to start over would lose the run.
    """
    if origin.checkpoint is not None:
        return _of_run(transaction.load(origin.checkpoint)), []
    if origin.source is None:
        return None, []
    root = origin.source / "checkpoints"
    loaded, skipped = transaction.load_newest(root)
    if loaded is None and skipped:
        raise CheckpointError(f"{root}: no checkpoint is valid; {skipped[0]}")
    return _of_run(loaded) if loaded else None, skipped


def _of_run(loaded: transaction.Loaded) -> transaction.Loaded:
    manifest.Manifest.of_run(loaded.manifest, loaded.path)
    return loaded


def _check_unused(named: Path | None) -> Path | None:
    if named is None or not named.exists():
        return named
    if not named.is_dir() or any(named.iterdir()):
        check_free(named)
        why = f"{named} exists and is not being resumed"
        advice = "add run.resume=auto or choose another run.name"
        raise ConfigError(f"run.name={named.name}: {why}; {advice}")
    return named


def _find_latest(base: Path) -> Path | None:
    """The run under `base` that saved last."""
    roots = [root for root in base.glob("*/checkpoints") if transaction.steps(root)]
    saved = [(root.stat().st_mtime, root.parent) for root in roots]
    return max(saved)[1] if saved else None


def _parse_place(path: Path) -> tuple[Path, Path | None]:
    """The run directory that `path` is or lies in, and the one checkpoint that it names, if any."""
    if (path / manifest.MANIFEST).is_file():
        return path.resolve().parent.parent, path
    if transaction.steps(path / "checkpoints"):
        return path, None
    allowed = "give auto, a run directory, or a directory step-<number> in its checkpoints"
    raise ConfigError(f"run.resume={path}: no checkpoint there; {allowed}")


def _from_path(path: Path, named: Path | None) -> Origin:
    own, one = _parse_place(path)
    if named is not None and named.resolve() != own.resolve():
        return Origin(_check_unused(named), one, own)
    last = max(transaction.steps(own / "checkpoints"), default=0)
    if one and last > manifest.read_manifest(one)["step"]:
        advice = f"give run.name=<new> to branch off, or run.resume={own}"
        raise ConfigError(f"run.resume={path}: its run went on to step {last}; {advice}")
    return Origin(own, one, own)


def _check_same_run(config: Config, origin: Origin) -> None:
    root = (origin.source or Path()) / "checkpoints"
    try:
        one = origin.checkpoint
        raw = manifest.read_manifest(one) if one else transaction.newest_manifest(root)
    except CheckpointError as error:
        raise CheckpointError(f"run.resume={config.run.resume}: {error}") from None
    ours = config.flat()
    theirs = (raw or {}).get("config", {})
    for key in FIXED:
        if key in theirs and theirs[key] != ours[key]:
            had = f"the run to resume has {theirs[key]}, and another value would change its samples"
            advice = f"give {key}={theirs[key]}, or start a new run"
            raise ConfigError(f"{key}={ours[key]}: {had}; {advice}")


def take(config: Config, origin: Origin, step: int, launcher: Launcher) -> tuple[Path, Lease]:
    """Make the run directory, or take the resumed one, as its only writer. Rank 0 only.

    Writes config.yaml. Checkpoints after `step` did not verify: they are renamed, out of the
    way of the steps that will be saved again.

    Raises ConfigError where the disk refuses, RunError where restarts have come no further.
    """
    base = base_of(config)
    try:
        directory = origin.directory or files.make_timestamped(base)
        directory.mkdir(parents=True, exist_ok=True)
        files.check_plain(directory)
        lease = Lease(directory, _count_attempt(config, launcher, directory, step))
        (directory / files.EXIT).unlink(missing_ok=True)
        files.replace_file(directory / files.CONFIG, to_yaml(config) + "\n")
        root = directory / "checkpoints"
        for number, path in transaction.steps(root).items():
            if number > step:
                transaction.set_aside(path)
        transaction.sweep(root)
    except OSError as error:
        what = f"{error.filename or base}: {error.strerror}"
        raise ConfigError(f"run.dir={config.run.dir}: {what}; choose another run.dir") from None
    return directory, lease


def _count_attempt(
    config: Config, launcher: Launcher, directory: Path, step: int
) -> dict[str, Any]:
    """The facts of this attempt that the next one must know."""
    before = last_facts(directory)
    facts = {"launch": _identify(config, launcher), "step": step}
    is_vain = launcher.attempt > 0 and facts.items() <= before.items()
    vain = before.get("vain", 0) + 1 if is_vain else 0
    if vain >= RESTARTS:
        told = directory / files.EXIT
        reason = "its rank 0 was killed"
        if told.is_file():
            reason = json.loads(told.read_text())["reason"]
        why = f"given up, {RESTARTS} restarts came no further than step {step}"
        raise RunError(f"{directory}: {why}: {reason}")
    return {**facts, "vain": vain, "starters": " ".join(sorted({*launcher.starters}))}


def list_changes(config: Config, saved: Mapping[str, Any]) -> list[str]:
    """Settings that differ from a checkpoint's, `optim.lr: 0.1 -> 0.01`."""
    ours = config.flat()
    keys = [key for key in {**saved, **ours} if key not in _NOT_COMPARED]
    return [
        f"{key}: {saved.get(key)} -> {ours.get(key)}"
        for key in keys
        if ours.get(key) != saved.get(key)
    ]
