"""Calls of the model and of the task's hooks; their errors are explained in blame.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from trainer.base.model_calls import call_plainly
from trainer.core.blame import explain_hook, explain_model, is_explained
from trainer.core.micro_batch import Rows

Returned = TypeVar("Returned")


def call_hook(
    name: str, hook: Callable[[Any, Any], Returned], first: Any, second: Any, rows: Rows
) -> Returned:
    """Return `hook(first, second)`. Raises what `explain_hook` returns."""
    try:
        return hook(first, second)
    except Exception as error:
        line = explain_hook(name, hook, (first, second), error, rows)
        if line is None:
            raise
        raise line from error


def call(model: nn.Module, inputs: Any, rows: Rows | None = None) -> Any:
    """Call `model` with a tensor, with the items of a tuple, or with a dict as keywords.

    With `rows`, the rows of a model that this rank can run alone, an example that makes it fail is
    named.
    """
    try:
        return model(inputs) if type(inputs) is torch.Tensor else call_plainly(model, inputs)
    except Exception as error:
        line = None if is_explained(error) else explain_model(model, inputs, error, rows)
        if line is None:
            raise
        raise line from error
