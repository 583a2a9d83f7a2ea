"""The verbs, by the moment at which they are needed, and the console script that runs them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from trainer.base.errors import closest, visible
from trainer.base.process.invocation import SCRIPT, append_working_directory, as_started, run_module
from trainer.base.process.streams import outlive_terminal

MOMENTS = {
    "make": {"new": "create a project: a task of your own, or a recipe that runs right away"},
    "run": {
        "train": "train a task; -n 2 on two ranks",
        "sweep": "train with each combination of some values",
    },
    "trust": {
        "check": "before a run: test the machine, the plan and the first step",
        "prove": "test whether a task learns the same in every layout, or two commands do",
    },
    "after": {
        "show": "report a run, compare several, or repeat one step",
        "use": "evaluate a trained model, write its predictions, or export it",
    },
    "data": {
        "shards": "write, index and check sharded data",
        "list": "list tasks, recipes, strategies and runs",
    },
}
VERBS = tuple(verb for verbs in MOMENTS.values() for verb in verbs)
# Words that people try, and the verb that does it.
_OTHER_WORDS = {
    **dict.fromkeys(("plan", "doctor", "estimate"), "check"),
    **dict.fromkeys(("verify", "test"), "prove"),
    **dict.fromkeys(("report", "compare", "audit", "checkpoints", "replay", "diff"), "show"),
    **dict.fromkeys(("evaluate", "eval", "predict", "export"), "use"),
    **dict.fromkeys(("fit", "run", "resume"), "train"),
    **dict.fromkeys(("init", "create"), "new"),
    "multirun": "sweep",
}
# Those that help and list show; the others are meshes of these.
STRATEGY_TEXTS = {
    "single": "one process",
    "ddp": "a copy of the model on each rank; gradients are averaged",
    "exact": "as ddp, with the same bits on any number of ranks",
    "zero1": "as ddp, with the optimizer's state divided over the ranks",
    "fsdp": "weights, gradients and state divided over all ranks (FSDP2)",
    "hsdp": "fsdp within a node, ddp between nodes",
}
INTERNAL = ("notebook", "verify.recorded_run")  # ranks of Trainer.launch and of verify


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
        print(f"error: {visible(no_verb(word))}", file=sys.stderr)
        sys.exit(2)
    else:
        word = "train"
    run_module(word)


def no_verb(word: str) -> str:
    """Return what to use instead of a word that is no verb."""
    near = closest(word, (*VERBS, *_OTHER_WORDS), 0.6)
    if verb := _OTHER_WORDS.get(near):
        return as_started(f"{word}: use {verb}: python -m trainer.{verb} --help")
    hint = f"; did you mean {near}?" if near else ""
    return f"{word!r}: must be key=value or one of {', '.join(VERBS)}{hint}"


def list_verbs() -> str:
    """Return the verbs by the moment at which they are needed, a line each."""
    rows = []
    for moment, verbs in MOMENTS.items():
        for number, (verb, line) in enumerate(verbs.items()):
            rows.append(f"  {moment * (number == 0):<7}{verb:<9}{line}")
    return "\n".join(rows)
