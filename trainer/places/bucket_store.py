"""A bucket as a store of runs."""

from __future__ import annotations

from collections.abc import Mapping, Set
from datetime import datetime
from pathlib import Path

from trainer.core.api import RECORD, CheckpointSettings, Events, Held, Owner, Store, StoreWriter
from trainer.places.bucket import Bucket
from trainer.places.fence import OF_LAUNCH, Fence
from trainer.places.listing import newest_lease, read_listing
from trainer.places.mirror import BucketMirror


def open_store(address: str, is_new: bool) -> Store:
    """Return the store at an address. Raises ConfigError without obstore, StoreError."""
    return BucketStore(Bucket(address, is_new))


class BucketStore(Store):
    """A run in a bucket."""

    def __init__(self, bucket: Bucket):
        self.address = bucket.address
        self._bucket = bucket

    def get(self, name: str) -> bytes:
        return self._bucket.get(name)

    def download(self, name: str, path: Path, most: int) -> tuple[int, str]:
        return self._bucket.download(name, path, most)

    def held(self) -> Held:
        listing = read_listing(self._bucket)
        home = listing.home()
        there = {name: f"{home}/{name}" for name in RECORD if f"{home}/{name}" in listing.sizes}
        record = {name: (path, listing.sizes[path]) for name, path in there.items()}
        is_own = Owner.of(listing.facts).is_this_process
        launch = {n: v for n, v in listing.facts.items() if n in OF_LAUNCH and not is_own}
        return Held(listing.checkpoints(), record, launch)

    def open_writer(self, step: int, reached: int | None, launch: Mapping[str, str]) -> StoreWriter:
        return BucketWriter(Fence(self._bucket, step, reached, launch))

    def find_runs(self, depth: int) -> list[tuple[datetime, str]]:
        if lease := newest_lease(self._bucket):
            return [(lease[1], self.address)]
        below = [f"{self.address}/{name}" for name in self._bucket.folders()] if depth else []
        return [run for each in below for run in open_store(each, False).find_runs(depth - 1)]


class BucketWriter(StoreWriter):
    """The owner of a bucket's fence."""

    def __init__(self, fence: Fence):
        self.fence = fence

    def follow(
        self,
        keep: CheckpointSettings,
        directory: Path,
        events: Events,
        best: Set[int | None] = frozenset(),
    ) -> BucketMirror:
        return BucketMirror(keep, self.fence, directory, events, best)

    def release(self) -> None:
        self.fence.release()
