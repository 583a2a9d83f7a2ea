"""One writer per run, checkpoints in the background, and disks that fail: an announced checkpoint
exists."""

import contextlib
import errno
import os
import shutil
import signal
import threading
import time

import pytest
import torch
from harness import CONF, check_equal_bits, fit, fit_on, newest, on_ranks, slow_but, wait_for
from harness.disks import small_disk
from harness.internals import checkpoint
from harness.stored import check_same_bits, content_of, save

from trainer.base.errors import CheckpointError, ConfigError, RunError
from trainer.base.process.table import kernel_state
from trainer.core.checkpoints import tensor_files, transaction
from trainer.core.checkpoints.run_directory import Lease
from trainer.core.checkpoints.saver import Publisher, Snapshot
from trainer.core.strategy.tensor_shards import Shard

RECIPE = ["task=tiny", "run.steps=30"]
EVERY_3 = ["checkpoint.every_steps=3", "checkpoint.every_epochs=null"]


# One writer ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def another_process(body):
    """Run `body` in a child that reports when it is done and then waits to be killed."""
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        body()
        os.write(tell, b".")
        signal.pause()
    os.close(tell)
    assert os.read(ready, 1) == b"."
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)


def test_second_writer_is_refused_by_host_and_pid_until_the_first_is_dead(tmp_path):
    with another_process(lambda: Lease(tmp_path)) as pid:
        where = rf"run directory .*: process {pid}"
        with pytest.raises(ConfigError, match=rf"{where} on \S+ writes there; wait until it exits"):
            Lease(tmp_path)
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: kernel_state(pid) == "T")
        line = rf"{where}, which writes there, is stopped; run kill -CONT {pid} to continue it, or "
        with pytest.raises(ConfigError, match=line):
            Lease(tmp_path)
    Lease(tmp_path).release()


def test_data_workers_that_outlive_their_parent_do_not_hold_the_run(tmp_path):
    def hold():
        Lease(tmp_path)
        has_forked, tells = os.pipe()
        if (worker := os.fork()) == 0:
            os.write(tells, b".")  # what runs in a child at a fork has run
            time.sleep(60)
            os._exit(0)
        os.read(has_forked, 1)
        (tmp_path / "worker").write_text(str(worker))

    with another_process(hold):
        pass
    Lease(tmp_path).release()
    os.kill(int((tmp_path / "worker").read_text()), signal.SIGKILL)


TAKEN = r"another process \(process \d+ on \S+\) has taken over this run; nothing was published$"


def test_process_that_was_taken_over_does_not_publish(tmp_path):
    old = Lease(tmp_path)
    old.check()
    (tmp_path / ".writer").unlink()  # as the message advises after a machine is lost
    with another_process(lambda: Lease(tmp_path)):
        with pytest.raises(CheckpointError, match=TAKEN):
            old.check()
        with pytest.raises(CheckpointError, match="has taken over this run"):
            save(tmp_path / "checkpoints", 1, [{}], {}, {}, old.check)
        assert checkpoint.steps(tmp_path / "checkpoints") == {}
    with pytest.raises(CheckpointError, match=TAKEN):
        old.check()  # the other one has ended
    old.release()
    new = Lease(tmp_path)
    save(tmp_path / "checkpoints", 1, [{}], {}, {}, new.check)
    assert list(checkpoint.steps(tmp_path / "checkpoints")) == [1]
    new.release()


def test_a_successor_whose_file_is_removed_too_is_noticed(tmp_path):
    old = Lease(tmp_path)
    old.write_beside(tmp_path / "config.json", "same: settings")
    (tmp_path / ".writer").unlink()
    with another_process(
        lambda: Lease(tmp_path).write_beside(tmp_path / "config.json", "same: settings")
    ):
        pass
    (tmp_path / ".writer").unlink()
    with pytest.raises(CheckpointError, match="another process has taken over this run"):
        old.check()
    old.release()


