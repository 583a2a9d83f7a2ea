"""Files of tensors and plain values, in torch's format and without pickled objects."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trainer.errors import CheckpointError


def packed(parts: Mapping[str, Any]) -> Iterator[tuple[str, memoryview]]:
    """(name, content) of each part, made on demand: the bytes of one are in memory at a time.

    Raises CheckpointError for what could not be loaded again.
    """
    for name, part in parts.items():
        _check_plain(part, name)
        buffer = io.BytesIO()
        torch.save(part, buffer)
        yield name, buffer.getbuffer()


def unpack(data: bytes, device: torch.device) -> Any:
    """Tensors and plain values only, on `device`. Raises CheckpointError for anything else."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
        is_stored = all(e.compress_type == zipfile.ZIP_STORED for e in entries)
        if not is_stored or sum(e.file_size for e in entries) > len(data):
            raise ValueError(
                "compressed or overlapping entries"
            )  # a small file would fill the memory
        found = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
        _check_loaded(found, len(data))
    except Exception as error:  # the bytes are anybody's, and torch has many ways to say no
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"the checkpoint holds more than tensors and plain values: {reason}"
        ) from None
    return found


def private_copy(tree: Any, copied: dict[Any, torch.Tensor] | None = None) -> Any:
    """Copy a tree, with its tensors on the CPU, so that training can continue while it is written.

    Tensors that share memory (tied weights) share it in the copy.
    """
    copied = {} if copied is None else copied
    if isinstance(tree, torch.Tensor):
        key = (tree.device, tree.data_ptr(), tree.shape, tree.stride(), tree.dtype)
        if not tree.numel() or key not in copied:
            copied[key] = tree.detach().to("cpu", copy=True)
        return copied[key]
    if isinstance(tree, Mapping):
        pairs = [(key, private_copy(value, copied)) for key, value in tree.items()]
        made = type(tree)(pairs)  # type: ignore[call-arg]
        if hasattr(tree, "_metadata"):  # of a module's state_dict: the versions of its layers
            made._metadata = tree._metadata  # type: ignore[attr-defined]
        return made
    return (
        type(tree)(private_copy(value, copied) for value in tree)
        if isinstance(tree, (list, tuple))
        else tree
    )


def size_of(tree: Any) -> int:
    """Bytes of all tensors in a tree."""
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _check_plain(part: Any, name: str) -> None:
    """Refuse at the save what could not be loaded: numpy numbers, paths, objects."""
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
    """Refuse what `packed` would not write. A list that holds itself has no end."""
    pending = [tree]
    seen = 0
    while pending:
        part = pending.pop()
        seen += 1
        if seen > most:
            raise ValueError("a value that holds itself")
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
