"""A restart on another machine, or without the old disk, goes on from the bucket of its launch."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import CONF, check_equal_bits, ended, fit_on, launch
from tiny import Tiny

from trainer import load_config
from trainer.base.errors import RunError
from trainer.core.checkpoints import resume

RECIPE = [
    *("task=tiny", "task.options.norm=true", "task.options.dropout=0.2", "run.steps=20"),
    *("strategy.precision=fp32", "checkpoint.every_steps=5", "eval.every_epochs=null"),
    *("checkpoint.every_epochs=null", "checkpoint.keep_best=0", "log.every_steps=1"),
]


def environment(number, agent="one"):
    """Return the environment of an attempt of a launch by torchrun."""
    return {
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": str(number),
        "TORCHELASTIC_ERROR_FILE": f"/tmp/{agent}/attempt_{number}/0/error.json",
    }


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return fit_under_torchrun(tmp_path_factory.mktemp("straight"), *RECIPE)


def fit_under_torchrun(place, *words):
    """Train in another launch by torchrun, which has another number of threads than none."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(0, "another").items():
            patch.setenv(name, value)
        return fit_on(1, place, *words)


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Return a function that begins an attempt of one launch by torchrun."""

    def begin(number, agent="one"):
        for name, value in environment(number, agent).items():
            monkeypatch.setenv(name, value)

    begin(0)
    return begin


STOP = "task.options.signal_at"


class Attempts:
    """Attempts of one command; `fits` is what they returned."""

    def __init__(self, place, attempt, *words, stops_at=7):
        self.place = place
        self.attempt = attempt
        self.words = [*RECIPE, f"{STOP}={stops_at}", *words]
        self.fits = []

    def fit(self, number=None, **launch):
        self.attempt(len(self.fits) if number is None else number, **launch)
        self.fits.append(fit_on(1, self.place / "runs", *self.words))
        return self.fits[-1]

    def lose_disk(self):
        shutil.rmtree(self.place / "runs")

    @property
    def seen(self):
        return [examples for each in self.fits for examples in each["seen"]]


@pytest.mark.parametrize("is_lost", [True, False])
def test_restart_without_a_disk_goes_on_from_the_bucket(is_lost, tmp_path, attempt, straight):
    """The restarts of all tests found the run directory of their previous attempt."""
    words = [f"checkpoint.mirror=file://{tmp_path}/bucket/first"]
    run = Attempts(tmp_path, attempt, *words)
    assert run.fit()["code"] == 75
    if is_lost:
        run.lose_disk()
    check_equal_bits(straight, run.fit())
    assert run.seen == straight["seen"]


def test_bucket_of_another_launch_is_refused(tmp_path, attempt):
    """With the same run id, which need not be unique, or with other settings."""
    address = f"file://{tmp_path}/bucket/first"
    run = Attempts(tmp_path, attempt, f"checkpoint.mirror={address}")
    run.fit()
    run.lose_disk()
    held = f"checkpoint.mirror={address}: holds a run that has reached step"
    with pytest.raises(AssertionError, match=held):
        run.fit(1, agent="two")
    run.words.append("optim.lr=0.05")
    with pytest.raises(AssertionError, match=held):
        run.fit(1)


def test_restart_whose_disk_is_older_than_its_bucket_goes_on_from_there(
    tmp_path, attempt, straight
):
    run = Attempts(tmp_path, attempt, f"checkpoint.mirror=file://{tmp_path}/bucket/first")
    stopped = run.fit()
    (newest,) = (stopped["directory"] / "checkpoints").glob(f"step-{stopped['step']:08d}")
    shutil.rmtree(newest)
    check_equal_bits(straight, run.fit())
    assert run.seen == straight["seen"]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The bucket and the directory of a run that was stopped at step 5."""
    place = tmp_path_factory.mktemp("begun")
    words = [*RECIPE, "run.name=run", f"checkpoint.mirror=file://{place}/A/one", f"{STOP}=2"]
    assert fit_under_torchrun(place / "runs", *words)["step"] == 5
    return place


@pytest.mark.parametrize("lost", ["nothing", "disk", "disk before a checkpoint", "first bucket"])
def test_restart_goes_on_from_the_second_bucket(lost, tmp_path, begun, attempt, straight):
    """A run of one bucket goes on into another one: no restart knew that as its own."""
    shutil.copytree(begun / "A", tmp_path / "A")
    words = [f"run.resume=file://{tmp_path}/A/one", f"checkpoint.mirror=file://{tmp_path}/B/two"]
    run = Attempts(tmp_path, attempt, *words, stops_at=12)
    run.fit()
    before = {*(tmp_path / "A").rglob("*")}
    if lost != "nothing":
        run.lose_disk()
    if lost == "disk before a checkpoint":
        for folder in tmp_path.glob("B/two/*/checkpoints"):
            shutil.rmtree(folder)
        run.fits.clear()
        assert run.fit(1)["step"] == 15
    if lost == "first bucket":
        shutil.rmtree(tmp_path / "A")
    check_equal_bits(straight, run.fit(2))
    assert run.seen == straight["seen"][5:]
    assert lost == "first bucket" or {*(tmp_path / "A").rglob("*")} == before


