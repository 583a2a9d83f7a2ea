"""Sources: where the bytes of a shard come from, with waits between attempts."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from trainer.base.errors import ConfigError, RunError, ServerError, one_line
from trainer.base.process.table import kernel_state
from trainer.core.api import signal_to_stop
from trainer.shards.long_work import watched

STOP_PATIENCE_S = 3.0  # after a request to stop: what takes less time ends in order
ANNOUNCED_WAIT_S = 3.0  # a wait that takes longer is announced
STOP_POLL_S = 0.5
MOST_POLL_S = 0.1  # between two tries to lock a file
STUCK_S = 600.0  # without progress: a download's eight tries take less
STUCK_IF_STOPPED_S = 60.0
_announced: set[str] = set()
_open_wait: ContextVar[Wait | None] = ContextVar("open_wait", default=None)  # of a thread


class Wait:
    """A wait, open in its thread for the duration of a block.

    `what` says what is waited for, such as "downloading a from b".
    """

    def __init__(self, what: str):
        self.what = what
        self._begun = time.monotonic()

    def __enter__(self) -> Wait:
        _open_wait.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _open_wait.set(None)

    def check(self) -> None:
        """Announce a long wait, the first of its kind. Raises ServerError if asked to stop."""
        if name := signal_to_stop(STOP_PATIENCE_S):
            raise ServerError(f"asked to stop ({name}) while {self.what}")
        is_worker = multiprocessing.current_process().daemon  # of data: its rank announces
        if not is_worker and time.monotonic() - self._begun > ANNOUNCED_WAIT_S:
            announce(self.what.partition(" ")[0], f"{self.what} ...")

    def pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (rest := end - time.monotonic()) > 0:
            self.check()
            time.sleep(min(rest, STOP_POLL_S))
        self.check()


def check_wait(what: str) -> None:
    """Check the open wait of this thread, or a new one. Raises ServerError if asked to stop."""
    (_open_wait.get() or Wait(what)).check()


def announce(kind: str, line: str) -> None:
    """Print a line once in this process, on the first rank of a node."""
    if kind not in _announced and os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
    _announced.add(kind)


def lock(file: int, path: str, progress: Callable[[], int] = lambda: 0) -> None:
    """Lock a file. Raises ServerError if its holder is stuck: `progress()` does not change."""
    delay = 0.001
    seen = -1
    since = time.monotonic()
    while True:
        with suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        check_wait(f"waiting for the lock of {path}")
        if (amount := progress()) != seen:
            seen = amount
            since = time.monotonic()
        seconds = time.monotonic() - since
        if seconds > ANNOUNCED_WAIT_S:
            name, is_stopped = _holder(file)
            announce(path, f"waiting for {name}, which has locked {path} ...")
            if seconds > (STUCK_IF_STOPPED_S if is_stopped else STUCK_S):
                raise ServerError(f"""{path}: {name} has locked it for {seconds:.0f} s
                    without progress; end it, or give another cache= folder""")
        time.sleep(delay)
        delay = min(2 * delay, MOST_POLL_S)


def _holder(file: int) -> tuple[str, bool]:
    """Return who has locked a file, as far as it is known, and whether it is stopped."""
    status = os.fstat(file)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    with suppress(OSError, ValueError, IndexError):  # only Linux has it
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, pid, device_and_inode, *_ = line.split()
            if (kind, device_and_inode) == ("FLOCK", f"{device}:{status.st_ino}") and int(pid) > 0:
                is_stopped = kernel_state(int(pid)) in ("T", "t")
                return f"process {pid}{' (stopped)' * is_stopped}", is_stopped
    return "another process", False


SOURCE_CHUNK_BYTES = 2**20
RANGE = 2**24  # bytes of a request to a store
PAST_THE_END = re.compile("InvalidRange|range.* not satisfiable", re.IGNORECASE)
TEMPORARY = (408, 425, 429, 500, 502, 503, 504)  # HTTP: a later request may succeed
# Errors that come again: a missing file, no permission, a link where a file should be
LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
OF_LOGINS = ("Credential", "Profile", "Token", "Auth")  # in names of classes: botocore's, azure's
BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf")  # have no folders to make


class Span(NamedTuple):
    """The part of a file that is a shard: bytes [begin, end), and [tail, tail_end) of its end."""

    begin: int
    end: int
    tail: int
    tail_end: int

    @property
    def size(self) -> int:
        return self.end - self.begin + self.tail_end - self.tail


class TemporaryError(Exception):
    """A failure of a server or a network, after which a later try may succeed."""


class Source(Protocol):
    """The files under one address. Errors of a file are an OSError or a TemporaryError."""

    url: str

    def stream(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield the bytes of a file from `begin` on, to `end` or its own end.

        Raises ResumeError before the first byte if it can only be read from its start.
        """
        ...

    def list(self) -> list[str]:
        """Return the names of all files, sorted; those in folders as `folder/name`."""
        ...

    def write(self, name: str, data: bytes) -> None: ...


