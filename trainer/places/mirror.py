"""The mirror of a run in a bucket: its checkpoints and its record, copied behind the loop.

Of a checkpoint its files go first and the manifest last, by a conditional put, between two looks at
the fence: places/listing.py says how a bucket is laid out, and why a writer that has lost its
lease can do no harm.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.base.errors import CheckpointError, one_line
from trainer.base.plain_files import MOST_OF_JSON
from trainer.core.api import (
    CONFIG,
    MANIFEST,
    RECORD,
    CheckpointFiles,
    CheckpointSettings,
    Events,
    Mirror,
    StoreError,
    transaction,
)
from trainer.places.bucket import DeniedError
from trainer.places.fence import ANNOUNCE_WAIT_S, Fence, FenceError
from trainer.places.listing import Listing, folder_of, read_listing, step_of

FIRST_COPY_DELAY_S = 1.0  # after a failure
MOST_COPY_DELAY_S = 30.0
BEAT_S = 0.25  # while the end of a run waits for the copy


class Mirrored:
    """Content of a bucket, and its changes by the writer of a fence.

    A checkpoint there is whole if its manifest is valid and the listing has its files with their
    sizes; one that is not is published anew, if the run directory has it. What a listing does not
    show may be damaged too, so nothing is removed but what is older than the newest checkpoint that
    this writer itself has published.
    """

    def __init__(self, fence: Fence, keep: CheckpointSettings, tell: Callable[[str], None]):
        """`tell` gets a line on what is wrong there and is left as it is."""
        self._bucket = fence.bucket
        self._tell = tell
        self._may_remove = True
        self._fence = fence
        self._keep = keep
        self._is_read = False
        self._is_clean = True  # nothing is there but what counts, and this writer's record
        self._record: dict[str, bytes] = {}  # digests
        self._manifests: dict[str, Mapping[str, Any]] = {}  # by folder; {} for one that is damaged
        self._places: dict[int, str] = {}  # folders of whole checkpoints, by step
        self._scores: dict[int, float] = {}
        self._verified: set[int] = set()  # steps of the run directory, with the right digests
        self._unfit: set[int] = set()  # and with others

    @property
    def newest(self) -> int:
        return max(self._places, default=0)

    def read(self, again: bool = False) -> None:
        """Read what there is: at first, after a failure, or `again`.

        Raises FenceError, StoreError.
        """
        if self._is_read and not again:
            self._fence.check()
            return
        self._unfit.clear()  # a disk may have failed to read them for a while only
        held = read_listing(self._bucket)
        self._fence.check(held)
        own = self._fence.folder
        self._record = {n: d for n, d in self._record.items() if f"{own}/{n}" in held.sizes}
        self._places = {}
        self._scores = {}
        for step, folder in held.checkpoints().items():
            if self._is_whole(folder, held):
                self._places[step] = folder
                self._scores |= self._keep.score(step, self._manifests[folder])
        self._is_clean = self._find_clean(held)
        self._is_read = True

    def forget(self) -> None:
        """Read again what there is, as after a failure nothing is certain."""
        self._is_read = False

    def _is_whole(self, folder: str, held: Listing) -> bool:
        """Return True if a checkpoint has a valid manifest and its files; tell once if not."""
        if folder not in self._manifests:
            self._manifests[folder] = self._read_manifest(folder, held.sizes)
        manifest = self._manifests[folder]
        for name, entry in manifest.get("files", {}).items():
            size = held.sizes.get(f"{folder}/{name}")
            if size != entry["bytes"]:
                what = "is not there" if size is None else f"has {size:,} bytes"
                self._tell(f"""{self._bucket.address}/{folder}/{name}: {what},
                    {entry["bytes"]:,} were written""")
                self._manifests[folder] = {}
                return False
        return bool(manifest)

    def _read_manifest(self, folder: str, sizes: Mapping[str, int]) -> Mapping[str, Any]:
        name = f"{folder}/{MANIFEST}"
        try:
            if sizes[name] > MOST_OF_JSON:
                raise CheckpointError(f"{name}: has {sizes[name]:,} bytes, too many for one")
            return transaction.parse_manifest(self._bucket.get(name), Path(folder))
        except CheckpointError as error:
            self._tell(f"{self._bucket.address}/{error}")
            return {}

    def _find_clean(self, held: Listing, gone: Container[str] = ()) -> bool:
        """Return True if nothing is there, after removals, that may have to be removed later."""
        return not any(
            name not in gone
            and (fence != self._fence.number or folder_of(name) not in {"", *self._places.values()})
            for name, fence in held.own().items()
        )

    def _remove(self, names: Iterable[str]) -> None:
        """Remove files, manifests first. What the login may not remove stays."""
        try:
            self._bucket.remove(sorted(names, key=lambda n: not n.endswith(f"/{MANIFEST}")))
        except DeniedError as error:
            self._may_remove = False
            self._tell(f"{error}; so old checkpoints stay there")

    def should_copy(self, step: int, path: Path, also: Set[int | None]) -> bool:
        """Return True if a checkpoint is not there, and would be kept."""
        if step in self._places or step in self._unfit:
            return False
        scores = {**self._scores, **self._keep.score(step, CheckpointFiles.read(path).manifest)}
        return step in self._keep.kept({*self._places, step}, scores) | also

    def put_record(self, directory: Path) -> None:
        """Write the files of the record that have changed."""
        for name in RECORD:
            try:
                data = (directory / name).read_bytes()
            except FileNotFoundError:
                continue
            digest = hashlib.sha256(data).digest()
            if self._record.get(name) != digest:
                self._bucket.put(f"{self._fence.folder}/{name}", data)
                self._record[name] = digest

    def put_checkpoint(self, step: int, path: Path) -> None:
        """Publish a checkpoint, unless it is damaged.

        Raises FenceError after another process has taken over, CheckpointError if it is gone.
        """
        checkpoint = CheckpointFiles.read(path)
        manifest = checkpoint.manifest
        if not self._is_fit(step, checkpoint):
            return
        text = (path / MANIFEST).read_bytes()
        folder = f"{self._fence.folder}/checkpoints/{path.name}"
        for name in manifest["files"]:
            self._bucket.put(f"{folder}/{name}", path / name)
        self._fence.check()
        if not self._bucket.create(f"{folder}/{MANIFEST}", text):
            if self._manifests.get(folder):
                raise StoreError(f"{self._bucket.address}/{folder}/{MANIFEST}: is there already")
            self._bucket.put(f"{folder}/{MANIFEST}", text)  # of this writer, and damaged there
        self._fence.check()  # before anything is removed: the next writer may not count this one
        self._manifests[folder] = manifest
        self._places[step] = folder
        self._scores |= self._keep.score(step, manifest)

    def _is_fit(self, step: int, checkpoint: CheckpointFiles) -> bool:
        """Return True if the files of a checkpoint have their digests; tell once if not: else a
        damaged disk would replace a good checkpoint there by a bad one."""
        if step not in self._verified:
            try:
                checkpoint.verify(checkpoint)
            except CheckpointError as error:
                if transaction.is_gone(checkpoint.path):
                    raise
                self._unfit.add(step)
                self._tell(f"{error}; so step {step:,} is not copied to {self._bucket.address}")
                return False
            self._verified.add(step)
        return True

    def prune(self, also: Set[int | None]) -> None:
        """Remove what is older than the newest checkpoint that this writer has published.

        That is what the run's rules do not keep, what does not count, what is incomplete or
        damaged, and the record of earlier writers without a checkpoint.
        """
        own = self._fence.folder
        published = [s for s, folder in self._places.items() if folder.startswith(f"{own}/")]
        if not published or not self._may_remove:
            return
        kept_steps = self._keep.kept(self._places, self._scores) | also
        old = [s for s in self._places if s not in kept_steps and s < max(published)]
        if not old and self._is_clean:
            return
        held = read_listing(self._bucket)
        self._fence.check(held)
        for step in old:
            del self._places[step]
            self._scores.pop(step, None)
        gone = self._list_old(held, max(published))
        self._remove(gone)
        self._is_clean = self._find_clean(held, gone)

    def _list_old(self, held: Listing, newest: int) -> dict[str, None]:
        """Return the files to remove: of checkpoints up to a step, and of writers without one."""
        names = held.own()  # no later writer has any: it would be the one that writes here
        gone: dict[str, None] = {}
        used = {self._fence.number}
        for name, fence in names.items():
            folder = folder_of(name)
            if not folder:
                continue
            if step_of(folder) <= newest and folder not in self._places.values():
                gone[name] = None
            else:
                used.add(fence)
        if f"{self._fence.folder}/{CONFIG}" in held.sizes:
            gone |= {n: None for n, fence in names.items() if fence not in used}
        return gone


class BucketMirror(Mirror):
    """Makes a bucket hold what a run directory holds, in a thread of rank 0."""

    def __init__(
        self,
        keep: CheckpointSettings,
        fence: Fence,
        directory: Path,
        events: Events,
        best: Set[int | None] = frozenset(),
    ):
        """`best` are steps to keep, as in `look`."""
        self._keep = keep
        self._fence = fence
        self._directory = directory
        self._root = directory / "checkpoints"
        self._events = events
        self._there = Mirrored(fence, keep, self._tell)
        self._best = best
        self._work = _Work()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="mirror")
        self._thread.start()
        fence.keep(self._fail)
        self._work.order()

    @property
    def held(self) -> Set[int | None]:
        """The step that is being copied, which must not be removed meanwhile."""
        return {self._work.step} - {None}

    def look(self, best: Set[int | None] = frozenset()) -> None:
        """Copy what is new, in the thread. `best` are steps to keep besides those by the rules."""
        self._best = best or self._best
        self._work.order()

    def wait(self, seconds: float) -> bool:
        """Wait until all is copied; return False if that takes longer."""
        return self._work.wait(seconds)

    @property
    def is_idle(self) -> bool:
        """True if all that was ordered is copied."""
        return self._work.wait(0.0)

    def close(self, beat: Callable[[], None] = lambda: None) -> None:
        """Copy the rest, with what the run recorded last, and wait as long as the settings say.

        `beat` is called every BEAT_S seconds, so that a watcher sees that this rank is not hung.
        """
        limit_s = self._keep.mirror_timeout_s
        self._work.order(is_last=True)
        if not self._wait(min(limit_s, ANNOUNCE_WAIT_S), beat):
            rest = self._missing()
            self._events.say(f"{rest}; waiting for it at most {limit_s:g} s ...")
            self._wait(limit_s - ANNOUNCE_WAIT_S, beat)
        self._fence.abandon()
        if self._work.end():
            self._thread.join(ANNOUNCE_WAIT_S)
            newest = self._there.newest
            if newest:
                self._events.say(f"mirrored: {self._keep.mirror} has step {newest:,}")
        elif self._work.is_lost:
            self._tell(f"{self._missing()}: {self._work.problem}")
        else:
            why = f": {self._work.problem}" if self._work.problem else ""
            self._tell(f"""{self._missing()}, after {limit_s:g} s{why}; resume with run.resume
                from {self._directory}, which copies it""")

    def _wait(self, seconds: float, beat: Callable[[], None]) -> bool:
        """Wait as `wait` does, and call `beat` meanwhile."""
        end = time.monotonic() + seconds
        while not self._work.wait(min(BEAT_S, end - time.monotonic())):
            if time.monotonic() >= end:
                return False
            beat()
        return True

    def _missing(self) -> str:
        newest = max(transaction.steps(self._root), default=0)
        there = f"has step {self._there.newest:,}" if self._there.newest else "has no checkpoint"
        lacks = f"not step {newest:,}" if newest > self._there.newest else "not the last record"
        return f"checkpoint.mirror={self._keep.mirror} {there}, {lacks}"

    def _tell(self, line: str) -> None:
        line = " ".join(line.split())
        self._events.say(f"warning: {line}")
        self._events.note(max(transaction.steps(self._root), default=0), {"mirror": line})

    def _follow(self) -> None:
        """Do what was ordered, again and again after a failure, until the end."""
        delay = FIRST_COPY_DELAY_S
        while (is_last := self._work.take()) is not None:
            try:
                self._bring_over(is_last)
                if is_last:
                    self._fence.release()
            except FenceError as error:
                self._fail(error)
                return
            except Exception as error:  # the run goes on without its mirror
                self._there.forget()
                if self._work.fail(one_line(error)):
                    more = "the run goes on, and it is tried again"
                    self._tell(f"checkpoint.mirror={self._keep.mirror}: {error}; {more}")
                self._work.pause(min(delay, MOST_COPY_DELAY_S))
                delay *= 2
                continue
            if self._work.succeed():
                self._events.say(f"checkpoint.mirror={self._keep.mirror}: answers again")
            delay = FIRST_COPY_DELAY_S

    def _fail(self, error: Exception) -> None:
        self._work.lose(one_line(error))
        self._events.lose(error)

    def _bring_over(self, is_last: bool) -> None:
        self._there.read(again=is_last)
        passed: set[int] = set()
        while (path := self._next(passed)) is not None:
            step = int(path.name.removeprefix("step-"))
            self._work.begin(step)
            try:
                self._there.put_record(self._directory)
                self._there.put_checkpoint(step, path)
            except FenceError:
                raise
            except (CheckpointError, StoreError):
                if not transaction.is_gone(path):
                    raise
                passed.add(step)  # it was withdrawn or removed
            finally:
                self._work.begin(None)
            self._there.prune(self._best)
        self._there.put_record(self._directory)
        self._there.prune(self._best)  # what an earlier session left

    def _next(self, passed: Set[int]) -> Path | None:
        """Return the newest checkpoint that is to be there, and is not."""
        for step, path in reversed(transaction.steps(self._root).items()):
            with suppress(CheckpointError):  # it is damaged, or gone
                if step not in passed and self._there.should_copy(step, path, self._best):
                    return path
        return None


class _Work:
    """The work of a mirror's thread: what is ordered, and how far it is."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._is_ordered = False
        self._is_last = False
        self._is_ended = False
        self._is_idle = False
        self.is_lost = False
        self.step: int | None = None
        self.problem = ""

    def order(self, is_last: bool = False) -> None:
        with self._turn:
            self._is_ordered = True
            self._is_idle = self.is_lost
            self._is_last = self._is_last or is_last
            self._turn.notify_all()

    def take(self) -> bool | None:
        """Return, once there is work, whether it is the last; None at the end."""
        with self._turn:
            self._turn.wait_for(lambda: self._is_ordered or self._is_ended)
            self._is_ordered = False
            return None if self._is_ended or self.is_lost else self._is_last

    def begin(self, step: int | None) -> None:
        self.step = step

    def fail(self, why: str) -> bool:
        """Note a failure; return True for the first one in a row, before the end."""
        with self._turn:
            is_first = not self.problem and not self._is_ended
            self.problem = why
            return is_first

    def pause(self, seconds: float) -> None:
        """Wait, less at the end of the run, and order the work again."""
        with self._turn:
            if not self._is_last:
                self._turn.wait_for(lambda: self._is_ended or self._is_last, seconds)
            else:
                self._turn.wait_for(lambda: self._is_ended, FIRST_COPY_DELAY_S)
            self._is_ordered = True

    def succeed(self) -> bool:
        """Note that the work is done; return True if it had failed before."""
        with self._turn:
            had_failed = bool(self.problem)
            self.problem = ""
            self._is_idle = not self._is_ordered
            self._turn.notify_all()
            return had_failed

    def lose(self, why: str) -> None:
        with self._turn:
            self.is_lost = True
            self.problem = why
            self._is_idle = True
            self._turn.notify_all()

    def wait(self, seconds: float) -> bool:
        """Return True once all is done, False if that takes longer."""
        with self._turn:
            return self._turn.wait_for(lambda: self._is_idle, max(0.0, seconds))

    def end(self) -> bool:
        """End the thread's work; return True if all was done."""
        with self._turn:
            self._is_ended = True
            self._turn.notify_all()
            return self._is_idle and not self.is_lost
