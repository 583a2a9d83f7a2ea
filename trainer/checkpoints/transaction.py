"""A checkpoint is a transaction: a directory that is there whole, or not at all.

    checkpoints/step-00000100/{model.pt, training.pt, manifest.json}

Files are written and fsynced in a staging directory, the manifest with their sizes and SHA-256
last; one rename publishes it, an fsync of the parent makes that last. Only then may older ones
go. Nothing is ever overwritten, and a name whose fsync failed is not used again: after a failure
the kernel may report the next one as done.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoints.files import read_file, sync_directory, write_file
from trainer.checkpoints.manifest import (
    FORMAT,
    MANIFEST,
    MOST_BYTES,
    STEP_NAME,
    digest,
    read_manifest,
)
from trainer.errors import CheckpointError


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint: its manifest and the bytes that the manifest's digests are of."""

    path: Path
    manifest: dict[str, Any]
    files: dict[str, bytes]


def save(
    root: Path,
    step: int,
    files: Iterable[tuple[str, bytes | memoryview]],
    facts: Mapping[str, Any],
    check_owner: Callable[[], None] = lambda: None,
) -> Path:
    """Publish `files`, (name, content) one at a time, as `root/step-<step>`.

    `facts` go into the manifest. `check_owner` is called last before the rename, and may raise.
    Raises CheckpointError where that step exists already, and OSError as the disk gives it.
    """
    final = root / f"step-{step:08d}"
    if final.exists():
        raise CheckpointError(f"{final} exists already: a checkpoint is never overwritten")
    if not root.exists():
        root.mkdir(mode=0o700)
        sync_directory(root.parent)
    staging = root / f".staging-{step:08d}-{secrets.token_hex(4)}"
    os.mkdir(staging, 0o700)
    try:
        _write_all(staging, files, {"format": FORMAT, "step": step, **facts})
        sync_directory(staging)
        check_owner()
        os.rename(staging, final)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    try:
        sync_directory(root)
    except OSError:
        _discard([final])  # it may not be there after a power cut
        raise
    return final


def _write_all(
    folder: Path, files: Iterable[tuple[str, bytes | memoryview]], facts: Mapping[str, Any]
) -> None:
    """The files, then the manifest with their digests."""
    listed = {}
    for name, data in files:
        sha256 = hashlib.sha256(data).hexdigest()
        listed[name] = {"rank": 0, "bytes": len(data), "sha256": sha256}
        write_file(folder / name, data)
    manifest = {**facts, "files": listed}
    text = json.dumps({**manifest, "sha256": digest(manifest)}, indent=1)
    if len(text) > MOST_BYTES:
        num_replaced = len(manifest.get("replaced", ()))
        why = f"its manifest has {len(text):,} bytes, of which {MOST_BYTES:,} can be read"
        advice = f"mend or remove the {num_replaced:,} examples that data.on_error=skip replaced"
        raise CheckpointError(f"{folder.parent}: cannot be saved, {why}; {advice}")
    write_file(folder / MANIFEST, text.encode())


def load(path: Path) -> Loaded:
    """The checkpoint at `path`.

    Raises CheckpointError, with the reason, unless every byte is as it was written.
    """
    manifest = read_manifest(path)
    files = {}
    for name, entry in manifest["files"].items():
        try:
            size, data = read_file(path / name, entry["bytes"])
        except (OSError, ValueError, MemoryError) as error:
            raise CheckpointError(f"{path / name!s}: {getattr(error, 'strerror', error)}") from None
        if size != entry["bytes"]:
            raise CheckpointError(f"{path / name}: {size} bytes, {entry['bytes']} were written")
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            why = "its SHA-256 is not the one in the manifest, so bits have changed"
            raise CheckpointError(f"{path / name}: {why}")
        files[name] = data
    return Loaded(path, manifest, files)


def steps(root: Path) -> dict[int, Path]:
    """Published checkpoints by step, oldest first, valid or not."""
    found = {}
    for path in root.glob("step-*"):
        match = STEP_NAME.fullmatch(path.name)
        if match and _is_own_directory(path):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def _is_own_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()  # a link may lead to what somebody else wrote


def load_newest(root: Path) -> tuple[Loaded | None, list[str]]:
    """The newest checkpoint that verifies, and a line for each newer one that did not."""
    skipped: list[str] = []
    for path in reversed(steps(root).values()):
        try:
            return load(path), skipped
        except CheckpointError as error:
            skipped.append(f"skipped {path.name}: {error}")
    return None, skipped


def newest_manifest(root: Path) -> dict[str, Any] | None:
    """The manifest of the newest checkpoint that has a readable one."""
    for path in reversed(steps(root).values()):
        try:
            return read_manifest(path)
        except CheckpointError:
            continue
    return None


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that does not verify, out of the way of its step."""
    aside = path.with_name(f"invalid-{path.name}-{secrets.token_hex(4)}")
    os.rename(path, aside)
    return aside


def prune(
    root: Path,
    keep_last: int,
    keep_best: int,
    metric: str,
    mode: str,
    also: Set[int | None],
    check_owner: Callable[[], None] = lambda: None,
) -> None:
    """Remove all but the newest `keep_last`, the best `keep_best` by `metric`, and `also`.

    Only what has a readable manifest counts, and only that is removed: a damaged checkpoint
    never takes the place of a good one.
    """
    found: dict[int, Path] = {}
    metrics: dict[int, float] = {}
    for step, path in steps(root).items():
        try:
            value = read_manifest(path).get("metrics", {}).get(metric)
        except CheckpointError:
            continue
        found[step] = path
        if isinstance(value, (int, float)) and value == value:
            metrics[step] = value if mode == "min" else -value
    best = sorted(metrics, key=lambda step: (metrics[step], step))[:keep_best]
    keep = {*list(found)[-keep_last:], *best, *also}
    check_owner()
    _discard([path for step, path in found.items() if step not in keep])


def sweep(root: Path) -> None:
    """Remove what an interrupted save or prune left behind; only for the owner of `root`.

    A writer that was frozen in a save, and wakes, then finds nothing to publish.
    """
    _discard([*root.glob(".staging-*"), *root.glob(".trash-*")])


def _discard(paths: Sequence[Path]) -> None:
    """Rename, then remove: half a directory must not look like a checkpoint, nor be published."""
    trash = [path.with_name(f".trash-{path.name}-{secrets.token_hex(4)}") for path in paths]
    for path, gone in zip(paths, trash, strict=True):
        os.rename(path, gone)
    for gone in trash:
        shutil.rmtree(gone, ignore_errors=True)
