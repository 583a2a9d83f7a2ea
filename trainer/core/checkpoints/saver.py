"""Savers: each rank writes its part of a checkpoint in the background, and rank 0 publishes it."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.base.errors import CheckpointError, ConfigError, RunError
from trainer.core.checkpoints import tensor_files, transaction
from trainer.core.checkpoints.disk import Disk
from trainer.core.checkpoints.reading import TRAINING
from trainer.core.checkpoints.transaction import read_manifest
from trainer.core.config.schema import CheckpointSettings
from trainer.core.config.stores import Events, Mirror, open_writer
from trainer.core.distributed.group import Group
from trainer.core.distributed.rendezvous import ValueStore
from trainer.core.strategy.tensor_shards import Shard, gather
from trainer.core.strategy.tensors import Tensors


def whole_parameters(tensors: Tensors, group: Group) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and all values of each parameter on rank 0. A collective, as is each item."""
    shards = tensors.shards()
    is_divided = len(tensors.writers()) > 1
    for name, _ in tensors.structure.named_parameters():
        own = {name: shards[name]} if name in shards else {}
        if is_divided:
            own = gather(own, group)
        for shard in own.values():
            yield name, shard.tensor


REMOVING = "removing older checkpoints"
STORE_POLL_S = 0.02  # a blocking wait of the store would hold up the main thread's messages


@dataclass(frozen=True)
class Snapshot:
    """State that a rank saves: its shards by kind, plain values, facts for the manifest."""

    step: int
    shards: Mapping[str, Mapping[str, Shard]]
    training: Mapping[str, Any]
    facts: Mapping[str, Any]
    best: int | None

    def private_copy(self) -> Snapshot:
        """Copy the values that training changes, without those that other ranks write."""
        shards = tensor_files.private_copy(self.shards)
        return replace(self, shards=shards, training=copy.deepcopy(self.training))

    @property
    def size(self) -> int:
        """Bytes that this rank writes."""
        every = [shard for named in self.shards.values() for shard in named.values()]
        return sum(shard.tensor.nbytes for shard in every if shard.is_written)


class Mail:
    """Lines that the writers of a checkpoint send to rank 0, through the group's store."""

    def __init__(self, store: dist.Store, rank: int, writers: Sequence[int], limit_s: float):
        self.rank = rank
        self._store = ValueStore("parts", store)
        self._others = [writer for writer in writers if writer]
        self._limit_s = limit_s
        self._is_closed = threading.Event()

    def post(self, staging: Path, line: Any) -> None:
        self._store.put(line, f"{staging.name}/{self.rank}")

    def collect(self, staging: Path) -> list[Any]:
        """Return the lines of all writers but rank 0. Raises RunError if one does not arrive."""
        begun = time.monotonic()
        lines = []
        for rank in self._others:
            key = f"{staging.name}/{rank}"
            while not self._store.check([key]):
                if self._is_closed.wait(STORE_POLL_S):
                    raise RunError("the run ended before all ranks had written their part")
                if time.monotonic() - begun > self._limit_s:
                    raise RunError(f"""rank {rank} has not written its part in {self._limit_s:g} s;
                        raise dist.timeout_s if the disk is slow""")
            lines += self._store.take(key)
        return lines

    def close(self) -> None:
        self._is_closed.set()


