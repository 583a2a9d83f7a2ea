"""Forward and backward pass on fake tensors: activations, operations and messages of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from trainer.base.errors import ConfigError, one_line
from trainer.check.plan_trial import COLLECTIVE_KINDS, PlanTrial
from trainer.core.engine.means import Means
from trainer.core.engine.objective import Objective, UpdateLoss
from trainer.core.hook_calls import call
from trainer.core.micro_batch import take_rows
from trainer.core.strategy.cost import Message
from trainer.core.strategy.modules.dry_run import FlopCounter, check_reached, hooked
from trainer.core.strategy.modules.tensor_memory import ActivationCheckpoint

ACTIVATION_SENDS, GRADIENT_SENDS = "sends of activations", "sends of gradients"


@dataclass(frozen=True)
class Passes:
    """Cost of the passes of one micro-batch on a rank of a stage, in bytes and operations.

    `saved` is kept from forward to backward. `recomputed` is the largest module's part that
    strategy.recompute makes again in backward; `flops_again` are the operations for that.
    `gradients` are the sizes of the gradients, in the order in which backward has them. `values` of
    an example are those of the loss; with `is_weighted` some of them, such as padding, count less.
    If the passes could not be run, `problem` is the reason, and the numbers are 0.
    """

    saved: int = 0
    recomputed: int = 0
    flops: float = 0.0
    flops_again: float = 0.0
    gradients: Sequence[int] = ()
    sent: Sequence[Message] = ()
    values: int = 0
    is_weighted: bool = False
    problem: str = ""


@dataclass(frozen=True)
class Tokens:
    """Tokens of an example, 0 if it has none, and whether some of them may be padding."""

    count: int
    has_padding: bool


class PipelinePass:
    """A pass through the stages of a pipeline: what each one saves, computes and sends.

    Autograd runs the stages backward one after another, as it takes the newest operation first.
    """

    def __init__(self, trial: PlanTrial, num_stages: int):
        self.current = 0
        self.saved = [0] * num_stages
        self.forward = [0.0] * num_stages
        self.flops = [0.0] * num_stages
        self.counter = FlopCounter()
        self._counted = 0.0
        own = [*trial.model.parameters(), *trial.model.buffers()]
        storages = {_key(tensor): tensor.untyped_storage() for tensor in own}
        self._kept = [dict(storages) for _ in range(num_stages)]  # so that a key stays its own
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
        totals = self._sent[stage].setdefault((axis, kind), [0, 0.0])
        totals[0] += 1
        totals[1] += num_bytes

    def sent(self, stage: int) -> list[Message]:
        totals = self._sent[stage].items()
        return [
            Message(axis, _name_kind(axis, kind), int(count), num_bytes)
            for (axis, kind), (count, num_bytes) in totals
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
                self._note(stage - 1, "pipeline", ACTIVATION_SENDS, tensor.nbytes)
                self._note(stage, "pipeline", GRADIENT_SENDS, tensor.nbytes)
                tensor.register_hook(lambda _: self.go_to(stage - 1))


def _name_kind(axis: str, kind: str) -> str:
    what = "keys and values" if axis == "context" else "activations"
    return f"{kind} of {what}" if kind in COLLECTIVE_KINDS else kind


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def run_passes(trial: PlanTrial) -> list[Passes]:
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
        return [Passes(problem=problem) for _ in trial.strategy.partition.blocks_of]


def _run(trial: PlanTrial) -> list[Passes]:
    _trace_draws(trial)
    model = trial.model
    modules = [m for m in model.modules() if isinstance(m.forward, ActivationCheckpoint)]
    stages = range(len(trial.strategy.partition.blocks_of))
    followed = PipelinePass(trial, len(stages))
    with _gradients_of(model) as gradients:
        objective = _follow(trial, followed)
    form = (objective.elements, bool(objective.is_weighted))
    costs = [
        Passes(followed.saved[n], 0, followed.flops[n], 0.0, gradients, followed.sent(n), *form)
        for n in stages
    ]
    for module in modules:
        again: Any = module.forward
        module.forward = again.inner
    if modules:
        whole = PipelinePass(trial, len(stages))
        with _sizes_of(modules, whole) as sizes:
            _follow(trial, whole)
        every = zip(costs, sizes, whole.forward, strict=True)
        return [replace(each, recomputed=size, flops_again=again) for each, size, again in every]
    return costs


def _objective(trial: PlanTrial) -> UpdateLoss:
    ranks = trial.mesh.data_size if trial.kind.averages else 1
    objective = Objective("loss", Means(), trial.config.data.global_batch, ranks)
    return objective.of(trial.task.loss)


def _trace_draws(trial: PlanTrial) -> None:
    objective = _objective(trial)

    def compute(inputs: Any, targets: Any) -> None:
        with _cut(trial, inputs, targets) as (inputs, targets), trial.parts.precision.autocast():
            objective(call(trial.model, inputs), targets)

    unit = trial.config.norm_rows or 1
    trial.parts.draws.trace_draws("loss", compute, take_rows(trial.batch, 3 * unit), unit)


@contextmanager
def _cut(trial: PlanTrial, inputs: Any, targets: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a rank's positions of a micro-batch, and gather those of others in attention."""
    if trial.strategy.context is None:
        yield inputs, targets
        return
    with trial.strategy.context:
        yield trial.strategy.context.cut(inputs, targets)


def _follow(trial: PlanTrial, followed: PipelinePass) -> Objective:
    """Run forward and backward, and return the loss, which then knows its form."""
    objective = _objective(trial)
    blocks_of = trial.strategy.partition.blocks_of if trial.mesh.pipeline > 1 else ()
    firsts = [trial.strategy.spec.blocks[numbers[0]] for numbers in blocks_of]
    precision = trial.parts.precision
    with (
        hooked(_follow_into(block, stage, followed) for stage, block in enumerate(firsts)),
        trial.traffic.noting(followed.note),
        followed.counter,
        trial.parts.draws.update("loss"),
        _cut(trial, *trial.batch) as (inputs, targets),
    ):
        trial.parts.draws.begin(0, 0, torch.arange(trial.rows))
        with saved_tensors_hooks(followed.pack, _same), precision.autocast():
            total, _ = objective(call(trial.model, inputs), targets)
        followed.turn()
        torch.autograd.backward(total, precision.root(total, objective.scale))
    followed.go_to(0)
    if trial.mesh.size > 1:
        trained = {name: p for name, p in trial.model.named_parameters() if p.requires_grad}
        check_reached(trial.config.strategy, trained)
    trial.model.zero_grad(set_to_none=True)
    return objective.objective


def count_tokens(trial: PlanTrial, passes: Passes) -> Tokens:
    """Count the tokens of an example.

    It has tokens if its loss has several values and an input is integers (rows, positions).
    """
    inputs = [each for each in tree_leaves(trial.batch[0]) if isinstance(each, torch.Tensor)]
    kinds = (torch.uint8, torch.int16, torch.int32, torch.int64)
    rows = [each for each in inputs if each.dim() == 2 and each.dtype in kinds]
    count = max((each.shape[1] for each in rows), default=0) if passes.values > 1 else 0
    return Tokens(count, passes.is_weighted)


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

    def note(parameter: torch.Tensor) -> None:
        sizes.append(parameter.nbytes)

    with hooked(p.register_post_accumulate_grad_hook(note) for p in trained):
        yield sizes


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
    with hooked(hooks):
        yield most
