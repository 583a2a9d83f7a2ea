"""A bucket (S3, Google Cloud, Azure) or a folder that is mounted as one, by obstore."""

from __future__ import annotations

import hashlib
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from trainer.base.errors import one_line
from trainer.core.api import NotThereError, Store, StoreError

LEASE = "lease.json"
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")
PIECE = 2**24  # bytes of one request, at most
SLOW_S = 4.0  # a request that takes longer is followed by a smaller one
REQUEST_S = 30.0
MOST_PARTS = 10_000  # of one file, for S3
PAUSES_S = (0.2, 1.0)  # before a request is repeated that obstore does not repeat
NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")  # in answers of S3, Google Cloud and Azure
EXISTS = re.compile(r"AlreadyExists|Precondition|FileExists")  # names of errors
NO_LINKS = re.compile(r"\(os error (1|38|95)\)")  # EPERM, ENOSYS, EOPNOTSUPP
LIST_S = 60.0  # without another name of a listing: then the store does not come to an end
DENIED = ("PermissionDeniedError", "UnauthenticatedError", "PermissionError")
MOST_OF_A_STORE_MESSAGE = 300  # characters
_REQUEST = re.compile(r"Error performing \S+ \S+ in .*? - ")  # in obstore's messages
T = TypeVar("T")
_FOLDER_OF_A_RUN = re.compile(r"[0-9]{6,}(/checkpoints(/step-[0-9]{8,})?)?")
FIRST_OWN = "0"  # before the names of all that a run writes, and after `//`, `./` and `../`


