"""What a proof starts ends with it, whatever session it has and whatever it is doing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import wait_for
from harness.launch import ROOT

from trainer.prove import worker_session
from trainer.prove.end_view import find_processes, kill_left

WAITS = [sys.executable, "-c", "import time; time.sleep(100)"]
MARK = b"LOCKSTEP_TEST_OF_MARKS"


def test_a_process_of_any_session_is_found_by_its_mark():
    own = {**os.environ, MARK.decode(): "1"}
    marked = subprocess.Popen(WAITS, env=own, start_new_session=True)
    unmarked = subprocess.Popen(WAITS, start_new_session=True)
    try:
        wait_for(lambda: find_processes((), [MARK]))  # after its exec
        kill_left((), [MARK])
        assert marked.wait(5) == -signal.SIGKILL and unmarked.poll() is None
    finally:
        for each in (marked, unmarked):
            each.kill()
            each.wait()


IN_A_SESSION = """
import os, subprocess, sys, time
from trainer.base.errors import RunError
from trainer.prove.worker_session import continue_in_session
try:
    folder = continue_in_session("lockstep-test-")
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), 9)
    while sys.argv[1] == "starts":  # an interrupt would come before the line that notes one
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"],
                         start_new_session=len(os.listdir("/proc/self/fd")) % 2)
        (folder / "file").touch()
        time.sleep(0.01)
    class Dropping:  # Python drops what a handler raises here
        def __del__(self):
            (folder / "file").touch()
            time.sleep(100)
    if sys.argv[1] == "drops":
        Dropping()
    if sys.argv[1] == "forks" and os.fork() == 0:  # its environment is that of the first process
        os.setsid()
        print(os.getpid(), flush=True)
        time.sleep(100)
    sys.exit(3)
except KeyboardInterrupt:
    sys.exit("interrupted")
except RunError as error:
    sys.exit(str(error))
"""


def run_in_a_session(kind, tmp_path, **more):
    own = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", IN_A_SESSION, kind]
    return subprocess.Popen(
        words, env=own, stderr=subprocess.PIPE, text=True, start_new_session=True, **more
    )


@pytest.mark.parametrize("kind", ["starts", "drops"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_at_any_moment_ends_all_processes_and_removes_the_folder(
    kind, number, tmp_path
):
    for part in range(4):
        process = run_in_a_session(kind, tmp_path)
        wait_for(lambda: [*tmp_path.glob("lockstep-test-*/file")])
        time.sleep(0.013 * part)
        os.killpg(process.pid, number)
        assert process.communicate(timeout=20)[1] == "interrupted\n"
        assert process.returncode == 1 and not [*tmp_path.iterdir()]
        assert not find_processes((), [f"{worker_session.FOLDER}={tmp_path}".encode()])


def test_a_process_that_has_not_called_exec_ends_with_the_session(tmp_path):
    process = run_in_a_session("forks", tmp_path, stdout=subprocess.PIPE)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (3, "") and not Path(f"/proc/{int(out)}").exists()


def test_a_session_ends_as_its_first_process(tmp_path):
    ended = run_in_a_session("ends", tmp_path)
    assert (ended.communicate(timeout=20)[1], ended.returncode) == ("", 3)
    killed = run_in_a_session("killed", tmp_path)
    assert killed.communicate(timeout=20)[1] == (
        "SIGKILL ended the process that does the work; see the kernel's log: SIGKILL often means "
        "that memory was full\n"
    )
    assert killed.returncode == 1 and not [*tmp_path.iterdir()]


def test_ctrl_z_stops_a_session_until_it_is_continued(tmp_path):
    process = run_in_a_session("starts", tmp_path)
    (file,) = wait_for(lambda: [*tmp_path.glob("lockstep-test-*/file")])
    os.killpg(process.pid, signal.SIGTSTP)
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    last = file.stat().st_mtime_ns
    time.sleep(0.2)
    assert file.stat().st_mtime_ns == last
    os.killpg(process.pid, signal.SIGCONT)
    wait_for(lambda: file.stat().st_mtime_ns > last)
    process.terminate()
    assert process.communicate(timeout=20)[1] == "interrupted\n"
