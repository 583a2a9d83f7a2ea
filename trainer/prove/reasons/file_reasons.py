"""Reasons in files: a command reads what the command before it wrote."""

from __future__ import annotations

from pathlib import Path

from trainer.prove.comparison import PairComparison

SNAPSHOTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".pkl", ".npz", ".npy", ".json")
MOST_NAMES = 2


def name_files(found: PairComparison) -> str:
    """Name files that B reads and A wrote; "" if there are none."""
    written = {path for rank in found.one.ranks for path in rank.written}
    read = {
        path
        for rank in found.other.ranks
        for path, is_first_written in rank.files.items()
        if not is_first_written and path in written
    }
    if not read:
        return ""
    order = sorted(read, key=lambda path: (Path(path).suffix not in SNAPSHOTS, path))
    names = " and ".join(order[:MOST_NAMES])
    return f"{found.other.name} reads {names}, which {found.one.name} wrote: it does not start anew"