def test_a_writer_without_its_lock_file_refuses_a_second_one(tmp_path):
    """Both orders: the second one begins after the removal, and before it has locked its file."""
    old = Lease(tmp_path)
    (tmp_path / ".writer").unlink()
    (tmp_path / ".writer").touch()
    old.check()
    with pytest.raises(AssertionError, match=r"ConfigError: .* writes there; wait until"):
        on_ranks(1, lambda: Lease(tmp_path).release())
    old.release()


CHANGES = {
    "was removed": lambda path: path.unlink(),
    "was replaced by a copy": lambda path: (
        shutil.copy2(path, path.with_name("copy")),
        path.with_name("copy").replace(path),
    ),
    "was changed, and is written again": lambda path: path.write_text("x"),
    "was removed or moved with its directory": lambda path: shutil.rmtree(path.parent),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_lock_file_is_put_right_if_nobody_else_writes(what, tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    lease = Lease(directory)
    lease.write_beside(directory / "config.json", "a: 1")
    for _ in range(2):  # also a second time
        CHANGES[what](lease.path)
        lease.check()
        (line,) = lease.take_repairs()
        assert line.startswith(f"{lease.path} {what}")
        assert (directory / "config.json").read_text() == "a: 1"
        lease.check()
        assert lease.take_repairs() == []
        with pytest.raises(AssertionError, match=f"ConfigError: .* process {os.getpid()} on "):
            on_ranks(1, lambda: Lease(directory).release())
    lease.release()


@pytest.mark.parametrize("is_ofd", [True, False])
def test_a_lock_survives_a_reader_of_the_directory(is_ofd, tmp_path, monkeypatch):
    """Closing any descriptor of a file drops the POSIX locks of a process."""
    if not is_ofd:
        monkeypatch.setattr("trainer.core.checkpoints.run_directory._OFD", None)
    directory = tmp_path / "run"
    directory.mkdir()
    lease = Lease(directory)
    shutil.copytree(directory, tmp_path / "copy")
    if not is_ofd:
        lease.check()
    with pytest.raises(AssertionError, match=f"ConfigError: .* process {os.getpid()} on "):
        on_ranks(1, lambda: Lease(directory).release())
    lease.release()
    on_ranks(1, lambda: Lease(directory).release())


def test_a_restored_lock_file_of_an_earlier_session_is_no_successor(tmp_path):
    Lease(tmp_path).release()
    shutil.copy(tmp_path / ".writer", tmp_path / "backup")
    lease = Lease(tmp_path)
    (tmp_path / "backup").replace(tmp_path / ".writer")
    lease.check()
    assert len(lease.take_repairs()) == 1
    lease.release()


def test_writer_frozen_before_its_rename_finds_nothing_to_rename(tmp_path):
    """The writer is frozen after the check of its token, and wakes after another one has taken over
    and removed its staging."""

    def wakes():
        checkpoint.sweep(tmp_path)

    with pytest.raises(RunError, match="No such file or directory while saving step 1"):
        save(tmp_path, 1, [{}], {}, {}, wakes)
    assert checkpoint.steps(tmp_path) == {} and list(tmp_path.iterdir()) == []


def test_second_run_on_a_directory_is_refused_within_seconds(command, tmp_path):
    words = ["--config-dir", CONF, "task=tiny", f"run.dir={tmp_path}", "run.name=run"]
    first = command.start(*words, "run.steps=10000000")
    try:
        wait_for(lambda: checkpoint.steps(tmp_path / "tiny/run/checkpoints"))
        second = command(*words, "run.resume=auto")
        assert second.returncode == 2
        expected = f"error: run directory {tmp_path}/tiny/run: process {first.pid} on "
        assert second.stderr.startswith(expected) and len(second.stderr.splitlines()) == 1
        assert first.poll() is None
    finally:
        first.kill()


# In the background --------------------------------------------------------------------------------


def test_background_checkpoint_is_of_its_step_though_training_continues(tmp_path, monkeypatch):
    """The writer takes longer than a step; it stores what a run that waits for each save stores."""
    recipe = [*RECIPE, *EVERY_3, "checkpoint.keep_last=20", "task.options.norm=true", "optim=adamw"]
    waited = fit_on(1, tmp_path / "waited", *recipe, "checkpoint.background=false")
    real = tensor_files.write_shards

    def slow(*arguments):
        time.sleep(0.02)
        return real(*arguments)

    monkeypatch.setattr(tensor_files, "write_shards", slow)
    behind = fit_on(1, tmp_path / "behind", *recipe)
    paths = checkpoint.steps(waited["directory"] / "checkpoints")
    assert list(paths) == list(range(3, 31, 3))
    for step, path in paths.items():
        ours = checkpoint.load(path)
        theirs = checkpoint.load(behind["directory"] / "checkpoints" / path.name)
        assert list(ours) == list(theirs)
        check_same_bits(content_of(ours), content_of(theirs), f"step {step}")


def test_the_record_is_on_the_disk_before_a_checkpoint_exists(tmp_path, monkeypatch):
    """After a power cut a resume from it finds every line up to its step."""
    synced, sizes = {}, []
    sync, publish = os.fsync, transaction.publish

    def noted_sync(descriptor):
        sync(descriptor)
        synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def noted_publish(staging, root, *arguments):
        record = (root.parent / "metrics.jsonl").stat()
        sizes.append((record.st_size, synced.get(record.st_ino)))
        publish(staging, root, *arguments)

    def train(folder):
        monkeypatch.setattr(os, "fsync", noted_sync)
        monkeypatch.setattr(transaction, "publish", noted_publish)
        fit(folder, *RECIPE, *EVERY_3, "log.every_steps=1", "checkpoint.background=false")
        return sizes

    (found,) = on_ranks(1, train, tmp_path)
    assert len(found) == 10 and all(size == on_disk for size, on_disk in found), found


def test_optimizer_steps_do_not_reach_a_private_copy():
    weights = torch.ones(4)
    plain = {"rows": weights[:2], "values": [1.5, "text", None]}
    given = {"a": weights, "b": weights, "part": weights[:2]}
    shards = {name: Shard.whole(tensor, True) for name, tensor in given.items()}
    others = {"theirs": Shard(weights[2:], (8,), (2,), False)}  # another rank writes it
    snapshot = Snapshot(3, {"model": shards | others, "ema": {}}, plain, {"ledger": ""}, 2)
    copy = snapshot.private_copy()
    weights.mul_(7)
    plain["values"].append("later")
    kept = {name: shard.tensor for name, shard in copy.shards["model"].items()}
    assert kept.keys() == {"a", "b", "part"} and copy.shards["ema"] == {}
    assert kept["a"].tolist() == [1, 1, 1, 1] and kept["part"].tolist() == [1, 1]
    assert copy.training["rows"].tolist() == [1, 1]
    assert copy.training["values"] == [1.5, "text", None]
    assert kept["b"] is kept["a"], "tied tensors are copied once"
    assert (copy.step, copy.facts, copy.best) == (3, {"ledger": ""}, 2)
    assert snapshot.size == copy.size == 16 + 16 + 8
    assert tensor_files.size_of({"a": weights, "b": [weights, (weights[:2], 1.5)]}) == 16 + 16 + 8


def test_no_more_than_one_checkpoint_is_in_flight_and_the_end_waits(tmp_path, monkeypatch):
    real, running, most = Publisher._save, [0], [0]

    def watched(*arguments):
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.01)
        real(*arguments)
        running[0] -= 1

    monkeypatch.setattr(Publisher, "_save", watched)

    def body():
        run = fit(tmp_path, *RECIPE, *EVERY_3)
        assert most[0] == 1 and running[0] == 0 and threading.active_count() == 1
        return run["directory"]

    directory = on_ranks(1, body)[0]
    assert newest(directory).manifest["step"] == 30


# Disks that fail ----------------------------------------------------------------------------------


def ends_in(error, folder, *overrides):
    try:
        fit(folder, *RECIPE, *overrides)
    except Exception as problem:
        assert type(problem) is error, repr(problem)
        return str(problem)
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("ranks", "background"),
    [
        (1, "false"),
        (2, "true"),
        pytest.param(1, "true", marks=pytest.mark.slow),
        pytest.param(2, "false", marks=pytest.mark.slow),
    ],
)
def test_full_disk_ends_the_run_on_every_rank_in_one_line_and_the_last_checkpoint_resumes(
    ranks, background, tmp_path
):
    with small_disk(tmp_path / "disk", 96) as disk:
        wanted = [*EVERY_3, "checkpoint.keep_last=100", f"checkpoint.background={background}"]
        said = on_ranks(ranks, ends_in, RunError, disk, *wanted)
        assert len(set(said)) == 1 and "\n" not in said[0]
        assert (
            "No space left on device while saving step " in said[0]
            and "MB are needed, 0.0 MB free" in said[0]
        )
        assert (
            said[0].startswith(str(disk / "tiny/run")) and "checkpoint.on_error=continue" in said[0]
        )
        reached = newest(disk / "tiny/run").manifest["step"]
        assert 3 <= reached < 30
        for path in list(checkpoint.steps(disk / "tiny/run/checkpoints").values())[:-1]:
            shutil.rmtree(path)
        resumed = fit_on(ranks, disk, *RECIPE, "run.resume=auto", "checkpoint.keep_last=1")
    check_equal_bits(fit_on(ranks, tmp_path / "straight", *RECIPE), resumed)


