"""One writer per run, checkpoints behind the loop, and disks that fail: what is announced is
there."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from harness import CONF, check_equal_bits, fit, fit_on, newest, on_ranks, wait_for
from harness.internals import checkpoint, packing

from trainer.errors import CheckpointError, ConfigError, RunError
from trainer.record.lease import Lease

RECIPE = ["task=tiny", "run.steps=30"]
EVERY_3 = ["checkpoint.every_steps=3", "checkpoint.every_epochs=null"]


# One writer ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def another_process(body):
    """Runs `body` in a child that says when it is done, and then waits to be killed."""
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
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(
            ConfigError,
            match=rf"run directory .*: process {pid} on \S+ writes there; wait for its end",
        ):
            Lease(tmp_path)
    Lease(tmp_path).release()


def test_data_workers_that_outlive_their_parent_do_not_hold_the_run(tmp_path):
    def hold():
        Lease(tmp_path)
        if (worker := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        (tmp_path / "worker").write_text(str(worker))

    with another_process(hold):
        pass
    Lease(tmp_path).release()
    os.kill(int((tmp_path / "worker").read_text()), signal.SIGKILL)


def test_process_that_was_taken_over_does_not_publish(tmp_path):
    old = Lease(tmp_path)
    old.check()
    (tmp_path / ".writer").unlink()  # what the message advises where a machine is lost
    with pytest.raises(
        CheckpointError, match=r"another process has taken this run over; nothing was published$"
    ):
        old.check()
    new = Lease(tmp_path)
    with pytest.raises(CheckpointError, match="another process has taken this run over"):
        checkpoint.save(tmp_path / "checkpoints", 1, {}, {}, old.check)
    assert checkpoint.steps(tmp_path / "checkpoints") == {}
    checkpoint.save(tmp_path / "checkpoints", 1, {}, {}, new.check)
    old.release()
    new.release()


def test_writer_frozen_before_its_rename_finds_nothing_to_rename(tmp_path):
    """It has passed the check of its token, is frozen, and wakes after another has taken over
    and swept."""

    def wakes():
        checkpoint.sweep(tmp_path)

    with pytest.raises(FileNotFoundError):
        checkpoint.save(tmp_path, 1, {}, {}, wakes)
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


# Behind the loop ----------------------------------------------------------------------------------


def test_background_checkpoint_is_of_its_step_though_training_goes_on(tmp_path, monkeypatch):
    """A writer that takes longer than a step: the files are those of a run that waited for each."""
    recipe = [*RECIPE, *EVERY_3, "checkpoint.keep_last=20", "task.options.norm=true", "optim=adamw"]
    waited = fit_on(1, tmp_path / "waited", *recipe, "checkpoint.background=false")
    real = torch.save

    def slow(*arguments, **options):
        time.sleep(0.02)
        real(*arguments, **options)

    monkeypatch.setattr(torch, "save", slow)
    behind = fit_on(1, tmp_path / "behind", *recipe)
    for step, path in checkpoint.steps(waited["directory"] / "checkpoints").items():
        ours = checkpoint.load(path).files
        theirs = checkpoint.load(behind["directory"] / "checkpoints" / path.name).files
        for name in ours:
            assert flat(ours[name]) == flat(theirs[name]), f"{name} of step {step}"


def flat(data):
    unpacked = packing.unpack(data, torch.device("cpu"))
    return json.dumps(unpacked, default=lambda t: t.tolist(), sort_keys=True)


def test_optimizer_steps_do_not_reach_a_private_copy():
    weights = torch.ones(4)
    tied = {"a": weights, "b": [weights, (weights[:2], 1.5, "text", None)]}
    copy = packing.private_copy(tied)
    weights.mul_(7)
    assert (
        copy["a"].tolist() == [1, 1, 1, 1]
        and copy["b"][1][0].tolist() == [1, 1]
        and copy["b"][1][1:] == (1.5, "text", None)
    )
    assert copy["b"][0] is copy["a"], "tied tensors are copied once"
    assert packing.size_of(tied) == 16 + 16 + 8


def test_no_more_than_one_checkpoint_is_in_flight_and_the_end_waits(tmp_path, monkeypatch):
    real, running, most = checkpoint.save, [0], [0]

    def watched(*arguments):
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.01)
        real(*arguments)
        running[0] -= 1

    monkeypatch.setattr(checkpoint, "save", watched)

    def body():
        run = fit(tmp_path, *RECIPE, *EVERY_3)
        assert most[0] == 1 and running[0] == 0 and threading.active_count() == 1
        return run["directory"]

    directory = on_ranks(1, body)[0]
    assert newest(directory).manifest["step"] == 30


# Disks that fail ----------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int):
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(options, capture_output=True).returncode != 0:
        pytest.skip("needs root and tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


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
            "No space left on device in saving step " in said[0]
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


def test_start_says_where_the_checkpoints_to_keep_will_not_fit(tmp_path, capfd):
    with small_disk(tmp_path / "disk", 96) as disk:
        on_ranks(2, fit, disk, "task=tiny", "run.steps=1", "checkpoint.keep_last=1000")
        on_ranks(2, fit, disk, "task=tiny", "run.steps=1", "run.name=b")
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert line.startswith(
        f"warning: {disk}/tiny/run: 1001 checkpoints and one being written take 1 MB and more; 0 MB"
    )
    assert line.endswith("make room, or keep fewer (checkpoint.keep_last, checkpoint.keep_best)")


def test_with_on_error_continue_a_full_disk_is_a_warning_until_there_is_room(tmp_path, capfd):
    with small_disk(tmp_path / "disk", 96) as disk:
        ballast = disk / "ballast"

        def body():
            real = checkpoint.save

            def save(root, step, *rest):
                if step == 6:
                    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
                        while True:
                            file.write(bytes(1024))
                if step == 12:
                    ballast.unlink()
                return real(root, step, *rest)

            checkpoint.save = save
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
    assert any("No space left on device in saving step 6" in line for line in said)
    assert all(line.endswith("going on, as checkpoint.on_error=continue says") for line in said)
    assert sorted(run["losses"]) == list(range(1, 31)), (
        "what could not be logged for a while is there in the end"
    )


def test_run_whose_last_step_could_not_be_saved_fails_even_so(tmp_path, monkeypatch):
    def failing(*arguments):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(checkpoint, "save", failing)
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
