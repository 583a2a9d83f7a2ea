"""A run in a bucket (S3, Google Cloud, Azure) or in a folder that is mounted as one, by obstore.

    s3://bucket/first/000001/{lease.json, config.json, metrics.jsonl, exit.json, checkpoints/...}
    s3://bucket/first/000002/...

Each writer has a folder of its own, laid out as a run directory, so that no writer ever overwrites
a file of another one. The number of the folder is the writer's fence: only one process can create
its lease.json, and the writer with the highest number is the only one. Its lease has the step at
which each writer began. A checkpoint does not count if it is of a later step than one at which a
later writer began: a writer that had lost its lease, and did not know it yet, has published it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from trainer.errors import ConfigError, one_line

SCHEMES = ("s3", "gs", "az", "file")
LEASE = "lease.json"
MANIFEST = "manifest.json"
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")
# Config last: the newest folder that has it is read, so all of the record must be there by then.
RECORD = ("metrics.jsonl", "exit.json", "proof.txt", "sampling.safetensors", "config.json")
PIECE = 2**24  # bytes of one request
REQUEST_S = 30.0
RETRY_S = 30.0
PAUSES_S = (0.2, 1.0)  # before a request is repeated that obstore does not repeat
NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")  # in answers of S3, Google Cloud and Azure
DENIED = ("PermissionDeniedError", "UnauthenticatedError", "PermissionError")
MOST_SHOWN = 300  # characters of a store's message
_REQUEST = re.compile(r"Error performing \S+ \S+ in .*? - ")  # in obstore's messages
T = TypeVar("T")
_FENCE = re.compile(r"\d{6,}")
_CHECKPOINT = re.compile(r"(\d{6,})/checkpoints/step-(\d{8,})/manifest\.json")
_RECORDED = "|".join(re.escape(name) for name in (*RECORD, LEASE))
_OWN = re.compile(rf"(\d{{6,}})/(?:{_RECORDED}|checkpoints/step-\d{{8,}}/[^/]+)")


class BucketError(Exception):
    """A store that does not answer or refuses, in one line."""


class NotThereError(BucketError):
    """A file that is not in the bucket."""


class DeniedError(BucketError):
    """A request that the login does not allow."""


def is_address(place: str | None) -> bool:
    """Return True for the address of a run in a bucket, as no path is one."""
    return "://" in (place or "")


def address_problem(place: str) -> str:
    """Return why a text is no address of a run in a bucket; empty if it is one."""
    names = ", ".join(f"{scheme}://" for scheme in SCHEMES)
    try:
        parts = urlsplit(place)
    except ValueError as error:
        return f"is no address ({error}); must be as s3://bucket/first"
    if parts.scheme not in SCHEMES:
        return f"must begin with one of {names}, as in s3://bucket/first"
    if parts.username or parts.password or parts.query or parts.fragment:
        return "must have no login; give it by the variables of the store's own tools"
    if not place.isprintable() or (not parts.netloc and parts.scheme != "file"):
        return "must be <scheme>://<bucket>/<prefix>, as in s3://bucket/first"
    return (
        "" if parts.path.strip("/") else "must have a prefix for the run, as in s3://bucket/first"
    )


def name_of(address: str) -> str:
    """Return the last part of an address, which names the run."""
    return address.rstrip("/").rpartition("/")[2].lstrip(".") or "run"


class Bucket:
    """The files below an address. Each method raises BucketError."""

    def __init__(self, address: str, is_new: bool = False):
        """`is_new`: make the folder of a file:// address.

        Raises ConfigError if obstore is not installed, NotThereError without that folder.
        """
        self.address = address.rstrip("/")
        if find_spec("obstore") is None:
            raise ConfigError(f"""{self.address}:
                run pip install 'lockstep-trainer[bucket]'""")
        with _translated(self.address):
            self._store = _open_store(self.address, is_new)

    def get(self, name: str) -> bytes:
        import obstore

        with _translated(f"{self.address}/{name}"):
            return bytes(obstore.get(self._store, name).bytes())

    def put(self, name: str, content: bytes | Path) -> None:
        """Write a file, which is there as a whole or not at all."""
        import obstore

        with _translated(f"{self.address}/{name}"):
            obstore.put(self._store, name, content, chunk_size=PIECE, max_concurrency=4)

    def create(self, name: str, content: bytes) -> bool:
        """Write a file that is not there yet. Return False if it is there, with other content.

        An answer may be lost, and the request repeated: the file is then there by this very call.
        """
        import obstore

        try:
            with _translated(f"{self.address}/{name}"):
                _repeated(lambda: obstore.put(self._store, name, content, mode="create"))
        except BucketError:
            try:
                return self.get(name) == content
            except NotThereError:
                pass  # of the first error
            raise
        return True

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the sizes of all files by name, or of those in a folder."""
        import obstore

        with _translated(self.address):
            pages = _repeated(lambda: [*obstore.list(self._store, folder or None)])
        return {each["path"]: each["size"] for page in pages for each in page}

    def folders(self) -> list[str]:
        import obstore

        with _translated(self.address):
            found = _repeated(lambda: obstore.list_with_delimiter(self._store))
        return [*found["common_prefixes"]]

    def newest_lease(self) -> tuple[int, datetime] | None:
        """Return the number of the newest writer, and when it was last heard of.

        A folder without a lease, such as one that is named by a date, is somebody else's.
        """
        fences = [int(name) for name in self.folders() if _FENCE.fullmatch(name)]
        for number in sorted(fences, reverse=True):
            with suppress(NotThereError):
                return number, self.state_of(f"{number:06d}/{LEASE}")[0]
        return None

    def state_of(self, name: str) -> tuple[datetime, str | None]:
        """Return when a file was written, by the store's clock, and its tag."""
        import obstore

        with _translated(f"{self.address}/{name}"):
            facts = obstore.head(self._store, name)
        return facts["last_modified"], facts["e_tag"]

    def remove(self, names: list[str]) -> None:
        import obstore

        for name in names:  # in this order; of S3 a request for many has no order
            try:
                with _translated(f"{self.address}/{name}"):
                    _repeated(partial(obstore.delete, self._store, name))
            except NotThereError:
                continue

    def download(self, name: str, place: Path, most: int) -> tuple[int, str]:
        """Write a file to `place`; return its size and SHA-256. One of more bytes is not read."""
        import obstore

        with _translated(f"{self.address}/{name}"):
            size = obstore.head(self._store, name)["size"]
        digest = hashlib.sha256()
        with place.open("wb") as file:
            for begin in range(0, size if size <= most else 0, PIECE):
                length = min(PIECE, size - begin)
                with _translated(f"{self.address}/{name}"):
                    piece = obstore.get_range(self._store, name, start=begin, length=length)
                digest.update(piece)
                file.write(piece)
        return size, digest.hexdigest()


