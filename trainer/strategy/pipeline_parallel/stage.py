"""Pipeline parallel: each stage has some of the model's blocks.

Every stage runs the model's own forward pass. The tensors of other stages are on torch's meta
device, where operations compute shapes only. A stage receives the arguments of its first block that
are on the meta device. It computes the others from the inputs itself, such as a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from trainer.errors import ConfigError
from trainer.hook_errors import call
from trainer.rng.forward import Draws
from trainer.strategy.modules.dry_run import FlopCounter
from trainer.strategy.modules.meta_shapes import compute_shapes, to_meta
from trainer.strategy.pipeline_parallel.p2p import P2P, ReceivedTensor

_MOVE = torch.ops.aten._to_copy.default


class OnMeta(TorchDispatchMode):
    """A mode in which an operation with an argument on the meta device runs there."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each operation passes through a wrapper of torch.compile

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _MOVE and args[0].is_meta and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": args[0].device}  # it has no values to move
        if (results := compute_shapes(func, args, kwargs)) is not NotImplemented:
            return results
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(t.is_meta for t in tensors) and not all(t.is_meta for t in tensors):
            if func._schema.is_mutable and not tensors[0].is_meta:
                given = f"{func.__name__} writes activations into a tensor made before the blocks"
                raise ConfigError(f"strategy.mesh.pipeline: {given}; make a new tensor")
            args, kwargs = tree_map_only(torch.Tensor, to_meta, (args, kwargs))
        return func(*args, **kwargs)


class MetaSwitch:
    """OnMeta, entered and left during a forward pass: it slows down every operation."""

    def __init__(self) -> None:
        self._mode = OnMeta()
        self._is_on = False

    def set(self, is_on: bool) -> None:
        if is_on and not self._is_on:
            self._mode.__enter__()
        elif self._is_on and not is_on:
            self._mode.__exit__(None, None, None)
        self._is_on = is_on


class EndOfStage(BaseException):
    """Ends the forward pass of a stage: the model's code after it does not run."""


class Passage:
    """The tensors that a stage received and sent in a forward pass."""

    def __init__(self) -> None:
        self.received: list[ReceivedTensor] = []
        self.sent: list[torch.Tensor] = []


