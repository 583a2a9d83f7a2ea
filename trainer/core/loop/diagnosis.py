"""Diagnosis: failures of a run in one line, the example of a bad step, ranks that drift apart."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from trainer.base.codec import digest
from trainer.base.errors import ConfigError, RunError, one_line, place_of
from trainer.core.blame import (
    LOSS_HOOK,
    find_rows,
    is_of_compiler,
    is_of_second_backward,
    is_without_gpu,
    place_in_task,
)
from trainer.core.config.schema import Config
from trainer.core.config.typed import show, suggest_attribute
from trainer.core.data.batches import LocalBatch
from trainer.core.data.workers import workers_named
from trainer.core.distributed.group import Group, find_odd_ranks, number_of
from trainer.core.distributed.watch.phases import name_ranks
from trainer.core.engine.context import Hooks
from trainer.core.engine.engine import Engine
from trainer.core.engine.training_state import ABSENT_DIGEST, Shards
from trainer.core.engine.values import weigh_all
from trainer.core.hook_calls import call
from trainer.core.micro_batch import count_rows, slice_rows
from trainer.core.setup.capacity import memory_named
from trainer.core.state.sandbox import keep_modes, keep_passes, sandbox
from trainer.core.strategy import find_strategy
from trainer.core.strategy.mesh_sizes import SHARDED, WHOLE, Mesh
from trainer.core.strategy.modules.batchnorm import has_batchnorm
from trainer.core.task import Task

TENSOR_FORMS = ((), WHOLE, SHARDED)  # the axes along which ranks have other parts of a tensor
Digests = dict[str, int]


def check_drift(group: Group, step: int, state: Shards, mesh: Mesh) -> None:
    """Compare weights, buffers and optimizer state by digest, over the ranks with the same parts.

    Integer tensors are left out: a buffer may count a rank's own rows. Raises the same RunError on
    every rank, naming the first tensor that differs and the ranks. Collective: every rank must
    call it.
    """
    parts = {form: _digest_all(state, form) for form in TENSOR_FORMS}
    numbers: list[int] = []
    own: dict[int, Digests] = {}
    for form, digests in parts.items():
        part_index = len(numbers) + mesh.number_of_part(*form)
        numbers += [ABSENT_DIGEST] * mesh.num_parts(*form)
        if digests:
            own[part_index] = digests
            numbers[part_index] = number_of(digests)
    unequal = group.find_unequal(torch.tensor(numbers), ABSENT_DIGEST).nonzero()
    if not len(unequal):
        return
    name, ranks = find_odd_ranks(group, own.get(int(unequal[0])))
    usual = max(ranks, key=lambda pair: len(pair[1]), default=None)  # of two, that of the first
    drifted = name_ranks(rank for pair in ranks if pair is not usual for rank in pair[1])
    raise RunError(f"""step {step}: {name} on {drifted} differs from the other ranks;
        a rank changed only its own copy, or memory failed;
        resume from an earlier checkpoint with run.resume""")


def _digest_all(state: Shards, form: tuple[str, ...]) -> Digests:
    return {
        f"{kind}.{name}".replace("/", "."): digest(shard.tensor)
        for kind, shards in state.items()
        for name, shard in shards.items()
        if shard.axes == form and shard.tensor.is_floating_point() and kind != "ema"
    }


MOST_RANKS_NAMED = 8


@dataclass(frozen=True)
class Example:
    """A recomputed row of a step; its loss is the weighted mean of its values."""

    index: int
    loss: float
    weight: float
    is_finite: bool
    has_finite_gradient: bool

    @property
    def is_bad(self) -> bool:
        return not (self.is_finite and self.has_finite_gradient)


def name_bad_examples(engine: Engine, hooks: Hooks, batch: LocalBatch, group: Group) -> str:
    """Return a line with the examples that made a batch not finite, and their ranks.

    It recomputes the batch; the weights may have had one more update since. The line is the same on
    every rank. Collective: every rank must call it.
    """
    try:
        bad = [e for e in examine(engine, hooks, batch) if e.is_bad]
        line = _name_bad(bad) if engine.strategy.mesh.is_counted else ""
    except Exception as error:  # a custom train_step may have other losses
        line = f"recomputing it failed ({type(error).__name__})"
    lines = [(rank, line) for rank, line in enumerate(group.collect(line)) if line]
    named = [f"{line}, on rank {rank}" for rank, line in lines[:MOST_RANKS_NAMED]]
    if len(lines) > len(named):
        named.append(f"and more on {name_ranks(rank for rank, _ in lines[len(named) :])}")
    line = group.tell_all("; ".join(named))
    nothing = "the gradient is not finite, and recomputation finds no example as the cause"
    return line or nothing


def _name_bad(bad: list[Example]) -> str:
    parts = []
    for e in bad[:3]:
        loss = f"loss of example {e.index} is not finite ({e.loss})"
        parts.append(
            f"the gradient of example {e.index} is not finite" if e.is_finite else f"the {loss}"
        )
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return ", ".join(parts) + more


def examine(engine: Engine, hooks: Hooks, batch: LocalBatch) -> list[Example]:
    """Recompute this rank's examples of a batch; the model and its buffers do not change.

    Gradients are dropped. BatchNorm uses its running statistics: with batch statistics, one bad
    example would make all others bad.
    """
    with (
        engine.strategy.tensors.whole() as module,
        sandbox(keep_modes(module), keep_passes(module)),
        engine.draws.update("loss"),
    ):
        module.train(not has_batchnorm(module))
        return _examine(engine, hooks, module, batch)


def _examine(engine: Engine, hooks: Hooks, module: nn.Module, batch: LocalBatch) -> list[Example]:
    examples: list[Example] = []
    compute = partial(_losses, engine, hooks, module)
    parameters = [p for p in module.parameters() if p.requires_grad]
    for indices, (inputs, targets) in zip(batch.indices, batch, strict=True):
        totals, weights = (each.detach() for each in compute(inputs, targets))
        finite = totals.isfinite()
        bad: list[int] = []
        if finite.all():  # otherwise no gradient of the micro-batch is finite
            bad = _find_bad_gradients(engine, compute, parameters, inputs, targets, len(totals))
        losses = torch.where(weights > 0, totals / weights, totals)
        columns = [each.tolist() for each in (indices, losses, weights, finite)]
        for row, (index, loss, weight, is_finite) in enumerate(zip(*columns, strict=True)):
            examples.append(Example(index, loss, weight, is_finite, row not in bad))
    return examples


def _losses(
    engine: Engine, hooks: Hooks, module: nn.Module, inputs: Any, targets: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rows,) sums of the weighted loss values of each example, and (rows,) weights."""
    with engine.strategy.precision.autocast():
        outputs = call(module, inputs)
        rows = count_rows(targets, outputs)
        values, weights = weigh_all("loss", hooks.loss(outputs, targets), rows)
    rows_of = [each.reshape(len(values), -1).sum(1) for each in (values * weights, weights)]
    return rows_of[0], rows_of[1]


