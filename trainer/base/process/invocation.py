"""The command that started this process, a script or `python -m trainer`, and those like it."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

from trainer.base.process import is_run_directory

SCRIPT = "LOCKSTEP_SCRIPT"  # set to the script's path, for it and the processes it starts


def append_working_directory() -> None:
    """Let tasks of the working directory be imported, after all installed packages."""
    if SCRIPT in os.environ and not is_run_directory(sys.argv[1:]):
        folder = str(Path.cwd())
        sys.path[:] = [path for path in sys.path if path not in ("", folder)] + [folder]


def run_module(verb: str = "train") -> None:
    """Run a verb in this process, with the arguments in sys.argv. It ends the process."""
    runpy.run_module(_module(verb), run_name="__main__", alter_sys=True)


def as_started(text: str) -> str:
    """Return help, advice or a command line with the commands as this process was started."""
    if SCRIPT not in os.environ:
        return text
    text = re.sub(r"torchrun (.*)-m trainer\b\.?", r"torchrun \1--no-python lockstep ", text)
    return re.sub(r"python -m trainer\b\.?", "lockstep ", text).replace("lockstep  ", "lockstep ")


def words(verb: str = "train") -> list[str]:
    """Return the arguments of `python` that start a verb, by script or module like this process."""
    script = os.environ.get(SCRIPT)
    return [script, verb] if script else ["-m", _module(verb)]


def _module(verb: str) -> str:
    return "trainer" if verb == "train" else f"trainer.{verb}"
