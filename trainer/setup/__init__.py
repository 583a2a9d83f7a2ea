"""Setup: checks before the start, agreement of the ranks, data and model, the run directory.

The first checks are here: they need no torch, whose import takes a second.
"""

from __future__ import annotations

from importlib.util import find_spec

from trainer.checkpoints.resume import Origin, locate
from trainer.config.schema import Config
from trainer.config.targets import check_name, check_target
from trainer.distributed.launchers import Launcher
from trainer.errors import ConfigError

# Trackers, and what installs them. Two are no extras: trackio 0.43 wants pillow < 13, swanlab 0.10
# protobuf < 7, which the other extras have left behind.
OF_VENDORS = {
    "wandb": "'lockstep-trainer[wandb]'",
    "mlflow": "'lockstep-trainer[mlflow]'",
    "trackio": "trackio",
    "swanlab": "swanlab",
}


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
    if config.checkpoint.export is not None and find_spec("transformers") is None:
        raise ConfigError(f"""checkpoint.export={config.checkpoint.export}:
            run pip install 'lockstep-trainer[hf]'""")
    if config.checkpoint.mirror is not None and find_spec("obstore") is None:
        raise ConfigError(f"""checkpoint.mirror={config.checkpoint.mirror}:
            run pip install 'lockstep-trainer[bucket]'""")
    return locate(config, launcher) if rank == 0 else Origin()


def _check_trackers(config: Config) -> None:
    for name, package in OF_VENDORS.items():
        if name in config.log.trackers and find_spec(name) is None:
            raise ConfigError(f"""log.trackers={config.log.trackers}:
                run pip install {package}""")
