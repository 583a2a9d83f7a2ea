"""The runs of tasks in a few layouts: what each says, and what it has learned."""

import contextlib
import io
import itertools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import wrong_tasks
from harness import fit, on_ranks, relative_distance
from harness.training import whole_weights

from trainer import Trainer

STEPS = 11  # the second and the tenth prove a task again


@dataclass(frozen=True)
class Layout:
    """`reference` is the layout whose run has the same weights."""

    ranks: int = 1
    words: tuple[str, ...] = ()
    reference: str = "single"


LAYOUTS = {
    "single": Layout(),
    "micro-batches of 8": Layout(words=("data.micro_batch=8",)),
    "micro-batches of 3": Layout(words=("data.micro_batch=3",)),
    "ddp": Layout(ranks=2),
    "fsdp": Layout(ranks=2, words=("strategy=fsdp",)),
    "exact on one rank": Layout(words=("strategy=exact", "data.micro_batch=11")),
    "exact": Layout(2, ("strategy=exact", "data.micro_batch=11"), "exact on one rank"),
}


@dataclass(frozen=True)
class Ending:
    """The ending of a run: the error of each rank, the lines of rank 0, and the weights."""

    errors: Sequence[str]
    lines: Sequence[str]
    weights: Mapping[str, torch.Tensor]

    @property
    def error(self) -> str:
        return next(filter(None, self.errors), "")

    def distance(self, other: "Ending") -> float:
        """Return how far the weights and buffers are from those of another run."""
        every = self.weights.items()
        return max(relative_distance(other.weights[name], tensor) for name, tensor in every)


def run_in(layout: str, tasks: Mapping[str, type[Trainer]], *words: str) -> dict[str, Ending]:
    """Train each task in a layout, all in one process for each rank."""
    words = (*LAYOUTS[layout].words, "task=tiny", f"run.steps={STEPS}", *words)
    with tempfile.TemporaryDirectory() as folder:

        def body() -> dict[str, tuple]:
            return {name: _train(task, Path(folder) / name, *words) for name, task in tasks.items()}

        every = on_ranks(LAYOUTS[layout].ranks, body)
    return {name: _join([each[name] for each in every]) for name in tasks}


def _train(task: type[Trainer], folder: Path, *words: str) -> tuple:
    wrong_tasks.PAST.clear()
    wrong_tasks.SEEN.clear()
    wrong_tasks.LossInPlace.table.fill_(1)
    wrong_tasks.PASSES[0] = wrong_tasks.CountsInClass.passes = 0
    wrong_tasks.NUMBERS = itertools.count()
    error, result = "", None
    silent = io.StringIO()
    with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(io.StringIO()):
        try:
            found = fit(folder, *words, task=task)
            result = {key: found[key] for key in ("weights", "boxes")}
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            if dist.is_initialized():  # an error leaves it open: the process is to end
                dist.destroy_process_group()
    return error, silent.getvalue().splitlines(), result


def _join(ranks: Sequence[tuple]) -> Ending:
    errors = [error for error, _, _ in ranks]
    weights: dict[str, torch.Tensor] = {}
    if not any(errors):
        try:
            weights = whole_weights([result for _, _, result in ranks])
        except AssertionError:
            errors = ["ranks have other weights"]
    return Ending(errors, ranks[0][1], weights)
