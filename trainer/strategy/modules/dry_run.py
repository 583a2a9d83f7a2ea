"""Rehearsal: a dry run of one micro-batch that finds its cost and its changes, and undoes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from trainer.config.schema import Config

STIR = 0.05  # of a weight
KEPT_BYTES = 2**30  # of parameters, which are copied for a rehearsal


class FlopCounter(TorchDispatchMode):
    """Count floating-point operations with torch's formulas.

    torch's FlopCounterMode would import torch._dynamo, which costs 0.7 s at each start.
    """

    total = 0.0
    _is_paused = False

    @classmethod
    @contextmanager
    def paused(cls) -> Iterator[None]:
        """Count nothing during the block: operations that are only computed again."""
        was = cls._is_paused
        cls._is_paused = True
        try:
            yield
        finally:
            cls._is_paused = was

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._overloadpacket in flop_registry and not self._is_paused:
            formula = flop_registry[func._overloadpacket]
            self.total += formula(*args, **kwargs, out_val=out)
        return out


@torch.no_grad()
def stir(weights: torch.Tensor, noise: torch.Generator) -> None:
    """Change weights a little and keep their signs; zeros, which hide what is behind them, too."""
    if weights.is_floating_point() and weights.numel():
        drawn = torch.randn(weights.shape, generator=noise).to(weights) * STIR
        floor = weights.abs().mean().clamp_min(STIR)
        weights += torch.where(weights == 0, drawn * floor, weights * drawn.clamp(-0.5, 0.5))


def eager(config: Config) -> AbstractContextManager[Any]:
    """Compile nothing in the block: few rows would make torch compile for any number of them."""
    return torch.compiler.set_stance("force_eager") if config.run.compile else nullcontext()


class BuffersBefore(dict[str, torch.Tensor]):
    """Copies of a model's buffers by name, and the tensors that held them in `originals`."""

    def __init__(self, model: nn.Module):
        self.originals = {name: b for name, b in model.named_buffers() if not is_lazy(b)}
        self._versions = {name: b._version for name, b in self.originals.items()}
        super().__init__({name: b.clone() for name, b in self.originals.items()})

    def is_assigned(self, name: str, buffer: torch.Tensor) -> bool:
        """Return True if this buffer is another tensor now."""
        return self.originals.get(name, buffer) is not buffer

    def is_written(self, name: str, buffer: torch.Tensor) -> bool:
        """Return True if this buffer was written, even if its values are what they were."""
        return name in self._versions and buffer._version != self._versions[name]

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """Give the buffers their values back."""
        for name, buffer in list(model.named_buffers()):
            if name in self and buffer.shape == self[name].shape:
                buffer.copy_(self[name])
            elif name in self:  # such as a cache that grows
                place, _, key = name.rpartition(".")
                model.get_submodule(place)._buffers[key] = self[name]


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Run a block, such as an evaluation, then give the model's buffers their values back."""
    before = BuffersBefore(model)
    try:
        yield
    finally:
        before.restore(model)


@contextmanager
def untouched(model: nn.Module) -> Iterator[BuffersBefore]:
    """Run a block, then restore the model's buffers and plain values, and drop its gradients.

    Parameters that a forward pass writes are restored too, up to KEPT_BYTES of them, but not those
    of FSDP. Yields copies of the buffers from before the block, by name.
    """
    before = BuffersBefore(model)
    parameters = [p for p in model.parameters() if not is_lazy(p) and not p.is_meta]
    # FSDP gathers parameters on a stream of its own, and only its hooks wait for them
    is_gathered = any(hasattr(each, "unshard") for each in model.modules())
    is_kept = not is_gathered and sum(p.nbytes for p in parameters) <= KEPT_BYTES
    kept = [(p, p._version, p.detach().clone()) for p in parameters if is_kept]
    flags = [(each, _flags_of(each)) for each in model.modules()]
    try:
        yield before
    finally:
        for module, plain in flags:
            vars(module).update(plain)
        with torch.no_grad():
            for parameter, version, values in kept:
                if parameter._version != version and parameter.shape == values.shape:
                    parameter.copy_(values)
        before.restore(model)
        model.zero_grad(set_to_none=True)


def _flags_of(module: nn.Module) -> dict[str, Any]:
    """Return the plain values that a module keeps, such as whether it has seen a batch."""
    if isinstance(module, LazyModuleMixin):  # gets its sizes in a rehearsal
        return {}
    plain = (bool, int, float, str, type(None))
    return {k: v for k, v in vars(module).items() if isinstance(v, plain) and k != "training"}


def changed_buffers(model: nn.Module, before: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the buffers that differ from `before`: running statistics, not constants."""
    changed = []
    for name, buffer in model.named_buffers():
        if buffer.is_meta:  # another rank has it
            continue
        if name not in before or not torch.equal(buffer, before[name]):
            changed.append(buffer)
    return changed
