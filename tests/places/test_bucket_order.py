"""The order of writes and removals in a bucket: a writer that stops at any request loses nothing.

Each session of a run goes on from the newest step that is whole in the bucket, as a restart on
another machine does. All steps that are there are compared, not only the newest.
"""

import hashlib
import json
import shutil
from contextlib import suppress
from functools import partial

import pytest
from harness import CONF, on_ranks
from harness.fences import open_fence

from trainer.base.plain_files import digest_json
from trainer.core.checkpoints import transaction
from trainer.core.config.compose import load_config
from trainer.places.bucket import Bucket
from trainer.places.fence import FenceError
from trainer.places.listing import folder_of, read_listing, step_of
from trainer.places.mirror import Mirrored

SCORES = {10: 5.0, 20: 1.0, 30: 4.0, 40: 3.0, 50: 2.0, 60: 6.0, 70: 7.0}  # 20 is the best
REQUESTS = ("get", "put", "create", "state_of", "_list", "_list_level")


class Stopped(BaseException):
    """The end of a process, which no code of the run catches."""


def save(root, step, fill=b"x"):
    """Write a checkpoint of two files whose content names the step."""
    path = root / f"step-{step:08d}"
    path.mkdir(parents=True)
    files = {}
    for name in ("model-r00000.safetensors", "training.pt"):
        data = b"%s of step %d" % (name.encode(), step) + fill * 100
        (path / name).write_bytes(data)
        files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    metrics = {"eval/loss": SCORES[step]}
    facts = {
        "format": transaction.CHECKPOINT_FORMAT,
        "step": step,
        "files": files,
        "metrics": metrics,
    }
    text = {**facts, "sha256": digest_json(facts)}
    (path / "manifest.json").write_text(json.dumps(text))
    return path


def is_whole(path):
    try:
        transaction.load(path)
    except transaction.CheckpointError:
        return False
    return True


class Store:
    """A bucket in a folder. Requests are counted, and the process stops at one of them."""

    def __init__(self, place, patch):
        self.place = place
        self.address = f"file://{place}"
        self.count = 0
        self.stops_at = 0
        self.is_lost = False  # whether the store has the request, but nobody its answer
        self.changes = set()  # numbers of the requests that change something
        for name in REQUESTS:
            is_change = name in ("put", "create")
            patch.setattr(Bucket, name, self.counted(getattr(Bucket, name), is_change))
        remove = Bucket.remove

        def remove_each(bucket, names):
            for name in names:
                self.request(partial(self.removing, name, partial(remove, bucket, [name])), True)

        patch.setattr(Bucket, "remove", remove_each)

    def counted(self, method, is_change):
        def call(bucket, *arguments, **options):
            return self.request(lambda: method(bucket, *arguments, **options), is_change)

        return call

    def request(self, do, is_change):
        self.count += 1
        if is_change:
            self.changes.add(self.count)
        is_last = self.count == self.stops_at
        if is_last and not self.is_lost:
            raise Stopped
        answer = do()
        if is_last:
            raise Stopped
        return answer

    def removing(self, name, do):
        """Remove a file; fail unless a newer whole checkpoint counts, if its own one is whole."""
        folder = folder_of(name)
        if folder and not name.endswith("/manifest.json"):
            assert not (self.place / folder / "manifest.json").exists(), f"{name} before it"
        if folder and is_whole(self.place / folder):
            newer = [step for step in self.whole() if step > step_of(folder)]
            assert newer or step_of(folder) in self.whole(without=folder), f"{name} was removed"
        do()

    def counting(self):
        with self.undisturbed():
            return read_listing(Bucket(self.address)).checkpoints()

    def whole(self, without=""):
        """Return the steps that count and are whole."""
        found = {s: p for s, p in self.counting().items() if p != without}
        return [step for step, folder in found.items() if is_whole(self.place / folder)]

    def folders(self):
        """Return the folders of all checkpoints, whether they count or not, or lack files."""
        found = self.place.glob("*/checkpoints/*/*")
        return sorted({str(path.parent.relative_to(self.place)) for path in found})

    def undisturbed(self):
        return Undisturbed(self)


