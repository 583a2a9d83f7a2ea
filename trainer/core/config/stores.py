"""Stores of runs, such as buckets: their addresses, and what the core asks of one.

A run is kept in a run directory. A store keeps a copy of it, from which another machine goes on.
Modules of `extensions.STORES` implement `Store` and make one by `open_store(address, is_new)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from trainer.base.errors import ConfigError
from trainer.core import extensions
from trainer.core.config.schema import CheckpointSettings

# Files of a run directory that a store keeps besides checkpoints. Config last: the newest copy that
# has it is read, so all of the record must be there by then.
RECORD = (
    *("metrics.jsonl", "exit.json", "proof.txt", "sampling.safetensors", "trackers.json"),
    "config.json",
)


class StoreError(Exception):
    """A store that does not answer or refuses, in one line."""


class NotThereError(StoreError):
    """A file, a run or a folder that is not in the store."""


@dataclass(frozen=True)
class Held:
    """The content of a store: checkpoints of a run and files of its record.

    `checkpoints` are names of folders by step, the oldest first. `record` has for names of RECORD
    the name in the store, and the size in bytes. `launch` has the facts that the last writer gave
    to `open_writer`; none if that was this process.
    """

    checkpoints: Mapping[int, str]
    record: Mapping[str, tuple[str, int]]
    launch: Mapping[str, Any]

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint, 0 without one."""
        return max(self.checkpoints, default=0)


NOTHING = Held({}, {}, {})


class Mirror(ABC):
    """Makes a store hold what a run directory holds, behind the loop."""

    @property
    @abstractmethod
    def held(self) -> Set[int | None]:
        """The step that is being copied, which must not be removed meanwhile."""

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """True if all that was ordered is copied."""

    @abstractmethod
    def look(self, best: Set[int | None] = frozenset()) -> None:
        """Copy what is new. `best` are steps to keep besides those by the rules."""

    @abstractmethod
    def close(self, beat: Callable[[], None] = lambda: None) -> None:
        """Copy the rest, with what the run recorded last, and wait as long as the settings say.

        `beat` is called every now and then, so that a watcher sees that this rank is not hung.
        """


@dataclass(frozen=True)
class Events:
    """Functions by which a mirror tells its run what happened.

    `say` gets lines for the terminal, and `note` facts for the record of a step. `lose` gets the
    error if another process has taken over.
    """

    say: Callable[[str], None]
    note: Callable[[int, Mapping[str, Any]], None] = lambda step, facts: None
    lose: Callable[[Exception], None] = lambda error: None


class StoreWriter(ABC):
    """The right of one process to write a run in a store."""

    @abstractmethod
    def follow(
        self,
        keep: CheckpointSettings,
        directory: Path,
        events: Events,
        best: Set[int | None] = frozenset(),
    ) -> Mirror:
        """Begin to copy a run directory. `best` are steps to keep, as in `Mirror.look`."""

    @abstractmethod
    def release(self) -> None:
        """Let the next writer begin without waiting. Raises StoreError."""


class Store(ABC):
    """The files below an address. Each method raises StoreError."""

    address: str
    SMALL = 2**18  # bytes of a file that `get` reads in one request, over a slow line too

    @abstractmethod
    def get(self, name: str) -> bytes:
        """Return the bytes of a small file."""

    @abstractmethod
    def download(self, name: str, path: Path, most: int) -> tuple[int, str]:
        """Write a file to `path`; return its size and SHA-256. One of more bytes is not read."""

    @abstractmethod
    def held(self) -> Held:
        """Return what the store holds of a run."""

    @abstractmethod
    def open_writer(self, step: int, reached: int | None, launch: Mapping[str, str]) -> StoreWriter:
        """Take over the run at `step`, as its next writer.

        `reached` is the newest step that was there when the start looked for it, None for one that
        goes back to an earlier step. `launch`: facts by which a restart knows its own run, by
        default those of the writer before. Raises ConfigError if another process is the writer or
        has gone on since.
        """

    @abstractmethod
    def find_runs(self, depth: int) -> list[tuple[datetime, str]]:
        """Return the addresses of the runs in folders at most `depth` below, with the time of their
        last writers."""


def is_address(location: str | None) -> bool:
    """Return True for the address of a run in a store, as no path is one."""
    return "://" in (location or "")


def is_same_address(address: str, other: str) -> bool:
    """Return True if two texts are the same address."""
    return address.rstrip("/") == other.rstrip("/")


def name_of(address: str) -> str:
    """Return the last part of an address, which names the run."""
    return address.rstrip("/").rpartition("/")[2].lstrip(".") or "run"


def address_problem(address: str) -> str:
    """Return why a text is no address of a run in a store; empty if it is one."""
    names = ", ".join(f"{scheme}://" for scheme in extensions.STORES)
    try:
        parts = urlsplit(address)
    except ValueError as error:
        return f"is no address ({error}); must be as s3://bucket/first"
    if parts.scheme not in extensions.STORES:
        return f"must begin with one of {names}, as in s3://bucket/first"
    if parts.username or parts.password or parts.query or parts.fragment:
        return "must have no login; give it by the variables of the store's own tools"
    if not address.isprintable() or (not parts.netloc and parts.scheme != "file"):
        return "must be <scheme>://<bucket>/<prefix>, as in s3://bucket/first"
    if not parts.path.strip("/"):
        return "must have a prefix for the run, as in s3://bucket/first"
    return ""


def open_store(address: str, is_new: bool = False) -> Store:
    """Open the store of an address without a problem. `is_new`: make its folder, if it is one.

    Raises ConfigError if what it needs is not installed, StoreError.
    """
    extension = extensions.STORES[urlsplit(address).scheme]
    extension.check(address)
    store: Store = extension.load().open_store(address, is_new)
    return store


def open_writer(
    address: str | None,
    step: int,
    reached: int | None,
    launch: Mapping[str, str] = MappingProxyType({}),
) -> StoreWriter | None:
    """Become the writer of `checkpoint.mirror`, if there is one, as `Store.open_writer`.

    Raises ConfigError if it cannot be written, or another process writes there.
    """
    if address is None:
        return None
    try:
        return open_store(address, is_new=True).open_writer(step, reached, launch)
    except StoreError as error:
        raise ConfigError(f"""checkpoint.mirror={address}: {error};
            check the address, the login and the network""") from None
