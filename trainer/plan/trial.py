"""The parts of a run, built on one process: task, data, model and a micro-batch without values.

Model and micro-batch are torch's fake tensors: they have shapes, dtypes, a device and storages, but
no memory. Unlike tensors of the meta device they choose the kernels of a CPU, under autocast too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
from trainer.data.loaders import ExampleSource, check_dataset
from trainer.data.order import BatchPlan, IndexSampler, check_batch
from trainer.distributed.launchers import Launcher
from trainer.distributed.world import World
from trainer.engine.precision import Precision, choose_precision, is_bf16_native
from trainer.errors import ConfigError
from trainer.hook_errors import call
from trainer.micro_batch import take_rows
from trainer.plan.counting import Note, count_groups, unnoticed
from trainer.plan.devices import Device
from trainer.rng.forward import Draws
from trainer.setup.build import check_step, collate_of, list_blocks, make_model
from trainer.setup.checks import check_layout, try_optimizer
from trainer.strategy.base import Blueprint, convert, find_strategy
from trainer.strategy.context_parallel import Context
from trainer.strategy.mesh import Mesh
from trainer.strategy.mesh_model.materialize import Values
from trainer.strategy.mesh_model.partition import Partition
from trainer.strategy.modules.batchnorm import normalize_groups
from trainer.strategy.shards import replace_tensors
from trainer.strategy.tensor_parallel.plan import MatrixPart, divide_sequence
from trainer.trainer import FitResult

NUM_READ = 2  # examples that are really read, for the shapes of a micro-batch


def _new_mode() -> FakeTensorMode:
    # a fallback would run an operation on real memory
    return FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)


@dataclass
class SharedParts:
    """The parts that trials of one run with different layouts share."""

    dataset: Any = None
    draws: Draws | None = None
    mode: FakeTensorMode = field(default_factory=_new_mode)


class Trial:
    """A run as rank 0 of `world` would have it. `notes` are lines to show.

    `model` and `batch` are fake tensors of `mode`; the model is divided as the tensor plan says.
    `partial` are the parameters whose gradients the ranks of the tensor axis have in parts. `whole`
    maps the parameters to the undivided ones. Raises ConfigError where a real start does.
    """

    def __init__(self, config: Config, world: World, device: Device | None, kept: SharedParts):
        self.notes: list[str] = []
        self.device = device
        self.config = self._resolve_precision(config)
        self.world = world
        self._check()
        config = self.config
        kind = find_strategy(config.strategy)
        self.kind = kind
        self.mesh = Mesh.of(config.strategy.mesh, world)
        self.is_sharded = self.mesh.shard > 1
        self.num_shards = self.mesh.num_parts("shard", "context")
        self.precision = Precision(config.strategy.precision, torch.device("cpu"))
        self.draws = Draws(
            config.run.seed, torch.device("cpu"), kind.draws_by_example(config, world)
        )
        self.dataset = kept.dataset = kept.dataset or self._open_data()
        self.plan = self._plan_batches()
        first, last = self.plan.micro_batches(0)[0]
        self.rows = last - first
        if config.data.micro_batch == "auto":
            self.notes.append(f"data.micro_batch=auto: planned with {self.rows}, as if all fit")
        model = self._build()
        self.task._run = FitResult(model, 0, None)  # hooks may use task.model
        few = self._read_examples()
        if any(is_lazy(p) for p in model.parameters()):
            with torch.no_grad():
                call(model.to(self.precision.dtype), few[0])
        self.mode = kept.mode
        self.batch: MicroBatch = self._expand(few)
        self.context: Context | None = None
        self._note: Note = unnoticed
        self.blocks = list_blocks(self.task, model)
        self.partition = self._divide(model, few[0])
        self.partial = self.partition.partial  # while its model has the parameters that it knows
        cuts = [self.partition.cuts.get(p) for p in model.parameters()]
        self.model = self._without_values(model)
        every = zip(self.model.parameters(), cuts, strict=True)
        self.whole = {p: self._whole(p, cut) for p, cut in every}

    @contextmanager
    def noting(self, note: Note) -> Iterator[None]:
        """Call `note` during the block with what the groups of divided layers would send."""
        self._note = note
        try:
            yield
        finally:
            self._note = unnoticed

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
        return replace(config, strategy=strategy)

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

    def _open_data(self) -> Any:
        self.task.prepare()
        dataset = self.task.build_dataset("train")
        check_dataset(dataset, "train", self.config.data.path)
        return dataset

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
        collate = collate_of(self.task)
        self._source = ExampleSource(
            self.dataset, "train", config.data, config.run.seed, cpu, collate
        )
        to_model = partial(convert, self.precision, config.strategy.channels_last)
        methods = (self.task.split_batch, self.task.augment, to_model)
        prepare = Preparation(*methods, config.run.seed, cpu, self.draws, collate)
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
            raise ConfigError("build_model: must return a model with trainable parameters")
        if self.config.norm_rows is not None:
            normalize_groups(model, self.config.norm_rows)
        return model.train()

    def _without_values(self, model: nn.Module) -> nn.Module:
        """Replace parameters and buffers by fake tensors of the run's dtype and memory format."""
        replace_tensors(model, lambda _, tensor: self._fake(tensor))
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

    def _whole(self, part: nn.Parameter, cut: MatrixPart | None) -> nn.Parameter:
        if cut is None:
            return part
        with self.mode:
            return nn.Parameter(torch.empty(cut.shape, dtype=part.dtype), part.requires_grad)

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

        num_read = min(NUM_READ, len(self.dataset))
        with self.mode:
            return tree_map_only(torch.Tensor, expand, few)

    def _divide(self, model: nn.Module, inputs: Any) -> Partition:
        """Apply the tensor plan to a model, and find its stages."""
        check_step(self.task, self.mesh)
        if self.mesh.divides_model:
            Values(model, self.world, self.precision.dtype)  # which takes them out of the model
        groups = count_groups(self.mesh, lambda *sent: self._note(*sent))
        if self.mesh.context > 1:
            self.context = Context(groups["context"])
        rows = 2 * (self.config.norm_rows or 1)
        blueprint = Blueprint(
            config=self.config,
            world=self.world.with_groups(groups),
            precision=self.precision,
            model=model,
            blocks=self.blocks,
            tensor_plan=self.task.tensor_plan() if self.mesh.tensor > 1 else {},
            draws=self.draws,
            sample=lambda: take_rows(inputs, rows),
        )
        made = Partition(blueprint, self.mesh, self.context, self.config.run.compile)
        for numbers in made.blocks_of if self.config.strategy.sequence else ():
            divide_sequence([self.blocks[number] for number in numbers], groups["tensor"])
        return made


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