class Saver:
    """Writes this rank's part of each checkpoint, in the background if it may.

    Without `mail` it writes nothing: rank 0 has the state of this rank, too.
    """

    def __init__(self, directory: Path, mail: Mail | None = None):
        self.root = directory / "checkpoints"
        self._mail = mail
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[None] | None = None
        self._is_lost = False

    def path_of(self, step: int) -> Path:
        return transaction.final_path(self.root, step)

    def stage(self, step: int) -> str:
        """Return the staging directory for a checkpoint; empty if none is to be written."""
        return ""

    def save(self, staging: str, snapshot: Snapshot, is_behind: bool) -> None:
        """Write this rank's part into the staging directory.

        Rank 0 then publishes it, and removes older checkpoints, but never the best. If `is_behind`
        is true, a thread does all this with a copy of the snapshot; `wait` waits for the thread.
        """
        if self._mail is None:
            return
        if is_behind:
            copied = snapshot.private_copy()
            self._saving = self._pool.submit(self._save_behind, self._mail, Path(staging), copied)
        else:
            self._save(self._mail, Path(staging), snapshot)

    def _save_behind(self, mail: Mail, staging: Path, snapshot: Snapshot) -> None:
        """Save in the background; the loop reads `has_failed` after every step."""
        try:
            self._save(mail, staging, snapshot)
        except BaseException:
            self._is_lost = True
            raise  # `wait` raises it in the main thread

    def _save(self, mail: Mail, staging: Path, snapshot: Snapshot) -> None:
        """Write this rank's files and tell rank 0 what they hold, or what failed."""
        try:
            written = tensor_files.write_shards(staging, mail.rank, snapshot.shards)
        except OSError as error:
            problem = [error.errno, error.strerror, str(error.filename or staging)]
            mail.post(staging, {"problem": problem})  # rank 0 decides what it means
        except Exception as error:
            mail.post(staging, {"problem": str(error)})
            raise
        else:
            mail.post(staging, {"written": written})

    def wait(self, step: int | None = None) -> None:
        """Wait for the checkpoint that is being written.

        Raises RunError, one line, if it failed, or if `step` does not exist afterwards.
        """
        if self._saving is not None:
            try:
                self._saving.result()
            finally:
                self._saving = None

    @property
    def has_failed(self) -> bool:
        """True if `wait` would raise. Read after every step."""
        return self._is_lost

    def withdraw(self, step: int) -> None:
        """Move the checkpoints of `step` and later aside."""

    @property
    def is_copied(self) -> bool:
        """True if the mirror has all that was saved, or there is none. Read in another thread."""
        return True

    def close(self, beat: Callable[[], None] = lambda: None) -> None:
        """Write the rest, and copy it to the mirror, which calls `beat` while it does."""
        if self._mail is not None:
            self._mail.close()
        self._pool.shutdown()


