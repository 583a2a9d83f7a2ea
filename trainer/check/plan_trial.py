"""The parts of a run, built on one process: task, data, model and a micro-batch without values.

Fake tensors have shapes, dtypes, a device and storages, but no memory. Unlike tensors of the meta
device they choose the kernels of a CPU, under autocast too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from trainer.base.errors import ConfigError
from trainer.cli import load_task
from trainer.core.config.schema import Config
from trainer.core.distributed import accelerator
from trainer.core.distributed.devices import Device
from trainer.core.distributed.launchers import Launcher
from trainer.core.distributed.ranks import lone_rank
from trainer.core.distributed.world import RankGroup, World
from trainer.core.engine.context import OPEN, choose_precision, is_bf16_native, takes_bf16
from trainer.core.hook_calls import call
from trainer.core.micro_batch import MicroBatch
from trainer.core.setup.build import Setup, make_model
from trainer.core.setup.early_checks import check_run, try_optimizer
from trainer.core.strategy import find_strategy
from trainer.core.strategy.base import ModelSpec
from trainer.core.strategy.cost import reduced
from trainer.core.strategy.mesh_sizes import AXES, DATA, Mesh
from trainer.core.strategy.modules.batchnorm import check_statistics, synchronize
from trainer.core.strategy.modules.tensor_memory import convert_dtype, find_narrow
from trainer.core.strategy.single import SingleDevice
from trainer.core.strategy.tensor_shards import replace_tensors
from trainer.core.task import Task
from trainer.core.trainer import set_model
from trainer.mesh.context_parallel import Context
from trainer.mesh.full_model import Values, inner_first
from trainer.mesh.partition import Partition
from trainer.mesh.split_plan import MatrixPart, divide_sequence

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
COLLECTIVE_KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
Note = Callable[[str, str, float], None]  # (axis, kind of collective, bytes that a rank sends)


def unnoticed(axis: str, kind: str, num_bytes: float) -> None:
    """Do nothing with what a group would send."""


@dataclass(frozen=True)
class CountedGroup(RankGroup):
    """A group without processes. Its collectives return tensors of the right size."""

    note: Note = field(default=unnoticed, repr=False, compare=False)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        self.note(self.name, ALL_REDUCE, reduced(tensor.nbytes, self.size))

    def all_gather_into(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        self.note(self.name, ALL_GATHER, whole.nbytes - part.nbytes)

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        self.note(self.name, REDUCE_SCATTER, whole.nbytes - part.nbytes)


class Traffic:
    """The groups of a rank, which report what they would send.

    `groups` has them by axis, and `data` for all ranks with rows of their own.
    """

    def __init__(self, mesh: Mesh):
        self.groups: dict[str, RankGroup] = {}
        self._note: Note = unnoticed
        for name, axes in {**{axis: (axis,) for axis in AXES}, "data": DATA}.items():
            ranks = mesh.members(*axes)
            group_rank = ranks.index(mesh.rank)
            self.groups[name] = CountedGroup(ranks, group_rank, None, name, note=self._send)

    @contextmanager
    def noting(self, note: Note) -> Iterator[None]:
        """Call `note` during the block with what the groups would send."""
        self._note = note
        try:
            yield
        finally:
            self._note = unnoticed

    def _send(self, axis: str, kind: str, num_bytes: float) -> None:
        self._note(axis, kind, num_bytes)


class FakeModel(SingleDevice):
    """A model without values, divided as the tensor plan says, with the blocks of all stages.

    FSDP's part of it is left to `hold`. `partial` are the parameters whose gradients the ranks of
    the tensor axis have in parts. `whole` maps the parameters to the undivided ones.
    """

    def __init__(self, spec: ModelSpec, mode: FakeTensorMode):
        """Divide the model. Raises ConfigError where a real start does."""
        self._mode = mode
        self.context: Context | None = None
        super().__init__(spec)

    def _synchronize(self, model: nn.Module) -> None:
        """Check the layers only: there are no ranks to compute with."""
        synchronize(model, None, is_alone=True)

    def _place(self, model: nn.Module) -> nn.Module:
        spec, mesh = self.spec, self.mesh
        groups = self.world.groups
        is_meshed = find_strategy(self.config).builds_on_rank_0 and mesh.size > 1
        if is_meshed:
            inner_first(model, self.spec.blocks)  # which checks them
            Values(model, self.world, self.precision.dtype, self.precision.autocast_dtype)
        else:
            narrow = find_narrow(model, self.precision.autocast_dtype)
            convert_dtype(model, self.precision.dtype, narrow)
        if any(is_lazy(p) for p in model.parameters()):
            with torch.no_grad():
                call(model, spec.sample())
        if mesh.context > 1:
            self.context = Context(groups["context"])
        self.partition = Partition(spec, mesh, self.context)
        for numbers in self.partition.blocks_of if mesh.tensor > 1 and self.config.sequence else ():
            divide_sequence([self.spec.blocks[index] for index in numbers], groups["tensor"])
        self.partial = self.partition.partial  # while its model has the parameters that it knows
        cuts = [self.partition.cuts.get(p) for p in model.parameters()]
        with self._mode:
            replace_tensors(model, self._fake)
            every = zip(model.parameters(), cuts, strict=True)
            self.whole = {p: _undivided(p, cut) for p, cut in every}
        return model

    def _fake(self, _: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor without values, in the run's memory format.

        torch 2.13 cannot convert a module of fake tensors.
        """
        is_image = self.config.channels_last and tensor.dim() == 4
        fake = torch.empty(
            tensor.shape,
            dtype=tensor.dtype,
            memory_format=torch.channels_last if is_image else torch.contiguous_format,
        )
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, tensor.requires_grad)
        vars(fake).update(vars(tensor))  # such as a mark for the optimizer
        return fake


