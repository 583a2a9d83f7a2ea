"""Calls of a model, whatever its inputs are."""

from __future__ import annotations

from typing import Any

from torch import nn


def call_plainly(model: nn.Module, inputs: Any) -> Any:
    """Call `model` with a tensor, with the items of a tuple, or with a dict as keywords."""
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)
