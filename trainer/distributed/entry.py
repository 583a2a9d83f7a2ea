"""The console script `lockstep`, and the command line with which a process starts others.

`python -m trainer` puts the working directory before installed packages in sys.path, so a
`trainer.py` in that directory would be run instead. The script appends the directory, and so do
the processes that it starts.
"""

from __future__ import annotations

import difflib
import os
import re
import runpy
import sys
from pathlib import Path

from trainer.process.streams import outlive_terminal
from trainer.process.working_directory import is_run_directory

SCRIPT = "LOCKSTEP_SCRIPT"  # set to the script's path, for it and the processes it starts
VERBS = (
    "audit",
    "checkpoints",
    "compare",
    "completion",
    "doctor",
    "evaluate",
    "export",
    "new",
    "plan",
    "predict",
    "prove",
    "replay",
    "report",
    "shards",
    "train",
    "verify",
)
INTERNAL = ("notebook", "verify.recording")  # ranks of Trainer.launch and of verify


def main() -> None:
    """Run `lockstep [verb] ...` as `python -m trainer[.verb] ...` runs it."""
    outlive_terminal()
    os.environ[SCRIPT] = str(Path(sys.argv[0]).absolute())
    append_working_directory()
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
        word = "train"
    elif word in (*VERBS, *INTERNAL):
        del sys.argv[1]
    elif word and "=" not in word and not word.startswith(("-", "~")):
        near = difflib.get_close_matches(word, VERBS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        if word == "sweep":
            hint = "; a sweep is lockstep -m task=<name> optim.lr=0.1,0.2"
        allowed = f"must be key=value or one of {', '.join(VERBS)}"
        print(f"error: {word!r}: {allowed}{hint}", file=sys.stderr)
        sys.exit(2)
    else:
        word = "train"
    run_module(word)


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
