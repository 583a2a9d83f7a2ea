"""Recording: the program of one rank, which trains the user's task and notes evidence."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainer.cli import load_task, run
from trainer.config.compose import load_config
from trainer.data.batches import LocalBatch
from trainer.data.randomness import Random
from trainer.engine.means import Values
from trainer.engine.outcome import Outcome
from trainer.record.directory import METRICS, read_entries
from trainer.trainer import Trainer
from trainer.verify.evidence import Notes, Tensors
from trainer.verify.probe import digest_rows, probe


def main(arguments: Sequence[str]) -> int:
    """Train the runs of a plan, a JSON file.

    {"out": folder, "config_dirs": [...], "runs": [[name, overrides], ...], "kill": null or
    [step, rank]}: that rank kills itself when it is about to train at that 0-based step.
    """
    plan = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    for name, overrides in plan["runs"]:
        config = load_config(overrides, plan["config_dirs"])
        recorder = Recorder(plan["kill"])
        task = recorded(load_task(config), recorder)(config)
        directory = task.fit().directory
        rank = task.world.rank
        recorder.finish(task.model, directory if rank == 0 else None)
        recorder.notes.save(Path(plan["out"]) / f"{name}-{rank}.pt")
    return 0


class Recorder:
    """Takes the notes of one rank. It is no part of the user's task, whose names are the user's."""

    def __init__(self, kill: Sequence[int] | None):
        self.notes = Notes()
        self._kill = None if kill is None else tuple(kill)
        self._is_stepping = False

    def step(self, task: Any, batch: LocalBatch, train_step: Callable[[Any], Outcome]) -> Outcome:
        """One step of the user's, with notes."""
        step = task.step
        if self._kill == (step, task.world.rank):
            os.kill(os.getpid(), signal.SIGKILL)
        notes = self.notes
        if notes.probe is None:
            notes.probe = probe(task._run, task)
            notes.first_weights = _copy(task.model.state_dict())
        notes.indices[step + 1] = [i for indices in batch.indices for i in indices.tolist()]
        self._is_stepping = True
        outcome = train_step(batch)
        self._is_stepping = False
        return outcome

    def examples(self, random: Random, inputs: Any, targets: Any) -> None:
        """Note a micro-batch as it was augmented, where a step trains on it."""
        if not self._is_stepping:
            return
        digests = digest_rows((inputs, targets))
        for index, digest in zip(random.indices.tolist(), digests, strict=True):
            self.notes.digests[f"{random.epoch}/{index}"] = digest

    def gradients(self, model: nn.Module) -> None:
        """Note the gradients of the first update."""
        if not self.notes.gradients:
            named = model.named_parameters()
            gradients = {name: p.grad for name, p in named if p.grad is not None}
            self.notes.gradients = _copy(gradients)

    def finish(self, model: nn.Module, directory: Path | None) -> None:
        """Note the last weights, and the metrics.jsonl of the run directory on rank 0."""
        self.notes.last_weights = _copy(model.state_dict())
        if directory is not None:
            self.notes.record = [entry for _, entry in read_entries(directory / METRICS)]


def recorded(base: Any, recorder: Recorder) -> Any:
    """The user's task with a recorder: it learns exactly what it learns without."""

    class Updating(Trainer):
        """Comes after the user's class in the method order: its own `update` still counts."""

        def update(
            self,
            batch: LocalBatch,
            loss: Callable[[Any, Any], Values] | None = None,
            optimizers: Sequence[Optimizer] | None = None,
            name: str = "loss",
        ) -> Outcome:
            run: Any = self._run
            engine = run.engine
            gradients = engine.backward(batch, loss or self.loss, optimizers, name)
            recorder.gradients(engine.model)  # reduced, and not yet clipped
            return engine.step(gradients, optimizers)

    class Recorded(base, Updating):
        def augment(
            self, inputs: Any, targets: Any, random: Random, train: bool
        ) -> tuple[Any, Any]:
            inputs, targets = super().augment(inputs, targets, random, train)
            recorder.examples(random, inputs, targets)
            return inputs, targets

        def train_step(self, batch: LocalBatch) -> Outcome:
            return recorder.step(self, batch, super().train_step)

    return Recorded


def _copy(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


if __name__ == "__main__":
    run(main)
