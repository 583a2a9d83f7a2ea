"""The objective: a task's loss as a strategy calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainer.data.batches import count_rows
from trainer.engine.means import Means, Values, weigh
from trainer.errors import ConfigError


class Objective:
    """Callable (outputs, targets) -> (sum(values x weights), values carried with the gradients).

    Backward runs on that sum x `scale` = ranks / nominal, where nominal = global batch x
    elements per example is a constant of the run. The second result is (weight of the
    micro-batch, 1 if this rank was asked to stop), and is summed over the global batch. Multiplied
    by nominal / weight, the gradients are those of the mean.
    """

    def __init__(
        self,
        name: str,
        means: Means,
        global_batch: int,
        ranks: int,
        elements: int = 0,
        agree: Callable[[int], int] = int,
        wants_stop: Callable[[], bool] = bool,
    ):
        """Set the constants of the run.

        `agree` returns rank 0's integer on every rank. It is called once, with the elements per
        example.
        """
        self.elements = elements
        self.is_weighted: bool | None = None
        self.scale = ranks / (global_batch * elements) if elements else 0.0
        self._name = name
        self._means = means
        self._global_batch = global_batch
        self._ranks = ranks
        self._agree = agree
        self._wants_stop = wants_stop
        self._loss: Callable[[Any, Any], Values] | None = None
        self._carried: dict[tuple[float, bool], torch.Tensor] = {}

    def of(self, loss: Callable[[Any, Any], Values]) -> Objective:
        """Set the loss function of the next update, and return this objective."""
        self._loss = loss
        return self

    def __call__(self, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._loss is not None
        rows = count_rows(targets, outputs)
        values, weights = weigh(self._name, self._loss(outputs, targets), rows)
        if weights is None:
            count = values.numel()
            if count != rows * self.elements or self.is_weighted is not False:
                self._check_constant(count // rows, False)
            total = values.sum()
            self._means.count(self._name, total.detach(), count)
            return total, self._carry(total, count)
        self._check_constant(values.numel() // rows, True)
        total = (values * weights).sum()
        weight = weights.sum()
        self._means.count(self._name, total.detach(), weight)
        stop = self._carry(total, 0)[1]
        return total, torch.stack([weight.to(total.dtype), stop])

    def factor(self, totals: torch.Tensor) -> torch.Tensor | None:
        """Return the factor on the reduced gradients, None for 1.

        `totals` is the sum of the carried values over the global batch.
        """
        return self._global_batch * self.elements / totals[0] if self.is_weighted else None

    def _check_constant(self, elements: int, is_weighted: bool) -> None:
        if self.is_weighted is not is_weighted:
            if self.is_weighted is not None:
                advice = "always return (values, weights), or never"
                line = f"{self._name} returned weights in one step and none in another"
                raise ConfigError(f"{line}: {advice}")
            self.is_weighted = is_weighted
        if not self.elements:
            self.elements = self._agree(max(1, elements))
            self.scale = self._ranks / (self._global_batch * self.elements)
        if not is_weighted and self.elements != elements:
            was = f"{elements} values per example after {self.elements}"
            advice = "return (values, weights), so that each value counts equally"
            raise ConfigError(f"{self._name} returned {was}: {advice}")

    def _carry(self, total: torch.Tensor, weight: int) -> torch.Tensor:
        key = (weight, self._wants_stop())
        if key not in self._carried:  # cached: each copy to a GPU would block
            self._carried[key] = torch.tensor(key, dtype=total.dtype, device=total.device)
        return self._carried[key]
