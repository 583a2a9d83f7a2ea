"""`python -m trainer.doctor`, under any launcher: check the environment, and print a table."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from trainer.cli import load_task, run, split_arguments, take_words
from trainer.config.compose import load_config
from trainer.distributed import mpi
from trainer.distributed.backend import choose_backend
from trainer.distributed.rendezvous import check_init, part
from trainer.doctor.examination import Examination
from trainer.errors import ConfigError
from trainer.setup.checks import check_layout
from trainer.task import Task

HELP = """usage: python -m trainer.doctor [data.url=URL] [key=value ...] [--config-dir DIR]
       torchrun --nproc_per_node=<ranks> -m trainer.doctor ...       (or srun, mpirun, by hand)

Start it exactly as the run will be started: it reports problems that would otherwise show up as a
hang. It checks the ranks and their rendezvous, all-reduce (results and speed), clocks, disk,
threads, shared memory, versions, code and settings. No task is needed. Settings apply as in a run,
but dist.timeout_s is 30 unless given. Nothing is left on disk. data.url, data in shards, is read on
each rank: its index and its first shard, timed.

Exit codes: 0 no check fails (warnings do not count), 1 a check fails, 2 bad configuration."""
URL = "data.url"
_DEFAULTS = {"task": "task=text", "dist.timeout_s": "dist.timeout_s=30"}


def main(arguments: Sequence[str]) -> int:
    words, config_dirs = split_arguments(arguments)
    own, overrides = take_words(words, (URL,), config_dirs)
    task = load(overrides, config_dirs)
    block = task.config.dist
    path = Path(block.path or "").absolute()
    is_ours = block.init == "file" and not any(
        place.name.startswith(path.name) for place in path.parent.iterdir()
    )
    examination = Examination(task, own.get(URL, ""))
    signal.signal(signal.SIGTERM, examination.end)
    examination.start()
    try:
        while examination.is_alive() and not examination.is_late() and not examination.error:
            examination.join(0.05)
        if examination.is_alive() or examination.error:
            examination.give_up()
    finally:
        if examination.mark:
            Path(examination.mark).unlink(missing_ok=True)
        if is_ours:
            part(block, task.world)
    return examination.code


def load(overrides: Sequence[str], config_dirs: Sequence[str]) -> Task:
    """Return the task that a run with these settings would have.

    Raises ConfigError for errors that a run would report before it opens a socket.
    """
    given = {word.lstrip("+").split("=", 1)[0] for word in overrides}
    defaults = [word for key, word in _DEFAULTS.items() if key not in given]
    config = load_config([*defaults, *overrides], config_dirs)
    if config.launch.name != "inline":
        advice = "the doctor starts no ranks; run torchrun ... -m trainer.doctor"
        raise ConfigError(f"launch={config.launch.name}: {advice}")
    task: Task = load_task(config)(config)
    check_init(config.dist, task.world)
    check_layout(config, task.world)
    if choose_backend(config.dist, task.world) == "mpi":
        mpi.register()  # in the main thread, which also finalises MPI
    return task


if __name__ == "__main__":
    run(main, HELP)
