"""Autocast of the simulated accelerator: CUDA's rules, which torch has for CUDA only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from harness.simulated_memory import NAME

_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
_NARROW = {
    *("matmul", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "linear"),
    *("linalg_multi_dot", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "mm", "mv"),
    *("conv_transpose2d", "conv_transpose3d", "convolution", "_convolution", "prelu", "einsum"),
    *("scaled_dot_product_attention", "linalg_vecdot", "gru_cell", "lstm_cell", "rnn_tanh_cell"),
    "rnn_relu_cell",
}
_WIDEST = {
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sample", "index_put"),
    *("tensordot", "scatter_add", "vdot", "cat", "stack"),
}
_WITH_DTYPE = {
    *("prod", "softmax", "log_softmax", "cumprod", "cumsum", "sum"),
    *("linalg_vector_norm", "linalg_matrix_norm"),
}
_cast: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # weights, as long as autocast keeps them


def kernel_of(op: Any) -> Callable[..., Any]:
    """Return the kernel of an operation under autocast."""
    name = op._schema.name.split("::")[1]
    arguments = [a.name for a in op._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction(), torch._C._ExcludeDispatchKeyGuard(_KEY):
            narrow = torch.get_autocast_dtype(NAME)
            if name in _WITH_DTYPE and "dtype" in arguments:
                return op(*_with_dtype(args, kwargs, arguments.index("dtype")), **kwargs)
            dtype = narrow if name in _NARROW else torch.float32
            if name in _WIDEST:
                leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
                has_fp32 = any(x.dtype == torch.float32 for x in leaves)
                dtype = torch.float32 if has_fp32 else narrow
            cast = tree_map_only(torch.Tensor, lambda x: _to(x, dtype), (args, kwargs))
            return op(*cast[0], **cast[1])

    return kernel


def _with_dtype(args: Any, kwargs: dict[str, Any], at: int) -> Any:
    """Ask for float32 where the call names no dtype."""
    given = args[at] if at < len(args) else kwargs.get("dtype")
    is_narrow = args[0].is_floating_point() and args[0].dtype != torch.float64
    if given is not None or not is_narrow:
        return args
    if at < len(args):
        return (*args[:at], torch.float32, *args[at + 1 :])
    kwargs["dtype"] = torch.float32
    return args


def _to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    is_exempt = x.device.type != NAME or not x.is_floating_point() or x.dtype == torch.float64
    if is_exempt or x.dtype == dtype:
        return x
    is_weight = x.is_leaf and x.requires_grad and dtype != torch.float32
    if not (is_weight and torch.is_autocast_cache_enabled()):
        return x.to(dtype)
    if id(x) not in _cast:
        _cast[id(x)] = (x, x.to(dtype))
    return _cast[id(x)][1]


def register(put: Callable[[str, Any, str], None], rest: torch.library.Library) -> None:
    """Register the rules for every operation that has some on CUDA; others pass through."""
    for full in torch._C._dispatch_get_all_op_names():
        is_ruled = torch._C._dispatch_has_kernel_for_dispatch_key(full, "AutocastCUDA")
        if full.startswith("aten::") and is_ruled:
            name, _, overload = full[6:].partition(".")
            op = getattr(getattr(torch.ops.aten, name), overload or "default")
            put(full[6:], kernel_of(op), "AutocastPrivateUse1")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        _cast.clear()
        clear()

    torch.clear_autocast_cache = clear_both
