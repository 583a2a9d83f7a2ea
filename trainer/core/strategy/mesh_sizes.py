"""The mesh: the axes along which ranks divide data and model, and this rank's coordinates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

from trainer.base.errors import ConfigError
from trainer.core.config.schema import MeshSizes
from trainer.core.config.typed import build
from trainer.core.distributed.world import RankGroup, World, unnoticed

AXES = ("pipeline", "replicate", "shard", "context", "tensor")  # the innermost one last
DATA = ("replicate", "shard")  # these divide the rows of a global batch
COPY_AXES = (*DATA, "context")  # ranks along these use the same weights
SHARDED = ("pipeline", "shard", "context", "tensor")  # ranks along these have other parts of it
WHOLE = ("pipeline", "tensor")  # the same for a tensor that FSDP does not divide


@dataclass(frozen=True)
class Mesh:
    """Coordinates of a rank. Code that splits data or compares ranks uses them, not the world.

    Ranks of an inner axis have consecutive numbers. `replicate` counts copies of the model, and
    `shard` the ranks that divide a copy's parameters; both divide the rows of a global batch. The
    ranks of a `context` divide the positions of each row, those of a `tensor` the matrices, and
    those of a `pipeline` the layers; these three share their rows.
    """

    rank: int
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @classmethod
    def of_saved(cls, settings: Mapping[str, Any], size: int) -> Mesh:
        """Return the mesh of a run's settings by full name over `size` ranks, as if on one machine.

        Raises ConfigError as `of`.
        """
        saved = {axis: settings.get(f"strategy.mesh.{axis}") for axis in AXES}
        sizes = build(MeshSizes, saved, "strategy.mesh.")
        return cls.of(sizes, World(world_size=size, local_world_size=size))

    @classmethod
    def of(cls, sizes: MeshSizes, world: World) -> Mesh:
        """Return the mesh of these sizes over all ranks.

        Raises ConfigError if the product of the axes is not the number of ranks.
        """
        axes: dict[str, Any] = asdict(sizes)
        if axes["shard"] == "node":
            each = world.local_world_size if world.num_nodes > 1 else 2
            axes["shard"] = min(each, world.world_size)
        fixed = math.prod(size for size in axes.values() if size != "auto")
        free = [name for name, size in axes.items() if size == "auto"]
        shown = {name: size for name, size in axes.items() if size != 1 or name in DATA}
        setting = ", ".join(f"{name}={size}" for name, size in shown.items())
        if len(free) > 1:
            raise ConfigError(f"strategy.mesh: {setting}: set auto for one axis only")
        for name in free:
            axes[name] = max(1, world.world_size // fixed)
        if math.prod(axes.values()) != world.world_size:
            must = "must be the number of ranks" if not free else "must divide the number of ranks"
            advice = f"start {fixed} or set strategy.mesh.<axis>=auto"
            if free:
                advice = f"start a multiple of {fixed}, or set another size"
            if world.launcher.name == "python":
                advice = f"start them with torchrun --nproc_per_node={fixed}, or set another size"
            raise ConfigError(f"""strategy.mesh: {setting}: the product {must}, and {world.started};
                {advice}""")
        return cls(world.rank, **axes)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis, the outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """Return the coordinate of a rank along each axis, by default of this rank."""
        rest = self.rank if rank is None else rank
        coordinates = {}
        for axis in reversed(AXES):
            rest, coordinates[axis] = divmod(rest, getattr(self, axis))
        return {axis: coordinates[axis] for axis in AXES}

    @cached_property
    def _own(self) -> dict[str, int]:
        return self.coordinates()

    def __getitem__(self, axis: str) -> int:
        return self._own[axis]

    def members(self, *axes: str) -> tuple[int, ...]:
        """Return the ranks whose coordinates differ from this rank's along `axes` only."""
        sizes = self.sizes
        own = self.coordinates()
        choices = [range(sizes[axis]) if axis in axes else [own[axis]] for axis in AXES]
        return tuple(self.rank_at(coordinates) for coordinates in itertools.product(*choices))

    def rank_at(self, coordinates: tuple[int, ...]) -> int:
        """Return the rank with these coordinates, in the order of the axes."""
        rank = 0
        for axis, coordinate in zip(AXES, coordinates, strict=True):
            rank = rank * getattr(self, axis) + coordinate
        return rank

    def num_parts(self, *axes: str) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def number_of_part(self, *axes: str) -> int:
        """Return the number of this rank's part, if ranks along `axes` have different ones."""
        part = 0
        for axis in axes:
            part = part * self.sizes[axis] + self[axis]
        return part

    @property
    def data_size(self) -> int:
        """Number of parts into which the rows of a global batch are divided."""
        return self.replicate * self.shard

    @property
    def data_rank(self) -> int:
        """Number of this rank's part of the rows of a global batch."""
        return self["replicate"] * self.shard + self["shard"]

    @property
    def has_loss(self) -> bool:
        """True on the last stage of a pipeline, which has the outputs."""
        return self["pipeline"] == self.pipeline - 1

    @property
    def is_first(self) -> bool:
        """True on the first of the ranks that share their rows."""
        return not (self["pipeline"] or self["context"] or self["tensor"])

    @property
    def is_counted(self) -> bool:
        """True on the one rank whose values count for its rows, of all that share these rows."""
        return self.has_loss and not self["tensor"] and not self["context"]

    @property
    def divides_model(self) -> bool:
        """True if no rank computes a whole row with the whole model by itself."""
        return self.pipeline * self.context * self.tensor > 1

    @property
    def is_divided(self) -> bool:
        """True if ranks have different parts of the model."""
        return self.shard > 1 or self.divides_model

    @property
    def size(self) -> int:
        return math.prod(self.sizes.values())

    def __str__(self) -> str:
        """Return the axes, such as "pipeline 2 x shard 4"."""
        return " x ".join(f"{a} {n}" for a, n in self.sizes.items() if n > 1) or "one rank"

    def place(self, rank: int) -> str:
        """Return the coordinates of a rank, such as "pipeline 1, shard 3"; from 0."""
        coordinates = self.coordinates(rank)
        return ", ".join(f"{axis} {coordinates[axis]}" for axis, n in self.sizes.items() if n > 1)


def is_divided(sizes: MeshSizes) -> bool:
    """Return True if an axis divides the model, on some number of ranks."""
    return any(size != 1 for axis, size in asdict(sizes).items() if axis != "replicate")


def open_groups(
    mesh: Mesh, timeout_s: float, notice: Callable[[str], None] = unnoticed
) -> dict[str, RankGroup]:
    """Return the groups of this rank by axis, and `data` for all ranks with rows of their own.

    Collective: every rank must call it. Axes over the same ranks share a group. `notice` is called
    with a group's name while this rank waits in it, for `timeout_s` at most.
    """
    alone = RankGroup((mesh.rank,), 0, notice=notice, timeout=timedelta(seconds=timeout_s))
    if mesh.is_divided:  # else at its first use: each costs some ms
        alone = replace(alone, opened=alone.group)
    groups: dict[str, RankGroup] = {"known": alone}
    for name, axes in {**{axis: (axis,) for axis in AXES}, "data": DATA}.items():
        groups[name] = open_group(mesh, groups, name, *axes)
    del groups["known"]
    return groups


def open_group(mesh: Mesh, groups: Mapping[str, RankGroup], name: str, *axes: str) -> RankGroup:
    """Return the group of the ranks along several axes, a new one unless `groups` has it."""
    ranks = mesh.members(*axes)
    for group in groups.values():
        if group.ranks == ranks:
            return replace(group, name=name)
    return next(iter(groups.values())).open(ranks, name)
