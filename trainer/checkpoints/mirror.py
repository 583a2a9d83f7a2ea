"""The mirror of a run in a bucket: its checkpoints and its record, copied behind the loop.

Of a checkpoint its files go first and the manifest last, by a conditional put, between two looks at
the fence: config/bucket.py says how a bucket is laid out, and why a writer that has lost its
lease can do no harm.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.checkpoints import transaction
from trainer.checkpoints.fence import ANNOUNCE_S, Fence, FenceError
from trainer.checkpoints.transaction import MANIFEST, read_manifest
from trainer.config.bucket import RECORD, BucketError, DeniedError, read_listing
from trainer.config.schema import CheckpointSettings
from trainer.errors import CheckpointError, one_line

FIRST_DELAY_S = 1.0  # after a failure
MOST_DELAY_S = 30.0


class Mirrored:
    """Content of a bucket, and its changes by the writer of a fence."""

    def __init__(self, fence: Fence, keep: CheckpointSettings, tell: Callable[[str], None]):
        """`tell` gets a line on what is wrong there and is left as it is."""
        self._bucket = fence.bucket
        self._tell = tell
        self._may_remove = True
        self._fence = fence
        self._keep = keep
        self._is_read = False
        self._record: dict[str, bytes] = {}  # digests
        self._places: dict[int, str] = {}  # folders of checkpoints, by step
        self._scores: dict[int, float] = {}

    @property
    def newest(self) -> int:
        return max(self._places, default=0)

    def read(self, again: bool = False) -> None:
        """Read what there is, and remove what does not count or is incomplete: at first, after a
        failure, or `again`. Raises FenceError, BucketError."""
        if self._is_read and not again:
            self._fence.check()
            return
        held = read_listing(self._bucket)
        self._fence.check(held)
        places = held.checkpoints()
        for step, place in places.items():
            if self._places.get(step) != place:
                self._scores |= self._read_score(step, f"{place}/{MANIFEST}")
        self._places = places
        own = self._fence.folder
        self._record = {n: d for n, d in self._record.items() if f"{own}/{n}" in held.sizes}
        stale = [
            name
            for name in held.own()
            if "/checkpoints/" in name and name.rpartition("/")[0] not in places.values()
        ]
        self._remove(stale)
        self._is_read = True

    def forget(self) -> None:
        """Read again what there is, as after a failure nothing is certain."""
        self._is_read = False

    def _read_score(self, step: int, name: str) -> dict[int, float]:
        try:
            return self._score(step, json.loads(self._bucket.get(name)))
        except (ValueError, AttributeError, RecursionError):
            self._tell(f"{self._bucket.address}/{name}: cannot be read as a manifest")
            return {}

    def _remove(self, names: Iterable[str]) -> None:
        """Remove files, manifests first. What the login may not remove stays."""
        try:
            if self._may_remove:
                self._bucket.remove(sorted(names, key=lambda n: not n.endswith(f"/{MANIFEST}")))
        except DeniedError as error:
            self._may_remove = False
            self._tell(f"{error}; so old checkpoints stay there")

    def _score(self, step: int, manifest: dict[str, Any]) -> dict[int, float]:
        keep = self._keep
        return transaction.score(step, manifest, keep.best_metric or "", keep.best_mode or "min")

    def _kept(self, steps: Set[int], scores: dict[int, float]) -> Set[int | None]:
        return transaction.kept([*steps], scores, self._keep.keep_last, self._keep.keep_best)

    def lacks(self, step: int, path: Path, also: Set[int | None]) -> bool:
        """Return True if a checkpoint is not there, and would be kept."""
        if step in self._places:
            return False
        scores = {**self._scores, **self._score(step, read_manifest(path))}
        return step in self._kept({*self._places, step}, scores) | also

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
        """Publish a checkpoint. Raises FenceError after another process has taken over."""
        manifest = read_manifest(path)
        text = (path / MANIFEST).read_bytes()
        place = f"{self._fence.folder}/checkpoints/{path.name}"
        for name in manifest["files"]:
            self._bucket.put(f"{place}/{name}", path / name)
        self._fence.check()
        if not self._bucket.create(f"{place}/{MANIFEST}", text):
            raise BucketError(f"{self._bucket.address}/{place}/{MANIFEST}: is there already")
        self._fence.check()  # before anything is removed: the next writer may not count this one
        self._places[step] = place
        self._scores |= self._score(step, manifest)

    def prune(self, also: Set[int | None]) -> None:
        """Remove the checkpoints that the run's rules do not keep, and folders without one."""
        kept = self._kept(self._places.keys(), self._scores) | also
        old = [step for step in self._places if step not in kept]
        own = self._fence.folder
        homes = {place.partition("/")[0] for step, place in self._places.items() if step in kept}
        if not old and homes <= {own}:
            return
        held = read_listing(self._bucket)
        self._fence.check(held)
        gone = [n for step in old for n in held.sizes if n.startswith(f"{self._places[step]}/")]
        if own in homes:
            # not of a later writer, which may have begun between two pages of the listing
            earlier = [n for n, fence in held.own().items() if fence < self._fence.number]
            gone += [n for n in earlier if n.partition("/")[0] not in homes]
        self._remove(dict.fromkeys(gone))
        for step in old:
            del self._places[step]
            self._scores.pop(step, None)


