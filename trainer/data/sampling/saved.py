"""The sampling of a run as a file, from which an audit recomputes the order without the data."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache

from trainer.codec import unpack
from trainer.data.sampling.base import Sampling, Shuffle
from trainer.data.sampling.mixture import Mixture
from trainer.data.sampling.shards import ShardShuffle
from trainer.data.sampling.weighted import Weighted
from trainer.errors import CheckpointError

NAME = "sampling.safetensors"  # in the run directory
MOST_BYTES = 2**34
KINDS: dict[str, type[Sampling]] = {
    each.kind: each for each in (Shuffle, ShardShuffle, Weighted, Mixture)
}


@lru_cache(maxsize=4)  # each rank asks for it twice at a start
def digest_of(sampling: Sampling) -> str:
    """Return the SHA-256 of a sampling; empty for the plain shuffle."""
    if isinstance(sampling, Shuffle):
        return ""
    settings, tensors = sampling.state()
    total = hashlib.sha256(f"{sampling.kind} {json.dumps(settings, sort_keys=True)}".encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        total.update(tensor.numpy().tobytes())
    return total.hexdigest()[:16]


def to_bytes(sampling: Sampling) -> bytes:
    from safetensors.torch import save

    settings, tensors = sampling.state()
    return save(tensors, {"kind": sampling.kind, "settings": json.dumps(settings)})


def from_bytes(data: bytes, expected: str, place: str) -> Sampling:
    """Restore a sampling. Raises CheckpointError unless it has the digest `expected`."""
    try:
        facts, tensors = unpack(data)
        sampling = KINDS[facts["kind"]].restore(json.loads(facts["settings"]), tensors)
        is_same = digest_of(sampling) == expected
    except Exception:  # safetensors has its own kind of error
        is_same = False
    if not is_same:
        why = "is damaged, or is not the sampling of this run"
        raise CheckpointError(f"{place}: {why}; without it the order cannot be recomputed")
    return sampling
