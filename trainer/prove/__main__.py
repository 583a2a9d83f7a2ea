"""`python -m trainer.prove`: test whether a task, or two commands, learn the same in any layout."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.base.errors import ConfigError, did_you_mean, visible
from trainer.base.process.streams import print_table
from trainer.cli import JSON, answer, run
from trainer.pages import Page, Section, Status
from trainer.pages.charts import Chart, Line, overlay
from trainer.prove.comparison import COLUMNS, OF_NO_STEP, PairComparison
from trainer.prove.merging import CommandHistory
from trainer.prove.notes import find_notes
from trainer.prove.private_view import private_views
from trainer.prove.runner import Bench, prove_pair, prove_resume
from trainer.prove.worker_session import continue_in_session, end_as_by_interrupt

HEADER = ("command", "ranks", *COLUMNS, "result")


def show(comparison: PairComparison) -> None:
    """Print the table, what differs and why, and the overall result."""
    steps = f"{comparison.num_steps} steps in {comparison.bounds.name}"
    print(f"{steps}; largest relative difference from A")
    print_table(HEADER, list_rows(comparison))
    for line in [*sentences(comparison), *(f"note: {note}" for note in comparison.notes)]:
        print(visible(line))
    if comparison.is_same:
        print("proved: both commands learned the same")
    else:
        print(f"NOT the same: {comparison.result}")


def list_rows(comparison: PairComparison) -> list[list[str]]:
    """Return the rows of both commands."""
    shown = [_cell(comparison, column) for column in COLUMNS]
    return [
        [comparison.one.name, str(comparison.one.size), *[""] * len(COLUMNS), "reference"],
        [comparison.other.name, str(comparison.other.size), *shown, comparison.result],
    ]


def _cell(comparison: PairComparison, column: str) -> str:
    value = comparison.worst[column]
    if column in ("examples", "evaluation"):
        if column == "evaluation" and not comparison.is_evaluated:
            return "-"
        return "differ" if value else "same"
    return _digits(value)


def _digits(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"


def sentences(comparison: PairComparison) -> list[str]:
    """Return two lines for each difference: where it is, and its likely reason."""
    lines = []
    for each in comparison.deviations:
        is_before = each.kind in ("initial weights", "steps", *OF_NO_STEP)
        step = comparison.number_of(each.place)
        when = "" if is_before else f"step {step}: "
        lines.append(f"{when}{each.where}")
        if each.reason:
            lines.append(f"  likely reason: {each.reason}")
    return lines


def as_dictionary(comparison: PairComparison) -> dict[str, Any]:
    """Return the result for --json."""
    return {
        "is_same": comparison.is_same,
        "steps": comparison.num_steps,
        "arithmetic": comparison.bounds.name,
        "commands": {each.name: each.command for each in (comparison.one, comparison.other)},
        "ranks": {each.name: each.size for each in (comparison.one, comparison.other)},
        "largest_difference": comparison.worst,
        "differences": [
            {
                "kind": each.kind,
                "step": comparison.number_of(each.place),
                "what": each.where,
                "reason": each.reason,
            }
            for each in comparison.deviations
        ],
        "notes": comparison.notes,
        "written": {
            each.name: [{"path": file.path, "what": file.what} for file in each.written]
            for each in (comparison.one, comparison.other)
        },
    }


def write_page(comparison: PairComparison, folder: Path) -> Path:
    """Write report.html to the folder. Raises ConfigError without the extra `report`."""
    pair = (comparison.one, comparison.other)
    about = f"{comparison.num_steps} steps in {comparison.bounds.name}"
    state = ("good", "the same") if comparison.is_same else ("bad", "not the same")
    lead = " and ".join(each.command for each in pair)
    page = Page("Two commands", lead, [Status(*state, about)])
    page.add(Section("Differences", sentences(comparison)))
    page.add(Section("Largest relative differences", columns=HEADER, rows=list_rows(comparison)))
    kinds = ("losses", "gradients", "weights")
    steps = [
        [str(comparison.number_of(step_index)), *(_digits(values[kind]) for kind in kinds)]
        for step_index, values in enumerate(comparison.by_step)
    ]
    page.add(Section("Differences by step", columns=("step", *kinds), rows=steps, is_folded=True))
    page.add(Section("Notes", comparison.notes))
    curves = {command_index: _losses(each) for command_index, each in enumerate(pair)}
    widths, note = overlay(curves)
    lines = [Line(pair[n].name, curve, n, widths[n]) for n, curve in curves.items()]
    page.add_charts([Chart("loss", lines, note=note, is_large=True)], 1, Section(""))
    for output in sorted(folder.glob("*/output.txt")):
        text = output.read_text(encoding="utf-8", errors="replace")
        page.add(Section(f"Output of {output.parent.name}", text=text[-4000:]))
    path = folder / "report.html"
    page.write(path)
    return path


def _losses(history: CommandHistory) -> dict[int, float]:
    return {step_number: step.losses["mean"] for step_number, step in enumerate(history.steps, 1)}


HELP = """usage: python -m trainer.prove task=<name> [layouts=ranks-2,ranks-3] [steps=10] [--bits]
           [key=value ...]
       python -m trainer.prove task=<name> --resume [kills=3] [seed=0] [key=value ...]
       python -m trainer.prove 'COMMAND A' 'COMMAND B' [steps=20] [dtype=auto|fp64|native]
           [limit=900] [out=DIR]
       python -m trainer.prove 'COMMAND' --resume 'COMMAND that resumes' [kill=7] ...

  python -m trainer.prove task=cifar                       a task in all layouts
  python -m trainer.prove task=cifar --resume              a task that is killed and resumed
  python -m trainer.prove 'python train.py' 'torchrun --nproc_per_node=2 train.py'

