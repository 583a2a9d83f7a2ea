"""Files of tensors and plain values, with an index of the parts of each tensor.

The index of a checkpoint, tensors.json, is {kind: {name: {dtype, shape, parts}}}, and a part is
[file, offset, size]: a box of the whole tensor, which the file holds under the tensor's name; the
second box of the same file under `<name>#1`. The kinds are `model`, `optimizer`, `ema`, and
`buffer` for buffers that are not in the model's state. safetensors' own writer needs all bytes in
memory at once; this one streams.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from trainer.base.codec import DTYPES, name_of
from trainer.base.durable_files import Buffer, open_new
from trainer.base.errors import CheckpointError, ConfigError
from trainer.core.data.examples import find_flaw
from trainer.core.distributed import accelerator
from trainer.core.strategy.tensor_shards import Shard


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
        raise CheckpointError(f"""the checkpoint holds more than tensors and plain values:
            {reason}""") from None
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
        raise CheckpointError(f"""{name} is a {type(part).__name__}:
            a checkpoint holds tensors and plain values only""")


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


INDEX = "tensors.json"
TENSOR_KINDS = ("model", "optimizer", "ema", "buffer")
MOST_EXTENT = 2**53
MOST_DIMS = 64  # as in torch
MOST_TIED = 100  # times the bytes of a file: an export writes tied tensors under each name
SAVED_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SPARSE = (nn.Embedding, nn.EmbeddingBag)  # may have sparse gradients
Box = tuple[Sequence[int], Sequence[int]]  # offset and size
Index = dict[str, dict[str, dict[str, Any]]]
MOST_PINNED = 4 * 2**30  # bytes of a rank: torch never gives pinned memory back


def file_name(kind: str, rank: int) -> str:
    return f"{kind}-r{rank:05d}.safetensors"


def write_shards(
    folder: Path, rank: int, shards: Mapping[str, Mapping[str, Shard]]
) -> tuple[dict[str, Any], Index]:
    """Write the shards that are this rank's to write, one file for each kind.

    Returns the entries of the manifest by file, and of the index. Raises CheckpointError for a
    dtype that safetensors does not have.
    """
    files: dict[str, Any] = {}
    index: Index = {}
    for kind, named in shards.items():
        own = {name: shard for name, shard in named.items() if shard.is_written}
        own = {name: shard for name, shard in own.items() if shard.tensor.numel() or not rank}
        if not own:
            continue
        file = file_name(kind, rank)
        entries = index[kind] = {name: _entry(file, name, s) for name, s in own.items()}
        first: dict[Any, str] = {}  # of names whose tensors share memory: tied weights
        for name, shard in own.items():
            if (other := first.setdefault(memory_of(shard.tensor) or name, name)) != name:
                entries[name]["same_as"] = other
        once = {
            box_name(name, box_index): tensor
            for name, shard in own.items()
            if "same_as" not in entries[name]
            for box_index, (tensor, _) in enumerate(shard.boxes())
        }
        forms = {name: (tensor.dtype, tensor.shape) for name, tensor in once.items()}
        size, sha256 = write_tensors(folder / file, forms, once.__getitem__)
        files[file] = {"rank": rank, "bytes": size, "sha256": sha256}
    return files, index


def _entry(file: str, name: str, shard: Shard) -> dict[str, Any]:
    parts = [[file, list(offset), list(tensor.shape)] for tensor, offset in shard.boxes()]
    dtype = _name_of(shard.tensor.dtype, name)
    return {"dtype": dtype, "shape": list(shard.shape), "parts": parts}


def box_name(name: str, box_index: int) -> str:
    """Return the name of a box of a tensor in a file that holds several."""
    return f"{name}#{box_index}" if box_index else name


def _name_of(dtype: torch.dtype, tensor: str) -> str:
    if dtype not in SAVED_NAMES:
        raise CheckpointError(f"""{tensor} has dtype {dtype}:
            must be one that safetensors has: {", ".join(name_of(each) for each in SAVED_NAMES)};
            convert it, or leave it out by register_buffer(persistent=False)""")
    return SAVED_NAMES[dtype]


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Identify the memory of a tensor; empty for one without elements."""
    memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    return memory if tensor.numel() else ()