class Undisturbed:
    """A block whose requests are not counted."""

    def __init__(self, store):
        self.store = store

    def __enter__(self):
        self.count, self.store.count = self.store.count, -(10**9)

    def __exit__(self, *_):
        self.store.count = self.count


def keep_of(last, best):
    words = [f"checkpoint.keep_last={last}", f"checkpoint.keep_best={best}"]
    keep = load_config(["task=tiny", *words], [CONF]).checkpoint
    keep.best_metric, keep.best_mode = "eval/loss", "min"
    return keep


def session(store, root, steps, keep, published=lambda step: None, begins=None):
    """Go on from the newest whole step, and publish steps as a run with this directory does."""
    with store.undisturbed():
        newest = max(store.whole(), default=0) if begins is None else begins
        reached = max(store.counting(), default=0)
    (root / "config.json").write_text("{}")
    own = open_fence(store.address, newest, reached)
    there = Mirrored(own, keep, print)
    best = set()
    there.read()
    there.prune(best)
    for step in steps:
        path = save(root / "checkpoints", step)
        best = {min((s for s in SCORES if s <= step), key=SCORES.get)} if keep.keep_best else set()
        there.read()
        assert there.should_copy(step, path, best)
        (root / "metrics.jsonl").write_text(f"{step}\n")
        there.put_record(root)
        there.put_checkpoint(step, path)
        published(step)
        there.prune(best)
    own.release()


def damage(path):
    (path / "training.pt").write_bytes(b"")


def begin(store, root, history, keep):
    """Write what was there before the session that stops."""
    session(store, root / "a", [10, 20], keep)
    if history == "three writers":
        session(store, root / "b", [30], keep)
        session(store, root / "c", [40], keep)
    if history == "damaged newest":
        session(store, root / "b", [30, 40], keep)
        damage(next(store.place.glob("*/checkpoints/step-00000040")))
    if history == "of a zombie":  # it published step 40 after the next one had begun at step 30
        session(store, root / "b", [30], keep)
        session(store, root / "c", [], keep)
        save(store.place / "000002/checkpoints", 40)
    if history == "incomplete":
        session(store, root / "b", [30], keep)
        save(store.place / "000002/checkpoints", 40)
        (store.place / "000002/checkpoints/step-00000040/manifest.json").unlink()


HISTORIES = ("one writer", "three writers", "damaged newest", "of a zombie", "incomplete")


def stop_everywhere(place, history, keep):
    """Stop a session at each of its requests; return how many there are, and what is wrong."""
    with pytest.MonkeyPatch.context() as patch:
        store = Store(place / "first", patch)
        (place / "first").mkdir()
        for name in "abcde":
            (place / "local" / name).mkdir(parents=True)
        begin(store, place / "local", history, keep)
        shutil.copytree(place / "first", place / "before")
        steps = [50, 60]
        wrong = []
        store.changes.clear()
        points = [(0, False)]
        for number, (at, is_lost) in enumerate(points):
            shutil.rmtree(place / "first")
            shutil.copytree(place / "before", place / "first")
            for name in "de":
                shutil.rmtree(place / "local" / name)
                (place / "local" / name).mkdir()
            known = store.whole()
            store.count, store.stops_at, store.is_lost = 0, at, is_lost
            with suppress(Stopped):
                session(store, place / "local/d", steps, keep, known.append)
            if number == 0:
                points += [(n, False) for n in range(1, store.count + 1)]
                points += [(n, True) for n in store.changes if n > 0]
            store.stops_at = 0
            before = store.whole()
            if {*store.counting()} - {*before} - {40}:
                wrong.append([at, is_lost, "counts in parts", [*store.counting()], before])
            if max(before, default=0) < max(known, default=0):
                wrong.append([at, is_lost, "lost", known, before])
            session(store, place / "local/e", [70], keep)
            after = [*before, 70]
            scores = {step: SCORES[step] for step in after}
            expected = sorted(keep.kept(after, scores))
            found = [step_of(folder) for folder in store.folders()]
            if sorted(found) != expected or store.whole() != expected:
                wrong.append([at, is_lost, "left", found, store.whole(), expected])
        return len(points), wrong


