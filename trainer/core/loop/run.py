"""`Run`: the objects that are open while `fit` runs, and the methods that the loop calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.base.errors import ConfigError, RunError, describe, exit_code_of
from trainer.core.checkpoints import resume
from trainer.core.checkpoints.run_directory import BAD_STEP
from trainer.core.checkpoints.saver import whole_parameters
from trainer.core.checkpoints.transaction import Manifest
from trainer.core.config.schema import Config
from trainer.core.config.typed import suggest
from trainer.core.distributed.exit_barrier import ExitBarrier
from trainer.core.distributed.launchers import requeue
from trainer.core.distributed.ranks import Ranks
from trainer.core.distributed.signals import REQUEUE
from trainer.core.distributed.watch.heartbeat import Phase
from trainer.core.engine.deferred_reads import DeferredReads
from trainer.core.engine.engine import Engine
from trainer.core.engine.trial import TaskRun
from trainer.core.engine.values import Values
from trainer.core.extensions import CHECKS
from trainer.core.loop import Actions, Calendar, RolledBack, Segment
from trainer.core.loop.checkpointer import Checkpointer, restore
from trainer.core.loop.decisions import Decisions, Requests
from trainer.core.loop.diagnosis import check_drift, name_bad_examples
from trainer.core.loop.gathering import gather_rows
from trainer.core.record import fingerprint, startup
from trainer.core.record.run_log import RunLog
from trainer.core.record.startup import Summary
from trainer.core.setup.build import Setup, build_schedule
from trainer.core.setup.session import RunDirectory, open_directory
from trainer.core.strategy.modules.batchnorm import check_statistics
from trainer.core.task import Task


def _open_inspection(setup: Setup, engine: Engine, say: Callable[[str], None]) -> None:
    """Have the startup checks look at the updates of a run, or say that they are not there."""
    if CHECKS.is_installed:
        engine.inspect_by(CHECKS.load().open_checks(setup.parts, engine))
    elif setup.config.run.prove:
        say("proof   none: the startup checks (trainer/startup_checks) are not installed")


class Run(TaskRun):
    """A run in training: batches, engine, evaluator, record, checkpoints and state.

    All decisions are taken from values that are equal on all ranks.
    """

    is_open = True

    def __init__(
        self, task: Task, setup: Setup, origin: resume.Origin, rolled_back: Collection[int] = ()
    ):
        """Build what training needs, restored from `origin`, and open the run directory.

        `rolled_back` holds the steps after which the run was already rolled back. Raises
        CheckpointError for a checkpoint of another model, optimizer or data set. A collective.
        """
        self._setup = setup
        config = setup.config
        group = setup.parts.ranks.group
        # The plan: it needs the length of the data only.
        self.requests = Requests(setup.parts.ranks.stop, config.run.max_minutes)
        with group.agreed("planning the run"):
            self.batches = setup.batches
            check_statistics(setup.model, config, self.batches.plan.accumulation)
            length = self.batches.steps_per_epoch
            num_steps = config.run.steps or config.run.epochs * length
            schedule = build_schedule(task, num_steps)
        self.calendar = Calendar.of(config, num_steps, length)
        # The model in training: its dry run makes lazy weights, which a checkpoint then fills.
        engine = Engine(setup.parts, schedule, self.batches.of_step(0), self.requests.wants_any)
        self.engine = engine
        self.update = engine.update
        self.evaluator = setup.open_evaluator(engine.state.ema, self.requests.wants_stop)
        data = fingerprint.of_data(setup.datasets, setup.sampling, group.world.rank == 0)
        self.state, manifest, origin, skipped = restore(
            setup, engine, self.batches, data, origin, num_steps
        )
        self._check_metrics()
        # The run directory: what is refused up to here leaves it as it was.
        opened = open_directory(setup.parts, setup.sampling, origin, self.step)
        self.record = opened.record
        heartbeat = setup.parts.ranks.heartbeat
        try:
            code = fingerprint.of_code(type(task))
            _open_inspection(setup, engine, self.record.say)
            self.checkpoints = Checkpointer(setup, engine, self.batches, opened, data, code)
            warnings = [*opened.warnings, *skipped, *fingerprint.list_unsteady(data)]
            changes = partial(self._list_changes, warnings, manifest, code)
            self._begin(opened, rolled_back, changes, is_new=not origin.is_resumed)
        except BaseException as error:
            self._ranks.end_child(error)
            opened.give_up(error, self.step, partial(heartbeat.enter, Phase.MIRROR))
            self.batches.close()
            raise

    def _begin(
        self,
        opened: RunDirectory,
        rolled_back: Collection[int],
        list_changes: Callable[[], Sequence[str]],
        is_new: bool,
    ) -> None:
        """Open decisions, the start's checks, the log and the barrier at the end."""
        engine = self.engine
        heartbeat = self._ranks.heartbeat
        self.requests.watch(opened.saver, opened.record)
        self.state.recall(opened.evaluation, *self._judged_by())
        later = DeferredReads(partial(heartbeat.enter, Phase.DEVICE))
        self.decisions = self._open_decisions(opened, rolled_back, later)
        self._is_sound = True  # False while a step is compared or saved
        # The start's checks and its log, which say lines to the record.
        engine.inspection.begin(self.batches, self.record.say)
        self._log = self._open_log(opened, later, list_changes, is_new)
        self._exit = ExitBarrier(
            self._ranks.group,
            heartbeat,
            self.config.checkpoint.copy_s,
            lambda: self.checkpoints.is_copied,
        )

    def _open_log(
        self,
        opened: RunDirectory,
        later: DeferredReads,
        list_changes: Callable[[], Sequence[str]],
        is_new: bool,
    ) -> RunLog:
        return RunLog(
            self.config,
            self._ranks,
            record=opened.record,
            later=later,
            directory=opened.directory,
            first_step=self.step,
            list_changes=list_changes,
            is_new=is_new,
            is_streamed=self.batches.is_streamed,
        )

    @property
    def config(self) -> Config:
        return self._setup.config

    @property
    def num_steps(self) -> int:
        return self.calendar.num_steps

    @property
    def model(self) -> nn.Module:
        return self.engine.model

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def directory(self) -> Path:
        return self._log.directory

    @property
    def _ranks(self) -> Ranks:
        return self._setup.parts.ranks

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Record the error, if there is one, and close everything.

        A RunError or ConfigError is raised anew if it can say that the state was saved.
        """
        self._ranks.end_child(error)
        saved = ""
        if error is not None:
            self._ranks.heartbeat.enter(Phase.END)
            if self._ranks.group.world.world_size == 1:
                with suppress(Exception):  # the error itself is told
                    self._log.flush()
            saved = self._save_after_error(error)
            code = exit_code_of(error)
            self.record.exit(code, describe(error) + saved, {"step": self.state.step})
        with self._exit.held():
            self.checkpoints.close(self._exit.beat)
        self._ranks.heartbeat.enter(Phase.END)
        if error is not None and not saved and not isinstance(error, RolledBack):
            self._log.name_newest(self.checkpoints.newest())
        self.record.close()
        self.batches.close()
        if saved and isinstance(error, (ConfigError, RunError)):
            raise type(error)(f"{error}{saved}") from error

    def _save_after_error(self, error: BaseException) -> str:
        """Save what was trained, if an error has left it complete; return words about that."""
        step = self.state.step
        is_sound = self._is_sound and not self.decisions.is_judging
        is_complete = is_sound and not self.engine.step.is_open and step > self._log.first_step
        if not is_complete or not isinstance(error, Exception):
            return ""
        if not self.checkpoints.save_after_error(self.state, self._flush):
            return ""
        saved = f"the state after step {step:,} is saved; {self._log.next_command(True)}"
        if not isinstance(error, (ConfigError, RunError)):  # whose line ends with it
            self.record.say(saved)
        return f"; {saved}"

    def _flush(self) -> None:
        """Decide on the last outcome, and record its means and those before it. A collective."""
        self.decisions.flush()
        self._log_means()  # the error may have come between the step and its log
        self._log.flush()

    def announce(self) -> None:
        """Print what is about to run: ranks, layout, batch arithmetic, data, model, changes.

        A collective. Call it within the run's context, which also records a failure in here.
        """
        config, setup = self.config, self._setup
        lines = [*setup.notes, *startup.arithmetic(config, self.batches.plan, self.num_steps)]
        lines += startup.describe_data(config, setup.datasets, setup.sampling)
        structure = self.engine.strategy.tensors.structure
        lines += startup.describe_model(
            config, structure, setup.is_split_fixed, self.batches.plan.accumulation
        )
        self._log.announce(self.engine.strategy.mesh, setup.threads, lines)
        if self.config.log.images and not self.is_over:
            inputs, _ = next(iter(self.batches.of_step(self.step)))
            self.record.images(self.step, inputs)

    def _list_changes(
        self, warnings: Sequence[str], manifest: Manifest | None, code: Mapping[str, str]
    ) -> list[str]:
        """Return warnings, slow ranks, changes at a resume, and limits of strategy and draws.

        A collective.
        """
        config, setup, group = self.config, self._setup, self._ranks.group
        reasons = startup.slow_reasons(config, group.world, setup.threads)
        lines = [*warnings, *startup.slowness(group.collect(reasons))]
        changed = self.state.noted(startup.changes_of(config, manifest, group.world, code))
        rates = self.engine.optimizers.rates.around
        lines += startup.resumed(config, manifest, self.num_steps, changed, rates)
        lines += self.engine.strategy.list_remarks(manifest is not None)
        return [*lines, *self.engine.draws.list_remarks()]

    # Decisions ----------------------------------------------------------------------------------

    @property
    def is_stopped(self) -> bool:
        """True once the ranks agreed to stop before the end."""
        return bool(self.decisions.stopped_by)

    @property
    def is_over(self) -> bool:
        return self.is_stopped or bool(self.decisions.ended_by) or self.state.step >= self.num_steps

    @property
    def is_evaluation_owed(self) -> bool:
        """True if the run was stopped before an evaluation that is due."""
        return self.is_due("eval") and self.state.evaluated < self.state.step

    def is_due(self, name: str) -> bool:
        """Return True if "log", "eval" or "checkpoint" is due; always at the end of the run."""
        step = self.state.step
        if step == self.num_steps or self.decisions.ended_by:
            return step > 0
        return self.calendar.is_due(name, step)

    @property
    def wants_save(self) -> bool:
        """True if a checkpoint was requested that is not due by the settings."""
        return self.checkpoints.is_requested

    def request_save(self) -> Path:
        """Request a checkpoint of the state after this step, and return its future path."""
        self.decisions.end_segment()
        return self.checkpoints.request(self.state.step + 1)

    def next_checkpoint(self) -> Path:
        return self.checkpoints.path_of(self.state.step + 1)

    def list_optimizers(self) -> list[Optimizer]:
        return list(self.engine.optimizers)

    def record_values(self, name: str, returned: Values) -> None:
        self.engine.recorder.record(name, returned)

    def stop(self, reason: str) -> None:
        self.requests.ask_for_end(reason)

    def gather_rows(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        return gather_rows(self.engine, tensor, self.batches.plan.accumulation)

    def segments(self) -> Iterator[Segment]:
        """Yield the steps up to the next one after which something is due, until the end."""
        while not self.is_over:
            self.requests.look()
            self.decisions.begin_segment()
            yield self.calendar.segment(self.state.step)

    def at_end_of_segment(self, evaluate: Callable[[], dict[str, float]]) -> None:
        """Log, compare the ranks, show progress, evaluate and save, where that is due.

        Before an evaluation or a checkpoint decide on the last outcome too, which may end the run.
        A collective.
        """
        if self.wants_save or self.is_due("eval") or self.is_due("checkpoint"):
            self.decisions.flush()
        self._log_means()
        self._check_drift()
        self._show_progress()
        if self.is_stopped:
            return
        if self.is_due("eval"):
            self.note(evaluate())
        if self.is_due("checkpoint") or self.wants_save:
            self.save()

    def _open_decisions(
        self, opened: RunDirectory, rolled_back: Collection[int], later: DeferredReads
    ) -> Decisions:
        actions = Actions(
            directory=opened.directory,
            say=opened.record.say,
            note_bad_step=lambda step, why: opened.record.note(step, {BAD_STEP: why}),
            withdraw=opened.saver.withdraw,
            name_bad_examples=self._name_bad_examples,
        )
        parts = self._setup.parts
        return Decisions(
            parts, self.state, self.num_steps, self.requests, actions, rolled_back, later
        )

    def _name_bad_examples(self, step: int) -> str:
        parts = self._setup.parts
        batch = self.batches.of_step(step - 1)
        return name_bad_examples(self.engine, parts.hooks, batch, parts.ranks.group)

    # Record -------------------------------------------------------------------------------------

    def _log_means(self) -> None:
        """Record means, learning rate and speed since the last log, if due. A collective."""
        if self.is_due("log") and self._log.is_behind(self.step):
            self._ranks.heartbeat.enter(Phase.LOG)
            self._log.begin(self.engine, self.state.step, self.batches.steps_per_epoch)
            if self.state.step == self.num_steps:
                self._log.flush()

    def _check_drift(self) -> None:
        """Compare the state of the ranks, if due. A collective."""
        group, engine = self._ranks.group, self.engine
        if self.calendar.is_due("drift", self.step) and group.world.world_size > 1:
            self._is_sound = False
            check_drift(group, self.step, engine.state.shards(), engine.strategy.mesh)
            self._is_sound = True

    def _show_progress(self) -> None:
        """Show progress, and record a profile and histograms where these are due. A collective."""
        self.record.progress(self.step, self.num_steps, self.step == self.num_steps)
        self.record.profile(self.step)
        if self.calendar.is_due("histograms", self.step):
            for name, values in whole_parameters(self.engine.strategy.tensors, self._ranks.group):
                self.record.histogram(self.step, name, values)

    def evaluate(self) -> dict[str, float]:
        """Return `{"eval/loss": ...}`; empty after a stop request or without data. A collective."""
        with self._log.paused():
            metrics = self.evaluator.evaluate()
        if metrics is None:
            self.decisions.agree_on_stop()
        else:
            self.decisions.evaluated()
        return metrics or {}

    def note(self, metrics: dict[str, float]) -> None:
        """Record the metrics of an evaluation; request a checkpoint if they are the best so far."""
        if not metrics:
            return
        is_best = self.state.note(metrics, *self._judged_by())
        self._log.note_evaluation(self.step, self.num_steps, metrics)
        self._log.note_samples(self.step, self._setup.parts, self.evaluator)
        if is_best and self.config.checkpoint.keep_best > 0:
            self.request_save()
        self._log_means()  # if the evaluation has ended the run: the end is always logged

    def _judged_by(self) -> tuple[str, str, float]:
        config = self.config
        return config.best_metric, config.best_mode, config.run.min_improvement

    def _check_metrics(self) -> None:
        """Evaluate one micro-batch, so that a mistake in `metrics` shows before the first epoch."""
        names = self.evaluator.trace_draws()
        best = self.config.best_metric
        if names and best not in names:
            raise ConfigError(f"""checkpoint.best_metric={best}:
                must be one of {", ".join(names)}{suggest(best, names)}""")

    # State --------------------------------------------------------------------------------------

    def save(self) -> None:
        """Begin a checkpoint of the state, unless this step has one already. A collective."""
        with self._log.paused():
            self.decisions.flush()  # a bad step must not be published
            self._save()

    def _save(self) -> None:
        self._is_sound = False
        for index in self.checkpoints.save(self.state, self.is_over):
            why = "cannot be read: the next readable one is used instead"
            self.record.say(f"warning: train example {index} {why}")
        self._is_sound = True

    def finish(self, describe_longer_run: Callable[[int], list[str]]) -> Summary:
        """Publish the last state, record how the run ended, and return a summary. A collective.

        `describe_longer_run` returns lines about a run that goes on after so many steps.
        """
        self._ranks.heartbeat.enter(Phase.END)
        state = self.state
        self.decisions.flush()
        self._log.flush()
        if self.is_stopped:
            self.record.progress(state.step, self.num_steps, True)
        self._save()  # the last step may have no checkpoint yet, for example after a stop
        with self._ranks.group.agreed("saving a checkpoint"):
            self._is_sound = False
            self.checkpoints.wait(state.step)
        self._is_sound = True
        with self._ranks.group.agreed("recording"):
            self.record.raise_failure()
        flops = self.engine.strategy.flops
        why = self.decisions.stopped_by or self.decisions.ended_by
        notes = [] if why or self.is_stopped else describe_longer_run(self.num_steps)
        summary = self._log.finish(state, self.num_steps, flops, why, self.is_stopped, notes)
        # not at SIGTERM: scancel sends it too, and SLURM requeues a preempted job itself
        is_asked = self.is_stopped and self._ranks.group.max(self._ranks.stop.name in REQUEUE)[0]
        if is_asked and self._ranks.group.world.rank == 0:
            requeue(self.record.say)
        return summary
