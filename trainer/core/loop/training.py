"""The loop of a run, and what opens a run around it or without it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from trainer.base.errors import visible
from trainer.core.checkpoints import resume
from trainer.core.checkpoints.reading import read_on_all_ranks
from trainer.core.engine.evaluation import Evaluator
from trainer.core.engine.training_state import open_ema
from trainer.core.engine.trial import NO_RUN, TaskRun
from trainer.core.loop import RolledBack
from trainer.core.loop.diagnosis import failures_named
from trainer.core.loop.run import Run
from trainer.core.record.startup import Summary
from trainer.core.schedule import describe_longer_run
from trainer.core.setup.build import Setup, build_schedule
from trainer.core.setup.early_checks import check_evaluation, check_training, try_optimizer
from trainer.core.setup.session import Session, open_session

Found = TypeVar("Found")


class FitResult(TaskRun):
    """The part of a finished run that a Trainer keeps; `directory` is None if `fit` never ran.

    `model` is None if it was divided over the ranks, or theirs alone.
    """

    without_model = (
        "was in the ranks, whose group has ended; "
        "read the weights with python -m trainer.use RUN out=FILE.safetensors"
    )

    def __init__(self, model: nn.Module | None, step: int, directory: Path | None):
        self.directory = directory
        self._model = model
        self._step = step

    @property
    def model(self) -> nn.Module | None:
        return self._model

    @property
    def step(self) -> int:
        return self._step


def loop(task: Any, run: Run) -> Summary:
    """Train a `Trainer` until its run is over. A segment ends where something is due."""
    run.announce()
    if run.is_evaluation_owed:
        run.note(task.evaluate())
    for segment in run.segments():
        for batch in run.batches.take(segment.first, segment.end, run.num_steps):
            with run.engine.step(batch.step, is_logged=batch.step + 1 == segment.logged):
                outcome = task.train_step(batch)
            if run.decisions.react(outcome):
                break
        run.at_end_of_segment(task.evaluate)
    return run.finish(partial(describe_longer_run, partial(build_schedule, task)))


def start(task: Any, use: Callable[[Any, Session], Found]) -> Found:
    """Open the ranks of a `Trainer` that trains, and return `use(task, session)`. A collective."""
    task._run = NO_RUN
    origin = check_training(task.config, task.world)
    try_optimizer(task.config)
    try:
        with open_session(task, origin, first_steps) as session:
            return use(task, session)
    finally:
        if not isinstance(task._run, FitResult):
            task._run = NO_RUN  # nothing is open any more


def train(task: Any, session: Session) -> Summary:
    """Train a `Trainer`, again from the newest checkpoint after each rollback."""
    origin = session.origin
    rolled_back: set[int] = set()
    while True:
        try:
            with open_run(task, session, origin, rolled_back):
                return loop(task, task._run)
        except RolledBack as back:
            rolled_back.add(back.step)
            mirror = task.config.checkpoint.mirror
            origin = resume.roll_back(back.directory, origin, back.step, mirror)
            task._run = NO_RUN  # free the wrapper before the next one is built


@contextmanager
def open_run(
    task: Any, session: Session, origin: resume.Origin, rolled_back: Collection[int] = ()
) -> Iterator[None]:
    """Open the run of a `Trainer` for the block; afterwards it keeps a FitResult. A collective."""
    group = session.ranks.group
    with failures_named(group, task.config):
        splits = ("train", *task.config.eval.splits)
        task._run = Setup(task, session.ranks, splits, session.notes)
        opened = Run(task, task._run, origin, rolled_back)
        with opened as task._run, failures_named(group, task.config):
            del opened  # a reference to DDP's wrapper must not outlive its group
            yield
        directory = task._run.directory
        model = task._run.engine.strategy.close()
        task._run = FitResult(model, task.step, directory)


def examine(task: Any, use: Callable[[Evaluator], Found | None]) -> Found:
    """Load the weights as `Trainer.evaluate` does, and return `use(evaluator)`. A collective.

    Raises KeyboardInterrupt after a stop request, if `use` returns None.
    """
    fitted = task._run.directory if isinstance(task._run, FitResult) else None
    task._run = NO_RUN
    origin = check_evaluation(task.config, task.world, fitted)
    opened = open_session(task, origin)
    with opened as session, failures_named(session.ranks.group, task.config):
        setup = Setup(task, session.ranks, task.config.eval.splits)
        task._run = setup
        ema = open_ema(task.config, setup.parts.strategy.tensors)
        group = session.ranks.group
        find = partial(resume.find_checkpoints, origin)
        restored, skipped = read_on_all_ranks(group, find, has_optimizer=False)
        if restored:
            restored.load(setup.parts, ema)
            restored.close(group)
            task._run = FitResult(setup.model, restored.manifest.step, fitted)
        evaluated = use(setup.open_evaluator(ema, lambda: bool(session.ranks.stop)))
        task._run = FitResult(setup.parts.strategy.close(), task.step, fitted)
        del setup, ema  # a divided model must not outlive its group
    if task.world.rank == 0:
        for line in [*session.notes, *skipped]:
            print(visible(line), file=sys.stderr)
    if evaluated is None:
        raise KeyboardInterrupt
    return evaluated


@contextmanager
def kept_task(task: Any) -> Iterator[None]:
    """Give a `Trainer` back its settings, ranks and run after the block."""
    before = (task.config, task.world, task._run)
    try:
        yield
    finally:
        task.config, task.world, task._run = before


def first_steps(task: Any) -> None:
    """Make two updates on the first batch: the optimizer's state is there from the second one on.

    A collective.
    """
    with open_session(task, resume.Origin()) as session:
        setup = Setup(task, session.ranks, ("train", *task.config.eval.splits))
        with Run(task, setup, resume.Origin()) as run:
            task._run = run
            run.engine.inspection.close()
            for _ in range(2):
                with run.engine.step(0, is_logged=True):
                    task.train_step(run.batches.of_step(0))


def make_first_step(task: Any, session: Session) -> None:
    """Open a new run and make its first step, with all that a start proves. A collective."""
    with open_run(task, session, session.origin):
        task._run.announce()
        with task._run.engine.step(0, is_logged=True):
            task.train_step(task._run.batches.of_step(0))
