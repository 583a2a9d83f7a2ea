"""Tar files in WebDataset's convention: files of one name, but for the ending, are one example."""

from __future__ import annotations

import io
import json
import mmap
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

SUFFIXES = (".tar",)
KEY = "__key__"


class TarShard:
    """The examples of one file: {"__key__": name, ending: content}.

    Endings .cls and .id are integers, .txt is text, .json is parsed and .npy a tensor; everything
    else, such as an image, stays bytes.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], rows: int):
        with open(path, "rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._members = _members(path)
        if len(self._members) != rows:
            raise ValueError(f"{path} has {len(self._members)} examples, and {rows} in its index")

    def __getitem__(self, row: int) -> dict[str, Any]:
        key, files = self._members[row]
        example: dict[str, Any] = {KEY: key}
        for ending, (begin, size) in files.items():
            example[ending] = _decode(ending, self._data[begin : begin + size])
        return example


def _members(path: Path) -> list[tuple[str, dict[str, tuple[int, int]]]]:
    """Return (key, {ending: (offset, bytes)}) of each example, in the order of the file."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            folder, _, name = member.name.rpartition("/")
            stem, dot, ending = name.partition(".")
            if not member.isreg() or not stem or not dot:
                continue
            key = f"{folder}/{stem}".lstrip("/")
            found.setdefault(key, {})[ending.lower()] = (member.offset_data, member.size)
    return [*found.items()]


def _decode(ending: str, data: bytes) -> Any:
    plain: dict[str, Callable[[bytes], Any]] = {
        **{"cls": int, "id": int, "txt": bytes.decode, "text": bytes.decode, "json": json.loads},
        "npy": lambda data: torch.from_numpy(np.load(io.BytesIO(data), allow_pickle=False)),
    }
    return plain.get(ending.rpartition(".")[2], bytes)(data)


def count_rows(path: Path, settings: Mapping[str, Any]) -> int:
    return len(_members(path))
