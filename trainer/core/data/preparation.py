"""Preparation: a batch of the data set becomes a micro-batch, by the hooks of the task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from trainer.base.errors import ConfigError
from trainer.core.data.examples import find_flaw
from trainer.core.data.loaders import Collate
from trainer.core.data.resident import Piece
from trainer.core.distributed import accelerator
from trainer.core.micro_batch import MicroBatch, count_rows
from trainer.core.rng.forward import ExampleRng
from trainer.core.rng.philox import Random

Form = tuple[torch.dtype, int, torch.dtype, int]  # of two tensors: dtype and number of axes
IMAGES = 4  # axes: their memory format may have to change


@dataclass(frozen=True)
class Preparation:
    """Turn a batch of the dataset into a micro-batch, with the task's `split_batch` and `augment`.

    `convert` casts it to the dtype and memory format of the model.
    """

    split_batch: Callable[[Any], tuple[Any, Any]]
    augment: Callable[[Any, Any, Random, bool], tuple[Any, Any]] | None  # None: nothing to do
    convert: Callable[[Any, Any], MicroBatch]
    seed: int
    device: torch.device
    draws: ExampleRng
    collate: Collate = default_collate
    takes_pairs: bool = False  # split_batch returns a pair as it is
    checked: set[str] = field(default_factory=set)  # splits of which one micro-batch was checked
    forms: dict[str, Form] = field(default_factory=dict)  # by split, of what needs no conversion

    def __call__(
        self, piece: Piece, split: str, epoch: int, step: int, micro_batch_index: int
    ) -> MicroBatch:
        """Return micro-batch `micro_batch_index` of `step`, and begin the random draws of its rows.

        It is checked and converted, unless one of the same form was found to need neither.
        """
        if self.draws.is_entered:
            self.draws.end()  # augment draws from its own Random
        is_host = self.device.type == "cpu"
        batch, indices = piece if is_host else accelerator.copy_aside(piece, self.device)
        is_pair = self.takes_pairs and isinstance(batch, (tuple, list)) and len(batch) == 2
        inputs, targets = batch if is_pair else _pair("split_batch", self._split(batch))
        if self.augment is not None:
            random = Random(self.seed, split, epoch, indices)
            augmented = self.augment(inputs, targets, random, split == "train")
            inputs, targets = _pair("augment", augmented)
        form = _form_of(inputs, targets, len(indices))
        if form is None or form != self.forms.get(split):
            inputs, targets = self._check(inputs, targets, split, indices, form)
        self.draws.begin(step, micro_batch_index, indices, split)
        return inputs, targets

    def _check(
        self, inputs: Any, targets: Any, split: str, indices: torch.Tensor, form: Form | None
    ) -> MicroBatch:
        """Return a micro-batch as the model takes it. Raises ConfigError if that cannot be."""
        if split not in self.checked:
            for tree in (inputs, targets):
                _check_not_text(tree, split, int(indices[0]))
            if flaw := find_flaw((inputs, targets), allows_gradient=True):
                raise ConfigError(f"the {split} batches contain {flaw[0]}; {flaw[1]}")
            self.checked.add(split)
        if (rows := count_rows(targets, inputs)) != len(indices):
            raise ConfigError(f"""{len(indices)} examples of {split} became {rows} rows:
                collate, split_batch and augment must keep a row for each; give it weight 0""")
        prepared = self.convert(inputs, targets)
        if form is not None and prepared[0] is inputs and prepared[1] is targets:
            self.forms[split] = form
        return prepared

    def _split(self, batch: Any) -> Any:
        try:
            return self.split_batch(batch)
        except KeyError as error:
            if not isinstance(batch, Mapping) or error.args[0] in batch:
                raise
            raise ConfigError(f"""split_batch reads {error}:
                must be one of {", ".join(map(str, batch))}""") from error

    def begin_draws(self, step: int, micro_batch_index: int, indices: torch.Tensor) -> None:
        """Begin the random draws of these training examples once more."""
        self.draws.begin(step, micro_batch_index, accelerator.copy_aside(indices, self.device))


def _form_of(inputs: Any, targets: Any, rows: int) -> Form | None:
    """Return the form of two tensors of so many rows; None for anything else."""
    if type(inputs) is not torch.Tensor or type(targets) is not torch.Tensor:
        return None
    if not inputs.dim() or not targets.dim() or inputs.dim() == IMAGES:
        return None
    if inputs.shape[0] != rows or targets.shape[0] != rows:
        return None
    return inputs.dtype, inputs.dim(), targets.dtype, targets.dim()


def _pair(hook: str, returned: Any) -> MicroBatch:
    """Return what a hook returned. Raise ConfigError unless it is (inputs, targets)."""
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        return returned[0], returned[1]
    description = f"a {type(returned).__name__}"
    if isinstance(returned, (tuple, list)):
        description += f" of {len(returned)}"
    raise ConfigError(f"{hook} returned {description}: must return (inputs, targets)")


def _check_not_text(tree: Any, split: str, index: int) -> None:
    """Raise ConfigError if a tree contains text and no tensor: torch's own error is unclear.

    Text next to tensors is allowed, and is left to the task.
    """
    leaves = tree_leaves(tree)
    text = next((leaf for leaf in leaves if isinstance(leaf, (str, bytes))), None)
    if text is not None and not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise ConfigError(f"""{split} example {index} is {text!r:.40}: must be a tensor;
            convert it in the dataset, in split_batch or in augment""")
