"""Gradients of parameters that several ranks have, or only some, or that the task itself uses."""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from trainer.base.errors import ConfigError, place_of
from trainer.base.python_code import place_in
from trainer.core.distributed.world import RankGroup
from trainer.core.rng.functions import REOPENED
from trainer.core.strategy.base import ModelSpec
from trainer.core.strategy.collectives import exchange
from trainer.core.strategy.mesh_sizes import COPY_AXES, Mesh, open_group
from trainer.mesh.fully_shard import is_freed
from trainer.mesh.loss_parallel import ABOUT
from trainer.mesh.partition import Partition, Placements

PENALTY_ADVICE = (
    "use weight_decay for a penalty, an attribute of the task for a fixed teacher, a frozen part of"
    " the model for one that follows it (docs/tasks.md, Penalties and teachers), or strategy=zero1"
)
WHICH_MESH_DIVIDES = "which this mesh divides"
GRADIENTS = "use strategy=ddp, as only update computes gradients of parameters there"
CHAIN = "give a block inputs and the output of the one before only, or use strategy=fsdp"
_MIXED_TENSORS = re.compile(
    r"expected device meta|mixed torch\.Tensor and DTensor|on device meta|[Mm]eta tensor"
    r"|FSDP does not support deepcopy"
)
_READ = re.compile(r"item\(\) cannot be called on meta tensors")
_FREED = re.compile(r"setStorage: .* storage of size 0|expected device \w+ but got meta")


class DividedParameters(TorchFunctionMode):
    """Raises ConfigError where a loss uses one of `parts`: parameters that ranks have in parts."""

    def __init__(self, parts: Mapping[torch.Tensor, str]):
        super().__init__()
        self._parts = parts

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in ABOUT:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and leaf in self._parts:
                    advice = GRADIENTS if func is torch.autograd.grad else PENALTY_ADVICE
                    raise ConfigError(f"""strategy.mesh: the loss uses {self._parts[leaf]},
                        {WHICH_MESH_DIVIDES}; {advice}""")
                if isinstance(leaf, torch.Tensor) and is_freed(leaf):
                    raise ConfigError("""strategy.mesh: the loss uses a part of a parameter,
                        which fsdp frees after the forward pass; keep .clone() of it""")
        return func(*args, **(kwargs or {}))


@contextmanager
def parts_named(mesh: Mesh) -> Iterator[None]:
    """Raise ConfigError where the task's code mixes tensors with parts of parameters, or takes
    gradients of gradients through parameters that are not there any more."""
    try:
        with _gradients_checked() if mesh.shard > 1 else nullcontext():
            yield
    except (RuntimeError, AssertionError, ConfigError) as error:
        if not mesh.is_divided:
            raise
        if _FREED.search(str(error)):
            raise ConfigError("""strategy.mesh:
                a gradient of a gradient needs parameters that are freed, or on other ranks;
                use strategy=ddp, or under fsdp torch.autograd.grad in forward""") from error
        if _READ.search(str(error)):
            location = _task_line(error.__cause__ or error)
            raise ConfigError(f"""strategy.mesh:
                {location} reads the value of a tensor, and a dry run has shapes only;
                pass masks and positions as inputs, or use strategy=fsdp""") from error
        if not _MIXED_TENSORS.search(str(error)):
            raise
        location = _task_line(error.__context__ or error)  # torch's error, which a hook's may hide
        if mesh.pipeline > 1:
            raise ConfigError(f"""strategy.mesh.pipeline: {location} uses what another stage has,
                a parameter or the output of a block; {CHAIN}""") from error
        raise ConfigError(f"""strategy.mesh: {location} uses parameters that this mesh divides,
            or that other ranks have; {PENALTY_ADVICE}""") from error


@contextmanager
def _gradients_checked() -> Iterator[None]:
    """Raise ConfigError where torch.autograd.grad is asked for gradients of sharded parameters.

    It has none, or with allow_unused=True returns None.
    """
    from torch.distributed.tensor import DTensor

    grad = torch.autograd.grad

    @functools.wraps(grad)
    def checked(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves(inputs)):
            frame = sys._getframe(1)
            raise ConfigError(f"""strategy.mesh:
                torch.autograd.grad at {frame.f_code.co_filename}:{frame.f_lineno}
                is asked for gradients of parameters, {WHICH_MESH_DIVIDES}; {GRADIENTS}""")
        return grad(outputs, inputs, *args, **kwargs)

    torch.autograd.grad = checked
    REOPENED[checked] = REOPENED[grad]  # torch gives a mode the function of this name
    try:
        yield
    finally:
        torch.autograd.grad = grad
        del REOPENED[checked]


