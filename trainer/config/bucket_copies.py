"""Copies of runs in buckets: small files are fetched at once, those of a checkpoint when they are
read."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from trainer.config.bucket import (
    MANIFEST,
    RECORD,
    Bucket,
    BucketError,
    Listing,
    NotThereError,
    name_of,
    read_listing,
)
from trainer.errors import ConfigError

COPY = ".lockstep-copy-"  # begins the name of a folder with a copy
LOCK = ".lock"
HELD = ".held"  # a file in it, locked by its process
STALE_S = 86_400.0

_made: list[tuple[int, Path]] = []  # processes, and the folders of their copies
_copies: dict[Path, str] = {}  # of this process: folders of runs and checkpoints, with addresses


def copy_of(address: str, base: Path | None = None, has_checkpoints: bool = True) -> Path:
    """Make a copy of a run in a folder of `base`, or of the temporary folder.

    It has the record of the run, and the manifests of its checkpoints. It is removed at the end of
    the process. Raises ConfigError.
    """
    try:
        if base is not None:
            base.mkdir(parents=True, exist_ok=True)
        _sweep(base or Path(tempfile.gettempdir()))
        own = f"{COPY}{socket.gethostname()}-"
        place = Path(tempfile.mkdtemp(prefix=own, dir=base)).absolute()
        _made.append((os.getpid(), place))
        _hold(place)
        folder = place / name_of(address)
        folder.mkdir()
        bucket = Bucket(address)
        _copies[folder] = bucket.address
        _copy_run(bucket, read_listing(bucket), folder, has_checkpoints)
    except (BucketError, OSError) as error:
        raise ConfigError(f"""{address}: cannot be read: {error};
            check the address and the login""") from None
    return folder


@atexit.register
def remove_copies() -> None:
    """Remove the copies that this process has made, as a fork of it must not."""
    for pid, place in _made:
        if pid == os.getpid():
            shutil.rmtree(place, ignore_errors=True)


def _hold(place: Path) -> None:
    """Lock a copy until this process and those that it forks have ended."""
    with suppress(OSError):  # a file system without locks
        lock = os.open(place / ".unlocked", os.O_WRONLY | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        (place / ".unlocked").rename(place / HELD)


def _sweep(base: Path) -> None:
    """Remove copies of processes that were killed: a start that is killed again and again would
    fill the disk."""
    own = f"{COPY}{socket.gethostname()}-"
    for place in base.glob(f"{COPY}*"):
        with suppress(OSError):
            is_over = place.name.startswith(own) and _is_free(place / HELD)
            if is_over or time.time() - place.stat().st_mtime > STALE_S:
                shutil.rmtree(place, ignore_errors=True)


def _is_free(held: Path) -> bool:
    with suppress(OSError), held.open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _copy_run(bucket: Bucket, held: Listing, folder: Path, has_checkpoints: bool) -> None:
    home = held.home()
    for name in RECORD:
        if f"{home}/{name}" in held.sizes:
            (folder / name).write_bytes(bucket.get(f"{home}/{name}"))
    if not home:
        raise NotThereError("there is no run")
    for step, place in held.checkpoints().items() if has_checkpoints else ():
        path = folder / "checkpoints" / f"step-{step:08d}"
        copy_manifest(path, f"{bucket.address}/{place}")


def copy_manifest(path: Path, address: str) -> None:
    """Make a folder the copy of a checkpoint at an address, whose files `fetch` brings.

    Raises BucketError, and OSError if the folder cannot be made.
    """
    _copies[path] = address
    if not (path / MANIFEST).is_file():
        home = next((each for each in path.parents if each.name.startswith(COPY)), path)
        if not home.exists():  # on a node that does not see that of rank 0
            _made.append((os.getpid(), home))
        path.mkdir(parents=True, exist_ok=True)
        part = path / f".{MANIFEST}.{os.getpid()}"  # other ranks of this node write it too
        part.write_bytes(_bucket_of(address).get(MANIFEST))
        part.replace(path / MANIFEST)


def with_addresses(text: str) -> str:
    """Return a text with the addresses of runs and checkpoints, not the places of their copies."""
    for path, address in _copies.items():
        text = text.replace(str(path), address)
    return text


def address_of(path: Path) -> str:
    """Return the address of the run or checkpoint whose copy a folder is; "" for other folders."""
    return _copies.get(path, "")


def fetch(path: Path, name: str, most: int, check: Callable[[str, int, str], None]) -> Path:
    """Return the place of a file of a checkpoint, of a copy after it was fetched and verified.

    One rank of a node fetches it, and the others wait. `check` gets its address, size and SHA-256,
    and raises if these are not the right ones. Raises BucketError, OSError.
    """
    place = path / name
    address = _copies.get(path)
    if address and not place.exists():
        with open(path / LOCK, "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():
                part = path / f".{name}.part"
                check(f"{address}/{name}", *_bucket_of(address).download(name, part, most))
                part.replace(place)
    return place


def drop_fetched(path: Path) -> None:
    """Remove the files of a copy, which are fetched again when they are read again."""
    for place in path.glob("*") if path in _copies else ():
        if place.name not in (MANIFEST, LOCK):
            place.unlink(missing_ok=True)


@lru_cache(4)
def _bucket_of(address: str) -> Bucket:
    return Bucket(address)
