"""The fence of a run in a bucket: the number of the one process that may write there, by a lease.

The lease is a file that only one process can create. Its owner renews it, and the next writer waits
until it was not renewed for a while by the store's clock, unless it was released, or its process on
this machine is dead.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.config.bucket import LEASE, Bucket, BucketError, Listing, read_lease, read_listing
from trainer.distributed.watch.process_table import read_stat
from trainer.errors import CheckpointError, ConfigError

RENEW_S = 10.0  # between two renewals of the lease
EXPIRY_S = 35.0  # of a lease that is not renewed: its writer has ended, or has no network
POLL_S = 0.5
ANNOUNCE_S = 1.0
CLOCK = "clock"  # a file that is written to read the store's clock


class FenceError(CheckpointError):
    """Another process has taken over a run in a bucket."""


class Fence:
    """The right of one process to write a run in a bucket, renewed by a thread."""

    def __init__(self, bucket: Bucket, step: int, reached: int | None):
        """Take over the run at `step`, as the next writer.

        `reached` is the newest step that was there when the start looked for it, None for one that
        goes back to an earlier step.

        Raises ConfigError if another process is the writer or has gone on since, BucketError.
        """
        self.bucket = bucket
        self._beats = 0
        self._turn = threading.Lock()  # a renewal must not undo the release
        self._is_closed = threading.Event()
        held = read_listing(bucket)
        if held.writers:
            self._await_end(held.fence)
        self.number = held.fence + 1
        self.folder = f"{self.number:06d}"
        self._facts = {
            "token": secrets.token_hex(8),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "began": _began(os.getpid()),
            "place": _place(),
        }
        writers = [*held.writers, [self.number, None]]
        name = f"{self.folder}/{LEASE}"
        if not self.bucket.create(name, self._lease(writers)):
            raise ConfigError(f"""{bucket.address}: another process began to write there just now;
                give another prefix""")
        self._writers = writers
        self._check_others(read_listing(bucket), reached)
        self._writers = [*writers[:-1], [self.number, step]]
        self._put()

    def keep(self, lose: Callable[[Exception], None]) -> None:
        """Renew the lease until the end. `lose` gets the error if another process takes over."""
        threading.Thread(target=self._renew, args=(lose,), daemon=True, name="lease").start()

    def _check_others(self, held: Listing, reached: int | None) -> None:
        """Raise ConfigError if a later writer has begun, or the one before has gone on."""
        self.check(held)
        newest = max(held.checkpoints(), default=0)
        if reached is not None and newest > reached:
            self.release()
            raise ConfigError(f"""{self.bucket.address}: its run has reached step {newest:,}
                since this start read step {reached:,}; start it again""")

    def _lease(self, writers: list[list[Any]], is_released: bool = False) -> bytes:
        self._beats += 1
        facts = {**self._facts, "beat": self._beats, "writers": writers, "released": is_released}
        return json.dumps(facts).encode()

    def _await_end(self, number: int) -> None:
        """Return once the last writer has ended. Raises ConfigError if it has not."""
        name = f"{number:06d}/{LEASE}"
        facts = read_lease(self.bucket, name)
        who = _describe(facts)
        refusal = ConfigError(f"""checkpoint.mirror={self.bucket.address}: {who} writes there;
            wait until it ends, or give another prefix""")
        if facts.get("released"):
            return
        if facts.get("place") == _place():
            if facts.get("pid") != os.getpid() and _is_running(facts):
                raise refusal
            return
        first = self.bucket.state_of(name)
        self.bucket.put(CLOCK, b"")
        age_s = (self.bucket.state_of(CLOCK)[0] - first[0]).total_seconds()
        end = time.monotonic() + EXPIRY_S - age_s
        if end - time.monotonic() > ANNOUNCE_S:
            line = f"{self.bucket.address}: waiting until the lease of {who} expires ..."
            print(line, file=sys.stderr, flush=True)
        while time.monotonic() < end:
            time.sleep(POLL_S)
            if self.bucket.state_of(name) != first:
                raise refusal

    def _renew(self, lose: Callable[[Exception], None]) -> None:
        while not self._is_closed.wait(RENEW_S):
            try:
                self.check()
                with self._turn:
                    if not self._is_closed.is_set():
                        self._put()
            except BucketError:
                continue  # the mirror tells it
            except FenceError as error:
                lose(error)
                return

    def check(self, held: Listing | None = None) -> None:
        """Raise FenceError if a later writer has begun, BucketError if this one's lease is gone.

        `held` is what the bucket holds now, for those who have just read it.
        """
        newest = held.fence if held else (self.bucket.newest_lease() or (0, None))[0]
        if newest == self.number:
            return
        if newest < self.number:
            raise BucketError(f"""{self.bucket.address}: the lease of this run is gone, so the
                bucket was emptied, or the folder is not mounted any more""")
        self._is_closed.set()
        who = "another process"
        with suppress(BucketError):
            who = _describe(read_lease(self.bucket, f"{newest:06d}/{LEASE}"))
        raise FenceError(f"""checkpoint.mirror={self.bucket.address}: {who} has taken over
            this run, and this process publishes nothing more there""")

    def release(self) -> None:
        """Let the next writer begin without waiting. Raises BucketError."""
        with self._turn:
            self._is_closed.set()
            self._put(is_released=True)

    def _put(self, is_released: bool = False) -> None:
        self.bucket.put(f"{self.folder}/{LEASE}", self._lease(self._writers, is_released))

    def abandon(self) -> None:
        """Renew the lease no more."""
        self._is_closed.set()


def _describe(facts: dict[str, Any]) -> str:
    return f"process {facts.get('pid')} on {facts.get('host')}"


def _place() -> str:
    """Return what names this machine, since it was booted, and its process ids."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    return secrets.token_hex(8)


def _is_running(facts: dict[str, Any]) -> bool:
    """Return True if the process of a lease runs on this machine: neither one that has ended and
    was not waited for, as of a killed launcher, nor a later one with its number."""
    began = _began(facts.get("pid"))
    return began == HIDDEN or (began != "" and facts.get("began", began) == began)


HIDDEN = "?"  # another user's process where /proc has the option hidepid


def _began(pid: Any) -> str:
    """Return when a process began, in ticks since the boot; "" for one that has ended."""
    try:
        fields = read_stat(int(pid))
        if not fields[0]:
            os.kill(int(pid), 0)
    except PermissionError:
        return HIDDEN
    except (OSError, ValueError, TypeError, OverflowError):
        return ""
    return "" if fields[0] in ("", "Z", "X") else fields[19]


def open_fence(address: str | None, step: int, reached: int | None) -> Fence | None:
    """Become the writer of `checkpoint.mirror`, if there is one.

    Raises ConfigError if it cannot be written, or another process writes there.
    """
    if address is None:
        return None
    try:
        return Fence(Bucket(address, is_new=True), step, reached)
    except BucketError as error:
        raise ConfigError(f"""checkpoint.mirror={address}: {error};
            check the address, the login and the network""") from None
