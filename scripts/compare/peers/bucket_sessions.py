"""Sessions of a contestant of compare_buckets.py, each in a process that is forked with its
packages loaded.

A line of JSON on stdin begins a session; its process id is printed, and at its end the exit code.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SAVE_EVERY = 4
BATCH = 6  # of 101 examples: one epoch of 16 steps


@dataclass
class Session:
    """A run at an address that starts on a disk; what it does is noted in `notes`."""

    address: str
    disk: str
    notes: str

    def note(self, what: str, step: int) -> None:
        with (Path(self.notes) / "steps.jsonl").open("a") as file:
            file.write(json.dumps([what, step]) + "\n")

    def finish(self, model: torch.nn.Module) -> None:
        torch.save(model.state_dict(), Path(self.notes) / "weights.pt")


def serve(train: Callable[[Session], Any]) -> None:
    for line in sys.stdin:
        session = Session(**json.loads(line))
        pid = os.fork()
        if pid == 0:
            os._exit(_run(train, session))
        print(json.dumps(pid), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


def _run(train: Callable[[Session], Any], session: Session) -> int:
    os.setpgrp()
    torch.set_num_threads(1)
    Path(session.disk).mkdir(parents=True, exist_ok=True)
    os.chdir(session.disk)
    output = os.open(f"{session.notes}/output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        train(session)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