class Publisher(Saver):
    """Rank 0's saver, which publishes. All earlier log entries are on disk before a checkpoint."""

    def __init__(
        self,
        directory: Path,
        keep: CheckpointSettings,
        disk: Disk,
        check_owner: Callable[[], None],
        flush_record: Callable[[], None],
        tell_saved: Callable[[int, Path], None],
        mail: Mail,
        mirror: Mirror | None = None,
    ):
        """`check_owner` raises if another process has taken over the directory.

        It repairs the directory if nobody has. `tell_saved` gets each published checkpoint, and
        `mirror` copies it.
        """
        super().__init__(directory, mail)
        self._keep = keep
        self._disk = disk
        self._check_owner = check_owner
        self._flush_record = flush_record
        self._tell_saved = tell_saved
        self._mirror = mirror
        self._best: Set[int | None] | None = None

    def stage(self, step: int) -> str:
        if self._has(step):
            return ""
        self._check_owner()
        try:
            self._make_way(self.path_of(step))
            return str(transaction.stage(self.root, step))
        except OSError as error:
            self._report(error, step, 0)
            return ""

    def wait(self, step: int | None = None) -> None:
        super().wait()
        if self._disk.failure is not None:
            raise self._disk.failure
        if step is not None and not self._has(step):
            raise RunError(f"""{self.path_of(step)}:
                could not be saved, so the run's last step is lost; make room and resume""")

    def _has(self, step: int) -> bool:
        """Return True if the checkpoint of a step is there, and not another thing of its name."""
        try:
            read_manifest(self.path_of(step))
        except CheckpointError:
            return False
        return True

    def _make_way(self, path: Path) -> None:
        """Rename what has the name of a checkpoint and is none."""
        if not transaction.is_gone(path):
            aside = transaction.set_aside(path)
            self._disk.tell(f"{path} was no checkpoint of this run, and is {aside.name} now")

    @property
    def has_failed(self) -> bool:
        return self._is_lost or self._disk.failure is not None

    def _save(self, mail: Mail, staging: Path, snapshot: Snapshot) -> None:
        try:
            with transaction.removed_on_error(staging):
                self._publish(mail, staging, snapshot)
            self._disk.recover("saving")
            self._tell_saved(snapshot.step, self.path_of(snapshot.step))
        except OSError as error:
            self._report(error, snapshot.step, snapshot.size)
            if self._disk.failure is not None:
                raise self._disk.failure from None
            return
        best: Set[int | None] = {snapshot.best} if self._keep.keep_best else set()
        if self._mirror is not None:
            self._best = best
            self._mirror.look(best)
        self._prune(best)

    def _prune(self, also: Set[int | None]) -> None:
        """Remove older checkpoints; one that cannot be removed is no reason to end the run."""
        if self._mirror is not None:
            also = also | self._mirror.held
        try:
            transaction.prune(self.root, self._keep, also, self._check_owner)
        except OSError as error:
            self._disk.bear(error, REMOVING)
        else:
            self._disk.recover(REMOVING)

    def _report(self, error: OSError, step: int, size: int) -> None:
        self._check_owner()  # raises if a new owner has removed the staged files
        self._disk.report(error, f"saving step {step}", size)

    def _publish(self, mail: Mail, staging: Path, snapshot: Snapshot) -> None:
        try:
            self._flush_record()
            files, index = tensor_files.write_shards(staging, 0, snapshot.shards)
        finally:
            lines = mail.collect(staging)  # before the directory may be removed
        indices = [index]
        for line in lines:
            problem = line.get("problem")
            if isinstance(problem, list):
                raise OSError(*problem)
            if problem is not None:
                raise CheckpointError(problem)
            files |= line["written"][0]
            indices.append(line["written"][1])
        text = json.dumps(tensor_files.merge(indices)).encode()
        files[tensor_files.INDEX] = transaction.write_one(staging, tensor_files.INDEX, text)
        for name, data in tensor_files.packed({TRAINING: snapshot.training}):
            files[name] = transaction.write_one(staging, name, data)
        facts = snapshot.facts
        transaction.publish(staging, self.root, snapshot.step, files, facts, self._check_owner)

    @property
    def is_copied(self) -> bool:
        saving = self._saving
        is_saved = saving is None or saving.done()
        return is_saved and (self._mirror is None or self._mirror.is_idle)

    def close(self, beat: Callable[[], None] = lambda: None) -> None:
        super().close()
        if self._mirror is not None:
            self._mirror.close(beat)
        if self._best is not None:
            with suppress(CheckpointError):  # another process has taken over
                self._prune(self._best)  # one may have been kept because it was being copied

    def withdraw(self, step: int) -> None:
        self.wait()
        try:
            for saved_step, path in transaction.steps(self.root).items():
                if saved_step >= step:
                    transaction.set_aside(path)
        except OSError as error:
            raise RunError(f"""{error.filename}: {error.strerror} while rolling back
                to step {step - 1}; make it writable, and resume with run.resume""") from None


def copy_again(
    keep: CheckpointSettings, directory: Path, best: int | None, say: Callable[[str], None]
) -> None:
    """Copy to the store what a finished run wrote after its mirror had closed, such as exit.json.

    It is one more writer there. If that fails, or another run has gone on there, `say` gets a line.
    """
    step = max(transaction.steps(directory / "checkpoints"), default=0)
    try:
        writer = open_writer(keep.mirror, step, step)
    except ConfigError as error:
        say(f"warning: {error}; so the bucket does not have the end of this run")
        return
    if writer is not None:
        writer.follow(keep, directory, Events(say), {best}).close()
