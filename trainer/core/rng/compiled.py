"""Draws by example in a compiled model.

torch's compiler cannot trace the keys of rows and the count of calls. In a graph that it has
traced, each function that draws is replaced by one whose draws are operations of this module: they
take the number of their call, which is known from the order in the graph, and draw as eager code
does. So no compiler can change a draw by moving, joining or repeating it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from trainer.core.rng import mixed
from trainer.core.rng.functions import HANDLERS, REOPENED, DrawsByRow, Numbers, Sizes, answer

_active: list[DrawsByRow] = []


@contextmanager
def answered_by(draws: DrawsByRow) -> Iterator[None]:
    """Let `draws` draw for compiled graphs."""
    _active.append(draws)
    try:
        yield
    finally:
        _active.pop()


def keep_eager(draws: Any, answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return `answer`, the part of a torch function mode that torch must not compile.

    Between two graphs torch would compile the mode itself, and mix up the attributes of tensors
    (2.13): `tensor.is_nested` was their dtype.
    """
    from torch._dynamo.eval_frame import skip_code  # here: it takes 2 s to import

    skip_code(type(draws).__torch_function__.__code__)
    return torch.compiler.disable(answer)


def compiled(
    function: Callable[..., Any], setting: bool | str = True, dynamic: bool | None = False
) -> Callable[..., Any]:
    """Return torch.compile's function, which draws as the original does. `setting` is run.compile.

    It is for inputs of one size, unless sizes may be `dynamic`: None takes those that change.
    """
    return torch.compile(function, backend=_backend(setting), dynamic=dynamic)