def test_restart_does_not_leap_to_steps_that_others_made_in_the_first_bucket(
    tmp_path, begun, attempt
):
    shutil.copytree(begun / "A", tmp_path / "A")
    first = f"file://{tmp_path}/A/one"
    words = [f"run.resume={first}", f"checkpoint.mirror=file://{tmp_path}/B/two"]
    run = Attempts(tmp_path, attempt, *words, stops_at=7)
    stopped = run.fit()["step"]
    others = [*RECIPE, f"checkpoint.mirror={first}", "run.resume=auto"]
    assert fit_under_torchrun(tmp_path / "others", *others)["step"] == 20
    assert len(run.fit()["seen"]) == 20 - stopped


@pytest.mark.parametrize("begins", ["init_from", "checkpoint", "directory"])
def test_restart_of_a_run_that_began_from_another_goes_on_from_its_bucket(
    begins, tmp_path, begun, attempt
):
    shutil.copytree(begun / "runs", tmp_path / "other")
    other = tmp_path / "other/tiny/run"
    given = {
        "init_from": [f"run.init_from={other}"],
        "checkpoint": [f"run.resume={other}/checkpoints/step-00000005", "run.name=branch"],
        "directory": [f"run.resume={other}"],
    }
    words = [*given[begins], f"checkpoint.mirror=file://{tmp_path}/B/two"]
    run = Attempts(tmp_path, attempt, *words, stops_at=12)
    stopped = run.fit()
    if begins == "directory":
        shutil.rmtree(other)
    else:
        run.lose_disk()
    resumed = run.fit()
    assert resumed["step"] == 20
    assert len(resumed["seen"]) == 20 - stopped["step"]


def test_requeued_slurm_job_goes_on_from_its_bucket(tmp_path, monkeypatch, straight):
    job = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0"}
    job |= {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}
    for name, value in {**job, "TORCHELASTIC_RUN_ID": "job"}.items():
        monkeypatch.setenv(name, value)
    begin = lambda number: monkeypatch.setenv("SLURM_RESTART_COUNT", str(number))  # noqa: E731
    run = Attempts(tmp_path, begin, f"checkpoint.mirror=file://{tmp_path}/bucket/first")
    run.fit()
    run.lose_disk()
    check_equal_bits(straight, run.fit())
    assert run.seen == straight["seen"]


class Tracked(Tiny):
    """Task with a tracker whose run the first attempt has made."""

    def train_step(self, batch):
        known = Path(self.config.run.dir, "tiny/run/trackers.json")
        if self.step == 1:
            known.write_text('{"mlflow": "abc"}')
        return super().train_step(batch)


def test_trackers_go_on_in_their_runs_after_a_lost_disk(tmp_path, attempt):
    """Else each service gets a second run for the steps after it."""
    run = Attempts(tmp_path, attempt, f"checkpoint.mirror=file://{tmp_path}/bucket/first")
    directory = tmp_path / "runs/tiny/run"
    run.words.append(f"task.trainer={__name__}.Tracked")
    run.fit()
    run.lose_disk()
    run.fit()
    assert json.loads((directory / "trackers.json").read_text()) == {"mlflow": "abc"}


DIES = '''
import os, shutil, signal, time
from pathlib import Path
from tiny import Tiny

class Dies(Tiny):
    """Loses its node, with the disk, in the first attempt, once the bucket has step 5."""

    def train_step(self, batch):
        if self.step == 9 and not Path("died").exists() and self.world.rank == 0:
            while not [*Path("bucket").glob("first/*/checkpoints/step-00000005/manifest.json")]:
                time.sleep(0.05)
            Path("died").touch()
            shutil.rmtree("runs")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step(batch)
'''


@pytest.mark.slow
def test_elastic_run_that_loses_its_node_ends_with_all_steps(tmp_path, straight):
    (tmp_path / "dies.py").write_text(DIES)
    words = [*RECIPE, "task.trainer=dies.Dies", f"checkpoint.mirror=file://{tmp_path}/bucket/first"]
    words += ["launch=elastic", "launch.nproc_per_node=2", "launch.max_restarts=2"]
    folder = f"--config-dir={Path(__file__).parents[1] / 'conf'}"
    code, out, err = ended(launch(tmp_path, folder, *words))
    assert code == 0 and "resumed at step 5" in out, out + err
    restarted = (tmp_path / "bucket/first/000002/config.json").stat().st_mtime
    waited_s = restarted - (tmp_path / "died").stat().st_mtime
    assert waited_s < 28, "the other rank waited too long for rank 0 before it ended"


def test_restarts_that_get_no_further_end_a_run(tmp_path):
    """Three in a row at one step; a newer checkpoint lets it go on."""
    config = load_config(["task=tiny"], [CONF])
    written = iter([(0, 0), (1, 0), (2, 0), (3, 5), (4, 5), (5, 5), (6, 5)])
    found = []
    with pytest.raises(RunError, match=r"gave up, 3 restarts got no further than step 5: its rank"):
        for attempt, step in written:
            launcher = SimpleNamespace(attempt=attempt, starters=("one",))
            facts = resume._count_attempt(config, "job/1", launcher, tmp_path, step)
            found.append(facts["vain"])
            (tmp_path / resume.WRITER).write_text(json.dumps(facts))
    assert found == [0, 1, 2, 0, 1, 2] and next(written, None) is None
    (tmp_path / "exit.json").write_text('{"reason": "a loss of nan"}')
    with pytest.raises(RunError, match=r"no further than step 5: a loss of nan$"):
        resume._count_attempt(config, "job/1", launcher, tmp_path, 5)
    other = resume._count_attempt(config, "job/2", launcher, tmp_path, 5)
    assert other["vain"] == 0
