"""The run in a bucket: which files and writers are there, and which checkpoints count.

    s3://bucket/first/000001/{lease.json, config.json, metrics.jsonl, exit.json, checkpoints/...}
    s3://bucket/first/000002/...

Each writer has a folder of its own, laid out as a run directory, so that no writer ever overwrites
a file of another one. The number of the folder is the writer's fence: only one process can create
its lease.json, and the writer with the highest number is the only one. Its lease has the step at
which each writer began. A checkpoint does not count if it is of a later step than one at which a
later writer began: a writer that had lost its lease, and did not know it yet, has published it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from trainer.core.api import RECORD, NotThereError, StoreError
from trainer.places.bucket import LEASE, Bucket

_FENCE = re.compile(r"[0-9]{6,}")  # without digits of other scripts, which int() takes
_CHECKPOINT = re.compile(r"([0-9]{6,})/checkpoints/step-([0-9]{8,})/manifest\.json")
_RECORDED = "|".join(re.escape(name) for name in (*RECORD, LEASE))
_OWN_FILE = re.compile(rf"([0-9]{{6,}})/(?:{_RECORDED}|checkpoints/step-[0-9]{{8,}}/[^/]+)")


@dataclass(frozen=True)
class Listing:
    """Content of a bucket: the files of a run with their sizes, and its writers, oldest first.

    A writer is [fence, first step]; the step is None while it is not known, at its start.
    """

    sizes: Mapping[str, int]
    writers: list[list[Any]]
    facts: Mapping[str, Any] = field(default_factory=dict)  # of the last writer's lease

    @property
    def fence(self) -> int:
        return self.writers[-1][0] if self.writers else 0

    @property
    def next_fence(self) -> int:
        """The number of the next writer: also after one that was killed when it began."""
        return 1 + max(map(_fence_of, self.sizes), default=0)

    def checkpoints(self) -> dict[int, str]:
        """Return the folders of those checkpoints that count, by step, oldest first."""
        folders: dict[int, str] = {}
        begun = {fence: first for fence, first in self.writers if first is not None}
        names = [name for name in self.own() if self.sizes[name]]  # an empty one is being written
        published = [match for name in names if (match := _CHECKPOINT.fullmatch(name))]
        for match in sorted(published, key=lambda match: int(match[1])):
            fence, step = int(match[1]), int(match[2])
            later = [first for other, first in begun.items() if other > fence]
            if step <= min(later, default=step):
                folders[step] = match[0].rpartition("/")[0]
        return dict(sorted(folders.items()))

    def own(self) -> dict[str, int]:
        """Return the files that writers of this run have written, with their fences.

        All others are somebody else's: below the address there may be other runs, or data.
        """
        writer_fences = {fence for fence, _ in self.writers}
        fences = {
            name: int(match[1]) for name in self.sizes if (match := _OWN_FILE.fullmatch(name))
        }
        return {name: fence for name, fence in fences.items() if fence in writer_fences}

    def home(self) -> str:
        """Return the folder of the newest writer that has written its settings."""
        homes = [name.partition("/")[0] for name in self.own() if name.endswith("/config.json")]
        return max(homes, key=int, default="")


def folder_of(name: str) -> str:
    """Return the folder of the checkpoint that a file belongs to; "" for one of the record."""
    folder, _, file = name.rpartition("/")
    return folder if "/checkpoints/" in name and file else ""


def step_of(folder: str) -> int:
    """Return the step of a checkpoint's folder."""
    return int(folder.rpartition("/step-")[2])


def read_listing(bucket: Bucket) -> Listing:
    """Return what a bucket holds. Raises StoreError."""
    sizes = bucket.sizes()
    leases = [name for name in sizes if _fence_of(name) and sizes[name]]
    if not leases:
        return Listing(sizes, [])
    facts = read_lease(bucket, max(leases, key=_fence_of))
    return Listing(sizes, facts["writers"], facts)


def _fence_of(name: str) -> int:
    """Return the number of the writer whose lease a file is; 0 for others."""
    folder = name.removesuffix(f"/{LEASE}")
    return int(folder) if folder != name and _FENCE.fullmatch(folder) else 0


def read_lease(bucket: Bucket, name: str) -> dict[str, Any]:
    """Return the facts of a writer. Raises StoreError, also for a file that no writer wrote."""
    try:
        facts = json.loads(bucket.get(name))
        for fence, first in facts["writers"]:
            if type(fence) is not int or type(first) not in (int, type(None)):
                raise ValueError
        if facts["writers"][-1][0] != int(name.partition("/")[0]):
            raise ValueError
    except (ValueError, TypeError, LookupError, RecursionError):
        raise StoreError(f"{bucket.address}/{name}: was not written by a run") from None
    return facts


def newest_lease(bucket: Bucket) -> tuple[int, datetime] | None:
    """Return the number of the newest writer, and when it was last heard of.

    A folder without a lease, such as one that is named by a date, is somebody else's.
    """
    fences = [int(name) for name in bucket.folders() if _FENCE.fullmatch(name)]
    for fence in sorted(fences, reverse=True):
        with suppress(NotThereError):
            return fence, bucket.state_of(f"{fence:06d}/{LEASE}")[0]
    return None
