"""Fetching the files of a data set: whole, verified, and once however many processes ask."""

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

MOST_BYTES = 2**29  # of an archive, unpacked: CIFAR-10 has 184 MB
TIMEOUT_S = 30.0  # for an answer, and for each piece of it
FAILURES = (OSError, HTTPException, tarfile.TarError, EOFError, zlib.error, ValueError)


def fetch(url: str, root: str, sha256: Mapping[str, str], key: str) -> None:
    """Download the files that `sha256` names into the folder `root`, unless they are all there.

    They are in the .tar.gz archive at `url`. Every rank calls this. The first one downloads and
    the others wait; when its process dies, the kernel ends their wait and the next one takes
    over. If the download fails, it fails for all who waited: they do not try again one by one.
    Raises ConfigError, which begins with `key`.
    """
    place = Path(root).resolve()
    # The lock file stays: removing it would let two processes lock two files.
    lock = place.with_name(f".{place.name}.lock")
    if _has(place, sha256):
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(lock, "a", encoding="utf-8") as failures:
            known = lock.read_text(encoding="utf-8")
            fcntl.flock(failures, fcntl.LOCK_EX)
            if _has(place, sha256):
                return
            if told := lock.read_text(encoding="utf-8")[len(known) :]:
                raise ValueError(told.strip())
            try:
                _download(url, place, sha256)
            except FAILURES as error:
                if isinstance(error, HTTPError):
                    error.close()  # it is the response too, and holds the connection
                failures.write(f"{_reason(error)}\n")
                raise
    except FAILURES as error:
        names = list(sha256)
        advice = (
            f"put the {len(names)} files {names[0]} ... {names[-1]} of {_last(url)} into {root}"
        )
        raise ConfigError(f"{key}: cannot get {url} ({_reason(error)}); {advice}") from None


def _has(place: Path, names: Mapping[str, str]) -> bool:
    return all((place / name).is_file() for name in names)


def _reason(error: Exception) -> str:
    reason = error.reason if type(error) is URLError else error
    return " ".join(str(reason).split()) or type(error).__name__


def _last(url: str) -> str:
    return url.rpartition("/")[2]


def _download(url: str, place: Path, sha256: Mapping[str, str]) -> None:
    scratch = place.with_name(f".{place.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    scratch.mkdir()
    try:
        _unpack(url, scratch, sha256)
        if place.is_dir():
            for name in sha256:
                os.replace(scratch / name, place / name)
        else:
            os.rename(scratch, place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _unpack(url: str, scratch: Path, sha256: Mapping[str, str]) -> None:
    """Read the archive as it arrives; files get our own names, never a path that it gives."""
    with (
        urlopen(url, timeout=TIMEOUT_S) as response,  # noqa: S310  # the task's own constant
        _bar(response, url) as stream,
        gzip.GzipFile(fileobj=stream) as unzipped,
        tarfile.open(fileobj=_Bounded(unzipped), mode="r|") as archive,
    ):
        for member in archive:
            is_plain = (
                member.isfile() and not member.issparse()
            )  # a sparse one has more bytes than the stream
            name, source = (
                PurePosixPath(member.name).name,
                archive.extractfile(member) if is_plain else None,
            )
            if source is None or name not in sha256:
                continue
            data = source.read()
            if (found := hashlib.sha256(data).hexdigest()) != sha256[name]:
                raise ValueError(f"{name} in it has SHA-256 {found}, must be {sha256[name]}")
            with open(scratch / name, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # else a power cut leaves the name without the bytes
    if absent := [name for name in sha256 if not (scratch / name).is_file()]:
        raise ValueError(f"it has no {absent[0]}")


class _Bounded:
    """A stream that gives MOST_BYTES at most: what unpacks without end must not fill the memory."""

    def __init__(self, stream: Any):
        self._stream, self._left = stream, MOST_BYTES

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise ValueError(f"it unpacks to more than {MOST_BYTES:,} bytes")
        return data


def _bar(response: Any, url: str) -> AbstractContextManager[Any]:
    """The response, with a bar on stderr as it is read: stdout may be JSON."""
    from rich.console import Console
    from rich.progress import wrap_file

    console = Console(stderr=True, highlight=False)
    console.print(f"downloading {url}", markup=False, soft_wrap=True)
    size = int(response.headers.get("Content-Length") or 0)
    hidden = not console.is_terminal
    return wrap_file(
        response, size, description=_last(url), console=console, transient=True, disable=hidden
    )
