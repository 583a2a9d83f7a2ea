"""Preparation: a batch of the data set becomes a micro-batch, by the hooks of the task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from trainer.data.examples import find_flaw
from trainer.data.loaders import Collate, Piece
from trainer.distributed import accelerator
from trainer.errors import ConfigError
from trainer.micro_batch import count_rows
from trainer.rng.forward import Draws
from trainer.rng.philox import Random

MicroBatch = tuple[Any, Any]


@dataclass(frozen=True)
class Preparation:
    """Turn a batch of the dataset into a micro-batch, with the task's `split_batch` and `augment`.

    `convert` casts it to the dtype and memory format of the model.
    """

    split_batch: Callable[[Any], tuple[Any, Any]]
    augment: Callable[[Any, Any, Random, bool], tuple[Any, Any]]
    convert: Callable[[Any, Any], MicroBatch]
    seed: int
    device: torch.device
    draws: Draws
    collate: Collate = default_collate
    checked: set[str] = field(default_factory=set)  # splits of which one micro-batch was checked

    def __call__(self, piece: Piece, split: str, epoch: int, step: int, number: int) -> MicroBatch:
        """Return the `number`-th micro-batch of `step`, and begin the random draws of its rows."""
        self.draws.end()  # augment draws from its own Random
        batch, indices = accelerator.copy_aside(piece, self.device)
        inputs, targets = _pair("split_batch", self._split(batch))
        random = Random(self.seed, split, epoch, indices)
        augmented = self.augment(inputs, targets, random, split == "train")
        inputs, targets = _pair("augment", augmented)
        if split not in self.checked:
            for tree in (inputs, targets):
                _check_not_text(tree, split, int(indices[0]))
            if flaw := find_flaw((inputs, targets), allows_gradient=True):
                raise ConfigError(f"the {split} batches contain {flaw[0]}; {flaw[1]}")
            self.checked.add(split)
        if (rows := count_rows(targets, inputs)) != len(indices):
            became = f"{len(indices)} examples of {split} became {rows} rows"
            must = "collate, split_batch and augment must keep a row for each; give it weight 0"
            raise ConfigError(f"{became}: {must}")
        prepared = self.convert(inputs, targets)
        self.draws.begin(step, number, indices, split)
        return prepared

    def _split(self, batch: Any) -> Any:
        try:
            return self.split_batch(batch)
        except KeyError as error:
            if not isinstance(batch, Mapping) or error.args[0] in batch:
                raise
            names = ", ".join(map(str, batch))
            raise ConfigError(f"split_batch reads {error}: must be one of {names}") from error

    def begin_draws(self, step: int, number: int, indices: torch.Tensor) -> None:
        """Begin the random draws of these training examples once more."""
        self.draws.begin(step, number, accelerator.copy_aside(indices, self.device))


def _pair(hook: str, returned: Any) -> MicroBatch:
    """Return what a hook returned. Raise ConfigError unless it is (inputs, targets)."""
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        return returned[0], returned[1]
    given = f"a {type(returned).__name__}"
    if isinstance(returned, (tuple, list)):
        given += f" of {len(returned)}"
    raise ConfigError(f"{hook} returned {given}: must return (inputs, targets)")


def _check_not_text(tree: Any, split: str, index: int) -> None:
    """Raise ConfigError if a tree contains text and no tensor: torch's own error is unclear.

    Text next to tensors is allowed, and is left to the task.
    """
    leaves = tree_leaves(tree)
    text = next((leaf for leaf in leaves if isinstance(leaf, (str, bytes))), None)
    if text is not None and not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        example = f"{split} example {index} is {text!r:.40}"
        advice = "convert it in the dataset, in split_batch or in augment"
        raise ConfigError(f"{example}: must be a tensor; {advice}")
