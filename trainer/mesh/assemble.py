"""Division of a model over a mesh: each rank gets its part of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from trainer.base.errors import counted
from trainer.core.strategy.base import ModelSpec
from trainer.core.strategy.mesh_sizes import Mesh, open_group
from trainer.mesh.context_parallel import Context
from trainer.mesh.full_model import Values, copy_structure, inner_first
from trainer.mesh.fully_shard import Sharding
from trainer.mesh.gradient_sums import GradientSums
from trainer.mesh.p2p import P2P, bubble
from trainer.mesh.partition import Partition, Placements
from trainer.mesh.split_plan import MatrixPart, divide_sequence
from trainer.mesh.stage import Stage

MOST_WAITED = 0.25  # of a step; above it, advice is given


class PartitionedModel:
    """A model divided over a mesh.

    - `structure`: the shapes of the whole model.
    - `root`: the module to call: the model, or this rank's stage of it.
    - `stage`: this rank's stage; None without a pipeline.
    - `sharding`: the units of FSDP2; None without it.
    - `compiled`: the modules that torch.compile may compile.
    """

    def __init__(self, spec: ModelSpec, mesh: Mesh, context: Context | None):
        """Divide the model: it has values on rank 0, only shapes on others. A collective."""
        model = spec.model
        self.stage: Stage | None = None
        self.sharding: Sharding | None = None
        self.structure = self.root = model
        self._mesh = mesh
        self._spec = spec
        units = inner_first(model, spec.blocks)
        values = Values(model, spec.world, spec.precision.dtype, spec.precision.autocast_dtype)
        if mesh.divides_model:
            self.structure = copy_structure(model)
        self.partition = partition = Partition(spec, mesh, context)
        is_by_block = mesh.divides_model or spec.config.run.compile == "blocks"
        self.compiled: Sequence[nn.Module] = self._own or ([] if is_by_block else [model])
        if spec.config.strategy.sequence:
            divide_sequence(self._own, spec.world.groups["tensor"])
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        cuts = {name: partition.cuts[tensor] for name, tensor in named if tensor in partition.cuts}
        if mesh.shard > 1:
            groups = spec.world.groups
            divided = open_group(mesh, groups, "shard", "shard", "context")
            device = spec.world.device.type
            reshard = spec.config.strategy.reshard
            self.sharding = Sharding(divided, groups["replicate"], device, reshard)
        self.placements = Placements(mesh, self.sharding, cuts, partition.stages, partition.owners)
        self.gradient_sums = GradientSums(spec, mesh, partition, self.placements)
        self._fill(values, units)

    @property
    def _own(self) -> list[nn.Module]:
        """The blocks of this rank's stage."""
        return [self._spec.blocks[block_number] for block_number in self.partition.own]

    def _fill(self, values: Values, units: Sequence[nn.Module]) -> None:
        """Fill this rank's parts with values, and shard them, a unit at a time. A collective."""
        spec = self._spec
        model, cuts = spec.model, self.partition.cuts
        names: dict[torch.Tensor, str] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            names[tensor] = name

        def take(tensor: torch.Tensor) -> tuple[MatrixPart | None, bool]:
            return cuts.get(tensor), self.placements.has(names[tensor])

        own = self._own
        if self._mesh.pipeline > 1:
            axis = spec.world.groups["pipeline"]
            p2p = P2P(axis, spec.world.device)
            numbers = self.partition.own
            self.stage = Stage(model, spec.blocks, numbers, p2p, spec.draws)
            self.root = self.stage
        for unit in units:
            values.fill(unit, take)
            if self.sharding is not None and unit in own:
                self.sharding.add(unit)
        values.fill(model, take)
        if self.sharding is not None:
            self.sharding.add(self.root)
            self.sharding.close({module: name for name, module in model.named_modules()})

    def outputs_checked(self, module: nn.Module) -> AbstractContextManager[None]:
        """Check the outputs of units of FSDP2, in a first pass and in a first evaluation."""
        return nullcontext() if self.sharding is None else self.sharding.outputs_checked(module)

    @contextmanager
    def undivided_draws(self) -> Iterator[None]:
        """Draw random numbers for whole rows in the `with` block, as the whole model does."""
        self._spec.draws.divide([])
        try:
            yield
        finally:
            self._spec.draws.divide(self.partition.draws)

    def list_remarks(self, count: int) -> list[str]:
        """Return a line for each axis: what its ranks exchange, for `count` micro-batches."""
        mesh = self._mesh
        config = self._spec.config.strategy
        lines = []
        if self.sharding is not None:
            again = "and again in backward, " if config.reshard else ""
            units = counted(len(self.sharding), "unit")
            each = f"each micro-batch gathers {units} in forward {again}"
            lines.append(f"shard: {each}and sums gradients into the shards")
        if mesh.replicate > 1:
            lines.append("replicate: each step sums the gradients of a part over its copies")
        if mesh.tensor > 1:
            form = "gathers and sums rows" if config.sequence else "sums activations"
            lines.append(f"tensor: each divided layer {form}, in forward and backward")
        if mesh.context > 1:
            lines.append("context: each attention gathers keys and values of all positions")
        if mesh.pipeline > 1:
            own = self.partition.own
            named = f"blocks {own.start} to {own.stop - 1} on this stage"
            part = bubble(mesh.pipeline, count)
            waits = f"a stage waits for {part:.0%} of a step"
            if part > MOST_WAITED:
                waits += " (a smaller data.micro_batch makes it less)"
            batches = counted(count, "micro-batch", "es")
            lines.append(f"pipeline: {config.schedule}, {batches}: {waits}; {named}")
        return lines
