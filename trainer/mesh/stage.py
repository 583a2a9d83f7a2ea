"""Pipeline parallel: each stage has some of the model's blocks.

Every stage runs the model's own forward pass. The tensors of other stages are on torch's meta
device, where operations compute shapes only. A stage receives the arguments of its first block that
are on the meta device. It computes the others from the inputs itself, such as a mask.

A trace of the model, which tensors are used before and after which block and what it draws, runs
its forward pass on torch's meta device too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from trainer.base.errors import ConfigError, one_line
from trainer.core.hook_calls import call
from trainer.core.rng.forward import ExampleRng
from trainer.core.state.sandbox import sandbox
from trainer.core.strategy.modules.dry_run import DispatchMode, FlopCounter, hooked, uncounted
from trainer.mesh.loss_parallel import ABOUT
from trainer.mesh.meta_shapes import compute_shapes, keep_modules, to_meta
from trainer.mesh.p2p import P2P, ReceivedTensor

_MOVE = torch.ops.aten._to_copy.default


class OnMeta(DispatchMode):
    """A mode in which an operation with an argument on the meta device runs there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _MOVE and args[0].is_meta and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": args[0].device}  # it has no values to move
        if (results := compute_shapes(func, args, kwargs)) is not NotImplemented:
            return results
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(t.is_meta for t in tensors) and not all(t.is_meta for t in tensors):
            if func._schema.is_mutable and not tensors[0].is_meta:
                raise ConfigError(f"""strategy.mesh.pipeline: {func.__name__}
                    writes activations into a tensor made before the blocks; make a new tensor""")
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
        self, model: nn.Module, blocks: Sequence[nn.Module], own: range, p2p: P2P, draws: ExampleRng
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
        for block_number, block in enumerate(blocks):
            if block_number not in own:
                block.forward = _Structure(block, draws)
        if not self._is_first:
            first = blocks[own.start]
            first.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
            for block_number in own[1:]:
                hook = self._fill
                blocks[block_number].register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
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
            raise ConfigError("""strategy.mesh.pipeline: the outputs depend on blocks other
                than through the next block; name blocks that form a chain""")
        return outputs

    def _check_forward(self) -> None:
        """Raise ConfigError in a recomputation: it would receive or send a second time."""
        if not self._key:
            raise ConfigError("""strategy.mesh.pipeline: a block is recomputed from outside,
                by the model or a module around it; use strategy.recompute=blocks instead""")

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Replace arguments on the meta device by the values that the previous stage sends."""
        self._check_forward()
        self._on_meta.set(False)
        leaves, tree = tree_flatten((args, kwargs))
        wanted = [n for n, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.is_meta]
        self.p2p.ask(self.model.training, wanted)
        received, draws = self.p2p.receive((*self._key, self._round))
        if len(received) != len(wanted):
            raise ConfigError("""strategy.mesh.pipeline:
                the arguments of a block change between calls; name other blocks""")
        self._round += 1
        self._draws.advance(draws)
        self.passage.received.extend(received)
        self._given = []
        for index, each in zip(wanted, received, strict=True):
            self._given.append((leaves[index], each.tensor))
            leaves[index] = each.tensor
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
        raise ConfigError("""strategy.mesh.pipeline: a block gets an argument that is computed anew
            for it, from another stage's tensors; compute it once, before the blocks""")

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

    def __init__(self, block: nn.Module, draws: ExampleRng):
        self._inner = block.forward
        self._block = block
        self._draws = draws
        self._known: dict[str, tuple[Any, int]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forms = tree_map_only(torch.Tensor, lambda t: (t.shape, t.dtype), (args, kwargs))
        key = str((self._block.training, self._draws.is_on, forms))
        begin = self._draws.position()
        if key not in self._known:
            with torch.no_grad(), uncounted():
                outputs = self._inner(*args, **kwargs)
            self._known[key] = (outputs, self._draws.position() - begin)
        outputs, drawn = self._known[key]
        self._draws.advance(begin + drawn)
        return outputs


WITHOUT_VALUES = (
    "the model cannot run without values",
    "leave out .item() and the like in its forward pass",
)
DIVIDED_MODEL_FAILS = (
    "the model divided by tensor_plan fails",
    "write -1 for the number of heads, and take sizes from the shape of a divided layer's output;"
    " strategy.mesh.tensor must divide the number of heads",
)


class Trace(TorchFunctionMode):
    """A forward pass in segments: segment 0 is before the first block, n begins with block n - 1.

    `used` maps each parameter and buffer to the segments that use it, `order` has the blocks as
    they ran, and `flops` has the floating-point operations of each segment.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]):
        tensors = [*model.parameters(), *model.buffers()]
        self.used: dict[torch.Tensor, set[int]] = {tensor: set() for tensor in tensors}
        self._model = model
        self.order: list[int] = []
        self.flops = [0.0] * (len(blocks) + 1)
        self._blocks = blocks
        self._segment = 0
        self._counter = FlopCounter()
        self._counted = 0.0

    def run(self, compute: Callable[[], Any], reason: tuple[str, str] | None = None) -> Trace:
        """Follow a computation. Raises ConfigError, with the reason and advice, if it fails."""
        hooks = map(self._hook, range(len(self._blocks)))
        try:
            left = sandbox(keep_modules(self._model))
            with hooked(hooks), left, torch.no_grad(), OnMeta(), self._counter, self:
                compute()
        except ConfigError:
            raise
        except Exception as error:
            why, advice = reason or WITHOUT_VALUES
            raise ConfigError(f"strategy.mesh: {why}: {one_line(error)}; {advice}") from error
        self._enter(self._segment)
        return self

    def _hook(self, block_number: int) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            self.order.append(block_number)
            self._enter(block_number + 1)

        return self._blocks[block_number].register_forward_pre_hook(enter)

    def _enter(self, segment: int) -> None:
        self.flops[self._segment] += self._counter.total - self._counted
        self._counted = self._counter.total
        self._segment = segment

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in ABOUT:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and leaf in self.used:
                    self.used[leaf].add(self._segment)
        return func(*args, **kwargs)

    def check_chain(self) -> None:
        """Raise ConfigError unless the blocks ran once, in their order."""
        count = len(self._blocks)
        if not self.order or self.order != list(range(count)) * (len(self.order) // count):
            ran = " ".join(map(str, self.order[:12])) or "not at all"
            raise ConfigError(f"""strategy.mesh.pipeline: blocks(model) must run
                in the order of the list, 0 to {count - 1}; they ran {ran}""")
        if len(self.order) > count:
            raise ConfigError(f"""strategy.mesh.pipeline:
                the model runs its blocks {len(self.order) // count} times in training,
                and a stage runs once; choose another axis, or run them once""")

    def divide(self, num_stages: int) -> list[range]:
        """Return the blocks of each stage: the largest number of operations is the least."""
        costs = self.flops[1:] if any(self.flops) else [1.0] * len(self._blocks)
        costs[0] += self.flops[0]
        count = len(costs)

        @cache
        def best(first: int, stages: int) -> tuple[float, tuple[int, ...]]:
            """Return the largest cost of a stage, and where the stages end, from a block on."""
            if stages == 1:
                return sum(costs[first:]), (count,)
            candidates = []
            for last in range(first + 1, count - stages + 2):
                rest, ends = best(last, stages - 1)
                candidates.append((max(sum(costs[first:last]), rest), (last, *ends)))
            return min(candidates)

        ends = best(0, num_stages)[1]
        return [range(a, b) for a, b in zip((0, *ends), ends, strict=False)]

    def stages_of(self, parts: Sequence[range]) -> dict[torch.Tensor, tuple[int, ...]]:
        """Return the stages that use each tensor; for a parameter that none uses, the first one."""
        stage_of = [0, *(stage for stage, blocks in enumerate(parts) for _ in blocks)]
        stages_by_tensor = {}
        for tensor, segments in self.used.items():
            stages = tuple(sorted({stage_of[segment] for segment in segments}))
            stages_by_tensor[tensor] = stages or (0,) * isinstance(tensor, nn.Parameter)
        return stages_by_tensor
