"""The fence of a bucket, as a run opens it."""

from __future__ import annotations

from typing import cast

from trainer.core.config.stores import open_writer
from trainer.places.bucket_store import BucketWriter
from trainer.places.fence import Fence


def open_fence(address: str, step: int, reached: int | None) -> Fence:
    """Become the writer of a bucket, as a run with this `checkpoint.mirror`."""
    return cast(BucketWriter, open_writer(address, step, reached)).fence