class Mirror:
    """Makes a bucket hold what a run directory holds, in a thread of rank 0."""

    def __init__(
        self,
        keep: CheckpointSettings,
        fence: Fence,
        directory: Path,
        say: Callable[[str], None],
        note: Callable[[int, Mapping[str, Any]], None],
        lose: Callable[[Exception], None],
    ):
        """`say` and `note` tell of problems, at the terminal and in the record of a step. `lose`
        gets the error if another process takes over."""
        self._keep = keep
        self._fence = fence
        self._directory = directory
        self._root = directory / "checkpoints"
        self._say = say
        self._note = note
        self._lose = lose
        self._there = Mirrored(fence, keep, self._tell)
        self._best: Set[int | None] = frozenset()
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

    def close(self) -> None:
        """Copy the rest, with what the run recorded last, and wait as long as the settings say."""
        limit_s = self._keep.mirror_timeout_s
        self._work.order(is_last=True)
        begun = time.monotonic()
        if not self._work.wait(min(limit_s, ANNOUNCE_S)):
            rest = self._missing()
            self._say(f"{rest}; waiting for it at most {limit_s:g} s ...")
            self._work.wait(limit_s - (time.monotonic() - begun))
        self._fence.abandon()
        if self._work.end():
            self._thread.join(ANNOUNCE_S)
            newest = self._there.newest
            if newest:
                self._say(f"mirrored: {self._keep.mirror} has step {newest:,}")
        elif self._work.is_lost:
            self._tell(f"{self._missing()}: {self._work.problem}")
        else:
            why = f": {self._work.problem}" * bool(self._work.problem)
            self._tell(f"""{self._missing()}, after {limit_s:g} s{why}; resume with run.resume
                from {self._directory}, which copies it""")

    def _missing(self) -> str:
        newest = max(transaction.steps(self._root), default=0)
        there = f"has step {self._there.newest:,}" if self._there.newest else "has no checkpoint"
        lacks = f"not step {newest:,}" if newest > self._there.newest else "not the last record"
        return f"checkpoint.mirror={self._keep.mirror} {there}, {lacks}"

    def _tell(self, line: str) -> None:
        line = " ".join(line.split())
        self._say(f"warning: {line}")
        self._note(max(transaction.steps(self._root), default=0), {"mirror": line})

    def _follow(self) -> None:
        """Do what was ordered, again and again after a failure, until the end."""
        delay = FIRST_DELAY_S
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
                self._work.pause(min(delay, MOST_DELAY_S))
                delay *= 2
                continue
            if self._work.succeed():
                self._say(f"checkpoint.mirror={self._keep.mirror}: answers again")
            delay = FIRST_DELAY_S

    def _fail(self, error: Exception) -> None:
        self._work.lose(one_line(error))
        self._lose(error)

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
            except (CheckpointError, BucketError):
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
                if step not in passed and self._there.lacks(step, path, self._best):
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
                self._turn.wait_for(lambda: self._is_ended, FIRST_DELAY_S)
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
