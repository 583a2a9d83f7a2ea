"""Partition of a model: the part that each rank of a mesh has. It needs shapes only."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from trainer.config.typed import show
from trainer.errors import ConfigError, counted
from trainer.hook_errors import call
from trainer.micro_batch import count_rows
from trainer.strategy.base import Blueprint
from trainer.strategy.mesh import Mesh
from trainer.strategy.mesh_model.context_parallel import Context
from trainer.strategy.modules.batchnorm import has_batchnorm
from trainer.strategy.modules.dry_run import FlopCounter
from trainer.strategy.pipeline_parallel.stage import OnMeta
from trainer.strategy.pipeline_parallel.trace import DIVIDED, Trace, kept
from trainer.strategy.tensor_parallel.plan import MatrixPart, TensorPlan, divide_sequence

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

    def __init__(self, blueprint: Blueprint, mesh: Mesh, context: Context | None):
        """Trace the model to find the parts, and apply the tensor plan.

        Raises ConfigError for a task that the axes of the mesh cannot divide.
        """
        self._blueprint = blueprint
        self._mesh = mesh
        self._blocks = list(blueprint.blocks)
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
            blueprint.draws.divide(self.draws)

    @property
    def own(self) -> range:
        """The numbers of the blocks of this rank's stage."""
        return self.blocks_of[self._mesh["pipeline"]]

    @property
    def partial(self) -> set[str]:
        """Names of the parameters of which each rank of the tensor axis has a partial gradient.

        With strategy.sequence, which divides the positions, these are the undivided ones in blocks.
        """
        if not self._blueprint.config.strategy.sequence:
            return set()
        inside = {p for block in self._blocks for p in block.parameters() if p not in self.cuts}
        return {name for name, p in self._blueprint.model.named_parameters() if p in inside}

    def _check(self) -> None:
        """Raise ConfigError for a task that the axes of the mesh cannot divide."""
        mesh = self._mesh
        config = self._blueprint.config
        count = len(self._blocks)
        if mesh.tensor > 1 and not self._blueprint.tensor_plan:
            why = "the task has no tensor_plan; define it, or choose another axis"
            raise ConfigError(f"strategy.mesh.tensor={mesh.tensor}: {why}")
        if mesh.pipeline > 1 and count < mesh.pipeline:
            has = f"the task has {counted(count, 'block')}; define blocks(model)"
            must = f"needs a block for each stage, and {has}"
            raise ConfigError(f"strategy.mesh.pipeline={mesh.pipeline}: {must}")
        if config.strategy.sequence and not count:
            raise ConfigError(
                "strategy.sequence=true: the task has no blocks; define blocks(model)"
            )
        if config.run.compile and not count:
            why = f"{mesh} can compile blocks only; define blocks(model)"
            raise ConfigError(f"run.compile={show(config.run.compile)}: {why}")
        if mesh.context > 1 and has_batchnorm(self._blueprint.model):
            why = "BatchNorm would normalise a part of the positions"
            raise ConfigError(f"strategy.mesh.context={mesh.context}: {why}; choose another axis")

    def _check_extra_state(self) -> None:
        """Raise ConfigError for a module with state that is not a tensor.

        Rank 0 would save its own copy, even of a module that only another stage runs.
        """
        for name, module in self._blueprint.model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                why = f"{name or 'the model'} has get_extra_state, and a stage saves tensors only"
                raise ConfigError(f"strategy.mesh.pipeline: {why}; keep it in a buffer")

    def _divide(self, context: Context | None) -> None:
        model = self._blueprint.model
        mesh = self._mesh
        sample = self._blueprint.sample()
        whole, trace = self._follow(sample)
        self.flops = _count(model, sample) / count_rows(sample)
        if mesh.pipeline > 1:
            self._check_extra_state()
            trace.check_chain()
            self.blocks_of = trace.divide(mesh.pipeline)
            self.stages = self._name_stages(trace.stages_of(self.blocks_of))
        drawn = [whole]
        if mesh.tensor > 1:
            axis = self._blueprint.world.groups["tensor"]
            is_sequence = self._blueprint.config.strategy.sequence
            sequential = self._blocks if is_sequence else ()
            self.cuts = TensorPlan(model, self._blueprint.tensor_plan, axis, sequential).cuts
            hooks = divide_sequence(self._blocks, axis) if is_sequence else []
            drawn.append(self._follow(sample, None, DIVIDED)[0])
            for hook in hooks:
                hook.remove()
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
        model = self._blueprint.model
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
                    how = "a dry run with shapes only"
                    advice = "choose another implementation of it, or strategy=fsdp"
                    raise ConfigError(f"strategy.mesh: {how}: {error}; {advice}") from error

        rows = count_rows(sample)
        return self._blueprint.draws.watch(lambda: trace.run(compute, reason), rows), trace

    def _find_parts(self, drawn: Sequence[Sizes]) -> list[tuple[tuple[int, int, int], ...]]:
        """Return the part of each random draw that this rank keeps.

        `drawn`: the draws of the whole model, of the model after the tensor plan, and of the model
        on this rank's positions; the last two only if these axes are above 1.
        """
        groups = self._blueprint.world.groups
        axes = [groups[axis] for axis in ("tensor", "context") if groups[axis].size > 1]
        if len({len(sizes) for sizes in drawn}) > 1:
            why = "the model draws another number of times when it is divided"
            raise ConfigError(f"strategy.mesh: {why}; set dropout to 0, or choose another axis")
        found = []
        for draws in zip(*drawn, strict=True):
            parts: list[tuple[int, int, int]] = []
            for axis, (_, before), (_, after) in zip(axes, draws, draws[1:], strict=False):
                for dim, (old, new) in enumerate(zip(before, after, strict=True)):
                    if old != new:
                        parts.append((dim, axis.rank, axis.size))
            found.append(tuple(parts))
        return found

    def _name_stages(
        self, stages: dict[torch.Tensor, tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]]:
        """Return the stages of parameters and buffers by name, and set `owners` and `shared`.

        A buffer is on the stages of its block, else of the parameters in its module, else on all.
        The last stage that uses a buffer owns it: code after the blocks runs only there.
        """
        model = self._blueprint.model
        found: dict[str, tuple[int, ...]] = {}
        every = tuple(range(self._mesh.pipeline))
        inside: dict[nn.Module, tuple[int, ...]] = {}
        for stage, numbers in enumerate(self.blocks_of):
            for module in {m for number in numbers for m in self._blocks[number].modules()}:
                inside[module] = (*inside.get(module, ()), stage)
        for prefix, module in model.named_modules():
            own = list(module.parameters(recurse=False))
            beside = stages[own[0]] if own else every
            is_leaf = not any(True for _ in module.children())
            place = inside.get(module, beside if is_leaf else every)
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None:
                    continue
                full = f"{prefix}.{name}" if prefix else name
                if isinstance(tensor, nn.Parameter):
                    found[full] = stages[tensor]
                    continue
                found[full] = place
                if used := [stage for stage in stages[tensor] if stage in place]:
                    self.owners[full] = used[-1]
                    self.shared += [full] * (len(used) > 1)
        return found


def _count(model: nn.Module, sample: Any) -> float:
    """Return the floating-point operations of a forward and backward pass."""
    with kept(model), OnMeta(), FlopCounter() as counter:
        leaves = [t for t in tree_leaves(call(model, sample)) if isinstance(t, torch.Tensor)]
        torch.autograd.backward([t.sum() for t in leaves if t.requires_grad])
    model.zero_grad(set_to_none=True)
    return counter.total
