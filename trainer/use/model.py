"""A trained model in fp32 with inputs of real examples; its weights, and its page."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import (
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

import trainer
from trainer import Trainer
from trainer.base.codec import name_of
from trainer.base.errors import ConfigError, RunError, visible
from trainer.base.python_code import names_in
from trainer.core.api import Task, call, first_rows, write_tensors
from trainer.hf.trained_model import take_trained


@torch.no_grad()
def write_weights(trained: ExportModel, path: Path, facts: dict[str, str]) -> list[str]:
    """Write the model's weights and buffers; tied ones are there once for each name.

    Raises RunError if a model with the weights of the file has other outputs.
    """
    from safetensors.torch import load_file

    state = trained.model.state_dict()
    forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    write_tensors(path, forms, lambda name: state[name].contiguous(), facts, 0o666)
    before = [t.clone() for t in trained.flat(*tensors_in(trained.inputs))]
    trained.model.load_state_dict(load_file(path))
    after = trained.flat(*tensors_in(trained.inputs))
    if not all(torch.equal(one, other) for one, other in zip(before, after, strict=True)):
        raise RunError("out=FILE.safetensors: a model with these weights has other outputs")
    return [f"{len(state)} tensors; a model with these weights has the same outputs, bit for bit"]


class Flat(nn.Module):
    """A model that takes and returns tensors in a row, as the nodes of a graph do.

    Inputs may be a tensor, a tuple or a dict, in any nesting; outputs a dataclass too, as those of
    transformers are. What is no tensor is a constant. `inputs` and `outputs` name the tensors.
    """

    def __init__(self, model: nn.Module, example: Any):
        super().__init__()
        self.model = model
        leaves, self.form = tree_flatten(example)
        self.constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.inputs = _name_inputs(model, example)
        with torch.no_grad():
            paths, _ = tree_flatten_with_path(call(model, example))
        tensors = [(path, leaf) for path, leaf in paths if isinstance(leaf, torch.Tensor)]
        names = [_name(path) or "outputs" for path, _ in tensors]
        self.outputs = [f"outputs.{name}" if name in self.inputs else name for name in names]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = iter(tensors)
        leaves = [next(rest) if leaf is None else leaf for leaf in self.constants]
        outputs = call(self.model, tree_unflatten(leaves, self.form))
        return tuple(leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, torch.Tensor))


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _name(path: Sequence[Any]) -> str:
    """Return the place of a tensor in a tree, as in past.0.key."""
    parts = [getattr(each, "key", getattr(each, "idx", getattr(each, "name", ""))) for each in path]
    return ".".join(map(str, parts))


def _name_inputs(model: nn.Module, example: Any) -> list[str]:
    """Return the names of the tensors: a dict's keys, or the parameters of forward."""
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    declared = [parameter.name for parameter in parameters if parameter.kind in kinds]
    names = []
    for path, leaf in tree_flatten_with_path(example)[0]:
        if isinstance(leaf, torch.Tensor):
            position = getattr(path[0], "idx", None) if path else 0
            if position is not None:  # the tensor itself, or an item of a tuple
                head = declared[position] if position < len(declared) else f"input_{position}"
                names.append(".".join(filter(None, [head, _name(path[1:])])))
            else:
                names.append(_name(path))
    return names


@dataclass(frozen=True)
class ExportModel:
    """A trained model in evaluation mode on the CPU, and the first examples of a split.

    `inputs` are what the model takes, for `rows` examples.
    """

    task: Trainer
    model: nn.Module
    inputs: Any
    rows: int
    has_average: bool

    @property
    def flat(self) -> Flat:
        return Flat(self.model, self.inputs)

    @torch.no_grad()
    def names_with_batch(self, flat: Flat) -> set[str]:
        """Return the inputs and outputs whose first axis is the batch."""
        batched = set()
        few = max(1, self.rows - 1)
        pairs = [(flat.inputs, lambda inputs: inputs), (flat.outputs, lambda inputs: flat(*inputs))]
        for names, make in pairs:
            one, other = (make(tensors_in(first_rows(self.inputs, n))) for n in (self.rows, few))
            for name, a, b in zip(names, one, other, strict=True):
                if a.dim() and b.dim() and (len(a), len(b)) == (self.rows, few):
                    batched.add(name)
        return batched


def load_trained(task: Trainer) -> ExportModel:
    """Return the weights that an evaluation uses. Raises CheckpointError or ConfigError."""
    model, inputs, rows = take_trained(task)
    if not rows:
        split = task.config.eval.splits[0]
        raise ConfigError(f"split={split}: has no examples to compare with; choose another split")
    return ExportModel(task, model, inputs, rows, task.config.run.ema_decay is not None)


# The hooks that make an example into the model's inputs, in the order in which they are called.
INPUT_STEPS = {
    "collate": "joins examples of the dataset to a batch",
    "split_batch": "divides a batch into inputs and targets",
    "augment": "prepares both; outside of training with train=False",
}
SHOWN_TYPES = (bool, int, float, str, tuple, list, dict)  # constants to show


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
    for name, what in INPUT_STEPS.items():
        method = getattr(type(task), name)
        if method is getattr(Task, name):
            parts.append(f"- `{name}` is Lockstep's own, which {DEFAULT_STEPS[name]}.")
            continue
        parts.append(f"- `{name}` {what}:\n\n{_code([_source_of(method)])}")
    return parts


def _used(task: Task) -> list[str]:
    """Return the functions and constants that these steps use, from the task's own files."""
    kind = type(task)
    pending = [inspect.unwrap(getattr(kind, name)) for name in INPUT_STEPS]
    pending = [method for method in pending if method.__module__ != Task.__module__]
    visited = {method.__code__ for method in pending}
    sources: dict[str, str] = {}
    while pending:
        user = pending.pop()
        for name in names_in(user.__code__):
            own = getattr(kind, name, None) if not hasattr(Task, name) else None
            value = inspect.unwrap(user.__globals__.get(name, own))
            if inspect.isfunction(value) and value.__module__ == user.__module__:
                if value.__code__ not in visited:
                    visited.add(value.__code__)
                    pending.append(value)
                    sources[name] = _source_of(value)
            elif isinstance(value, SHOWN_TYPES) and name in user.__globals__:
                sources[name] = f"{name} = {value!r}"
    parts = [f"These steps use:\n\n{_code(sources.values())}"] if sources else []
    options = task.config.task.options
    return [*parts, f"`self.options` of the run:\n\n{_code([str(options)])}"] if options else parts


def _source_of(function: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function)).rstrip()
    except (OSError, TypeError):
        return f"# the source of {function.__name__} is not available"


def _code(parts: Iterable[str]) -> str:
    return "```python\n" + "\n\n\n".join(parts) + "\n```"


DEFAULT_STEPS = {
    "collate": "stacks the examples",
    "split_batch": "takes a pair (inputs, targets)",
    "augment": "changes nothing",
}
