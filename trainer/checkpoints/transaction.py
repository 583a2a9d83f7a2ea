"""A checkpoint is a transaction: a directory that exists as a whole, or not at all.

    checkpoints/step-00000100/{model-r00000.safetensors, training.pt, tensors.json, manifest.json}

Files are written and fsynced in a staging directory, last of all the manifest with their sizes and
SHA-256. Each rank may write some of the files, and rank 0 writes the manifest. One rename publishes
the directory, and an fsync of its parent makes the rename durable. Only then are older checkpoints
removed. Nothing is ever overwritten. A name whose fsync failed is not used a second time: after a
failure the kernel may report the next fsync as done.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainer.checkpoints.files import digest_file, read_sized, sync_directory, write_file
from trainer.checkpoints.manifest import (
    FORMAT,
    MANIFEST,
    STEP_NAME,
    digest,
    read_manifest,
)
from trainer.config.plain_files import MOST_OF_JSON
from trainer.errors import CheckpointError

TRIES = 100  # to list checkpoints, while a run removes all that were listed
Found = TypeVar("Found")


class FileContents(Mapping[str, bytes]):
    """The files of a checkpoint by name, read when they are asked for."""

    def __init__(self, path: Path, entries: Mapping[str, Any]):
        self._path = path
        self._entries = entries

    def __getitem__(self, name: str) -> bytes:
        """Read a file. Raises CheckpointError if a byte differs from what was written."""
        entry = self._entries[name]
        place = self._path / name
        with _errors_named(place):
            size, data = read_sized(place, entry["bytes"])
        _check(place, entry, size, hashlib.sha256(data).hexdigest())
        return data

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # Mapping's own would read the file

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def verify(self, names: Iterable[str]) -> None:
        """Read files block by block. Raises CheckpointError if a byte has changed."""
        for name in names:
            entry = self._entries[name]
            place = self._path / name
            with _errors_named(place):
                found = digest_file(place, entry["bytes"])
            _check(place, entry, *found)


@contextmanager
def _errors_named(place: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, MemoryError) as error:
        raise CheckpointError(f"{place!s}: {getattr(error, 'strerror', error)}") from None


def _check(place: Path, entry: Mapping[str, Any], size: int, sha256: str) -> None:
    if size != entry["bytes"]:
        raise CheckpointError(f"{place}: {size} bytes, {entry['bytes']} were written")
    if sha256 != entry["sha256"]:
        why = "its SHA-256 differs from the manifest's, so bits have changed"
        raise CheckpointError(f"{place}: {why}")


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint with a valid manifest; `load` also verifies its files."""

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> CheckpointFiles:
        """Read and verify the manifest only. Raises CheckpointError."""
        return cls(path, read_manifest(path))

    @property
    def files(self) -> FileContents:
        return FileContents(self.path, self.manifest["files"])


