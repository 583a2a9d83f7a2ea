"""The exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from trainer.errors import CheckpointError


class Ema:
    """After each step: average = decay x average + (1 - decay) x weight, from the first weights.

    Parameters are averaged, buffers are the model's. Every rank makes the same average of the
    same weights.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self._names = [name for name, _ in model.named_parameters()]
        self._weights = [parameter.detach() for parameter in model.parameters()]
        self._averages = [weight.clone() for weight in self._weights]

    def update(self) -> None:
        torch._foreach_lerp_(self._averages, self._weights, 1 - self.decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The model with the averages for its weights, and the weights back after."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        kept = [weight.clone() for weight in self._weights]
        torch._foreach_copy_(self._weights, self._averages)
        torch._foreach_copy_(self._averages, kept)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(zip(self._names, self._averages, strict=True))

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Without averages in the checkpoint they begin at its weights."""
        if missing := [name for name in self._names if state and name not in state]:
            raise CheckpointError(
                f"the checkpoint is of another model: its averages have no {missing[0]}"
            )
        saved = [state[name] for name in self._names] if state else self._weights
        torch._foreach_copy_(self._averages, saved)
