"""The last checkpoint is in the bucket before any rank ends, however the run ends, and no launcher
or watcher ends a rank that copies it.

No test saw it before, as tests/conf/task/tiny.yaml has no watcher, and no test of a mirror had a
launcher and a store that is slower than the launcher's limit.
"""

import json
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from harness import CONF, ended, on_ranks, wait_for
from harness import launch as start
from harness.launch import ELASTIC, SPAWN
from harness.s3 import proxied
from harness.training import fit

from trainer import load_config
from trainer.core.checkpoints.saver import Publisher, copy_again
from trainer.core.checkpoints.transaction import steps
from trainer.core.distributed import exit_barrier
from trainer.places.bucket import Bucket
from trainer.places.listing import read_listing

ENDS = ["task=ends", "dist.hang_timeout_s=1.5"]


@pytest.fixture
def slow_store(s3, monkeypatch):
    """A store that takes `slow_s` for each file of a checkpoint: five files, one after another."""
    with proxied(s3.environment["AWS_ENDPOINT_URL"]) as proxy:
        for name, value in (s3.environment | {"AWS_ENDPOINT_URL": proxy.url}).items():
            monkeypatch.setenv(name, value)
        proxy.slow_s = 0.5
        proxy.begin(is_slow)
        yield proxy


def is_slow(number, method, path):
    return "slow" if method in ("PUT", "POST") and "/checkpoints/step-" in path else ""


def newest_in(address):
    return max(read_listing(Bucket(address)).checkpoints(), default=0)


def address_of(folder):
    return f"s3://data/{folder.parent.name}-{folder.name}"


def ends_of(folder, ranks, *words):
    """Fit on ranks; return for each what was in the bucket as it ended, and its error."""
    address = address_of(folder)
    words = [*ENDS, f"checkpoint.mirror={address}", *words]

    def body():
        error = ""
        try:
            fit(folder, *words)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        return newest_in(address), error

    return on_ranks(ranks, body)


@pytest.mark.parametrize("failing", [[0, 1], [1], [0]])
def test_no_rank_ends_after_an_error_before_the_bucket_has_the_last_checkpoint(
    failing, tmp_path, slow_store, monkeypatch
):
    monkeypatch.setattr(exit_barrier, "NOTICE_S", 0.2)
    monkeypatch.setattr(exit_barrier, "RELEASE_S", 0.5)
    ended = ends_of(tmp_path, 2, f"task.options.ranks={failing}")
    assert [step for step, _ in ended] == [5, 5], ended
    for rank, (_, error) in enumerate(ended):
        assert ("ValueError: of the task" in error) is (rank in failing), ended


@pytest.mark.parametrize("signal_at", ["null", "1"])
def test_ranks_of_a_run_that_is_done_or_stopped_wait_longer_than_a_collective_may(
    signal_at, tmp_path, slow_store
):
    words = ["dist.timeout_s=2", "checkpoint.every_steps=100", "run.steps=8"]
    ended = ends_of(tmp_path, 2, *words, f"task.options.signal_at={signal_at}")
    last = max(steps(tmp_path / "ends/run/checkpoints"))
    assert (last == 8) is (signal_at == "null")
    assert ended == [(last, ""), (last, "")]


@pytest.mark.parametrize("ranks", ["[0]", pytest.param("[]", marks=pytest.mark.slow)])
def test_watcher_leaves_a_rank_alone_that_copies_its_last_checkpoint(ranks, tmp_path, slow_store):
    """It took the wait after an error for a hang of the end, and that of a good end for one of
    saving, which may take five times as long."""
    slow_store.slow_s = 0.6 if ranks == "[0]" else 1.5
    words = ["checkpoint.every_steps=5", "run.steps=5"] if ranks == "[]" else []
    limit = "dist.hang_timeout_s=1.2"
    ((step, error),) = ends_of(tmp_path, 1, limit, f"task.options.ranks={ranks}", *words)
    assert (step, error) == ((5, "ValueError: of the task") if ranks == "[0]" else (5, ""))