class ResumeError(Exception):
    """A server that does not send this part of a file, and why."""


def open_file(path: Path) -> BinaryIO:
    """Open a file to read its bytes, through links. Raises OSError for a pipe, which would wait."""
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "is not a regular file", str(path))


def _open_at_once(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK)


def is_lasting(error: OSError) -> bool:
    """Return True for an error of a file that comes again, False for one such as EMFILE."""
    lasting = (errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG)
    return isinstance(error, LASTING) or error.errno in lasting


class LocalSource:
    """A folder of this machine, or on a shared file system."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.url = str(folder)

    def stream(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        with open_file(self.folder / name) as file:
            file.seek(begin)
            while block := file.read(
                SOURCE_CHUNK_BYTES if end is None else min(SOURCE_CHUNK_BYTES, end - file.tell())
            ):
                yield block

    def list(self) -> list[str]:
        every = watched(self.folder.rglob("*"), f"listing {self.folder}", "names")
        files = (path for path in every if path.is_file())
        return sorted(path.relative_to(self.folder).as_posix() for path in files)

    def write(self, name: str, data: bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_bytes(data)
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise RunError(f"""{path}: cannot be written: {error.strerror};
                make room, or give another folder""") from None


class FsspecSource:
    """Files of a store that fsspec knows, such as s3://, gs:// or hf://."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self._opened: tuple[int, tuple[Any, str]] | None = None

    def _open(self) -> tuple[Any, str]:
        """Return fsspec's file system and the path in it, one for all threads of a process.

        fsspec itself would make one for each thread, and so a session: 0.1 s each.
        """
        import fsspec

        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), fsspec.core.url_to_fs(self.url))
        return self._opened[1]

    def stream(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        offset = begin
        try:
            system, root = self._open()
            while True:  # one request for each part, and none for the size
                until = offset + RANGE if end is None else min(offset + RANGE, end)
                read = partial(system.cat_file, f"{root}/{name}", start=offset, end=until)
                block = _in_a_thread(read, f"reading {self.url}/{name}")
                yield block
                if offset + len(block) < until or until == end:
                    return
                offset = until
        except ServerError:
            raise
        except Exception as error:
            if not PAST_THE_END.search(one_line(error)):
                raise _translated(error) from None
            if offset == begin > 0:  # one of 0 bytes has no first one
                raise ResumeError(f"it has no bytes from {begin:,} on") from None

    def list(self) -> list[str]:
        try:
            system, root = self._open()
            paths = system.find(root)
        except Exception as error:
            raise self._failure("listed", _translated(error)) from None
        return sorted(path.removeprefix(root).lstrip("/") for path in paths)

    def write(self, name: str, data: bytes) -> None:
        try:
            system, root = self._open()
            if self.url.partition("://")[0] not in BUCKETS:
                system.makedirs(root, exist_ok=True)
            with system.open(f"{root}/{name}", "wb") as file:
                file.write(data)
        except Exception as error:
            raise self._failure("written", _translated(error)) from None

    def _failure(self, what: str, error: Exception) -> Exception:
        kind = RunError if isinstance(error, TemporaryError) else ConfigError
        advice = "check the address, the credentials and the network"
        return kind(f"{self.url}: cannot be {what}: {one_line(error)}; {advice}")


def _in_a_thread(call: Callable[[], Any], what: str) -> Any:
    """Return what `call` returns. Raises ServerError if this process is asked to stop meanwhile.

    A store's own client retries for minutes.
    """
    returned: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(STOP_POLL_S)
        check_wait(what)
    if raised:
        raise raised[0]
    return returned[0]


def _translated(error: Exception) -> Exception:
    """Return an error of a store, each of which has its own kinds, as one of a `Source`."""
    if isinstance(error, LASTING):
        return error
    status = getattr(getattr(error, "response", None), "status_code", 0)  # httpx's, as of hf://
    if any(word in type(error).__name__ for word in OF_LOGINS) or status in (401, 403):
        return PermissionError(one_line(error))
    if 400 <= status < 500 and status not in TEMPORARY:
        return FileNotFoundError(one_line(error))
    return TemporaryError(one_line(error) or type(error).__name__)
