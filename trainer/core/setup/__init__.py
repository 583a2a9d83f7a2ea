"""Setup: checks before the start, agreement of the ranks, data and model, the run directory.

The first checks are here: they need no torch, whose import takes a second.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from trainer.core import extensions
from trainer.core.checkpoints.resume import Origin, locate
from trainer.core.config.schema import Config
from trainer.core.config.targets import check_name, check_target
from trainer.core.distributed.launchers import Launcher


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
    if config.checkpoint.export is not None:
        extensions.EXPORT.check(f"checkpoint.export={config.checkpoint.export}")
    if mirror := config.checkpoint.mirror:
        extensions.STORES[urlsplit(mirror).scheme].check(f"checkpoint.mirror={mirror}")
    return locate(config, launcher) if rank == 0 else Origin()


def _check_trackers(config: Config) -> None:
    for name, tracker in extensions.TRACKERS.items():
        if name in config.log.trackers:
            tracker.check(f"log.trackers={config.log.trackers}")