@functools.cache  # torch compiles a function of several modules once only for the same backend
def _backend(setting: bool | str) -> Callable[..., Any]:
    from torch._inductor import list_mode_options  # here: it takes 2 s to import

    # not with CUDA graphs: a replay would repeat the draws of the step that was captured
    mode = "max-autotune-no-cudagraphs" if setting == "max-autotune" else ""
    patches = list_mode_options(mode) if mode else None

    def lower(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        if _active:
            try:
                replace_draws(graph)
            except Untraceable:
                return graph.forward
        return compile_fx(graph, inputs, config_patches=patches)

    return lower


# The graph ----------------------------------------------------------------------------------------


class Untraceable(Exception):
    """A draw that only eager code can make."""


class GraphDraws(TorchFunctionMode):
    """The mode in which functions of a graph are traced: draws become operations.

    `seeds` are those of the graph's calls, and `count` is the number of the next one.
    """

    is_on = True

    def __init__(self, seeds: torch.Tensor | None, count: int = 0):
        self.seeds = seeds
        self.count = count

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return answer(self, func, args, kwargs or {})

    def numbers(self, name: str, sizes: Sizes, device: torch.device) -> GraphNumbers:
        self.count += 1
        return GraphNumbers(self.seeds, self.count - 1, name, sizes, device)

    def by_micro_batch(self, name: str) -> int:
        raise Untraceable


class GraphNumbers(Numbers):
    """Random numbers of one call, as an operation of a graph."""

    is_divided = False

    def __init__(
        self,
        seeds: torch.Tensor | None,
        draw_index: int,
        name: str,
        sizes: Sizes,
        device: torch.device,
    ):
        self._seeds = seeds
        self._number = draw_index
        self._name = name
        self._sizes = sizes
        self._device = device

    def keys(self) -> list[int]:
        raise Untraceable

    def mask(self, probability: float, value: float, dtype: torch.dtype) -> torch.Tensor:
        return self._draw("mask", [probability, value], dtype)

    def uniform(self, dtype: torch.dtype) -> torch.Tensor:
        return self._draw("uniform", [], dtype)

    def normal(self, dtype: torch.dtype) -> torch.Tensor:
        return self._draw("normal", [], dtype)

    def integers(self, low: int, high: int) -> torch.Tensor:
        return self._draw("integers", [low, high], torch.int64)

    def _draw(self, kind: str, arguments: list[float], dtype: torch.dtype) -> torch.Tensor:
        if self._seeds is None:  # the calls are counted
            return torch.empty(self._sizes, dtype=dtype, device=self._device)
        call = (self._seeds, self._number, self._name, self._sizes)
        return torch.ops.lockstep.draw(*call, kind, arguments, dtype, self._device)


def _replay_of(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose draws are those of a graph from a number on."""

    def replay(seeds: torch.Tensor, first: int, *args: Any, **kwargs: Any) -> Any:
        with GraphDraws(seeds, first):
            return func(*args, **kwargs)

    return replay


def replace_draws(graph: fx.GraphModule) -> None:
    """Replace the functions of a graph that draw. Raises Untraceable if one has no formula."""
    calls = dict(_count_calls(graph))
    if not (count := sum(calls.values())):
        return
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    some = next(n for n in placeholders if isinstance(n.meta.get("example_value"), torch.Tensor))
    with graph.graph.inserting_after(placeholders[-1]):
        seeds = graph.graph.call_function(torch.ops.lockstep.begin, (some, count))
    _replace_within(graph, seeds, calls, 0)


def _count_calls(graph: fx.GraphModule) -> Iterator[tuple[fx.Node, int]]:
    """Yield each node that draws, with the number of its draws."""
    for node in graph.graph.nodes:
        for body in _bodies(graph, node):
            inside = [*_count_calls(body)]
            if inside and node.target is not torch.ops.higher_order.tag_activation_checkpoint:
                raise Untraceable
            yield from inside
        if node.op not in ("call_function", "call_method"):
            continue
        func = _function_of(node)
        if (func in HANDLERS or func in REOPENED) and (count := _count_in(func, node)):
            yield node, count


def _function_of(node: fx.Node) -> Any:
    return getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target


def _bodies(graph: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """Return the graphs that an operation such as a recomputation runs."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    names = [a.target for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr"]
    inside = [getattr(graph, str(name)) for name in names]
    return [each for each in inside if isinstance(each, fx.GraphModule)]


@torch.no_grad()
def _count_in(func: Callable[..., Any], node: fx.Node) -> int:
    """Return how often a function draws: it runs on tensors without values."""
    with unset_fake_temporarily(), GraphDraws(None) as draws:
        shapes = fx.node.map_arg((node.args, node.kwargs), _shape_of)
        func(*shapes[0], **shapes[1])
    return draws.count


def _shape_of(node: fx.Node) -> Any:
    value = node.meta["example_value"]
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


def _replace_within(
    graph: fx.GraphModule, seeds: fx.Node, calls: Mapping[fx.Node, int], draw_index: int
) -> int:
    """Replace nodes, whose draws have numbers from `draw_index` on; return the next index."""
    for node in list(graph.graph.nodes):
        for body in _bodies(graph, node):
            if not any(each in calls for each in body.graph.nodes):
                continue
            node.insert_arg(len(node.args), seeds)  # one input more for the recomputation
            last = [each for each in body.graph.nodes if each.op == "placeholder"][-1]
            with body.graph.inserting_after(last):
                own = body.graph.placeholder("lockstep_seeds")
            draw_index = _replace_within(body, own, calls, draw_index)
        if node in calls:
            replay = _replay_of(_function_of(node))
            with graph.graph.inserting_after(node):
                args = (seeds, draw_index, *node.args)
                node.replace_all_uses_with(graph.graph.call_function(replay, args, node.kwargs))
            graph.graph.erase_node(node)
            draw_index += calls[node]
    graph.recompile()
    return draw_index


# Operations of a graph ----------------------------------------------------------------------------


@torch.library.custom_op("lockstep::begin", mutates_args=())
def begin(some: torch.Tensor, count: int) -> torch.Tensor:
    """Return the seeds of a graph's calls, and change torch's generator as these calls do.

    `some` is any input of the graph: without one, a compiler takes the result for a constant.
    """
    seed = torch.default_generator.initial_seed()
    seeds = []
    for _ in range(count):
        seeds.append(seed)
        seed = mixed(seed, 1)
    torch.default_generator.manual_seed(seed)
    return torch.tensor(seeds)


@begin.register_fake
def _(some: torch.Tensor, count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int64)


@torch.library.custom_op("lockstep::draw", mutates_args=())
def draw(
    seeds: torch.Tensor,
    draw_index: int,
    name: str,
    sizes: Sequence[int],
    kind: str,
    arguments: Sequence[float],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return what the method `kind` of `Numbers` returns for `arguments`.

    `draw_index` is the number of the call in its graph. If all rows share the draw, torch's
    generator draws it.
    """
    state = torch.default_generator.get_state()
    with torch._C.DisableTorchFunction():
        torch.default_generator.manual_seed(int(seeds[draw_index]))
        numbers = _active[-1].numbers(name, tuple(sizes), device) if _active else None
        if numbers is None:
            drawn = _draw_shared(torch.empty(sizes, dtype=dtype, device=device), kind, arguments)
        elif kind == "mask":
            probability, value = arguments
            drawn = numbers.mask(probability, value, dtype)
        elif kind == "integers":
            drawn = numbers.integers(*map(int, arguments))
        else:
            drawn = getattr(numbers, kind)(dtype)
    torch.default_generator.set_state(state)
    return drawn.contiguous()


@draw.register_fake
def _(
    seeds: torch.Tensor,
    draw_index: int,
    name: str,
    sizes: Sequence[int],
    kind: str,
    arguments: Sequence[float],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device=device)


def _draw_shared(out: torch.Tensor, kind: str, arguments: Sequence[float]) -> torch.Tensor:
    if kind == "mask":
        out.bernoulli_(arguments[0])
        return out if out.dtype == torch.bool else out.mul_(arguments[1])
    if kind == "integers":
        return out.random_(*map(int, arguments))
    return out.normal_() if kind == "normal" else out.uniform_()
