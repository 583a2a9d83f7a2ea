"""Agreement of the ranks, before data and model are built, on origin, precision and groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainer.config.schema import Config
from trainer.distributed.group import Group
from trainer.distributed.ranks import Ranks
from trainer.distributed.world import World
from trainer.engine.precision import choose_precision, is_bf16_native
from trainer.errors import CheckpointError, ConfigError
from trainer.record import init_from, resume
from trainer.setup.checks import check_layout
from trainer.strategy.mesh import Mesh, open_groups


def agree_on_origin(
    config: Config, world: World, group: Group, origin: resume.Origin
) -> resume.Origin:
    """Look for the previous attempt again, now with the starters of all ranks. A collective."""
    with group.agreed("finding the run directory"):
        if world.rank == 0:
            origin = resume.find_previous_attempt(config, world.launcher) or origin
            if config.run.init_from is not None and origin.source is None:
                init_from.check(config)
        if origin.refused:
            raise ConfigError(origin.refused)
    return origin


def resolve_precision(
    config: Config, world: World, group: Group, origin: resume.Origin
) -> tuple[Config, list[str]]:
    """Return the config with `strategy.precision=auto` resolved, and a line with the reason.

    A resume keeps the precision of its run. A new run gets amp_bf16 if the devices of all ranks
    have bf16 arithmetic, otherwise fp32. A collective.
    """
    if config.strategy.precision not in ("auto", config.auto_precision):
        return config, []
    saved: dict[str, Any] = {}
    with group.agreed("choosing the precision"):
        if world.rank == 0:
            saved = resume.read_saved(config, origin)
            if not isinstance(saved.get("strategy.precision"), str | None):
                raise CheckpointError("the strategy.precision of the run to resume is not a name")
    kept = group.tell_all(saved.get("strategy.precision"))
    is_native = all(map(is_bf16_native, world.devices))
    without, some = group.max(0 if is_native else world.rank + 1, is_native)
    chosen: Any = kept or choose_precision(not without)
    why = "every rank has bf16 arithmetic in hardware"
    if kept:
        why = "the run to resume has it"
    elif without:
        who = f"rank {without - 1:.0f} has no" if some else "no rank has"
        why = f"{who} bf16 arithmetic in hardware"
    strategy = replace(config.strategy, precision=chosen)
    config = replace(config, strategy=strategy, auto_precision=chosen)
    with group.agreed("checking the precision"):
        check_layout(config, world)
    return config, [f"strategy.precision=auto: {chosen}, because {why}"]


def complete_world(world: World, config: Config, ranks: Ranks) -> World:
    """Return this rank's world with the groups of the mesh, on rank 0 with the starters of all
    ranks. A collective."""
    group = ranks.group
    mesh = Mesh.of(config.strategy.mesh, world)
    if mesh.is_divided:
        ranks.heartbeat.set_place(mesh.place(mesh.rank))
    world = world.with_groups(open_groups(mesh, config.dist.timeout_s, ranks.heartbeat.wait_in))
    lines = group.collect_text(" ".join(world.launcher.starters))
    starters = tuple(dict.fromkeys(" ".join(lines).split()))
    return replace(world, launcher=replace(world.launcher, starters=starters))
