"""`-m ... hydra/launcher=submitit_slurm`: submit the jobs of a sweep to SLURM.

The settings are those of Hydra's submitit launcher (hydra.launcher.nodes, .tasks_per_node,
.timeout_min, ...); submitit itself (the extra `slurm`) passes them to sbatch. Each job is a group
of ranks.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.distributed import entry
from trainer.errors import ConfigError, one_line, visible

LAUNCHERS = {"hydra/launcher=submitit_slurm": "slurm", "hydra/launcher=submitit_local": "local"}
_CHOICE = "hydra/launcher="
_PREFIX = "hydra.launcher."
# submitit has these settings for every cluster; the others are named slurm_<name>.
_FOR_ALL = (
    *("name", "timeout_min", "mem_gb"),
    *("nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node"),
)


def cluster_of(words: Sequence[str]) -> str | None:
    """Return "slurm" or "local" if the words choose a launcher of submitit, else None.

    Raises ConfigError for another launcher.
    """
    chosen = [word for word in words if word.startswith(_CHOICE)]
    if not chosen:
        return None
    if chosen[-1] not in LAUNCHERS:
        allowed = "must be submitit_slurm or submitit_local; without it the jobs run here"
        raise ConfigError(f"{chosen[-1]}: {allowed}")
    return LAUNCHERS[chosen[-1]]


def open_executor(cluster: str, folder: Path, words: Sequence[str]) -> Any:
    """Return submitit's executor with the settings `hydra.launcher.*` among the words.

    Raises ConfigError for unknown settings.
    """
    key = f"{_CHOICE}submitit_{cluster}"
    try:
        import submitit
        from omegaconf import OmegaConf
    except ImportError:
        advice = "needs submitit: pip install 'lockstep-trainer[slurm]'"
        raise ConfigError(f"{key}: {advice}") from None
    if unknown := [word for word in words if not word.startswith((_PREFIX, _CHOICE))]:
        allowed = "must be hydra.launcher.* with submitit"
        raise ConfigError(f"{unknown[0]}: {allowed}")
    given = [word.removeprefix(_PREFIX) for word in words if word.startswith(_PREFIX)]
    settings: Any = OmegaConf.to_container(OmegaConf.from_dotlist(given))
    if cluster == "slurm":
        # The signal at which Lockstep saves and requeues, two minutes before the time limit.
        settings = {"signal_delay_s": 120, **settings}
    python: dict[str, Any] = {}
    if entry.SCRIPT in os.environ and sys.version_info >= (3, 11):
        # submitit starts its own module, and -m would put the working directory first.
        python = {f"{cluster}_python": f"{shlex.quote(sys.executable)} -P"}
    named = {n if n in _FOR_ALL else f"{cluster}_{n}": value for n, value in settings.items()}
    try:
        executor = submitit.AutoExecutor(folder=str(folder / "%j"), cluster=cluster, **python)
        executor.update_parameters(**named)
    except (NameError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{key}: {one_line(error)[:300]}") from None
    return executor


def submit(executor: Any, words: Sequence[str]) -> str:
    """Submit a job and return its id. Raise ConfigError with the error of sbatch."""
    from submitit.core.utils import FailedJobError

    try:
        return visible(str(executor.submit(_train, list(words)).job_id))
    except FailedJobError as error:
        raise ConfigError(f"{_CHOICE}submitit_slurm: {one_line(error)[:300]}") from None


def is_known(cluster: str, job: str) -> bool:
    """Return True while the job waits or runs."""
    if cluster == "local":
        return Path("/proc", job).exists()
    words = [shutil.which("squeue") or "squeue", "--noheader", f"--jobs={job}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)  # noqa: S603
    return done.returncode == 0 and bool(done.stdout.strip())


def _train(words: list[str]) -> int:
    """Run as a rank of the job. The process exits in here if training fails."""
    entry.append_working_directory()
    sys.argv = ["trainer", *words]
    try:
        entry.run_module()
    except SystemExit as end:
        return int(end.code or 0)
    return 0
