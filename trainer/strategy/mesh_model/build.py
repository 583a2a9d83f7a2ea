"""Division: the steps by which a rank gets its part of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from trainer.data.order import counted
from trainer.distributed.world import RankGroup
from trainer.strategy.base import Blueprint, call
from trainer.strategy.context_parallel import Context
from trainer.strategy.mesh import COPIES, Mesh, open_group
from trainer.strategy.mesh_model.materialize import Values, copy_structure, inner_first
from trainer.strategy.mesh_model.partition import Partition
from trainer.strategy.mesh_model.placements import Placements
from trainer.strategy.pipeline_parallel.p2p import P2P
from trainer.strategy.pipeline_parallel.schedule import bubble
from trainer.strategy.pipeline_parallel.stage import Stage
from trainer.strategy.sharded.fully_shard import Sharding
from trainer.strategy.tensor_parallel.plan import MatrixPart, divide_sequence

MOST_WAITED = 0.25  # of a step, without a word of advice


class Division:
    """A model divided over a mesh.

    `structure` has the shapes of the whole model. `root` is the module to call: the model, or its
    stage. `shared` are the buffers that several stages use. `flops` is 0 where a pass over this
    rank's part finds them. `compiled` are the modules that torch.compile may take.
    """

    def __init__(
        self, blueprint: Blueprint, mesh: Mesh, context: Context | None, is_compiled: bool
    ):
        """Divide the model. On rank 0 it has its values, on other ranks only its structure."""
        model = blueprint.model
        self.stage: Stage | None = None
        self.sharding: Sharding | None = None
        self.structure = self.root = model
        self.compiled: Sequence[nn.Module] = blueprint.blocks or [model]
        self._mesh = mesh
        self._blueprint = blueprint
        self._inner = inner_first(model, blueprint.blocks)
        values = Values(model, blueprint.world, blueprint.precision.dtype)
        if mesh.divides_model:
            self.structure = copy_structure(model)
        self._partition = partition = Partition(blueprint, mesh, context, is_compiled)
        self.flops = partition.flops
        self._partial = partition.partial
        self.shared = partition.shared
        if blueprint.config.strategy.sequence:
            divide_sequence(self._own, blueprint.world.groups["tensor"])
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        cuts = {name: partition.cuts[tensor] for name, tensor in named if tensor in partition.cuts}
        if mesh.shard > 1:
            groups = blueprint.world.groups
            divided = open_group(mesh, groups, "shard", "shard", "context")
            device = blueprint.world.device.type
            reshard = blueprint.config.strategy.reshard
            self.sharding = Sharding(divided, groups["replicate"], device, reshard)
        self.copies = open_group(mesh, blueprint.world.groups, "data", *COPIES)
        self._tied = self._open_tied(partition.stages.values())
        self.placements = Placements(mesh, self.sharding, cuts, partition.stages, partition.owners)
        self._fill(values)

    @property
    def _own(self) -> list[nn.Module]:
        return [self._blueprint.blocks[number] for number in self._partition.own]

    def _fill(self, values: Values) -> None:
        """Give this rank's parts their values, and shard them, a unit at a time. A collective."""
        blueprint = self._blueprint
        model, cuts = blueprint.model, self._partition.cuts
        names: dict[torch.Tensor, str] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            names[tensor] = name

        def take(tensor: torch.Tensor) -> tuple[MatrixPart | None, bool]:
            return cuts.get(tensor), self.placements.has(names[tensor])

        own = self._own
        if self._mesh.pipeline > 1:
            axis = blueprint.world.groups["pipeline"]
            p2p = P2P(axis, blueprint.world.device)
            numbers = self._partition.own
            self.stage = Stage(model, blueprint.blocks, numbers, p2p, blueprint.draws, call)
            self.root = self.stage
            self.compiled = own
        for unit in self._inner:
            values.fill(unit, take)
            if self.sharding is not None and unit in own:
                self.sharding.add(unit)
        values.fill(model, take)
        if self.sharding is not None:
            self.sharding.add(self.root)
            self.sharding.close({module: name for name, module in model.named_modules()})
        if self._mesh.divides_model and not blueprint.blocks:
            self.compiled = []

    @contextmanager
    def undivided_draws(self) -> Iterator[None]:
        """Draw for whole rows during the block, as the whole model needs."""
        self._blueprint.draws.divide([])
        try:
            yield
        finally:
            self._blueprint.draws.divide(self._partition.draws)

    def is_copied(self, name: str) -> bool:
        """Return True if each rank of the tensor axis finds the whole gradient of a parameter."""
        return name not in self.placements.cuts and name not in self._partial

    def sums_of(self, name: str, parameter: torch.Tensor) -> Iterator[tuple[int, RankGroup]]:
        """Yield the groups over which a gradient is summed at the end of a step, each in its turn:
        copies of the parameter, ranks with parts of the positions, stages that share it."""
        if not self.placements.is_sharded(parameter):
            yield 0, self.copies
        if name in self._partial:
            yield 1, self._blueprint.world.groups["tensor"]
        stages = self.placements.stages(name)
        if len(stages) > 1:
            yield 2, self._tied[stages]

    def _open_tied(self, every: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], RankGroup]:
        """Open a group for each set of stages that share parameters. A collective."""
        mesh = self._mesh
        pipeline = self._blueprint.world.groups["pipeline"]
        found = {tuple(range(mesh.pipeline)): pipeline}
        for stages in sorted({stages for stages in every if len(stages) > 1} - set(found)):
            ranks = tuple(pipeline.ranks[stage] for stage in stages)
            is_in = mesh.rank in ranks
            group = pipeline.open(ranks if is_in else (mesh.rank,))
            assert group.group  # the others open one too: all ranks open equally many
            found[stages] = group
        return found

    # Description --------------------------------------------------------------------------------

    def list_remarks(self, count: int) -> list[str]:
        """Return a line for each axis: what its ranks exchange. `count` is the number of
        micro-batches."""
        mesh = self._mesh
        config = self._blueprint.config.strategy
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
            own = self._partition.own
            named = f"blocks {own.start} to {own.stop - 1} on this stage"
            part = bubble(mesh.pipeline, count)
            waits = f"a stage waits for {part:.0%} of a step"
            if part > MOST_WAITED:
                waits += " (a smaller data.micro_batch makes it less)"
            batches = counted(count, "micro-batch", "es")
            lines.append(f"pipeline: {config.schedule}, {batches}: {waits}; {named}")
        return lines
