"""The face of a parallel strategy, and what all strategies share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from trainer.config.schema import Config
from trainer.config.schema import Strategy as Settings
from trainer.data.batches import MicroBatch, count_rows
from trainer.data.order import Cut, Leaves
from trainer.distributed.world import World
from trainer.errors import CheckpointError, ConfigError
from trainer.strategy.batchnorm import normalize_groups, synchronize
from trainer.strategy.mesh import Mesh
from trainer.strategy.rehearsal import FlopCounter
from trainer.strategy.statistics import RunningStatistics


class Precision(Protocol):
    """The arithmetic of a run, as strategies use it."""

    dtype: torch.dtype

    def autocast(self) -> AbstractContextManager: ...
    def cast(self, tree: Any) -> Any: ...
    def root(self, total: torch.Tensor, factor: float) -> torch.Tensor: ...


class Objective(Protocol):
    """(outputs, targets) -> (a sum whose gradient is wanted, times `scale`; what rides along)."""

    @property
    def scale(self) -> float: ...
    def __call__(self, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]: ...


class MicroBatches(Protocol):
    """This rank's rows of a global batch, as `LocalBatch` gives them."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[MicroBatch]: ...


class LocalParameter(NamedTuple):
    """The part of a trainable parameter that this rank holds; `copies` ranks hold the same part."""

    name: str
    parameter: nn.Parameter
    tensor: torch.Tensor
    copies: int


