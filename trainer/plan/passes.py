"""Forward and backward pass of a micro-batch without values: its activations and operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from trainer.draws.mode import take_rows
from trainer.engine.means import Means
from trainer.engine.objective import Objective
from trainer.errors import ConfigError, one_line
from trainer.plan.trial import Trial
from trainer.strategy.base import call, check_reached
from trainer.strategy.recompute import Recomputed, recompute
from trainer.strategy.rehearsal import FlopCounter


@dataclass(frozen=True)
class Passes:
    """Cost of the passes of one micro-batch, in bytes and in floating-point operations.

    `saved` is kept from forward to backward. `recomputed` is the largest module's part that
    strategy.recompute makes again in backward; `flops_again` are the operations for that.
    `gradients` are the sizes of the gradients, in the order in which backward has them. If the
    passes could not be run, `problem` is the reason, and the numbers are 0.
    """

    saved: int = 0
    recomputed: int = 0
    flops: float = 0.0
    flops_again: float = 0.0
    gradients: tuple[int, ...] = ()
    problem: str = ""


class Saved:
    """Storages that autograd keeps for backward, each counted once, without the model's own."""

    def __init__(self, model: nn.Module):
        self.num_bytes = 0
        own = [*model.parameters(), *model.buffers()]
        self._storages = {_key(tensor): tensor.untyped_storage() for tensor in own}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if _key(tensor) not in self._storages:
            storage = tensor.untyped_storage()
            self._storages[_key(tensor)] = storage  # kept, so that its key stays its own
            self.num_bytes += storage.nbytes()
        return tensor


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def run_passes(trial: Trial) -> Passes:
    """Run the passes of one micro-batch.

    Raises ConfigError where a real run would. Any other error becomes `problem`.
    """
    try:
        with trial.mode:
            return _run(trial)
    except ConfigError:
        raise
    except Exception as error:  # of the task's code, or an operation that reads values
        return Passes(problem=f"{type(error).__name__}: {one_line(error)[:80]}")


def _run(trial: Trial) -> Passes:
    _rehearse_draws(trial)
    recompute(trial.model, trial.config.strategy.recompute, trial.blocks)
    modules = [m for m in trial.model.modules() if isinstance(m.forward, Recomputed)]
    saved = Saved(trial.model)
    with _gradients_of(trial.model) as gradients:
        flops, _ = _pass(trial, saved)
    order = tuple(gradients)
    if not modules:
        return Passes(saved.num_bytes, flops=flops, gradients=order)
    for module in modules:
        again: Any = module.forward
        module.forward = again.inner
    whole = Saved(trial.model)
    with _sizes_of(modules, whole) as sizes:
        _, forward = _pass(trial, whole)
    return Passes(saved.num_bytes, max(sizes.values()), flops, forward, order)


def _objective(trial: Trial) -> Objective:
    ranks = trial.mesh.data_size if trial.kind.averages else 1
    objective = Objective("loss", Means(), trial.config.data.global_batch, ranks)
    return objective.of(trial.task.loss)


def _rehearse_draws(trial: Trial) -> None:
    if trial.draws.is_known("loss"):
        return
    objective = _objective(trial)

    def compute(inputs: Any, targets: Any) -> None:
        with trial.precision.autocast():
            objective(call(trial.model, inputs), targets)

    unit = trial.config.norm_rows or 1
    trial.draws.rehearse("loss", compute, take_rows(trial.batch, 3 * unit), unit)


def _pass(trial: Trial, saved: Saved) -> tuple[float, float]:
    """Run forward and backward; return the operations of both, and of forward alone."""
    objective = _objective(trial)
    inputs, targets = trial.batch
    with FlopCounter() as counter, trial.draws.update("loss"):
        trial.draws.begin(0, 0, torch.arange(trial.rows))
        with saved_tensors_hooks(saved.pack, _same), trial.precision.autocast():
            total, _ = objective(call(trial.model, inputs), targets)
        forward = counter.total
        torch.autograd.backward(total, trial.precision.root(total, objective.scale))
    if trial.mesh.data_size > 1:
        check_reached(trial.config.strategy, dict(trial.model.named_parameters()))
    trial.model.zero_grad(set_to_none=True)
    return counter.total, forward


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextmanager
def _gradients_of(model: nn.Module) -> Iterator[list[int]]:
    """Yield the sizes of the model's gradients in their order, filled in backward."""
    sizes: list[int] = []
    trained = [p for p in model.parameters() if p.requires_grad]
    hooks = [
        p.register_post_accumulate_grad_hook(lambda done: sizes.append(done.nbytes))
        for p in trained
    ]
    try:
        yield sizes
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _sizes_of(modules: list[nn.Module], saved: Saved) -> Iterator[dict[nn.Module, int]]:
    """Yield the bytes that the forward pass of each module saves, filled as it runs."""
    sizes = dict.fromkeys(modules, 0)

    def begin(module: nn.Module, args: Any) -> None:
        sizes[module] -= saved.num_bytes

    def end(module: nn.Module, args: Any, out: Any) -> None:
        sizes[module] += saved.num_bytes

    hooks = [module.register_forward_pre_hook(begin) for module in modules]
    hooks += [module.register_forward_hook(end) for module in modules]
    try:
        yield sizes
    finally:
        for hook in hooks:
            hook.remove()
