"""The run: what is open while `fit` works, and the decisions that all ranks make alike."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from trainer.checkpoints.manifest import Manifest
from trainer.checkpoints.saver import Saver
from trainer.checkpoints.state import MODEL, TRAINING, TrainState, read_on_all_ranks
from trainer.config.schema import Checkpoint, Eval, Log
from trainer.config.typed import suggest
from trainer.decisions import Decisions
from trainer.distributed.launchers import requeue
from trainer.distributed.signals import REQUEUE
from trainer.distributed.watch.heartbeat import Phase
from trainer.engine.diagnosis import check_drift
from trainer.engine.engine import Engine
from trainer.engine.outcome import Outcome
from trainer.errors import ConfigError
from trainer.record import fingerprint, resume, startup
from trainer.record.directory import strict
from trainer.record.opening import open_directory
from trainer.setup import Setup, build_schedule
from trainer.task import Task

STOPPED = 75  # EX_TEMPFAIL: ended by a signal after a published checkpoint; start it again


@dataclass
class Summary:
    """The result of `fit`, alike on every rank."""

    directory: Path
    step: int
    metrics: dict[str, float]
    best: float | None
    best_step: int | None
    seconds: float
    examples_per_s: float
    flops_per_s: float
    exit_code: int


class Clock:
    """Seconds that count as training: evaluating and saving do not."""

    def __init__(self) -> None:
        self._paused = 0.0

    def read(self) -> float:
        return time.monotonic() - self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self._paused += time.monotonic() - begun


class Run:
    """A run in training: batches, engine, evaluator, record, saver and state.

    Methods that decide something decide it from values that are equal on all ranks.
    `wants_save` says that a checkpoint is wanted which is not due.
    """

    def __init__(
        self, task: Task, setup: Setup, origin: resume.Origin, rolled_back: Collection[int] = ()
    ):
        """Build what training needs, restored from `origin`, and open the run directory.

        `rolled_back` are the steps that the run has gone back from. Raises CheckpointError for
        the checkpoint of another model, optimizer or data set. A collective.
        """
        self.config = setup.config
        self.world = setup.world
        self.wants_save = False
        self.saver = Saver(Path())
        self.state = TrainState.begin(self.world.world_size)
        self._setup = setup
        self._ranks = setup.parts.ranks
        self._clock = Clock()
        is_alone = self.world.world_size == 1
        self._drift_every = None if is_alone else self.config.dist.drift_every_steps
        with self._ranks.group.agreed("planning the run"):
            self.batches = setup.open_batches()
            epochs = self.config.run.epochs * self.batches.steps_per_epoch
            self.num_steps = self.config.run.steps or epochs
            schedule = build_schedule(task, self.num_steps)
        self.engine = Engine(setup.parts, schedule, self.batches.of_step(0), self.wants_stop)
        self.evaluator = setup.open_evaluator(self.engine.ema, self.wants_stop)
        manifest, skipped = self._restore(origin)
        self._check_metrics()
        place = (self.config, self.world.launcher, self._ranks, origin, self.step, setup.model)
        opened = open_directory(*place)
        self.directory = opened.directory
        self._shown = self.config.shown(opened.directory)
        self.record = opened.record
        self.saver = opened.saver
        self.state.recall(opened.evaluation)
        self.decisions = Decisions(self, setup.parts, rolled_back)
        self._first_step = self.step
        self._began_s = self._clock.read()
        self._logged = (self.step, self._began_s)
        self._origin = origin
        self._manifest = manifest
        self._warnings = [*opened.warnings, *skipped]

    @property
    def model(self) -> nn.Module:
        return self.engine.model

    @property
    def step(self) -> int:
        return self.state.step

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Write how it ended, where it failed, and close everything."""
        self._ranks.end_child(error)
        if error is not None:
            code = 2 if isinstance(error, ConfigError) else 1
            reason = f"{type(error).__name__}: {error}"
            self.record.exit(code, reason, {"step": self.state.step})
        self.saver.close()
        self.record.close()
        self.batches.close()

    def announce(self) -> None:
        """Show what is about to run: ranks, layout, batch arithmetic, data, model, changes.

        A collective. Called within the run's context, which writes down what fails here too.
        """
        config = self.config
        setup = self._setup
        manifest = self._manifest
        ranks = self._ranks.group.collect_text(startup.describe_rank(self.world))
        self.record.table(startup.RANK_COLUMNS, startup.rank_rows(ranks))
        self.record.say(startup.layout(config, self.world, setup.threads))
        told = startup.arithmetic(config, self.batches.plan, self.num_steps)
        told += [startup.describe_data(split, data) for split, data in setup.datasets.items()]
        told += [startup.describe_model(self.model), f"run directory: {self._shown}"]
        told += self._warnings
        told += startup.resumed(config, manifest, self.world, self.num_steps)
        told += setup.parts.strategy.list_remarks(manifest is not None)
        told += self.engine.draws.list_remarks()
        for line in told:
            self.record.say(line)
        if not self._origin.is_resumed:
            self.record.hyper_parameters(config.flat())
        if config.log.images and not self.is_over:
            inputs, _ = next(iter(self.batches.of_step(self.step)))
            self.record.images(self.step, inputs)

    # Decisions ----------------------------------------------------------------------------------

    @property
    def is_stopped(self) -> bool:
        """Did the ranks agree to stop before the end?"""
        return self.decisions.is_stopped

    @property
    def is_over(self) -> bool:
        return self.decisions.is_stopped or self.state.step >= self.num_steps

    @property
    def is_evaluation_owed(self) -> bool:
        """Was the run stopped before an evaluation that is due?"""
        return self.is_due(self.config.eval) and self.state.evaluated < self.state.step

    def is_due(self, block: Log | Eval | Checkpoint) -> bool:
        """Is it time for logging, evaluating or saving? Always at the end of the run."""
        step = self.state.step
        if step == 0 or step == self.num_steps:
            return step > 0
        if block.every_steps and step % block.every_steps == 0:
            return True
        epochs = getattr(block, "every_epochs", None)
        return epochs is not None and step % (epochs * self.batches.steps_per_epoch) == 0

    def wants_stop(self) -> bool:
        """Does this rank ask all ranks to stop?"""
        return self._ranks.stop.name is not None or self.saver.has_failed

    def request_save(self) -> Path:
        """Have the state after this step published; where it will be."""
        self.wants_save = True
        return self.saver.path_of(self.state.step + 1)

    def react(self, outcome: Outcome) -> None:
        """Decide on the outcome of the step before: on a GPU, this one is still being computed."""
        self._ranks.heartbeat.end_step()
        self.decisions.push(outcome)

    # Record -------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        """Means since the last log, the rate, and the speed. A collective."""
        self._ranks.heartbeat.enter(Phase.LOG)
        means = self.engine.means.read(self._ranks.group)
        seconds = self._clock.read()
        step, then = self._logged
        self._logged = (self.state.step, seconds)
        examples = (self.state.step - step) * self.config.data.global_batch
        values = {f"train/{name}": mean for name, mean in means.items()}
        values["optim/lr"] = float(self.engine.optimizers[0].param_groups[0]["lr"])
        values["speed/examples_per_s"] = examples / max(seconds - then, 1e-9)
        return values

    def observe(self) -> None:
        """Compare the ranks' state where that is due, and show progress."""
        step = self.state.step
        if self._drift_every and step % self._drift_every == 0:
            state = {
                "model": self.engine.strategy.shards(),
                "optimizers": self.engine.optimizer_states(),
            }
            check_drift(self._ranks.group, step, state)
        self.record.progress(step, self.num_steps)
        self.record.observe(step, self.engine.strategy.module)

    def _warn_of_unreadable(self) -> None:
        for index in self.batches.gather_replaced():
            why = "cannot be read: the next that can is taken instead"
            self.record.say(f"warning: train example {index} {why}")

    def evaluate(self) -> dict[str, float]:
        """`{"eval/loss": ...}`; empty where the ranks agreed to stop meanwhile."""
        with self._clock.paused():
            metrics = self.evaluator.evaluate()
        if metrics is None:
            self.decisions.stop()
        return metrics or {}

    def note(self, metrics: dict[str, float]) -> None:
        """Enter an evaluation in the record; the best so far is saved."""
        if not metrics:
            return
        block = self.config.checkpoint
        is_best = self.state.note(metrics, block.metric, block.best_mode)
        self.record.scalars(self.state.step, metrics)
        self.record.say(f"step {self.state.step:,}: {startup.metric_line(metrics)}")
        if is_best and block.keep_best > 0:
            self.wants_save = True

    def _check_metrics(self) -> None:
        """Evaluate one micro-batch: a mistake in `metrics` shows now, not after an epoch."""
        names = self.evaluator.rehearse()
        best = self.config.checkpoint.metric
        if names and best not in names:
            must = f"must be one of {', '.join(names)}{suggest(best, names)}"
            raise ConfigError(f"checkpoint.best_metric={best}: {must}")

    # State --------------------------------------------------------------------------------------

    def save(self) -> None:
        """Publish the state; one that is published already is left as it is. A collective."""
        with self._clock.paused():
            self.decisions.flush()  # before it is published
            self._save()

    def _save(self) -> None:
        self._ranks.heartbeat.enter(Phase.SAVE)
        self.wants_save = False
        group = self._ranks.group
        state = self.state
        model = self.engine.strategy.shards()
        training = {**self.engine.state_dict(), "progress": state.progress()}
        self.batches.ledger.close(group)
        self._warn_of_unreadable()
        facts = self._facts()
        with group.agreed("saving a checkpoint"):
            self.batches.check_length()
            self.saver.settle()
            if not self.saver.path_of(state.step).exists():
                self.record.note(state.step, {"ledger": facts["ledger"]})
                parts = {MODEL: model, TRAINING: training}
                self.saver.save(state.step, parts, facts, state.best_step)

    def _facts(self) -> dict[str, Any]:
        """The manifest's, beside files and step."""
        state = self.state
        return {
            "config": self.config.flat(),
            "data": fingerprint.of_data(self._setup.datasets),
            "machine": fingerprint.of_machine(self.world),
            "run": state.run_id,
            "run_hash": self.config.run_hash(self.engine.strategy.of_the_run),
            "strategy": self.config.strategy.name,
            "world_size": self.world.world_size,
            "sessions": state.sessions,
            "ledger": self.batches.ledger.chain,
            "replaced": self.batches.replaced,
            "metrics": strict(state.metrics if state.evaluated == state.step else {}),
        }

    def _restore(self, origin: resume.Origin) -> tuple[Manifest | None, list[str]]:
        group = self._ranks.group
        restored, skipped = read_on_all_ranks(group, lambda: resume.read(origin))
        if restored is None:
            return None, skipped
        manifest = restored.manifest
        training = restored.training
        fingerprint.check_data(self._setup.datasets, manifest.data)
        self.engine.load_state_dict(restored.model, training)
        self.batches.restore(manifest.step, manifest.ledger or "", manifest.replaced)
        progress = training["progress"]
        size = self.world.world_size
        is_same_run = group.tell_all(origin.is_resumed)
        self.state = TrainState.resume(manifest, progress, size, is_same_run)
        if self.state.step > self.num_steps:
            run = self.config.run
            asked = f"run.epochs={run.epochs}" if run.steps is None else f"run.steps={run.steps}"
            reached = f"the run to resume is at step {self.state.step:,} already"
            raise ConfigError(
                f"{asked}: {reached}, and it asks for {self.num_steps:,}; ask for more"
            )
        return manifest, skipped

    def finish(self) -> Summary:
        """Publish the last state, write how the run ended, and sum it up. A collective."""
        self._ranks.heartbeat.enter(Phase.END)
        group = self._ranks.group
        state = self.state
        stop = self._ranks.stop
        self.decisions.flush()
        if self.is_stopped:
            self.record.progress(state.step, state.step)
        self._save()  # where it is not there yet: after a stop, or with nothing left to do
        with group.agreed("saving a checkpoint"):
            self.saver.settle(state.step)
        summary = self._sum_up()
        steps = state.step - self._first_step
        block = self.config.checkpoint
        place = self._shown
        for line in startup.ending(summary, self.num_steps, steps, block.metric, stop.name, place):
            self.record.say(line)
        self.record.say(f"go on with: {startup.resume_command(self.world, place)}")
        facts = {"step": state.step, "metrics": state.metrics, "best": state.best}
        self.record.exit(summary.exit_code, "stopped" if self.is_stopped else "done", facts)
        # SIGTERM is also scancel's, and then nobody wants a requeue; SLURM requeues a preempted job
        is_asked = self.is_stopped and group.max(stop.name in REQUEUE)[0]
        if is_asked and self.world.rank == 0:
            requeue(self.record.say)
        return summary

    def _sum_up(self) -> Summary:
        state = self.state
        seconds = self._clock.read() - self._began_s
        examples = (state.step - self._first_step) * self.config.data.global_batch
        speed = examples / max(seconds, 1e-9)
        return Summary(
            directory=self.directory,
            step=state.step,
            metrics=state.metrics,
            best=state.best,
            best_step=state.best_step,
            seconds=seconds,
            examples_per_s=speed,
            flops_per_s=speed * self.engine.strategy.flops,
            exit_code=STOPPED if self.is_stopped else 0,
        )
