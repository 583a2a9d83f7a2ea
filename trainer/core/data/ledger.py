"""Fingerprints of data: of its contents, and a ledger of the examples used in every step.

The ledger is a hash chain that each checkpoint saves. The digest of a step is a sum over its pairs
(position in the global batch, example index), so the ranks' parts add up to the same number in any
layout. The chain hashes the digests in step order.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from trainer.core.data.order import BatchPlan
from trainer.core.distributed.group import Group
from trainer.core.rng import seed_example
from trainer.core.state.sandbox import keep_generators, sandbox

FLOAT_ROWS = 64  # of a tensor of floats, at equal distances
HASHED_BYTES = 2**22  # of another tensor, hashed as a whole or else in rows: 10 ms
MOST_ELEMENTS = 2**20  # of a tensor in an example
MOST_RELATIVE_DISTANCE = 1e-3  # of floats: data that is normalised may be rounded otherwise

# By tensor or example: {"digest": of integers and texts, "values": one number for some floats}
Content = dict[str, dict[str, Any]]


def describe(dataset: Any) -> Content | None:
    """Return the content of a data set at fixed places; None if it reads differently each time.

    Tensors are read as they are. Of another data set the first, middle and last example are read,
    with seeded generators; one that cannot be read is left out.
    """
    if getattr(dataset, "digest", ""):
        return {}
    if isinstance(dataset, TensorDataset):
        return {f"tensor {n}": _of_rows(t) for n, t in enumerate(dataset.tensors)}
    content: Content = {}
    size = len(dataset)
    with sandbox(keep_generators()):
        for index in sorted({0, size // 2, size - 1}):
            # one that cannot be read is reported when the run takes it
            with suppress(Exception, SystemExit):
                first, second = (_of_example(dataset, index) for _ in range(2))
                if first != second:
                    return None
                content[f"example {index}"] = first
    return content


def find_changes(content: Any, other: Any) -> list[str]:
    """Return the names of the places that both have, and whose content differs."""
    if not isinstance(content, Mapping) or not isinstance(other, Mapping):
        return []
    return [name for name in content if name in other and not _is_same(content[name], other[name])]


def short(content: Any) -> str:
    """Return a digest of a content, to show; empty without one."""
    if not isinstance(content, Mapping) or not content:
        return ""
    plain = json.loads(json.dumps(content), parse_float=lambda text: f"{float(text):.3g}")
    return _hash(json.dumps(plain).encode())


def _is_same(one: Any, other: Any) -> bool:
    try:
        scale = max((abs(value) for value in one["values"]), default=0.0)
        pairs = zip(one["values"], other["values"], strict=True)
        is_close = all(abs(a - b) <= MOST_RELATIVE_DISTANCE * scale for a, b in pairs)
        return is_close and one["digest"] == other["digest"]
    except (TypeError, ValueError, KeyError):  # other numbers of values, or a damaged file
        return False


def _of_rows(tensor: torch.Tensor) -> dict[str, Any]:
    form = f"{tensor.dtype} {tuple(tensor.shape[1:])}"
    if tensor.layout is not torch.strided:
        return {"digest": form, "values": []}
    is_float = tensor.is_floating_point() or tensor.is_complex()
    each = max(1, tensor[:1].nbytes)
    count = min(len(tensor), FLOAT_ROWS if is_float else max(FLOAT_ROWS, HASHED_BYTES // each))
    rows = torch.linspace(0, len(tensor) - 1, count, dtype=torch.float64).round().long()
    taken = tensor.detach()[rows.to(tensor.device)].cpu()
    if is_float:
        return {"digest": form, "values": _project(taken.reshape(count, tensor.shape[1:].numel()))}
    return {"digest": _hash(form.encode() + _bytes_of(taken)), "values": []}


def _of_example(dataset: Any, index: int) -> dict[str, Any]:
    seed_example(0, 0, index)
    parts: list[bytes] = []
    values: list[float] = []
    for leaf in tree_leaves(dataset[index]):
        tensor = _as_tensor(leaf)
        if tensor is None:
            parts.append(_plain_bytes(leaf))
            continue
        parts.append(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        some = tensor.detach().reshape(-1)[:MOST_ELEMENTS].cpu()
        if some.is_floating_point() or some.is_complex():
            values += _project(some.reshape(1, -1))
        else:
            parts.append(_bytes_of(some))
    return {"digest": _hash(b"/".join(parts)), "values": values}


def _as_tensor(leaf: Any) -> torch.Tensor | None:
    """Return a float or an array as a tensor; None for anything else."""
    if isinstance(leaf, torch.Tensor):
        return leaf if leaf.layout is torch.strided and not leaf.is_meta else None
    if not isinstance(leaf, float) and not hasattr(leaf, "__array__"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an array that is read-only
        try:
            return torch.as_tensor(leaf)
        except (TypeError, ValueError, RuntimeError):  # an array of objects or texts
            return None


def _plain_bytes(leaf: Any) -> bytes:
    """Return the bytes of a text, an integer or an image; of anything else its type."""
    if isinstance(leaf, (str, bytes)):
        return leaf.encode(errors="replace") if isinstance(leaf, str) else leaf
    if hasattr(leaf, "tobytes") and not hasattr(leaf, "dtype"):  # objects in arrays are addresses
        return bytes(leaf.tobytes())
    return (repr(leaf) if isinstance(leaf, (int, type(None))) else type(leaf).__name__).encode()


def _project(rows: torch.Tensor) -> list[float]:
    """Return one number for each row (rows, elements), which rounding hardly changes."""
    rows = (torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows).double()
    rows = rows.nan_to_num(0.125, 1e30, -1e30)
    size = rows.shape[1]
    weights = (torch.arange(size, dtype=torch.float64) * 0.6180339887 + 0.3) % 1 - 0.5
    projections: list[float] = (rows @ weights / math.sqrt(max(1, size))).tolist()
    return projections


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


CLOSE_EVERY = 4096  # steps, whose indices stay in memory until `close`


class Ledger:
    """Hash chain over the steps of a run, after `step` steps.

    Every rank adds its example indices of each step to `pending`, a tensor for each micro-batch,
    and calls `close` after every 4096th step and before it reads `chain`.
    """

    def __init__(self, plan: BatchPlan, rank: int, is_counted: bool = True):
        """`is_counted` is True on one of the ranks that share the rows of `rank`."""
        self.step = 0
        self.chain = ""
        self._is_counted = is_counted
        self._start = plan.micro_batches(rank)[0][0]
        self.pending: list[Sequence[torch.Tensor]] = []

    def restore(self, step: int, chain: str) -> None:
        """Continue after `step` with the chain from a checkpoint."""
        self.step = step
        self.chain = chain

    def close(self, group: Group) -> None:
        """Add the recorded steps to the chain. Collective: every rank must call it."""
        if not self.pending:
            return
        indices = torch.cat([part for step in self.pending for part in step])
        parts = digests(indices.view(len(self.pending), -1), self._start)
        if not self._is_counted:
            parts = torch.zeros_like(parts)
        for digest in group.total(parts).tolist():
            self.chain = extend(self.chain, self.step, digest)
            self.step += 1
        self.pending.clear()


def digests(indices: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Return (steps,) int64 digests of example indices (steps, rows).

    `start` is the position of the first row in the global batch. Integer arithmetic modulo 2**64
    with splitmix64's finalizer (Steele et al., OOPSLA 2014) gives the same bits on every device.
    """
    positions = torch.arange(start, start + indices.shape[1], device=indices.device)
    mixed = indices * 0x1E3779B97F4A7C15 + positions * 0x3F58476D1CE4E5B9 + 1
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * 0x14D049BB133111EB
    return (mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)).sum(1)


def chains_of(chain: str, step: int, indices: torch.Tensor) -> list[str]:
    """Return the chain after each of some steps, of which `step` is the first.

    `indices`: (steps, rows) example indices. `chain` is that before them.
    """
    chains = []
    for later, digest in enumerate(digests(indices).tolist(), step):
        chain = extend(chain, later, digest)
        chains.append(chain)
    return chains


def extend(chain: str, step: int, digest: int) -> str:
    return hashlib.blake2b(f"{chain}/{step}/{digest}".encode(), digest_size=16).hexdigest()
