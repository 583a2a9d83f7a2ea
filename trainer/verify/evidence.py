"""Evidence: what the ranks of a layout recorded of their rows, data and model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import keystr, tree_flatten_with_path

from trainer.base.same import gap
from trainer.base.same.distance import digest_rows
from trainer.core.loop.run import Run
from trainer.core.strategy.modules.batchnorm import GroupBatchNorm, SyncBatchNorm
from trainer.core.strategy.tensor_shards import slices
from trainer.startup_checks.rank_agreement import CallDigest
from trainer.startup_checks.snapshots import AttributeSnapshot, of_dataset

ELEMENTS_OF_A_PROBE = 4096  # elements of each tensor that are kept
ELEMENTS_OF_A_STEP = 64  # of each of its examples

Row = dict[str, list[float]]  # of one example: its elements by the tensor's name


def rows_of(inputs: Any, targets: Any, most: int) -> list[Row]:
    """Return the first elements of each example, at most `most` of each tensor."""
    named = [
        (root + keystr(path), leaf)
        for root, tree in (("inputs", inputs), ("targets", targets))
        for path, leaf in tree_flatten_with_path(tree)[0]
        if isinstance(leaf, torch.Tensor) and leaf.dim()
    ]
    columns = {
        name: _real(leaf.detach()).reshape(len(leaf), -1)[:, :most].cpu().double().tolist()
        for name, leaf in named
        if len(leaf) == len(named[0][1])
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def describe_difference(one: Row, other: Row, origin: str) -> str:
    """Return the two values that differ most, `other` of them there; empty if all are equal."""
    for name in one.keys() & other.keys():
        sizes = len(one[name]), len(other[name])
        if sizes[0] != sizes[1]:
            return f"{name} has {sizes[1]} elements there and {sizes[0]} on {origin}"
    apart = [
        (gap(a, b), name, index, a, b)
        for name, values in one.items()
        for index, (a, b) in enumerate(zip(values, other.get(name, []), strict=False))
    ]
    size, name, index, a, b = max(apart, key=itemgetter(0), default=(0.0, "", 0, 0.0, 0.0))
    if not size:
        return ""
    return f"{name}[{index}] is {b:.9g} there and {a:.9g} on {origin}, {size:.0e} apart"


PROBED = 8  # examples, the same on every rank


def probe(run: Run) -> Probe:
    """Read a few examples, to compare them between ranks, and note what amplifies rounding."""
    config = run.config
    unit = config.norm_rows or 1
    rows = unit * -(-min(PROBED, config.data.global_batch) // unit)
    indices = run.batches.first_examples(0, rows)
    dataset = run.batches.dataset
    reading = AttributeSnapshot(of_dataset(dataset))
    batch = next(iter(run.batches.of_examples(indices)))
    changed_by_reading = reading.changed(of_dataset(dataset))
    layers = dict(run.engine.strategy.tensors.structure.named_modules())
    return Probe(
        indices=indices.tolist(),
        digests=digest_rows(batch),
        rows=rows_of(*batch, ELEMENTS_OF_A_PROBE),
        changed_by_reading=changed_by_reading,
        is_torchs_dropout=config.run.dropout == "torch",
        batchnorms=[name for name, layer in layers.items() if _is_plain_batchnorm(layer)],
        has_max_pooling=any("MaxPool" in type(layer).__name__ for layer in layers.values()),
        optimizers=[type(optimizer).__name__ for optimizer in run.engine.optimizers],
    )


def _is_plain_batchnorm(layer: nn.Module) -> bool:
    special_types = (GroupBatchNorm, SyncBatchNorm, nn.SyncBatchNorm)
    return isinstance(layer, _BatchNorm) and not isinstance(layer, special_types)


Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Probe:
    """A few examples on one rank, the same on every rank, and facts about its model.

    `changed_by_reading` lists attributes of the data set that change when examples are read.
    `digests` has a number per example, and `rows` its values.
    """

    indices: list[int]
    digests: list[float]
    rows: list[Row]
    changed_by_reading: list[str]
    is_torchs_dropout: bool
    batchnorms: list[str]  # names of plain ones
    has_max_pooling: bool
    optimizers: list[str]


@dataclass
class Notes:
    """Evidence recorded by one rank. Steps count from 1."""

    indices: dict[int, list[int]] = field(default_factory=dict)  # of examples, by step
    digests: dict[str, float] = field(
        default_factory=dict
    )  # of augmented examples, by "<epoch>/<index>"
    rows: dict[str, Row] = field(default_factory=dict)  # their first elements
    gradients: Tensors = field(default_factory=dict)  # of an optimizer's first step, after clipping
    first_weights: Tensors = field(default_factory=dict)
    last_weights: Tensors = field(default_factory=dict)
    record: list[dict[str, Any]] = field(default_factory=list)  # metrics.jsonl, on rank 0
    probe: Probe | None = None
    # before the first and the last step: what modules, loss and gradients are for the same rows
    results: list[list[CallDigest]] = field(default_factory=list)
    finding: str = ""  # the first line of the run's own checks
    chance: list[str] = field(default_factory=list)  # what a step takes from chance
    narrowest: str = ""  # precision of the narrowest sums of the first step, of a run on one rank
    has_rows: bool = True  # on one of the ranks that train on the same rows
    boxes: dict[str, Any] = field(default_factory=dict)  # shape of the whole, and (offset, size)s
    seconds: float = 0.0  # that the run took

    def save(self, path: Path) -> None:
        probe = None if self.probe is None else vars(self.probe)
        torch.save({**vars(self), "probe": probe}, path)

    @classmethod
    def load(cls, path: Path) -> Notes:
        values = torch.load(path, weights_only=True)
        probe = values["probe"]
        return cls(**{**values, "probe": None if probe is None else Probe(**probe)})


def join_shards(ranks: Sequence[Notes]) -> list[Notes]:
    """Return the notes with whole tensors: a rank's own part, and the rest from other ranks."""
    kinds = ("gradients", "first_weights", "last_weights")
    whole: dict[str, Tensors] = {kind: {} for kind in kinds}
    for notes in reversed(ranks):
        for kind in kinds:
            whole[kind] = _laid_over(whole[kind], getattr(notes, kind), notes.boxes)
    joined = []
    for notes in ranks:
        own = {kind: _laid_over(whole[kind], getattr(notes, kind), notes.boxes) for kind in kinds}
        joined.append(replace(notes, **own))  # type: ignore[arg-type]
    return joined