def _find_bad_gradients(
    engine: Engine,
    compute: Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor]],
    parameters: Sequence[nn.Parameter],
    inputs: Any,
    targets: Any,
    num_rows: int,
) -> list[int]:
    """Return the rows whose gradient is not finite.

    Rows are recomputed apart from each other, since inf x 0 is not 0.
    """

    def fails(first: int, last: int) -> bool:
        engine.draws.begin_again(first, last)
        total = compute(*slice_rows((inputs, targets), first, last, num_rows))[0].sum()
        gradients: Any = ()
        if total.requires_grad:
            gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        return not all(bool(g.isfinite().all()) for g in gradients if g is not None)

    return list(find_rows(fails, num_rows))


TWICE = (
    f"backward() went twice through the graph of {LOSS_HOOK}: leave the call out of hooks, "
    "since the trainer makes it; if the model keeps a tensor for the next batch, detach() it"
)
_READY_TWICE = re.compile(r"with name (\S+) has been marked as ready twice")


class EarlyExit(SystemExit):
    """os._exit(0), called by the task in the process of the run."""


@contextmanager
def failures_named(group: Group, config: Config) -> Iterator[None]:
    """Raise RunError, one line, if a peer or data worker exits or hangs, or memory is not enough.

    And ConfigError if torch cannot compile the model on this machine, such as without g++, if the
    task asks for a GPU that is not there, or if a backward pass was made before the trainer's.

    On sys.exit and os._exit too: a run that ends before its last step is not done, even with exit
    code 0. And on a KeyboardInterrupt of the task, since Ctrl-C is a stop request.
    """
    advice = "raise an error, or set run.steps to end earlier"
    kind = find_strategy(config.strategy)
    with (
        group.peers_named(),
        workers_named(),
        memory_named(config, group.world),
        exits_raised(),
        kind.failures_named(Mesh.of(config.strategy.mesh, group.world)),
    ):
        try:
            yield
        except EarlyExit as error:
            raise RunError(f"{error}; {advice}") from None
        except SystemExit as error:
            raise RunError(f"""sys.exit({error.code!r}) was called at {place_of(error)};
                {advice}""") from None
        except KeyboardInterrupt as error:
            raise RunError(f"KeyboardInterrupt was raised at {place_of(error)}") from None
        except (RuntimeError, AssertionError, AttributeError) as error:
            if line := _explain(error, config):
                raise ConfigError(line) from error
            raise


