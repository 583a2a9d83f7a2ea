"""The Trainer: what a task writes, the loop, evaluation. Subclass it for a task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from trainer.config.schema import Config
from trainer.config.targets import call_target, check_target
from trainer.config.typed import suggest
from trainer.data.order import check_batch
from trainer.data.sources import workers_named
from trainer.distributed.group import Group, choose_backend, process_group
from trainer.distributed.launchers import requeue
from trainer.distributed.rendezvous import check_init
from trainer.distributed.signals import REQUEUE, StopRequest, stop_requests
from trainer.distributed.watch.heartbeat import Heartbeat, Phase, watched
from trainer.distributed.world import World
from trainer.engine.diagnosis import check_drift, name_bad_examples
from trainer.engine.evaluation import Stopped, score
from trainer.engine.means import Values
from trainer.errors import ConfigError, RunError
from trainer.record import directory as rundir
from trainer.record import fingerprint
from trainer.record import startup as report
from trainer.run import Session, Share
from trainer.strategy import check_strategy
from trainer.strategy.base import MicroBatches
from trainer.task import FUSED, Task

STOPPED = 75  # EX_TEMPFAIL: ended by a signal after a published checkpoint; start it again


@dataclass
class Summary:
    """What `fit` returns, alike on every rank."""

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
    """All ranks agreed to begin again from the newest checkpoint of the run in `directory`."""

    def __init__(self, directory: Path):
        super().__init__(f"going back to the newest checkpoint of {directory}")
        self.directory = directory


class Trainer(Task):
    """Trains a model over any layout; a task gives `build_model`, `build_dataset` and `loss` and may replace more."""

    def __init__(self, config: Config, world: World | None = None):
        super().__init__(config, world)
        self.skipped: list[str] = []
        self._session: Session | None = None
        self._trained: str | None = None
        self._rolled_back = set[int]()

    def train_step(self, micro_batches: MicroBatches) -> None:
        self.update(micro_batches)

    # What one calls ---------------------------------------------------------------------------------------------------

    def update(
        self,
        micro_batches: MicroBatches,
        loss: Callable[[Any, Any], Values] | None = None,
        optimizers: Sequence[Optimizer] | None = None,
        name: str = "loss",
    ) -> None:
        """From within `train_step`: the gradient of the mean of `loss` over the global batch, clipped, and a step.

        `loss` is in the manner of `Trainer.loss`, which is the default; its mean is logged as `train/<name>`. Only
        `optimizers` (all by default) step. A second update may take the same `micro_batches` again.
        """
        now, max_norm = self._now, self.config.run.clip_norm
        objective = now.objective(name, loss or self.loss)
        statistics = now.strategy.running_statistics()
        totals = now.strategy.forward_backward(now.wrapped, micro_batches, objective)
        now.heartbeat.enter(Phase.UPDATE)
        if optimizers is not None:
            now.strategy.keep_gradients(optimizers)
        gradients, factor = now.strategy.gradients(), objective.factor(totals)
        clip = None if max_norm is None else partial(now.strategy.clip, now.wrapped, max_norm)
        found_inf = now.precision.update(optimizers or now.optimizers, gradients, factor, clip)
        now.strategy.undo_running_statistics(statistics, found_inf)
        now.strategy.drop_gradients()
        now.verdict += [totals, found_inf]

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that `build_optimizer` gave; only while `fit` runs."""
        return self._now.optimizers

    def fit(self) -> Summary:
        """Train to the end, or until asked to stop. Raises ConfigError and CheckpointError, one line for the user."""
        self.step = 0
        origin = self.check(is_training=True)
        self.try_optimizer()
        summary: Summary | None = None
        self._rolled_back.clear()
        with self._ranks() as ranks:
            starters = " ".join(
                ranks[0].gather_text(" ".join(self.world.launcher.starters))
            ).split()
            self.world = replace(
                self.world, launcher=replace(self.world.launcher, starters=tuple(starters))
            )
            with ranks[0].agreed("finding the run directory"):
                if self.world.rank == 0:
                    origin = rundir.again(self.config, self.world.launcher) or origin
                if origin.refused:
                    raise ConfigError(origin.refused)
            while summary is None:
                try:
                    with workers_named():  # also while an end is written down
                        summary = self._fit(origin, *ranks)
                except RolledBack as back:
                    origin, self.step = rundir.back_to(back.directory, origin), 0
                finally:
                    self._session = None  # the wrapper goes before its group
        self._trained = str(summary.directory)
        return summary

    def evaluate(self) -> dict[str, float]:
        """The metrics on the eval split, `{"eval/loss": ...}`: of the model in training, of `run.resume`, or as fitted.

        `skipped` then holds a line for each checkpoint that did not verify and was passed over.
        """
        if self._session is not None:
            return self._evaluate()
        origin = self.check(is_training=False)
        with self._ranks() as ranks:
            try:
                self._session = Session(self, *ranks)
                with ranks[0].peers_named():
                    self.skipped = self._session.build_evaluation(origin).skipped
                    return self._evaluate()
            except Stopped:
                raise KeyboardInterrupt from None
            finally:
                self._session = None

    def save_checkpoint(self) -> Path:
        """From within `train_step`, on every rank: have the state after this step published, and where it will be."""
        self._now.is_save_due = True
        return self._now.path_of(self.step + 1)

    def load_checkpoint(self, path: Path) -> None:
        """Before `fit` or `evaluate`: begin from a checkpoint, as `run.resume` does."""
        if self._session is not None:
            raise RuntimeError(
                "load_checkpoint: call it before fit or evaluate; a step cannot be taken back amid a run"
            )
        self.config.run.resume = str(path)

    # The loop ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def _ranks(self) -> Iterator[tuple[Group, StopRequest, Heartbeat]]:
        block = self.config.dist
        with (
            stop_requests() as stop,
            process_group(block, self.world, fingerprint.of_start(self)) as group,
            watched(block.hang_timeout_s, group) as heartbeat,
        ):
            yield group, stop, heartbeat

    def _fit(
        self, origin: rundir.Origin, group: Group, stop: StopRequest, heartbeat: Heartbeat
    ) -> Summary:
        now = self._session = Session(self, group, stop, heartbeat)
        try:
            with group.peers_named(), workers_named():
                restored = now.build_training(origin)
                self._check_metrics()
                now.open_record(origin, restored)
                self._train()
                return self._finish()
        except BaseException as error:
            code = 2 if isinstance(error, ConfigError) else 1
            now.writer.exit(code, f"{type(error).__name__}: {error}", step=self.step)
            raise
        finally:
            now.writer.close()
            now.loaders.clear()  # data workers end now; found by the garbage collector each would be waited for 5 s

    def _train(self) -> None:
        now = self._now
        self._began = self._logged = (self.step, now.watch.read())
        try:
            if self._is_due(self.config.eval) and now.progress.evaluated < self.step:
                self._evaluate_and_log()
            while self.step < now.num_steps and not now.is_stopped:
                epoch, start = divmod(self.step, now.plan.steps_per_epoch)
                now.sampler.set_epoch(epoch, start)
                batches = iter(now.loaders["train"])
                for _ in range(start, now.plan.steps_per_epoch):
                    now.set_rates(now.schedule(self.step))
                    now.verdict, now.is_asked = [], now.wants_stop
                    now.heartbeat.begin_step(self.step)
                    share = list(islice(batches, now.plan.accumulation))
                    now.ledger.note([indices for _, indices in share], now.group)
                    now.heartbeat.enter(Phase.COMPUTE)
                    self.train_step(Share(now, epoch, share))
                    self.step += 1
                    now.heartbeat.end_step()
                    if self._at_boundary():
                        break
        except Stopped:
            now.is_stopped = True

    def _at_boundary(self) -> bool:
        """What is due after a step; True to leave the epoch."""
        now, is_last = self._now, self.step == self._now.num_steps
        if not now.verdict:
            raise RuntimeError("train_step made no update: call self.update(micro_batches) in it")
        now.means.end_row()
        if now.ema is not None:
            now.ema.update()
        now.is_stopped = self._judge(now.verdicts.push(now.verdict), self.step - 1) and not is_last
        if is_last or self.step % self.config.log.every_steps == 0:
            self._log()
        if (
            (every := self.config.dist.drift_every_steps)
            and self.step % every == 0
            and self.world.world_size > 1
        ):
            check_drift(now.group, self.step, now.strategy.state_dict(now.wrapped, now.optimizers))
        now.writer.progress(self.step, now.num_steps)
        now.writer.observe(self.step, self.model)
        if now.is_stopped:
            return True
        is_better = self._is_due(self.config.eval) and self._evaluate_and_log()
        if self._is_due(self.config.checkpoint) or is_better or now.is_save_due:
            with now.watch.paused():
                is_asked = self._judge(
                    now.verdicts.flush(), self.step
                )  # before the step is published
                now.is_stopped = is_asked and not is_last
                now.save()
        return is_last or now.is_stopped

    def _judge(self, verdict: list[float] | None, step: int) -> bool:
        """What the host learns of a step, one later and alike on every rank; True if some rank was asked to stop."""
        if verdict is None:
            return False
        now, weights, stops, found_inf = self._now, verdict[::3], verdict[1::3], verdict[2::3]
        if 0 in weights:
            now.writer.say(
                f"warning: step {step}: the weights of its examples sum to 0, so no weight was updated"
            )
        elif any(found_inf):
            self._judge_bad(step)
        else:
            now.num_skipped = 0
        return any(stops)

    def _judge_bad(self, step: int) -> None:
        """What `run.on_bad_step` says of a step that was not finite and changed nothing; alike on every rank."""
        now, policy = self._now, self.config.run.on_bad_step
        now.num_skipped += 1
        if now.precision.is_scaled and now.num_skipped < now.precision.max_skipped:
            now.writer.say(
                f"warning: step {step}: the scaled gradient is not finite, so the update was skipped"
            )
            return
        found = f"step {step}: {name_bad_examples(now, step - 1)}"
        if now.num_skipped == now.precision.max_skipped:
            raise RunError(f"{found}; and no finite gradient in {now.num_skipped} steps on end")
        if policy == "stop" or step in self._rolled_back:
            again = "again, so it is not chance; " if step in self._rolled_back else ""
            raise RunError(
                f"{found}; {again}look at it with python -m trainer.replay {now.directory} step={step}"
            )
        if policy == "rollback":
            now.writer.say(f"warning: {found}; going back to the newest checkpoint")
            self._rolled_back.add(step)
            now.withdraw(step)
            raise RolledBack(now.directory)
        now.writer.say(f"warning: {found}; the update was skipped")

    def _log(self) -> None:
        now, (step, then) = self._now, self._logged
        now.heartbeat.enter(Phase.LOG)
        now.gather_replaced()
        means, seconds = now.means.read(now.group), now.watch.read()
        speed = (self.step - step) * self.config.data.global_batch / max(seconds - then, 1e-9)
        rate = float(now.optimizers[0].param_groups[0]["lr"])
        losses = {f"train/{name}": mean for name, mean in means.items()}
        now.writer.scalars(self.step, {**losses, "optim/lr": rate, "speed/examples_per_s": speed})
        self._logged = (self.step, seconds)

    def _finish(self) -> Summary:
        now, progress = self._now, self._now.progress
        now.heartbeat.enter(Phase.END)
        self._judge(now.verdicts.flush(), self.step)
        if now.is_stopped:
            now.writer.progress(self.step, self.step)
        now.save()  # where it is not there yet: after a stop, or a branch that had nothing left to do
        now.settle()
        steps, seconds = self.step - self._began[0], now.watch.read() - self._began[1]
        speed, code = (
            steps * self.config.data.global_batch / max(seconds, 1e-9),
            STOPPED if now.is_stopped else 0,
        )
        best = (progress.best, progress.best_step)
        speeds = (speed, speed * now.strategy.flops)
        summary = Summary(now.directory, self.step, progress.metrics, *best, seconds, *speeds, code)
        again = report.resume_command(self.world, now.directory)
        for line in report.ending(
            summary, now.num_steps, steps, self.config.checkpoint.metric, now.stop.name, again
        ):
            now.writer.say(line)
        facts = {"step": self.step, "metrics": progress.metrics, "best": progress.best}
        now.writer.exit(code, "stopped" if now.is_stopped else "done", **facts)
        # SIGTERM is scancel's too, and then nobody wants it back; a preempted job SLURM requeues by itself.
        is_asked = bool(code) and now.group.max(now.stop.name in REQUEUE)[0]
        if is_asked and self.world.rank == 0 and (told := requeue()):
            now.writer.say(told)
        return summary

    # Evaluation -------------------------------------------------------------------------------------------------------

    def _evaluate_and_log(self) -> bool:
        """Evaluate; True if checkpoints are kept by a metric and this is the best so far."""
        now, block = self._now, self.config.checkpoint
        with now.watch.paused():
            metrics = self._evaluate()
        if not metrics:
            return False
        progress = now.progress
        progress.metrics, progress.evaluated = metrics, self.step
        now.writer.scalars(self.step, metrics)
        now.writer.say(f"step {self.step:,}: {report.metric_line(metrics)}")
        best_of, sign = f"{block.best_mode} {block.metric}", 1 if block.best_mode == "max" else -1
        if progress.best_of != best_of:
            progress.best, progress.best_step, progress.best_of = None, None, best_of
        value = metrics[block.metric]
        if math.isnan(value) or (
            progress.best is not None and sign * value <= sign * progress.best
        ):
            return False
        progress.best, progress.best_step = value, self.step
        return block.keep_best > 0

    @torch.no_grad()
    def _evaluate(self, limit: int | None = None) -> dict[str, float]:
        with self._now.averaged():
            return score(self._now, limit)

    def _check_metrics(self) -> None:
        """Evaluate one micro-batch before the first step: a mistake in `metrics` shows now, not after an epoch."""
        names, best = self._evaluate(limit=1), self.config.checkpoint.metric
        if names and best not in names:
            near = suggest(best, names)
            raise ConfigError(
                f"checkpoint.best_metric={best}: must be one of {', '.join(names)}{near}"
            )

    # Checks -----------------------------------------------------------------------------------------------------------

    def check(self, is_training: bool) -> rundir.Origin:
        """The first gate: all that config, environment and manifests can tell, before a socket or a directory."""
        config, world = self.config, self.world
        check_strategy(config, world)
        choose_backend(config.dist, world)
        check_init(config.dist, world)
        check_batch(config.data.global_batch, config.data.micro_batch, world.world_size)
        if is_training:
            check_target(config.optim, "optim", self.config.packages, Optimizer)
            check_target(config.schedule, "schedule", self.config.packages)
        origin = rundir.Origin()
        if world.rank == 0:  # the disk is rank 0's: another node need not see it
            resume = config.run.resume or self._trained
            origin = rundir.locate(config, world.launcher) if is_training else rundir.find(resume)
        return origin

    def try_optimizer(self) -> None:
        """The end of the first gate: torch's optimizers check their own arguments, and load dynamo, in a second."""
        if self.config.optim["_target_"] in FUSED:
            weights = [torch.zeros(1, requires_grad=True)]
            call_target(self.config.optim, "optim", self.config.packages, Optimizer, weights)

    def _is_due(self, block: Any) -> bool:
        step, now, steps, epochs = self.step, self._now, block.every_steps, block.every_epochs
        if step == now.num_steps or (steps and step and step % steps == 0):
            return step > 0
        return bool(epochs and step and step % (epochs * now.plan.steps_per_epoch) == 0)

    @property
    def _now(self) -> Session:
        if self._session is None:
            raise RuntimeError("only while fit or evaluate runs")
        return self._session
