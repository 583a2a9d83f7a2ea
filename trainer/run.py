"""What `fit` and `evaluate` stand on while they run: data, model, strategy, optimizers, record."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.checkpoints import packing
from trainer.checkpoints import transaction as checkpoint
from trainer.data.ledger import Ledger
from trainer.data.order import BatchPlan, EpochSampler, FixedSampler, ShardSampler, check_batch
from trainer.data.randomness import Random, seed_layers
from trainer.data.sources import ResidentLoader, check_dataset, index_device, open_loader
from trainer.distributed.group import Group, choose_backend
from trainer.distributed.signals import StopRequest
from trainer.distributed.watch.heartbeat import Heartbeat, Phase
from trainer.engine.ema import Ema
from trainer.engine.means import Means, Objective, OneStepLate, Values
from trainer.errors import CheckpointError, ConfigError, RunError
from trainer.record import directory as rundir
from trainer.record import fingerprint
from trainer.record import startup as report
from trainer.record.directory import Restored
from trainer.record.writers import Writer, open_writer
from trainer.schedule import rate_scale
from trainer.strategy import Strategy, build_strategy
from trainer.strategy.base import MicroBatch, remember_options
from trainer.task import Split, Task


@dataclass
class Progress:
    """What a run has reached beside its step; saved with it."""

    evaluated: int = -1
    metrics: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_step: int | None = None
    best_of: str = ""


class Stopwatch:
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


class Session:
    """Built by every rank alike: first what may fail on one of them alone, then what needs all of them."""

    plan: BatchPlan
    sampler: EpochSampler
    ledger: Ledger
    shard: ShardSampler
    wrapped: nn.Module
    schedule: Callable[[int], float]
    verdict: list[torch.Tensor]

    def __init__(self, task: Task, group: Group, stop: StopRequest, heartbeat: Heartbeat):
        self.task, self.group, self.stop, self.heartbeat = task, group, stop, heartbeat
        self.config, self.world = task.config, task.world
        self.threads = self.world.divide_threads()
        self.strategy: Strategy = build_strategy(self.config, self.world)
        self.precision = self.strategy.precision
        self.ema: Ema | None = None
        self.writer, self.directory = Writer(), Path()
        self.datasets: dict[str, Any] = {}
        self.loaders: dict[str, Any] = {}
        self.optimizers: list[Optimizer] = []
        self.means, self.verdicts = Means(), OneStepLate()
        self.objectives: dict[str, Objective] = {}
        self._elements: dict[str, int] = {}
        self.metrics: dict[str, Any] = {}
        self.progress, self.watch = Progress(), Stopwatch()
        self.replaced: dict[str, int] = {}
        self.run_id, self.sessions = secrets.token_hex(8), [[0, self.world.world_size]]
        self.num_steps = self.num_skipped = 0
        self.is_stopped = self.is_save_due = self.is_asked = False

    def build_training(self, origin: rundir.Origin) -> Restored:
        """Everything up to the first step but the record, restored from `origin`."""
        self.heartbeat.enter(Phase.BUILD)
        with self.group.agreed("building data and model"):
            self._open_train()
            self._open_eval()
            self._build_model()
        self.group.check_equal(fingerprint.of_built(self.datasets, self.task.model))
        self._wrap()
        return self._restore(origin)

    def build_evaluation(self, origin: rundir.Origin) -> Restored:
        with self.group.agreed("building data and model"):
            self._open_eval()
            self._build_model()
        self.group.check_equal(fingerprint.of_built(self.datasets, self.task.model))
        self.strategy.place(self.task.model)
        self._begin_ema()
        return self._restore(origin)

    def prepare(self, batch: Any, indices: torch.Tensor, split: Split, epoch: int) -> MicroBatch:
        """(inputs, targets) of a micro-batch: split, augmented, in the dtype of the weights."""
        inputs, targets = self.task.split_batch(batch)
        random = Random(self.config.run.seed, split, epoch, indices)
        inputs, targets = self.task.augment(inputs, targets, random, split == "train")
        return self.strategy.lay_out(self.precision.cast(inputs)), self.precision.cast(targets)

    def objective(self, name: str, loss: Callable[[Any, Any], Values]) -> Objective:
        """The one of this name, made when it is first asked for."""
        if name not in self.objectives:
            ranks, batch = self.strategy.data_parallel_size, self.config.data.global_batch
            made = Objective(loss, self.means, batch, ranks, name, self.group.share_number)
            made.elements = self._elements.get(name, 0)
            self.objectives[name] = made
        self.objectives[name].stop = self.is_asked
        return self.objectives[name]

    def averaged(self) -> AbstractContextManager[None]:
        """The model as it is evaluated: with the moving average of its weights where there is one."""
        return self.ema.swapped() if self.ema else nullcontext()

    def set_rates(self, factor: float) -> None:
        factor *= self.rate_scale
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial"]["lr"] * factor

    # Data and model ---------------------------------------------------------------------------------------------------

    def _open_train(self) -> None:
        config, device = self.config, self.world.device
        data: Any = self.task.build_dataset("train")
        self.datasets["train"] = data
        num_examples = check_dataset(data, "train", config.data.path)
        if config.data.global_batch > num_examples:
            given = f"data.global_batch={config.data.global_batch}"
            raise ConfigError(f"{given}: must be at most the {num_examples} training examples")
        ranks, rank = self.strategy.data_parallel_size, self.strategy.data_parallel_rank
        micro_batch = check_batch(config.data.global_batch, config.data.micro_batch, ranks)
        self.plan = BatchPlan(num_examples, config.data.global_batch, micro_batch, ranks)
        beside = index_device(data, config.data.path, device)
        self.sampler = EpochSampler(self.plan, config.run.seed, rank, beside)
        self.ledger = Ledger(self.plan, rank)
        self.loaders["train"] = open_loader(
            data, self.sampler, config.data, config.run.seed, "train", device
        )
        self.num_steps = config.run.steps or config.run.epochs * self.plan.steps_per_epoch
        self.rate_scale = rate_scale(config)
        self.schedule = self.task.build_schedule(self.num_steps)
        is_configured = type(self.task).build_schedule is Task.build_schedule
        name = f"schedule ({config.schedule['_target_']})" if is_configured else "build_schedule"
        try:
            ends = [float(self.schedule(step)) for step in (0, self.num_steps - 1)]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name}: must give factor(step), a number: {error}") from None
        if not all(map(math.isfinite, ends)):
            raise ConfigError(f"{name}: gives the factors {ends}: must be finite")

    def _open_eval(self) -> None:
        config, device = self.config, self.world.device
        data = self.task.build_dataset("eval")
        if data is None:
            return
        self.datasets["eval"] = data
        ranks, rank = self.strategy.data_parallel_size, self.strategy.data_parallel_rank
        default = check_batch(config.data.global_batch, config.data.micro_batch, ranks)
        num_examples = check_dataset(data, "eval", config.data.path)
        beside = index_device(data, config.data.path, device)
        self.shard = ShardSampler(
            num_examples, config.eval.micro_batch or default, rank, ranks, beside
        )
        self.loaders["eval"] = open_loader(
            data, self.shard, config.data, config.run.seed, "eval", device
        )
        self.metrics = {
            name: metric.to(device) for name, metric in self.task.build_metrics("eval").items()
        }

    def _build_model(self) -> None:
        torch.manual_seed(self.config.run.seed)
        model = self.task.build_model()
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"build_model returned a {type(model).__name__}: must be a torch.nn.Module"
            )
        self.task.model = self.wrapped = model.train()

    def _wrap(self) -> None:
        """Wrap the model around a rehearsed micro-batch, then build what needs its parameters."""
        config, model = self.config, self.task.model
        rehearsal = next(iter(self.share_of(0)))
        torch.manual_seed(config.run.seed)  # lazy layers draw their weights in the rehearsal
        self.wrapped = self.strategy.wrap(model, rehearsal, self.objective("loss", self.task.loss))
        self.strategy.tell_gradients(self.heartbeat.reduce_begun)
        self.means.clear()
        built = self.task.build_optimizer(model)
        self.optimizers = built if isinstance(built, list) else [built]
        if other := next(
            (type(found).__name__ for found in self.optimizers if not isinstance(found, Optimizer)),
            None,
        ):
            raise ConfigError(
                f"build_optimizer returned a {other}: must be an optimizer, or a list of them"
            )
        for optimizer in self.optimizers:
            remember_options(optimizer)
        self._begin_ema()

    def share_of(self, step: int) -> Share:
        """This rank's micro-batches of any step, read in this process."""
        epoch, start = divmod(step, self.plan.steps_per_epoch)
        sampler = EpochSampler(
            self.plan, self.config.run.seed, self.strategy.data_parallel_rank, self.sampler.device
        )
        sampler.set_epoch(epoch, start)
        pieces = FixedSampler(list(islice(sampler, self.plan.accumulation)), epoch)
        loader = self.loaders["train"]
        if isinstance(loader, ResidentLoader):
            return Share(self, epoch, list(loader.over(pieces)))
        here, seed, data = (
            replace(self.config.data, workers=0),
            self.config.run.seed,
            self.datasets["train"],
        )
        return Share(
            self, epoch, list(open_loader(data, pieces, here, seed, "train", self.world.device))
        )

    def _begin_ema(self) -> None:
        if (decay := self.config.run.ema_decay) is not None:
            self.ema = Ema(self.strategy.module, decay)

    # State ------------------------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Publish the state after the task's step; one that is published already is left as it is. A collective."""
        step, progress = self.task.step, self.progress
        self.heartbeat.enter(Phase.SAVE)
        path, self.is_save_due = self.path_of(step), False
        state = self.strategy.state_dict(self.wrapped, self.optimizers)
        rows = self.means.reduced(self.group)
        self.ledger.close(self.group)
        self.gather_replaced()
        parts = {
            "model.pt": state["model"],
            "training.pt": {
                "optimizers": state["optimizers"],
                "rows": rows,
                "elements": {
                    name: objective.elements for name, objective in self.objectives.items()
                },
                "precision": self.precision.state_dict(),
                "ema": self.ema.state_dict() if self.ema else {},
                "progress": asdict(progress),
            },
        }
        metrics = progress.metrics if progress.evaluated == step else {}
        facts = {
            "config": self.config.flat(),
            "data": fingerprint.of_data(self.datasets),
            "run": self.run_id,
            "run_hash": self.config.run_hash(),
            "strategy": self.config.strategy.name,
            "world_size": self.world.world_size,
            "sessions": self.sessions,
            "ledger": self.ledger.chain,
            "replaced": self.replaced,
            "metrics": rundir.strict(metrics),
        }
        with self.group.agreed("saving a checkpoint"):
            self.writer.settle()
            if not path.exists():
                self.writer.save(step, parts, facts, progress.best_step)
        return path

    def settle(self) -> None:
        """Wait until the last step is published. Raises RunError where it could not be. A collective."""
        path = self.path_of(self.task.step)
        with self.group.agreed("saving a checkpoint"):
            self.writer.settle()
            if self.world.rank == 0 and not path.exists():
                raise RunError(
                    f"{path}: could not be saved, so the run's last step is lost; make room and resume"
                )

    def withdraw(self, step: int) -> None:
        """Move the checkpoints of `step` and later aside. A collective."""
        with self.group.agreed("going back to a checkpoint"):
            self.writer.settle()
            for number, path in (
                checkpoint.steps(self.directory / "checkpoints").items()
                if self.world.rank == 0
                else ()
            ):
                if number >= step:
                    checkpoint.set_aside(path)

    @property
    def wants_stop(self) -> bool:
        """Whether this rank was asked to stop, or cannot go on."""
        return bool(self.stop) or self.writer.has_failed

    def _restore(self, origin: rundir.Origin) -> Restored:
        """Rank 0 reads and verifies, all ranks load the same bytes.

        Raises CheckpointError for the checkpoint of another model, optimizer or data set.
        """
        found: checkpoint.Loaded | None = None
        skipped: list[str] = []
        with self.group.agreed("reading the checkpoint"):
            if self.world.rank == 0:
                found, skipped = rundir.read(origin)
        facts = [found.manifest if found else None, skipped, origin.is_resumed]
        restored = Restored(*json.loads(self.group.share_text(json.dumps(facts))))
        manifest = restored.manifest
        if manifest is None:
            return restored
        state = {}
        for name in sorted(manifest["files"]):
            data = self.group.share_bytes(found.files[name] if found else None)
            state[name] = packing.unpack(data, torch.device("cpu"))
        if absent := {"model.pt", "training.pt"} - state.keys():
            raise CheckpointError(
                f"{self.path_of(manifest['step']).name}: holds no {min(absent)}: not one of a run"
            )
        training = state["training.pt"]
        if self.optimizers:
            fingerprint.check_data(self.datasets, manifest["data"])
            self.means.load(training["rows"])
            self.ledger.step, self.ledger.chain = manifest["step"], manifest["ledger"]
            self.replaced = dict(manifest["replaced"])
            self._elements = training["elements"]
            self.objectives.clear()
            self.precision.load_state_dict(training["precision"])
            if restored.is_resumed:
                self.run_id = manifest["run"]
                self.progress = Progress(**training["progress"])
        loaded = {"model": state["model.pt"], "optimizers": training["optimizers"]}
        self.strategy.load_state_dict(self.wrapped, self.optimizers, loaded)
        if self.ema:
            self.ema.load_state_dict(training["ema"])
        self.task.step = manifest["step"]
        self.sessions = [*manifest["sessions"], [manifest["step"], self.world.world_size]]
        if self.optimizers and self.task.step > self.num_steps:
            name = "run.epochs" if self.config.run.steps is None else "run.steps"
            reached = f"the run to resume is at step {self.task.step:,} already, and it asks for {self.num_steps:,}"
            raise ConfigError(
                f"{name}={getattr(self.config.run, name[4:])}: {reached}; ask for more"
            )
        return restored

    def gather_replaced(self) -> None:
        """Bring together, from all ranks, which training examples could not be read; say those that are new."""
        if self.config.data.on_error != "skip":
            return
        told = self.group.gather_text(json.dumps(getattr(self.loaders["train"], "replaced", {})))
        found = {place: other for line in told for place, other in json.loads(line).items()}
        known, unreadable = (
            {place.split("/")[1] for place in places} for places in (self.replaced, found)
        )
        for index in sorted(unreadable - known, key=int):
            self.writer.say(
                f"warning: train example {index} cannot be read: the next that can is taken instead"
            )
        self.replaced |= found
        if (count := len(known | unreadable)) > (most := max(10, self.plan.num_examples // 100)):
            raise RunError(
                f"data.on_error=skip: {count} train examples cannot be read; at most {most} may"
            )

    def path_of(self, step: int) -> Path:
        return self.directory / "checkpoints" / f"step-{step:08d}"

    # Record -----------------------------------------------------------------------------------------------------------

    def open_record(self, origin: rundir.Origin, restored: Restored) -> None:
        """Make the run directory or take the resumed one, open the writer, and say what is about to run."""
        step = self.task.step
        directory, recorded, room = "", "{}", list[str]()
        with self.group.agreed("making the run directory"):
            if self.world.rank == 0:
                path, lease = rundir.create(self.config, origin, step, self.world.launcher)
                directory, recorded = str(path), json.dumps(rundir.recorded(path, step))
                block = self.config.checkpoint
                room = report.lack_of_room(path, self.task.model, block.keep_last + block.keep_best)
                settings = (self.config.log, self.config.checkpoint, lease)
                self.writer = open_writer(0, path, step, restored.is_resumed, *settings)
        self.directory = Path(self.group.share_text(directory))
        self.heartbeat.set_directory(str(self.directory.absolute()))
        if metrics := json.loads(self.group.share_text(recorded)):
            self.progress.metrics, self.progress.evaluated = metrics, step
        ranks = self.group.gather_text(report.describe_rank(self.world))
        self.writer.table(report.RANK_COLUMNS, report.rank_rows(ranks))
        backend = choose_backend(self.config.dist, self.world)
        lines = [report.layout(self.config, self.world, backend, self.threads)]
        lines += report.arithmetic(self.config, self.plan, self.num_steps)
        lines += [report.describe_data(split, data) for split, data in self.datasets.items()]
        lines += [
            report.describe_model(self.task.model),
            f"run directory: {self.directory}",
            *room,
            *restored.skipped,
        ]
        if self.config.run.resume == "auto" and restored.manifest is None:
            lines.append("run.resume=auto found nothing to go on from: a fresh start")
        if restored.manifest is not None:
            lines += report.resumed(self.config, restored.manifest, step, self.num_steps)
        if not restored.is_resumed:
            self.writer.hyper_parameters(self.config.flat())
        for line in lines:
            self.writer.say(line)


class Share:
    """This rank's micro-batches of one step, prepared one by one as they are taken."""

    def __init__(self, session: Session, epoch: int, batches: list[tuple[Any, torch.Tensor]]):
        self.session, self.epoch, self.batches = session, epoch, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        session = self.session
        first = session.strategy.data_parallel_rank * len(self.batches)
        for number, (batch, indices) in enumerate(self.batches, first):
            if number > first:  # the loop has said so of the first
                session.heartbeat.enter(Phase.COMPUTE)
            prepared = session.prepare(batch, indices, "train", self.epoch)
            session.writer.images(prepared[0])
            seed_layers(session.config.run.seed, session.task.step, number, session.world.device)
            yield prepared
