"""The next start resumes the newest whole checkpoint, whether on the disk or in a bucket."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from harness import check_equal_bits, fit_on, on_ranks, wait_for
from tiny import Tiny

from trainer.core.checkpoints import resume, transaction
from trainer.core.checkpoints.transaction import steps
from trainer.core.config.copies import address_of

RECIPE = [
    *("task=tiny", "task.options.norm=true", "task.options.dropout=0.2", "run.steps=20"),
    *("strategy.precision=fp32", "checkpoint.every_steps=10"),
    *("checkpoint.every_epochs=null", "checkpoint.keep_best=0"),
]
MODEL = "model-r00000.safetensors"


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path):
    os.truncate(path, 100)


def empty(path):
    os.truncate(path, 0)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def no_folder(path):
    shutil.rmtree(path)
    path.write_text("a file")


def with_folder(path):
    """A folder beside the files does no harm."""
    (path / "step-00000030").mkdir()


DAMAGES = {
    "flipped bit": (MODEL, flip),
    "cut": (MODEL, cut),
    "empty": ("training.pt", empty),
    "missing": ("optimizer-r00000.safetensors", Path.unlink),
    "a pipe": ("tensors.json", pipe),
    "manifest": ("manifest.json", flip),
    "no manifest": ("manifest.json", Path.unlink),
    "empty manifest": ("manifest.json", empty),
    "no step": ("", shutil.rmtree),
    "a file": ("", no_folder),
}


def contents(folder):
    """Return the files below a folder with their times, without copies of runs in buckets."""
    paths = [path for path in folder.rglob("*") if ".lockstep-copy-" not in str(path)]
    return {path: path.stat().st_mtime_ns for path in paths if path.is_file()}


class Stopped:
    """A run that ended at step 20, with steps 10 and 20 on its disk and in its bucket."""

    def __init__(self, place, source=None):
        self.place = place
        self.address = f"file://{place}/bucket/first"
        self.directory = place / "runs/tiny/run"
        if source is not None:
            for name in ("bucket", "runs"):
                shutil.copytree(source.place / name, place / name)

    def fit(self, *words, ranks=1, steps=22, resume="auto"):
        words = [*RECIPE, f"checkpoint.mirror={self.address}", f"run.steps={steps}", *words]
        return fit_on(ranks, self.place / "runs", *words, f"run.resume={resume}")

    def here(self, step):
        return self.directory / f"checkpoints/step-{step:08d}"

    def there(self, step):
        (path,) = self.place.glob(f"bucket/first/*/checkpoints/step-{step:08d}")
        return path

    def in_bucket(self):
        """Return the steps of all folders of checkpoints with a manifest, whether they count."""
        paths = self.place.glob("bucket/first/*/checkpoints/*/manifest.json")
        return sorted(int(path.parent.name[5:]) for path in paths)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    run = Stopped(tmp_path_factory.mktemp("stopped"))
    assert run.fit(steps=20)["step"] == 20
    assert [*steps(run.directory / "checkpoints")] == run.in_bucket() == [10, 20]
    return run


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return fit_on(1, tmp_path_factory.mktemp("straight"), *RECIPE, "run.steps=22")


@pytest.mark.parametrize("damage", DAMAGES)
def test_step_that_is_damaged_on_the_disk_is_read_from_the_bucket(
    damage, stopped, straight, tmp_path, capfd
):
    """Every test damaged the disk of a run without a mirror, or a bucket without a disk."""
    run = Stopped(tmp_path, stopped)
    name, do = DAMAGES[damage]
    do(run.here(20) / name)
    resumed = run.fit()
    said = capfd.readouterr().out
    assert len(resumed["seen"]) == 2
    check_equal_bits(straight, resumed)
    assert run.in_bucket() == [20, 22]
    if damage not in ("no step", "a file"):
        assert "skipped step-00000020: " in said
        assert f"step 20 is read from {run.address}/000001/checkpoints/step-00000020" in said
    assert not [*tmp_path.glob("runs/tiny/.lockstep-copy-*/*/checkpoints/*/*.safetensors")]


def test_whole_step_on_the_disk_is_read_there(stopped, straight, tmp_path, capfd):
    run = Stopped(tmp_path, stopped)
    cut(run.there(20) / MODEL)
    with_folder(run.here(20))
    check_equal_bits(straight, run.fit())
    assert "skipped" not in capfd.readouterr().out


@pytest.mark.parametrize("keep_last", [1, 2])
def test_only_step_on_the_disk_is_damaged(keep_last, stopped, straight, tmp_path):
    """It was "no checkpoint is valid" at each start."""
    run = Stopped(tmp_path, stopped)
    shutil.rmtree(run.here(10))
    cut(run.here(20) / MODEL)
    resumed = run.fit(f"checkpoint.keep_last={keep_last}")
    check_equal_bits(straight, resumed)
    assert [*steps(run.directory / "checkpoints")] == [22]
    assert run.in_bucket() == [20, 22][-keep_last:]
    assert resumed["losses"] == straight["losses"]


@pytest.mark.parametrize(
    ("damaged", "first"),
    [
        ("here 20, there 20", 10),
        ("here 20, there 20, here 10", 10),
        ("here 20, there 20, there 10", 10),
        ("here 10, here 20, there 10", 20),
        ("there 20, there 10, here 20, here 10", None),
    ],
)
def test_older_step_counts_where_it_is_whole(damaged, first, stopped, straight, tmp_path):
    """Also after a step that is damaged in the bucket too; which stays until a newer one is."""
    run = Stopped(tmp_path, stopped)
    for words in damaged.split(", "):
        where, step = words.split()
        flip((run.here if where == "here" else run.there)(int(step)) / MODEL)
    if first is None:
        with pytest.raises(AssertionError, match="no checkpoint is valid; skipped step-00000020: "):
            run.fit()
        assert run.in_bucket() == [10, 20]
        return
    resumed = run.fit()
    check_equal_bits(straight, resumed)
    assert len(resumed["seen"]) == 22 - first
    assert run.in_bucket() == [20, 22]
    assert [*run.place.glob("bucket/first/000002/checkpoints/step-00000020")] == (
        [run.there(20)] if first == 10 else []
    )


def test_step_that_is_newer_in_the_bucket_and_damaged_there_is_passed_over(
    stopped, straight, tmp_path
):
    run = Stopped(tmp_path, stopped)
    shutil.rmtree(run.here(20))
    cut(run.there(20) / "training.pt")
    resumed = run.fit()
    check_equal_bits(straight, resumed)
    assert len(resumed["seen"]) == 12


@pytest.mark.parametrize("resume", ["address", "directory", "checkpoint"])
def test_run_that_is_named_by_its_place_is_healed_too(resume, stopped, straight, tmp_path, capfd):
    run = Stopped(tmp_path, stopped)
    flip(run.here(20) / "training.pt")
    named = {"address": run.address, "directory": run.directory, "checkpoint": run.here(20)}
    resumed = run.fit(resume=named[resume])
    check_equal_bits(straight, resumed)
    assert len(resumed["seen"]) == 2
    assert f"step 20 is read from {run.address}" in capfd.readouterr().out


def test_checkpoint_that_is_named_is_the_only_one(stopped, tmp_path):
    run = Stopped(tmp_path, stopped)
    for place in (run.here(20), run.there(20)):
        flip(place / MODEL)
    with pytest.raises(AssertionError, match=rf"CheckpointError: {run.here(20)}/{MODEL}: its SHA"):
        run.fit(resume=run.here(20))
    shutil.rmtree(run.here(20))
    with pytest.raises(AssertionError) as raised:
        run.fit(resume=run.here(10))
    held = f"checkpoint.mirror={run.address}: holds a run that has reached step 20; give"
    assert f"{held} run.resume=auto to continue it, or another prefix" in str(raised.value)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_parts_heal_one_that_is_damaged(ranks, stopped, tmp_path):
    parts = ["strategy=fsdp", "strategy.precision=fp32"]
    run = Stopped(tmp_path)
    straight = fit_on(2, tmp_path / "straight", *RECIPE, *parts, "run.steps=22")
    run.fit(*parts, ranks=2, steps=20)
    flip(run.here(20) / "model-r00001.safetensors")
    resumed = run.fit(*parts, ranks=ranks)
    assert resumed["seen"] == straight["seen"][20:]
    if ranks == 2:
        check_equal_bits(straight, resumed)


class BadOnce(Tiny):
    """The disk damages the newest checkpoint, then the step after 12 is not finite, once."""

    is_bad = True

    def train_step(self, batch):
        if self.step == 12 and BadOnce.is_bad and hasattr(self, "place"):
            BadOnce.is_bad = False
            wait_for(lambda: [*self.place.glob("first/*/checkpoints/step-00000010/manifest.json")])
            flip(Path(self.config.run.dir, "tiny/run/checkpoints/step-00000010", MODEL))
            with torch.no_grad():
                next(self.model.parameters()).fill_(torch.nan)
        return super().train_step(batch)


def test_rollback_reads_a_damaged_step_from_the_bucket(straight, tmp_path, monkeypatch, capfd):
    """With one checkpoint on the disk the run ended."""
    run = Stopped(tmp_path)
    monkeypatch.setattr(BadOnce, "place", tmp_path / "bucket", raising=False)
    words = [*RECIPE, f"checkpoint.mirror={run.address}", "run.steps=22", "checkpoint.keep_last=1"]
    rolled = fit_on(1, tmp_path / "runs", *words, "run.on_bad_step=rollback", task=BadOnce)
    said = capfd.readouterr().out
    assert "rolling back" in said
    assert f"step 10 is read from {run.address}/000001/checkpoints/step-00000010" in said
    check_equal_bits(straight, rolled)


def test_rollback_does_not_read_the_steps_after_it_in_a_bucket(stopped, tmp_path):
    """The bad step has been published there too."""
    run = Stopped(tmp_path, stopped)

    def body():
        origin = resume.roll_back(run.directory, resume.Origin(), 20, run.address)
        paths, _ = resume.find_checkpoints(origin)
        return [[path.name, bool(address_of(path))] for path in paths]

    name = "step-00000010"
    transaction.set_aside(run.here(20))
    assert on_ranks(1, body) == [[[name, False], [name, True]]]


def test_rollback_reads_no_later_step_of_the_run_that_it_began_from(stopped, tmp_path):
    """Another run has gone on in the bucket of run.resume, to the step that was bad here."""
    begun = resume.Origin(fallback=stopped.directory)
    origin = resume.roll_back(tmp_path, begun, 20)
    paths, _ = resume.find_checkpoints(origin)
    assert [path.name for path in paths] == ["step-00000010"]


def test_bucket_is_not_taken_for_that_of_a_run_that_cannot_be_read(stopped, tmp_path):
    run = Stopped(tmp_path, stopped)
    for step in (10, 20):
        empty(run.here(step) / "manifest.json")
    with pytest.raises(AssertionError, match=r"step 20; give run\.resume=auto to continue it, or"):
        run.fit(resume=run.directory)
    assert len(run.fit()["seen"]) == 2


def test_branch_from_a_damaged_run_needs_no_bucket(stopped, tmp_path):
    """The bucket of another run is no place to begin in; a branch skips the damaged step."""
    run = Stopped(tmp_path, stopped)
    cut(run.here(20) / MODEL)
    words = [*RECIPE, f"run.resume={run.directory}", "run.name=branch"]
    branch = fit_on(1, tmp_path / "runs", *words)
    assert len(branch["seen"]) == 10
    words = [*words[:-1], "run.name=two", f"checkpoint.mirror={run.address}"]
    with pytest.raises(AssertionError, match="holds a run that has reached step 20; give run"):
        fit_on(1, tmp_path / "runs", *words)


@pytest.mark.parametrize("resume", ["auto", "directory", "address"])
def test_bucket_of_another_run_is_refused(resume, stopped, tmp_path):
    """Also if it has reached less than the run here, which would be mixed into it."""
    other = Stopped(tmp_path / "other")
    other.fit(steps=4)
    run = Stopped(tmp_path / "run", stopped)
    before = contents(tmp_path)
    named = {"auto": "auto", "directory": run.directory, "address": other.address}
    with pytest.raises(AssertionError) as raised:
        run.fit(f"checkpoint.mirror={other.address}", resume=named[resume])
    key = "checkpoint.mirror"
    why = f"holds another run than {run.directory}; give another prefix, or run.name=<new>"
    assert f"ConfigError: {key}={other.address}: {why}" in str(raised.value)
    assert contents(tmp_path) == before
