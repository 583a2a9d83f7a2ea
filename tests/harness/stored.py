"""The content of checkpoints of any format, and checkpoints written as the ranks of a run do."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.internals import checkpoint, open_content, read_whole
from harness.training import keep_rules
from trainer.core.checkpoints.disk import Disk
from trainer.core.checkpoints.saver import Mail, Publisher, Saver, Snapshot
from trainer.core.strategy.tensor_shards import Shard

Shards = Mapping[str, Mapping[str, Shard]]
LIMIT_S = 60


@contextmanager
def opened_saver(
    root: Path,
    rank: int,
    size: int,
    store: dist.Store,
    check_owner: Callable[[], None] = lambda: None,
    keep_last: int = 10**6,
    limit_s: float = LIMIT_S,
) -> Iterator[Saver]:
    """The saver of one of `size` ranks that write their parts."""
    keep = keep_rules(keep_last, 0)
    mail = Mail(store, rank, range(size), limit_s)
    if rank:
        saver = Saver(root.parent, mail)
    else:
        disk = Disk(root, keep, print)
        saver = Publisher(
            root.parent, keep, disk, check_owner, lambda: None, lambda step, path: None, mail
        )
    saver.root = root
    try:
        yield saver
    finally:
        saver.close()


def save(
    root: Path,
    step: int,
    parts: Sequence[Shards],
    training: Mapping[str, Any],
    facts: Mapping[str, Any],
    check_owner: Callable[[], None] = lambda: None,
    keep_last: int = 10**6,
) -> Path:
    """Write a checkpoint as the savers of a run do, one rank after another; prune the others.

    `parts` has the shards of each rank that writes. Raises what rank 0's saver raises: RunError
    for an error of the disk.
    """
    store = dist.HashStore()
    with ExitStack() as stack:
        savers = [
            stack.enter_context(opened_saver(root, rank, len(parts), store, check_owner, keep_last))
            for rank in range(len(parts))
        ]
        staging = savers[0].stage(step)
        for rank in reversed(range(len(parts) if staging else 0)):
            savers[rank].save(staging, Snapshot(step, parts[rank], training, facts, None), False)
        savers[0].wait(step)
    return savers[0].path_of(step)


def content_of(loaded: checkpoint.CheckpointFiles) -> dict[str, Any]:
    """Return all that a checkpoint holds: tensors of the kinds model, optimizer and ema, and
    `training`, its plain values."""
    content = open_content(loaded)
    tensors = {kind: read_whole(source) for kind, source in content.sources.items()}
    return {**tensors, "training": content.training}


def tensors_of(loaded: checkpoint.CheckpointFiles, kind: str = "model") -> dict[str, torch.Tensor]:
    """Return the tensors of one kind; those of the kind optimizer as <number>/<name>/<key>."""
    return read_whole(open_content(loaded).sources[kind])


def plain_of(loaded: checkpoint.CheckpointFiles) -> dict[str, Any]:
    return open_content(loaded).training


def optimizers_of(loaded: checkpoint.CheckpointFiles) -> dict[str, Any]:
    """Return the state of the optimizers: their tensors, and their options and plain values."""
    return {"tensors": tensors_of(loaded, "optimizer"), "plain": plain_of(loaded)["optimizers"]}


def check_same_bits(one: Any, other: Any, place: str = "") -> None:
    """Check that two trees of tensors and plain values are equal in every name, type and bit."""
    assert type(one) is type(other), f"{place}: {type(one)} and {type(other)}"
    if isinstance(one, Mapping):
        assert one.keys() == other.keys(), f"{place}: {one.keys() ^ other.keys()}"
        for name, value in one.items():
            check_same_bits(value, other[name], f"{place}/{name}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), f"{place}: {len(one)} and {len(other)}"
        for number, pair in enumerate(zip(one, other, strict=True)):
            check_same_bits(*pair, f"{place}/{number}")
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), place
        assert torch.equal(bytes_of(one), bytes_of(other)), place
    else:
        assert one == other or one != one, f"{place}: {one} and {other}"


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return (bytes,), the memory of a tensor on the CPU: NaN equals NaN, and 0 is not -0."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