CASES = [*((history, 2, 1) for history in HISTORIES), ("one writer", 1, 0), ("incomplete", 1, 0)]


@pytest.mark.parametrize(("history", "last", "best"), CASES)
def test_writer_that_stops_at_any_request_loses_no_step(history, last, best, tmp_path):
    """With the best step, which no test of a mirror kept: all had keep_best=0."""
    ((count, wrong),) = on_ranks(1, stop_everywhere, tmp_path, history, keep_of(last, best))
    assert wrong == []
    assert count > 20


def in_child(body, tmp_path):
    """Return what `body(store, told)` returns in a process, and the lines that were told."""

    def run():
        with pytest.MonkeyPatch.context() as patch:
            (tmp_path / "first").mkdir()
            told = []
            return body(Store(tmp_path / "first", patch), told), told

    return on_ranks(1, run)[0]


def writer_of(store, step, told, **keep):
    """Return a bucket's content for its next writer, which begins at a step."""
    keep = keep_of(**{"last": 2, "best": 0, **keep})
    there = Mirrored(open_fence(store.address, step, None), keep, told.append)
    there.read()
    return there


@pytest.mark.parametrize(("also", "kept"), [({10}, [10, 20, 50, 60]), (set(), [20, 50, 60])])
def test_step_that_the_run_calls_best_is_there_besides_the_best_by_its_metric(also, kept, tmp_path):
    """They differ with run.min_improvement, and after a resume without an evaluation."""

    def body(store, told):
        paths = {step: save(tmp_path / "here", step) for step in (10, 20, 30, 50, 60)}
        own = writer_of(store, 0, told, best=1)
        for step in (60, 50, 30, 20, 10):  # as a mirror does that has failed for a while
            if own.should_copy(step, paths[step], also):
                own.put_checkpoint(step, paths[step])
                own.prune(also)
        found = store.whole()
        for step in (10, 20):  # those that an earlier session has left
            if step not in found:
                own.put_checkpoint(step, paths[step])
        own.prune(also)
        return [sorted(found), sorted(store.whole())]

    assert in_child(body, tmp_path)[0] == [kept, kept]


def test_writer_that_loses_its_lease_while_it_publishes_is_told(tmp_path, monkeypatch):
    """Also if nothing is to be removed after it: the next writer may not count this step."""

    def body(store, told):
        own = writer_of(store, 0, told)
        create = Bucket.create

        def create_late(bucket, name, content):
            made = create(bucket, name, content)
            monkeypatch.setattr(Bucket, "create", create)
            open_fence(store.address, 0, None)
            return made

        monkeypatch.setattr(Bucket, "create", create_late)
        with pytest.raises(FenceError, match="has taken over"):
            own.put_checkpoint(10, save(tmp_path / "here", 10))
        return own.newest

    assert in_child(body, tmp_path)[0] == 0


def test_writer_whose_successor_has_begun_removes_nothing(tmp_path):
    """Its successor may go on from the older of two steps, as the newer one is damaged there."""

    def body(store, told):
        own = writer_of(store, 0, told)
        for step in (10, 20, 30, 40):
            own.put_checkpoint(step, save(tmp_path / "here", step))
        open_fence(store.address, 20, None)
        with pytest.raises(FenceError, match="has taken over"):
            own.prune(frozenset())
        return [step_of(folder) for folder in store.folders()]

    assert in_child(body, tmp_path)[0] == [10, 20, 30, 40]


def test_damaged_step_stays_in_a_bucket_until_a_newer_one_is_there(tmp_path):
    """Also if the run goes on from an older one: it may be worth a repair."""
    (tmp_path / "config.json").write_text("{}")

    def body(store, told):
        paths = {step: save(tmp_path / "here", step) for step in (10, 20, 30, 40)}
        first = writer_of(store, 0, told)
        for step in (10, 30):
            first.put_checkpoint(step, paths[step])
        flipped = store.place / "000001/checkpoints/step-00000030/training.pt"
        flipped.write_bytes(flipped.read_bytes().swapcase())
        second = writer_of(store, 10, told)
        found = []
        for step in (20, 40):
            second.put_record(tmp_path)
            second.put_checkpoint(step, paths[step])
            second.prune(frozenset())
            found.append([[step_of(folder) for folder in store.folders()], [*store.counting()]])
        names = sorted(path.name for path in store.place.iterdir())
        return [*found, names]

    found, _ = in_child(body, tmp_path)
    assert found == [[[10, 30, 20], [10, 20]], [[20, 40], [20, 40]], ["000002"]]


