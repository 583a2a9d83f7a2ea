"""Write docs/api.md: what a task may import, with signatures and docstrings.

    python scripts/generate/make_api.py [--check]

The names are those of `trainer.__all__`, and what their methods take and return. With --check,
write nothing, and exit with 1 if the page is outdated.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from make_settings import write_or_check

import trainer
from trainer.core.data.batches import LocalBatch
from trainer.core.distributed.world import RankGroup
from trainer.core.task import Task

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
HEAD = """# API

Written by `python scripts/generate/make_api.py` from the docstrings. Import the names from
`trainer`, as in `from trainer import Trainer`. The README has [a task to begin
with](../README.md#a-task-of-your-own), and [tasks.md](tasks.md) shows what a task can do.
"""
# In the order of the page. Members of Task are shown with Trainer, which is its only subclass.
CLASSES = (
    *(trainer.Trainer, LocalBatch, trainer.Random, trainer.ResidentDataset, trainer.World),
    *(trainer.ShardedDataset, trainer.PackedDataset),
    *(trainer.Weighted, trainer.Mixture, trainer.ClassBalanced),
    *(RankGroup, trainer.Observer, trainer.Summary, trainer.Config),
)
FUNCTIONS = (trainer.load_config, trainer.limit, trainer.read_run)
ERRORS = (trainer.ConfigError, trainer.CheckpointError, trainer.RunError)
# Members that a task uses, of classes that have others for the framework.
SHOWN = {
    "World": ("device",),
    "RankGroup": ("group", "size", "all_reduce", "all_gather"),
    "Config": ("flat", "run_hash"),
    "LocalBatch": ("indices",),
    **{"ShardedDataset": (), "PackedDataset": ("padding_share",), "Weighted": (), "Mixture": ()},
    "ClassBalanced": (),
}
REQUIRED = ("build_model", "build_dataset", "loss")


def signature_of(function: Any, name: str) -> str:
    """Return a signature without self, with annotations as in the source."""
    parts = []
    given = inspect.signature(function)
    for parameter in given.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        part = f"{stars}{parameter.name}: {parameter.annotation}"
        if parameter.default is not parameter.empty:
            default = re.sub(r"<(\w+\.\w+): \d+>", r"\1", repr(parameter.default))
            part += f" = {default}"
        parts.append(part)
    returned = given.return_annotation
    end = "" if name[0].isupper() or returned is given.empty else f" -> {returned}"
    return f"{name}({', '.join(parts)}){end}"


def words_of(thing: Any) -> str:
    """Return a docstring as Markdown, whose indented lines are code."""
    if thing is trainer.Trainer.train_step:
        thing = Task.train_step
    return inspect.getdoc(thing) or ""


def members_of(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public members of a class by name, in the order of the source."""
    members = {**vars(Task), **vars(kind)} if kind is trainer.Trainer else vars(kind)
    chosen = SHOWN.get(kind.__name__, members)
    for name, member in members.items():
        is_shown = inspect.isfunction(member) or isinstance(member, (property, classmethod))
        if is_shown and name in chosen and not name.startswith("_") and words_of(member):
            yield name, member


def section_of(kind: type) -> list[str]:
    """Return the paragraphs about a class."""
    parts = [f"## {kind.__name__}"]
    if kind is trainer.Trainer:
        parts += [words_of(kind), words_of(Task)]
    else:
        if kind.__module__ not in {"trainer"} and kind.__name__ not in trainer.__all__:
            parts.append(f"`{kind.__module__}.{kind.__name__}`; a task receives it.")
        parts.append(words_of(kind))
    if dataclasses.is_dataclass(kind) and kind is not trainer.Config:
        shown = [f for f in dataclasses.fields(kind) if f.repr and not f.metadata]
        shown = [f for f in shown if kind is not LocalBatch or f.name in ("step", "epoch")]
        parts.append(f"Fields: {', '.join(f'`{f.name}: {f.type}`' for f in shown)}.")
    elif kind not in (trainer.Trainer, trainer.Config) and inspect.isfunction(kind.__init__):
        parts.append(f"    {signature_of(kind.__init__, kind.__name__)}")
        parts.append((kind.__init__.__doc__ and words_of(kind.__init__)) or "")
    for name, member in members_of(kind):
        if isinstance(member, property):
            parts += [f"### {name}", words_of(member)]
            continue
        function = member.__func__ if isinstance(member, classmethod) else member
        is_required = kind is trainer.Trainer and name in REQUIRED
        parts += [
            f"### {name}" + (" (required)" if is_required else ""),
            f"    {signature_of(function, name)}",
        ]
        parts.append(words_of(function))
    return [part for part in parts if part]


def make_page() -> str:
    """Return the text of docs/api.md."""
    parts = [HEAD.rstrip()]
    for kind in CLASSES:
        parts += section_of(kind)
    for function in FUNCTIONS:
        name = function.__name__
        parts += [f"## {name}", f"    {signature_of(function, name)}", words_of(function)]
    parts.append("## Errors")
    parts += [f"### {error.__name__}\n\n{words_of(error)}" for error in ERRORS]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    return write_or_check(PAGE, make_page())


if __name__ == "__main__":
    sys.exit(main())
