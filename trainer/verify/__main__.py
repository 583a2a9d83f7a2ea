"""`python -m trainer.verify task=<name>`: prove that a task trains the same in every layout."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from trainer.cli import run
from trainer.distributed.signals import interrupt
from trainer.process.ending import end_as_by_interrupt

HELP = """usage: python -m trainer.verify task=<name> [layouts=ranks-2,ranks-3] [steps=10]
           [key=value ...]
       python -m trainer.verify --bits task=<name> [layouts=ranks-2,ranks-3] [steps=10] ...
       python -m trainer.verify --resume task=<name> [kills=3] [seed=0] ...

Trains the task for a few steps on one rank and in each layout, with real processes, in fp64 and in
the task's own precision. Compares the examples used, losses, first gradients, weights and
evaluation. For a difference it prints the first tensor that differs and the likely reason.
--bits trains with strategy=exact, in the task's own precision, and requires equal bits.
--resume kills a run at random steps and ranks and resumes it. The same number of ranks must reach
the same bits, other numbers of ranks the same results up to rounding.

layouts: {layouts}
         ranks-<n> for any n; by default all of these (with --bits those that change the number of
         ranks or workers)
Exit codes: 0 proved, 1 a result differs or nothing was learned, 2 bad configuration,
130 interrupted."""


def main(arguments: Sequence[str]) -> int:
    signal.signal(signal.SIGINT, interrupt)  # while torch is imported, which may lose an exception
    from trainer.verify.command import verify

    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_as_by_interrupt()
    return verify(arguments)


def describe(_: Sequence[str]) -> str:
    from trainer.verify.layouts import LAYOUTS

    return HELP.format(layouts=", ".join(LAYOUTS))


if __name__ == "__main__":
    run(main, describe)
