"""A run needs neither its terminal, which may close, nor a network."""

import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios

import pytest
from harness.launch import SPAWN, TESTS, environment_of_a_command, ranks_of
from harness.waiting import wait_for

from trainer.base.process.table import send

RANKS = pytest.mark.parametrize("ranks", [(), SPAWN], ids=["one", "two"])
TINY = ("--config-dir", str(TESTS / "conf"), "task=tiny", "run.name=a")


def start(folder, *words: str, prefix: tuple[str, ...] = (), **given) -> subprocess.Popen:
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "trainer", *TINY, *words],
        cwd=folder,
        env=environment_of_a_command(),
        stdin=subprocess.DEVNULL,
        **given,
    )


def last_step(folder) -> int:
    path = folder / "runs/tiny/a/metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def exit_record(folder) -> dict:
    return json.loads((folder / "runs/tiny/a/exit.json").read_text())


CLOSED = "0<&- 1>&- 2>&-"
FULL = ">/dev/full 2>/dev/full"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("closed", "ranks"),
    [*((each, ()) for each in (CLOSED, "1>&-", "2>&-", FULL)), (CLOSED, SPAWN), (FULL, SPAWN)],
)
def test_run_without_a_working_output_ends_as_it_should(closed, ranks, tmp_path):
    words = (sys.executable, "-m", "trainer", *TINY, "run.steps=12", *ranks)
    shell = f"{' '.join(words)} {closed}"
    done = subprocess.run(
        ["bash", "-c", shell], cwd=tmp_path, env=environment_of_a_command(), check=False
    )
    assert done.returncode == 0
    assert exit_record(tmp_path)["code"] == 0
    assert (tmp_path / "runs/tiny/a/checkpoints/step-00000012").is_dir()


def test_bad_setting_without_an_error_output_is_still_code_2(tmp_path):
    words = " ".join([sys.executable, "-m", "trainer", *TINY, "optim.lr=no"])
    done = subprocess.run(
        ["bash", "-c", f"{words} 2>&-"], cwd=tmp_path, env=environment_of_a_command(), check=False
    )
    assert done.returncode == 2


@pytest.mark.slow
def test_reader_that_goes_away_does_not_end_the_run(tmp_path):
    process = start(
        tmp_path, "run.steps=100", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0
    assert exit_record(tmp_path)["step"] == 100


@pytest.mark.slow
@RANKS
def test_terminal_that_hangs_up_saves_and_ends_with_75(ranks, tmp_path):
    """The terminal end of a pseudo-terminal is closed, so the kernel sends SIGHUP."""
    ours, theirs = pty.openpty()

    def take_terminal():
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the parent of the tests may ignore it

    words = ("run.steps=1000000", "log.every_steps=10", *ranks)
    process = start(tmp_path, *words, stdout=theirs, stderr=theirs, preexec_fn=take_terminal)
    os.close(theirs)
    try:
        wait_for(lambda: last_step(tmp_path) > 20)
        os.close(ours)
        assert process.wait(30) == 75
    finally:
        process.kill()
        process.wait()
    record = exit_record(tmp_path)
    assert record["code"] == 75
    assert (tmp_path / f"runs/tiny/a/checkpoints/step-{record['step']:08d}").is_dir()


@pytest.mark.slow
@RANKS
def test_hang_up_that_nohup_has_ignored_stays_ignored(ranks, tmp_path):
    process = start(
        tmp_path,
        "run.steps=1000",
        "log.every_steps=10",
        *ranks,
        prefix=("nohup",),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: last_step(tmp_path) > 20)
    for pid in (process.pid, *ranks_of(process).values()):
        send(pid, signal.SIGHUP)
    assert process.wait(60) == 0
    assert exit_record(tmp_path)["step"] == 1000


@pytest.mark.slow
def test_one_process_needs_no_network(tmp_path):
    apart = ("unshare", "-rn")
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], check=False).returncode:
        pytest.skip("unshare -rn, for a namespace without an interface, does not work here")
    process = start(tmp_path, "run.steps=3", prefix=apart, stdout=subprocess.DEVNULL)
    assert process.wait(60) == 0
    assert exit_record(tmp_path)["step"] == 3
