"""The state of a run as stored in a checkpoint, read by rank 0 and sent to all ranks."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from trainer.checkpoints.manifest import Manifest
from trainer.checkpoints.reading import Content, open_content, share
from trainer.checkpoints.transaction import TRIES, CheckpointFiles, is_gone
from trainer.config.typed import build
from trainer.distributed.group import Group
from trainer.engine.buffers import load_buffers
from trainer.engine.ema import Ema
from trainer.errors import CheckpointError, ConfigError, one_line
from trainer.strategy.tensors import Tensors


@dataclass
class TrainState:
    """Progress of a run, saved with every checkpoint. `step` counts global batches."""

    step: int
    run_id: str
    sessions: list[list[int]]
    changes: dict[str, list[str]] = field(default_factory=dict)
    evaluated: int = -1
    metrics: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_step: int | None = None
    best_of: str = ""
    improved: float | None = None
    stale: int = 0
    ended: str = ""
    ended_of: int = 0

    @classmethod
    def begin(cls, world_size: int) -> TrainState:
        return cls(0, secrets.token_hex(8), [[0, world_size]])

    @classmethod
    def resume(
        cls, manifest: Manifest, progress: dict[str, Any], world_size: int, is_same_run: bool
    ) -> TrainState:
        """Restore the state from a checkpoint; from another run's, only step and sessions.

        Raises ConfigError for a progress that no run has saved.
        """
        sessions = [*manifest.sessions, [manifest.step, world_size]]
        if not is_same_run:
            return cls(manifest.step, secrets.token_hex(8), sessions, dict(manifest.changes))
        facts = {name: value for name, value in progress.items() if value != ""}
        facts |= {"step": manifest.step, "run_id": manifest.run, "sessions": sessions}
        facts["changes"] = dict(manifest.changes)
        metrics = {name: float(value) for name, value in progress["metrics"].items()}  # or NaN
        return replace(build(cls, {**facts, "metrics": {}}), metrics=metrics)

    def noted(self, changes: list[str]) -> list[str]:
        """Return what changed at the start of this session, after it was noted."""
        if changes:
            self.changes[str(self.step)] = changes
        return changes

    def advance(self) -> None:
        self.step += 1

    @contextmanager
    def at(self, step: int) -> Iterator[None]:
        """Set another step for the duration of the block, to examine it a second time."""
        before = self.step
        self.step = step
        try:
            yield
        finally:
            self.step = before

    def end(self, reason: str, num_steps: int) -> None:
        """Note that a run of so many steps ended here; a longer run goes on."""
        self.ended = reason
        self.ended_of = num_steps

    def recall(self, metrics: dict[str, float], metric: str, mode: str, least: float) -> None:
        """Take over an evaluation of this step that an earlier process recorded, if any.

        The checkpoint may be from before that evaluation.
        """
        if self.evaluated < self.step and metric in metrics:
            self.note(metrics, metric, mode, least)

    def note(self, metrics: dict[str, float], metric: str, mode: str, least: float) -> bool:
        """Store an evaluation. Return True if it is the best so far by `metric`.

        `stale` counts the evaluations since one that was better by more than `least`.
        """
        value = metrics[metric]
        self.metrics = metrics
        self.evaluated = self.step
        best_of = f"{mode} {metric}"
        if self.best_of != best_of:
            self.best = None
            self.best_step = None
            self.best_of = best_of
            self.improved = None
        sign = 1 if mode == "max" else -1
        is_first = self.improved is None and not math.isnan(value)
        self.stale += 1
        if is_first or (self.improved is not None and sign * (value - self.improved) > least):
            self.improved = value
            self.stale = 0
        if math.isnan(value) or (self.best is not None and sign * value <= sign * self.best):
            return False
        self.best = value
        self.best_step = self.step
        return True

    def progress(self) -> dict[str, Any]:
        best = ("best", "best_step", "best_of", "improved", "stale")
        names = ("evaluated", "metrics", *best, "ended", "ended_of")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Restoration:
    """A verified checkpoint, the same on every rank."""

    manifest: Manifest
    content: Content

    def load(self, tensors: Tensors, ema: Ema | None) -> None:
        """Load the parts that evaluation needs: the model and its averaged weights."""
        sources = self.content.sources
        with wrong_state_named():
            tensors.load(sources["model"], self.content.training["extra"])
            load_buffers(tensors, sources["buffer"])
            if ema:
                ema.load(sources["ema"])


@contextmanager
def wrong_state_named() -> Iterator[None]:
    """Raise CheckpointError if plain values of a checkpoint are not those that a run saves."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        why = f"{type(error).__name__}: {one_line(error)}"
        raise CheckpointError(f"the checkpoint's state is not one of a run: {why}") from None


def read_on_all_ranks(
    group: Group, find: Callable[[], tuple[list[Path], bool]]
) -> tuple[Restoration | None, list[str]]:
    """Open and verify the newest valid checkpoint of those that `find` returns on rank 0.

    `find` returns paths, the newest first, and whether the first one must be valid. If all ranks
    see a checkpoint's files, each verifies some of them and reads what it needs. Otherwise rank 0
    reads and sends. The second result has a line for each checkpoint that is not valid. A
    collective. Raises CheckpointError if there are checkpoints, but none is valid.
    """
    for _ in range(TRIES):
        found: list[str] = []
        must_be_first = False
        with group.agreed("finding the checkpoint"):
            if group.world.rank == 0:
                paths, must_be_first = find()
                found = [str(path.absolute()) for path in paths]
        found, must_be_first = group.tell_all([found, must_be_first])
        skipped: list[str] = []
        is_outdated = False
        for path in map(Path, found):
            try:
                return _open(group, path), skipped
            except ConfigError as error:  # a CheckpointError on the rank that found it
                if must_be_first:
                    raise
                if group.tell_all(is_gone(path)):
                    is_outdated = True  # its run is going on, and has newer ones
                else:
                    skipped.append(f"skipped {path.name}: {error}")
        if not is_outdated:
            break
    if skipped or is_outdated:
        why = skipped[0] if skipped else "all were removed before they were read; try again"
        raise CheckpointError(f"{path.parent}: no checkpoint is valid; {why}")
    return None, []


def _open(group: Group, path: Path) -> Restoration:
    """Verify and open a checkpoint. Raises the same CheckpointError on every rank."""
    is_root = group.world.rank == 0
    loaded: CheckpointFiles | None = None
    with group.agreed("reading the checkpoint"):
        with suppress(CheckpointError) if not is_root else nullcontext():
            loaded = CheckpointFiles.read(path)
        if is_root and loaded:
            Manifest.of_run(loaded.manifest, path)
    raw = group.tell_all(loaded.manifest if loaded and is_root else None)
    sees_it = loaded is not None and loaded.manifest == raw
    (is_unseen,) = group.max(float(not sees_it))
    manifest = Manifest.of_run(raw, path)
    content: Content | None = None
    with group.agreed("verifying the checkpoint"):
        own = CheckpointFiles(path, raw)
        if not is_unseen:
            own.files.verify(sorted(own.files)[group.world.rank :: group.world.world_size])
        elif is_root:
            own.files.verify(own.files)
        if is_root or not is_unseen:
            content = open_content(own)
            content.hold()
    return Restoration(manifest, share(group, content) if is_unseen else cast(Content, content))
