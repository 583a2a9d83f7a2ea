"""Distances between tensors: by the largest element, by the norm, and by a digest up to rounding.

By the largest element, NaN and infinities must be at the same places: there they count as equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trainer.base.same import SMALL

AT_ONCE = 2**22  # elements of a tensor that are copied in fp64: 32 MiB
SKETCHED = 16  # numbers of a sketch
WIDTH = 1024  # elements that have drawn signs of their own; each such piece has one more sign


def apart(tensor: torch.Tensor, other: torch.Tensor, least: float = SMALL) -> float:
    """Return the largest difference, relative to the largest value of the first, at least `least`.

    Other shapes, other places of NaN and infinities, and integers that are not equal, are
    infinitely apart.
    """
    if tensor.shape != other.shape:
        return float("inf")
    if tensor.is_complex():
        tensor, other = torch.view_as_real(tensor), torch.view_as_real(other)
    if not tensor.is_floating_point():
        return 0.0 if torch.equal(tensor, other) else float("inf")
    is_finite = tensor.isfinite()
    if not torch.equal(other.isfinite(), is_finite):
        return float("inf")
    others = [t[~is_finite].nan_to_num(0.0, 1.0, -1.0) for t in (tensor, other)]
    if not torch.equal(*others):
        return float("inf")
    tensor, other = tensor[is_finite].double(), other[is_finite].double()
    if not tensor.numel():
        return 0.0
    return float((tensor - other).abs().max() / tensor.abs().max().clamp_min(least))


def squares(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the squares of norm(a - b) and norm(a) in fp64, whose sums are those of the parts."""
    if tensor.numel() > AT_ONCE and tensor.shape == other.shape:
        parts = (each.reshape(-1).split(AT_ONCE) for each in (tensor, other))
        return torch.stack([squares(*pair) for pair in zip(*parts, strict=True)]).sum(0)
    wide = tensor.double()
    return torch.stack([(wide - other.double()).square().sum(), wide.square().sum()])


def norms_apart(
    tensors: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor], floor: float
) -> dict[str, float]:
    """Return norm(a - b) / norm(a) of each tensor, in fp64; infinity for one that is missing.

    norm(a) counts as at least `floor` of the norm of all tensors: the gradient of a bias before
    BatchNorm is rounding only. Unlike in `apart`, a tensor with NaN is NaN apart from any.
    """
    missing = torch.full((), float("inf"))
    found = {n: squares(a, others.get(n, missing)).sqrt().tolist() for n, a in tensors.items()}
    total = sum(norm * norm for _, norm in found.values()) ** 0.5
    return {n: far / max(norm, floor * total, SMALL) for n, (far, norm) in found.items()}


def weigh(rows: torch.Tensor) -> torch.Tensor:
    """Return (rows,) sums of their elements, each weighed by its place, in fp64."""
    flat = rows.detach().reshape(len(rows), -1).double()
    places = torch.arange(1, flat.shape[1] + 1, device=flat.device, dtype=torch.float64)
    return (flat * (3 + torch.cos(places))).sum(1)


def sketch(tensor: torch.Tensor) -> torch.Tensor:
    """Return (16,) sums of the elements, with signs drawn by their places.

    norm(sketch(a) - sketch(b)) is norm(a - b), give or take a third: a random projection by signs
    (Achlioptas, 2003), which is linear.
    """
    own = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = own.detach().reshape(-1)
    flat = flat.float() if flat.dtype.itemsize < 4 else flat
    whole = flat[: flat.numel() // WIDTH * WIDTH].view(-1, WIDTH)
    rest = flat[whole.numel() :]
    signs = _signs_of_places(flat.dtype, flat.device)
    sums = torch.cat([whole @ signs, (rest @ signs[: len(rest)])[None]]).double()
    return (sums * _draw_signs(len(sums), 1).to(sums)).sum(0) / SKETCHED**0.5


@lru_cache(maxsize=4)
def _signs_of_places(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return _draw_signs(WIDTH, 0).to(device, dtype)


def _draw_signs(rows: int, seed: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(2, (rows, SKETCHED), generator=drawn) * 2 - 1


def digest_rows(tree: Any) -> list[float]:
    """Return a number per example that changes if its tensors change.

    It is the same on every device up to rounding. Empty if no tensor has a batch axis.
    """
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    every = [weigh(leaf) for leaf in leaves if len(leaf) == len(leaves[0])]
    return torch.stack(every).sum(0).tolist() if every else []