A task: trains it for a few steps on one rank and in each layout, with real processes, in fp64 and
in its own precision. Compares the examples used, losses, first gradients, weights and evaluation.
If they differ, it prints the first tensor that does and the likely reason. --bits trains with
strategy=exact and requires equal bits. --resume kills a run at random steps and ranks and resumes
it: the same number of ranks must reach the same bits, others the same results up to rounding.
  layouts  {layouts}
           ranks-<n> for any n; by default all of these (with --bits those that change the number of
           ranks or workers)

Two commands that should train the same, such as a script on one and on two ranks: compares
examples, losses, gradients, learning rates, weights and evaluation at every optimizer step. The
script is not modified and may use any framework on PyTorch. If they differ, it prints the first
step that does, what differs and the likely reason. What the commands write goes to a private view
of the disk and is dropped; only {{dir}} and out are kept until the end. In a folder with a
trainer.py of its own use `lockstep prove`: Python finds that file first. --resume kills COMMAND
after `kill` steps, resumes, and compares with a run that was not killed. {{dir}} in a command
becomes a new folder, the same for both of these.
  steps    optimizer steps to compare; the processes end after them
  dtype    auto uses fp64, which makes rounding tiny, if the script runs in it; otherwise
           a second run of A measures the effect of rounding
  limit    seconds that a command may take
  out      folder for a page, the records and the output of the commands

Exit codes: 0 proved, 1 a difference was found or nothing was learned, 2 invalid arguments, or a
command failed; 130 interrupted."""

WORDS = {"steps": "20", "dtype": "auto", "limit": "900", "kill": "7", "out": ""}
IS_TASK = re.compile(r"[+]{0,2}(task(\.trainer)?|run\.resume)=\S*$")  # a command has spaces
DTYPE_CHOICES = ("auto", "fp64", "native")


def main(arguments: Sequence[str]) -> int:
    if any(IS_TASK.match(word) for word in arguments):
        return _prove_task(arguments)
    end_as_by_interrupt()
    comparison = prove(arguments)
    result = "same" if comparison.is_same else "not the same"
    return answer(
        int(not comparison.is_same), result, as_dictionary(comparison), lambda: show(comparison)
    )


def _prove_task(arguments: Sequence[str]) -> int:
    folder = continue_in_session("lockstep-verify-")  # before torch starts threads
    from trainer.verify.command import verify

    return verify(arguments, folder)


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
    with private_views(folder, not words["out"]) as views:
        bench = Bench(folder, views, steps, words["dtype"], limit_s, _tell)
        if "--resume" in arguments:
            comparison = prove_resume(bench, commands[0], commands[1], kill)
        else:
            comparison = prove_pair(bench, commands[0], commands[1])
        _check_known(comparison)
        comparison.notes.extend([*find_notes(comparison, views.is_whole), *views.find_notes()])
        if words["out"]:
            _write_page(comparison, folder)
    return comparison


def _check_known(comparison: PairComparison) -> None:
    """Raise ConfigError if ranks may exchange gradients by a library that is not recorded."""
    if comparison.is_unknown:
        (each,) = comparison.deviations
        raise ConfigError(f"""cannot tell: {each.where}, as far as prove sees: {each.reason};
            it does not see MPI, Horovod, Ray, sockets or shared memory;
            give commands whose ranks use torch.distributed""")


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
        setting = f"out={out}" if out else f"TMPDIR={os.environ.get('TMPDIR', '')}"
        why = getattr(error, "strerror", None) or str(error)
        what = f"{setting}: no folder can be made there ({why})"
        raise ConfigError(f"{what}; name one in a folder that you may write") from None
    return folder


def _write_page(comparison: PairComparison, folder: Path) -> None:
    """Write the page; a result is not lost because that fails."""

    try:
        _tell(f"written: {write_page(comparison, folder)}")
    except (ConfigError, OSError) as error:
        comparison.notes.append(f"no page was written: {error}")


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
            near = did_you_mean(name, WORDS, 0.6)
            raise ConfigError(f"{name} is not a setting: allowed are {', '.join(WORDS)}{near}")
        elif word.strip() and not word.startswith("--"):
            commands.append(word)
        elif word.strip() and word != "--resume":
            near = did_you_mean(word.lstrip("-"), (JSON[2:], "resume"), prefix="--")
            raise ConfigError(f"{word} is not a flag: allowed are {JSON} and --resume{near}")
    if len(commands) != 2:
        raise ConfigError(f"""{len(commands)} commands:
            give task=<name>, or two commands, each in quotes (python -m trainer.prove --help)""")
    if words["dtype"] not in DTYPE_CHOICES:
        raise ConfigError(f"dtype={words['dtype']}: must be one of {', '.join(DTYPE_CHOICES)}")
    return words, commands


def _read_integer(words: dict[str, str], name: str) -> int:
    word = words[name]
    if not word.isdecimal() or int(word) < 1:
        raise ConfigError(f"{name}={word}: must be an integer of at least 1")
    return int(word)


def _describe(_: Sequence[str]) -> str:
    from trainer.verify.layouts import LAYOUTS

    return HELP.format(layouts=", ".join(LAYOUTS))


if __name__ == "__main__":
    run(main, _describe)
