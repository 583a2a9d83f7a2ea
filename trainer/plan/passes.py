"""Forward and backward pass of a micro-batch without values: its activations and operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from trainer.engine.means import Means
from trainer.engine.objective import Objective
from trainer.errors import ConfigError, one_line
from trainer.hook_errors import call
from trainer.micro_batch import take_rows
from trainer.plan.counting import KINDS
from trainer.plan.trial import Trial
from trainer.strategy.cost import Message
from trainer.strategy.modules.activation_checkpoint import ActivationCheckpoint, recompute
from trainer.strategy.modules.dry_run import FlopCounter
from trainer.strategy.modules.reached_parameters import check_reached

ACTIVATIONS, GRADIENTS = "sends of activations", "sends of gradients"


@dataclass(frozen=True)
class Passes:
    """Cost of the passes of one micro-batch on a rank of a stage, in bytes and operations.

    `saved` is kept from forward to backward. `recomputed` is the largest module's part that
    strategy.recompute makes again in backward; `flops_again` are the operations for that.
    `gradients` are the sizes of the gradients, in the order in which backward has them. If the
    passes could not be run, `problem` is the reason, and the numbers are 0.
    """

    saved: int = 0
    recomputed: int = 0
    flops: float = 0.0
    flops_again: float = 0.0
    gradients: Sequence[int] = ()
    sent: Sequence[Message] = ()
    problem: str = ""


class PipelinePass:
    """A pass through the stages of a pipeline: what each one saves, computes and sends.

    Autograd runs the stages backward one after another, as it takes the newest operation first.
    """

    def __init__(self, trial: Trial, num_stages: int):
        self.current = 0
        self.saved = [0] * num_stages
        self.forward = [0.0] * num_stages
        self.flops = [0.0] * num_stages
        self.counter = FlopCounter()
        self._counted = 0.0
        own = [*trial.model.module.parameters(), *trial.model.module.buffers()]
        kept = {_key(tensor): tensor.untyped_storage() for tensor in own}
        self._kept = [dict(kept) for _ in range(num_stages)]  # so that a key stays its own
        inputs = tree_leaves(trial.batch[0])
        self._inputs = {_key(tensor) for tensor in inputs if isinstance(tensor, torch.Tensor)}
        self._sent: list[dict[tuple[str, str], list[float]]] = [{} for _ in range(num_stages)]

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor that autograd keeps for backward: each storage counts once."""
        is_shared = self.current == 0 and _key(tensor) in self._inputs
        for stage in range(len(self.saved)) if is_shared else (self.current,):
            self._keep(stage, tensor)  # all stages run what comes before the first block
        return tensor

    def _keep(self, stage: int, tensor: torch.Tensor) -> None:
        if _key(tensor) not in self._kept[stage]:
            storage = tensor.untyped_storage()
            self._kept[stage][_key(tensor)] = storage
            self.saved[stage] += storage.nbytes()

    def note(self, axis: str, kind: str, num_bytes: float) -> None:
        """Note a message of the current stage."""
        self._note(self.current, axis, kind, num_bytes)

    def _note(self, stage: int, axis: str, kind: str, num_bytes: float) -> None:
        found = self._sent[stage].setdefault((axis, kind), [0, 0.0])
        found[0] += 1
        found[1] += num_bytes

    def sent(self, stage: int) -> list[Message]:
        found = self._sent[stage].items()
        return [
            Message(axis, _name_kind(axis, kind), int(count), num_bytes)
            for (axis, kind), (count, num_bytes) in found
        ]

    def go_to(self, stage: int) -> None:
        """Continue in a stage."""
        self.flops[self.current] += self.counter.total - self._counted
        self._counted = self.counter.total
        self.current = stage

    def turn(self) -> None:
        """Continue with the backward pass."""
        self.go_to(self.current)
        self.forward = list(self.flops)

    def enter(self, stage: int, args: Any) -> None:
        """Hand the arguments of a stage's first block over to it, and later their gradients."""
        self.go_to(stage)
        if stage == 0:
            return
        for tensor in tree_leaves(args):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                for each in (stage - 1, stage):
                    self._keep(each, tensor)
                self._note(stage - 1, "pipeline", ACTIVATIONS, tensor.nbytes)
                self._note(stage, "pipeline", GRADIENTS, tensor.nbytes)
                tensor.register_hook(lambda _: self.go_to(stage - 1))