def test_record_of_an_earlier_writer_stays_until_there_is_a_newer_one(tmp_path):
    def body(store, told):
        (tmp_path / "config.json").write_text("{}")
        first = writer_of(store, 0, told)
        first.put_record(tmp_path)
        first.put_checkpoint(10, save(tmp_path / "here", 10))
        second = writer_of(store, 10, told)
        for step in (20, 30):
            second.put_checkpoint(step, save(tmp_path / "here", step))
        second.prune(frozenset())
        return [[step_of(folder) for folder in store.folders()], read_listing_home(store)]

    assert in_child(body, tmp_path)[0] == [[20, 30], "000001"]


def read_listing_home(store):
    return read_listing(Bucket(store.address)).home()


LARGE_MANIFEST = ["manifest.json", "too large"]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("training.pt", how) for how in ("cut", "removed", "too large")),
        *(("manifest.json", how) for how in ("cut", "too large")),
    ],
)
def test_step_that_is_damaged_in_a_bucket_is_published_anew(name, how, tmp_path):
    """If the run directory has it: a restart elsewhere would else go back to an older one."""

    def body(store, told):
        paths = {step: save(tmp_path / "here", step) for step in (10, 20)}
        first = writer_of(store, 0, told)
        for step, path in paths.items():
            first.put_checkpoint(step, path)
        broken = store.place / f"000001/checkpoints/step-00000020/{name}"
        if how == "removed":
            broken.unlink()
        else:
            broken.write_bytes(broken.read_bytes()[:9] if how == "cut" else b" " * 2**27)
        second = writer_of(store, 20, told)
        before = [second.newest, second.should_copy(20, paths[20], frozenset())]
        second.put_checkpoint(20, paths[20])
        return [before, [second.newest, store.whole()]]

    found, told = in_child(body, tmp_path)
    assert found == [[10, True], [20, [10, 20]]]
    assert len(told) == 1 and "/000001/checkpoints/step-00000020/" in told[0]
    assert ("134,217,728 bytes, too many for one" in told[0]) == ([name, how] == LARGE_MANIFEST)


def test_step_that_its_writer_finds_damaged_in_a_bucket_is_published_anew(tmp_path):
    def body(store, told):
        path = save(tmp_path / "here", 10)
        first = writer_of(store, 0, told)
        first.put_checkpoint(10, path)
        (store.place / "000001/checkpoints/step-00000010/training.pt").unlink()
        (store.place / "000001/checkpoints/step-00000010/manifest.json").write_text("{}")
        first.read(again=True)
        found = [first.newest, first.should_copy(10, path, frozenset())]
        first.put_checkpoint(10, path)
        return [*found, store.whole()]

    assert in_child(body, tmp_path)[0] == [0, True, [10]]


def test_step_that_is_damaged_on_the_disk_is_not_copied_over_a_good_one(tmp_path):
    """Nor tried again and again: it is named once."""

    def body(store, told):
        first = writer_of(store, 0, told)
        first.put_checkpoint(10, save(tmp_path / "here", 10))
        path = save(tmp_path / "here", 20)
        (path / "training.pt").write_bytes((path / "training.pt").read_bytes().swapcase())
        found = []
        for _ in range(2):
            found.append(first.should_copy(20, path, frozenset()))
            first.put_checkpoint(20, path)
        first.prune(frozenset())
        return [*found, first.newest, store.whole(), store.folders()]

    found, told = in_child(body, tmp_path)
    assert found == [True, False, 10, [10], ["000001/checkpoints/step-00000010"]]
    assert "so step 20 is not copied to file://" in told[0] and "so bits have changed" in told[0]