def final_path(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def stage(root: Path, step: int) -> Path:
    """Create the staging directory of a checkpoint, to write its files into.

    Raises CheckpointError if that step already exists, and OSError for disk errors.
    """
    if final_path(root, step).exists():
        raise CheckpointError(
            f"{final_path(root, step)} already exists: a checkpoint is never overwritten"
        )
    if not root.exists():
        root.mkdir(mode=0o700)
        sync_directory(root.parent)
    staging = root / f".staging-{step:08d}-{secrets.token_hex(4)}"
    os.mkdir(staging, 0o700)
    return staging


@contextmanager
def removed_on_error(staging: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def write_one(staging: Path, name: str, data: bytes | memoryview) -> dict[str, Any]:
    """Write a file of rank 0, and return its entry in the manifest."""
    write_file(staging / name, data)
    return {"rank": 0, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def publish(
    staging: Path,
    root: Path,
    step: int,
    files: Mapping[str, Any],
    facts: Mapping[str, Any],
    check_owner: Callable[[], None],
) -> None:
    """Write the manifest of the files in `staging`, and rename it to the checkpoint."""
    _write_manifest(staging, {"format": FORMAT, "step": step, **facts, "files": files})
    sync_directory(staging)
    check_owner()
    os.rename(staging, final_path(root, step))
    try:
        sync_directory(root)
    except OSError:
        _discard([final_path(root, step)])  # it may not be there after a power cut
        raise


def _write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    text = json.dumps({**manifest, "sha256": digest(manifest)}, indent=1)
    if len(text) > MOST_OF_JSON:
        num_replaced = len(manifest.get("replaced", ()))
        why = f"its manifest has {len(text):,} bytes, and at most {MOST_OF_JSON:,} can be read"
        advice = f"repair or remove the {num_replaced:,} examples that data.on_error=skip replaced"
        raise CheckpointError(f"{folder.parent}: cannot be saved, {why}; {advice}")
    write_file(folder / MANIFEST, text.encode())


def load(path: Path) -> CheckpointFiles:
    """Read the manifest of the checkpoint at `path`, and verify each file.

    Raises CheckpointError, with the reason, if any byte differs from what was written.
    """
    loaded = CheckpointFiles.read(path)
    loaded.files.verify(loaded.files)
    return loaded


def steps(root: Path) -> dict[int, Path]:
    """Return the published checkpoints by step, oldest first, valid or not."""
    paths: dict[int, Path] = {}
    for _ in range(TRIES):
        named = [path for path in root.glob("step-*") if STEP_NAME.fullmatch(path.name)]
        paths = {int(path.name[5:]): path for path in named if _is_own_directory(path)}
        if paths or not any(is_gone(path) for path in named):
            break  # else all were removed meanwhile, by a run that has newer ones
    return dict(sorted(paths.items()))


def is_gone(path: Path) -> bool:
    """Return True if a checkpoint was removed since it was listed: its run may be going on."""
    return not os.path.lexists(path)


def _is_own_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()  # a link may lead to others' files


def find_newest(root: Path, read: Callable[[Path], Found]) -> tuple[Found | None, list[str]]:
    """Return what `read` makes of the newest checkpoint for which it raises no CheckpointError.

    The second result has a line for each newer one. A run that is going on may remove checkpoints
    before they are read, when it has newer ones: they are listed again then.
    """
    skipped: list[str] = []
    for _ in range(TRIES):
        skipped = []
        is_outdated = False
        for path in reversed(steps(root).values()):
            try:
                return read(path), skipped
            except CheckpointError as error:
                is_outdated |= is_gone(path)
                if not is_gone(path):
                    skipped.append(f"skipped {path.name}: {error}")
        if not is_outdated:
            break
    return None, skipped


def load_newest(root: Path) -> tuple[CheckpointFiles | None, list[str]]:
    """Load the newest valid checkpoint; return it and a line for each newer, invalid one."""
    return find_newest(root, load)


def newest_manifest(root: Path) -> dict[str, Any] | None:
    """Return the manifest of the newest checkpoint that has a readable one, or None."""
    return find_newest(root, read_manifest)[0]


def set_aside(path: Path) -> Path:
    """Rename a checkpoint, so that its step can be saved again; return the new path."""
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

    Only checkpoints with a readable manifest are counted and removed: a damaged one never takes
    the place of a good one.
    """
    paths: dict[int, Path] = {}
    metrics: dict[int, float] = {}
    for step, path in steps(root).items():
        try:
            value = read_manifest(path).get("metrics", {}).get(metric)
        except CheckpointError:
            continue
        paths[step] = path
        if isinstance(value, (int, float)) and value == value:
            metrics[step] = value if mode == "min" else -value
    best = sorted(metrics, key=lambda step: (metrics[step], step))[:keep_best]
    keep = {*list(paths)[-keep_last:], *best, *also}
    check_owner()
    _discard([path for step, path in paths.items() if step not in keep])


def sweep(root: Path) -> None:
    """Remove the leftovers of an interrupted save or prune; only for the owner of `root`.

    A writer that was frozen during a save then finds nothing to publish when it wakes. Leftovers
    that cannot be removed do no harm.
    """
    with suppress(OSError):
        _discard([*root.glob(".staging-*"), *root.glob(".trash-*")])


def _discard(paths: Sequence[Path]) -> None:
    """Rename, then remove: a partial directory must never look like a checkpoint.

    Raises the first OSError after the others are removed.
    """
    trash = []
    problem: OSError | None = None
    for path in paths:
        renamed = path.with_name(f".trash-{path.name}-{secrets.token_hex(4)}")
        try:
            os.rename(path, renamed)
            trash.append(renamed)
        except OSError as error:
            problem = problem or error
    for renamed in trash:
        shutil.rmtree(renamed, ignore_errors=True)
    if problem is not None:
        raise problem
