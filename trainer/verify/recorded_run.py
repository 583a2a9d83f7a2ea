"""The program of one rank of a layout: it trains the user's task and records evidence."""

from __future__ import annotations

import functools
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import Subset, TensorDataset

from trainer.base.process.child import end_with_parent
from trainer.base.same.distance import digest_rows
from trainer.cli import load_task, run, single
from trainer.core.checkpoints.run_directory import METRICS, read_entries
from trainer.core.config.compose import load_config
from trainer.core.data.batches import LocalBatch
from trainer.core.engine.engine import Engine
from trainer.core.engine.step import Outcome
from trainer.core.loop.run import Run
from trainer.core.rng.philox import Random
from trainer.core.trainer import active_run
from trainer.startup_checks import StartupChecks
from trainer.startup_checks.mismatch import NarrowestDtype
from trainer.verify.chance import ChanceCalls
from trainer.verify.evidence import ELEMENTS_OF_A_STEP, Notes, Tensors, probe, rows_of

PROGRESS_FILE = "progress"
PROGRESS_POLL_S = 0.2
EVERY_S = 10.0  # between two lines
LONG_S = 20.0  # a shorter estimate is not told


def note_step(folder: Path, step: int) -> None:
    """Note, on rank 0, that a step is done."""
    with suppress(OSError):
        (folder / PROGRESS_FILE).write_text(str(step), encoding="utf-8")


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def followed(folder: Path, steps: int, num_runs: int, in_all: float) -> Iterator[None]:
    """Tell every few seconds how far a layout is, which trains `num_runs` times in the block.

    As soon as the time of a step is known, tell what `in_all` such layouts will take, unless 0.
    """
    path = folder / PROGRESS_FILE
    path.unlink(missing_ok=True)
    is_over = threading.Event()
    follower = threading.Thread(
        target=_follow, args=(path, steps, num_runs, in_all, is_over), daemon=True
    )
    follower.start()
    try:
        yield
    finally:
        is_over.set()
        follower.join()


def _follow(path: Path, steps: int, num_runs: int, in_all: float, is_over: threading.Event) -> None:
    done = step = first = 0
    told = time.monotonic()
    began = 0.0  # when two steps were done: the first compiles, and each of them is checked
    begun = told
    while not is_over.wait(PROGRESS_POLL_S):
        last = step
        with suppress(OSError, ValueError):
            step = int(path.read_text(encoding="utf-8"))
        done += steps * (step < last)  # the next run has begun
        now = time.monotonic()
        if not began and step > 1:
            began = now
            first = step
        elif began and in_all and step > first and not done:
            each = (now - began) / (step - first) * steps * num_runs
            if each * in_all > LONG_S:
                tell(f"  this takes {_about(each)}, all layouts {_about(each * in_all)}")
            in_all = 0.0
        if now - told >= EVERY_S:
            told = now
            reached = f"step {done + step} of {steps * num_runs}"
            tell(f"  {reached if step else f'before its first step, for {now - begun:.0f} s'}")


def _about(seconds: float) -> str:
    return f"about {seconds:.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} min"


# In an evaluation, and half of one more, so that shards are padded. A whole split took 61 % of the
# time with task=text.
EVAL_BATCHES = 4
USAGE = "trainer.verify.recorded_run: is started by trainer.prove; use python -m trainer.prove"


def main(arguments: Sequence[str]) -> int:
    """Train the runs of a plan, a JSON file whose path is the only argument.

    {"out": folder, "config_dirs": [...], "runs": [[name, overrides], ...], "kill": null or
    [step, rank], "is_reversed": bool}: that rank kills itself before it trains at that 0-based
    step; rows are taken in reverse order.
    """
    end_with_parent()
    plan = json.loads(Path(single(arguments, USAGE)).read_text(encoding="utf-8"))
    for name, overrides in plan["runs"]:
        config = load_config(overrides, plan["config_dirs"])
        folder = Path(plan["out"])
        recorder = StepRecorder(plan["kill"], plan["is_reversed"], folder)
        task = recorded(load_task(config), recorder)(config)
        begun = time.monotonic()
        directory = task.fit().directory
        recorder.notes.seconds = time.monotonic() - begun
        rank = task.world.rank
        recorder.finish(directory if rank == 0 else None)
        recorder.notes.save(folder / f"{name}-{rank}.pt")
    return 0


