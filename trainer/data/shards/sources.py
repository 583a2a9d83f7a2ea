"""Where shards are: a local folder, an HTTP server, or a store that fsspec knows."""

from __future__ import annotations

import base64
import http.client
import os
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from trainer.errors import ConfigError, RunError, one_line

CHUNK = 2**20  # bytes
RANGE = 2**24  # bytes of a request to a store
PAST_THE_END = re.compile("InvalidRange|range.* not satisfiable", re.IGNORECASE)
TIMEOUT_S = 30.0  # without a byte
TEMPORARY = (408, 425, 429, 500, 502, 503, 504)  # HTTP: a later request may succeed
NOT_SATISFIABLE = 416
HEADERS = {"User-Agent": "lockstep", "Accept-Encoding": "identity"}
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
    """A server that sends a file only as a whole."""


class LocalSource:
    """A folder of this machine, or on a shared file system."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.url = str(folder)

    def stream(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        with open(self.folder / name, "rb") as file:
            file.seek(begin)
            while block := file.read(CHUNK if end is None else min(CHUNK, end - file.tell())):
                yield block

    def list(self) -> list[str]:
        files = (path for path in self.folder.rglob("*") if path.is_file())
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
            advice = "make room, or give another folder"
            raise RunError(f"{path}: cannot be written: {error.strerror}; {advice}") from None


class HttpSource:
    """Files of an HTTP server, which cannot list them."""

    def __init__(self, url: str):
        """Raise ValueError for an address that cannot be one."""
        parts = urllib.parse.urlsplit(url)
        if not parts.hostname or parts.port == 0:
            raise ValueError("it has no host")
        login, _, host = parts.netloc.rpartition("@")
        path = urllib.parse.quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
        self.url = f"{parts.scheme}://{host}{path}"  # it is shown: without password and signature
        self._query = f"?{parts.query}" * bool(parts.query)
        self._login = base64.b64encode(urllib.parse.unquote_to_bytes(login)).decode()

    def _request(self, name: str, begin: int, end: int | None) -> urllib.request.Request:
        address = f"{self.url}/{urllib.parse.quote(name)}{self._query}"
        last = "" if end is None else end - 1
        headers = HEADERS | ({"Range": f"bytes={begin}-{last}"} if begin or last else {})
        request = urllib.request.Request(address, headers=headers)  # noqa: S310
        if self._login:  # not for the server that a redirect names
            request.add_unredirected_header("Authorization", f"Basic {self._login}")
        return request

    def stream(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        request = self._request(name, begin, end)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                if request.has_header("Range") and answer.status != http.HTTPStatus.PARTIAL_CONTENT:
                    raise ResumeError
                if (packed := answer.headers.get("Content-Encoding", "identity")) != "identity":
                    raise FileNotFoundError(f"the server sends it with Content-Encoding: {packed}")
                rest = answer.length or -1
                while block := answer.read(CHUNK):
                    rest -= len(block)
                    yield block
                if rest > 0:
                    raise TemporaryError(f"the answer ended {rest:,} bytes too early")
        except urllib.error.HTTPError as error:
            with closing(error):
                if error.code == NOT_SATISFIABLE:
                    raise ResumeError from None
                if error.code in TEMPORARY:
                    raise TemporaryError(f"HTTP {error.code} {error.reason}") from None
                is_login = error.code in (401, 403)
                kind = PermissionError if is_login else FileNotFoundError
                raise kind(f"HTTP {error.code} {error.reason}") from None
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise PermissionError(f"{one_line(reason)} (set SSL_CERT_FILE)") from None
            if isinstance(reason, LASTING):
                raise reason from None
            raise TemporaryError(one_line(reason)) from None

    def list(self) -> list[str]:
        advice = "write the index where the files are, and copy it beside them"
        raise ConfigError(f"{self.url}: an HTTP server cannot list its files; {advice}")

    def write(self, name: str, data: bytes) -> None:
        raise ConfigError(f"{self.url}: cannot be written; give a folder or a bucket")


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
        place = begin
        try:
            system, root = self._open()
            while True:  # one request for each part, and none for the size
                until = place + RANGE if end is None else min(place + RANGE, end)
                block = system.cat_file(f"{root}/{name}", start=place, end=until)
                yield block
                if place + len(block) < until or until == end:
                    return
                place = until
        except Exception as error:
            if not PAST_THE_END.search(one_line(error)):
                raise _translated(error) from None
            if place == begin:
                raise ResumeError from None

    def list(self) -> list[str]:
        try:
            system, root = self._open()
            found = system.find(root)
        except Exception as error:
            raise self._failure("listed", _translated(error)) from None
        return sorted(path.removeprefix(root).lstrip("/") for path in found)

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


def create_source(url: str) -> Source:
    """Return the source of an address or a folder to write to. Raises ConfigError as
    `open_source` does."""
    scheme, mark, rest = url.partition("://")
    if not mark or scheme == "file":
        folder = Path(rest if mark else url).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{url}: {error.strerror}; give another folder") from None
    return open_source(url)


def open_source(url: str) -> Source:
    """Return the source of an address or a folder.

    Raises ConfigError for one that does not exist, or whose packages are missing.
    """
    scheme, mark, rest = url.partition("://")
    if not mark or scheme == "file":
        folder = Path(rest if mark else url).expanduser().absolute()
        if not folder.is_dir():
            raise ConfigError(f"{url}: must be a folder with shards, and is none")
        return LocalSource(folder)
    if scheme.lower() in ("http", "https"):
        try:
            return HttpSource(url)
        except ValueError as error:
            shown = rest.partition("?")[0].rpartition("@")[2]
            must = "must be an address such as https://host/folder"
            raise ConfigError(f"{scheme}://{shown}: {one_line(error)}; {must}") from None
    try:
        import fsspec

        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        advice = 'pip install "lockstep-trainer[shards]", and s3fs for s3://, gcsfs for gs://'
        raise ConfigError(f"{url}: {one_line(error)}; {advice}") from None
    except ValueError as error:
        raise ConfigError(f"{url}: {one_line(error)}; give a folder, https:// or s3://") from None
    return FsspecSource(url)
