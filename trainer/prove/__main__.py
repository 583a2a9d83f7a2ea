"""`python -m trainer.prove A B`: prove that two commands train the same, whatever they run."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trainer.cli import JSON, answer, run
from trainer.config.hints import suggest
from trainer.errors import ConfigError
from trainer.process.ending import end_as_by_interrupt
from trainer.prove.comparison import PairComparison
from trainer.prove.notes import find_notes
from trainer.prove.proof import Bench, prove_pair
from trainer.prove.resume import prove_resume
from trainer.prove.table import as_dictionary, show

HELP = """usage: python -m trainer.prove 'COMMAND A' 'COMMAND B' [steps=20] [dtype=auto|fp64|native]
           [limit=900] [out=DIR]
       python -m trainer.prove 'COMMAND' --resume 'COMMAND that resumes' [kill=7] ...

Runs two commands that should train the same, such as a script on one and on two ranks, and compares
each optimizer step: examples, losses, gradients, learning rates, weights and evaluation. The script
is not changed and may use any framework on PyTorch. For the first difference it prints the step,
what differs and the likely reason.
--resume kills COMMAND after `kill` steps, resumes, and compares with a run that was not killed.
{dir} in a command becomes a new folder; a run and its resume have the same.

steps  optimizer steps to compare; the processes end after them
dtype  fp64 makes rounding tiny, and is used if the script can be run in it (auto); otherwise the
       effect of rounding is measured by a repeat of A
limit  seconds that a command may take
out    folder for a page, the records and the output of the commands
Exit codes: 0 the same, 1 a difference was found, 2 bad usage or a command failed."""

WORDS = {"steps": "20", "dtype": "auto", "limit": "900", "kill": "7", "out": ""}
DTYPES = ("auto", "fp64", "native")


def main(arguments: Sequence[str]) -> int:
    found = prove(arguments)
    result = "same" if found.is_same else "not the same"
    return answer(int(not found.is_same), result, as_dictionary(found), lambda: show(found))


def prove(arguments: Sequence[str]) -> PairComparison:
    """Run the commands of a command line and compare them.

    Raises ConfigError for wrong words and for a command that fails.
    """
    words, commands = divide(arguments)
    limit_s = _read_integer(words, "limit")
    steps = _read_integer(words, "steps")
    kill = _read_integer(words, "kill")
    if "--resume" in arguments and kill >= steps:
        advice = f"give steps={2 * kill}: the steps after the resume are compared"
        raise ConfigError(f"kill={kill}: must be below steps={steps}; {advice}")
    folder = make_folder(words["out"])
    bench = Bench(folder, steps, words["dtype"], limit_s, _tell)
    try:
        if "--resume" in arguments:
            found = prove_resume(bench, commands[0], commands[1], kill)
        else:
            found = prove_pair(bench, commands[0], commands[1])
        found.notes.extend(find_notes(found))
        if words["out"]:
            _write_page(found, folder)
    finally:
        if not words["out"]:
            shutil.rmtree(folder, ignore_errors=True)
    return found


def make_folder(out: str) -> Path:
    """Return a new folder for the records. Raises ConfigError if it cannot be made."""
    try:
        if not out:
            return Path(tempfile.mkdtemp(prefix="lockstep-prove-"))
        folder = Path(out)
        if folder.exists() or folder.is_symlink():
            raise ConfigError(f"out={folder}: exists; name a new folder")
        folder.mkdir(parents=True)
    except (OSError, ValueError) as error:
        given = f"out={out}" if out else f"TMPDIR={os.environ.get('TMPDIR', '')}"
        why = getattr(error, "strerror", None) or str(error)
        what = f"{given}: no folder can be made there ({why})"
        raise ConfigError(f"{what}; name one in a folder that you may write") from None
    return folder


def _write_page(found: PairComparison, folder: Path) -> None:
    """Write the page; a result is not lost because that fails."""
    from trainer.prove.page import write_page  # loads torch, which takes a second or two

    try:
        _tell(f"written: {write_page(found, folder)}")
    except (ConfigError, OSError) as error:
        found.notes.append(f"no page was written: {error}")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def divide(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return (words of this verb by name, the two commands)."""
    words = dict(WORDS)
    commands = []
    for word in arguments:
        name, equals, value = word.partition("=")
        if equals and name in WORDS:
            words[name] = value
        elif equals and name.isidentifier() and " " not in word:
            near = suggest(name, WORDS)
            raise ConfigError(f"{name} is not a setting: allowed are {', '.join(WORDS)}{near}")
        elif word.strip() and not word.startswith("--"):
            commands.append(word)
        elif word.strip() and word != "--resume":
            near = suggest(word.lstrip("-"), (JSON[2:], "resume"), "--")
            raise ConfigError(f"{word} is not a flag: allowed are {JSON} and --resume{near}")
    if len(commands) != 2:
        advice = "give two commands, each in quotes"
        raise ConfigError(f"{len(commands)} commands: {advice} (python -m trainer.prove --help)")
    if words["dtype"] not in DTYPES:
        raise ConfigError(f"dtype={words['dtype']}: must be one of {', '.join(DTYPES)}")
    return words, commands


def _read_integer(words: dict[str, str], name: str) -> int:
    word = words[name]
    if not word.isdecimal() or int(word) < 1:
        raise ConfigError(f"{name}={word}: must be an integer of at least 1")
    return int(word)


if __name__ == "__main__":
    end_as_by_interrupt()
    run(main, HELP)
