"""Evidence: the notes of each rank of a layout, from which findings are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Probe:
    """A rank's view of a few examples, the same on every rank, and the layers of its model.

    `first` and `second` are {"outputs": (rows, n), "values": (rows, n)} of model and loss, run
    twice with one seed. `mixes`: do the outputs or values of a row depend on the other rows?
    `changed` are the attributes that running them changes, `changed_by_reading` those of the data
    set. `kernels` draw by micro-batch.
    """

    indices: list[int]
    digests: list[float]
    changed: list[str]
    changed_by_reading: list[str]
    kernels: list[str]
    is_torchs_dropout: bool
    has_batchnorm: bool
    has_max_pooling: bool
    optimizers: list[str]
    first: Tensors
    second: Tensors
    mixes: dict[str, bool]


@dataclass
class Notes:
    """Evidence from one rank. Steps count from 1."""

    indices: dict[int, list[int]] = field(default_factory=dict)  # of the examples, by step
    digests: dict[str, float] = field(default_factory=dict)  # augmented, by "<epoch>/<index>"
    gradients: Tensors = field(default_factory=dict)  # first update, reduced, before clipping
    first_weights: Tensors = field(default_factory=dict)
    last_weights: Tensors = field(default_factory=dict)
    record: list[dict[str, Any]] = field(default_factory=list)  # metrics.jsonl, on rank 0
    probe: Probe | None = None

    def save(self, path: Path) -> None:
        probe = None if self.probe is None else vars(self.probe)
        torch.save({**vars(self), "probe": probe}, path)

    @classmethod
    def load(cls, path: Path) -> Notes:
        values = torch.load(path, weights_only=True)
        probe = values["probe"]
        return cls(**{**values, "probe": None if probe is None else Probe(**probe)})


@dataclass(frozen=True)
class Evidence:
    """The notes of all ranks of one layout in one precision."""

    ranks: Sequence[Notes]

    @property
    def steps(self) -> list[int]:
        """The steps that these processes made."""
        return list(self.ranks[0].indices)

    @property
    def examples(self) -> dict[int, list[int]]:
        """The example indices of each step, ranks joined."""
        return {step: [i for rank in self.ranks for i in rank.indices[step]] for step in self.steps}

    @property
    def digests(self) -> dict[str, float]:
        return {place: digest for rank in self.ranks for place, digest in rank.digests.items()}

    @property
    def probes(self) -> list[Probe]:
        return [rank.probe for rank in self.ranks if rank.probe is not None]

    @property
    def losses(self) -> dict[tuple[int, str], float | None]:
        """By step and name: a user's train_step may log several. None stands for nan."""
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
        """The last evaluation by name."""
        return {
            name: value
            for entry in self.ranks[0].record
            for name, value in entry.items()
            if name.startswith("eval/") and value is not None
        }

    def of_steps(self, steps: Sequence[int]) -> Evidence:
        """This evidence with the examples of some steps alone, and no first gradients."""
        return Evidence(
            [
                replace(rank, indices={step: rank.indices[step] for step in steps}, gradients={})
                for rank in self.ranks
            ]
        )
