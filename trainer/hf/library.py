"""Texts that need no download: the files of Python's standard library."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from trainer.base.process.streams import without_bars

FOLDERS_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


@cache
def read_library(count: int) -> tuple[list[bytes], str]:
    """Return the first `count` files of the standard library by path, and their joint SHA-256."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = {*folders} - FOLDERS_LEFT_OUT
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    texts = [path.read_bytes() for path in sorted(paths, key=Path.as_posix)[:count]]
    return texts, hashlib.sha256(b"".join(texts)).hexdigest()


def cut(text: bytes, context: int) -> list[bytes]:
    """Join whole lines to sequences of at most `context` bytes; break longer lines."""
    pieces = [
        line[i : i + context]
        for line in text.splitlines(True)
        for i in range(0, len(line), context)
    ]
    sequences = [b""]
    for piece in pieces:
        if len(sequences[-1]) + len(piece) > context:
            sequences.append(b"")
        sequences[-1] += piece
    return [sequence for sequence in sequences if sequence]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide bars, and what transformers logs; for a caller who says what matters."""
    logs = sys.modules.get("transformers.utils.logging")
    before = logs.get_verbosity() if logs else 0
    if logs:
        logs.set_verbosity(logs.CRITICAL)
    try:
        with without_bars():
            yield
    finally:
        if logs:
            logs.set_verbosity(before)
