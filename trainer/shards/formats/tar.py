"""Tar files in WebDataset's convention: files of one name, without its suffix, are one example."""

from __future__ import annotations

import io
import json
import math
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from trainer.shards.formats.shard_parts import FileBytes, Piece, join
from trainer.shards.sources import Span

SUFFIXES = (".tar",)
KEY_COLUMN = "__key__"


class TarShard:
    """The examples of one file: {"__key__": name, ending: content}.

    Endings .cls and .id are integers, .txt is text, .json is parsed and .npy a tensor; everything
    else, such as an image, stays bytes.
    """

    def __init__(self, file: FileBytes, settings: Mapping[str, Any], rows: int, span: Span | None):
        self._data = file
        with file.open() as stream:
            stream.seek(span.begin if span else 0)
            self._members = _examples(_files(stream, span.end if span else math.inf))
        if len(self._members) != rows:
            raise ValueError(
                f"{file.path} has {len(self._members)} examples, and {rows} in its index"
            )

    def __getitem__(self, row: int) -> dict[str, Any]:
        key, files = self._members[row]
        example: dict[str, Any] = {KEY_COLUMN: key}
        for ending, (begin, size) in files.items():
            example[ending] = _decode(ending, self._data.read(begin, size))
        return example


@dataclass(frozen=True)
class _File:
    """A file of an archive, of the example `key`: its entry begins at `begin`, its bytes at `data`.

    Those of a hard link are where the file is that it names.
    """

    key: str
    ending: str
    begin: int
    data: int
    size: int


def _files(file: BinaryIO, end: float = math.inf) -> Iterator[_File]:
    """Yield the files of examples in an archive, from the position on, of a part to its `end`.

    Raises ValueError for an archive that ends early, which tarfile takes for its end, and for a
    sparse file, whose bytes do not lie in one piece.
    """
    contents: dict[str, tuple[int, int]] = {}  # hard links name an earlier file
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            if member.issparse():
                raise ValueError(f"{member.name} is a sparse file: pack it without --sparse")
            if member.isreg():
                contents[member.name] = (member.offset_data, member.size)
            elif member.islnk() and member.linkname in contents:
                contents[member.name] = contents[member.linkname]
            folder, _, name = member.name.rpartition("/")
            stem, dot, ending = name.partition(".")
            if (member.isreg() or member.islnk()) and member.name in contents and stem and dot:
                key = f"{folder}/{stem}".lstrip("/")
                yield _File(key, ending.lower(), member.offset, *contents[member.name])
            if archive.offset >= end:  # what follows may be damaged, or not be there
                return
        file.seek(archive.offset)
        if any(file.read(tarfile.BLOCKSIZE)):
            raise ValueError(f"it ends or is damaged at byte {archive.offset:,}")


def _examples(files: Iterable[_File]) -> list[tuple[str, dict[str, tuple[int, int]]]]:
    """Return (key, {ending: (offset, bytes)}) of each example, in their order."""
    examples: dict[str, dict[str, tuple[int, int]]] = {}
    for each in files:
        examples.setdefault(each.key, {})[each.ending] = (each.data, each.size)
    return [*examples.items()]


def _decode(ending: str, data: bytes) -> Any:
    plain: dict[str, Callable[[bytes], Any]] = {
        **{"cls": int, "id": int, "txt": bytes.decode, "text": bytes.decode, "json": json.loads},
        "npy": lambda data: torch.from_numpy(np.load(io.BytesIO(data), allow_pickle=False)),
    }
    return plain.get(ending.rpartition(".")[2], bytes)(data)


def divide(path: Path, settings: Mapping[str, Any], most: int) -> list[tuple[int, Span | None]]:
    """Return rows and span of parts of at most `most` bytes, or one example.

    A file is whole if files of an example lie apart, or links lead to others.
    """
    with open(path, "rb") as file:
        files = [*_files(file)]
    first = [*{each.key: each for each in reversed(files)}.values()][::-1]
    has_links = any(each.data < each.begin for each in files)
    keys = [key for key, _ in groupby(each.key for each in files)]
    if has_links or keys != [each.key for each in first]:
        return [(len(first), None)]
    if not files:
        return [(0, None)]
    ends = [each.begin for each in first[1:]]
    ends += [files[-1].data + -(-files[-1].size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE]
    pieces = (Piece(1, each.begin, end) for each, end in zip(first, ends, strict=True))
    return join(pieces, most)
