"""`Run`: the objects that are open while `fit` runs, and the methods that the loop calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType

from torch import nn

from trainer.checkpoints.gathering import whole_parameters
from trainer.checkpoints.manifest import Manifest
from trainer.config.hints import suggest
from trainer.config.schema import CheckpointSettings, Config, EvalSettings, LogSettings
from trainer.distributed.launchers import requeue
from trainer.distributed.ranks import Ranks
from trainer.distributed.signals import REQUEUE
from trainer.distributed.watch.heartbeat import Phase
from trainer.engine.decisions import Actions, Decisions, Requests, RolledBack
from trainer.engine.diagnosis import name_bad_examples
from trainer.engine.drift import check_drift
from trainer.engine.engine import Engine
from trainer.engine.outcome import Outcome
from trainer.engine.proof.step_proof import Training
from trainer.errors import ConfigError, RunError, describe
from trainer.record import fingerprint, resume, startup
from trainer.record.files import BAD_STEP
from trainer.record.run_log import RunLog
from trainer.record.startup import Summary
from trainer.run_checkpoints import Checkpointer, restore
from trainer.setup.build import Setup, build_schedule
from trainer.setup.opening import RunDirectory, open_directory
from trainer.task import Task


class Run:
    """A run in training: batches, engine, evaluator, record, checkpoints and state.

    All decisions are taken from values that are equal on all ranks.
    """

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
        self.requests = Requests(setup.parts.ranks.stop, config.run.max_minutes)
        with group.agreed("planning the run"):
            self.batches = setup.open_batches()
            epochs = config.run.epochs * self.batches.steps_per_epoch
            self.num_steps = config.run.steps or epochs
            schedule = build_schedule(task, self.num_steps)
        first = self.batches.of_step(0)
        self.engine = Engine(setup.parts, schedule, first, self.requests.wants_any)
        self.evaluator = setup.open_evaluator(self.engine.ema, self.requests.wants_stop)
        data = fingerprint.of_data(setup.datasets, setup.sampling, group.world.rank == 0)
        own = (setup, self.engine, self.batches)
        self.state, manifest, skipped = restore(*own, data, origin, self.num_steps)
        self._check_metrics()
        opened = open_directory(setup.parts, setup.sampling, origin, self.step)
        self.record = opened.record
        self.requests.watch(opened.saver, opened.record)
        self.state.recall(opened.evaluation, *self._judged_by())
        self.decisions = self._open_decisions(opened, rolled_back)
        code = fingerprint.of_code(type(task))
        self.checkpoints = Checkpointer(*own, opened, data, code)
        self._is_sound = True  # False while a step is judged, and while it is saved
        warnings = [*opened.warnings, *skipped, *fingerprint.list_unsteady(data)]
        changes = partial(self._list_changes, warnings, manifest, code)
        engine = self.engine
        training = Training(list(engine.optimizers), engine.updating_by, engine.open_unread)
        engine.proof.open(self.batches, self.record.say, training)
        session = (opened.record, opened.directory, self.step, changes, not origin.is_resumed)
        self._log = RunLog(config, setup.parts.ranks, *session, self.batches.is_streamed)

    @property
    def config(self) -> Config:
        return self._setup.config

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
                    self._log.settle()
            saved = self._save_after_error(error)
            code = 2 if isinstance(error, ConfigError) else 1
            self.record.exit(code, describe(error) + saved, {"step": self.state.step})
        self.checkpoints.close()
        if error is not None and not saved and not isinstance(error, RolledBack):
            self._log.name_newest(self.checkpoints.newest())
        self.record.close()
        self.batches.close()
        if saved and isinstance(error, (ConfigError, RunError)):
            raise type(error)(f"{error}{saved}") from error

    def _save_after_error(self, error: BaseException) -> str:
        """Save what was trained, if an error has left it complete; return words about that."""
        step = self.state.step
        has_trained = step > self._log.first_step
        is_complete = self._is_sound and not self.engine.is_in_step and has_trained
        if not is_complete or not isinstance(error, Exception):
            return ""
        if not self.checkpoints.save_after_error(self.state, self._settle):
            return ""
        saved = f"the state after step {step:,} is saved; {self._log.next_command(True)}"
        if not isinstance(error, (ConfigError, RunError)):  # whose line ends with it
            self.record.say(saved)
        return f"; {saved}"

    def _settle(self) -> None:
        """Decide on the last outcome, and record what was logged. A collective."""
        self.decisions.flush()
        self._log.settle()

    def announce(self) -> None:
        """Print what is about to run: ranks, layout, batch arithmetic, data, model, changes.

        A collective. Call it within the run's context, which also records a failure in here.
        """
        config, setup = self.config, self._setup
        lines = [*setup.notes, *startup.arithmetic(config, self.batches.plan, self.num_steps)]
        lines += startup.describe_data(config, setup.datasets, setup.sampling)
        lines += startup.describe_model(config, self.engine.tensors.structure, setup.is_cut_fixed)
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
        rates = self.engine.optimizers.rates_around
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
        return self.is_due(self.config.eval) and self.state.evaluated < self.state.step

    def is_due(
        self, block: LogSettings | EvalSettings | CheckpointSettings, steps_ahead: int = 0
    ) -> bool:
        """Return True if logging, evaluation or saving is due; always at the end of the run."""
        step = self.state.step + steps_ahead
        if step == 0 or step == self.num_steps or self.decisions.ended_by:
            return step > 0
        if block.every_steps and step % block.every_steps == 0:
            return True
        epochs = getattr(block, "every_epochs", None)
        return epochs is not None and step % (epochs * self.batches.steps_per_epoch) == 0

    @property
    def wants_save(self) -> bool:
        """True if a checkpoint was requested that is not due by the settings."""
        return self.checkpoints.is_requested

    def request_save(self) -> Path:
        """Request a checkpoint of the state after this step, and return its future path."""
        if self.engine.proof.is_running:
            return self.checkpoints.path_of(self.state.step + 1)
        return self.checkpoints.request(self.state.step + 1)

    def react(self, outcome: Outcome) -> None:
        """Decide on the previous step's outcome: on a GPU, this one is still being computed.

        Before an evaluation or a save also on this one, which may end the run.
        """
        self._ranks.heartbeat.end_step()
        self._log.advance()  # first: what it waits for came after the previous outcome
        self._is_sound = False
        config = self.config
        try:
            self.decisions.push(outcome)
            if self.wants_save or self.is_due(config.eval) or self.is_due(config.checkpoint):
                self.decisions.flush()
        except RunError:  # on all ranks: the log shows what led to it
            self._log.settle()
            raise
        self._is_sound = True

    def _open_decisions(self, opened: RunDirectory, rolled_back: Collection[int]) -> Decisions:
        actions = Actions(
            directory=opened.directory,
            say=opened.record.say,
            note_bad_step=lambda step, why: opened.record.note(step, {BAD_STEP: why}),
            withdraw=opened.saver.withdraw,
            name_bad_examples=self._name_bad_examples,
        )
        asked = (self.requests, actions, rolled_back)
        return Decisions(self._setup.parts, self.state, self.num_steps, *asked)

    def _name_bad_examples(self, step: int) -> str:
        parts = self._setup.parts
        batch = self.batches.of_step(step - 1)
        return name_bad_examples(self.engine, parts.hooks, batch, parts.ranks.group)

    # Record -------------------------------------------------------------------------------------

    def log(self) -> None:
        """Record means, learning rate and speed since the last log, if due. A collective."""
        if self.is_due(self.config.log):
            self._ranks.heartbeat.enter(Phase.LOG)
            self._log.begin(self.engine, self.state.step, self.batches.steps_per_epoch)
            if self.state.step == self.num_steps:
                self._log.settle()

    def observe(self) -> None:
        """Compare the state of the ranks if that is due, and show progress."""
        step = self.state.step
        group, every = self._ranks.group, self.config.dist.drift_every_steps
        if every and step % every == 0 and group.world.world_size > 1:
            self._is_sound = False
            check_drift(group, step, self.engine.shards(), self.engine.strategy.mesh)
            self._is_sound = True
        self.record.progress(step, self.num_steps, step == self.num_steps)
        self.record.observe(step)
        every = self.config.log.histograms_every_steps
        if every and step % every == 0:
            for name, values in whole_parameters(self.engine.tensors, self._ranks.group):
                self.record.histogram(step, name, values)

    def evaluate(self) -> dict[str, float]:
        """Return `{"eval/loss": ...}`; empty after a stop request or without data. A collective."""
        if self.engine.proof.is_running:
            raise RuntimeError("a step that evaluates is not tried in parts")
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
        self.record.evaluation(self.state.step, metrics)
        self.record.say(startup.evaluation_line(self.state.step, self.num_steps, metrics))
        if is_best and self.config.checkpoint.keep_best > 0:
            self.request_save()
        if self.decisions.ended_by and self._log.is_behind(self.state.step):
            # the end is always logged
            self._log.begin(self.engine, self.state.step, self.batches.steps_per_epoch)

    def _judged_by(self) -> tuple[str, str, float]:
        config = self.config
        return config.best_metric, config.best_mode, config.run.min_improvement

    def _check_metrics(self) -> None:
        """Evaluate one micro-batch, so that a mistake in `metrics` shows before the first epoch."""
        names = self.evaluator.rehearse()
        best = self.config.best_metric
        if names and best not in names:
            must = f"must be one of {', '.join(names)}{suggest(best, names)}"
            raise ConfigError(f"checkpoint.best_metric={best}: {must}")

    # State --------------------------------------------------------------------------------------

    def save(self) -> None:
        """Publish a checkpoint of the state, unless this step has one already. A collective."""
        with self._log.paused():
            self.decisions.flush()  # a bad step must not be published
            self._save()

    def _save(self) -> None:
        self._is_sound = False
        for index in self.checkpoints.save(self.state, self.is_over):
            why = "cannot be read: the next readable one is used instead"
            self.record.say(f"warning: train example {index} {why}")
        self._is_sound = True

    def finish(self) -> Summary:
        """Publish the last state, record how the run ended, and return a summary. A collective."""
        self._ranks.heartbeat.enter(Phase.END)
        state = self.state
        self.decisions.flush()
        self._log.settle()
        if self.is_stopped:
            self.record.progress(state.step, self.num_steps, True)
        self._save()  # the last step may have no checkpoint yet, for example after a stop
        with self._ranks.group.agreed("saving a checkpoint"):
            self._is_sound = False
            self.checkpoints.settle(state.step)
        self._is_sound = True
        with self._ranks.group.agreed("recording"):
            self.record.settle()
        flops = self.engine.strategy.flops
        why = self.decisions.stopped_by or self.decisions.ended_by
        summary = self._log.finish(state, self.num_steps, flops, why, self.is_stopped)
        # not at SIGTERM: scancel sends it too, and SLURM requeues a preempted job itself
        is_asked = self.is_stopped and self._ranks.group.max(self._ranks.stop.name in REQUEUE)[0]
        if is_asked and self._ranks.group.world.rank == 0:
            requeue(self.record.say)
        return summary
