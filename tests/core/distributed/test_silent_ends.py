"""A process that ends without a word in mid-run is a failure: for launchers and in exit.json."""

import json
import re

import pytest
from harness import CONF, ELASTIC, SPAWN, TORCHRUN, ended, launch, slow_but, wait_for

TASK = """
import ctypes, faulthandler, os, signal, sys, time
from tiny import Tiny
class Ending(Tiny):
    def loss(self, outputs, targets):
        if self.step == 5 and (self.world.rank == {rank} or {rank} < 0):
            faulthandler.disable()
            {how}
            time.sleep(60)
        return super().loss(outputs, targets)
"""
WORDS = ["--config-dir", CONF, "task=tiny", "run.name=a", "run.steps=9", "dist.hang_timeout_s=60"]
WORDS += ["task.trainer=ending.Ending", "checkpoint.every_steps=2", "checkpoint.background=false"]
SILENT = {  # -> exit code of the process
    "os.kill(os.getpid(), signal.SIGKILL)": -9,
    "ctypes.string_at(0)": -11,
    "os.abort()": -6,
    "signal.signal(14, signal.SIG_DFL); signal.setitimer(signal.ITIMER_REAL, 0.01)": -14,
    "ctypes.CDLL(None)._exit(0)": 0,
    "os._exit(3)": 3,
}


def write_task(folder, how, rank=-1):
    (folder / "ending.py").write_text(TASK.format(how=how, rank=rank))


def reason_of(folder):
    """Return the reason in exit.json, which a watcher writes within a second."""
    path = folder / "runs/tiny/a/exit.json"
    wait_for(path.is_file)
    found = json.loads(path.read_text())
    assert found["code"] == 1 and found["step"] in (5, 6), found
    return found["reason"]


@pytest.mark.parametrize("how", SILENT)
def test_exit_json_has_the_end_of_a_process_that_could_not_write_it(how, command, tmp_path):
    write_task(tmp_path, how)
    process = command.start(*WORDS)
    assert process.wait() == SILENT[how], process.read()
    line = r"rank 0 \(process \d+ on \S+\) ended without an error message in \w+ and backward, at"
    assert re.match(f"{line} step 5: it was killed .* or called os._exit$", reason_of(tmp_path))
    wait_for(lambda: "ended without an error message" in process.read()[1])
    process.communicate()


@pytest.mark.companion("show")
def test_a_resume_and_a_comparison_show_the_end_before(command, tmp_path):
    write_task(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    command(*WORDS)
    reason = reason_of(tmp_path)
    code, out, _ = command("runs/tiny/a", "runs/tiny/a", verb="trainer.show")
    assert code == 0 and "ended without an error message" in " ".join(out.split())
    code, out, err = command(*WORDS, "run.resume=auto", "task.trainer=tiny.Tiny")
    assert code == 0 and f"the previous session failed: {reason}\n" in out, err


@pytest.mark.parametrize("rank", slow_but([0, 1, -1], 0, -1))
def test_os_exit_0_of_a_rank_fails_the_group(rank, command, tmp_path):
    write_task(tmp_path, "os._exit(0)", rank)
    code, _, err = command(*WORDS, ranks=2)
    assert code == 1
    assert "os._exit(0) was called at " in err
    if rank != 1:
        assert "RunError: os._exit(0) was called at " in reason_of(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_exit_json_names_the_rank_that_was_killed_and_not_the_lost_connection(
    rank, command, tmp_path
):
    write_task(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", rank)
    code, _, err = command(*WORDS, ranks=2)
    assert code == 1
    wait_for(lambda: reason_of(tmp_path) and "without an error" in reason_of(tmp_path), 10)
    assert reason_of(tmp_path).startswith(f"rank {rank} (process "), err


LAUNCHERS = {"torchrun": (TORCHRUN, ()), "elastic": ((), ELASTIC), "spawn": ((), SPAWN)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "how"),
    [(-1, "os._exit(0)"), (-1, "ctypes.CDLL(None)._exit(0)"), (1, "os.abort()")],
)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_no_launcher_takes_an_early_end_for_success(launcher, rank, how, tmp_path):
    write_task(tmp_path, how, rank)
    before, words = LAUNCHERS[launcher]
    process = launch(tmp_path, *WORDS, *words, launcher=before)
    code, out, err = ended(process)
    assert reason_of(tmp_path)
    if launcher == "torchrun" and how.startswith("ctypes") and rank < 0:
        assert code == 0, "C's _exit is invisible to torchrun and to Python"
    else:
        assert code != 0, out + err


@pytest.mark.parametrize("how", ["sys.exit(0)", "quit()"])
def test_a_module_that_exits_while_it_is_imported_is_a_failure(how, command, tmp_path):
    (tmp_path / "ending.py").write_text(f"import sys\n{how}\n")
    code, _, err = command(*WORDS)
    assert code == 1
    assert re.fullmatch(
        r"error: sys.exit\((0|None)\) was called at .*ending.py:2; raise an error instead\n", err
    )


LEAVING = """
import atexit, os, threading, time
from tiny import Tiny
class Ending(Tiny):
    pass
class Late:
    def __del__(self):
        os.abort()  # as a thread of gloo does that meets the end of the interpreter
LATE = Late()
def work():
    time.sleep(0.5)
    print("a thread ended")
threading.Thread(target=work).start()
atexit.register(print, "an exit handler was called")
"""


def test_ranks_that_are_done_exit_before_the_interpreter_ends(tmp_path):
    (tmp_path / "ending.py").write_text(LEAVING)
    code, out, err = ended(launch(tmp_path, *WORDS, launcher=TORCHRUN))
    assert code == 0, err
    assert out.count("a thread ended") == out.count("an exit handler was called") == 2
