"""Copies of runs in stores: small files are fetched at once, those of a checkpoint when they are
read."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from trainer.base.errors import ConfigError
from trainer.base.plain_files import open_regular
from trainer.core.config.saved_config import MANIFEST
from trainer.core.config.stores import (
    Held,
    NotThereError,
    Store,
    StoreError,
    name_of,
    open_store,
)

COPY_PREFIX = ".lockstep-copy-"  # begins the name of a folder with a copy
LOCK = ".lock"
HELD = ".held"  # a file in it, locked by its process
STALE_S = 86_400.0

_made: list[tuple[int, Path]] = []  # processes, and the folders of their copies
_copies: dict[Path, str] = {}  # of this process: folders of runs and checkpoints, with addresses


def copy_of(
    address: str,
    base: Path | None = None,
    has_checkpoints: bool = True,
    held: Held | None = None,
) -> Path:
    """Make a copy of a run in a folder of `base`, or of the temporary folder.

    It has the record of the run, and the manifests of its checkpoints. It is removed at the end of
    the process. `held` is what the store holds, for those who have just read it. Raises
    ConfigError.
    """
    try:
        if base is not None:
            base.mkdir(parents=True, exist_ok=True)
        _sweep(base or Path(tempfile.gettempdir()))
        own = f"{COPY_PREFIX}{socket.gethostname()}-"
        parent = Path(tempfile.mkdtemp(prefix=own, dir=base)).absolute()
        _made.append((os.getpid(), parent))
        _hold(parent)
        folder = parent / name_of(address)
        folder.mkdir()
        store = open_store(address)
        _copies[folder] = store.address
        _copy_run(store, held or store.held(), folder, has_checkpoints)
    except OSError as error:
        raise ConfigError(f"""{address}: cannot be copied to this machine: {error};
            make room there, or set TMPDIR to another folder""") from None
    except StoreError as error:
        raise ConfigError(f"""{address}: cannot be read: {error};
            check the address and the login""") from None
    return folder


@atexit.register
def remove_copies() -> None:
    """Remove the copies that this process has made, as a fork of it must not."""
    for pid, folder in _made:
        if pid == os.getpid():
            shutil.rmtree(folder, ignore_errors=True)


def _hold(folder: Path) -> None:
    """Lock a copy until this process and those that it forks have ended."""
    with suppress(OSError):  # a file system without locks
        lock = os.open(folder / ".unlocked", os.O_WRONLY | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / ".unlocked").rename(folder / HELD)


def _sweep(base: Path) -> None:
    """Remove copies of processes that were killed: a start that is killed again and again would
    fill the disk."""
    own = f"{COPY_PREFIX}{socket.gethostname()}-"
    for folder in base.glob(f"{COPY_PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue  # in a temporary folder anybody may make one
            is_over = folder.name.startswith(own) and _is_free(folder / HELD)
            if is_over or time.time() - status.st_mtime > STALE_S:
                shutil.rmtree(folder, ignore_errors=True)


def _is_free(held: Path) -> bool:
    with suppress(OSError), open_regular(held) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _copy_run(store: Store, held: Held, folder: Path, has_checkpoints: bool) -> None:
    for name, (there, size) in held.record.items():
        if size <= store.SMALL:
            (folder / name).write_bytes(store.get(there))
        else:  # metrics.jsonl grows, but what is there does not change
            store.download(there, folder / name, sys.maxsize)
    if not held.record:
        raise NotThereError("there is no run")
    for step, stored_name in held.checkpoints.items() if has_checkpoints else ():
        path = folder / "checkpoints" / f"step-{step:08d}"
        copy_manifest(path, f"{store.address}/{stored_name}")


def copy_manifest(path: Path, address: str) -> None:
    """Make a folder the copy of a checkpoint at an address, whose files `fetch` brings.

    Raises StoreError, and OSError if the folder cannot be made.
    """
    _copies[path] = address
    if not (path / MANIFEST).is_file():
        home = next((each for each in path.parents if each.name.startswith(COPY_PREFIX)), path)
        if not home.exists():  # on a node that does not see that of rank 0
            _made.append((os.getpid(), home))
        path.mkdir(parents=True, exist_ok=True)
        part = path / f".{MANIFEST}.{os.getpid()}"  # other ranks of this node write it too
        part.write_bytes(_store_of(address).get(MANIFEST))
        part.replace(path / MANIFEST)


def with_addresses(text: str) -> str:
    """Return a text with the addresses of runs and checkpoints, not the places of their copies."""
    for path in sorted(_copies, key=lambda path: -len(path.parts)):  # a checkpoint before its run
        text = text.replace(str(path), _copies[path])
    return text


def address_of(path: Path) -> str:
    """Return the address of the run or checkpoint whose copy a folder is; "" for other folders."""
    return _copies.get(path, "")


def fetch(path: Path, name: str, most: int, check: Callable[[str, int, str], None]) -> Path:
    """Return the path of a file of a checkpoint, of a copy after it was fetched and verified.

    One rank of a node fetches it, and the others wait. `check` gets its address, size and SHA-256,
    and raises if these are not the right ones. Raises StoreError, OSError.
    """
    file = path / name
    address = _copies.get(path)
    if address and not file.exists():
        with open(path / LOCK, "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                part = path / f".{name}.part"
                check(f"{address}/{name}", *_store_of(address).download(name, part, most))
                part.replace(file)
    return file


def drop_fetched(path: Path) -> None:
    """Remove the files of a copy, which are fetched again when they are read again."""
    for file in path.glob("*") if path in _copies else ():
        if file.name not in (MANIFEST, LOCK):
            file.unlink(missing_ok=True)


@lru_cache(4)
def _store_of(address: str) -> Store:
    return open_store(address)
