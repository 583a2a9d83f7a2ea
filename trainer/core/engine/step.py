"""An optimizer step in progress: learning rates, norms, updates and the outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from trainer.base.errors import ConfigError, one_line
from trainer.core.blame import MOST_OF_AN_ERROR, is_explained, is_of_torch
from trainer.core.schedule import Factor
from trainer.core.strategy.optimizer_trial import is_elementwise


@dataclass(slots=True)
class Outcome:
    """Result of the updates of one step, summed over all ranks. `+` joins two outcomes.

    A part is, for one update, (2,) with the weight of its batch and the stop requests, and () that
    is 1 if the update was skipped.
    """

    parts: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(self.parts + other.parts)


class OpenStep:
    """`with step(number, is_logged):` makes the 0-based step `number`.

    Until its end the state may be half updated: the step `is_open`, and after an error in the block
    it stays so. The norm of its gradients is computed if it `is_logged`.
    """

    def __init__(self, begin: Callable[[], Any] = int, end: Callable[[], Any] = int):
        self.number = 0
        self.is_logged = False
        self.is_open = False
        self._begin = begin
        self._end = end

    def __call__(self, number: int, is_logged: bool = False) -> OpenStep:
        self.number = number
        self.is_logged = is_logged
        return self

    def __enter__(self) -> None:
        self._begin()
        self.is_open = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self._end()
            self.is_open = False

    def leave(self) -> None:
        """Say that the state is whole all the same."""
        self.is_open = False


class Rates:
    """The learning rates of a run: those of the optimizers as built x `schedule` x `scale`."""

    def __init__(self, optimizers: Sequence[Optimizer], schedule: Factor, scale: float):
        self.schedule = schedule
        self._optimizers = optimizers
        self._scale = scale
        self.list_groups()

    def list_groups(self) -> None:
        """Find the groups as built that have a learning rate; not those added later."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        built = [group for group in groups if "lr" in group.get("initial", {})]
        self._groups = [(group, group["initial"]["lr"]) for group in built]

    def set(self, step: int) -> None:
        """Set the rate of every parameter group for the 0-based `step`."""
        factor = self.schedule(step) * self._scale
        for group, initial in self._groups:
            group["lr"] = initial * factor

    def around(self, step: int) -> list[float]:
        """Return the first group's rate as it is, and as it will be at `step`."""
        factor = self.schedule(step) * self._scale
        return [rate for group, built in self._groups[:1] for rate in (group["lr"], built * factor)]

    def by_name(self) -> dict[str, float]:
        """Return the rate of the first group, to log it."""
        return {"optim/lr": float(self._groups[0][0]["lr"])} if self._groups else {}


class Norms:
    """Norms of the gradients of a step's updates: for clipping, and for the log."""

    def __init__(self, limit: float | None):
        self.limit = limit
        self._found: dict[str, torch.Tensor] = {}

    def note_and_clip(
        self, name: str, parameters: Sequence[nn.Parameter], norm: torch.Tensor
    ) -> None:
        """Note the norm () of an update's gradients, and limit it to that of run.clip_norm."""
        self._found[name] = norm
        if self.limit is not None:
            clip_grads_with_norm_(parameters, self.limit, norm)

    def take(self) -> dict[str, torch.Tensor]:
        """Return the norm () of each update's last gradients before clipping, by name, once."""
        norms, self._found = self._found, {}
        return norms


def step_unless(optimizers: Sequence[Optimizer], found_inf: torch.Tensor) -> None:
    """Step the optimizers. If `found_inf` is 1, change neither weights nor state.

    On an accelerator this is decided on the device, so that the host does not wait for it:
    optimizers that support found_inf (torch's fused ones) skip, others step and get back what they
    had. On a CPU, and where there is no state yet to give back, the host reads `found_inf`.
    """
    if found_inf.device.type == "cpu":
        for optimizer in () if found_inf else optimizers:
            _step(optimizer)
        return
    for optimizer in optimizers:
        if _knows_found_inf(optimizer):
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            _step(optimizer)
        elif (tensors := _tensors_of(optimizer)) is not None:
            _step_and_undo(optimizer, tensors, found_inf)
        elif not found_inf:
            _step(optimizer)


def _tensors_of(optimizer: Optimizer) -> list[torch.Tensor] | None:
    """Return the tensors that a step changes; None if a step may make more, or change numbers."""
    stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    tensors = list(stepped)
    for parameter in stepped:
        values = list(optimizer.state.get(parameter, {}).values())
        if not values or not all(isinstance(value, torch.Tensor) for value in values):
            return None
        tensors += values
    return [getattr(each, "_local_tensor", each) for each in tensors]  # of FSDP: this rank's


@torch.no_grad()
def _step_and_undo(
    optimizer: Optimizer, tensors: Sequence[torch.Tensor], found_inf: torch.Tensor
) -> None:
    """Step, and where `found_inf` is 1 write back what the tensors held: a copy of them each."""
    copies = [torch.empty_like(tensor) for tensor in tensors]
    torch._foreach_copy_(copies, [*tensors])  # one launch
    _step(optimizer)
    is_skipped = {device: found_inf.to(device) > 0 for device in {t.device for t in tensors}}
    for tensor, before in zip(tensors, copies, strict=True):
        torch.where(is_skipped[tensor.device], before, tensor, out=tensor)


def _step(optimizer: Optimizer) -> None:
    """Step. Raises ConfigError for an exception of torch's, such as for a missing closure."""
    if isinstance(optimizer, torch.optim.SGD):
        _begin_momentum(optimizer)
    try:
        optimizer.step()
    except Exception as error:
        if is_explained(error) or not is_of_torch(error):
            raise
        raise ConfigError(f"""{type(optimizer).__name__}.step() failed:
            {type(error).__name__}: {one_line(error)[:MOST_OF_AN_ERROR]}""") from error


def _begin_momentum(optimizer: torch.optim.SGD) -> None:
    """Give a buffer to parameters that get their first gradient after the others.

    torch's fused SGD takes buffers for all or for none (TypeError in torch 2.13). From a buffer of
    zeros the first update is the same, unless dampening is set.
    """
    count = 0
    for group in optimizer.param_groups:
        count += len(group["params"])
    if len(optimizer.state) == count:
        return  # all have one: the loop takes 90 us for 300 parameters, in each step
    for group in optimizer.param_groups:
        if not group["fused"] or not group["momentum"] or group["dampening"]:
            continue
        ready = [p for p in group["params"] if p.grad is not None]
        late = [p for p in ready if optimizer.state.get(p, {}).get("momentum_buffer") is None]
        if 0 < len(late) < len(ready):
            for p in late:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


def _knows_found_inf(optimizer: Optimizer) -> bool:
    # Without state, a skipped first step leaves fused SGD with a momentum buffer of uninitialised
    # memory (torch 2.13).
    # A step of the user's may change weights beside the fused one.
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or not is_elementwise(optimizer):
        return False
    return bool(optimizer.state) or not any(g.get("momentum") for g in optimizer.param_groups)
