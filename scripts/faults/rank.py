"""`python -m faults.rank`: run the command as one rank, and mark the beginning of the rendezvous
and the moment when the process group has formed.

FAULTS_UNLIKE may describe the one rank that differs from the others: its `rank`, more `words`,
`paths` to import from first, its `environment`, and what to `set` in torch.
"""

from __future__ import annotations

import json
import os
import sys
import time

UNLIKE = "FAULTS_UNLIKE"
OTHER_VERSION = "9.9.9"


def main() -> None:
    odd = json.loads(os.environ.get(UNLIKE, "{}"))
    if odd.get("rank") == os.environ.get("RANK"):
        sys.argv += odd["words"]
        sys.path[:0] = odd["paths"]  # before any module of the package is loaded

        os.environ |= odd["environment"]
        _set(odd["set"])
    from faults.task import mark
    from trainer.cli import run
    from trainer.core.distributed import group
    from trainer.train import main

    meet = group.meet

    def marked(*arguments):
        mark(f"meets {os.getpid()} {time.monotonic()}")
        store = meet(*arguments)
        mark(f"stands {os.getpid()} {time.monotonic()}")
        return store

    group.meet = marked
    run(main)


def _set(what: str) -> None:
    import torch

    if what == "dtype":
        torch.set_default_dtype(torch.float64)
    elif what == "version":
        torch.__version__ = OTHER_VERSION


if __name__ == "__main__":
    main()
