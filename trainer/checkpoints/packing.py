"""Files of tensors and plain values, in torch's format and without pickled objects."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import torch
from torch.utils._pytree import tree_leaves

from trainer.errors import CheckpointError


def packed(parts: Mapping[str, Any]) -> Iterator[tuple[str, memoryview]]:
    """Yield (name, content) of each part; the bytes of only one are in memory at a time.

    Raises CheckpointError for a value that could not be loaded.
    """
    for name, part in parts.items():
        _check_plain(part, name)
        buffer = io.BytesIO()
        torch.save(part, buffer)
        yield name, buffer.getbuffer()


def unpack(data: bytes, device: torch.device) -> Any:
    """Load tensors and plain values onto `device`. Raises CheckpointError for anything else."""
    try:
        check_stored(io.BytesIO(data), len(data))
        tree = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
        _check_loaded(tree, len(data))
    except Exception as error:  # the bytes are untrusted, and torch raises many types
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"the checkpoint holds more than tensors and plain values: {reason}"
        ) from None
    return tree


def check_stored(file: BinaryIO, size: int) -> None:
    """Raise ValueError for a zip archive of `size` bytes that could fill the memory."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    is_stored = all(e.compress_type == zipfile.ZIP_STORED for e in entries)
    if not is_stored or sum(e.file_size for e in entries) > size:
        raise ValueError("compressed or overlapping entries")


def size_of(tree: Any) -> int:
    """Return the bytes of all tensors in a tree."""
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _check_plain(part: Any, name: str) -> None:
    """Raise CheckpointError for values that could not be loaded: numpy numbers, paths, objects."""
    if isinstance(part, Mapping):
        for key, value in part.items():
            _check_plain(key, name)
            _check_plain(value, f"{name}: {key}")
    elif type(part) in (list, tuple):
        for value in part:
            _check_plain(value, name)
    elif (
        part is not None
        and type(part) not in (bool, int, float, str)
        and not isinstance(part, torch.Tensor)
    ):
        raise CheckpointError(
            f"{name} is a {type(part).__name__}: a checkpoint holds tensors and plain values only"
        )


def _check_loaded(tree: Any, most: int) -> None:
    """Raise ValueError for values that `packed` does not write, or for more than `most` values."""
    pending = [tree]
    seen = 0
    while pending:
        part = pending.pop()
        seen += 1
        if seen > most:  # a list that contains itself has no end
            raise ValueError("a value that contains itself")
        if isinstance(part, Mapping):
            pending += [*part.keys(), *part.values()]
        elif type(part) in (list, tuple):
            pending += part
        elif isinstance(part, torch.Tensor):
            is_dense = (
                type(part) in (torch.Tensor, torch.nn.Parameter) and part.layout == torch.strided
            )
            if (
                not is_dense
                or part.is_meta
                or part.is_quantized
                or part.nbytes > part.untyped_storage().nbytes()
            ):
                raise ValueError("a tensor that is not plain and dense")
        elif part is not None and type(part) not in (bool, int, float, str):
            raise ValueError(f"a {type(part).__name__}")
