"""The backend of the process group, by settings and devices, and its time limit."""

from __future__ import annotations

from trainer.config.schema import DistSettings
from trainer.distributed import accelerator
from trainer.distributed.watch.phases import PATIENCE
from trainer.distributed.world import World
from trainer.errors import ConfigError

LATER_S = 60.0  # than the watcher


def choose_backend(config: DistSettings, world: World) -> str:
    """Resolve `auto`: the accelerator's own backend, such as nccl, if there is one, else gloo.

    Ranks that share a device need gloo instead, which `process_group` finds out. Raises ConfigError
    if the configured backend cannot work here.
    """
    gpus = accelerator.count()
    problem = ""
    if config.backend == "mpi" and world.launcher.name not in ("mpirun", "srun"):
        problem = "needs mpirun or srun; use mpirun -n <ranks> python -m trainer, or gloo"
    elif config.backend == "mpi" and gpus:
        hidden = "hide the GPUs with CUDA_VISIBLE_DEVICES= (empty)"
        problem = f"carries CPU tensors only, and torch sees {gpus} GPUs; use auto, or {hidden}"
    elif config.backend == "nccl" and accelerator.kind() != "cuda":
        problem = "needs CUDA, but torch sees no GPU here; use dist.backend=auto or gloo"
    if problem:
        raise ConfigError(f"dist.backend={config.backend}: {problem}")
    if config.backend != "auto":
        return config.backend
    return accelerator.own_backend() if gpus else "gloo"


def collective_limit(config: DistSettings, backend: str) -> float:
    """Return the seconds after which a collective fails.

    NCCL then ends the process with SIGABRT, so there the watcher, which says why, must be first.
    """
    if not accelerator.carries(backend):
        return config.timeout_s
    return max(config.timeout_s, PATIENCE * (config.hang_timeout_s or 0.0)) + LATER_S