class Stage(nn.Module):
    """A stage of a pipeline: some blocks, and on the first and last one the code around them.

    A call with the inputs of a micro-batch returns the outputs on the last stage, and the sent
    tensors on the others. A forward pass may run the blocks several times; each is a *round*.

    `passage`: the tensors that the last call received and sent.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], own: range, p2p: P2P, draws: Draws
    ):
        """Run the blocks with the numbers `own`; of the other blocks, compute shapes only."""
        super().__init__()
        self.model = model
        self.passage = Passage()
        self.p2p = p2p
        self._is_first = own.start == 0
        self._is_last = own.stop == len(blocks)
        self._draws = draws
        self._on_meta = MetaSwitch()
        self._key: tuple[Any, ...] = ()  # of messages; empty outside of a forward pass
        self._round = 0
        self._rounds: dict[bool, int] = {}  # of a forward pass, by the training mode
        self._given: list[tuple[torch.Tensor, torch.Tensor]] = []  # without and with values
        for number, block in enumerate(blocks):
            if number not in own:
                block.forward = _Structure(block, draws)
        if not self._is_first:
            first = blocks[own.start]
            first.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
            for number in own[1:]:
                hook = self._fill
                blocks[number].register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        if not self._is_last:
            after = blocks[own.stop]
            after.register_forward_pre_hook(self._leave, prepend=True, with_kwargs=True)
        else:
            blocks[-1].register_forward_hook(self._end)

    def forward(self, inputs: Any) -> Any:
        self.passage = Passage()
        self._round = 0
        shapes = tuple(tuple(t.shape) for t in tree_leaves(inputs) if isinstance(t, torch.Tensor))
        self._key = (self.model.training, torch.is_grad_enabled(), self._draws.is_on, shapes)
        self._on_meta.set(not self._is_first)
        try:
            outputs = call(self.model, inputs)
        except EndOfStage:
            return self.passage.sent
        except Exception:
            if self._is_last or not self.passage.sent or self.model.training in self._rounds:
                raise
            outputs = None  # code after this stage's blocks does not work without values
        finally:
            self._on_meta.set(False)
            self._key = ()
            self._given = []  # else they are kept until the next micro-batch
        self._rounds[self.model.training] = self._round
        if not self._is_last:
            return self.passage.sent
        if any(isinstance(t, torch.Tensor) and t.is_meta for t in tree_leaves(outputs)):
            why = "the outputs depend on blocks other than through the next block"
            raise ConfigError(f"strategy.mesh.pipeline: {why}; name blocks that form a chain")
        return outputs

    def _check_forward(self) -> None:
        """Raise ConfigError in a recomputation: it would receive or send a second time."""
        if not self._key:
            why = "a block is recomputed from outside, by the model or a module around it"
            advice = "use strategy.recompute=blocks instead"
            raise ConfigError(f"strategy.mesh.pipeline: {why}; {advice}")

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Replace arguments on the meta device by the values that the previous stage sends."""
        self._check_forward()
        self._on_meta.set(False)
        leaves, tree = tree_flatten((args, kwargs))
        wanted = [n for n, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.is_meta]
        self.p2p.ask(self.model.training, wanted)
        received, draws = self.p2p.receive((*self._key, self._round))
        if len(received) != len(wanted):
            why = "the arguments of a block change between calls"
            raise ConfigError(f"strategy.mesh.pipeline: {why}; name other blocks")
        self._round += 1
        self._draws.advance(draws)
        self.passage.received.extend(received)
        self._given = []
        for number, each in zip(wanted, received, strict=True):
            self._given.append((leaves[number], each.tensor))
            leaves[number] = each.tensor
        return tree_unflatten(leaves, tree)

    def _fill(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Replace arguments on the meta device by the values received for the first block."""
        leaves, tree = tree_flatten((args, kwargs))
        return tree_unflatten([self._with_value(leaf) for leaf in leaves], tree)

    def _with_value(self, leaf: Any) -> Any:
        """Return the received tensor for an argument on the meta device."""
        if not isinstance(leaf, torch.Tensor) or not leaf.is_meta:
            return leaf
        for form, tensor in self._given:
            if form is leaf:
                return tensor
        why = "a block gets an argument that is computed anew for it, from another stage's tensors"
        raise ConfigError(f"strategy.mesh.pipeline: {why}; compute it once, before the blocks")

    def _leave(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Send the arguments of the next stage's first block, and continue with their shapes."""
        self._check_forward()
        self._round += self._is_first
        leaves = tree_leaves((args, kwargs))
        sent = [self._with_value(leaves[n]) for n in self.p2p.asked(self.model.training)]
        self.p2p.send((*self._key, self._round - 1), sent, self._draws.position())
        self.passage.sent.extend(sent)
        if self._round == self._rounds.get(self.model.training):
            raise EndOfStage
        self._on_meta.set(True)
        return tree_map_only(torch.Tensor, to_meta, (args, kwargs))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Prepare for another round after the last block, unless this one is known to be last."""
        self._on_meta.set(self._round != self._rounds.get(self.model.training))


class _Structure:
    """The forward pass of another stage's block: the shapes of its outputs."""

    def __init__(self, block: nn.Module, draws: Draws):
        self._inner = block.forward
        self._block = block
        self._draws = draws
        self._known: dict[str, tuple[Any, int]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forms = tree_map_only(torch.Tensor, lambda t: (t.shape, t.dtype), (args, kwargs))
        key = str((self._block.training, self._draws.is_on, forms))
        begin = self._draws.position()
        if key not in self._known:
            with torch.no_grad(), FlopCounter.paused():
                outputs = self._inner(*args, **kwargs)
            self._known[key] = (outputs, self._draws.position() - begin)
        outputs, drawn = self._known[key]
        self._draws.advance(begin + drawn)
        return outputs
