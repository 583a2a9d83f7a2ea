"""Row-wise random draws: torch's random functions with a key for each row.

Bits are splitmix64 of a counter (Steele et al., OOPSLA 2014). Integer arithmetic makes them equal
on every device; on a CPU it is as fast as torch's own generator.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from inspect import unwrap
from types import FunctionType
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from trainer.base.errors import ConfigError
from trainer.core.rng import seed_generators
from trainer.core.rng.keys import RowKeys

Sizes = tuple[int, ...]
Part = tuple[int, int, int]  # of a drawn tensor: axis, number of the part, number of parts
Handler = Callable[..., Any]
DIGITS = {torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}  # in a uniform number; else 24
warnings.filterwarnings("ignore", "Dropout mask should only be used for testing")  # _attention
ALPHA = -1.7580993408473766  # SELU at minus infinity: alpha dropout's value of a dropped element


class DrawsByRow(Protocol):
    """The torch function mode that decides which draws are by row."""

    @property
    def is_on(self) -> bool: ...
    def numbers(self, name: str, sizes: Sizes, device: torch.device) -> Numbers | None: ...
    def by_micro_batch(self, name: str) -> int: ...


class Numbers:
    """Random numbers of one call, a tensor of `sizes` with `parts` entries of `axis` per row.

    Only the `rank_parts` of that tensor are returned.
    """

    def __init__(
        self,
        rows: RowKeys,
        call: int,
        device: torch.device,
        sizes: Sizes,
        axis: int,
        parts: int,
        rank_parts: tuple[Part, ...] = (),
    ):
        self._call = call
        self._device = device
        self.axis = axis
        self._rows = rows
        self._sizes = (*sizes[:axis], parts, *sizes[axis + 1 :])
        self._width = math.prod(self._sizes)
        self.is_divided = bool(rank_parts)
        self._kept = rank_parts

    def keys(self) -> list[int]:
        """Return a number for each row."""
        return (self._rows.on(self._device) + self._call).tolist()

    def bits(self) -> torch.Tensor:
        """Return (rows, width) int64 of 64 random bits."""
        return self._rows.bits(self._call, self._width, self._device)

    def words(self) -> torch.Tensor:
        """Return (rows, width) int32 of 32 random bits."""
        return self._rows.words(self._call, self._width, self._device)

    def shaped(self, values: torch.Tensor) -> torch.Tensor:
        """Reshape values (rows, width) to the sizes of the call."""
        if self.axis:
            values = values.reshape(len(values), *self._sizes)
            values = values.movedim(0, self.axis).flatten(self.axis, self.axis + 1)
        else:  # one operation
            values = values.reshape(-1, *self._sizes[1:])
        for axis, index, count in self._kept:
            values = values.chunk(count, axis)[index]
        return values

    def kept(self, probability: float) -> torch.Tensor:
        """Return bools that are True with this probability, to 2**-32."""
        return self.mask(probability, True, torch.bool)

    def mask(self, probability: float, value: float, dtype: torch.dtype) -> torch.Tensor:
        """Return numbers that are `value` with this probability, to 2**-32, and else 0."""
        last = max(int(probability * 2**32) - 1, 0) - 2**31
        mask = self._rows.mask(self._call, self._width, last, value, dtype, self._device)
        return self.shaped(mask)

    def uniform(self, dtype: torch.dtype) -> torch.Tensor:
        """Return numbers in [0, 1), with as many binary digits as torch gives this dtype."""
        digits = DIGITS.get(dtype, 24)
        if digits > 32:
            bits = (self.bits() >> (64 - digits)) & ((1 << digits) - 1)
        else:
            bits = (self.words() >> (32 - digits)) & ((1 << digits) - 1)
        return self.shaped(bits.to(dtype).mul_(2.0**-digits))

    def normal(self, dtype: torch.dtype) -> torch.Tensor:
        """Return numbers with mean 0 and standard deviation 1 (Box and Muller)."""
        at_least = torch.promote_types(dtype, torch.float32)
        bits = self.bits()
        radius = ((bits >> 32) & 0xFFFFFFFF).to(at_least).add_(1).mul_(2.0**-32)
        angle = (bits & 0xFFFFFFFF).to(at_least).mul_(2 * math.pi * 2.0**-32)
        values = radius.log_().mul_(-2).sqrt_().mul_(angle.cos_())
        return self.shaped(values.to(dtype))

    def integers(self, low: int, high: int) -> torch.Tensor:
        """Return int64 in [low, high)."""
        return self.shaped((self.bits() & (2**63 - 1)) % (high - low) + low)


# Dropout ------------------------------------------------------------------------------------------


def _dropout(is_feature: bool, is_alpha: bool, is_in_place: bool) -> Handler:
    """Return a handler for one of torch's dropout functions, with torch's arithmetic."""

    def handle(
        draws: DrawsByRow, func: Any, input: torch.Tensor, p: float, train: bool
    ) -> torch.Tensor:
        sizes = tuple(input.shape)
        if is_feature:
            sizes = (*sizes[:2], *[1] * (len(sizes) - 2))
        numbers = draws.numbers("dropout", sizes, input.device) if train and p else None
        if numbers is None or not 0 < p < 1 or not input.numel():
            return func(input, p, train)
        mask = numbers.mask(1 - p, 1.0 if is_alpha else 1 / (1 - p), input.dtype)
        if not is_alpha:
            return input.mul_(mask) if is_in_place else input * mask
        a = 1 / math.sqrt((ALPHA * ALPHA * p + 1) * (1 - p))
        shift = (mask - 1).mul_(-ALPHA * a).add_(-ALPHA * a * p)
        mask.mul_(a)
        return input.mul_(mask).add_(shift) if is_in_place else (input * mask).add_(shift)

    return handle


def _attention(
    draws: DrawsByRow,
    func: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """Compute scaled_dot_product_attention with dropout by torch's math kernel: it takes a mask."""
    sizes = (*query.shape[:-1], key.shape[-2])
    if len(query) == 1:  # learned queries, shared by all rows
        sizes = (len(key), *sizes[1:])
    numbers = draws.numbers("attention", sizes, query.device) if dropout_p else None
    if numbers is None or dropout_p >= 1:
        return func(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # the kernel would add 0 and 1
        hidden = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = hidden.masked_fill_(~attn_mask, -math.inf)
    plain = torch.ops.aten._scaled_dot_product_attention_math
    mask = numbers.kept(1 - dropout_p)
    return plain(query, key, value, attn_mask, dropout_p, is_causal, mask, **kwargs)[0]


# Noise --------------------------------------------------------------------------------------------


@torch.no_grad()
def _fill(numbers: Numbers, out: torch.Tensor, kind: str, *args: Any) -> torch.Tensor:
    """Fill `out` as torch's method of the name `kind` does with `args`."""
    dtype = out.dtype if out.dtype.is_floating_point else torch.float32
    if kind == "bernoulli_":
        (p,) = args
        is_tensor = isinstance(p, torch.Tensor)
        values = numbers.uniform(p.dtype) < p if is_tensor else numbers.kept(p)
    elif kind == "integers":
        values = numbers.integers(*args)
    elif kind == "normal_":
        values = numbers.normal(dtype).mul_(args[1]).add_(args[0])
    elif kind == "exponential_":
        wide = torch.promote_types(dtype, torch.float32)
        values = (-numbers.uniform(wide)).log1p_().div_(-args[0])
        values.clamp_(min=torch.finfo(dtype).tiny)  # never 0: callers take the logarithm
    else:
        values = numbers.uniform(dtype).mul_(args[1] - args[0]).add_(args[0])
    return out.copy_(values)


def _method(kind: str, **defaults: float) -> Handler:
    """Return a handler for a method that fills its tensor: `tensor.normal_(mean, std)`."""

    def handle(draws: DrawsByRow, func: Any, out: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if out.is_complex():
            return _by_micro_batch(draws, func, out, *args, **kwargs)
        own = kwargs.pop("generator", None)
        numbers = None
        if own is None:
            numbers = draws.numbers(kind, tuple(out.shape), out.device)
        if numbers is None:
            return func(out, *args, generator=own, **kwargs)
        values = dict(zip(defaults, args, strict=False)) | kwargs
        return _fill(numbers, out, kind, *(values.get(name, d) for name, d in defaults.items()))

    return handle


def _factory(kind: str, *bounds: Any) -> Handler:
    """Return a handler for a function that creates a tensor and fills it."""

    def handle(draws: DrawsByRow, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("generator") is not None or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        own = {"device": "meta", "requires_grad": False, "pin_memory": False}
        like = func(*args, **{**kwargs, **own})  # on meta: draws nothing
        if like.is_complex():
            return _by_micro_batch(draws, func, *args, **kwargs)
        source = next((a.device for a in args if isinstance(a, torch.Tensor)), None)
        device = torch.device(kwargs.get("device") or source or torch.empty(0).device)
        numbers = draws.numbers(func.__name__, tuple(like.shape), device)
        if numbers is None:
            return func(*args, **kwargs)
        values = bounds or _bounds(func, args, kwargs)
        out = _fill(numbers, torch.empty_like(like, device=device), kind, *values)
        return out.requires_grad_() if kwargs.get("requires_grad") else out  # else vmap refuses it

    return handle


def _bounds(func: Any, args: Any, kwargs: Any) -> tuple[int, int]:
    """Return (low, high) of randint([low,] high, size) or randint_like(tensor, [low,] high)."""
    numbers = [a for a in args if not isinstance(a, (tuple, list))]
    if func is torch.randint_like:
        numbers = numbers[1:]
    low = kwargs.get("low", 0)
    if "high" in kwargs:
        return int(numbers[0] if numbers else low), int(kwargs["high"])
    return int(numbers[0] if len(numbers) > 1 else low), int(numbers[-1])


def _normal(
    draws: DrawsByRow, func: Any, mean: Any, std: Any = 1.0, *args: Any, **kwargs: Any
) -> Any:
    """Draw torch.normal, whose mean, std or both may be tensors."""
    tensors = [value for value in (mean, std) if isinstance(value, torch.Tensor)]
    numbers = None
    if tensors and not kwargs:
        sizes = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
        numbers = draws.numbers("normal", tuple(sizes), tensors[0].device)
    if numbers is not None:
        with torch.no_grad():  # as torch's: a sample without reparametrisation has no gradient
            return numbers.normal(tensors[0].dtype).mul_(std).add_(mean)
    if tensors:
        return func(mean, std, *args, **kwargs)
    return _factory("normal_", mean, std)(draws, func, mean, std, *args, **kwargs)


def _bernoulli(draws: DrawsByRow, func: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    numbers = None
    if kwargs.get("generator") is None and kwargs.get("out") is None:
        numbers = draws.numbers("bernoulli", tuple(input.shape), input.device)
    if numbers is None:
        return func(input, *args, **kwargs)
    p = kwargs.get("p", args[0] if args else input)
    return _fill(numbers, torch.empty_like(input), "bernoulli_", p)


# Functions without a formula here -----------------------------------------------------------------


def _row_by_row(draws: DrawsByRow, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call torch's own function for one row after another, seeded with the row's key."""
    if not args:
        args = (kwargs.pop("input"),)
    first = args[0]
    numbers = None
    if func.__name__ == "multinomial" and first.dim() == 1:
        return _by_micro_batch(draws, func, *args, **kwargs)
    if kwargs.get("generator") is None:
        numbers = draws.numbers(func.__name__, tuple(first.shape), first.device)
    if numbers is None:
        return func(*args, **kwargs)
    if numbers.is_divided:
        raise ConfigError(f"""run.dropout=example: {func.__name__} draws row by row,
            which tensor and context parallel cannot divide; use another strategy""")
    keys = numbers.keys()
    rows, axis = len(keys), numbers.axis
    parts = []
    with seed_generators(first.device) as seed:
        for row, key in enumerate(keys):
            seed(key)
            own = [_chunk(a, first.shape[axis], rows, row, axis) for a in args]
            parts.append(func(*own, **kwargs))
    return first if func.__name__.endswith("_") else torch.cat(parts, axis)


def _chunk(value: Any, length: int, rows: int, row: int, axis: int) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() <= axis or value.shape[axis] != length:
        return value
    return value.narrow(axis, row * (length // rows), length // rows)


def _by_micro_batch(draws: DrawsByRow, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a kernel that draws internally, such as a recurrent one between its layers."""
    rate = next((index for index, a in enumerate(args) if isinstance(a, float)), None)
    if func in RECURRENT and rate is not None and not (args[rate] and args[rate + 1]):
        return func(*args, **kwargs)  # no dropout, or no training
    kernel_seed = draws.by_micro_batch(func.__name__)
    tensors = [a.device for a in args if isinstance(a, torch.Tensor)]
    with seed_generators(tensors[0] if tensors else torch.get_default_device()) as seed:
        seed(kernel_seed)
        return func(*args, **kwargs)


HANDLERS: dict[Any, Handler] = {
    F.scaled_dot_product_attention: _attention,
    torch.rand: _factory("uniform_", 0, 1),
    torch.randn: _factory("normal_", 0, 1),
    torch.rand_like: _factory("uniform_", 0, 1),
    torch.randn_like: _factory("normal_", 0, 1),
    torch.randint: _factory("integers"),
    torch.randint_like: _factory("integers"),
    torch.normal: _normal,
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
    torch.Tensor.bernoulli_: _method("bernoulli_", p=0.5),
    torch.Tensor.uniform_: _method("uniform_", **{"from": 0, "to": 1}),
    torch.Tensor.normal_: _method("normal_", mean=0, std=1),
    torch.Tensor.exponential_: _method("exponential_", lambd=1),
}
for _name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"):
    _kind = ("feature" in _name, "alpha" in _name)
    HANDLERS[getattr(torch, _name)] = _dropout(*_kind, False)
    HANDLERS[getattr(torch, f"{_name}_")] = _dropout(*_kind, True)
for _name in ("poisson", "multinomial", "binomial", "_standard_gamma", "_sample_dirichlet"):
    HANDLERS[getattr(torch, _name)] = _row_by_row
for _name in ("multinomial", "cauchy_", "log_normal_", "geometric_", "random_"):
    HANDLERS[getattr(torch.Tensor, _name)] = _row_by_row
HANDLERS |= {torch.rrelu: _row_by_row, torch.rrelu_: _row_by_row}
RECURRENT = {torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu}
HANDLERS |= dict.fromkeys(
    (
        *(*RECURRENT, F.fractional_max_pool2d, F.fractional_max_pool3d),
        *(torch.randperm, torch.native_dropout),
    ),
    _by_micro_batch,
)

_ASKED = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _reopen(func: FunctionType) -> Handler:
    """Return a copy of a torch function that does not dispatch to a mode."""
    globals_ = {**func.__globals__, **dict.fromkeys(_ASKED, lambda *_: False)}
    copy = FunctionType(func.__code__, globals_, func.__name__, func.__defaults__, func.__closure__)
    return partial(copy, **(func.__kwdefaults__ or {}))


# Python functions around draws, or around a recomputation that repeats draws. A mode receives the
# calls inside their copies.
_AROUND: Any = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(F.rrelu, F.gumbel_softmax, F.multi_head_attention_forward),
    *(torch.autograd.backward, torch.autograd.grad, torch.Tensor.backward),
)
# Without what wraps it, such as the recorder of trainer.prove, whose call would dispatch again.
REOPENED: dict[Any, Handler] = {func: _reopen(unwrap(func)) for func in _AROUND}


def answer(draws: Any, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch, as the mode `draws`, a DrawsByRow, does."""
    opened = REOPENED.get(func)
    if opened is not None:  # it draws inside, or runs a recomputation that draws
        with draws:
            return opened(*args, **kwargs)
    handler = HANDLERS.get(func)
    if handler is None or not draws.is_on:
        return func(*args, **kwargs)
    return handler(draws, func, *args, **kwargs)