def write_tensors(
    path: Path,
    forms: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    read: Callable[[str], torch.Tensor],
    about: Mapping[str, str] | None = None,
    mode: int = 0o600,
) -> tuple[int, str]:
    """Write a safetensors file of tensors with these dtypes and shapes, read one at a time.

    `about` are texts for its header. Returns its size and SHA-256.
    """
    header: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    end = 0
    order = sorted(forms, key=lambda name: -forms[name][0].itemsize)  # so that all are aligned
    for name in order:
        dtype, shape = forms[name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _name_of(dtype, name),
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the first tensor begins at a multiple of 8 bytes
    digest = hashlib.sha256()
    with open_new(path, mode) as write:
        head: tuple[Buffer, ...] = (len(text).to_bytes(8, "little"), text)
        for part in chain(head, map(_bytes_of, map(read, order))):
            digest.update(part)
            write(part)
    return 8 + len(text) + end, digest.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    dense = tensor.detach().cpu().contiguous().reshape(-1)
    return dense.view(torch.uint8).numpy().data


def check_tensors(model: nn.Module, is_structure: bool = False) -> None:
    """Raise ConfigError, by name, for a parameter or buffer that no run can save.

    A structure has no values.
    """
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(module, SPARSE):
            raise ConfigError(f"""the model's {name} ({type(module).__name__}):
                must have sparse=False, because gradients are summed as dense tensors""")
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        flaw = None if is_structure else find_flaw(tensor, allows_gradient=True)
        if flaw:
            raise ConfigError(f"the model's {name} is {flaw[0]}; {flaw[1]}")
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            _name_of(value.dtype, f"the model's {name}")


def private_copy(shards: Mapping[str, Mapping[str, Shard]]) -> dict[str, dict[str, Shard]]:
    """Copy the shards that this rank writes to the CPU, to write them while training continues.

    Tensors that share memory (tied weights) share it in the copy too. Of a device's tensors all
    copies are under way together, to pinned memory that torch keeps for the next save, and the host
    waits once; what exceeds MOST_PINNED is copied to memory that can be swapped, with a wait each.
    """
    copies: dict[Any, torch.Tensor] = {}
    devices: set[torch.device] = set()
    size = 0
    copied_shards: dict[str, dict[str, Shard]] = {}
    for kind, named in shards.items():
        copied_shards[kind] = {}
        for name, shard in named.items():
            if not shard.is_written:
                continue
            key = memory_of(shard.tensor) or (kind, name)
            if key not in copies:
                devices.add(shard.tensor.device)
                size += shard.tensor.nbytes
                is_pinned = size <= MOST_PINNED
                copies[key] = shard.tensor.detach().to("cpu", non_blocking=is_pinned, copy=True)
            copied_shards[kind][name] = shard._replace(tensor=copies[key])
    for device in devices:
        accelerator.wait(device)
    return copied_shards


def merge(indices: Iterable[Index]) -> Index:
    """Join the indices of all ranks.

    Raises CheckpointError unless every element of every tensor is in exactly one part.
    """
    whole: Index = {kind: {} for kind in TENSOR_KINDS}
    for index in indices:
        for kind, named in index.items():
            for name, entry in named.items():
                joined_entry = whole[kind].setdefault(name, {**entry, "parts": []})
                joined_entry["parts"] += entry["parts"]
    for named in whole.values():
        for name, entry in named.items():
            boxes = [(offset, size) for _, offset, size in entry["parts"]]
            if not is_covered(entry["shape"], boxes):
                raise CheckpointError(f"{name}: its parts do not cover it exactly once")
    return whole


def is_covered(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return True if the boxes cover every element of a tensor exactly once.

    The boxes must be those of a grid, possibly an uneven one, as layouts make them.
    """
    if 0 in shape:
        return True
    if not shape:
        return len(boxes) == 1
    slabs: dict[tuple[int, int], list[Box]] = {}
    for offset, size in boxes:
        slabs.setdefault((offset[0], size[0]), []).append((offset[1:], size[1:]))
    end = 0
    for (first, length), inner in sorted(slabs.items()):
        if not length:
            continue
        if first != end or not is_covered(shape[1:], inner):
            return False
        end += length
    return end == shape[0]


def check_index(raw: Any, files: Mapping[str, Any]) -> Index:
    """Return an index that was read. Raise ValueError if it does not describe these files.

    `files` are their entries in the manifest.
    """
    index = {"buffer": {}, **raw}
    for kind in TENSOR_KINDS:
        for name, entry in index[kind].items():
            _check_entry(f"{kind} {name}", entry, files)
            other = entry.get("same_as")
            if other is not None and not _is_tied(entry, other, index[kind].get(other, {})):
                raise ValueError(f"{kind} {name} is not the same as {other}")
    _check_sizes([entry for kind in TENSOR_KINDS for entry in index[kind].values()], files)
    return index


def _check_entry(what: str, entry: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Raise ValueError unless an entry has a sound shape, and parts that are in the files."""
    shape = entry["shape"]
    boxes = [(offset, size) for _, offset, size in entry["parts"]]
    rows = [shape, *(row for box in boxes for row in box)]  # of one number for each dimension
    is_sound = all(type(n) is int and 0 <= n < MOST_EXTENT for row in rows for n in row)
    has_dims = len(set(map(len, rows))) == 1 and len(shape) <= MOST_DIMS
    is_known = entry["dtype"] in DTYPES and all(file in files for file, _, _ in entry["parts"])
    if not (is_sound and has_dims and is_known):
        raise ValueError(f"{what} has an entry that is not valid")
    if not is_covered(shape, boxes):
        raise ValueError(f"the parts of {what} do not cover it exactly once")


def _is_tied(entry: Mapping[str, Any], name: str, other: Mapping[str, Any]) -> bool:
    """Return True if an entry is that of `other`, whose name it gives, and which is no such."""
    return "same_as" not in other and {**other, "same_as": name} == entry


def _check_sizes(entries: Sequence[Mapping[str, Any]], files: Mapping[str, Any]) -> None:
    """Raise ValueError if files are too small for their tensors: these could fill the memory."""
    held = dict.fromkeys(files, 0)
    tied = 0  # bytes of the tensors that are the same as another one
    for entry in entries:
        itemsize = DTYPES[entry["dtype"]].itemsize
        if entry.get("same_as") is not None:
            tied += math.prod(entry["shape"]) * itemsize
            continue
        for file, _, size in entry["parts"]:
            held[file] += math.prod(size) * itemsize
    for file, size in held.items():
        if size > files[file]["bytes"]:
            raise ValueError(f"{file} is too small for its tensors")
    if tied > MOST_TIED * sum(held.values()):
        raise ValueError(f"tied tensors have {tied:,} bytes, over {MOST_TIED} times the others'")
