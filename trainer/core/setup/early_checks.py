"""Checks of a run before it is built: settings, processes, and hooks that nothing would call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from trainer.base.errors import ConfigError
from trainer.base.process import uncollected
from trainer.base.python_code import names_in
from trainer.core.checkpoints import resume
from trainer.core.config.schema import Config
from trainer.core.config.targets import call_target, check_target
from trainer.core.config.typed import suggest_hook
from trainer.core.data.order import check_batch
from trainer.core.distributed.rendezvous import check_init, choose_backend
from trainer.core.distributed.world import World
from trainer.core.engine.context import HOOK_MODULES
from trainer.core.engine.precision import Precision
from trainer.core.setup import check_soon
from trainer.core.strategy import find_devices, find_strategy
from trainer.core.strategy.mesh_sizes import Mesh
from trainer.core.strategy.optimizer_trial import FUSED
from trainer.core.task import Task


def check_hooks(task: Task) -> None:
    """Raise ConfigError for a hook that takes other arguments than the trainer gives it.

    And for an attribute of the class in the place of one of the trainer's, such as `model`.
    """
    kind = type(task).__name__
    for base in type(task).__mro__:
        for name, attribute in vars(base).items() if base.__module__ in HOOK_MODULES else ():
            if name.startswith("_") or getattr(type(task), name) is attribute:
                continue
            if isinstance(attribute, property):
                raise ConfigError(f"{kind}.{name}: is the trainer's; choose another name")
            if inspect.isfunction(attribute):
                _check_arguments(f"{kind}.{name}", getattr(task, name), attribute)


def _check_arguments(name: str, own: Any, hook: Any) -> None:
    _, *every = inspect.signature(hook).parameters.values()
    required = [each.name for each in every if each.default is each.empty]
    try:
        taken = inspect.signature(own)
    except (TypeError, ValueError):  # of a built-in function, or nothing that is called
        return
    try:
        taken.bind(*required)
    except TypeError:
        raise ConfigError(f"{name} takes {taken}: must take ({', '.join(required)})") from None


def find_unused_hooks(task: type[Task]) -> list[str]:
    """Return a warning for each method that looks like a hook, and that its class never names."""
    own: dict[str, tuple[type, Any]] = {}
    hook_names: list[str] = []
    for kind in reversed(task.__mro__):
        if kind.__module__ in HOOK_MODULES:
            hook_names += [name for name in vars(kind) if not name.startswith("_")]
        else:
            own |= {n: (kind, each) for n, each in vars(kind).items() if inspect.isfunction(each)}
    used = {name for _, method in own.values() for name in names_in(method.__code__)}
    lines = []
    for name, (kind, _) in own.items():
        advice = "" if name in hook_names or name in used else suggest_hook(name, hook_names)
        if advice:
            line = f"warning: {kind.__name__}.{name} is never called by the trainer; {advice}"
            lines.append(line)
    return lines


def check_layout(config: Config, world: World) -> None:
    """Raise ConfigError if this layout cannot run the configuration."""
    Precision.check(config.strategy.precision, world.device)
    kind = find_strategy(config.strategy)
    kind.check(config, world)
    parts = kind.batch_split(config)
    check_batch(config.data.global_batch, parts, Mesh.of(config.strategy.mesh, world).data_size)
    choose_backend(config.dist, world)
    check_init(config.dist, world)


def fits_here(config: Config, world: World) -> bool:
    """Return True if this layout can run the configuration on the devices of this machine."""
    try:
        check_layout(config, world.with_devices(find_devices(config.strategy, world)))
    except ConfigError:
        return False
    return True


def list_sizes(config: Config, least: int, most: int) -> list[int]:
    """Return the numbers of ranks in this range that mesh, global batch and strategy allow.

    This machine's devices may be others than those of the ranks, so a rule that no number passes
    is left to the ranks.
    """
    kind = find_strategy(config.strategy)

    def fits_batch(world: World) -> None:
        mesh = Mesh.of(config.strategy.mesh, world)
        check_batch(config.data.global_batch, kind.batch_split(config), mesh.data_size)

    sizes = [*range(least, most + 1)]
    for check in (fits_batch, partial(kind.check, config)):
        sizes = [size for size in sizes if _passes(check, config, size)] or sizes
    return sizes


def _passes(check: Callable[[World], None], config: Config, size: int) -> bool:
    """Return True if a check passes for a number of ranks, on nodes of one size."""
    is_by_node = config.strategy.mesh.shard == "node"
    nodes = [n for n in range(1, size + 1) if size % n == 0] if is_by_node else [1]
    for num_nodes in nodes:
        with suppress(ConfigError):
            check(World(world_size=size, local_world_size=size // num_nodes, num_nodes=num_nodes))
            return True
    return False


def check_training(config: Config, world: World) -> resume.Origin:
    """Run the early checks of `fit`, and return the origin of the run.

    It is the run directory and the checkpoint to resume from, known on rank 0 only.
    """
    check_run(config, world)
    return check_soon(config, world.launcher)


def check_run(config: Config, world: World) -> None:
    """Run those of the early checks of `fit` that ask for nothing on this machine."""
    if "train" in config.eval.splits:
        raise ConfigError(f"""eval.splits={config.eval.splits}: must not have train:
            its means would have the names of training; use log.train_metrics=true""")
    check_layout(config, world)
    check_target(config.optim, "optim", config.packages, Optimizer)
    check_target(config.schedule, "schedule", config.packages)


def check_job(config: Config, world: World, is_here: bool) -> None:
    """Run the early checks of a run that another process will train, on this machine or not."""
    if is_here:
        check_training(config, world)
    try_optimizer(config)


@uncollected()
def try_optimizer(config: Config) -> None:
    """Last early check: build torch's optimizer, which checks its arguments, in a second."""
    if config.optim["_target_"] in FUSED:
        weights = [torch.zeros(1, requires_grad=True)]
        call_target(config.optim, "optim", config.packages, Optimizer, weights)


def check_evaluation(config: Config, world: World, fitted: Path | None) -> resume.Origin:
    """Run the early checks of `evaluate`, and return the checkpoint to read, on rank 0 only.

    It is that of `run.resume`, else of the run directory `fitted`, else none.
    """
    check_layout(config, world)
    if world.rank:
        return resume.Origin()
    location = config.run.resume or (str(fitted) if fitted else None)
    try:
        return resume.find_checkpoint(config, location)
    except ConfigError as error:
        if resume.ends_together(world.launcher):
            raise
        return resume.Origin(refused=str(error))  # all ranks raise it after rendezvous
