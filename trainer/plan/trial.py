"""The parts of a run, built on one process: task, data, model and a micro-batch without values.

Model and micro-batch are torch's fake tensors: they have shapes, dtypes, a device and storages, but
no memory. Unlike tensors of the meta device they choose the kernels of a CPU, under autocast too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
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
from trainer.data.batches import MicroBatch, Preparation
from trainer.data.order import BatchPlan, IndexSampler, check_batch
from trainer.data.sources import Source, check_dataset
from trainer.distributed.launchers import Launcher
from trainer.distributed.world import World
from trainer.draws.mode import Draws
from trainer.engine.precision import Precision, choose_precision, is_bf16_native
from trainer.errors import ConfigError
from trainer.plan.devices import Device
from trainer.setup import check_layout, list_blocks, make_model, try_optimizer
from trainer.strategy.base import call, convert, find_strategy
from trainer.strategy.batchnorm import normalize_groups
from trainer.strategy.handover import inner_first
from trainer.strategy.mesh import Mesh
from trainer.trainer import Finished

NUM_READ = 2  # examples that are really read, for the shapes of a micro-batch


def _new_mode() -> FakeTensorMode:
    # a fallback would run an operation on real memory
    return FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)


@dataclass
class Kept:
    """The parts that trials of one run with different layouts share."""

    dataset: Any = None
    draws: Draws | None = None
    mode: FakeTensorMode = field(default_factory=_new_mode)


class Trial:
    """A run as rank 0 of `world` would have it. `notes` are lines to show.

    `model` and `batch` are fake tensors of `mode`. Raises ConfigError where a real start does.
    """

    def __init__(self, config: Config, world: World, device: Device | None, kept: Kept):
        self.notes: list[str] = []
        self.device = device
        self.config = self._resolve_precision(config)
        self.world = world
        self._check()
        config = self.config
        kind = find_strategy(config.strategy.name)
        self.kind = kind
        self.mesh = Mesh.of(config.strategy.mesh, world)
        self.is_sharded = self.mesh.shard > 1
        self.precision = Precision(config.strategy.precision, torch.device("cpu"))
        self.draws = Draws(
            config.run.seed, torch.device("cpu"), kind.draws_by_example(config, world)
        )
        if kept.dataset is None:
            kept.dataset = self.task.build_dataset("train")
            check_dataset(kept.dataset, "train", config.data.path)
        self.dataset = kept.dataset
        self.plan = self._plan_batches()
        first, last = self.plan.micro_batches(0)[0]
        self.rows = last - first
        model = self._build()
        self.task._run = Finished(model, 0, None)  # hooks may use task.model
        few = self._read_examples()
        if any(is_lazy(p) for p in model.parameters()):
            with torch.no_grad():
                call(model.to(self.precision.dtype), few[0])
        self.mode = kept.mode
        self.batch: MicroBatch = self._expand(few)
        self.model = self._without_values(model)
        self.blocks = list_blocks(self.task, self.model)
        self.units = self._divide()

    @property
    def is_data_resident(self) -> bool:
        """True if the training data stays on the device."""
        return self._source.is_resident

    def _resolve_precision(self, config: Config) -> Config:
        if config.strategy.precision != "auto":
            return config
        native = is_bf16_native(torch.device("cpu"))
        if self.device:
            native = "bf16" in self.device.tflops
        chosen: Any = choose_precision(native)
        self.notes.append(f"strategy.precision=auto: planned with {chosen}")
        strategy = replace(config.strategy, precision=chosen)
        return replace(config, strategy=strategy, auto_precision=chosen)

    def _check(self) -> None:
        """Run the early checks of a start, on the planned device instead of this machine's."""
        config = self.config
        if config.strategy.devices_per_rank > 1:
            given = f"strategy.devices_per_rank={config.strategy.devices_per_rank}"
            raise ConfigError(f"{given}: trainer.plan knows one device per rank; set 1")
        is_gpu = bool(self.device and self.device.is_gpu)
        if self.device:
            self.device.flops_per_s(config.strategy.precision)
        checked = config
        if is_gpu and config.dist.backend == "nccl":  # torch may see no GPU here
            checked = replace(config, dist=replace(config.dist, backend="auto"))
        device = torch.device("cuda" if is_gpu else "cpu")
        check_layout(checked, self.world.with_devices((device,)))
        check_target(config.optim, "optim", config.packages, Optimizer)
        try_optimizer(config)
        self.task = load_task(config)(config, self.world)
        self.config = self.task.config
        self.task.world = self.world  # hooks that build something place it on the CPU

    def _plan_batches(self) -> BatchPlan:
        size = self.config.data.global_batch
        num_examples = len(self.dataset)
        if size > num_examples:
            most = f"must be at most the {num_examples} training examples"
            raise ConfigError(f"data.global_batch={size}: {most}")
        cut = self.kind.cut(self.config)
        micro_batch = check_batch(size, cut, self.mesh.data_size)
        return BatchPlan(num_examples, size, micro_batch, self.mesh.data_size, cut.unit)

    def _read_examples(self) -> MicroBatch:
        """Return a micro-batch of a few real examples, as a run prepares it on the CPU."""
        config = self.config
        cpu = torch.device("cpu")
        self._source = Source(self.dataset, "train", config.data, config.run.seed, cpu)
        to_model = partial(convert, self.precision, config.strategy.channels_last)
        methods = (self.task.split_batch, self.task.augment, to_model)
        prepare = Preparation(*methods, config.run.seed, cpu, self.draws)
        indices = torch.arange(min(NUM_READ, len(self.dataset)))
        piece = self._source.open(IndexSampler()).read(indices)
        return prepare(piece, "train", 0, 0, 0)

    # Model --------------------------------------------------------------------------------------

    def _build(self) -> nn.Module:
        model = make_model(self.task, True)
        if model is None or any(is_lazy(p) for p in model.parameters()):
            model = make_model(self.task, False)
            self.notes.append("the model cannot be built without values: it was built on the CPU")
        assert model is not None
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError("build_model returned a model without trainable parameters")
        if self.config.norm_rows is not None:
            normalize_groups(model, self.config.norm_rows)
        return model.train()

    def _without_values(self, model: nn.Module) -> nn.Module:
        """Replace parameters and buffers by fake tensors of the run's dtype and memory format."""
        replaced: dict[torch.Tensor, Any] = {}
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        if tensor not in replaced:
                            replaced[tensor] = self._fake(tensor)
                        tensors[key] = replaced[tensor]
        return model

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self.precision.dtype if tensor.is_floating_point() else tensor.dtype
        form = torch.contiguous_format
        if self.config.strategy.channels_last and tensor.dim() == 4:
            form = torch.channels_last
        with self.mode:
            made = torch.empty(tensor.shape, dtype=dtype, memory_format=form)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, tensor.requires_grad)
        vars(made).update(vars(tensor))  # such as a mark for the optimizer
        return made

    def _expand(self, few: MicroBatch) -> MicroBatch:
        """Return the examples as fake tensors with the rows of a micro-batch."""

        def expand(tensor: torch.Tensor) -> torch.Tensor:
            shape = list(tensor.shape)
            if shape:
                shape[0] = shape[0] * self.rows // num_read
            return torch.empty(shape, dtype=tensor.dtype)

        num_read = min(NUM_READ, len(self.dataset))
        with self.mode:
            return tree_map_only(torch.Tensor, expand, few)

    def _divide(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each unit of FSDP: of each block, then of the rest."""
        seen: set[nn.Parameter] = set()
        units = []
        for module in (
            [*inner_first(self.model, self.blocks), self.model] if self.is_sharded else ()
        ):
            own = [p for p in module.parameters() if p not in seen and p.dim()]
            seen.update(own)
            if own:
                units.append(own)
        return units


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