@dataclass(frozen=True)
class Pace:
    """How a large file is sent: bytes of a part, parts at a time, seconds for the request of one.

    obstore's only limit for a body counts from the connection to the end of the answer. A file is
    sent again at the next pace after a request that took so long: the first one needs 2.2 MB/s,
    the second 44 kB/s, and the last 9 kB/s. 5 MiB is the smallest part of S3.
    """

    part: int
    parallel: int
    limit_s: float

    def for_size(self, size: int) -> Pace:
        """Return the pace for a file that would have more parts than a store takes."""
        part = max(self.part, -(-size // MOST_PARTS))
        return Pace(part, self.parallel, self.limit_s * part / self.part)

    def is_fast_enough(self, bytes_per_s: float) -> bool:
        """Return True if a line sends all parts of one time in half of the limit."""
        return self.part * self.parallel < bytes_per_s * self.limit_s / 2


PACES = (Pace(PIECE, 4, REQUEST_S), Pace(5 * 2**20, 1, 120.0), Pace(5 * 2**20, 1, 600.0))


class ExistsError(StoreError):
    """A file that was to be created, and is there."""


class InvalidKeyError(StoreError):
    """A listing of obstore's with a key that is no path, such as one with `//`."""


class DeniedError(StoreError):
    """A request that the login does not allow."""


class Bucket:
    """The files below an address. Each method raises StoreError."""

    def __init__(self, address: str, is_new: bool = False):
        """`is_new`: make the folder of a file:// address.

        Raises NotThereError without that folder.
        """
        self.address = address.rstrip("/")
        with _translated(self.address):
            self._store = _open_store(self.address, is_new, REQUEST_S)
        self._stores: dict[float, Any] = {REQUEST_S: self._store}  # by the limit of a request
        self._pace = 0  # index of PACES
        self._piece = Store.SMALL  # bytes to ask for next
        is_here = self.address.startswith("file:")
        self._folder = Path(unquote(urlsplit(self.address).path)) if is_here else None

    def get(self, name: str) -> bytes:
        import obstore

        with _translated(f"{self.address}/{name}"):
            return _repeated(lambda: bytes(obstore.get(self._store, name).bytes()))

    def put(self, name: str, content: bytes | Path) -> None:
        """Write a file, which is there as a whole or not at all.

        A large one may take as long as the line moves its parts: after a request that took too long
        it is sent again, with less at a time and more time for it.
        """
        import obstore

        size = content.stat().st_size if isinstance(content, Path) else len(content)
        with _translated(f"{self.address}/{name}"):
            if size <= Store.SMALL:
                _repeated(lambda: obstore.put(self._store, name, content))
            else:
                self._put_large(name, content, size)

    def _put_large(self, name: str, content: bytes | Path, size: int) -> None:
        import obstore

        while True:
            pace = PACES[self._pace].for_size(size)
            begun = time.monotonic()
            try:
                store = self._store_for(pace.limit_s)
                options: Any = {"chunk_size": pace.part, "max_concurrency": pace.parallel}
                obstore.put(store, name, content, **options)
                break
            except Exception as error:
                was_slow = time.monotonic() - begun >= pace.limit_s and _was_broken_off(error)
                if not was_slow or self._pace == len(PACES) - 1:
                    raise
                self._pace += 1
        rate = size / (time.monotonic() - begun)
        if self._pace and size >= pace.part and PACES[self._pace - 1].is_fast_enough(rate):
            self._pace -= 1

    def _store_for(self, limit_s: float) -> Any:
        """Return the store with this limit of a request."""
        if limit_s not in self._stores:
            self._stores[limit_s] = _open_store(self.address, False, limit_s)
        return self._stores[limit_s]

    def _get_piece(self, name: str, begin: int, left: int) -> Any:
        """Return a file's next bytes, `left` at most.

        How many follows the line, so that a slow one brings some every few seconds: by that the
        watcher tells it from a hang.
        """
        import obstore

        while True:
            length = min(self._piece, left)
            begun = time.monotonic()
            try:
                piece = obstore.get_range(self._store, name, start=begin, length=length)
            except Exception as error:
                was_slow = time.monotonic() - begun >= REQUEST_S and _was_broken_off(error)
                if not was_slow or length <= Store.SMALL:
                    raise
                self._piece = max(length // 8, Store.SMALL)
                continue
            seconds = time.monotonic() - begun
            if seconds > SLOW_S:
                self._piece = max(length // 2, Store.SMALL)
            elif seconds < SLOW_S / 4 and length == self._piece:
                self._piece = min(2 * length, PIECE)
            return piece

    def create(self, name: str, content: bytes) -> bool:
        """Write a file that is not there yet. Return False if it is there, with other content.

        An answer may be lost, and the request repeated: the file is then there by this very call.
        """
        import obstore

        try:
            with _translated(f"{self.address}/{name}"):
                _repeated(lambda: obstore.put(self._store, name, content, mode="create"))
        except StoreError as error:
            if self._folder is not None and NO_LINKS.search(str(error)):
                return self._create_in_folder(self._folder / name, name, content)
            try:
                is_same = self.get(name) == content
            except NotThereError:
                raise error from None
            if is_same or isinstance(error, ExistsError):  # by 412, or 409 for two at once
                return is_same
            raise
        return True

    def _create_in_folder(self, path: Path, name: str, content: bytes) -> bool:
        """Create a file where the file system has no hard links, by which obstore does it.

        It is empty until it is replaced as a whole. So a reader sees no half of it, and a process
        that is killed in between leaves an empty file, which does not count.
        """
        with _translated(f"{self.address}/{name}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                own = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
            except FileExistsError:
                return self.get(name) == content
            try:
                os.fsync(own)  # a mounted bucket may notice only now that another one was faster
            finally:
                os.close(own)
        self.put(name, content)
        return True

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the sizes of all files by name, or of those in a folder.

        obstore fails at keys that are no paths, as consoles make: `first//x`. Then those are left
        out, and with them others that no run writes.
        """
        try:
            return self._list(folder)
        except InvalidKeyError:
            pass
        try:
            return self._list(folder, FIRST_OWN)  # one here comes before all that a run writes
        except InvalidKeyError:
            pass
        level = self._list_level(folder)  # it is further below
        sizes = {each["path"]: each["size"] for each in level["objects"]}
        for each in level["common_prefixes"]:
            if _FOLDER_OF_A_RUN.fullmatch(each):
                sizes |= self.sizes(each)
        return sizes

    def _list(self, folder: str, first: str = "") -> dict[str, int]:
        """Return the sizes of the files in a folder whose names come after `first`."""
        import obstore

        above = f"{folder}/" if folder else ""
        offset = f"{above}{first}" if first else None

        def read() -> dict[str, int]:
            sizes: dict[str, int] = {}
            pages = obstore.list(self._store, folder or None, offset=offset)
            for page in _pages(pages, self.address):
                before = len(sizes)
                sizes |= {each["path"]: each["size"] for each in page}
                if len(sizes) == before:
                    raise StoreError(f"{self.address}: its listing repeats itself without an end")
            return sizes

        with _translated(self.address):
            return _repeated(read)

    def _list_level(self, folder: str = "") -> Any:
        import obstore

        def read() -> Any:
            pages = map(partial(obstore.list_with_delimiter, self._store), [folder or None])
            return next(_pages(pages, self.address))

        with _translated(self.address):
            return _repeated(read)

    def folders(self) -> list[str]:
        try:
            return [*self._list_level()["common_prefixes"]]
        except InvalidKeyError:
            parts = [name.partition("/") for name in self._list("", FIRST_OWN)]
            return sorted({folder for folder, slash, _ in parts if slash})

    def state_of(self, name: str) -> tuple[datetime, str | None]:
        """Return when a file was written, by the store's clock, and its tag."""
        import obstore

        with _translated(f"{self.address}/{name}"):
            facts = _repeated(lambda: obstore.head(self._store, name))
        return facts["last_modified"], facts["e_tag"]

    def remove(self, names: list[str]) -> None:
        import obstore

        for name in names:  # in this order; of S3 a request for many has no order
            try:
                with _translated(f"{self.address}/{name}"):
                    _repeated(partial(obstore.delete, self._store, name))
            except NotThereError:
                continue

    def download(self, name: str, path: Path, most: int) -> tuple[int, str]:
        """Write a file to `path`; return its size and SHA-256. One of more bytes is not read."""
        import obstore

        with _translated(f"{self.address}/{name}"):
            size = obstore.head(self._store, name)["size"]
        digest = hashlib.sha256()
        begin = 0
        with path.open("wb") as file:
            while begin < size <= most:
                with _translated(f"{self.address}/{name}"):
                    piece = self._get_piece(name, begin, size - begin)
                digest.update(piece)
                file.write(piece)
                begin += len(piece)
        return size, digest.hexdigest()


def _pages(pages: Iterable[Any], address: str) -> Iterator[Any]:
    """Yield the pages of a listing. Raises StoreError if there is none for a long time.

    obstore reads on, without a limit of time, where a store says that an empty page is not the last
    one. Its thread then stays until the process ends.
    """
    answers: queue.Queue[Any] = queue.Queue(1)
    is_over = threading.Event()

    def read() -> None:
        try:
            for page in pages:
                answers.put((page, None))
                if is_over.is_set():
                    return
        except BaseException as error:
            answers.put((None, error))
        else:
            answers.put((None, None))

    threading.Thread(target=read, daemon=True, name="listing").start()
    try:
        while True:
            try:
                page, error = answers.get(timeout=LIST_S)
            except queue.Empty:
                raise StoreError(f"""{address}: its listing has no end:
                    nothing came in {LIST_S:g} s""") from None
            if error is not None:
                raise error
            if page is None:
                return
            yield page
    finally:
        is_over.set()
        with suppress(queue.Empty):
            answers.get_nowait()


def _repeated(request: Callable[[], T]) -> T:
    """Make a request, again if its connection breaks.

    obstore 0.12.1 fails at once where a listing or a delete breaks off in its answer, and where a
    conditional put or a delete gets none. Whether it has repeated a request is in its message.
    """
    for pause_s in PAUSES_S:
        try:
            return request()
        except Exception as error:
            if not _was_broken_off(error):
                raise
        time.sleep(pause_s)
    return request()


def _was_broken_off(error: Exception) -> bool:
    """Return True for a request that got no whole answer, and that obstore has not repeated."""
    text = str(error)
    return "HTTP error" in text and not re.search(r"after \d+ retries", text)


def _open_store(address: str, is_new: bool, limit_s: float) -> Any:
    """Open a store whose requests may take `limit_s` seconds each, and are not repeated after."""
    from obstore import store

    if address.startswith("file:"):
        if not is_new and not Path(unquote(urlsplit(address).path)).is_dir():
            raise FileNotFoundError
        return store.from_url(address, mkdir=is_new, automatic_cleanup=True)
    options: Any = {
        "timeout": timedelta(seconds=limit_s),
        "connect_timeout": timedelta(seconds=REQUEST_S / 3),
    }
    endpoints = [os.environ.get(name, "") for name in ENDPOINTS]
    if any(endpoint.startswith("http://") for endpoint in endpoints):
        options["allow_http"] = True
    backoff: Any = {
        "init_backoff": timedelta(seconds=0.1),
        "max_backoff": timedelta(seconds=3),
        "base": 2,
    }
    retry: Any = {"max_retries": 5, "retry_timeout": timedelta(seconds=limit_s), "backoff": backoff}
    login = _login_of_boto3(address) if address.startswith("s3:") else {}
    return store.from_url(address, client_options=options, retry_config=retry, **login)


def _login_of_boto3(address: str) -> dict[str, Any]:
    """Return the login that boto3 finds in profiles and files, as obstore reads variables only."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE")
    is_given = any(map(os.environ.get, names)) and not os.environ.get("AWS_PROFILE")
    if is_given or not find_spec("boto3"):
        return {}
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except ValueError:  # it found none
        raise StoreError(f"""{address}:
            there is no login; give AWS_ACCESS_KEY_ID, AWS_PROFILE or ~/.aws""") from None


@contextmanager
def _translated(address: str) -> Iterator[None]:
    """Raise StoreError for any error of obstore's. A store's answer may repeat a login: it is cut
    off."""
    try:
        yield
    except StoreError:
        raise
    except FileNotFoundError as error:
        if any(code in str(error) for code in NO_BUCKET):
            raise StoreError(f"{address}: there is no such bucket") from None
        raise NotThereError(f"{address}: is not there") from None
    except Exception as error:  # obstore's own, OSError and ValueError
        text = str(error).partition("<?xml")[0].partition("\n")[0]
        text = _REQUEST.sub("", text)
        why = one_line(Exception(text))[:MOST_OF_A_STORE_MESSAGE].rstrip(" -:")
        name = type(error).__name__
        kind = StoreError
        if name in DENIED or "(code: AccessDenied)" in why:  # the latter of S3's delete
            kind = DeniedError
        elif EXISTS.search(name):
            kind = ExistsError
        elif name == "InvalidPathError":
            kind = InvalidKeyError
            why += "; remove it"
        raise kind(f"{address}: {why or name}") from None
