"""The parts of a run, built on one process: task, data, model and a micro-batch without values."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from trainer.cli import load_task
from trainer.config.schema import Config
from trainer.config.targets import check_target
from trainer.data.batches import Batches
from trainer.data.preparation import MicroBatch
from trainer.distributed import accelerator
from trainer.distributed.devices import Device
from trainer.distributed.launchers import Launcher
from trainer.distributed.world import World
from trainer.engine.precision import (
    OPEN,
    Precision,
    choose_precision,
    is_bf16_native,
    takes_bf16,
)
from trainer.errors import ConfigError
from trainer.hook_errors import call
from trainer.plan.counting import Traffic
from trainer.plan.fake_model import FakeModel
from trainer.setup.build import (
    build_dataset,
    build_preparation,
    find_sampling,
    make_blueprint,
    make_model,
)
from trainer.setup.checks import check_layout, try_optimizer
from trainer.strategy.base import Strategy, find_strategy
from trainer.strategy.mesh import Mesh
from trainer.strategy.modules.batchnorm import normalize_groups
from trainer.trainer import FitResult, Trainer

NUM_READ = 2  # examples that are really read, for the shapes of a micro-batch


class SharedParts:
    """The parts that trials of one run with different layouts share."""

    def __init__(self) -> None:
        # a fallback would run an operation on real memory
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._dataset: Any = None

    def open_dataset(self, task: Trainer) -> Any:
        """Return the training data, which the first trial opens."""
        if self._dataset is None:
            task.prepare()
            self._dataset = build_dataset(task, "train")
        return self._dataset


class Trial:
    """A run as rank 0 of `world` would have it. `notes` are lines to show.

    `batches` is the real data, `batch` a micro-batch of fake tensors: these are of `mode`, as those
    of `model` are. Raises ConfigError where a real start does.
    """

    def __init__(self, config: Config, world: World, device: Device | None, kept: SharedParts):
        self.notes: list[str] = []
        self.device = device
        self.mode = kept.mode
        config = self._resolve_precision(config)
        self._check(config, world)
        self.mesh = Mesh.of(config.strategy.mesh, world)
        self.traffic = Traffic(self.mesh)
        world = world.with_groups(self.traffic.groups)
        self.task = load_task(config)(config, world)
        self.task.world = world  # hooks that build something place it on the CPU
        config = self.config
        self.kind: type[Strategy] = find_strategy(config.strategy)
        self.precision = Precision(config.strategy.precision, world.device)
        prepare = build_preparation(self.task, self.precision)
        self.draws = prepare.draws
        dataset = kept.open_dataset(self.task)
        cut = self.kind.cut(config)
        ranks: Any = SimpleNamespace(heartbeat=None)  # nothing watches this process
        sampling = find_sampling(self.task, dataset)
        numbers = (0, self.mesh.data_size)
        self.batches = Batches(dataset, sampling, config, cut, *numbers, prepare, ranks)
        if config.data.micro_batch == "auto":
            self.notes.append(f"data.micro_batch=auto: planned with {self.rows}, as if all fit")
        model = self._build_model()
        self.task._run = FitResult(model, 0, None)  # hooks may use task.model
        (few,) = self.batches.of_examples(torch.arange(min(NUM_READ, len(dataset))))
        blueprint = make_blueprint(self.task, model, self.precision, self.draws, lambda: few[0])
        if any(is_lazy(p) for p in model.parameters()):
            with torch.no_grad():
                call(model.to(self.precision.dtype), few[0])
        self.batch = self._expand(few)
        self.model = FakeModel(blueprint, self.mesh, self.mode)

    @property
    def config(self) -> Config:
        return self.task.config

    @property
    def rows(self) -> int:
        """Rows of the first micro-batch; no other has more."""
        first, last = self.batches.plan.micro_batches(0)[0]
        return last - first

    def _resolve_precision(self, config: Config) -> Config:
        given = config.strategy.precision
        if given not in OPEN:
            return config
        is_taken = takes_bf16(given, self.device is not None and self.device.is_gpu)
        here = torch.device("cpu")
        is_native = "bf16" in self.device.tflops if self.device else is_bf16_native(here)
        chosen: Any = choose_precision(is_taken and is_native)
        if is_taken:
            self.notes.append(f"strategy.precision={given}: planned with {chosen}")
        strategy = replace(config.strategy, precision=chosen)
        return replace(config, strategy=strategy)

    def _check(self, config: Config, world: World) -> None:
        """Run the early checks of a start, on the planned device instead of this machine's."""
        if config.strategy.devices_per_rank > 1:
            given = f"strategy.devices_per_rank={config.strategy.devices_per_rank}"
            raise ConfigError(f"{given}: trainer.plan knows one device per rank; set 1")
        is_gpu = bool(self.device and self.device.is_gpu)
        if self.device:
            self.device.flops_per_s(config.strategy.precision)
        checked = config
        if is_gpu and accelerator.carries(config.dist.backend):  # torch may see no GPU here
            checked = replace(config, dist=replace(config.dist, backend="auto"))
        device = torch.device("cuda" if is_gpu else "cpu")
        check_layout(checked, world.with_devices((device,)))
        check_target(config.optim, "optim", config.packages, Optimizer)
        try_optimizer(config)

    def _build_model(self) -> nn.Module:
        model = make_model(self.task, True)
        if model is None or any(is_lazy(p) for p in model.parameters()):
            model = make_model(self.task, False)
            self.notes.append("the model cannot be built without values: it was built on the CPU")
        assert model is not None
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError("build_model: must return a model with trainable parameters")
        if self.config.norm_rows is not None:
            normalize_groups(model, self.config.norm_rows)
        return model

    def _expand(self, few: MicroBatch) -> MicroBatch:
        """Return the examples as fake tensors with the rows of a micro-batch."""

        def expand(tensor: torch.Tensor) -> torch.Tensor:
            shape = list(tensor.shape)
            if not shape:
                return torch.empty(shape, dtype=tensor.dtype)
            rows = shape[0] * self.rows // num_read
            if not tensor.stride(0):  # all rows share their memory
                return torch.empty(shape[1:], dtype=tensor.dtype).expand(rows, *shape[1:])
            return torch.empty([rows, *shape[1:]], dtype=tensor.dtype)

        num_read = min(NUM_READ, len(self.batches.dataset))
        with self.mode:
            return tree_map_only(torch.Tensor, expand, few)


def place(config: Config, ranks: int, local_ranks: int) -> World:
    """Return the world of rank 0 as a launcher would set it."""
    launcher = "mpirun" if config.dist.backend == "mpi" else "torchrun"
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    return World(
        world_size=ranks,
        local_world_size=local_ranks,
        num_nodes=ranks // local_ranks,
        launcher=Launcher(launcher, variables),
    )
