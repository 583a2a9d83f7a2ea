"""The part of the checks before the start that needs no torch, whose import takes a second."""

from __future__ import annotations

from importlib.util import find_spec

from trainer.config.schema import Config
from trainer.config.targets import check_name, check_target
from trainer.distributed.launchers import Launcher
from trainer.errors import ConfigError
from trainer.record.resume import Origin, locate

OF_VENDORS = ("wandb", "mlflow")  # trackers whose packages are extras


def check_soon(config: Config, launcher: Launcher) -> Origin:
    """Check a training run's environment, names and disk, without writing anything.

    Returns, on rank 0, the origin of the run. Only rank 0 reads the disk, since other nodes need
    not have it. Raises ConfigError for invalid settings.
    """
    rank, _, _, size, *_ = launcher.place()
    if config.dist.init == "env" and size > 1:
        _ = launcher.master
    check_name(config.optim["_target_"], "optim._target_", config.packages)
    check_target(config.schedule, "schedule", config.packages)
    _check_trackers(config)
    return locate(config, launcher) if rank == 0 else Origin()


def _check_trackers(config: Config) -> None:
    for name in OF_VENDORS:
        if name in config.log.trackers and find_spec(name) is None:
            given = f"log.trackers={config.log.trackers}"
            raise ConfigError(f"{given}: run pip install 'lockstep-trainer[{name}]'")
