"""Checks of settings, environment and saved runs, before any socket or directory is opened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch.optim import Optimizer

from trainer.config.schema import Config, MeshSizes
from trainer.config.targets import call_target, check_target
from trainer.data.batch_plan import check_batch
from trainer.distributed.backend import choose_backend
from trainer.distributed.rendezvous import check_init
from trainer.distributed.world import World
from trainer.engine.precision import Precision
from trainer.errors import ConfigError
from trainer.process.loading import uncollected
from trainer.record import resume
from trainer.setup.early_checks import check_soon
from trainer.strategy.base import find_devices, find_strategy
from trainer.strategy.mesh import Mesh
from trainer.strategy.mesh_model.optimizer_trial import FUSED

COPIES = MeshSizes("auto", 1, 1, 1, 1)  # of the model, on any number of ranks


def check_layout(config: Config, world: World) -> None:
    """Raise ConfigError if this layout cannot run the configuration."""
    Precision.check(config.strategy.precision, world.device)
    kind = find_strategy(config.strategy)
    kind.check(config, world)
    choose_backend(config.dist, world)
    check_init(config.dist, world)
    ranks = Mesh.of(config.strategy.mesh, world).data_size
    check_batch(config.data.global_batch, kind.cut(config), ranks)


def for_these_ranks(config: Config) -> Config:
    """Return the settings of a run to evaluate: its strategy, or ddp if that needs other ranks."""
    world = World.from_environment()
    block = config.strategy
    try:
        check_layout(config, world.with_devices(find_devices(block, world)))
    except ConfigError:
        block = replace(block, name="ddp", mesh=COPIES, sequence=False, devices_per_rank=1)
        config = replace(config, strategy=replace(block, comm_hook="none", device_ids=None))
    return config


def check_training(config: Config, world: World) -> resume.Origin:
    """Run the early checks of `fit`, and return the origin of the run.

    It is the run directory and the checkpoint to resume from, known on rank 0 only.
    """
    if "train" in config.eval.splits:
        why = "its means would have the names of training; use log.train_metrics=true"
        raise ConfigError(f"eval.splits={config.eval.splits}: must not have train: {why}")
    check_layout(config, world)
    check_target(config.optim, "optim", config.packages, Optimizer)
    return check_soon(config, world.launcher)


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
    given = config.run.resume or (str(fitted) if fitted else None)
    try:
        return resume.find_checkpoint(config, given)
    except ConfigError as error:
        if resume.ends_together(world.launcher):
            raise
        return resume.Origin(refused=str(error))  # all ranks raise it after rendezvous