def test_start_warns_if_the_checkpoints_to_keep_will_not_fit(tmp_path, capfd):
    with small_disk(tmp_path / "disk", 160) as disk:
        on_ranks(2, fit, disk, "task=tiny", "run.steps=1", "checkpoint.keep_last=1000")
        on_ranks(2, fit, disk, "task=tiny", "run.steps=1", "run.name=b")
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert line.startswith(
        f"warning: {disk}/tiny/run: 1001 checkpoints and one being written need at least 1 MB; 0 MB"
    )
    assert line.endswith("make room, or keep fewer (checkpoint.keep_last, checkpoint.keep_best)")


def test_with_on_error_continue_a_full_disk_is_a_warning_until_there_is_room(tmp_path, capfd):
    with small_disk(tmp_path / "disk", 192) as disk:
        ballast = disk / "ballast"

        def body():
            real = checkpoint.stage

            def stage(root, step):
                staging = real(root, step)
                if step == 6:
                    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
                        while True:
                            file.write(bytes(1024))
                if step == 12:
                    ballast.unlink()
                return staging

            checkpoint.stage = stage
            wanted = [
                *EVERY_3,
                "checkpoint.on_error=continue",
                "log.every_steps=1",
                "checkpoint.background=false",
            ]
            return fit(disk, *RECIPE, *wanted)

        run = on_ranks(1, body)[0]
        assert newest(run["directory"]).manifest["step"] == 30
    told = capfd.readouterr()
    said = [line for line in told.out.splitlines() if line.startswith("warning: ")]
    assert len(said) <= 4 and "Traceback" not in told.err, (
        "TensorBoard's thread fails too, and says so by itself"
    )
    assert any("No space left on device while saving step 6" in line for line in said)
    assert all(line.endswith("the run continues (checkpoint.on_error=continue)") for line in said)
    assert sorted(run["losses"]) == list(range(1, 31)), (
        "what could not be logged for a while is there in the end"
    )


@pytest.mark.parametrize("call", slow_but(["stage", "write_one", "publish"], "publish"))
def test_run_whose_last_step_could_not_be_saved_fails_even_so(call, tmp_path, monkeypatch):
    def failing(*arguments):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(checkpoint, call, failing)
    said = on_ranks(2, ends_in, RunError, tmp_path, "checkpoint.on_error=continue")
    assert set(said) == {said[0]} and said[0].endswith(
        "could not be saved, so the run's last step is lost; make room and resume"
    )


def test_full_disk_by_the_command_line_is_one_line_and_exit_code_1(command, tmp_path):
    with small_disk(tmp_path / "disk", 96) as disk:
        words = ["--config-dir", CONF, *RECIPE, *EVERY_3, "checkpoint.keep_last=100"]
        done = command(*words, f"run.dir={disk}")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith(f"error: {disk}/tiny/")