def enter(rank: int, environment: Mapping[str, str], plan: str, log: str) -> None:
    """Run `main` in a forked process as a rank; what it writes to stderr is added to `log`."""
    os.environ.clear()
    os.environ |= {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    for stream_descriptor, path in ((1, os.devnull), (2, log)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, stream_descriptor)
        os.close(descriptor)
    gc.freeze()  # collections skip what is inherited: saves 0.35 of a rank's 5 s
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    multiprocessing.set_start_method(None, force=True)  # for data workers: this process has another
    numpy.random.seed()  # as in a process of its own; `random` does so itself
    sys.argv = ["trainer.verify.recorded_run", plan]
    run(main)


def inspection_of(run: Run) -> StartupChecks:
    """Return the startup checks of a run."""
    inspection = run.engine.inspection
    assert isinstance(inspection, StartupChecks)
    return inspection


WATCHED = 2  # the 0-based step whose chance is noted: the first ones have the start's checks


class StepRecorder:
    """Recorder of one rank's evidence, kept outside the user's task to use none of its names."""

    def __init__(
        self,
        kill: Sequence[int] | None,
        is_reversed: bool = False,
        folder: Path | None = None,
    ):
        """`folder`: where rank 0 notes its progress."""
        self.notes = Notes()
        self._is_reversed = is_reversed
        self._kill = None if kill is None else tuple(kill)
        self._is_stepping = False
        self._folder = folder

    def step(self, task: Any, batch: LocalBatch, train_step: Callable[[Any], Outcome]) -> Outcome:
        """Run the user's train_step and record its evidence."""
        step = task.step
        if self._kill == (step, task.world.rank):
            os.kill(os.getpid(), signal.SIGKILL)
        notes = self.notes
        run = active_run(task)
        engine = run.engine
        if notes.probe is None or step + 1 == run.num_steps:
            notes.results.append(inspection_of(run).digest())
        if notes.probe is None:
            notes.probe = probe(run)
            strategy = engine.strategy
            notes.has_rows = strategy.mesh.is_first
            shards = strategy.tensors.shards()
            for name, shard in shards.items():
                boxes = [(list(offset), list(box.shape)) for box, offset in shard.boxes()]
                notes.boxes[name] = (list(shard.shape), boxes)
            notes.first_weights = _copy({name: shard.tensor for name, shard in shards.items()})
        if self._is_reversed:
            batch = replace(batch, pieces=[_reversed(piece) for piece in batch.pieces])
        notes.indices[step + 1] = [i for indices in batch.indices for i in indices.tolist()]
        self._is_stepping = True
        is_alone = task.world.world_size == 1
        mode = NarrowestDtype() if is_alone and not notes.narrowest else None
        first = nullcontext() if notes.gradients else self._recording_gradients(engine)
        calls = ChanceCalls() if step == min(WATCHED, run.num_steps - 1) else None
        with mode or nullcontext(), first, calls or nullcontext():
            outcome = train_step(batch)
        notes.chance = calls.lines if calls is not None else notes.chance
        self._is_stepping = False
        if self._folder is not None and task.world.rank == 0:
            note_step(self._folder, step + 1)
        notes.narrowest = mode.name if mode is not None else notes.narrowest
        if step + 1 == run.num_steps:
            shards = engine.strategy.tensors.shards()
            checks = inspection_of(run)
            lines = [*checks.found, engine.strategy.finding, *checks.told]
            notes.finding = next(filter(None, lines), "")
            notes.last_weights = _copy({name: shard.tensor for name, shard in shards.items()})
        return outcome

    def examples(self, random: Random, inputs: Any, targets: Any) -> None:
        """Record an augmented micro-batch if it belongs to a training step."""
        if not self._is_stepping:
            return
        keys = [f"{random.epoch}/{index}" for index in random.indices.tolist()]
        self.notes.digests |= zip(keys, digest_rows((inputs, targets)), strict=True)
        self.notes.rows |= zip(keys, rows_of(inputs, targets, ELEMENTS_OF_A_STEP), strict=True)

    @contextmanager
    def _recording_gradients(self, engine: Engine) -> Iterator[None]:
        """Record the gradients with which an optimizer makes its first step in the block."""

        def record(*_: object) -> None:
            if not self.notes.gradients:
                named = engine.strategy.tensors.parameters.items()
                self.notes.gradients = _copy({n: p.grad for n, p in named if p.grad is not None})

        every = engine.optimizers.every
        handles = [optimizer.register_step_pre_hook(record) for optimizer in every]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def finish(self, directory: Path | None) -> None:
        """Record, on rank 0, the metrics.jsonl of the run directory."""
        if directory is not None:
            self.notes.record = [entry for _, entry in read_entries(directory / METRICS)]


def recorded(base: Any, recorder: StepRecorder) -> Any:
    """Return the user's task class with a recorder, which does not change what is learned."""

    class Recorded(base):
        def build_dataset(self, split: str) -> Any:
            dataset = super().build_dataset(split)
            if split == "train":
                return dataset
            rows = self.config.data.global_batch
            return _first_rows(dataset, EVAL_BATCHES * rows + rows // 2 + 1)

        def augment(
            self, inputs: Any, targets: Any, random: Random, train: bool
        ) -> tuple[Any, Any]:
            inputs, targets = super().augment(inputs, targets, random, train)
            recorder.examples(random, inputs, targets)
            return inputs, targets

        def train_step(self, batch: LocalBatch) -> Outcome:
            if not isinstance(self._run, Run):  # a trial of the step
                return super().train_step(batch)
            return recorder.step(self, batch, super().train_step)

    functools.update_wrapper(Recorded.train_step, base.train_step)  # shows whose step it is
    return Recorded


def _first_rows(dataset: Any, rows: int) -> Any:
    """Return a data set of the first rows; as it is if it has no more of them."""
    if not hasattr(dataset, "__len__") or len(dataset) <= rows:
        return dataset
    if isinstance(dataset, TensorDataset):
        return TensorDataset(*(tensor[:rows] for tensor in dataset.tensors))
    return Subset(dataset, range(rows))


def _reversed(piece: Any) -> Any:
    """Return a micro-batch with its rows in reverse order; as it is if not all of it is by row."""
    leaves = tree_leaves(piece)
    is_by_row = all(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in leaves)
    if not is_by_row or len({len(leaf) for leaf in leaves}) > 1:
        return piece
    return tree_map_only(torch.Tensor, lambda tensor: tensor.flip(0), piece)


def _copy(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


if __name__ == "__main__":
    run(main, USAGE, has_json=False)