def _explain(error: Exception, config: Config) -> str:
    """Return the line for an exception of torch's that a task or machine causes; empty if none."""
    if is_of_second_backward(error):
        return TWICE
    if match := _READY_TWICE.search(str(error)):
        name = match[1].removeprefix("module.")
        why = f"the parameter {name} gets a gradient twice in one backward pass, as reentrant"
        advice = "use checkpoint(..., use_reentrant=False), or strategy.static_graph=true"
        return f"strategy=ddp: {why} recomputation gives; {advice}"
    if is_without_gpu(error):
        why = "torch sees no GPU here; leave out .cuda() and .to(): the trainer moves the model"
        return f"{one_line(error)[:300]}{place_in_task(error)}: {why} and its batches"
    if isinstance(error, AttributeError):
        return _explain_attribute(error, error.obj, error.name or "")
    if is_of_compiler(error):
        why = f"torch cannot compile here: {one_line(error)[:300]}"
        return f"run.compile={show(config.run.compile)}: {why}; use run.compile=false"
    return ""


def _explain_attribute(error: AttributeError, owner: object, name: str) -> str:
    """Return the line for an attribute that a task or a mapping of settings does not have."""
    missing = f"{type(owner).__name__} has no attribute {name}{place_in_task(error)}"
    if isinstance(owner, Mapping) and name in owner:
        return f"{missing}; use [{name!r}]"
    public_names = [each for each in dir(owner) if not each.startswith("_")]
    advice = suggest_attribute(name, public_names) if isinstance(owner, Task) else ""
    return f"{missing}; {advice}" if advice else ""


@contextmanager
def exits_raised() -> Iterator[None]:
    """Raise EarlyExit if this thread calls os._exit(0), which launchers take for success.

    Another thread of this process exits with 1, and a process that the task forked as it asks.
    """
    leave = os._exit
    pid = os.getpid()
    thread = threading.get_ident()

    def leave_as_failure(status: int) -> NoReturn:
        if status or os.getpid() != pid:
            leave(status)
        frame = sys._getframe(1)
        what = f"os._exit(0) was called at {frame.f_code.co_filename}:{frame.f_lineno}"
        if threading.get_ident() == thread:
            raise EarlyExit(what)
        print(f"error: {what}, in another thread", file=sys.stderr, flush=True)
        leave(1)

    os._exit = leave_as_failure
    try:
        yield
    finally:
        os._exit = leave
