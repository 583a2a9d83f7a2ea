"""A trace of a model: which tensors are used before and after which block, and what it draws.

It runs the forward pass on torch's meta device, with shapes only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from trainer.errors import ConfigError, one_line
from trainer.strategy.modules.dry_run import FlopCounter
from trainer.strategy.pipeline_parallel.stage import OnMeta
from trainer.strategy.tensor_parallel.loss_parallel import ABOUT

WITHOUT_VALUES = (
    "the model cannot run without values",
    "leave out .item() and the like in its forward pass",
)
DIVIDED = (
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
        hooks = [self._hook(number) for number in range(len(self._blocks))]
        try:
            with kept(self._model), torch.no_grad(), OnMeta(), self._counter, self:
                compute()
        except ConfigError:
            raise
        except Exception as error:
            why, advice = reason or WITHOUT_VALUES
            raise ConfigError(f"strategy.mesh: {why}: {one_line(error)}; {advice}") from error
        finally:
            for hook in hooks:
                hook.remove()
        self._enter(self._segment)
        return self

    def _hook(self, number: int) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            self.order.append(number)
            self._enter(number + 1)

        return self._blocks[number].register_forward_pre_hook(enter)

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
            must = f"must run in the order of the list, 0 to {count - 1}; they ran {ran}"
            raise ConfigError(f"strategy.mesh.pipeline: blocks(model) {must}")
        if len(self.order) > count:
            times = f"the model runs its blocks {len(self.order) // count} times in training"
            advice = "choose another axis, or run them once"
            raise ConfigError(f"strategy.mesh.pipeline: {times}, and a stage runs once; {advice}")

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
            found = []
            for last in range(first + 1, count - stages + 2):
                rest, ends = best(last, stages - 1)
                found.append((max(sum(costs[first:last]), rest), (last, *ends)))
            return min(found)

        ends = best(0, num_stages)[1]
        return [range(a, b) for a, b in zip((0, *ends), ends, strict=False)]

    def stages_of(self, parts: Sequence[range]) -> dict[torch.Tensor, tuple[int, ...]]:
        """Return the stages that use each tensor; for a parameter that none uses, the first one."""
        stage_of = [0, *(stage for stage, blocks in enumerate(parts) for _ in blocks)]
        found = {}
        for tensor, segments in self.used.items():
            stages = tuple(sorted({stage_of[segment] for segment in segments}))
            found[tensor] = stages or (0,) * isinstance(tensor, nn.Parameter)
        return found


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Undo what the block stores in the modules, such as a cache of tensors without values."""
    before = {
        module: {
            name: copy(v) if type(v) in (dict, list) else v for name, v in vars(module).items()
        }
        for module in model.modules()
    }
    try:
        yield
    finally:
        for module, attributes in before.items():
            vars(module).clear()
            vars(module).update(attributes)
