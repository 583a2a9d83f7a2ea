"""Download of a data set: complete, verified, and done once for any number of processes."""

import fcntl
import gzip
import hashlib
import os
import shutil
import tarfile
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from trainer import ConfigError

MOST_BYTES = 2**29  # of an unpacked archive: CIFAR-10 has 184 MB
TIMEOUT_S = 30.0  # for a response, and for each read of it
FAILURES = (OSError, HTTPException, tarfile.TarError, EOFError, zlib.error, ValueError)


def fetch(url: str, root: str, sha256: Mapping[str, str], key: str) -> None:
    """Download the files that `sha256` names into the directory `root`, unless all exist.

    They are in the .tar.gz archive at `url`. Every rank calls this. The first one downloads while
    the others wait for a file lock; if its process dies, the kernel releases the lock and the next
    one downloads. If the download fails, it fails for all waiting ranks, without retries. Raises
    ConfigError, which begins with `key`.
    """
    directory = Path(root).resolve()
    # The lock file is not removed: then two processes could lock two different files.
    lock = directory.with_name(f".{directory.name}.lock")
    if _has(directory, sha256):
        return
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with open(lock, "a", encoding="utf-8") as failures:
            known = lock.read_text(encoding="utf-8")
            fcntl.flock(failures, fcntl.LOCK_EX)
            if _has(directory, sha256):
                return
            if failure := lock.read_text(encoding="utf-8")[len(known) :]:
                raise ValueError(failure.strip())
            try:
                _download(url, directory, sha256)
            except FAILURES as error:
                if isinstance(error, HTTPError):
                    error.close()  # it is also the response, which keeps the connection open
                failures.write(f"{_reason(error)}\n")
                raise
    except FAILURES as error:
        names = list(sha256)
        advice = (
            f"put the {len(names)} files {names[0]} ... {names[-1]} of {_last(url)} into {root}"
        )
        raise ConfigError(f"{key}: cannot get {url} ({_reason(error)}); {advice}") from None


def _has(directory: Path, names: Mapping[str, str]) -> bool:
    return all((directory / name).is_file() for name in names)


def _reason(error: Exception) -> str:
    reason = error.reason if type(error) is URLError else error
    return " ".join(str(reason).split()) or type(error).__name__


def _last(url: str) -> str:
    return url.rpartition("/")[2]


def _download(url: str, directory: Path, sha256: Mapping[str, str]) -> None:
    scratch = directory.with_name(f".{directory.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)  # left by a killed process
    scratch.mkdir()
    try:
        _unpack(url, scratch, sha256)
        if directory.is_dir():
            for name in sha256:
                os.replace(scratch / name, directory / name)
        else:
            os.rename(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _unpack(url: str, scratch: Path, sha256: Mapping[str, str]) -> None:
    """Unpack the archive as it arrives. Paths in the archive are ignored, only file names count."""
    with (
        urlopen(url, timeout=TIMEOUT_S) as response,  # noqa: S310  # the task's own constant
        _bar(response, url) as stream,
        gzip.GzipFile(fileobj=stream) as unzipped,
        tarfile.open(fileobj=_Bounded(unzipped), mode="r|") as archive,
    ):
        for member in archive:
            is_plain = (
                member.isfile() and not member.issparse()
            )  # a sparse file unpacks to more bytes than the stream has
            name, source = (
                PurePosixPath(member.name).name,
                archive.extractfile(member) if is_plain else None,
            )
            if source is None or name not in sha256:
                continue
            data = source.read()
            if (found := hashlib.sha256(data).hexdigest()) != sha256[name]:
                raise ValueError(f"its {name} has SHA-256 {found}, must be {sha256[name]}")
            with open(scratch / name, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # a power cut could leave the name without the bytes
    if absent := [name for name in sha256 if not (scratch / name).is_file()]:
        raise ValueError(f"it has no {absent[0]}")


class _Bounded:
    """Stream of at most MOST_BYTES, so that an endless archive cannot fill the memory."""

    def __init__(self, stream: Any):
        self._stream, self._left = stream, MOST_BYTES

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise ValueError(f"it unpacks to more than {MOST_BYTES:,} bytes")
        return data


def _bar(response: Any, url: str) -> AbstractContextManager[Any]:
    """Wrap the response with a progress bar on stderr: stdout may be JSON."""
    from rich.console import Console
    from rich.progress import wrap_file

    console = Console(stderr=True, highlight=False)
    console.print(f"downloading {url}", markup=False, soft_wrap=True)
    size = int(response.headers.get("Content-Length") or 0)
    hidden = not console.is_terminal
    return wrap_file(
        response, size, description=_last(url), console=console, transient=True, disable=hidden
    )
