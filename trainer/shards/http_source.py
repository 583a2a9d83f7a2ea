"""Addresses of shards, and those that a web server or a store answers by HTTP."""

from __future__ import annotations

import base64
import http.client
import io
import os
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainer.base.errors import ConfigError, one_line
from trainer.shards.sources import (
    LASTING,
    SOURCE_CHUNK_BYTES,
    STOP_POLL_S,
    TEMPORARY,
    FsspecSource,
    LocalSource,
    ResumeError,
    Source,
    TemporaryError,
    check_wait,
)


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
            raise ConfigError(f"""{scheme}://{rest.partition("?")[0].rpartition("@")[2]}:
                {one_line(error)}; must be an address such as https://host/folder""") from None
    try:
        import fsspec

        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise ConfigError(f"""{url}: {one_line(error)}; pip install "lockstep-trainer[shards]",
            and s3fs for s3://, gcsfs for gs://""") from None
    except ValueError as error:
        raise ConfigError(f"{url}: {one_line(error)}; give a folder, https:// or s3://") from None
    return FsspecSource(url)


CONNECT_S = 10.0
TIMEOUT_S = 30.0  # without a byte
HEAD_S = 60.0  # for the head of an answer
MOST_HEADS = 8  # of an answer, with those of status 100
MOST_TRAILERS = 100  # lines after a body in chunks
MOST_OF_A_TRAILER_LINE = 2**16
NOT_SATISFIABLE = 416
NO_PARTS = "the server sends no parts of files; index them with a larger shard_mb"
HEADERS = {"User-Agent": "lockstep", "Accept-Encoding": "identity"}


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
        self._query = f"?{parts.query}" if parts.query else ""
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
            with _open(request) as answer:
                if request.has_header("Range") and answer.status != http.HTTPStatus.PARTIAL_CONTENT:
                    raise ResumeError(NO_PARTS)
                if (packed := answer.headers.get("Content-Encoding", "identity")) != "identity":
                    raise FileNotFoundError(f"the server sends it with Content-Encoding: {packed}")
                rest = answer.length or -1
                while block := answer.read(SOURCE_CHUNK_BYTES):
                    rest -= len(block)
                    yield block
                if rest > 0:
                    raise TemporaryError(f"the answer ended {rest:,} bytes too early")
        except urllib.error.HTTPError as error:
            with closing(error):
                if error.code == NOT_SATISFIABLE:
                    raise ResumeError(f"HTTP 416: it has no bytes from {begin:,} on") from None
                if error.code in TEMPORARY:
                    raise TemporaryError(f"HTTP {error.code} {error.reason}") from None
                is_login = error.code in (401, 403)
                kind = PermissionError if is_login else FileNotFoundError
                raise kind(f"HTTP {error.code} {error.reason}") from None
        except (http.client.HTTPException, OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise PermissionError(f"{one_line(reason)} (set SSL_CERT_FILE)") from None
            if isinstance(reason, LASTING):
                raise reason from None
            is_junk = type(error) is http.client.BadStatusLine
            raise TemporaryError("it answers no HTTP" if is_junk else one_line(reason)) from None

    def list(self) -> list[str]:
        raise ConfigError(f"""{self.url}: an HTTP server cannot list its files;
            write the index where the files are, and copy it beside them""")

    def write(self, name: str, data: bytes) -> None:
        raise ConfigError(f"{self.url}: cannot be written; give a folder or a bucket")


def _open(request: urllib.request.Request) -> Any:
    """Return the answer to a request. Raises FileNotFoundError for redirects to nowhere."""
    try:
        return _opener(*_certificates()).open(request, timeout=CONNECT_S)
    except (ValueError, http.client.InvalidURL) as error:
        why = f"it redirects to an address that cannot be one: {one_line(error)}"
        raise FileNotFoundError(why) from None


class _PatientReader(io.RawIOBase):
    """The bytes of a socket. Raises ServerError if the process is asked to stop meanwhile."""

    def __init__(self, file: Any, connection: socket.socket):
        self._file = file  # which keeps the socket open
        self._socket = connection
        self._until = time.monotonic() + HEAD_S

    def end_head(self) -> None:
        self._until = float("inf")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        until = min(self._until, time.monotonic() + TIMEOUT_S)
        before = self._socket.gettimeout()
        self._socket.settimeout(STOP_POLL_S)
        try:
            while True:
                check_wait("waiting for a server")
                if time.monotonic() > until:
                    raise TimeoutError("the server sends nothing, or a head without end")
                try:
                    return self._socket.recv_into(buffer)
                except TimeoutError:
                    continue
        finally:
            self._socket.settimeout(before)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    """An answer whose head has an end: http.client skips any number of "100 Continue"."""

    def __init__(self, connection: Any, *args: Any, **options: Any):
        super().__init__(connection, *args, **options)
        self._patient = _PatientReader(self.fp, connection)
        self.fp: Any = io.BufferedReader(self._patient, SOURCE_CHUNK_BYTES)
        self._heads = 0

    def _read_status(self) -> tuple[str, int, str]:
        self._heads += 1
        if self._heads > MOST_HEADS:
            raise http.client.HTTPException('it answers "100 Continue" without end')
        status: tuple[str, int, str] = super()._read_status()  # type: ignore[misc]
        return status

    def begin(self) -> None:
        super().begin()
        self._patient.end_head()

    def _read_and_discard_trailer(self) -> None:
        for _ in range(MOST_TRAILERS):
            if self.fp.readline(MOST_OF_A_TRAILER_LINE) in (b"\r\n", b"\n", b""):
                return
        raise http.client.HTTPException("it ends with trailers without end")


class _HttpConnection(http.client.HTTPConnection):
    response_class = _Answer


class _HttpsConnection(http.client.HTTPSConnection):
    response_class = _Answer


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, request: Any) -> Any:
        return self.do_open(_HttpConnection, request)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def https_open(self, request: Any) -> Any:
        return self.do_open(_HttpsConnection, request)


class _Redirects(urllib.request.HTTPRedirectHandler):
    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        """Follow a redirect. Raises ValueError if its address cannot be one."""
        try:
            return super().http_error_302(req, fp, code, msg, headers)
        except ValueError:
            fp.close()
            raise

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(self, *args: Any) -> urllib.request.Request | None:
        """Follow a redirect, but not to another protocol."""
        address = args[-1]
        if not address.startswith(("http://", "https://")):
            raise ValueError(f"{address}, which is not http:// or https://")
        return super().redirect_request(*args)


@lru_cache(maxsize=4)  # to read the certificates takes 20 ms
def _opener(*certificates: str | None) -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_HttpHandler, _HttpsHandler, _Redirects)


def _certificates() -> tuple[str | None, ...]:
    """Return the settings of the environment that an opener reads once."""
    names = ("SSL_CERT_FILE", "SSL_CERT_DIR", "http_proxy", "https_proxy", "no_proxy")
    return tuple(os.environ.get(name) for name in names)
