"""Fused attention of the simulated accelerator: one launch, as of CUDA's flash kernel.

Without a mask and without dropout; other calls take torch's math kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute scaled_dot_product_attention by the fused kernel or by torch's math kernel."""
    aten = torch.ops.aten
    is_plain = attn_mask is None and not dropout_p and query.dim() == 4
    is_even = query.shape[:2] == key.shape[:2] and key.shape == value.shape
    if is_plain and is_even and query.shape[-1] == key.shape[-1]:
        fused = aten._scaled_dot_product_fused_attention_overrideable
        return fused(query, key, value, None, 0.0, is_causal, scale=scale)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # the math kernel would add it
        hidden = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = hidden.masked_fill_(~attn_mask, float("-inf"))
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    return aten._scaled_dot_product_attention_math(*given, scale=scale, enable_gqa=enable_gqa)[0]


def register(put: Callable[..., None], kernel_of: Callable[[Any], Callable[..., Any]]) -> None:
    """Register the kernel, forward and backward, over the CPU's flash attention."""
    aten = torch.ops.aten
    run = kernel_of(aten._scaled_dot_product_flash_attention_for_cpu.default)
    run_back = kernel_of(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)

    def forward(
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        out, sums = run(query, key, value, 0.0, is_causal, scale=scale)
        seed = torch.empty((), dtype=torch.int64)
        rows = query.shape[2], key.shape[2]
        return out, sums, None, None, *rows, seed, seed, None

    def backward(
        gradient: Any, query: Any, key: Any, value: Any, bias: Any, mask: Any, *rest: Any, **kw: Any
    ) -> tuple[Any, ...]:
        out, sums, _, _, _, _, _, is_causal, *_ = rest
        given = (gradient, query, key, value, out, sums, 0.0, is_causal)
        return (*run_back(*given, scale=kw.get("scale")), None)

    name = "_scaled_dot_product_fused_attention_overrideable"
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        put("scaled_dot_product_attention", attend, key)
    put(name, forward)
    put(f"{name}_backward", backward)
