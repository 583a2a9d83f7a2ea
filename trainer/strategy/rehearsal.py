"""A rehearsal of a model: what one micro-batch costs and changes, and no trace of it left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class FlopCounter(TorchDispatchMode):
    """torch's formulas by operation. FlopCounterMode imports torch._dynamo: 0.7 s at each start."""

    total = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._overloadpacket in flop_registry:
            formula = flop_registry[func._overloadpacket]
            self.total += formula(*args, **kwargs, out_val=out)
        return out


@contextmanager
def untouched(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Run a block, then restore the model's buffers and drop its gradients.

    Yields the buffers as they were before.
    """
    before = {name: b.clone() for name, b in model.named_buffers() if not is_lazy(b)}
    try:
        yield before
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in before:
                    buffer.copy_(before[name])
        model.zero_grad(set_to_none=True)


def changed_buffers(model: nn.Module, before: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The buffers that are not as they were: running statistics, and not constants."""
    found = []
    for name, buffer in model.named_buffers():
        if name not in before or not torch.equal(buffer, before[name]):
            found.append(buffer)
    return found
