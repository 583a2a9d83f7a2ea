"""The log of a run: its output at the start, between steps and at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.base.errors import STOPPED, ConfigError
from trainer.base.process.table import usable_cores
from trainer.core.checkpoints.progress import RunProgress
from trainer.core.config.schema import Config
from trainer.core.distributed import accelerator
from trainer.core.distributed.devices import find_known
from trainer.core.distributed.group import Group, most
from trainer.core.distributed.ranks import Ranks
from trainer.core.distributed.world import World
from trainer.core.engine.context import HOOK_MODULES, Parts
from trainer.core.engine.deferred_reads import DeferredRead, DeferredReads
from trainer.core.engine.engine import Engine
from trainer.core.engine.evaluation import Evaluator
from trainer.core.engine.values import check_named
from trainer.core.record import startup
from trainer.core.record.startup import Summary
from trainer.core.record.trackers import SAMPLES, Record
from trainer.core.strategy.mesh_sizes import Mesh

BLOCKED = 0.1  # of the time, waiting for data
BLOCKED_S = 0.1  # at least, between two logs
# The largest of all ranks, in this order
SLOWEST = ("speed/data_wait", "speed/memory_gb", "speed/reserved_gb")


class Clock:
    """Clock of training time in seconds, without evaluation and saving."""

    def __init__(self) -> None:
        self._paused = 0.0

    def read(self) -> float:
        return time.monotonic() - self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self._paused += time.monotonic() - begun


def peak_of(world: World, precision: str) -> float | None:
    """Return the peak of all devices in operations per second; None if it is not known."""
    if not accelerator.is_used(world.device):
        return None
    if world.world_size > 1 and not accelerator.carries(dist.get_backend()):  # they may share one
        return None
    device = find_known(accelerator.describe(world.device))
    peak = device and device.peak(precision)
    return peak * world.world_size * len(world.devices) if peak else None


def check_texts(hook: str, returned: Any) -> dict[str, str]:
    """Return what a hook returned as a dict. Raises ConfigError unless it has texts by name."""
    texts = check_named(f"{hook} returned", returned)
    for name, text in texts.items():
        if not isinstance(text, str):
            kind = type(text).__name__
            raise ConfigError(f"{hook} returned a value of type {kind} as {name}: must be a text")
    return texts


class RunLog:
    """The lines and numbers of one session of a run, which began at step `first_step`."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        record: Record,
        later: DeferredReads,
        directory: Path,
        first_step: int,
        list_changes: Callable[[], Sequence[str]],
        is_new: bool,
        is_streamed: bool,
    ):
        """`list_changes` returns the last lines of the start. It is called by `announce`, where the
        run's context records a failure. `is_new` is False if a run is resumed. Data that
        `is_streamed` may block the steps."""
        self.first_step = first_step
        self.directory = directory
        self._config = config
        self._ranks = ranks
        self._later = later
        self._record = record
        self._clock = Clock()
        self._began_s = self._clock.read()
        self._logged = (first_step, self._began_s)
        self._list_changes = list_changes
        self._is_new = is_new
        self._may_hint = is_streamed

    @cached_property
    def _peak(self) -> float | None:
        return peak_of(self._group.world, self._config.strategy.precision)

    @property
    def _group(self) -> Group:
        return self._ranks.group

    @property
    def _shown(self) -> Path:
        return self._config.shown(self.directory)

    def paused(self) -> AbstractContextManager[None]:
        """Do not count the time of the block as training; record what was logged before it."""
        self.flush()
        return self._clock.paused()

    def announce(self, mesh: Mesh, threads: int, built: Sequence[str]) -> None:
        """Print ranks, layout, the lines of what was built, and changes. A collective."""
        world = self._group.world
        ranks = self._group.collect(startup.describe_rank(world, mesh))
        title = startup.fact(self._config.task.name, str(self._shown))
        layout = startup.layout(self._config, world, threads)
        for line in (title, layout, *built, *self._list_changes()):
            self._record.say(line)
        if self._config.log.start == "full":
            self._record.table(startup.rank_columns(mesh), startup.rank_rows(ranks))
            for line in startup.picture(mesh):
                self._record.say(line)
        if self._is_new:
            self._record.hyper_parameters(self._config.flat())

    def begin(self, engine: Engine, step: int, steps_per_epoch: int) -> None:
        """Record means since the last call, learning rate, speed and epoch of `step`. A collective.

        On a device they are recorded by `later`, one to three steps later, so that the host does
        not wait.
        """
        self._later.begin(self._log(engine, step, step / steps_per_epoch))

    def flush(self) -> None:
        """Record all that `begin` began; the host waits for it. A collective."""
        self._later.finish()

    def _log(self, engine: Engine, step: int, epoch: float) -> DeferredRead:
        """Record the numbers of `step`. On a device, what follows a `yield` runs a step later."""
        world = self._group.world
        rates = engine.optimizers.rates.by_name()
        norms = engine.optimizers.norms.take()
        _, before = self._logged
        speeds = self._speeds(engine, step)
        seconds = self._logged[1] - before
        change = engine.strategy.tensors.find_change()
        waited = speeds.pop("speed/data_wait")
        own = [float(bool(change)), waited, *(size / 1e9 for size in world.peak_bytes())]
        reading = engine.recorder.means.take(self._group)
        compared = yield reading.counts()

        totals = yield reading.sums(compared)

        means = reading.means(totals)
        host = accelerator.send(torch.tensor(own, dtype=torch.float64), world.device)
        numbers = torch.cat([host, *(norm.double().view(1).to(host) for norm in norms.values())])
        is_changed, *maxima = (yield most(self._group, numbers)).tolist()

        values = {f"train/{name}": mean for name, mean in means.items()} | rates
        for name, norm in zip(norms, maxima[len(own) - 1 :], strict=True):
            values["optim/grad_norm" + (f"/{name}" if name != "loss" else "")] = norm
        values |= speeds | dict(zip(SLOWEST, maxima[: len(own) - 1], strict=False))
        self._hint_at_data(maxima[0], seconds)
        if is_changed:
            with self._group.agreed("checking the model"):
                if change:
                    raise ConfigError(change)
        self._record.scalars(step, {**values, "epoch": round(epoch, 6)})

    def _hint_at_data(self, waited: float, seconds: float) -> None:
        """Say once that the steps wait for data, if that took a share `waited` of the seconds."""
        if not self._may_hint or waited < BLOCKED or waited * seconds < BLOCKED_S:
            return
        self._may_hint = False
        workers = self._config.data.workers
        cores = usable_cores()
        advice = "read less per example, or store what is computed of it"
        if workers < cores:
            advice = f"try data.workers={min(cores, max(2, 2 * workers))}"
        self._record.say(f"hint: data loading blocks training, {waited:.0%} of the time; {advice}")

    def _speeds(self, engine: Engine, step: int) -> dict[str, float]:
        """Return the speed since the last call, and the share of its time spent waiting for data.

        On devices whose peak is known also the model's operations as a fraction of it (MFU;
        Chowdhery et al., arXiv:2204.02311): forward and backward, without recomputation.
        """
        then, before = self._logged
        self._logged = (step, self._clock.read())
        examples = (step - then) * self._config.data.global_batch
        seconds = max(self._logged[1] - before, 1e-9)
        rate = examples / seconds
        waited = min(1.0, self._ranks.heartbeat.take_wait() / seconds)
        speeds = {"speed/examples_per_s": rate, "speed/data_wait": waited}
        if self._peak:
            speeds["speed/mfu"] = rate * engine.strategy.flops / self._peak
        return speeds

    def note_evaluation(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        self._record.evaluation(step, metrics)
        self._record.say(startup.evaluation_line(step, num_steps, metrics))

    @torch.no_grad()
    def note_samples(self, step: int, parts: Parts, evaluator: Evaluator) -> None:
        """Record what the task's `samples` returns, nothing of a divided model. A collective."""
        has_own = getattr(parts.hooks.samples, "__module__", "") not in HOOK_MODULES
        if has_own and not parts.strategy.mesh.divides_model:
            with self.paused(), evaluator.evaluating(), self._group.agreed("making samples"):
                texts = check_texts("samples", parts.hooks.samples(parts.strategy.forward))
            self._record.note(step, {f"{SAMPLES}{name}": text for name, text in texts.items()})

    def is_behind(self, step: int) -> bool:
        """Return True if the last call of `begin` was for an earlier step."""
        return self._logged[0] < step

    def next_command(self, is_stopped: bool, ended_by: str = "") -> str:
        return startup.next_command(
            self._config, self._group.world, self._shown, is_stopped, ended_by
        )

    def name_newest(self, step: int) -> None:
        """Tell how to resume a run that failed, if it has a checkpoint: of `step`, else 0."""
        world = self._group.world
        for line in startup.newest_checkpoint(self._config, world, self._shown, step):
            self._record.say(line)

    def finish(
        self,
        state: RunProgress,
        num_steps: int,
        flops: float,
        why: str,
        is_stopped: bool,
        notes: Sequence[str] = (),
    ) -> Summary:
        """Tell how the run ended, and return its summary.

        `why` is empty at the last step; `notes` are lines before the command that goes on.
        """
        seconds = self._clock.read() - self._began_s
        steps = state.step - self.first_step
        speed = steps * self._config.data.global_batch / max(seconds, 1e-9)
        summary = Summary(
            directory=self.directory,
            step=state.step,
            metrics=state.metrics,
            best=state.best,
            best_step=state.best_step,
            seconds=seconds,
            examples_per_s=speed,
            flops_per_s=speed * flops,
            exit_code=STOPPED if is_stopped else 0,
        )
        best = self._config.best_metric
        for line in startup.ending(summary, num_steps, steps, best, why, self._shown):
            self._record.say(line)
        for line in (*notes, self.next_command(is_stopped, why)):
            self._record.say(line)
        reason = "stopped" if is_stopped else "done" + (f": {why}" if why else "")
        facts: dict[str, Any] = {"step": state.step, "metrics": state.metrics, "best": state.best}
        self._record.exit(summary.exit_code, reason, facts)
        return summary
