"""History of one rank: its steps with examples, losses, gradients and weights."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Sketch = np.ndarray[Any, np.dtype[np.float64]]
Event = Mapping[str, Any]


@dataclass(frozen=True)
class MicroBatch:
    """Examples of one batch of a DataLoader, or of one forward pass if there is none."""

    rows: list[str]
    index: list[Any] | None
    weights: dict[str, float]
    number: int  # of its pass; 0 without a DataLoader


@dataclass
class RankStep:
    """One optimizer step on one rank. Sketches are in the order of the optimizer's parameters."""

    optimizer: int
    number: int
    batches: list[MicroBatch]
    losses: list[float]
    backwards: list[Event]
    forwards: list[Event]
    gradients: dict[str, Sketch | None]
    unclipped: dict[str, Sketch | None]
    clips: list[dict[str, Any]]
    weights: dict[str, Sketch | None]
    rates: dict[str, float]
    random: str
    rest: Sketch  # sum of the tensors that no optimizer has
    epsilon: float  # of an optimizer that divides by the size of gradients; 0 without
    reads: list[float]  # numbers that the script took from tensors since the step before
    passes: list[dict[str, Sketch]]  # what each backward pass added to the gradients of this step
    drops: list[int]  # for each zero_grad among them: the number of passes before it
    settings: dict[str, dict[str, Any]]  # of the optimizer, by parameter
    modes: Mapping[str, Any]
    criteria: list[Event]  # calls of loss functions, with the number of their backward pass
    advances: list[int]  # steps of schedules: for each, the number of backward passes before it
    frozen: list[str]  # parameters that need no gradient
    changed: list[str]  # parameters that were changed since the optimizer's step before

    @property
    def loss(self) -> float:
        """Return the sum of the losses of all backward passes: the one whose gradient is used."""
        return sum(self.losses)

    @property
    def rows(self) -> list[str]:
        return [row for batch in self.batches for row in batch.rows]

    @property
    def index(self) -> list[Any]:
        return [place for batch in self.batches for place in batch.index or []]

    def rename(self, names: Mapping[str, str]) -> None:
        """Give parameters other names."""
        mappings: list[dict[str, Any]] = [self.gradients, self.unclipped, self.weights]
        for each in (*mappings, self.rates, self.settings, *self.passes):
            rename_keys(each, names)
        for named in (self.frozen, self.changed):
            named[:] = [names.get(name, name) for name in named]


def rename_keys(mapping: dict[str, Any], names: Mapping[str, str]) -> None:
    """Give the keys of a mapping other names."""
    renamed = {names.get(key, key): value for key, value in mapping.items()}
    mapping.clear()
    mapping.update(renamed)


@dataclass(frozen=True)
class EvalPass:
    """A whole pass over a loader without a backward pass; `after` is the number of steps before."""

    number: int
    after: int
    size: int | None  # of the dataset
    rows: list[str] = field(default_factory=list)


@dataclass
class RankHistory:
    """Everything that one process recorded."""

    rank: int
    world_size: int
    steps: list[RankStep] = field(default_factory=list)
    optimizers: dict[int, Event] = field(default_factory=dict)
    passes: dict[int, Event] = field(default_factory=dict)
    orders: dict[int, list[str]] = field(default_factory=dict)  # training examples by pass
    evaluations: list[EvalPass] = field(default_factory=list)
    gathers: set[int] = field(default_factory=set)  # evaluations without repeated examples
    errors: list[str] = field(default_factory=list)
    saves: list[str] = field(default_factory=list)
    files: dict[str, bool] = field(default_factory=dict)  # is the first use of it a write?
    written: set[str] = field(default_factory=set)
    num_rest: int | None = None  # elements of the tensors that no optimizer has, at first
    num_begun: int = 0  # steps, with one that has a backward pass and no end
    is_averaging: bool = False  # the script has a collective of small tensors or objects
    time: float = 0.0
    seconds: float = 0.0
    recording: float = 0.0
    num_bytes: int = 0


def decode(names: Sequence[str], texts: Sequence[str | None]) -> dict[str, Sketch | None]:
    """Return the sketches by name; None where a parameter has no gradient."""
    return {
        name: None if text is None else np.frombuffer(base64.b64decode(text))
        for name, text in zip(names, texts, strict=True)
    }