def _name_kind(axis: str, kind: str) -> str:
    what = "keys and values" if axis == "context" else "activations"
    return f"{kind} of {what}" if kind in KINDS else kind


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def run_passes(trial: Trial) -> list[Passes]:
    """Run the passes of one micro-batch; return their costs for a rank of each stage.

    Raises ConfigError where a real run would. Any other error becomes `problem`.
    """
    try:
        with trial.mode:
            return _run(trial)
    except ConfigError:
        raise
    except Exception as error:  # of the task's code, or an operation that reads values
        problem = f"{type(error).__name__}: {one_line(error)[:80]}"
        return [Passes(problem=problem) for _ in trial.model.partition.blocks_of]


def _run(trial: Trial) -> list[Passes]:
    _rehearse_draws(trial)
    model = trial.model.module
    recompute(model, trial.config.strategy.recompute, trial.model.blocks)
    modules = [m for m in model.modules() if isinstance(m.forward, ActivationCheckpoint)]
    stages = range(len(trial.model.partition.blocks_of))
    followed = PipelinePass(trial, len(stages))
    with _gradients_of(model) as gradients:
        _follow(trial, followed)
    made = [
        Passes(followed.saved[n], 0, followed.flops[n], 0.0, gradients, followed.sent(n))
        for n in stages
    ]
    for module in modules:
        again: Any = module.forward
        module.forward = again.inner
    if modules:
        whole = PipelinePass(trial, len(stages))
        with _sizes_of(modules, whole) as sizes:
            _follow(trial, whole)
        every = zip(made, sizes, whole.forward, strict=True)
        return [replace(each, recomputed=size, flops_again=again) for each, size, again in every]
    return made


def _objective(trial: Trial) -> Objective:
    ranks = trial.mesh.data_size if trial.kind.averages else 1
    objective = Objective("loss", Means(), trial.config.data.global_batch, ranks)
    return objective.of(trial.task.loss)


def _rehearse_draws(trial: Trial) -> None:
    if trial.draws.is_known("loss"):
        return
    objective = _objective(trial)

    def compute(inputs: Any, targets: Any) -> None:
        with _cut(trial, inputs, targets) as (inputs, targets), trial.precision.autocast():
            objective(call(trial.model.module, inputs), targets)

    unit = trial.config.norm_rows or 1
    trial.draws.rehearse("loss", compute, take_rows(trial.batch, 3 * unit), unit)


@contextmanager
def _cut(trial: Trial, inputs: Any, targets: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a rank's positions of a micro-batch, and gather those of others in attention."""
    if trial.model.context is None:
        yield inputs, targets
        return
    with trial.model.context:
        yield trial.model.context.cut(inputs, targets)


def _follow(trial: Trial, followed: PipelinePass) -> None:
    """Run forward and backward."""
    objective = _objective(trial)
    blocks_of = trial.model.partition.blocks_of if trial.mesh.pipeline > 1 else ()
    firsts = [trial.model.blocks[numbers[0]] for numbers in blocks_of]
    hooks = [_follow_into(block, stage, followed) for stage, block in enumerate(firsts)]
    try:
        with (
            trial.traffic.noting(followed.note),
            followed.counter,
            trial.draws.update("loss"),
            _cut(trial, *trial.batch) as cut,
        ):
            inputs, targets = cut
            trial.draws.begin(0, 0, torch.arange(trial.rows))
            with saved_tensors_hooks(followed.pack, _same), trial.precision.autocast():
                total, _ = objective(call(trial.model.module, inputs), targets)
            followed.turn()
            torch.autograd.backward(total, trial.precision.root(total, objective.scale))
        followed.go_to(0)
    finally:
        for hook in hooks:
            hook.remove()
    if trial.mesh.size > 1:
        trained = {name: p for name, p in trial.model.module.named_parameters() if p.requires_grad}
        check_reached(trial.config.strategy, trained)
    trial.model.module.zero_grad(set_to_none=True)


def _follow_into(block: nn.Module, stage: int, followed: PipelinePass) -> Any:
    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        followed.enter(stage, (args, kwargs))

    return block.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)


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
def _sizes_of(modules: list[nn.Module], followed: PipelinePass) -> Iterator[list[int]]:
    """Yield the most bytes that a module saves in forward, by stage, filled as modules run."""
    most = [0] * len(followed.saved)
    before: dict[nn.Module, int] = {}

    def begin(module: nn.Module, args: Any) -> None:
        before[module] = followed.saved[followed.current]

    def end(module: nn.Module, args: Any, out: Any) -> None:
        stage = followed.current
        most[stage] = max(most[stage], followed.saved[stage] - before[module])

    hooks = [module.register_forward_pre_hook(begin) for module in modules]
    hooks += [module.register_forward_hook(end) for module in modules]
    try:
        yield most
    finally:
        for hook in hooks:
            hook.remove()
