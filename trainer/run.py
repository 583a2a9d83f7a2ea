"""The run: what is open while `fit` works, and the decisions that all ranks make alike."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from trainer.checkpoints.manifest import Manifest
from trainer.checkpoints.saver import Saver
from trainer.checkpoints.state import MODEL, TRAINING, read_on_all_ranks
from trainer.config.schema import Checkpoint, Eval, Log
from trainer.config.typed import suggest
from trainer.data.batches import Batches
from trainer.distributed.launchers import requeue
from trainer.distributed.signals import REQUEUE
from trainer.distributed.watch.heartbeat import Phase
from trainer.engine.diagnosis import check_drift, name_bad_examples
from trainer.engine.engine import Engine
from trainer.engine.outcome import OneStepLate, Outcome, StepReport
from trainer.errors import ConfigError, RunError
from trainer.record import fingerprint, resume, startup
from trainer.record.directory import strict
from trainer.record.opening import open_directory
from trainer.setup import Setup, build_schedule, open_evaluator
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


class RolledBack(Exception):
    """All ranks agreed to go back to the newest checkpoint of the run in `directory`."""

    def __init__(self, directory: Path, step: int):
        super().__init__(f"going back to the newest checkpoint of {directory}")
        self.directory = directory
        self.step = step


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
    """

    def __init__(
        self, task: Task, setup: Setup, origin: resume.Origin, rolled_back: Collection[int] = ()
    ):
        """Build what training needs, restored from `origin`, and open the run directory.

        `rolled_back` are the steps that the run has gone back from. Raises CheckpointError for
        the checkpoint of another model, optimizer or data set. A collective.
        """
        config = setup.config
        ranks = setup.ranks
        self.config = config
        self.world = setup.world
        self.saver = Saver(Path())
        self.state = TrainState.begin(self.world.world_size)
        self._task = task
        self._datasets = setup.datasets
        self._ranks = ranks
        self._rolled_back = rolled_back
        self._reports = OneStepLate()
        self._num_skipped = 0
        self._is_stopped = False
        self._is_save_wanted = False
        self._clock = Clock()
        with ranks.group.agreed("planning the run"):
            self.batches = Batches(
                setup.datasets["train"],
                config,
                setup.mesh.data_rank,
                setup.mesh.data_size,
                setup.prepare,
                ranks,
            )
            epochs = config.run.epochs * self.batches.steps_per_epoch
            self.num_steps = config.run.steps or epochs
            schedule = build_schedule(task, self.num_steps)
        self.engine = Engine(
            config,
            task,
            setup.strategy,
            setup.precision,
            schedule,
            self.batches.of_step(0),
            ranks,
            self.wants_stop,
        )
        self.evaluator = open_evaluator(task, setup, self.engine.ema, self.wants_stop)
        manifest, skipped = self._restore(origin)
        self._check_metrics()
        opened = open_directory(config, self.world.launcher, ranks, origin, self.step, setup.model)
        self.directory = opened.directory
        self.record = opened.record
        self.saver = opened.saver
        self.state.recall(opened.evaluation)
        self._first_step = self.state.step
        self._began_s = self._clock.read()
        self._logged = (self.state.step, self._began_s)
        self._announce(setup, origin, manifest, [*opened.warnings, *skipped])

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
        if error is not None:
            code = 2 if isinstance(error, ConfigError) else 1
            reason = f"{type(error).__name__}: {error}"
            self.record.exit(code, reason, {"step": self.state.step})
        self.saver.close()
        self.record.close()
        self.batches.close()

    def _announce(
        self, setup: Setup, origin: resume.Origin, manifest: Manifest | None, lines: list[str]
    ) -> None:
        """Show what is about to run: ranks, layout, batch arithmetic, data, model, changes."""
        config = self.config
        strategy = setup.strategy
        ranks = self._ranks.group.gather_text(startup.describe_rank(self.world))
        self.record.table(startup.RANK_COLUMNS, startup.rank_rows(ranks))
        self.record.say(startup.layout(config, self.world, setup.threads))
        told = startup.arithmetic(config, self.batches.plan, self.num_steps)
        told += [startup.describe_data(split, data) for split, data in self._datasets.items()]
        told += [startup.describe_model(self.model), f"run directory: {self.directory}", *lines]
        if config.run.resume == "auto" and manifest is None:
            told.append("run.resume=auto found nothing to go on from: a fresh start")
        if manifest is not None:
            told += startup.resumed(config, manifest.config, self.step, self.num_steps)
        told += strategy.list_remarks(is_resumed=manifest is not None)
        for line in told:
            self.record.say(line)
        if not origin.is_resumed:
            self.record.hyper_parameters(config.flat())
        if config.log.images:
            inputs, _ = next(iter(self.batches.of_step(self.step % self.num_steps)))
            self.record.images(self.step, inputs)

    # Decisions ----------------------------------------------------------------------------------

    @property
    def is_stopped(self) -> bool:
        """Did the ranks agree to stop before the end?"""
        return self._is_stopped

    @property
    def is_over(self) -> bool:
        return self._is_stopped or self.state.step >= self.num_steps

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
        return bool(self._ranks.stop) or self.saver.has_failed

    @property
    def wants_save(self) -> bool:
        """Is a checkpoint wanted that is not due?"""
        return self._is_save_wanted

    def request_save(self) -> Path:
        """Have the state after this step published; where it will be."""
        self._is_save_wanted = True
        return self.saver.path_of(self.state.step + 1)

    def react(self, outcome: Outcome) -> None:
        """Decide on the outcome of the step before: on a GPU, this one is still being computed.

        Raises ConfigError where train_step returned no outcome, RunError where
        `run.on_bad_step` ends the run, RolledBack where it goes back.
        """
        self._ranks.heartbeat.end_step()
        if not isinstance(outcome, Outcome):
            given = f"train_step returned {type(outcome).__name__}"
            raise ConfigError(f"{given}: end it with return self.update(batch)")
        self._judge(self._reports.push(outcome), self.state.step - 1)

    def _judge(self, report: StepReport | None, step: int) -> None:
        if report is None:
            return
        if not report.has_weight:
            why = "the weights of its examples sum to 0, so no weight was updated"
            self.record.say(f"warning: step {step}: {why}")
        elif report.is_skipped:
            self._judge_skipped(step)
        else:
            self._num_skipped = 0
        if report.is_stop_requested and self.state.step < self.num_steps:
            self._is_stopped = True

    def _judge_skipped(self, step: int) -> None:
        """Apply `run.on_bad_step` to a step that was not finite and changed nothing."""
        policy = self.config.run.on_bad_step
        precision = self.engine.precision
        self._num_skipped += 1
        if precision.is_scaled and self._num_skipped < precision.max_skipped:
            why = "the scaled gradient is not finite, so the update was skipped"
            self.record.say(f"warning: step {step}: {why}")
            return
        line = f"step {step}: {self._name_bad_examples(step)}"
        if self._num_skipped == precision.max_skipped:
            count = f"no finite gradient in {self._num_skipped} steps on end"
            raise RunError(f"{line}; and {count}")
        is_repeated = step in self._rolled_back
        if policy == "stop" or is_repeated:
            again = "again, so it is not chance; " if is_repeated else ""
            advice = f"look at it with python -m trainer.replay {self.directory} step={step}"
            raise RunError(f"{line}; {again}{advice}")
        if policy == "rollback":
            self.record.say(f"warning: {line}; going back to the newest checkpoint")
            with self._ranks.group.agreed("going back to a checkpoint"):
                self.saver.withdraw(step)
            raise RolledBack(self.directory, step)
        self.record.say(f"warning: {line}; the update was skipped")

    def _name_bad_examples(self, step: int) -> str:
        batch = self.batches.of_step(step - 1)
        with self.state.at(step - 1):
            return name_bad_examples(self.engine, self._task, batch, self._ranks.group)

    # Record -------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        """Means since the last log, the rate, and the speed. A collective."""
        self._ranks.heartbeat.enter(Phase.LOG)
        self._warn_of_unreadable()
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
        every = self.config.dist.drift_every_steps
        if every and step % every == 0 and self.world.world_size > 1:
            state = {
                "model": self.engine.strategy.shards(),
                "optimizers": self.engine.optimizer_states(),
            }
            check_drift(self._ranks.group, step, state)
        self.record.progress(step, self.num_steps)
        self.record.observe(step, self.model)

    def _warn_of_unreadable(self) -> None:
        for index in self.batches.gather_replaced():
            why = "cannot be read: the next that can is taken instead"
            self.record.say(f"warning: train example {index} {why}")

    def evaluate(self) -> dict[str, float]:
        """`{"eval/loss": ...}`; empty where the ranks agreed to stop meanwhile."""
        with self._clock.paused():
            metrics = self.evaluator.evaluate()
        if metrics is None:
            self._is_stopped = True
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
            self._is_save_wanted = True

    def _check_metrics(self) -> None:
        """Evaluate one micro-batch: a mistake in `metrics` shows now, not after an epoch."""
        names = self.evaluator.rehearse()
        best = self.config.checkpoint.metric
        if names and best not in names:
            near = suggest(best, names)
            must = f"must be one of {', '.join(names)}{near}"
            raise ConfigError(f"checkpoint.best_metric={best}: {must}")

    # State --------------------------------------------------------------------------------------

    def save(self) -> None:
        """Publish the state; one that is published already is left as it is. A collective."""
        with self._clock.paused():
            self._judge(self._reports.flush(), self.state.step)  # before it is published
            self._save()

    def _save(self) -> None:
        self._ranks.heartbeat.enter(Phase.SAVE)
        self._is_save_wanted = False
        group = self._ranks.group
        state = self.state
        model = self.engine.strategy.shards()
        training = {**self.engine.state_dict(), "progress": state.progress()}
        self.batches.ledger.close(group)
        self._warn_of_unreadable()
        facts = self._facts()
        with group.agreed("saving a checkpoint"):
            self.saver.settle()
            if not self.saver.path_of(state.step).exists():
                self.record.note(state.step, {"ledger": facts["ledger"]})
                parts = {MODEL: model, TRAINING: training}
                self.saver.save(state.step, parts, facts, state.best_step)

    def _facts(self) -> dict[str, Any]:
        """The manifest's, beside files and step."""
        state = self.state
        is_evaluated = state.evaluated == state.step
        return {
            "config": self.config.flat(),
            "data": fingerprint.of_data(self._datasets),
            "run": state.run_id,
            "run_hash": self.config.run_hash(),
            "strategy": self.config.strategy.name,
            "world_size": self.world.world_size,
            "sessions": state.sessions,
            "ledger": self.batches.ledger.chain,
            "replaced": self.batches.replaced,
            "metrics": strict(state.metrics if is_evaluated else {}),
        }

    def _restore(self, origin: resume.Origin) -> tuple[Manifest | None, list[str]]:
        group = self._ranks.group
        restored, skipped = read_on_all_ranks(group, lambda: resume.read(origin))
        if restored is None:
            return None, skipped
        manifest = restored.manifest
        training = restored.training
        fingerprint.check_data(self._datasets, manifest.data)
        self.engine.load_state_dict(restored.model, training)
        self.batches.restore(manifest.step, manifest.ledger or "", manifest.replaced)
        progress = training["progress"]
        size = self.world.world_size
        is_same_run = group.share_text("yes" if origin.is_resumed else "") == "yes"
        self.state = TrainState.resume(manifest, progress, size, is_same_run)
        if self.state.step > self.num_steps:
            run = self.config.run
            asked = f"run.epochs={run.epochs}" if run.steps is None else f"run.steps={run.steps}"
            reached = f"the run to resume is at step {self.state.step:,} already"
            wanted = f"it asks for {self.num_steps:,}; ask for more"
            raise ConfigError(f"{asked}: {reached}, and {wanted}")
        return manifest, skipped

    def finish(self) -> Summary:
        """Publish the last state, write how the run ended, and sum it up. A collective."""
        self._ranks.heartbeat.enter(Phase.END)
        group = self._ranks.group
        state = self.state
        stop = self._ranks.stop
        self._judge(self._reports.flush(), state.step)
        if self._is_stopped:
            self.record.progress(state.step, state.step)
        self._save()  # where it is not there yet: after a stop, or with nothing left to do
        with group.agreed("saving a checkpoint"):
            self.saver.settle(state.step)
        summary = self._sum_up()
        again = startup.resume_command(self.world, self.directory)
        steps = state.step - self._first_step
        block = self.config.checkpoint
        for line in startup.ending(summary, self.num_steps, steps, block.metric, stop.name, again):
            self.record.say(line)
        facts = {"step": state.step, "metrics": state.metrics, "best": state.best}
        self.record.exit(summary.exit_code, "stopped" if self._is_stopped else "done", facts)
        # SIGTERM is also scancel's, and then nobody wants a requeue; SLURM requeues a preempted job
        is_asked = self._is_stopped and group.max(stop.name in REQUEUE)[0]
        if is_asked and self.world.rank == 0 and (line := requeue()):
            self.record.say(line)
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
            exit_code=STOPPED if self._is_stopped else 0,
        )
