"""Models without values: operations on the meta device whose results are remembered."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from trainer.core.state.sandbox import Restore

_PLAIN = {type(None), bool, int, float, complex, str}
_PLAIN |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
MOST_KNOWN = 20_000  # forms of calls that are remembered: a batch of another length has others
_known: dict[Any, Any] = {}  # form of a call -> form of its results
_is_new: dict[Any, bool] = {}  # whether an operation changes none of its arguments, nor returns one


def to_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same form on the meta device."""
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
    ).requires_grad_(tensor.requires_grad)


def compute_shapes(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what the operation `func` returns if all of its tensors are on the meta device, else
    NotImplemented.

    torch takes up to 1 ms for an operation there, in Python, and the blocks of a model repeat the
    same ones: the forms of the results are remembered. Call it in a __torch_dispatch__.
    """
    forms = _form([*args, *kwargs.items()] if kwargs else args)
    if forms is None:
        return NotImplemented
    if func not in _is_new:
        schema = func._schema
        is_view = any(result.alias_info is not None for result in schema.returns)
        _is_new[func] = not schema.is_mutable and not is_view
    if not _is_new[func]:
        return func(*args, **kwargs)
    key = (func, torch.get_default_dtype(), forms)
    if key in _known:
        return _make(_known[key])
    results = func(*args, **kwargs)
    if (form_of_results := _form(results)) is not None:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = form_of_results
    return results


def _form(value: Any) -> Any:
    """Return a hashable description of a tensor on the meta device or of plain values; None for
    other ones."""
    if isinstance(value, torch.Tensor):
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        if not is_plain or not value.is_meta or value.layout is not torch.strided:
            return None
        is_odd = value.is_conj() or value.is_neg()
        return None if is_odd else (torch.Tensor, value.size(), value.stride(), value.dtype)
    kind = type(value)
    if kind in (list, tuple):
        forms = tuple(map(_form, value))
        return None if None in forms else (kind, forms)
    return (kind, value) if kind in _PLAIN else None  # 1 is not 1.0, nor True


def _make(form: Any) -> Any:
    """Return a new value of this form."""
    kind, value, *rest = form
    if kind is torch.Tensor:
        stride, dtype = rest
        return torch.empty_strided(value, stride, dtype=dtype, device="meta")
    return kind(map(_make, value)) if kind in (list, tuple) else value


def keep_modules(model: nn.Module) -> Restore:
    """Keep what the modules store, such as a cache of tensors without values; no values."""
    before = {
        module: {
            name: copy.copy(v) if type(v) in (dict, list) else v for name, v in vars(module).items()
        }
        for module in model.modules()
    }

    def restore() -> None:
        for module, attributes in before.items():
            vars(module).clear()
            vars(module).update(attributes)

    return restore
