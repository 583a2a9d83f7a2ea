"""What a parallel strategy does, and the plainest one: a single device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from trainer.config.schema import Config
from trainer.distributed.world import World
from trainer.engine.means import count_rows
from trainer.engine.precision import Precision
from trainer.errors import CheckpointError, ConfigError
from trainer.strategy.batchnorm import synchronize

MicroBatch = tuple[Any, Any]


class Loss(Protocol):
    """(outputs, targets) -> (a sum whose gradient is wanted, times `scale`; what rides with the gradients)."""

    @property
    def scale(self) -> float: ...
    def __call__(self, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]: ...


class MicroBatches(Protocol):
    """One rank's share of a global batch. Each is augmented, and dropout seeded for it, as it is taken: run it then."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[MicroBatch]: ...


class Strategy(ABC):
    """How one model is trained over the ranks. `module` is the user's model, whatever wraps it."""

    module: nn.Module
    flops = 0.0  # of one example, forward and backward

    def __init__(self, config: Config, world: World, precision: Precision):
        self.config, self.world, self.precision = config.strategy, world, precision
        self._is_compiled = config.run.compile
        self.data_parallel_rank, self.data_parallel_size = world.rank, world.world_size
        self._parameters: list[nn.Parameter] = []
        self._running: list[torch.Tensor] = []

    @classmethod
    def check(cls, config: Config, world: World) -> None:  # most have nothing to refuse
        """Refuse, by ConfigError and before any group exists, what cannot work."""

    @abstractmethod
    def wrap(self, model: nn.Module, rehearsal: MicroBatch, loss: Loss) -> nn.Module:
        """Move, convert and wrap the model, and rehearse one micro-batch without leaving a trace in it."""

    @abstractmethod
    def forward_backward(
        self, model: nn.Module, micro_batches: MicroBatches, loss: Loss
    ) -> torch.Tensor:
        """Gradients of one global batch from this rank's share; the sum over all of what the loss carries, (2,)."""

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """Outputs for evaluation; every rank calls it equally often."""
        with self.precision.autocast():
            return call(self.module, inputs)

    def tell_gradients(self, hook: Callable[[Any], None]) -> None:
        """Have `hook` called when this rank's last gradient is there and waiting for the others' begins."""

    def lay_out(self, inputs: Any) -> Any:
        """Images in the memory format of the model."""
        if not self.config.channels_last:
            return inputs
        last = torch.channels_last
        return tree_map_only(
            torch.Tensor, lambda t: t.contiguous(memory_format=last) if t.dim() == 4 else t, inputs
        )

    def keep_gradients(self, optimizers: Sequence[Optimizer]) -> None:
        """Drop those that are not of these optimizers' parameters."""
        kept = {
            id(p)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        for parameter in self._parameters:
            if id(parameter) not in kept:
                parameter.grad = None

    def running_statistics(self) -> list[torch.Tensor]:
        """Copies of the buffers that a forward pass changes."""
        return [buffer.clone() for buffer in self._running]

    @torch.no_grad()
    def undo_running_statistics(
        self, before: Sequence[torch.Tensor], found_inf: torch.Tensor
    ) -> None:
        """Put the copies back where a step was skipped: what was not finite is in the statistics already."""
        for buffer, was in zip(self._running, before, strict=True):
            buffer.copy_(torch.where(found_inf.to(buffer.device) > 0, was, buffer))

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """The global gradient norm, after scaling the gradients down to `max_norm`."""
        gradients = self.gradients()
        if self.precision.dtype in (torch.bfloat16, torch.float16):
            gradients = [
                gradient.float() for gradient in gradients
            ]  # their sum of squares would overflow
        norm = get_total_norm(gradients)
        clip_grads_with_norm_(self._parameters, max_norm, norm)
        return norm

    def state_dict(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Full state with the names of the unwrapped model. Every rank calls it; rank 0 has the tensors."""
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        return {
            "model": self.module.state_dict(),
            "optimizers": [_named(optimizer, names) for optimizer in optimizers],
        }

    def load_state_dict(
        self, model: nn.Module, optimizers: Sequence[Optimizer], state: dict[str, Any]
    ) -> None:
        """Raises CheckpointError, naming the first difference, for the state of another model or optimizer."""
        _check_model(self.module.state_dict(), state["model"])
        self.module.load_state_dict(state["model"])
        if optimizers and len(state["optimizers"]) != len(optimizers):
            raise CheckpointError(
                f"the checkpoint holds {len(state['optimizers'])} optimizers, the task builds {len(optimizers)}"
            )
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=False):
            _load_named(optimizer, names, saved)

    def place(self, model: nn.Module) -> None:
        """Move and convert the model: all that evaluation needs."""
        self.module = model.to(dtype=self.precision.dtype)
        if self.config.devices_per_rank == 1:  # else the model has placed its parts itself
            self.module.to(self.world.device)
        if self.config.channels_last:
            self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.config.sync_batchnorm and self.data_parallel_size > 1:
            self.module = synchronize(self.module, self.world.device)
        self._note_parameters()
        if not self._parameters:
            raise ConfigError("build_model returned a model without trainable parameters")

    def rehearse(self, micro_batch: MicroBatch, loss: Loss) -> None:
        """Forward and backward on the bare module: lazy layers make their weights, operations are counted."""
        inputs, targets = micro_batch
        with _FlopCounter() as counter:
            with self.precision.autocast():
                total, _ = loss(call(self.module, inputs), targets)
            total.backward()
        self.flops = counter.total / count_rows(targets, inputs)
        self._note_parameters()
        if self._is_compiled:
            # Not Module.compile: it leaves modules of torch itself, such as nn.Sequential, as they are. Names stay.
            self.module.forward = torch.compile(self.module.forward)

    def _note_parameters(self) -> None:
        self._parameters = [p for p in self.module.parameters() if p.requires_grad]


class SingleDevice(Strategy):
    """One process, one device."""

    @classmethod
    def check(cls, config: Config, world: World) -> None:
        if world.world_size > 1:
            raise ConfigError(
                f"strategy=single: works on 1 rank, and {world.world_size} were started; use strategy=ddp"
            )

    def wrap(self, model: nn.Module, rehearsal: MicroBatch, loss: Loss) -> nn.Module:
        self.place(model)
        with untouched(self.module) as before:
            self.rehearse(rehearsal, loss)
            self._running = changed_buffers(self.module, before)
        return self.module

    def forward_backward(
        self, model: nn.Module, micro_batches: MicroBatches, loss: Loss
    ) -> torch.Tensor:
        totals = None
        for inputs, targets in micro_batches:
            with self.precision.autocast():
                total, carried = loss(call(model, inputs), targets)
            total.backward(self.precision.root(total, loss.scale))
            totals = carried if totals is None else totals + carried
        assert totals is not None
        return totals


class _FlopCounter(TorchDispatchMode):
    """torch's formulas by operation. FlopCounterMode itself would import torch._dynamo: 0.7 s more at every start."""

    total = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        return out


def call(model: nn.Module, inputs: Any) -> Any:
    """`model(inputs)` for a tensor, `model(*inputs)` for a tuple or list, `model(**inputs)` for a dict."""
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


@contextmanager
def untouched(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Run a block, then put the model's buffers back and drop its gradients. Yields the buffers as they were."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers() if not is_lazy(buffer)}
    try:
        yield before
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in before:
                    buffer.copy_(before[name])
        model.zero_grad(set_to_none=True)


def changed_buffers(model: nn.Module, before: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The floating buffers that are not as they were: running statistics, and not constants."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    return [
        b for name, b in buffers.items() if name not in before or not torch.equal(b, before[name])
    ]


def _check_model(ours: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    advice = "resume with the task and model it was trained with"
    for name, tensor in ours.items():
        if name not in saved:
            raise CheckpointError(f"the checkpoint is of another model: it has no {name}; {advice}")
        if (
            isinstance(tensor, torch.Tensor)
            and not is_lazy(tensor)
            and tensor.shape != saved[name].shape
        ):
            shapes = f"{tuple(saved[name].shape)} in it and {tuple(tensor.shape)} here"
            raise CheckpointError(
                f"the checkpoint is of another model: {name} is {shapes}; {advice}"
            )
    for name in saved:
        if name not in ours:
            raise CheckpointError(
                f"the checkpoint is of another model: {name} is not in the model built here; {advice}"
            )


def remember_options(optimizer: Optimizer) -> None:
    """Note each group's options as built, so that a resume can tell what the config changed from what training did."""
    for group in optimizer.param_groups:
        group["initial"] = {key: value for key, value in group.items() if key != "params"}


def _named(optimizer: Optimizer, names: dict[Any, str]) -> dict[str, Any]:
    """An optimizer's state by parameter name: the order in which parameters were registered does not matter."""
    groups = [
        {
            "names": [names[p] for p in group["params"]],
            "options": {k: v for k, v in group.items() if k != "params"},
        }
        for group in optimizer.param_groups
    ]
    state = {names[p]: dict(state) for p, state in optimizer.state.items()}
    return {"class": type(optimizer).__name__, "state": state, "groups": groups}


def _load_named(optimizer: Optimizer, names: dict[Any, str], saved: dict[str, Any]) -> None:
    ours = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    name = type(optimizer).__name__
    if name != saved["class"]:
        raise CheckpointError(
            f"the checkpoint is of another optimizer: {saved['class']} in it and {name} here"
        )
    if ours != [group["names"] for group in saved["groups"]]:
        raise CheckpointError(
            f"the checkpoint is of another optimizer: {name} groups other parameters here than there"
        )
    order = [name for group in ours for name in group]
    groups, first = [], 0
    for group, old in zip(optimizer.param_groups, saved["groups"], strict=True):
        was, now = old["options"]["initial"], group["initial"]
        kept = {k: v for k, v in old["options"].items() if k in now and was.get(k) == now[k]}
        options = {k: v for k, v in group.items() if k != "params"} | kept
        last = first + len(group["params"])
        groups.append(options | {"params": list(range(first, last))})
        first = last
    state = {
        number: saved["state"][name] for number, name in enumerate(order) if name in saved["state"]
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups})