def _undivided(part: nn.Parameter, cut: MatrixPart | None) -> nn.Parameter:
    if cut is None:
        return part
    return nn.Parameter(torch.empty(cut.shape, dtype=part.dtype), part.requires_grad)


NUM_READ = 2  # examples that are really read, for the shapes of a micro-batch


class SharedParts:
    """The parts that trials of one run with different layouts share: fake tensors and data."""

    def __init__(self) -> None:
        # a fallback would run an operation on real memory
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.datasets: dict[str, Any] = {}


class PlanTrial(Setup):
    """The setup of a run as rank 0 of `world` would have it, on this process alone.

    `notes` are lines to show. `batches` is the real data, `batch` a micro-batch of fake tensors:
    these are of `mode`, as those of the model are. Raises ConfigError where a real start does.
    """

    def __init__(self, config: Config, world: World, device: Device | None, shared: SharedParts):
        self.mode = shared.mode
        self.device = device
        config, notes = _resolve_precision(config, device)
        _check(config, world, device)
        self.traffic = Traffic(Mesh.of(config.strategy.mesh, world))
        world = world.with_groups(self.traffic.groups)
        self.task = load_task(config)(config, world)
        self.task.world = world  # hooks that build something place it on the CPU
        super().__init__(self.task, lone_rank(), ["train"], notes, shared.datasets)
        set_model(self.task, self)
        self.batch = self._expand(self._few)
        check_statistics(self.model, self.config, self.batches.plan.accumulation)

    def _build_model(self, task: Task) -> nn.Module:
        """Build the model without values, also where a rank has them."""
        if self.config.data.micro_batch == "auto":
            self.notes.append(f"data.micro_batch=auto: planned with {self.rows}, as if all fit")
        model = make_model(task, True)
        if model is None or any(is_lazy(p) for p in model.parameters()):
            model = make_model(task, False)
            self.notes.append("the model cannot be built without values: it was built on the CPU")
        assert model is not None
        return model

    def _build_strategy(self, spec: ModelSpec) -> FakeModel:
        self.strategy = FakeModel(spec, self.mode)
        return self.strategy

    def _read_inputs(self) -> Any:
        return self._few[0]

    @cached_property
    def _few(self) -> MicroBatch:
        """A few examples, really read."""
        (few,) = self.batches.of_examples(torch.arange(min(NUM_READ, len(self.batches.dataset))))
        return few

    @property
    def rows(self) -> int:
        """Rows of the first micro-batch; no other has more."""
        first, last = self.batches.plan.micro_batches(0)[0]
        return last - first

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


def _resolve_precision(config: Config, device: Device | None) -> tuple[Config, list[str]]:
    """Return the config with the precision of a start on the device, and a line that names it."""
    precision = config.strategy.precision
    if precision not in OPEN:
        return config, []
    is_taken = takes_bf16(precision, device is not None and device.is_gpu)
    is_native = "bf16" in device.tflops if device else is_bf16_native(torch.device("cpu"))
    chosen: Any = choose_precision(is_taken and is_native)
    notes = [f"strategy.precision={precision}: planned with {chosen}"] if is_taken else []
    return replace(config, strategy=replace(config.strategy, precision=chosen)), notes


def _check(config: Config, world: World, device: Device | None) -> None:
    """Run the early checks of a start, on the planned device instead of this machine's."""
    if config.strategy.devices_per_rank > 1:
        setting = f"strategy.devices_per_rank={config.strategy.devices_per_rank}"
        raise ConfigError(f"{setting}: a plan knows one device per rank; set 1")
    is_gpu = bool(device and device.is_gpu)
    if device:
        device.flops_per_s(config.strategy.precision)
    checked = config
    if is_gpu and accelerator.carries(config.dist.backend):  # torch may see no GPU here
        checked = replace(config, dist=replace(config.dist, backend="auto"))
    check_run(checked, world.with_devices((torch.device("cuda" if is_gpu else "cpu"),)))
    try_optimizer(config)


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
