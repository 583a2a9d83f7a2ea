"""An exception of a task: its own frames are shown once; all frames are in a file of the run."""

import json
import re
import signal
import sys
import time

import pytest
from harness import CONF, TORCHRUN, ended, launch, wait_for

from trainer.base.process.tracebacks import describe_cause, show

WORDS = ["--config-dir", CONF, "task=tiny", "run.steps=9", "run.name=a"]
TASK = """
from trainer import Trainer
from tiny import Tiny
class Broken(Tiny):
    train_step = Trainer.train_step
    def loss(self, outputs, targets):
        if self.step == 3 {condition}:
            self.look_up()
        return super().loss(outputs, targets)
    def look_up(self):
        return {{}}["missing"]
class Unbuilt(Tiny):
    def build_model(self):
        return {{}}["missing"]
"""
FRAMES = """Traceback (most recent call last):
  File "FOLDER/broken.py", line 8, in loss
    self.look_up()
  File "FOLDER/broken.py", line 11, in look_up
    return {}["missing"]
KeyError: 'missing'
"""


def write_task(folder, condition=""):
    (folder / "broken.py").write_text(TASK.format(condition=condition))
    return ["task.trainer=broken.Broken"]


def frames_in(text):
    """Return what was printed without the marks below a line."""
    return re.sub(r"^ +[~^]+\n", "", text, flags=re.MULTILINE)


def test_of_a_tasks_exception_its_own_frames_are_shown_and_a_file_has_all(command, tmp_path):
    done = command(*WORDS, *write_task(tmp_path))
    assert done.returncode == 1
    frames = FRAMES.replace("FOLDER", str(tmp_path))
    assert frames_in(done.stderr) == frames + "all frames: runs/tiny/a/traceback.txt\n"
    text = (tmp_path / "runs/tiny/a/traceback.txt").read_text()
    assert "trainer/core/engine/engine.py" in text and text.endswith("KeyError: 'missing'\n")


def test_ranks_that_fail_alike_show_it_once(command, tmp_path):
    done = command(*WORDS, *write_task(tmp_path), ranks=2)
    assert done.stderr.count("Traceback") == done.stderr.count("KeyError") == 1, done.stderr
    shown = frames_in(done.stderr)
    frames = FRAMES.replace("FOLDER", str(tmp_path))
    end = "all frames: runs/tiny/a/traceback.txt\nthe same on 2 of 2 ranks\n"
    assert f"error on rank 0:\n{frames}{end}" in shown
    for name in ("traceback.txt", "traceback-rank-1.txt"):
        assert "KeyError" in (tmp_path / "runs/tiny/a" / name).read_text()


def test_a_rank_that_fails_alone_shows_it(command, tmp_path):
    done = command(*WORDS, *write_task(tmp_path, "and self.world.rank == 1"), ranks=2)
    assert done.stderr.count("Traceback") == 1 and "error on rank 1:\n" in done.stderr
    assert "all frames: runs/tiny/a/traceback-rank-1.txt\n" in done.stderr
    assert "the same on" not in done.stderr


def test_before_there_is_a_run_directory_a_variable_shows_all_frames(command, tmp_path):
    write_task(tmp_path)
    words = [*WORDS, "task.trainer=broken.Unbuilt"]
    done = command(*words)
    assert done.stderr.endswith("\nall frames: start again with LOCKSTEP_TRACEBACK=full\n")
    assert "engine" not in done.stderr and len(done.stderr.splitlines()) <= 6
    done = command(*words, environment={"LOCKSTEP_TRACEBACK": "full"})
    assert "setup/build.py" in done.stderr and done.stderr.endswith("KeyError: 'missing'\n")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["task.trainer=broken.Broken"], "KeyError: 'missing' ({folder}/broken.py:11)"),
        (["run.steps=x"], "run.steps=x: must be an integer of at least 1 or null"),
    ],
)
def test_torchrun_is_told_the_reason(words, reason, command, tmp_path):
    write_task(tmp_path)
    path = tmp_path / "error.json"
    command(*WORDS, *words, environment={"TORCHELASTIC_ERROR_FILE": str(path)})
    told = json.loads(path.read_text())["message"]
    assert told["extraInfo"]["py_callstack"] == reason.format(folder=tmp_path)


@pytest.mark.slow
def test_torchruns_own_block_ends_with_the_reason_of_the_first_rank(tmp_path):
    words = write_task(tmp_path, "and self.world.rank == 1")
    _, _, err = ended(launch(tmp_path, *WORDS, *words, launcher=TORCHRUN))
    last = [line for line in err.splitlines() if "traceback : " in line][-1]
    assert last == f"  traceback : KeyError: 'missing' ({tmp_path}/broken.py:11)"


def test_torchruns_own_block_lists_one_rank_for_an_error_that_all_have(command, tmp_path):
    """It lists ranks that end with another code than 0; it ends those that wait for rank 0."""
    path = tmp_path / "error.json"
    facts = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a"}
    facts["TORCHELASTIC_ERROR_FILE"] = str(path)
    rank = command.start(*WORDS, "run.steps=x", environment=facts)
    wait_for(path.exists)
    time.sleep(0.2)
    rank.send_signal(signal.SIGTERM)
    code, _, err = ended(rank)
    assert (code, err) == (0, "")


@pytest.mark.slow
def test_torchrun_prints_the_line_of_a_bad_setting_last(tmp_path):
    code, _, err = ended(launch(tmp_path, *WORDS, "run.steps=x", launcher=TORCHRUN))
    lines = err.splitlines()
    reason = "run.steps=x: must be an integer of at least 1 or null"
    assert code == 1 and lines[0] == f"error: {reason}"
    assert lines[-2] == f"  traceback : {reason}"
    codes = [line.split()[2] for line in lines if "  exitcode  : " in line]
    assert [code for code in codes if code != "-15"] == ["2"]  # -15: a rank that still imported


def raised(code, folder):
    """Return the exception that a file raises."""
    path = folder / "mine.py"
    path.write_text(code)
    try:
        exec(compile(code, str(path), "exec"), {"__name__": "mine"})
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_a_recursion_of_the_task_is_cut(tmp_path):
    code = "def f(n): return g(n)\ndef g(n): return f(n)\nf(0)"
    assert len(show(raised(code, tmp_path)).splitlines()) < 70


def test_causes_and_the_place_in_a_library_are_shown(tmp_path):
    code = """
import json
try:
    json.loads("{")
except ValueError as error:
    raise RuntimeError("line one\\nline two") from error
"""
    error = raised(code, tmp_path)
    shown = show(error)
    assert shown.count("mine.py") == 2 and "direct cause" in shown
    assert shown.count("json/decoder.py") == 1  # of its three frames in json the last one
    assert "line one\nline two" in shown
    assert describe_cause(error) == f"RuntimeError: line one line two ({tmp_path}/mine.py:6)"


def test_a_long_message_is_cut(tmp_path):
    shown = show(raised("raise ValueError('word\\n' * 5000)", tmp_path))
    assert len(shown.splitlines()) < 40 and "more lines" in shown


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no groups of exceptions")
def test_a_group_shows_its_exceptions(tmp_path):
    shown = show(raised("raise ExceptionGroup('two', [KeyError('a'), OSError('b')])", tmp_path))
    assert "KeyError: 'a'" in shown and "OSError: b" in shown
