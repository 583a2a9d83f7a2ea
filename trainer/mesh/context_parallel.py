"""Context parallel: the ranks of a context divide the positions of each row.

The inputs and targets are cut along their axis 1. Only attention looks at other positions, so only
there keys and values are gathered, as in Llama 3 (arXiv:2407.21783, section 3.3.2). The model must
get positions as an input, since a rank's part does not begin at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from trainer.base.errors import ConfigError
from trainer.core.distributed.world import RankGroup
from trainer.core.rng.functions import REOPENED
from trainer.core.strategy.collectives import gather_parts, joined, own_part


class Context(TorchFunctionMode):
    """A torch function mode that gathers keys and values before each attention.

    It knows `scaled_dot_product_attention` only: `calls` counts them. Every row has as many
    positions as the first input tensor with two axes.
    """

    def __init__(self, axis: RankGroup):
        self.axis = axis
        self.calls = 0
        self.length = 0

    def forget(self) -> None:
        """Count the calls from now on."""
        self.calls = 0

    def cut(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return this rank's positions of tensors (rows, positions, ...).

        Raises ConfigError if the ranks cannot have equally many.
        """
        shapes = [t.shape for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)]
        lengths = [shape[1] for shape in shapes if len(shape) > 1]
        setting = f"strategy.mesh.context={self.axis.size}"
        if not lengths:
            raise ConfigError(f"""{setting}:
                the model's inputs must have positions on their axis 1, and they have none""")
        self.length = lengths[0]
        if self.length % self.axis.size:
            raise ConfigError(f"""{setting}: must divide the {self.length} positions of a row;
                pad the rows, or choose another size""")

        def part(tensor: torch.Tensor) -> torch.Tensor:
            is_cut = tensor.dim() > 1 and tensor.shape[1] == self.length
            return own_part(tensor, 1, self.axis).contiguous() if is_cut else tensor

        return tree_map_only(torch.Tensor, part, (inputs, targets))

    def join(self, outputs: Any) -> Any:
        """Return outputs for all positions. A collective."""
        own = self.length // self.axis.size

        def whole(tensor: torch.Tensor) -> torch.Tensor:
            is_part = tensor.dim() > 1 and tensor.shape[1] == own
            return joined(tensor, 1, self.length, self.axis) if is_part else tensor

        return tree_map_only(torch.Tensor, whole, outputs)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        opened = REOPENED.get(func)
        if opened is not None:  # attention inside it, or in a recomputation
            with self:
                return opened(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        return func(*args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Any:
        self.calls += 1
        kind = query.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):  # it acts below these functions
            dtype = torch.get_autocast_dtype(kind)
            query, key, value = (t.to(dtype) for t in (query, key, value))
        own, length = query.shape[-2], key.shape[-2] * self.axis.size
        whole = [gather_parts(t, t.dim() - 2, length, self.axis) for t in (key, value)]
        if is_causal and dropout_p:  # whose draws have a column for each key
            places = torch.arange(length, device=query.device)
            attn_mask = places[own * self.axis.rank :][:own, None] >= places
        elif is_causal:
            seen = own * (self.axis.rank + 1)
            whole = [each.narrow(-2, 0, seen) for each in whole]
            return _causal_attention(query, *whole, **kwargs)
        elif attn_mask is not None:
            if attn_mask.shape[-1] == key.shape[-2]:
                if attn_mask.dim() > 1 and attn_mask.shape[-2] > 1:
                    raise ConfigError(f"""strategy.mesh.context={self.axis.size}:
                        an attention mask of shape {tuple(attn_mask.shape)} must be
                        (rows, 1, 1, positions), or is_causal=True without a mask""")
                attn_mask = gather_parts(attn_mask, attn_mask.dim() - 1, length, self.axis)
            if attn_mask.dim() > 1 and attn_mask.shape[-2] == own * self.axis.size:
                attn_mask = own_part(attn_mask, attn_mask.dim() - 2, self.axis)
        args: Any = (query, *whole, attn_mask, dropout_p)
        return F.scaled_dot_product_attention(*args, **kwargs)


def _causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any
) -> Any:
    """Attend to no later keys; the last query is at the last key.

    torch's flash attention computes this without a mask. A tensor of its class for that, which
    `causal_lower_right` returns, cannot be made under a dispatch mode, such as that of a dry run.
    """
    sizes = (query.shape[-2], key.shape[-2])

    def mask(device: torch.device) -> torch.Tensor:
        ones = torch.ones(sizes, dtype=torch.bool, device=device)
        return ones.tril(sizes[1] - sizes[0])

    words = {"seq_len_q": sizes[0], "seq_len_kv": sizes[1], "_materialize": mask}
    bias: Any = SimpleNamespace(variant=CausalVariant.LOWER_RIGHT, **words)
    return CausalBias._dispatch(query, key, value, bias, **kwargs)
