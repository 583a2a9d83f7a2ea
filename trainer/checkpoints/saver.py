"""The saver: publishes checkpoints behind the loop, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainer.checkpoints import packing, transaction
from trainer.checkpoints.disk import Disk
from trainer.config.schema import Checkpoint
from trainer.errors import RunError


class Saver:
    """Saves nothing: on all ranks but 0, so that callers never ask for the rank."""

    def __init__(self, directory: Path):
        self.root = directory / "checkpoints"

    def path_of(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def save(
        self, step: int, parts: Mapping[str, Any], facts: Mapping[str, Any], best: int | None
    ) -> None:
        """Publish `parts` as the checkpoint of `step`, then remove older ones, never `best`.

        With checkpoint.background it happens behind the caller; `settle` waits for it.
        """

    def settle(self, step: int | None = None) -> None:
        """Wait for what is being written.

        Raises RunError, one line, where it failed, or where `step` is not there afterwards.
        """

    @property
    def has_failed(self) -> bool:
        """Would `settle` raise now? Asked after every step."""
        return False

    def withdraw(self, step: int) -> None:
        """Move the checkpoints of `step` and later aside."""

    def close(self) -> None: ...


class DiskSaver(Saver):
    """Rank 0's saver. Everything logged before a checkpoint is on the disk before it is."""

    def __init__(
        self,
        directory: Path,
        keep: Checkpoint,
        disk: Disk,
        check_owner: Callable[[], None],
        flush_record: Callable[[], None],
    ):
        """`check_owner` raises where another process has taken the directory over."""
        super().__init__(directory)
        self._keep = keep
        self._disk = disk
        self._check_owner = check_owner
        self._flush_record = flush_record
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[None] | None = None
        self._is_lost = False

    def save(
        self, step: int, parts: Mapping[str, Any], facts: Mapping[str, Any], best: int | None
    ) -> None:
        self.settle()
        if not self._keep.background:
            self._publish(step, parts, facts, best)
            return
        copied = packing.private_copy(parts)
        self._saving = self._pool.submit(self._publish_behind, step, copied, facts, best)

    def settle(self, step: int | None = None) -> None:
        saving = self._saving
        self._saving = None
        if saving is not None:
            saving.result()
        if self._disk.failure is not None:
            raise self._disk.failure
        if step is not None and not self.path_of(step).exists():
            lost = "could not be saved, so the run's last step is lost; make room and resume"
            raise RunError(f"{self.path_of(step)}: {lost}")

    @property
    def has_failed(self) -> bool:
        return self._is_lost or self._disk.failure is not None

    def _publish_behind(self, *arguments: Any) -> None:
        """Publish behind the loop, which asks `has_failed` after every step."""
        try:
            self._publish(*arguments)
        except BaseException:
            self._is_lost = True
            raise  # to whoever settles

    def _publish(
        self, step: int, parts: Mapping[str, Any], facts: Mapping[str, Any], best: int | None
    ) -> None:
        keep = self._keep
        also = {best} if keep.keep_best else set()
        counts = (keep.keep_last, keep.keep_best)
        check = self._check_owner
        try:
            self._flush_record()
            transaction.save(self.root, step, packing.packed(parts), facts, check)
            self._disk.recover("saving")
            transaction.prune(self.root, *counts, keep.metric, keep.best_mode, also, check)
        except OSError as error:
            check()  # a successor has swept what was being written
            self._disk.report(error, f"saving step {step}", packing.size_of(parts))
            if self._disk.failure is not None:
                raise self._disk.failure from None

    def withdraw(self, step: int) -> None:
        self.settle()
        for number, path in transaction.steps(self.root).items():
            if number >= step:
                transaction.set_aside(path)

    def close(self) -> None:
        self._pool.shutdown()
