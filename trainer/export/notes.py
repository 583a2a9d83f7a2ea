"""The page beside an export: its inputs, its outputs, and the preprocessing before it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch

import trainer
from trainer.codec import name_of
from trainer.errors import visible
from trainer.export.model import ExportModel
from trainer.task import Task

# The hooks that make an example into the model's inputs, in the order in which they are called.
STEPS = {
    "collate": "joins examples of the dataset to a batch",
    "split_batch": "divides a batch into inputs and targets",
    "augment": "prepares both; outside of training with train=False",
}
PLAIN = (bool, int, float, str, tuple, list, dict)  # constants to show


def describe(
    trained: ExportModel,
    name: str,
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    batched: Collection[str],
    lines: Sequence[str],
) -> str:
    """Return the page, as Markdown."""
    task = trained.task
    average = ", averaged (run.ema_decay)" if trained.has_average else ""
    versions = f"Lockstep {trainer.__version__}, torch {torch.__version__}"
    parts = [
        f"# {name}",
        f"Weights of step {task.step:,} of task {visible(task.config.task.name)}{average}, in fp32."
        f" Made with {versions}.",
        *map(visible, lines),
        "The axis `batch` may have any size.",
        _table("input", inputs, batched),
        _table("output", outputs, batched),
        f"`{name}.npz` has {trained.rows} examples: `inputs.<name>` as the model"
        " takes them, and `outputs.<name>` as PyTorch computed them.",
        "## Before the model",
        "The inputs are what these methods of the task make of examples of its dataset, after the"
        " dataset's own `__getitem__`. Do the same before the model.",
        _example(task),
        *_steps(task),
        *_used(task),
    ]
    return "\n\n".join(parts) + "\n"


def _table(title: str, tensors: Mapping[str, torch.Tensor], batched: Collection[str]) -> str:
    rows = [f"| {title} | dtype | shape |", "|---|---|---|"]
    for name, tensor in tensors.items():
        sizes = list(map(str, tensor.shape))
        shape = ", ".join(["batch", *sizes[1:]] if name in batched else sizes)
        rows.append(f"| `{name}` | {name_of(tensor.dtype)} | ({shape}) |")
    return "\n".join(rows)


def _example(task: Task) -> str:
    """Return lines about the first example of the dataset."""
    split = task.config.eval.splits[0]
    dataset: Any = task.build_dataset(split)
    row = dataset[0]
    if isinstance(row, (tuple, list)):
        row = dict(enumerate(row))
    lines = [f"The first example of `build_dataset({split!r})`:", ""]
    for name, part in (row if isinstance(row, Mapping) else {"example": row}).items():
        value = torch.as_tensor(part) if hasattr(part, "shape") else None
        what = type(part).__name__
        if isinstance(part, (list, str)):
            what += f" of {len(part)}"
        if value is not None:
            ends = f", from {value.min():.4g} to {value.max():.4g}" if value.numel() > 1 else ""
            dtype = name_of(value.dtype)
            what = f"{dtype} {tuple(value.shape)}{ends}"
        lines.append(f"- `{name}`: {what}")
    return "\n".join(lines)


def _steps(task: Task) -> list[str]:
    """Return the source of each step that the task itself defines."""
    parts = []
    for name, what in STEPS.items():
        method = getattr(type(task), name)
        if method is getattr(Task, name):
            parts.append(f"- `{name}` is Lockstep's own, which {DEFAULTS[name]}.")
            continue
        parts.append(f"- `{name}` {what}:\n\n{_code([_source_of(method)])}")
    return parts


def _used(task: Task) -> list[str]:
    """Return the functions and constants that these steps use, from the task's own files."""
    kind = type(task)
    pending = [inspect.unwrap(getattr(kind, name)) for name in STEPS]
    pending = [method for method in pending if method.__module__ != Task.__module__]
    known = {method.__code__ for method in pending}
    found: dict[str, str] = {}
    while pending:
        user = pending.pop()
        for name in _names_in(user.__code__):
            own = getattr(kind, name, None) if not hasattr(Task, name) else None
            value = inspect.unwrap(user.__globals__.get(name, own))
            if inspect.isfunction(value) and value.__module__ == user.__module__:
                if value.__code__ not in known:
                    known.add(value.__code__)
                    pending.append(value)
                    found[name] = _source_of(value)
            elif isinstance(value, PLAIN) and name in user.__globals__:
                found[name] = f"{name} = {value!r}"
    parts = [f"These steps use:\n\n{_code(found.values())}"] if found else []
    options = task.config.task.options
    return [*parts, f"`self.options` of the run:\n\n{_code([str(options)])}"] if options else parts


def _names_in(code: CodeType) -> list[str]:
    """Return the global names and attributes that a function uses, also in functions inside it."""
    inner = [
        names for each in code.co_consts if isinstance(each, CodeType) for names in _names_in(each)
    ]
    return [*code.co_names, *inner]


def _source_of(function: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function)).rstrip()
    except (OSError, TypeError):
        return f"# the source of {function.__name__} is not available"


def _code(parts: Iterable[str]) -> str:
    return "```python\n" + "\n\n\n".join(parts) + "\n```"


DEFAULTS = {
    "collate": "stacks the examples",
    "split_batch": "takes a pair (inputs, targets)",
    "augment": "changes nothing",
}