def test_end_of_a_run_writes_the_manifest_after_its_files_and_the_release_last(
    tmp_path, slow_store
):
    """A next writer begins at the release, and must find the record of the end."""
    slow_store.begin(lambda number, method, path: "")
    ends_of(tmp_path, 1, "task.options.ranks=[0]")
    puts = [
        path.rpartition("/000001/")[2] for method, path in slow_store.requests if method == "PUT"
    ]
    names = [path.rpartition("/")[2] for path in puts]
    of_step = [name for path, name in zip(puts, names, strict=True) if "/step-" in path]
    assert len(of_step) == 5 and of_step[-1] == "manifest.json"
    assert names.index("config.json") < names.index("model-r00000.safetensors")
    assert puts[-1] == "lease.json" and names.index("exit.json") < len(puts) - 1
    lease = on_ranks(1, lambda: Bucket(address_of(tmp_path)).get("000001/lease.json"))
    assert json.loads(lease[0])["released"] is True


def test_checkpoint_that_is_still_written_is_not_taken_as_copied():
    saving = Future()
    saver = SimpleNamespace(_saving=saving, _mirror=None)
    is_copied = Publisher.is_copied.fget
    assert not is_copied(saver)
    saving.set_result(None)
    assert is_copied(saver)


def test_rollback_waits_for_the_copy_too_before_its_next_collective(tmp_path, slow_store):
    """A run that rolls back opens its directory again, with a next writer of the bucket."""
    folder = tmp_path / "runs"
    address = address_of(folder)
    words = [*ENDS, "dist.timeout_s=2", f"checkpoint.mirror={address}", "run.on_bad_step=rollback"]
    words += ["task.options.how=nan", "task.options.ranks=[0,1]", "task.options.at=6"]
    steps_made = on_ranks(2, lambda: fit(folder, *words)["step"])
    assert steps_made == [8, 8]
    assert on_ranks(1, lambda: newest_in(address)) == [8]


def test_end_of_a_run_does_not_reach_a_bucket_where_another_run_has_gone_on(tmp_path):
    address = f"file://{tmp_path}/first"
    config = load_config(["task=tiny", f"checkpoint.mirror={address}"], [CONF])

    def body():
        told = []
        words = ["task=tiny", "eval.every_epochs=null", f"checkpoint.mirror={address}"]
        old = fit(tmp_path / "old", *words, "run.steps=2")["directory"]
        fit(tmp_path / "new", *words, "run.steps=4", "run.resume=auto")
        copy_again(config.checkpoint, old, None, told.append)
        return told, [*read_listing(Bucket(address)).checkpoints()]

    ((told, there),) = on_ranks(1, body)
    (line,) = told
    assert line.startswith(f"warning: {address}: its run has reached step 4 since"), line
    assert line.endswith("so the bucket does not have the end of this run") and there == [2, 4]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [ELASTIC, SPAWN])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_launcher_waits_for_a_copy_longer_than_it_does_for_other_ranks_that_it_ends(
    how, launcher, tmp_path, slow_store, s3
):
    """After a lost rank, and after a signal; torch's own limit is 30 s."""
    slow_store.slow_s = 8.0
    address = f"s3://data/{tmp_path.name}"
    words = ["task=ends", "--config-dir", CONF, "run.name=a", f"checkpoint.mirror={address}"]
    words += ["run.steps=100000", "checkpoint.every_epochs=null", "checkpoint.every_steps=100000"]
    if how == "kill":
        words += ["checkpoint.every_steps=5", "task.options.how=kill", "task.options.ranks=[1]"]
    environment = {**s3.environment, "AWS_ENDPOINT_URL": slow_store.url}
    run = start(tmp_path, *words, *launcher, **environment)
    if how == "stop":
        wait_for((tmp_path / "runs/ends/a/metrics.jsonl").exists)
        run.terminate()
    code, out, err = ended(run)
    (last,) = on_ranks(1, lambda: newest_in(address))
    assert last == max(steps(tmp_path / "runs/ends/a/checkpoints")), out + err
    assert code == (1 if how == "kill" else 75), out + err
