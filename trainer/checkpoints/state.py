"""The state of a run as a checkpoint holds it, read by rank 0 and handed to all ranks."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoints import packing
from trainer.checkpoints.manifest import Manifest
from trainer.checkpoints.transaction import Loaded
from trainer.distributed.group import Group
from trainer.engine.ema import Ema
from trainer.errors import CheckpointError
from trainer.strategy.base import Strategy

MODEL = "model.pt"
TRAINING = "training.pt"
Found = tuple[Loaded | None, list[str]]  # and a line for each checkpoint passed over


@dataclass
class TrainState:
    """Progress of a run, saved with every checkpoint. `step` counts global batches."""

    step: int
    run_id: str
    sessions: list[list[int]]
    evaluated: int = -1
    metrics: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_step: int | None = None
    best_of: str = ""

    @classmethod
    def begin(cls, world_size: int) -> TrainState:
        return cls(0, secrets.token_hex(8), [[0, world_size]])

    @classmethod
    def resume(
        cls, manifest: Manifest, progress: dict[str, Any], world_size: int, is_same_run: bool
    ) -> TrainState:
        """The state that a checkpoint holds; of another run it is only the step."""
        sessions = [*manifest.sessions, [manifest.step, world_size]]
        if not is_same_run:
            return cls(manifest.step, secrets.token_hex(8), sessions)
        return cls(manifest.step, manifest.run, sessions, **progress)

    def advance(self) -> None:
        self.step += 1

    @contextmanager
    def at(self, step: int) -> Iterator[None]:
        """Another step while the block runs: it is looked at again."""
        now = self.step
        self.step = step
        try:
            yield
        finally:
            self.step = now

    def recall(self, metrics: dict[str, float]) -> None:
        """Take over an evaluation of this step that an earlier process recorded, if any."""
        if metrics:
            self.metrics = metrics
            self.evaluated = self.step

    def note(self, metrics: dict[str, float], metric: str, mode: str) -> bool:
        """Keep an evaluation; is it the best so far by `metric`?"""
        self.metrics = metrics
        self.evaluated = self.step
        best_of = f"{mode} {metric}"
        if self.best_of != best_of:
            self.best = None
            self.best_step = None
            self.best_of = best_of
        value = metrics[metric]
        sign = 1 if mode == "max" else -1
        if math.isnan(value) or (self.best is not None and sign * value <= sign * self.best):
            return False
        self.best = value
        self.best_step = self.step
        return True

    def progress(self) -> dict[str, Any]:
        names = ("evaluated", "metrics", "best", "best_step", "best_of")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Restored:
    """A verified checkpoint, the same bytes on every rank."""

    manifest: Manifest
    model: dict[str, torch.Tensor]
    training: dict[str, Any]

    def load(self, strategy: Strategy, ema: Ema | None) -> None:
        """Load what evaluation needs: the model, and the averages of its weights."""
        strategy.load(self.model)
        if ema:
            ema.load_state_dict(self.training["ema"])


def read_on_all_ranks(group: Group, read: Callable[[], Found]) -> tuple[Restored | None, list[str]]:
    """Rank 0 reads and verifies by `read`; all ranks unpack the same bytes. A collective.

    No shared file system is needed, and no rank can load another file. The second result holds
    a line for each checkpoint that did not verify.
    """
    loaded: Loaded | None = None
    skipped: list[str] = []
    with group.agreed("reading the checkpoint"):
        if group.world.rank == 0:
            loaded, skipped = read()
    raw, skipped = group.tell_all([loaded.manifest if loaded else None, skipped])
    if raw is None:
        return None, skipped
    name = f"step-{raw['step']:08d}"
    state = {}
    for file in sorted(raw["files"]):
        data = group.share_bytes(loaded.files[file] if loaded else None)
        state[file] = packing.unpack(data, torch.device("cpu"))
    for file in (MODEL, TRAINING):
        if file not in state:
            raise CheckpointError(f"{name}: holds no {file}: not one of a run")
    manifest = Manifest.of_run(raw, Path(name))
    return Restored(manifest, state[MODEL], state[TRAINING]), skipped
