"""A checkpoint is a transaction: a directory that is there whole, or not at all.

    checkpoints/step-00000100/{model.pt, training.pt, manifest.json}

Files are written and fsynced in a staging directory, the manifest with their sizes and SHA-256 last; one rename
publishes it, an fsync of the parent makes that last. Only then may older ones go. Nothing is ever overwritten.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import secrets
import shutil
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint: its manifest and the bytes that the manifest's digests are of."""

    path: Path
    manifest: dict[str, Any]
    files: dict[str, bytes]


def save(root: Path, step: int, parts: Mapping[str, Any], facts: Mapping[str, Any]) -> Path:
    """Publish `parts` (name to tensors and plain values) as `root/step-<step>`; `facts` go into the manifest.

    Raises CheckpointError where that step exists already, and OSError as the disk gives it.
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
        files = {}
        for name, part in parts.items():
            _check_plain(part, name)
            buffer = io.BytesIO()
            torch.save(part, buffer)
            data = buffer.getbuffer()
            files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            _write(staging / name, data)
        manifest = {"format": FORMAT, "step": step, **facts, "files": files}
        _write(staging / MANIFEST, json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1).encode())
        _sync_directory(staging)
        os.rename(staging, final)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    _sync_directory(root)
    return final


def load(path: Path) -> Loaded:
    """The checkpoint at `path`. Raises CheckpointError, with the reason, unless every byte is as it was written."""
    manifest = read_manifest(path)
    files = {}
    for name, entry in manifest["files"].items():
        try:
            data = (path / name).read_bytes()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path / name!s}: {getattr(error, 'strerror', error)}") from None
        if len(data) != entry["bytes"]:
            raise CheckpointError(f"{path / name}: {len(data)} bytes, {entry['bytes']} were written")
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise CheckpointError(f"{path / name}: its SHA-256 is not the one in the manifest, so bits have changed")
        files[name] = data
    return Loaded(path, manifest, files)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest alone, its form checked but no file's bytes."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        files = manifest["files"]
        well_formed = all(
            Path(n).name == n and isinstance(e["bytes"], int) and isinstance(e["sha256"], str) for n, e in files.items()
        )
        number = _NAME.fullmatch(path.resolve().name)
    except OSError as error:
        raise CheckpointError(f"{path / MANIFEST}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{path / MANIFEST}: cannot be read as a manifest") from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {manifest.get('format')}, this version reads {FORMAT}")
    if not well_formed or not number or manifest.get("step") != int(number[1]):
        raise CheckpointError(f"{path / MANIFEST}: does not belong to this checkpoint")
    if manifest.pop("sha256", None) != _digest(manifest):
        raise CheckpointError(f"{path / MANIFEST}: its SHA-256 is not the one in it, so it has changed")
    return manifest


def steps(root: Path) -> dict[int, Path]:
    """Published checkpoints by step, oldest first, valid or not."""
    found = {int(m[1]): p for p in root.glob("step-*") if (m := _NAME.fullmatch(p.name)) and p.is_dir()}
    return dict(sorted(found.items()))


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


def unpack(data: bytes, device: torch.device) -> Any:
    """Tensors and plain values only, on `device`. Raises CheckpointError for anything else."""
    try:
        return torch.load(io.BytesIO(data), map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"the checkpoint holds more than tensors and plain values: {reason}") from None


def set_aside(path: Path) -> Path:
    """Move a checkpoint that does not verify out of the way of its step, keeping it for whoever wants to look."""
    aside = path.with_name(f"invalid-{path.name}-{secrets.token_hex(4)}")
    os.rename(path, aside)
    return aside


def prune(root: Path, keep_last: int, keep_best: int, metric: str, mode: str, also: Set[int | None]) -> None:
    """Remove all but the newest `keep_last`, the best `keep_best` by `metric` in the manifest, and the steps `also`."""
    metrics: dict[int, float] = {}
    found = steps(root)
    for step, path in found.items():
        try:
            value = read_manifest(path).get("metrics", {}).get(metric)
        except CheckpointError:
            continue
        if isinstance(value, (int, float)) and value == value:
            metrics[step] = value if mode == "min" else -value
    best = sorted(metrics, key=lambda step: (metrics[step], step))[:keep_best]
    keep = {*list(found)[-keep_last:], *best, *also}
    trash = []
    for step, path in found.items():
        if step not in keep:
            trash.append(root / f".trash-{path.name}-{secrets.token_hex(4)}")
            os.rename(path, trash[-1])  # first out of sight: half a directory must not look like a checkpoint
    for path in trash:
        shutil.rmtree(path, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove what an interrupted save or prune left behind. Only for the one process that writes here."""
    for leftover in [*root.glob(".staging-*"), *root.glob(".trash-*")]:
        shutil.rmtree(leftover, ignore_errors=True)


def _check_plain(part: Any, name: str) -> None:
    """Refuse at the save what could not be loaded: numpy numbers, paths, objects."""
    if isinstance(part, Mapping):
        for key, value in part.items():
            _check_plain(key, name)
            _check_plain(value, f"{name}: {key}")
    elif type(part) in (list, tuple):
        for value in part:
            _check_plain(value, name)
    elif part is not None and type(part) not in (bool, int, float, str) and not isinstance(part, torch.Tensor):
        raise CheckpointError(f"{name} is a {type(part).__name__}: a checkpoint holds tensors and plain values only")


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _write(path: Path, data: Any) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
