"""The objective: a task's loss as a strategy calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainer.base.codec import name_of
from trainer.base.errors import ConfigError
from trainer.core.blame import LOSS_HOOK
from trainer.core.engine.means import Means
from trainer.core.engine.values import Values, check_signs, sum_up, weigh, weigh_all
from trainer.core.hook_calls import call_hook
from trainer.core.micro_batch import Rows, count_rows

Loss = Callable[[Any, Any], Values]
# Of values, and of weights: shape, dtype, device, layout, and whether they have a gradient.
Form = tuple[tuple[torch.Size, torch.dtype, torch.device, torch.layout, bool], ...]


@dataclass(frozen=True)
class CountedPart:
    """The part of the values of its rows that a rank counts.

    `parts` is the number of ranks that divide the values of a row between them. Without
    `is_counted` another rank with the same values counts them. `zero` is of the dtype of sums.
    """

    is_counted: bool = True
    parts: int = 1
    zero: torch.Tensor = field(default_factory=lambda: torch.zeros(()))


class _CarriedValues:
    """Values carried with the gradients: (weight, 1 if this rank asks all ranks to stop)."""

    def __init__(self, wants_stop: Callable[[], bool]):
        self._wants_stop = wants_stop
        self._made: dict[tuple[float, bool], torch.Tensor] = {}

    def __call__(self, total: torch.Tensor, weight: int) -> torch.Tensor:
        """Return (2,) of the dtype and device of `total`."""
        key = (weight, self._wants_stop())
        if key not in self._made:  # each copy to a GPU would block
            self._made[key] = torch.tensor(key, dtype=total.dtype, device=total.device)
        return self._made[key]


class Objectives:
    """The objective of each update, by its name; `open(name)` makes one."""

    def __init__(self, open: Callable[..., Objective]):
        self.by_name: dict[str, Objective] = {}
        self.open = open

    def __getitem__(self, name: str) -> Objective:
        if name not in self.by_name:
            self.by_name[name] = self.open(name)
        return self.by_name[name]

    def elements(self) -> dict[str, int]:
        """Return the elements per example of each objective."""
        return {name: each.elements for name, each in self.by_name.items()}

    def load(self, elements: Mapping[str, int]) -> None:
        """Open those of a checkpoint, which `elements` returned."""
        self.by_name.clear()
        for name, count in elements.items():
            self.by_name[name] = self.open(name, elements=count)


class Objective:
    """The constants of the updates of one name, and the means of their losses.

    Backward runs on the sum of values x weights, x `scale` = ranks / nominal, where nominal =
    global batch x elements per example is a constant of the run. Values carried with the gradients
    are (weight of the micro-batch, 1 if this rank was asked to stop), and are summed over the
    global batch. Multiplied by nominal / weight, the gradients are those of the mean.
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
        share: CountedPart = CountedPart(),
        rows: Rows | None = None,
    ):
        """Set the constants of the run.

        `agree` returns the largest of the ranks' integers on every rank. It is called once, with
        the elements per example and whether the loss is weighted.
        """
        self.elements = elements
        self.is_weighted: bool | None = None
        self._form: Form | None = None  # of values and weights that were checked
        self.name = name
        self._means = means
        self._global_batch = global_batch
        self._ranks = ranks
        self._agree = agree
        self._carry = _CarriedValues(wants_stop)
        self._share = share
        self._rows = rows or Rows()

    @property
    def scale(self) -> float:
        """Factor on the sum to differentiate; 0 before the first call."""
        return self._ranks / (self._global_batch * self.elements) if self.elements else 0.0

    def of(self, loss: Loss, others: Sequence[nn.Parameter] | None = ()) -> UpdateLoss:
        """Return the loss of one update, which does not step `others`; None if not known."""
        return UpdateLoss(self, loss, others)

    def add(self, loss: Loss, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a loss and count its values. Those of a form that was checked are not checked
        again."""
        returned = call_hook(LOSS_HOOK, loss, outputs, targets, self._rows)
        if self._form is not None and self._form == _form_of(returned):
            values, weights = returned if isinstance(returned, tuple) else (returned, None)
            if type(targets) is torch.Tensor and targets.shape[:1] == values.shape[:1]:
                return self._add(values, weights)
        return self._check(returned, count_rows(targets, outputs))

    def _check(self, returned: Values, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, weights = weigh(self.name, returned, rows)
        self._check_gradient(values)
        if self.is_weighted is None:
            check_signs(self.name, weights)
        if self._share.parts > 1 and values.dim() < 2:
            raise ConfigError(f"""{self.name} returned shape {tuple(values.shape)}:
                must be values (rows, positions) with strategy.mesh.context""")
        elements, is_weighted = values.numel() * self._share.parts, weights is not None
        if is_weighted or elements != rows * self.elements or self.is_weighted is not False:
            self._check_constant(elements // rows, is_weighted)
        if not self._share.is_counted:
            total = values if weights is None else values * weights
            return total.sum(), self.absent()
        if values.requires_grad and values is (returned if weights is None else returned[0]):
            self._form = _form_of(returned)  # of values that were not converted
        return self._add(values, weights)

    def _add(
        self, values: torch.Tensor, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Count values x weights; return their sum, and what is carried with the gradients."""
        if weights is None:
            total, count = values.sum(), values.numel()
            self._means.count(self.name, total.detach(), count)
            return total, self._carry(total, count)
        total, weight = (values * weights).sum(), weights.sum()
        self._means.count(self.name, total.detach(), weight)
        stop = self._carry(total, 0)[1]
        return total, torch.stack([weight.to(total.dtype), stop])

    def _check_gradient(self, values: torch.Tensor) -> None:
        if torch.is_grad_enabled() and not values.requires_grad:
            raise ConfigError(f"""{self.name} returned {name_of(values.dtype)} values
                without a gradient: must be computed from the parameters;
                leave out .detach(), .item() and argmax, in the model too""")
        if values.device.type != self._share.zero.device.type:
            raise ConfigError(f"""{self.name} returned values on {values.device}:
                must be on {self._share.zero.device}""")

    def weigh(self, loss: Loss, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a loss and return its values and weights; count nothing."""
        return weigh_all(self.name, loss(outputs, targets), count_rows(targets, outputs))

    def absent(self) -> torch.Tensor:
        """Return the carried values of a micro-batch that another rank counts."""
        if self.is_weighted is None:
            self._agree_on(0, False)
        self._means.count(self.name, self._share.zero, 0)
        return self._carry(self._share.zero, 0)

    def factor(self, totals: torch.Tensor) -> torch.Tensor | None:
        """Return the factor on the reduced gradients, None for 1.

        `totals` is the sum of the carried values over the global batch.
        """
        return self._global_batch * self.elements / totals[0] if self.is_weighted else None

    def _check_constant(self, elements: int, is_weighted: bool) -> None:
        if self.is_weighted is None:
            self._agree_on(max(1, elements), is_weighted)
        if self.is_weighted is not is_weighted:
            raise ConfigError(f"""{self.name} returned weights in one step and none in another:
                always return (values, weights), or never""")
        if not is_weighted and self.elements != elements:
            raise ConfigError(f"""{self.name} returned {elements} values per example after
                {self.elements}: return (values, weights), so that each value counts equally""")

    def _agree_on(self, elements: int, is_weighted: bool) -> None:
        """Agree at the first call, since a rank without outputs does not know. A collective."""
        agreed = self._agree(2 * elements + is_weighted)
        self.is_weighted = bool(agreed % 2)
        self.elements = self.elements or agreed // 2  # a resume knows it


@dataclass(frozen=True, slots=True)
class UpdateLoss:
    """The loss of one update, as a strategy calls it.

    (outputs, targets) -> (sum(values x weights), values carried with the gradients). The update
    does not step `others`; None in a dry run that does not know them.
    """

    objective: Objective
    loss: Loss
    others: Sequence[nn.Parameter] | None

    def __call__(self, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.objective.add(self.loss, outputs, targets)

    @property
    def name(self) -> str:
        """The name of the update, by which it is known from step to step."""
        return self.objective.name

    @property
    def scale(self) -> float:
        """Factor on the sum to differentiate; 0 before the first call."""
        return self.objective.scale

    def absent(self) -> torch.Tensor:
        """Return the carried values of a micro-batch that another rank counts."""
        return self.objective.absent()

    def sums(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Return the sums of values x weights, of their sizes and of the weights; count nothing."""
        return sum_up(*self.objective.weigh(self.loss, outputs, targets))

    def total(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Return the sum of values x weights, to differentiate; count nothing."""
        values, weights = self.objective.weigh(self.loss, outputs, targets)
        return (values * weights).sum()


def _form_of(returned: Any) -> Form | None:
    """Return the form of values, or of (values, weights); None unless they are plain tensors."""
    parts = returned if type(returned) is tuple and len(returned) == 2 else (returned,)
    if any(type(each) is not torch.Tensor for each in parts):
        return None
    return tuple((t.shape, t.dtype, t.device, t.layout, t.requires_grad) for t in parts)
