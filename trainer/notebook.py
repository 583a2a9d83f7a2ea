"""`python -m trainer.notebook FILE`: train the task that `Trainer.launch` wrote."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trainer.cli import run, single
from trainer.core.distributed.launchers import MARK
from trainer.core.distributed.signals import catch_early
from trainer.core.setup.notebook_launch import read_task, write_summary

HELP = """usage: python -m trainer.notebook FILE

Trains the task that Trainer.launch(ranks) has written to FILE. launch starts this command itself:
in a notebook, call launch."""
USAGE = "is started by Trainer.launch; call launch(ranks) in a notebook"


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


if __name__ == "__main__":
    run(main, HELP, has_json=False)