class Strategy(ABC):
    """One model trained over the ranks. `module` is the user's model, whatever wraps it.

    `flops` counts the floating-point operations of one example, forward and backward.
    """

    takes_device_ids = False
    takes_comm_hook = False
    averages = True  # gradients over the ranks, and does not add them up
    of_the_run: tuple[str, ...] = ()  # settings that are layout under other strategies
    leaves: Leaves | None = None  # this rank's, where micro-batches have one size in any layout

    @classmethod
    def check(cls, config: Config, world: World) -> None:
        """Refuse, by ConfigError and before any group exists, what cannot work."""
        block = config.strategy
        if block.device_ids is not None and not cls.takes_device_ids:
            why = "is for strategy=dp; other strategies take what CUDA_VISIBLE_DEVICES shows"
            raise ConfigError(f"strategy.device_ids: {why}")
        if block.comm_hook != "none" and not cls.takes_comm_hook:
            why = f"strategy={block.name} reduces no gradients; use ddp"
            raise ConfigError(f"strategy.comm_hook={block.comm_hook}: {why}")

    @classmethod
    def cut(cls, config: Config) -> Cut:
        """How a global batch may be cut."""
        return Cut(config.norm_rows or 1, config.data.micro_batch)

    @classmethod
    def draws_by_example(cls, config: Config, world: World) -> bool:
        """Does it run the model where a mode of torch is seen?"""
        return config.run.dropout == "example"

    @classmethod
    def set_threads(cls, world: World) -> int:
        """Set torch's number of threads for this rank, and return it."""
        return world.divide_threads()

    @classmethod
    def find_devices(cls, config: Settings, world: World) -> tuple[torch.device, ...]:
        """The devices of this rank: GPUs in the order of the local ranks, else the CPU.

        Raises ConfigError for a GPU that is not there.
        """
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        each = config.devices_per_rank
        if not count:
            return (torch.device("cpu"),) * each
        numbers = cls.gpu_numbers(config, world, count)
        if max(numbers) >= count or min(numbers) < 0:
            ids = config.device_ids
            key = f"device_ids={ids}" if ids else f"devices_per_rank={each}"
            why = f"rank {world.rank} has no GPU {max(numbers)}; torch sees {count}"
            raise ConfigError(f"strategy.{key}: {why}")
        return tuple(torch.device("cuda", number) for number in numbers)

    @classmethod
    def gpu_numbers(cls, config: Settings, world: World, count: int) -> Sequence[int]:
        """The numbers of this rank's GPUs, of `count` that torch sees."""
        each = config.devices_per_rank
        if each == 1:
            return [world.local_rank % count]  # ranks may share a GPU
        return range(world.local_rank * each, (world.local_rank + 1) * each)

    @classmethod
    def build(
        cls, config: Config, world: World, precision: Precision, model: nn.Module
    ) -> Strategy:
        """The strategy around a model; a subclass may choose a simpler one."""
        return cls(config, world, precision, model)

    def __init__(self, config: Config, world: World, precision: Precision, model: nn.Module):
        """Move and convert the model: all that evaluation needs."""
        self.config = config.strategy
        self.world = world
        self.precision = precision
        self.mesh = Mesh.replicated(world)
        self.flops = 0.0
        self._is_compiled = config.run.compile
        rows = config.data.global_batch / (self.mesh.data_size if self.averages else 1)
        is_mean = config.norm_rows is not None or self.cut(config).is_fixed
        self.statistics = RunningStatistics(rows if is_mean else None)
        self._parameters: list[nn.Parameter] = []
        self._kinds: list[list[nn.Parameter]] = []
        self.module = model.to(dtype=precision.dtype)
        if self.config.devices_per_rank == 1:  # else the model has placed its parts itself
            self.module.to(world.device)
        if self.config.channels_last:
            self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.config.sync_batchnorm and self.mesh.data_size > 1:
            self.module = synchronize(self.module, world.device)
        if config.norm_rows is not None:
            normalize_groups(self.module, config.norm_rows)
        self._list_parameters()
        if not self._parameters:
            raise ConfigError("build_model returned a model without trainable parameters")

    @abstractmethod
    def prepare(self, batch: MicroBatch, objective: Objective) -> None:
        """Rehearse one micro-batch and wrap the model for training; nothing in it changes."""

    @abstractmethod
    def forward_backward(self, batch: MicroBatches, objective: Objective) -> torch.Tensor:
        """Compute the gradients of a global batch from this rank's rows.

        Returns the sum over all ranks of what the objective carries, (2,).
        """

    def forward(self, inputs: Any) -> Any:
        """Outputs for evaluation; every rank calls it equally often."""
        with self.precision.autocast():
            return call(self.module, inputs)

    def reduce(self, norm: torch.Tensor) -> torch.Tensor:
        """The gradient norm of the whole model from that of the local gradients."""
        return norm  # every rank holds whole, reduced gradients

    def on_gradients(self, hook: Callable[[Any], None]) -> None:
        """Have `hook` called when this rank's last gradient is ready to be reduced."""

    def list_remarks(self, is_resumed: bool) -> list[str]:
        """Lines that the start of a run shows of this strategy."""
        return []

    def local_parameters(self) -> list[LocalParameter]:
        """The trainable parameters, as this rank holds them."""
        size = self.mesh.data_size
        named = self.module.named_parameters()
        return [LocalParameter(name, p, p, size) for name, p in named if p.requires_grad]

    def gradients(self) -> list[torch.Tensor]:
        return [gradient for p in self._parameters if (gradient := p.grad) is not None]

    def gradients_by_kind(self) -> list[list[torch.Tensor]]:
        """The gradients of each device and dtype: an operation over many takes one kind."""
        return [[g for p in alike if (g := p.grad) is not None] for alike in self._kinds]

    def drop_gradients(self, kept: Iterable[nn.Parameter] = ()) -> None:
        """Free all gradients but those of `kept`."""
        ids = set(map(id, kept))
        for parameter in self._parameters:
            if id(parameter) not in ids:
                parameter.grad = None

    def shards(self) -> dict[str, torch.Tensor]:
        """The model's tensors that this rank writes, with the names of the unwrapped model."""
        return self.module.state_dict()

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the tensors of a whole model.

        Raises CheckpointError, naming the first difference, for the state of another model.
        """
        _check_model(self.module.state_dict(), state)
        self.module.load_state_dict(state)

    def _list_parameters(self) -> None:
        self._parameters = [p for p in self.module.parameters() if p.requires_grad]
        kinds: dict[Any, list[nn.Parameter]] = {}
        for parameter in self._parameters:
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        self._kinds = list(kinds.values())

    def _any_rank(self, flags: list[bool]) -> list[bool]:
        """True where it is on any rank."""
        if self.mesh.data_size == 1:
            return flags
        agreed = torch.tensor(flags, dtype=torch.uint8, device=self.world.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return agreed.bool().tolist()

    def _check_reached(self) -> None:
        """Raise ConfigError naming a parameter without a gradient: other ranks may have one."""
        if self.config.find_unused_parameters:
            return
        if any(p.grad is None for p in self._parameters):
            named = self.module.named_parameters()
            name = next(n for n, p in named if p.requires_grad and p.grad is None)
            missing = f"the loss does not depend on the parameter {name}"
            advice = "set requires_grad=False, or give strategy.find_unused_parameters=true"
            raise ConfigError(f"strategy={self.config.name}: {missing}; use it, {advice}")

    def _rehearse(self, batch: MicroBatch, objective: Objective) -> None:
        """Run the bare module once: lazy layers make their weights, operations are counted."""
        inputs, targets = batch
        with FlopCounter() as counter:
            with self.precision.autocast():
                total, _ = objective(call(self.module, inputs), targets)
            total.backward()
        self.flops = counter.total / count_rows(targets, inputs)
        self._list_parameters()
        if self._is_compiled:
            # Module.compile would leave modules of torch itself, such as nn.Sequential, as they are
            self.module.forward = torch.compile(self.module.forward)


def find_strategy(name: str) -> type[Strategy]:
    """The class of trainer/strategy/<name>.py. Raises ConfigError where there is none."""
    module = f"trainer.strategy.{name}"
    if not name.isidentifier() or find_spec(module) is None:
        raise ConfigError(f"strategy.name={name}: there is no trainer/strategy/{name}.py")
    found = getattr(import_module(module), "STRATEGY", None)
    if found is None:
        raise ConfigError(f"strategy.name={name}: is no strategy; choose one with strategy=<name>")
    return found


def convert(precision: Precision, is_channels_last: bool, inputs: Any, targets: Any) -> MicroBatch:
    """A micro-batch in the dtype of the weights, images in the memory format of the model."""
    inputs = precision.cast(inputs)
    if is_channels_last:
        inputs = tree_map_only(torch.Tensor, _channels_last, inputs)
    return inputs, precision.cast(targets)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 4:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


def call(model: nn.Module, inputs: Any) -> Any:
    """`model(inputs)` for a tensor, `model(*inputs)` for a tuple, `model(**inputs)` for a dict."""
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def _check_model(ours: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    wrong = "the checkpoint is of another model"
    advice = "resume with the task and model it was trained with"
    for name, tensor in ours.items():
        if name not in saved:
            raise CheckpointError(f"{wrong}: it has no {name}; {advice}")
        is_made = isinstance(tensor, torch.Tensor) and not is_lazy(tensor)
        if is_made and tensor.shape != saved[name].shape:
            shapes = f"{tuple(saved[name].shape)} in it and {tuple(tensor.shape)} here"
            raise CheckpointError(f"{wrong}: {name} is {shapes}; {advice}")
    for name in saved:
        if name not in ours:
            raise CheckpointError(f"{wrong}: {name} is not in the model built here; {advice}")
