"""A checkpoint is a transaction: a directory that is there whole, or not at all.

    checkpoints/step-00000100/{model.pt, training.pt, manifest.json}

Files are written and fsynced in a staging directory, the manifest with their sizes and SHA-256 last; one rename
publishes it, an fsync of the parent makes that last. Only then may older ones go. Nothing is ever overwritten, and a
name whose fsync failed is not used again: after a failure the kernel may report the next one as done.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import CheckpointError

FORMAT = 2
MANIFEST = "manifest.json"
MOST_OF_MANIFEST = 2**26
_NAME = re.compile(r"step-(\d{8,})")
_PLACE = re.compile(r"\d{1,18}/(\d{1,18})")  # <epoch>/<index>
_OF_RUN = {"run": str, "strategy": str, "world_size": int, "ledger": str, "sessions": list}
_OF_RUN |= dict.fromkeys(("replaced", "data", "config", "metrics"), dict)


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
    """Publish `files`, (name, content) one at a time, as `root/step-<step>`; `facts` go into the manifest.

    `check_owner` is called last before the rename, and may raise. Raises CheckpointError where that step exists
    already, and OSError as the disk gives it.
    """
    final = root / f"step-{step:08d}"
    if final.exists():
        raise CheckpointError(f"{final} exists already: a checkpoint is never overwritten")
    if not root.exists():
        root.mkdir(mode=0o700)
        _sync_directory(root.parent)
    staging = root / f".staging-{step:08d}-{secrets.token_hex(4)}"
    os.mkdir(staging, 0o700)
    try:
        listed = {}
        for name, data in files:
            listed[name] = {
                "rank": 0,
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
            }
            _write(staging / name, data)
        manifest = {"format": FORMAT, "step": step, **facts, "files": listed}
        _write(
            staging / MANIFEST,
            json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1).encode(),
        )
        _sync_directory(staging)
        check_owner()
        os.rename(staging, final)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    try:
        _sync_directory(root)
    except OSError:
        _discard([final])  # it may not be there after a power cut
        raise
    return final


def load(path: Path) -> Loaded:
    """The checkpoint at `path`. Raises CheckpointError, with the reason, unless every byte is as it was written."""
    manifest = read_manifest(path)
    files = {}
    for name, entry in manifest["files"].items():
        try:
            size, data = _read(path / name, entry["bytes"])
        except (OSError, ValueError, MemoryError) as error:
            raise CheckpointError(f"{path / name!s}: {getattr(error, 'strerror', error)}") from None
        if size != entry["bytes"]:
            raise CheckpointError(f"{path / name}: {size} bytes, {entry['bytes']} were written")
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise CheckpointError(
                f"{path / name}: its SHA-256 is not the one in the manifest, so bits have changed"
            )
        files[name] = data
    return Loaded(path, manifest, files)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest alone, its form checked but no file's bytes."""
    try:
        manifest = json.loads(
            _read(path / MANIFEST, MOST_OF_MANIFEST)[1], object_pairs_hook=_unique
        )
        well_formed = all(
            Path(n).name == n != ".."
            and n.isprintable()
            and type(e["bytes"]) is int
            and isinstance(e["sha256"], str)
            for n, e in manifest["files"].items()
        ) and all(type(v) in (int, float, type(None)) for v in manifest.get("metrics", {}).values())
        well_formed &= all(isinstance(manifest.get(key, {}), dict) for key in ("config", "data"))
        number = _NAME.fullmatch(path.resolve().name)
    except OSError as error:
        raise CheckpointError(f"{path / MANIFEST}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CheckpointError(f"{path / MANIFEST}: cannot be read as a manifest") from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: format {manifest.get('format')}, this version reads {FORMAT}"
        )
    if not well_formed or not number or manifest.get("step") != int(number[1]):
        raise CheckpointError(f"{path / MANIFEST}: does not belong to this checkpoint")
    if manifest.pop("sha256", None) != _digest(manifest):
        raise CheckpointError(
            f"{path / MANIFEST}: its SHA-256 is not the one in it, so it has changed"
        )
    return manifest


def check_run(manifest: Mapping[str, Any], path: Path) -> None:
    """Raises CheckpointError unless it holds all that a run's manifest does, of the right kinds."""
    if not _is_of_run(manifest):
        raise CheckpointError(f"{path}: its manifest is not that of a run")


def _is_of_run(manifest: Mapping[str, Any]) -> bool:
    if not all(type(manifest.get(name)) is kind for name, kind in _OF_RUN.items()):
        return False
    data, settings, replaced = manifest["data"], manifest["config"], manifest["replaced"]
    lengths = [part.get("length") if type(part) is dict else None for part in data.values()]
    if "train" not in data or not all(type(length) is int and length > 0 for length in lengths):
        return False
    batch, seed, most = (
        settings.get("data.global_batch"),
        settings.get("run.seed"),
        data["train"]["length"],
    )
    if type(batch) is not int or type(seed) is not int:
        return False
    pairs = [
        (int(m[1]) if (m := _PLACE.fullmatch(place)) else most, index)
        for place, index in replaced.items()
    ]
    are_placed = all(
        type(index) is int and 0 <= index < most and wanted < most for wanted, index in pairs
    )
    are_sessions = all(
        type(s) is list and [*map(type, s)] == [int, int] for s in manifest["sessions"]
    )
    return (
        are_placed
        and are_sessions
        and manifest["world_size"] >= 1
        and 1 <= batch <= most
        and seed >= 0
    )


def steps(root: Path) -> dict[int, Path]:
    """Published checkpoints by step, oldest first, valid or not."""
    found = {
        int(m[1]): p
        for p in root.glob("step-*")
        if (m := _NAME.fullmatch(p.name)) and _is_own_directory(p)
    }
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
    """Move a checkpoint that does not verify out of the way of its step, keeping it for whoever wants to look."""
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
    """Remove all but the newest `keep_last`, the best `keep_best` by `metric` in the manifest, and the steps `also`.

    Only what has a readable manifest counts, and only that is removed: what is damaged never stands in for it.
    """
    found, metrics = {}, {}
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
    """Remove what an interrupted save or prune left behind. Only for the one process that writes here.

    A writer that was frozen in a save, and wakes, then does not find it to publish.
    """
    _discard([*root.glob(".staging-*"), *root.glob(".trash-*")])


def _discard(paths: Sequence[Path]) -> None:
    """Rename, then remove: half a directory must not look like a checkpoint, nor be published."""
    trash = [path.with_name(f".trash-{path.name}-{secrets.token_hex(4)}") for path in paths]
    for path, gone in zip(paths, trash, strict=True):
        os.rename(path, gone)
    for gone in trash:
        shutil.rmtree(gone, ignore_errors=True)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name stands twice")
    return found


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _write(path: Path, data: bytes | memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, most: int) -> tuple[int, bytes]:
    """A regular file's size and, if that is at most `most`, its bytes. A pipe is not waited for."""
    with open(
        path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    ) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        return found.st_size, file.read() if found.st_size <= most else b""


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
