"""`python -m trainer.notebook FILE`: train the task that `Trainer.launch` wrote."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trainer.cli import run
from trainer.distributed.launchers import MARK
from trainer.distributed.signals import catch_early
from trainer.setup.cell import read_task, write_summary


def main(arguments: Sequence[str]) -> int:
    catch_early()
    path = Path(arguments[0])
    own, config = read_task(path)
    if MARK not in os.environ:
        from trainer.distributed.launch import launch

        return launch(config.launch, arguments, "notebook")
    task = own(config)
    summary = task.fit()
    if task.world.rank == 0:
        write_summary(path, summary)
    return summary.exit_code


if __name__ == "__main__":
    run(main)
