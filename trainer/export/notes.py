"""The page beside an export: its inputs, its outputs, and the preprocessing before it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping, Sequence

import torch

import trainer
from trainer.errors import visible
from trainer.export.model import Trained
from trainer.task import Task

# The hooks that make an example into the model's inputs, in the order in which they are called.
STEPS = {
    "collate": "joins examples of the dataset to a batch",
    "split_batch": "divides a batch into inputs and targets",
    "augment": "changes both; at evaluation with train=False",
}


def describe(
    trained: Trained,
    name: str,
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
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
        "The first axis of every tensor is the batch, of any size.",
        _table("input", inputs),
        _table("output", outputs),
        f"`{name}.npz` has {trained.rows} examples: `inputs.<name>` as the model"
        " takes them, and `outputs.<name>` as PyTorch computed them.",
        "## Before the model",
        "The inputs are what these methods of the task make of examples of its dataset, after the"
        " dataset's own `__getitem__`. Do the same before the model:",
        *_steps(task),
    ]
    return "\n\n".join(parts) + "\n"


def _table(title: str, tensors: Mapping[str, torch.Tensor]) -> str:
    rows = [f"| {title} | dtype | shape |", "|---|---|---|"]
    for name, tensor in tensors.items():
        shape = ", ".join(["batch", *map(str, tensor.shape[1:])])
        rows.append(f"| `{name}` | {str(tensor.dtype).removeprefix('torch.')} | ({shape}) |")
    return "\n".join(rows)


def _steps(task: Task) -> list[str]:
    """Return the source of each step that the task itself defines."""
    parts = []
    for name, what in STEPS.items():
        method = getattr(type(task), name)
        if method is getattr(Task, name):
            parts.append(f"- `{name}` is Lockstep's own, which {DEFAULTS[name]}.")
            continue
        try:
            source = textwrap.dedent(inspect.getsource(method))
        except (OSError, TypeError):
            source = "# its source is not available"
        parts.append(f"- `{name}` {what}:\n\n```python\n{source.rstrip()}\n```")
    return parts


DEFAULTS = {
    "collate": "stacks the examples",
    "split_batch": "takes a pair (inputs, targets)",
    "augment": "changes nothing",
}
