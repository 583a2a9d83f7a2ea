"""Agreement of the ranks before data and model are built: the run to continue, and the settings
that are `auto`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from trainer.config.schema import Config
from trainer.distributed import accelerator
from trainer.distributed.backend import collective_limit
from trainer.distributed.group import Group
from trainer.distributed.ranks import Ranks, open_ranks
from trainer.distributed.world import World
from trainer.engine.precision import OPEN, choose_precision, is_bf16_native, takes_bf16
from trainer.errors import CheckpointError, ConfigError
from trainer.record import fingerprint, init_from, resume
from trainer.record.startup import fact
from trainer.setup.capacity import Steps, resolve_micro_batch
from trainer.setup.checks import check_layout
from trainer.strategy.mesh import Mesh, open_groups
from trainer.task import Task


@dataclass(frozen=True)
class Session:
    """The ranks of one start, which agree on `origin`. `notes` are lines for the start to show."""

    ranks: Ranks
    origin: resume.Origin
    notes: list[str]


@contextmanager
def open_session(
    task: Task, origin: resume.Origin, steps: Steps | None = None
) -> Iterator[Session]:
    """Open the ranks of a task, and agree on the run to continue and on settings that are `auto`.

    During the block `task.config` and `task.world` have what was agreed on, and afterwards what
    they had before. `steps` makes the first steps of a training run; without it, nothing is
    trained. A collective.
    """
    given = (task.config, task.world)
    facts = fingerprint.of_start(task.config, type(task))
    with open_ranks(task.config.dist, task.world, facts) as ranks:
        try:
            task.world = complete_world(task.world, task.config, ranks)
            if steps is not None:
                origin = _agree_on_origin(task.config, task.world, ranks.group, origin)
            else:
                with ranks.group.agreed("finding the checkpoint"):
                    if origin.refused:
                        raise ConfigError(origin.refused)
            kept = _read_kept(task.config, task.world, ranks.group, origin)
            task.config, notes = _resolve_precision(task.config, task.world, ranks.group, kept)
            if steps is not None:
                task.config, more = resolve_micro_batch(task, ranks, kept, steps)
                notes += more
            yield Session(ranks, origin, notes)
        finally:
            task.config, task.world = given


def _agree_on_origin(
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


def _read_kept(config: Config, world: World, group: Group, origin: resume.Origin) -> dict[str, Any]:
    """Return what the run to continue has for settings that are `auto`. A collective."""
    kinds = {"strategy.precision": str, "data.micro_batch": int}
    values = config.flat()
    open_values = {"strategy.precision": OPEN, "data.micro_batch": ("auto",)}
    asked = {key: kind for key, kind in kinds.items() if values[key] in open_values[key]}
    if not asked:
        return {}
    saved: dict[str, Any] = {}
    with group.agreed("reading the run to resume"):
        if world.rank == 0:
            saved = resume.read_saved(config, origin)
        for key, kind in asked.items():
            if not isinstance(saved.get(key), kind | None):
                raise CheckpointError(
                    f"the {key} of the run to resume is not of type {kind.__name__}"
                )
    return group.tell_all({key: saved.get(key) for key in asked})


def _resolve_precision(
    config: Config, world: World, group: Group, kept: Mapping[str, Any]
) -> tuple[Config, list[str]]:
    """Return the config with its precision, if it is auto or default, and a line with the reason.

    A resume keeps the precision of its run. A new run gets amp_bf16 if the devices of all ranks
    have bf16 arithmetic, otherwise fp32; with default it gets fp32 on CPUs. A collective.
    """
    given = config.strategy.precision
    if given not in OPEN:
        return config, []
    is_plain = not takes_bf16(given, accelerator.is_used(world.device))
    is_native = not is_plain and all(map(is_bf16_native, world.devices))
    without, some = group.max(0 if is_native else world.rank + 1, is_native)
    chosen: Any = kept["strategy.precision"] or choose_precision(not without)
    why = "every rank has bf16 arithmetic in hardware"
    if kept["strategy.precision"]:
        why = "the run to resume has it"
    elif without:
        who = f"rank {without - 1:.0f} has no" if some else "no rank has"
        why = f"{who} bf16 arithmetic in hardware"
    config = replace(config, strategy=replace(config.strategy, precision=chosen))
    with group.agreed("checking the precision"):
        check_layout(config, world)
    is_told = not is_plain or chosen != "fp32"
    line = fact("dtype", f"{chosen} (strategy.precision={given}), because {why}")
    return config, [line] * is_told


def complete_world(world: World, config: Config, ranks: Ranks) -> World:
    """Return this rank's world with the groups of the mesh, on rank 0 with the starters of all
    ranks. A collective."""
    group = ranks.group
    mesh = Mesh.of(config.strategy.mesh, world)
    if mesh.is_divided:
        ranks.heartbeat.set_place(mesh.place(mesh.rank))
    backend = dist.get_backend() if dist.is_initialized() else "gloo"
    limit_s = collective_limit(config.dist, backend)
    world = world.with_groups(open_groups(mesh, limit_s, ranks.heartbeat.wait_in))
    every = group.collect(world.launcher.starters)
    starters = tuple(dict.fromkeys(name for names in every for name in names))
    return replace(world, launcher=replace(world.launcher, starters=starters))
