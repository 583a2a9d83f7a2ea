"""Ranks started from a notebook's cell: fresh processes that train the task of the cell.

`python -m trainer.notebook FILE` is the command of these processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trainer.base.errors import STOPPED, ConfigError, RunError, describe
from trainer.base.process import child, invocation
from trainer.cli import run, single
from trainer.core.distributed.launchers import MARK
from trainer.core.distributed.signals import catch_early
from trainer.core.record.startup import Summary
from trainer.core.task import Task

HELP = """usage: python -m trainer.notebook FILE

Trains the task that Trainer.launch(ranks) has written to FILE. launch starts this command itself:
in a notebook, call launch."""
USAGE = "is started by Trainer.launch; call launch(ranks) in a notebook"
NEEDS_CLOUDPICKLE = "launch: needs cloudpickle; run pip install 'lockstep-trainer[notebook]'"
ERROR = "error: "


def main(arguments: Sequence[str]) -> int:
    catch_early()
    path = Path(single(arguments, f"trainer.notebook: {USAGE}"))
    own, config = read_task(path)
    if MARK not in os.environ:
        from trainer.core.distributed.launch import launch

        return launch(config.launch, arguments, config.checkpoint.copy_s, "notebook")
    task = own(config)
    summary = task.fit()
    if task.world.rank == 0:
        write_summary(path, summary)
    return summary.exit_code


def train_on_ranks(task: Task, ranks: int) -> Summary:
    """Train a task as `ranks` new processes, print their output, and return rank 0's summary.

    A class of a cell is in no file, so cloudpickle brings it to the processes. A fork of the kernel
    would be faster, but hangs or fails once the kernel has used autograd or an accelerator.
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise ConfigError(f"launch(ranks={ranks!r}): must be an integer of at least 1")
    if task.world.world_size > 1 or MARK in os.environ:
        started = f"the ranks were already started by {task.world.launcher.name}"
        raise ConfigError(f"launch: {started}; call fit")
    launch = replace(task.config.launch, name="elastic", nproc_per_node=str(ranks))
    with tempfile.TemporaryDirectory(prefix="lockstep-") as scratch:
        path = Path(scratch, "task")
        _write(path, (type(task), replace(task.config, launch=launch)))
        code, error = _run(path)
        if code not in (0, STOPPED):
            raise (ConfigError if code == 2 else RunError)(error or f"the ranks ended with {code}")
        summary = json.loads(_summary_of(path).read_text(encoding="utf-8"))
    return Summary(**{**summary, "directory": Path(summary["directory"])})


def read_task(path: Path) -> tuple[type, Any]:
    """Return the class and the Config that `train_on_ranks` wrote for its processes.

    Raises ConfigError for another file.
    """
    try:
        import cloudpickle

        own, config = cloudpickle.loads(path.read_bytes())
    except Exception as error:  # unpickling may raise any
        what = f"{path}: is no task that Trainer.launch wrote: {describe(error)}"
        raise ConfigError(f"{what}; call launch(ranks) in a notebook") from None
    return own, config


def write_summary(path: Path, summary: Summary) -> None:
    """Write what `fit` returned, for the process of the notebook."""
    text = json.dumps({**asdict(summary), "directory": str(summary.directory)})
    _summary_of(path).write_text(text, encoding="utf-8")


def _write(path: Path, content: tuple[type, Any]) -> None:
    try:
        import cloudpickle
    except ImportError:
        raise ConfigError(NEEDS_CLOUDPICKLE) from None
    path.write_bytes(cloudpickle.dumps(content))


def _summary_of(path: Path) -> Path:
    return path.with_name("summary.json")


def _run(path: Path) -> tuple[int, str]:
    """Run the ranks, print their output, and return their exit code and last error.

    Ctrl-C, or a notebook's stop button, asks them to save and end.
    """
    folders = os.pathsep.join(folder for folder in sys.path if folder)
    words = [sys.executable, *invocation.words("notebook"), str(path)]
    environment = {**os.environ, "PYTHONPATH": folders}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = child.start(words, env=environment, **output)
    try:
        error = _show(process)
    finally:
        child.end(process)
    return process.returncode, error


def _show(process: subprocess.Popen[str]) -> str:
    """Print the output of the ranks, and return the text of their last error."""
    assert process.stdout is not None
    error = ""
    is_asked = False
    while True:
        try:
            for line in process.stdout:
                if line.startswith(ERROR):
                    error = line.removeprefix(ERROR).strip()
                else:
                    print(line, end="", flush=True)
            process.wait()
            return error
        except KeyboardInterrupt:
            if is_asked:
                raise
            is_asked = True
            process.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    run(main, HELP, has_json=False)
