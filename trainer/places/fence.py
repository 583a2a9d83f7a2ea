"""The fence of a run in a bucket: the number of the one process that may write there, by a lease.

The lease is a file that only one process can create. Its owner renews it, and the next writer waits
until it was not renewed for a while by the store's clock, unless it was released, or its process on
this machine is dead.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from trainer.base.errors import CheckpointError, ConfigError, visible
from trainer.core.api import Owner, StoreError
from trainer.places.bucket import LEASE, Bucket
from trainer.places.listing import Listing, newest_lease, read_lease, read_listing

RENEW_S = 10.0  # between two renewals of the lease
EXPIRY_S = 35.0  # of a lease that is not renewed: its writer has ended, or has no network
LEASE_POLL_S = 0.5
ANNOUNCE_WAIT_S = 1.0
OF_LAUNCH = ("launch", "starters")
CLOCK = "clock"  # a file that is written to read the store's clock


class FenceError(CheckpointError):
    """Another process has taken over a run in a bucket."""


class Fence:
    """The right of one process to write a run in a bucket, renewed by a thread."""

    def __init__(self, bucket: Bucket, step: int, reached: int | None, launch: Mapping[str, str]):
        """Take over the run at `step`, as the next writer.

        `reached` is the newest step that was there when the start looked for it, None for one that
        goes back to an earlier step. `launch`: facts by which a restart knows its own run, by
        default those of the writer before.

        Raises ConfigError if another process is the writer or has gone on since, StoreError.
        """
        self.bucket = bucket
        self._beats = 0
        self._turn = threading.Lock()  # a renewal must not undo the release
        self._is_closed = threading.Event()
        held = read_listing(bucket)
        if held.writers:
            self._wait_for_expiry(held.fence)
        self.number = held.next_fence
        self.folder = f"{self.number:06d}"
        before = {name: held.facts[name] for name in OF_LAUNCH if name in held.facts}
        self._facts = {**(launch or before), **Owner.new().facts()}
        writers = [*held.writers, [self.number, None]]
        name = f"{self.folder}/{LEASE}"
        if not self._create(name, self._lease(writers)):
            raise ConfigError(f"""{bucket.address}: another process began to write there just now;
                give another prefix""")
        self._writers = writers
        try:
            self._check_store(name)
            self._check_others(read_listing(bucket), reached)
            self._writers = [*writers[:-1], [self.number, step]]
            self._put()
        except BaseException:
            with suppress(StoreError):
                self.release()
            raise

    def keep(self, lose: Callable[[Exception], None]) -> None:
        """Renew the lease until the end. `lose` gets the error if another process takes over."""
        threading.Thread(target=self._renew, args=(lose,), daemon=True, name="lease").start()

    def _create(self, name: str, lease: bytes) -> bool:
        """Create the lease, as `Bucket.create`. Raises ConfigError if the store cannot."""
        try:
            return self.bucket.create(name, lease)
        except StoreError as error:
            with suppress(StoreError):
                self.bucket.put(CLOCK, b"")
                raise ConfigError(f"""{self.bucket.address}: the store takes files, but not a
                    conditional put (If-None-Match), which lets only one process write there:
                    {error}; start again, or use another store""") from None
            raise

    def _check_store(self, name: str) -> None:
        """Raise ConfigError unless the store refuses to create the lease a second time: else two
        starts at one moment would both write there."""
        if self.bucket.create(name, self._lease(self._writers)):
            raise ConfigError(f"""{self.bucket.address}: the store creates a file that is there
                already, so it has no conditional put (If-None-Match) and two runs could write
                there; use another store""")

    def _check_others(self, held: Listing, reached: int | None) -> None:
        """Raise ConfigError if a later writer has begun, or the one before has gone on."""
        self.check(held)
        newest = max(held.checkpoints(), default=0)
        if reached is not None and newest > reached:
            raise ConfigError(f"""{self.bucket.address}: its run has reached step {newest:,}
                since this start read step {reached:,}; start it again""")

    def _lease(self, writers: list[list[Any]], is_released: bool = False) -> bytes:
        self._beats += 1
        facts = {**self._facts, "beat": self._beats, "writers": writers, "released": is_released}
        return json.dumps(facts).encode()

    def _wait_for_expiry(self, fence: int) -> None:
        """Return once the last writer has ended. Raises ConfigError if it has not."""
        name = f"{fence:06d}/{LEASE}"
        facts = read_lease(self.bucket, name)
        owner = Owner.of(facts)
        who = owner.describe()
        refusal = ConfigError(f"""checkpoint.mirror={self.bucket.address}: {who} writes there;
            wait until it ends, or give another prefix""")
        if facts.get("released"):
            return
        if owner.is_here:
            if owner.is_running and not owner.is_this_process:
                raise refusal
            return
        first = self.bucket.state_of(name)
        self.bucket.put(CLOCK, b"")
        age_s = (self.bucket.state_of(CLOCK)[0] - first[0]).total_seconds()
        end = time.monotonic() + EXPIRY_S - age_s
        if end - time.monotonic() > ANNOUNCE_WAIT_S:
            line = f"{self.bucket.address}: waiting until the lease of {who} expires ..."
            print(visible(line), file=sys.stderr, flush=True)
        while time.monotonic() < end:
            time.sleep(LEASE_POLL_S)
            if self.bucket.state_of(name) != first:
                raise refusal

    def _renew(self, lose: Callable[[Exception], None]) -> None:
        while not self._is_closed.wait(RENEW_S):
            try:
                self.check()
                with self._turn:
                    if not self._is_closed.is_set():
                        self._put()
            except StoreError:
                continue  # the mirror tells it
            except FenceError as error:
                lose(error)
                return

    def check(self, held: Listing | None = None) -> None:
        """Raise FenceError if a later writer has begun, StoreError if this one's lease is gone.

        `held` is what the bucket holds now, for those who have just read it.
        """
        newest = held.fence if held else (newest_lease(self.bucket) or (0, None))[0]
        if newest == self.number:
            return
        if newest < self.number:
            raise StoreError(f"""{self.bucket.address}: the lease of this run is gone, so the
                bucket was emptied, the folder is not mounted any more, or no store answers there,
                but a web page""")
        self._is_closed.set()
        who = "another process"
        with suppress(StoreError):
            facts = read_lease(self.bucket, f"{newest:06d}/{LEASE}")
            who = Owner.of(facts).describe()
        raise FenceError(f"""checkpoint.mirror={self.bucket.address}: {who} has taken over
            this run, and this process publishes nothing more there""")

    def release(self) -> None:
        """Let the next writer begin without waiting. Raises StoreError."""
        with self._turn:
            self._is_closed.set()
            self._put(is_released=True)

    def _put(self, is_released: bool = False) -> None:
        self.bucket.put(f"{self.folder}/{LEASE}", self._lease(self._writers, is_released))

    def abandon(self) -> None:
        """Renew the lease no more."""
        self._is_closed.set()
