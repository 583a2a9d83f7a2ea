"""Partition of a model: the part that each rank of a mesh has. It needs shapes only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from trainer.base.errors import ConfigError, counted
from trainer.core.config.typed import show
from trainer.core.hook_calls import call
from trainer.core.micro_batch import count_rows
from trainer.core.state.sandbox import sandbox
from trainer.core.strategy.base import ModelSpec
from trainer.core.strategy.mesh_sizes import SHARDED, WHOLE, Mesh
from trainer.core.strategy.modules.batchnorm import has_batchnorm
from trainer.core.strategy.modules.dry_run import FlopCounter, hooked
from trainer.core.strategy.tensor_shards import Shard
from trainer.mesh.context_parallel import Context
from trainer.mesh.fully_shard import Sharding
from trainer.mesh.meta_shapes import keep_modules
from trainer.mesh.split_plan import (
    MatrixPart,
    TensorPlan,
    divide_sequence,
    find_plan,
)
from trainer.mesh.stage import DIVIDED_MODEL_FAILS, OnMeta, Trace


class Placements:
    """The parts of a model's tensors, by their names in the model.

    `cuts[name]`: how tensor parallel divides the parameter.
    """

    def __init__(
        self,
        mesh: Mesh,
        sharding: Sharding | None,
        cuts: Mapping[str, MatrixPart],
        stages: Mapping[str, tuple[int, ...]],
        owners: Mapping[str, int],
    ):
        """`stages[name]`: stages that use the tensor; default (0,). `owners[name]`: the stage that
        writes it; default its first."""
        self.cuts = cuts
        self._mesh = mesh
        self._sharding = sharding
        self._stages = stages
        self._owners = owners

    def stages(self, name: str) -> tuple[int, ...]:
        return self._stages.get(name, (0,))

    def has(self, name: str) -> bool:
        """Return True if this rank's stage uses a tensor."""
        return self._mesh["pipeline"] in self.stages(name)

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        return self._sharding is not None and self._sharding.divides(tensor)

    def divides(self, name: str, tensor: torch.Tensor) -> bool:
        """Return True if this rank has only a part of a tensor, or nothing."""
        return tensor.is_meta or name in self.cuts or self.is_sharded(tensor)

    def num_copies(self, name: str, tensor: torch.Tensor) -> int:
        """Return how many ranks have each element of a tensor."""
        mesh = self._mesh
        count = mesh.replicate * len(self.stages(name))
        if not self.is_sharded(tensor):
            count *= mesh.shard * mesh.context
        return count if name in self.cuts else count * mesh.tensor

    def shard(self, name: str, tensor: torch.Tensor) -> Shard:
        """Return this rank's part of a tensor, as a plain tensor that shares its memory."""
        cut = self.cuts.get(name)
        is_sharded = self.is_sharded(tensor)
        is_written = self._is_writer(name, cut is not None, is_sharded)
        local = (cast(Any, tensor).to_local() if is_sharded else tensor).detach()
        part = Shard.whole(tensor, is_written)
        if cut is not None:
            part = cut.shard(tensor, is_written)
        if not is_sharded:
            return part._replace(tensor=local, axes=WHOLE)
        assert self._sharding is not None
        each = -(-len(tensor) // self._sharding.group.size)  # as torch.chunk divides
        bands = part.rows(each * self._sharding.group.rank, len(local))
        offset = (bands[0][0] if bands else part.shape[0], *part.offset[1:])
        bands = bands if len(bands) > 1 else ()
        return Shard(local, part.shape, offset, is_written, bands, SHARDED)

    def is_first_copy(self, name: str) -> bool:
        """Return True on the first replica of the stage that writes a tensor."""
        coordinates = self._mesh.coordinates()
        owner = self._owners.get(name, self.stages(name)[0])
        return coordinates["pipeline"] == owner and not coordinates["replicate"]

    def _is_writer(self, name: str, is_cut: bool, is_sharded: bool) -> bool:
        coordinates = self._mesh.coordinates()
        is_first = self.is_first_copy(name)
        if not is_sharded:
            is_first &= not coordinates["shard"] and not coordinates["context"]
        return is_first and (is_cut or not coordinates["tensor"])

    def writers(self) -> list[int]:
        """Return the ranks that write a part of a checkpoint."""
        mesh = self._mesh
        divides = {"pipeline", "tensor"} | (
            {"shard", "context"} if self._sharding is not None else set()
        )
        coordinates_of = {rank: mesh.coordinates(rank) for rank in range(mesh.size)}
        return [
            rank
            for rank, coordinates in coordinates_of.items()
            if not any(
                coordinate for axis, coordinate in coordinates.items() if axis not in divides
            )
        ]


Sizes = Sequence[tuple[str, Any]]  # of random draws


class Partition:
    """The parts of a model whose tensors are on the meta device.

    - `blocks_of[stage]`: the numbers of the stage's blocks.
    - `stages[name]`: stages that use the parameter or buffer; default (0,).
    - `owners[name]`: the stage that writes the buffer; default its first.
    - `shared`: names of the buffers that several stages use.
    - `cuts[parameter]`: how the tensor plan divides it. The key is the divided parameter.
    - `draws[number]`: this rank's part of a random draw: (dim, part, number of parts) per cut.
    - `flops`: of a row, forward and backward; 0 if each rank counts them itself, on whole rows.
    """

    def __init__(self, spec: ModelSpec, mesh: Mesh, context: Context | None):
        """Trace the model to find the parts, and apply the tensor plan.

        Raises ConfigError for a task that the axes of the mesh cannot divide.
        """
        self._spec = spec
        self._mesh = mesh
        self._blocks = list(spec.blocks)
        self.blocks_of = [range(len(self._blocks))]
        self.stages: dict[str, tuple[int, ...]] = {}
        self.owners: dict[str, int] = {}
        self.shared: list[str] = []
        self.cuts: dict[torch.Tensor, MatrixPart] = {}
        self.draws: list[tuple[tuple[int, int, int], ...]] = []
        self.flops = 0.0
        if mesh.divides_model:
            self._check()
            self._divide(context)
            spec.draws.divide(self.draws)

    @property
    def own(self) -> range:
        """The numbers of the blocks of this rank's stage."""
        return self.blocks_of[self._mesh["pipeline"]]

    @property
    def partial(self) -> set[str]:
        """Names of the parameters of which each rank of the tensor axis has a partial gradient.

        With strategy.sequence, which divides the positions, these are the undivided ones in blocks.
        """
        if not self._spec.config.strategy.sequence:
            return set()
        inside = {p for block in self._blocks for p in block.parameters() if p not in self.cuts}
        return {name for name, p in self._spec.model.named_parameters() if p in inside}

    def _check(self) -> None:
        """Raise ConfigError for a task that the axes of the mesh cannot divide."""
        mesh = self._mesh
        config = self._spec.config
        count = len(self._blocks)
        if mesh.tensor > 1 and not self._spec.tensor_plan:
            raise ConfigError(f"""strategy.mesh.tensor={mesh.tensor}: the task has no tensor_plan;
                define it, or choose another axis""")
        if mesh.pipeline > 1 and count < mesh.pipeline:
            raise ConfigError(f"""strategy.mesh.pipeline={mesh.pipeline}: needs a block
                for each stage, and the task has {counted(count, "block")}; define blocks(model)""")
        if config.strategy.sequence and not count:
            raise ConfigError("""strategy.sequence=true: the task has no blocks;
                define blocks(model)""")
        if config.run.compile and not count:
            raise ConfigError(f"""run.compile={show(config.run.compile)}:
                {mesh} can compile blocks only; define blocks(model)""")
        if mesh.context > 1 and has_batchnorm(self._spec.model):
            raise ConfigError(f"""strategy.mesh.context={mesh.context}:
                BatchNorm would normalise a part of the positions; choose another axis""")

    def _check_extra_state(self) -> None:
        """Raise ConfigError for a module with state that is not a tensor.

        Rank 0 would save its own copy, even of a module that only another stage runs.
        """
        for name, module in self._spec.model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                raise ConfigError(f"""strategy.mesh.pipeline: {name or "the model"}
                    has get_extra_state, and a stage saves tensors only; keep it in a buffer""")

    def _divide(self, context: Context | None) -> None:
        model = self._spec.model
        mesh = self._mesh
        sample = self._spec.sample()
        whole, trace = self._follow(sample)
        self.flops = _count(model, sample) / count_rows(sample)
        if mesh.pipeline > 1:
            self._check_extra_state()
            trace.check_chain()
            self.blocks_of = trace.divide(mesh.pipeline)
            self.stages = self._name_stages(trace.stages_of(self.blocks_of))
        drawn = [whole]
        if mesh.tensor > 1:
            axis = self._spec.world.groups["tensor"]
            is_sequence = self._spec.config.strategy.sequence
            sequential = self._blocks if is_sequence else ()
            plan = find_plan(self._spec.tensor_plan, model)
            self.cuts = TensorPlan(model, plan, axis, sequential).cuts
            with hooked(divide_sequence(self._blocks, axis) if is_sequence else ()):
                drawn.append(self._follow(sample, None, DIVIDED_MODEL_FAILS)[0])
        if context is not None:
            drawn.append(self._follow(sample, context)[0])
            context.forget()
        self.draws = self._find_parts(drawn)

    def _follow(
        self,
        sample: Any,
        context: Context | None = None,
        reason: tuple[str, str] | None = None,
    ) -> tuple[Sizes, Trace]:
        """Run the model on the meta device; return its random draws, and the trace."""
        model = self._spec.model
        trace = Trace(model, self._blocks)
        if context is not None:
            sample, _ = context.cut(sample, ())

        def compute() -> None:
            with context or nullcontext():
                try:
                    call(model, sample)
                except ConfigError as error:
                    if "on meta tensors" in str(error):  # told by parts_named
                        raise
                    raise ConfigError(f"""strategy.mesh: a dry run with shapes only: {error};
                        choose another implementation of it, or strategy=fsdp""") from error

        rows = count_rows(sample)
        return self._spec.draws.watch(lambda: trace.run(compute, reason), rows), trace

    def _find_parts(self, drawn: Sequence[Sizes]) -> list[tuple[tuple[int, int, int], ...]]:
        """Return the part of each random draw that this rank keeps.

        `drawn`: the draws of the whole model, of the model after the tensor plan, and of the model
        on this rank's positions; the last two only if these axes are above 1.
        """
        groups = self._spec.world.groups
        axes = [groups[axis] for axis in ("tensor", "context") if groups[axis].size > 1]
        if len({len(sizes) for sizes in drawn}) > 1:
            raise ConfigError("""strategy.mesh: the model draws another number
                of times when it is divided; set dropout to 0, or choose another axis""")
        parts_of_draws = []
        for draws in zip(*drawn, strict=True):
            parts: list[tuple[int, int, int]] = []
            for axis, (_, before), (_, after) in zip(axes, draws, draws[1:], strict=False):
                for dim, (old, new) in enumerate(zip(before, after, strict=True)):
                    if old != new:
                        parts.append((dim, axis.rank, axis.size))
            parts_of_draws.append(tuple(parts))
        return parts_of_draws

    def _name_stages(
        self, stages: dict[torch.Tensor, tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]]:
        """Return the stages of parameters and buffers by name, and set `owners` and `shared`.

        A buffer is on the stages of its block, else of the parameters in its module, else on all.
        The last stage that uses a buffer owns it: code after the blocks runs only there.
        """
        model = self._spec.model
        stages_by_name: dict[str, tuple[int, ...]] = {}
        every = tuple(range(self._mesh.pipeline))
        inside: dict[nn.Module, tuple[int, ...]] = {}
        for stage, numbers in enumerate(self.blocks_of):
            for module in {
                m for block_number in numbers for m in self._blocks[block_number].modules()
            }:
                inside[module] = (*inside.get(module, ()), stage)
        for prefix, module in model.named_modules():
            own = list(module.parameters(recurse=False))
            beside = stages[own[0]] if own else every
            is_leaf = not any(True for _ in module.children())
            module_stages = inside.get(module, beside if is_leaf else every)
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None:
                    continue
                full = f"{prefix}.{name}" if prefix else name
                if isinstance(tensor, nn.Parameter):
                    stages_by_name[full] = stages[tensor]
                    continue
                stages_by_name[full] = module_stages
                if used := [stage for stage in stages[tensor] if stage in module_stages]:
                    self.owners[full] = used[-1]
                    self.shared += [full] if len(used) > 1 else []
        return stages_by_name


def _count(model: nn.Module, sample: Any) -> float:
    """Return the floating-point operations of a forward and backward pass."""
    with sandbox(keep_modules(model)), OnMeta(), FlopCounter() as counter:
        leaves = [t for t in tree_leaves(call(model, sample)) if isinstance(t, torch.Tensor)]
        torch.autograd.backward([t.sum() for t in leaves if t.requires_grad])
    model.zero_grad(set_to_none=True)
    return counter.total
