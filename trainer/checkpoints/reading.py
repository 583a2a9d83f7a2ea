"""Reading the tensors of a checkpoint, in the parts that a rank needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoints import packing
from trainer.checkpoints.tensor_files import INDEX, KINDS, box_name, check_index
from trainer.checkpoints.transaction import CheckpointFiles
from trainer.codec import DTYPES, dtype_of, name_of
from trainer.config.plain_files import parse_json
from trainer.distributed.group import Group
from trainer.errors import CheckpointError, one_line
from trainer.strategy.shards import TensorSource, slices

TRAINING = "training.pt"
CPU = torch.device("cpu")
MOST_HELD = 64  # files of a kind: each rank would open them
Shape = tuple[int, ...]


class MemoryTensors:
    """Tensors in memory, such as those of a file of weights."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._tensors = tensors

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        return self._tensors[name][slices(offset, size)]

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def hold(self) -> None: ...

    def skip(self, name: str) -> None: ...


class FileTensors:
    """Tensors in the safetensors files of a checkpoint."""

    def __init__(self, folder: Path, entries: Mapping[str, Mapping[str, Any]]):
        self._folder = folder
        self._entries = entries
        self._opened: dict[str, Any] = {}  # opening parses the names of all tensors

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(entry["shape"]) for name, entry in self._entries.items()}

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._entries[name]["dtype"]]

    def read(self, name: str, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """Read a box of a tensor. Raises CheckpointError if a file does not hold its part."""
        entry = self._entries[name]
        name = entry.get("same_as", name)
        whole = torch.empty(list(size), dtype=DTYPES[entry["dtype"]])
        seen: Counter[str] = Counter()
        for file, first, length in entry["parts"]:
            number = seen[file]
            seen[file] += 1
            begins = [max(a, b) for a, b in zip(offset, first, strict=True)]
            pairs = zip(offset, size, first, length, strict=True)
            ends = [min(a + n, b + m) for a, n, b, m in pairs]
            box = [end - begin for begin, end in zip(begins, ends, strict=True)]
            if any(extent <= 0 for extent in box):
                continue
            inside = [begin - a for begin, a in zip(begins, offset, strict=True)]
            within = [begin - b for begin, b in zip(begins, first, strict=True)]
            form = [entry["dtype"], length]
            part = self._read_part(file, box_name(name, number), form, slices(within, box))
            whole[slices(inside, box)] = part
        return whole

    def _read_part(
        self, file: str, name: str, form: Sequence[Any], box: tuple[slice, ...]
    ) -> torch.Tensor:
        """Read a box of a tensor in a file, where it must have this dtype and shape."""
        from safetensors import SafetensorError

        try:
            tensors = self._open(file)
            part = tensors.get_slice(name)
            if [part.get_dtype(), part.get_shape()] == form:
                return part[box] if box else tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._folder / file}: {error}") from None
        why = f"{name} has another dtype or shape than in {INDEX}"
        raise CheckpointError(f"{self._folder / file}: {why}")

    def _open(self, file: str) -> Any:
        from safetensors import safe_open

        if file not in self._opened:
            self._opened[file] = safe_open(self._folder / file, "pt")
        return self._opened[file]

    def hold(self) -> None:
        """Open the files, if they are few: they can then be read after the run has removed them.

        Raises CheckpointError.
        """
        files = {file for entry in self._entries.values() for file, _, _ in entry["parts"]}
        try:
            for file in files if len(files) <= MOST_HELD else ():
                self._open(file)
        except Exception as error:  # SafetensorError or OSError
            raise CheckpointError(f"{self._folder}: {one_line(error)}") from None

    def skip(self, name: str) -> None: ...


class RemoteTensors:
    """Tensors that rank 0 reads and sends, one at a time, to ranks that do not see its disk.

    Every rank must read or skip the same names in the same order; boxes of one name in a row.
    """

    def __init__(
        self, group: Group, entries: Mapping[str, tuple[Shape, str]], own: TensorSource | None
    ):
        self._group = group
        self._entries = entries
        self._own = own
        self._last: tuple[str, torch.Tensor] | None = None

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(shape) for name, (shape, _) in self._entries.items()}

    def read(self, name: str, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            self._last = (name, self._receive(name))
        return self._last[1][slices(offset, size)]

    def _receive(self, name: str) -> torch.Tensor:
        shape, dtype = self._entries[name]
        if self._own is not None:
            tensor = self._own.read(name, (0,) * len(shape), shape).contiguous()
        else:
            tensor = torch.empty(shape, dtype=dtype_of(dtype))
        return self._group.share_tensor(tensor)

    def skip(self, name: str) -> None:
        self._receive(name)


@dataclass(frozen=True)
class Content:
    """The tensors of a checkpoint by kind, and its plain values."""

    sources: Mapping[str, Any]  # Source
    training: dict[str, Any]

    def hold(self) -> None:
        """Keep the tensors readable, also if the files are removed. Raises CheckpointError."""
        for source in self.sources.values():
            source.hold()


def open_content(loaded: CheckpointFiles) -> Content:
    """Open a verified checkpoint. Raises CheckpointError."""
    files = loaded.files
    for file in (INDEX, TRAINING):
        if file not in files:
            name = loaded.path.name
            raise CheckpointError(f"{name}: has no {file}, so it is not a run's checkpoint")
    training = packing.unpack(files[TRAINING], CPU)
    try:
        index = check_index(parse_json(files[INDEX]), loaded.manifest["files"])
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = one_line(error) or type(error).__name__
        raise CheckpointError(f"{loaded.path}/{INDEX}: is not an index: {reason}") from None
    return Content({kind: FileTensors(loaded.path, index[kind]) for kind in KINDS}, training)


def share(group: Group, content: Content | None) -> Content:
    """Return rank 0's content on every rank. A collective, as is each later read of a tensor."""
    entries: dict[str, Any] = {}
    if content is not None:
        for kind, source in content.sources.items():
            entries[kind] = {
                name: [shape, name_of(source.dtype(name))]
                for name, shape in source.shapes().items()
            }
    entries = group.tell_all(entries)
    plain = {TRAINING: content.training} if content else {}
    packed = [bytes(data) for _, data in packing.packed(plain)]
    training = packing.unpack(group.share_bytes(packed[0] if packed else None), CPU)
    own: Mapping[str, Any] = content.sources if content else dict.fromkeys(entries)
    sources = {kind: RemoteTensors(group, entries[kind], own[kind]) for kind in entries}
    return Content(sources, training)
