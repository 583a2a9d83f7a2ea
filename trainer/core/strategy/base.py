"""The interface of a parallel strategy, and the code that all strategies use.

A *dry run* runs forward and backward once before the first step and undoes every change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm
from torch.utils._pytree import tree_map_only

from trainer.base.errors import ConfigError, counted
from trainer.core.config.schema import Config
from trainer.core.data.order import BatchSplit, Leaves
from trainer.core.distributed.world import World
from trainer.core.extensions import CHECKS
from trainer.core.hook_calls import call
from trainer.core.micro_batch import MicroBatch, MicroBatches, copied, count_rows, slice_rows
from trainer.core.rng.compiled import compiled
from trainer.core.rng.forward import ExampleRng
from trainer.core.strategy.cost import Cost
from trainer.core.strategy.mesh_sizes import Mesh
from trainer.core.strategy.modules.batchnorm import (
    FunctionalBatchNorm,
    normalize_groups,
    synchronize,
)
from trainer.core.strategy.modules.dry_run import Alone, FrozenKept, check_reached, eager, is_large
from trainer.core.strategy.modules.running_statistics import RunningStatistics
from trainer.core.strategy.modules.tensor_memory import (
    ActivationCheckpoint,
    convert_dtype,
    find_narrow,
    place_blocks,
    recompute,
)
from trainer.core.strategy.tensors import Tensors


class PrecisionProtocol(Protocol):
    """Precision of a run, as strategies use it."""

    dtype: torch.dtype
    autocast_dtype: torch.dtype | None

    @property
    def is_narrow(self) -> bool: ...
    @property
    def wide(self) -> torch.dtype: ...
    def autocast(self) -> AbstractContextManager: ...
    def cast(self, tree: Any) -> Any: ...
    def root(self, total: torch.Tensor, factor: float) -> torch.Tensor: ...


class ObjectiveProtocol(Protocol):
    """A loss as strategies use it: (outputs, targets) -> (sum to differentiate, carried values).

    The gradient of the sum is multiplied by `scale`. Carried values are summed over the ranks
    together with the gradients. `absent` returns those of a rank without outputs. `sums` returns
    the sums of the values, of their sizes and of their weights, to compare. The update does not
    step `others`, so these need no gradient; None in a dry run that does not know them. It is made
    for one update, and has the `name` of those of other steps.
    """

    @property
    def name(self) -> str: ...
    @property
    def scale(self) -> float: ...
    @property
    def others(self) -> Sequence[nn.Parameter] | None: ...
    def __call__(self, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]: ...
    def absent(self) -> torch.Tensor: ...
    def sums(self, outputs: Any, targets: Any) -> torch.Tensor: ...
    def total(self, outputs: Any, targets: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class ModelSpec:
    """A model, and the task's description of its parts: a strategy is built from it.

    `sample` returns the inputs of a few rows. The strategy calls `reduce_begun` when this rank's
    last gradient is ready to be reduced.
    """

    config: Config
    world: World
    precision: PrecisionProtocol
    model: nn.Module
    blocks: Sequence[nn.Module]
    tensor_plan: Mapping[str, str] | str
    draws: ExampleRng
    sample: Callable[[], Any]
    reduce_begun: Callable[[Any], Any]


class Strategy(ABC):
    """A model trained over all ranks: what each rank computes, and what the ranks exchange.

    `module` is the user's model without any wrapper, `tensors` what this rank has of it. `flops` is
    the number of floating-point operations per example, forward and backward.

    After each step all ranks with the same part of the model have the same weights: drift checks,
    evaluation and checkpoints rely on it. A strategy does not know the number of the step.
    """

    takes_device_ids = False
    takes_comm_hook = False
    takes_mesh = False  # with axes that divide the model
    on_mesh = ""  # the strategy that takes the place of this one, not of a subclass, there
    builds_on_rank_0 = False  # the model, and only its structure on other ranks
    # names errors of torch that follow from how the strategy divides a model
    failures_named: Callable[..., AbstractContextManager[Any]] = staticmethod(nullcontext)
    divides_gradients = False  # over the ranks: `reduce` is called in each update
    averages = True  # the mean of the ranks' gradients, as DDP; False: their sum
    of_the_run: tuple[str, ...] = ()  # settings for the run's hash, layout in other strategies
    cost: type[Cost] = Cost
    finding = ""  # a line of its own check, if that is to warn only
    leaves: Leaves | None = None  # this rank's, if micro-batches have one size in any layout

    @classmethod
    def check(cls, config: Config, world: World) -> None:
        """Raise ConfigError for settings that cannot work, before the process group exists."""
        block = config.strategy
        if block.device_ids is not None and not cls.takes_device_ids:
            raise ConfigError(f"""strategy.device_ids={block.device_ids}:
                must be null without strategy=dp; set CUDA_VISIBLE_DEVICES""")
        if block.comm_hook != "none" and not cls.takes_comm_hook:
            raise ConfigError(f"""strategy.comm_hook={block.comm_hook}:
                strategy={block.name} takes no comm hook; use ddp""")
        mesh = Mesh.of(block.mesh, world)
        if not cls.takes_mesh and mesh.is_divided:
            raise ConfigError(f"""strategy.mesh: {mesh}:
                strategy={block.name} has the whole model on each rank; leave strategy out""")

    @classmethod
    def batch_split(cls, config: Config) -> BatchSplit:
        """Return the rules for splitting a global batch."""
        return BatchSplit(config.norm_rows or 1, config.data.most_rows)

    @classmethod
    def draws_by_example(cls, config: Config, world: World) -> bool:
        """Return True if random draws are keyed by example, which needs a torch function mode."""
        return config.run.dropout == "example"

    @classmethod
    def set_threads(cls, world: World) -> int:
        """Set the number of torch threads of this rank, and return it."""
        return world.divide_threads()

    @classmethod
    def build(cls, spec: ModelSpec) -> Strategy:
        """Build the strategy around a model; a subclass may return a simpler strategy."""
        return cls(spec)

    def __init__(self, spec: ModelSpec):
        """Move the model to the device and convert it, which is enough for evaluation.

        Raises ConfigError for a model without trainable parameters.
        """
        config, world, model = spec.config, spec.world, spec.model
        self.spec = spec
        self.config = config.strategy
        self.world = world
        self.precision = spec.precision
        self.rows = spec.draws.rows
        self.mesh = Mesh.of(config.strategy.mesh, world)
        self.flops = 0.0
        self.untouched: list[nn.Parameter] = []  # large frozen ones, by the dry run
        self._places: list[torch.device] = []
        rows = config.data.global_batch / (self.mesh.data_size if self.averages else 1)
        is_mean = config.norm_rows is not None or self.batch_split(config).is_fixed
        is_per_step = config.run.buffers == "per_step"
        takes_all = is_per_step or self.batch_split(config).is_fixed
        self.statistics = RunningStatistics(rows if is_mean or is_per_step else None, takes_all)
        if self.config.sync_batchnorm:
            self._synchronize(model)
        if config.norm_rows is not None:
            normalize_groups(model, config.norm_rows)
        recompute(model, self.config.recompute, self.spec.blocks)
        self.module = self._place(model)
        self.tensors = self._open_tensors()
        if not any(p.requires_grad for p in self.tensors.structure.parameters()):
            raise ConfigError("build_model: must return a model with trainable parameters")

    def _synchronize(self, model: nn.Module) -> None:
        """Make BatchNorm compute its statistics over the rows of all ranks."""
        synchronize(model, self._data_group, is_alone=self.mesh.data_size == 1)

    def _place(self, model: nn.Module) -> nn.Module:
        """Convert a model to the run's dtype and memory format, and move it to the device."""
        narrow = find_narrow(model, self.precision.autocast_dtype)
        convert_dtype(model, self.precision.dtype, narrow)
        is_here = all(p.device.type == "cpu" for p in model.parameters())
        if self.config.devices_per_rank == 1:
            model.to(self.world.device)
        elif self.spec.blocks and is_here:  # otherwise the model placed its parts itself
            self._places = place_blocks(model, self.spec.blocks, self.world.devices)
        if self.config.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    @abstractmethod
    def prepare(self, batch: MicroBatch, objective: ObjectiveProtocol) -> None:
        """Run one micro-batch dry and wrap the model for training.

        The weights stay as they are, but where ranks have copies all get those of rank 0.
        """

    @abstractmethod
    def forward_backward(self, batch: MicroBatches, objective: ObjectiveProtocol) -> torch.Tensor:
        """Compute the gradients of a global batch from this rank's rows.

        Returns the values that the objective carries, (2,), summed over all ranks, in a tensor of
        its own: those of the objective are kept.

        For each micro-batch: `statistics.rewind`, the objective of `call`, `statistics.note`,
        backward from `precision.root`. Once a step: `statistics.begin` before them, and after them
        `_check_reached`, `spec.reduce_begun`, the sum over the ranks, and `statistics.write` with
        the means of `read` over the data ranks (with `averages=False` and `statistics.rows`: the
        sums). With `find_unused_parameters` one that no rank has reached keeps no gradient. The
        ranks have equal weights before the first step: the proof of the start refuses others.
        """

    def forward(self, inputs: Any) -> Any:
        """Compute outputs for evaluation; every rank must call it equally often.

        They are those of the whole rows on the ranks where `mesh.is_counted`.
        """
        with self.precision.autocast():
            return call(self.module, inputs, self.rows)

    def compute(self, inputs: Any, targets: Any, loss: Callable[[Any, Any], Any]) -> None:
        """Compute a loss as in training, without gradients or any other effect than random draws.

        Every rank must call it equally often.
        """
        with self.precision.autocast():
            loss(call(self.module, inputs), targets)

    def reduce(
        self, found_inf: torch.Tensor, wants_norm: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (found_inf of any rank, norm of the gradients of the whole model or None).

        A collective if the strategy `divides_gradients`.
        """
        return found_inf, self._norm() if wants_norm else None  # each rank has all gradients

    def _norm(self) -> torch.Tensor:
        """Return the norm of this rank's gradients; in 16 bits their squares would overflow."""
        gradients = [gradient for kind in self.tensors.gradients() for gradient in kind]
        if self.precision.dtype in (torch.bfloat16, torch.float16):
            gradients = [gradient.float() for gradient in gradients]
        return get_total_norm(gradients)

    def prove(self, batch: MicroBatch, objective: ObjectiveProtocol) -> str:
        """Return a line if a model that ranks divide computes something else than the whole one."""
        return ""

    def close(self) -> nn.Module | None:
        """Let go of the process groups; return the module if it can be used without them."""
        return self.module

    def list_remarks(self, is_resumed: bool) -> list[str]:
        """Return lines about this strategy to print at the start of a run."""
        if not self._places:
            return []
        counts = Counter(map(str, self._places))
        placed = ", ".join(f"{counted(n, 'block')} on {device}" for device, n in counts.items())
        return [f"devices of this rank: {placed}; the rest on {self.world.device}"]

    def _open_tensors(self) -> Tensors:
        return Tensors(self.module, self.world)

    def _any_rank(self, flags: list[bool]) -> list[bool]:
        """Return the flags that are True on any rank with the same part of the model.

        Collective: every rank must call it.
        """
        if self.mesh.data_size == 1 or not flags:
            return flags
        agreed = torch.tensor(flags, dtype=torch.uint8, device=self.world.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._data_group)
        return agreed.bool().tolist()

    @property
    def _data_group(self) -> dist.ProcessGroup | None:
        """The ranks with rows of their own and the same part of the model; None for all ranks."""
        groups = self.world.groups
        return groups["data"].group if groups and self.mesh.data_size < self.mesh.size else None

    def _check_reached(self, objective: ObjectiveProtocol) -> None:
        """Raise ConfigError naming a parameter without a gradient that the update steps."""
        tensors, others = self.tensors, objective.others
        if others is not None and any(p.grad is None for p in tensors.trained):
            if line := tensors.find_change():
                raise ConfigError(line)
            ids = set(map(id, tensors.trained)).difference(map(id, others))
            trained = {name: p for name, p in tensors.parameters.items() if id(p) in ids}
            check_reached(self.config, trained)

    def _dry_run(self, batch: MicroBatch, objective: ObjectiveProtocol) -> None:
        """Run forward and backward once on the unwrapped module.

        Lazy layers create their weights, and the operations are counted. One row of a large model
        is enough, unless it reaches fewer parameters, as it may of experts, or ranks wait for each
        other in it. What one row draws is not all: the proof traces draws again, where there is
        one. A collective.
        """
        watch = FunctionalBatchNorm.watch(self.module, self.spec.config)
        with eager(self.spec.config), watch, self.spec.draws.traces.watched("loss"):
            flops_and_untouched = None
            has_proof = self.spec.config.run.prove and CHECKS.is_installed
            if is_large(self.module) and has_proof:
                with suppress(Exception), Alone():  # such as a norm over rows
                    row = slice_rows(batch, 0, 1, count_rows(*reversed(batch)))
                    flops_and_untouched = self._dry_pass(row, objective.total)
                has_all = all(p.grad is not None for p in self.tensors.trained)
                if any(self._any_rank([flops_and_untouched is None or not has_all])):
                    flops_and_untouched = None
                    self.module.zero_grad()
            flops_and_untouched = flops_and_untouched or self._dry_pass(
                batch, lambda *outputs_and_targets: objective(*outputs_and_targets)[0]
            )
        self.flops, self.untouched = flops_and_untouched
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise ConfigError(f"""the gradient of the parameter {name} is sparse: must be dense;
                    give its layer sparse=False""")
        self.tensors = self._open_tensors()
        is_whole = self.config.recompute == "none" and self.spec.config.run.compile != "blocks"
        self._compile([self.module] if is_whole else self.spec.blocks)

    def _dry_pass(
        self, batch: MicroBatch, sum_up: Callable[[Any, Any], torch.Tensor]
    ) -> tuple[float, list[nn.Parameter]]:
        """Return the operations of a row, and the large frozen parameters that none has written."""
        inputs, targets = copied(batch)
        with FrozenKept(self.module) as counter:
            with self.precision.autocast():
                total = sum_up(call(self.module, inputs, self.rows), targets)
            total.backward()
        return counter.total / count_rows(targets, inputs), counter.untouched

    def _compile(self, modules: Sequence[nn.Module]) -> None:
        """Apply torch.compile to modules if run.compile is set."""
        compile_setting = self.spec.config.run.compile
        if compile_setting == "blocks" and not modules:
            raise ConfigError("run.compile=blocks: the task has no blocks; define blocks(model)")
        for module in modules if compile_setting else ():
            # Module.compile does not compile torch's own modules, such as nn.Sequential
            is_outer = isinstance(module.forward, ActivationCheckpoint)
            owner, name = (module.forward, "inner") if is_outer else (module, "forward")
            setattr(owner, name, compiled(getattr(owner, name), compile_setting))


def convert(
    precision: PrecisionProtocol, is_channels_last: bool, inputs: Any, targets: Any
) -> MicroBatch:
    """Convert a micro-batch to the dtype of the weights, images to the model's memory format."""
    inputs = precision.cast(inputs)
    if is_channels_last:
        inputs = tree_map_only(torch.Tensor, _channels_last, inputs)
    return inputs, precision.cast(targets)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 4:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)
