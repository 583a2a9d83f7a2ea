"""A trained model with the inputs of some real examples, on one process and in fp32."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import (
    tree_flatten,
    tree_flatten_with_path,
    tree_map_only,
    tree_unflatten,
)

from trainer.config.schema import Config, MeshSizes
from trainer.engine.evaluation import Evaluator
from trainer.errors import ConfigError
from trainer.hook_errors import call
from trainer.trainer import Trainer, examine

ROWS = 7  # of the examples; the batch sizes of 1 and ROWS are compared
ALONE = MeshSizes(1, 1, 1, 1, 1)


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
    known = [parameter.name for parameter in parameters if parameter.kind in kinds]
    names = []
    for path, leaf in tree_flatten_with_path(example)[0]:
        if isinstance(leaf, torch.Tensor):
            place = getattr(path[0], "idx", None) if path else 0
            if place is not None:  # the tensor itself, or an item of a tuple
                head = known[place] if place < len(known) else f"input_{place}"
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
        found = set()
        few = max(1, self.rows - 1)
        pairs = [(flat.inputs, lambda inputs: inputs), (flat.outputs, lambda inputs: flat(*inputs))]
        for names, make in pairs:
            one, other = (make(tensors_in(rows_of(self.inputs, n))) for n in (self.rows, few))
            for name, a, b in zip(names, one, other, strict=True):
                if a.dim() and b.dim() and (len(a), len(b)) == (self.rows, few):
                    found.add(name)
        return found


def load_trained(task: Trainer) -> ExportModel:
    """Return the weights that an evaluation uses. Raises CheckpointError or ConfigError."""
    found: list[ExportModel] = []

    def keep(evaluator: Evaluator) -> bool:
        with evaluator.first_batch() as (model, inputs, rows):
            own = tree_map_only(torch.Tensor, lambda t: t.cpu().clone(), inputs)
            weights = {name: t.cpu().clone() for name, t in model.state_dict().items()}
        model.load_state_dict(weights)
        has_average = task.config.run.ema_decay is not None
        found.append(ExportModel(task, model.cpu().eval(), own, rows, has_average))
        return True

    examine(task, keep)
    (trained,) = found
    if not trained.rows:
        split = task.config.eval.splits[0]
        raise ConfigError(f"split={split}: has no examples to compare with; choose another split")
    trained.model.eval()
    return trained


def on_one_process(config: Config) -> Config:
    """Return the settings of a run, to load its model on one process in fp32."""
    strategy = replace(
        config.strategy,
        name="single",
        precision="fp32",
        mesh=ALONE,
        comm_hook="none",
        recompute="none",
        sequence=False,
        sync_batchnorm=False,
        channels_last=False,
        devices_per_rank=1,
        device_ids=None,
    )
    return replace(
        config,
        strategy=strategy,
        run=replace(config.run, compile=False),
        data=replace(config.data, micro_batch=None, workers=0),
        eval=replace(config.eval, micro_batch=ROWS),
    )


def rows_of(tree: Any, rows: int) -> Any:
    """Return the first rows of every tensor in a tree."""
    return tree_map_only(torch.Tensor, lambda t: t[:rows] if t.dim() else t, tree)