def _laid_over(under: Tensors, parts: Tensors, boxes: dict[str, Any]) -> Tensors:
    """Return whole tensors, with the values of `parts` at the places of their boxes."""
    tensors = dict(under)
    for name, part in parts.items():
        shape, places = boxes.get(name, (part.shape, [((0,) * part.dim(), part.shape)]))
        whole = tensors[name].clone() if name in tensors else part.new_zeros(shape)
        begin = 0
        for offset, size in places:
            whole[slices(offset, size)] = part[begin : begin + size[0]] if size else part
            begin += size[0] if size else 0
        tensors[name] = whole
    return tensors


@dataclass(frozen=True)
class Evidence:
    """The notes of all ranks of one layout in one precision."""

    ranks: Sequence[Notes]

    @property
    def steps(self) -> list[int]:
        """The steps that these processes trained."""
        return list(self.ranks[0].indices)

    @property
    def examples(self) -> dict[int, list[int]]:
        """The example indices of each step, over all ranks in order."""
        ranks = [rank for rank in self.ranks if rank.has_rows]
        return {step: [i for rank in ranks for i in rank.indices[step]] for step in self.steps}

    @property
    def digests(self) -> dict[str, float]:
        return {key: digest for rank in self.ranks for key, digest in rank.digests.items()}

    @property
    def rows(self) -> dict[str, Row]:
        return {key: row for rank in self.ranks for key, row in rank.rows.items()}

    @property
    def probes(self) -> list[Probe]:
        return [rank.probe for rank in self.ranks if rank.probe is not None]

    @property
    def losses(self) -> dict[tuple[int, str], float | None]:
        """Losses by step and name: train_step may log several. None means nan."""
        return {
            (entry["step"], name): value
            for entry in self.ranks[0].record
            for name, value in entry.items()
            if name.startswith("train/")
        }

    @property
    def rates(self) -> dict[int, float]:
        """The learning rate of each step."""
        return {e["step"]: e["optim/lr"] for e in self.ranks[0].record if "optim/lr" in e}

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last evaluation by name."""
        return {
            name: value
            for entry in self.ranks[0].record
            for name, value in entry.items()
            if name.startswith("eval/") and value is not None
        }

    def of_steps(self, steps: Sequence[int]) -> Evidence:
        """Return this evidence with the examples of some steps only, without first gradients."""
        return Evidence(
            [
                replace(rank, indices={step: rank.indices[step] for step in steps}, gradients={})
                for rank in self.ranks
            ]
        )