def _repeated(request: Callable[[], T]) -> T:
    """Make a request, again if its connection breaks.

    obstore 0.12.1 fails at once where a listing or a delete breaks off in its answer, and where a
    conditional put or a delete gets none. Whether it has repeated a request is in its message.
    """
    for pause_s in PAUSES_S:
        try:
            return request()
        except Exception as error:
            text = str(error)
            if "HTTP error" not in text or re.search(r"after \d+ retries", text):
                raise
        time.sleep(pause_s)
    return request()


def _open_store(address: str, is_new: bool) -> Any:
    from obstore import store

    if address.startswith("file:"):
        if not is_new and not Path(unquote(urlsplit(address).path)).is_dir():
            raise FileNotFoundError
        return store.from_url(address, mkdir=is_new, automatic_cleanup=True)
    options: Any = {
        "timeout": timedelta(seconds=REQUEST_S),
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
    retry: Any = {"max_retries": 5, "retry_timeout": timedelta(seconds=RETRY_S), "backoff": backoff}
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
        raise BucketError(f"""{address}:
            there is no login; give AWS_ACCESS_KEY_ID, AWS_PROFILE or ~/.aws""") from None


@contextmanager
def _translated(place: str) -> Iterator[None]:
    """Raise BucketError for any error of obstore's. A store's answer may repeat a login: it is cut
    off."""
    try:
        yield
    except BucketError:
        raise
    except FileNotFoundError as error:
        if any(code in str(error) for code in NO_BUCKET):
            raise BucketError(f"{place}: there is no such bucket") from None
        raise NotThereError(f"{place}: is not there") from None
    except Exception as error:  # obstore's own, OSError and ValueError
        text = str(error).partition("<?xml")[0].partition("\n")[0]
        text = _REQUEST.sub("", text)
        why = one_line(Exception(text))[:MOST_SHOWN].rstrip(" -:")
        name = type(error).__name__
        is_denied = name in DENIED or "(code: AccessDenied)" in why  # of S3's delete
        raise (DeniedError if is_denied else BucketError)(f"{place}: {why or name}") from None


@dataclass(frozen=True)
class Listing:
    """Content of a bucket: the files of a run with their sizes, and its writers, oldest first.

    A writer is [fence, first step]; the step is None while it is not known, at its start.
    """

    sizes: Mapping[str, int]
    writers: list[list[Any]]

    @property
    def fence(self) -> int:
        return self.writers[-1][0] if self.writers else 0

    def checkpoints(self) -> dict[int, str]:
        """Return the folders of those checkpoints that count, by step, oldest first."""
        found: dict[int, str] = {}
        begun = {fence: first for fence, first in self.writers if first is not None}
        published = [match for name in self.own() if (match := _CHECKPOINT.fullmatch(name))]
        for match in sorted(published, key=lambda match: int(match[1])):
            fence, step = int(match[1]), int(match[2])
            later = [first for other, first in begun.items() if other > fence]
            if step <= min(later, default=step):
                found[step] = match[0].rpartition("/")[0]
        return dict(sorted(found.items()))

    def own(self) -> dict[str, int]:
        """Return the files that writers of this run have written, with their fences.

        All others are somebody else's: below the address there may be other runs, or data.
        """
        known = {fence for fence, _ in self.writers}
        fences = {name: int(match[1]) for name in self.sizes if (match := _OWN.fullmatch(name))}
        return {name: fence for name, fence in fences.items() if fence in known}

    def home(self) -> str:
        """Return the folder of the newest writer that has written its settings."""
        homes = [name.partition("/")[0] for name in self.own() if name.endswith("/config.json")]
        return max(homes, key=int, default="")


def read_listing(bucket: Bucket) -> Listing:
    """Return what a bucket holds. Raises BucketError."""
    sizes = bucket.sizes()
    leases = [name for name in sizes if _FENCE.fullmatch(name.removesuffix(f"/{LEASE}"))]
    newest = max(leases, key=lambda name: int(name.partition("/")[0]), default="")
    return Listing(sizes, read_lease(bucket, newest)["writers"] if newest else [])


def read_lease(bucket: Bucket, name: str) -> dict[str, Any]:
    """Return the facts of a writer. Raises BucketError, also for a file that no writer wrote."""
    try:
        facts = json.loads(bucket.get(name))
        for fence, first in facts["writers"]:
            if type(fence) is not int or type(first) not in (int, type(None)):
                raise ValueError
        if facts["writers"][-1][0] != int(name.partition("/")[0]):
            raise ValueError
    except (ValueError, TypeError, LookupError, RecursionError):
        raise BucketError(f"{bucket.address}/{name}: was not written by a run") from None
    return facts