def _task_line(error: BaseException) -> str:
    """Return `file.py:12`, the last line outside of torch, this package and Python's own."""
    return place_in(error.__traceback__, "user", "installed") or place_of(error)


Stages = tuple[int, ...]


class GradientSums:
    """Sums gradients over groups of ranks after the last backward pass of a step.

    `copies`: the ranks that compute with the same weights.
    """

    def __init__(self, spec: ModelSpec, mesh: Mesh, partition: Partition, placements: Placements):
        """Open the groups, before the parameters are sharded. A collective."""
        groups = spec.world.groups
        self.copies = open_group(mesh, groups, "data", *COPY_AXES)
        self._tensor = groups["tensor"]
        self._tied = _open_tied(groups["pipeline"], partition.stages.values())
        self._placements = placements
        self._partial = partition.partial
        self._size = int(spec.config.strategy.bucket_mb * 2**20)
        self._members: dict[tuple[int, tuple[int, ...]], tuple[RankGroup, list[nn.Parameter]]] = {}

    def is_copied(self, name: str) -> bool:
        """Return True if each rank of the tensor axis computes a parameter's whole gradient."""
        return name not in self._placements.cuts and name not in self._partial

    def add(self, name: str, wrapped: torch.Tensor, parameter: nn.Parameter) -> None:
        """Register a parameter, this rank's part of `wrapped`: `reduce` sums its gradient."""
        for turn, group in self._groups_of(name, wrapped):
            if group.size > 1:
                _, members = self._members.setdefault((turn, group.ranks), (group, []))
                members.append(parameter)

    def _groups_of(self, name: str, wrapped: torch.Tensor) -> Iterator[tuple[int, RankGroup]]:
        """Yield (turn, group): copies, then ranks with other positions, then stages that share it.

        A turn begins when the previous one has ended. In the second and third turn each rank of a
        group has a part of the gradient, or none.
        """
        if not self._placements.is_sharded(wrapped):
            yield 0, self.copies
        if name in self._partial:
            yield 1, self._tensor
        stages = self._placements.stages(name)
        if len(stages) > 1:
            yield 2, self._tied[stages]

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients of all registered parameters. A collective."""
        for turn, ranks in sorted(self._members):  # so that no two ranks wait for each other
            group, parameters = self._members[turn, ranks]
            for parameter in parameters if turn else ():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            gradients = [p.grad for p in parameters if p.grad is not None]
            exchange(gradients, self._size, partial(_add_up, group))


def _add_up(group: RankGroup, flat: torch.Tensor) -> torch.Tensor:
    wide = flat.float() if flat.itemsize < 4 else flat
    group.all_reduce(wide)
    return wide


def _open_tied(pipeline: RankGroup, every: Iterable[Stages]) -> dict[Stages, RankGroup]:
    """Open a group for each set of stages that share parameters. A collective."""
    groups = {tuple(range(pipeline.size)): pipeline}
    for stages in sorted({stages for stages in every if len(stages) > 1} - set(groups)):
        members = stages if pipeline.rank in stages else (pipeline.rank,)
        group = pipeline.open(tuple(pipeline.ranks[stage] for stage in members))
        assert group.group  # the others open one too: all ranks open equally many
        groups[stages] = group
    return groups


class UnusedParameters:
    """A divided model's parameters without a gradient on this rank.

    With `is_allowed` a parameter gets its gradient on all ranks if one reached it, else on none.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], is_allowed: bool):
        self._parameters = parameters
        self._is_allowed = is_allowed
        self._missed: Counter[nn.Parameter] = Counter()  # backward passes that did not reach it
        self._of_others: dict[nn.Parameter, torch.Tensor] = {}

    def begin(self) -> None:
        """Begin a step."""
        self._missed.clear()

    def note(self, parameter: nn.Parameter) -> None:
        """Note that a backward pass did not reach a sharded parameter, which got zeros instead."""
        self._missed[parameter] += 1

    def drop(self, num_passes: int) -> None:
        """Take the gradients of other ranks from parameters that no pass of this rank reached."""
        every = [p for p, count in self._missed.items() if count == num_passes]
        self._of_others = {p: p.grad for p in every if p.grad is not None}
        for parameter in every:
            parameter.grad = None

    def flags(self) -> list[torch.Tensor]:
        """Return 1 for each parameter that this rank's rows reached, to sum over the ranks."""
        if not self._is_allowed or not self._parameters:
            return []
        flags = [p.grad is not None for p in self._parameters]
        return [torch.tensor(flags, dtype=torch.float64, device=self._parameters[0].device)]

    def fill(self, counts: torch.Tensor) -> None:
        """Complete the gradients, given the sums of the flags."""
        for parameter, count in zip(self._parameters, counts.tolist(), strict=False):
            if not count:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = self._of_others.get(parameter, torch.zeros_like(parameter))
