"""Long work on data of others ends at a stop, at its limits and with its process; it shows how far
it is."""

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from trainer import ConfigError, RunError
from trainer.base.errors import ServerError
from trainer.core.distributed import signals
from trainer.shards import long_work
from trainer.shards.long_work import run_apart, watched

WORDS = ("counting", "rows", "task.options.data=x")


def children():
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


@pytest.fixture(autouse=True)
def nothing_left():
    """No process and no file is left, however the work ends."""
    before = (children(), len([*Path("/proc/self/fd").iterdir()]))
    yield
    assert (children(), len([*Path("/proc/self/fd").iterdir()])) == before


def forever(tell):
    tell("row 7")
    while True:
        pass


def test_work_apart_returns_its_values_and_errors():
    assert run_apart(lambda tell: {"rows": [1, "two"]}, *WORDS) == {"rows": [1, "two"]}
    assert run_apart(lambda tell: "x" * 2**20, *WORDS) == "x" * 2**20
    for kind in (ConfigError, RunError, ServerError):

        def fail(tell, kind=kind):
            raise kind("one line")

        with pytest.raises(kind, match=r"^one line$") as caught:
            run_apart(fail, *WORDS)
        assert type(caught.value) is kind
    with pytest.raises(RuntimeError, match=r"^counting: ZeroDivisionError: .*test_long_work.py:"):
        run_apart(lambda tell: 1 / 0, *WORDS)
    assert run_apart(lambda tell: os.getpid(), *WORDS) != os.getpid()


@pytest.mark.parametrize("work", ["loop", "pattern"])
def test_work_without_progress_is_ended_and_its_place_named(work, monkeypatch):
    """A pattern holds the interpreter: no signal handler of Python would run."""
    monkeypatch.setattr(long_work, "IDLE_S", 0.4)

    def match(tell):
        tell("row 7")
        re.match("(a+)+$", "a" * 60 + "b")

    with pytest.raises(ConfigError) as caught:
        run_apart({"loop": forever, "pattern": match}[work], *WORDS, "take a narrower glob")
    assert str(caught.value) == (
        "task.options.data=x: counting takes more than 0 s at row 7; "
        "remove what is there, or take a narrower glob"
    )


def test_work_with_progress_may_take_any_time(monkeypatch):
    monkeypatch.setattr(long_work, "IDLE_S", 0.3)

    def count(tell):
        for number in range(12):
            tell(f"row {number}")
            time.sleep(0.1)
        return number

    assert run_apart(count, *WORDS) == 11


def test_work_that_needs_too_much_memory_is_ended(monkeypatch):
    monkeypatch.setattr(long_work, "MOST_MEMORY", 2**28)

    def fill(tell):
        tell("row\x1b 7")
        parts = []
        while True:
            parts.append(b"1" * 2**24)

    with pytest.raises(ConfigError) as caught:
        run_apart(fill, *WORDS)
    assert str(caught.value) == (
        "task.options.data=x: counting takes more than 0.2 GiB of memory at row\\x1b 7; "
        "remove what is there, or mend it"
    )


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_work_whose_process_ends_is_one_line(end):
    def work(tell):
        tell("row 7")
        os.kill(os.getpid(), signal.SIGKILL) if end == "kill" else os._exit(3)

    what = "SIGKILL" if end == "kill" else "an exit"
    with pytest.raises(ConfigError, match=rf"x: {what} ended the process that was counting, at ro"):
        run_apart(work, *WORDS)


def interrupt_soon(number):
    pid = os.getpid()
    if not os.fork():
        time.sleep(0.4)
        os.kill(pid, number)
        os._exit(0)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_request_to_stop_ends_the_work_at_once(name):
    begun = time.monotonic()
    line = rf"^asked to stop \({name}\) while counting; nothing was saved$"
    with signals.stop_requests(), pytest.raises(RunError, match=line):
        interrupt_soon(signal.Signals[name])
        run_apart(forever, *WORDS)
    with signals.stop_requests(), pytest.raises(RunError, match=line):
        interrupt_soon(signal.Signals[name])
        for _ in watched(iter(int, 1), "counting", "rows"):
            pass
    assert time.monotonic() - begun < 3
    os.wait()
    os.wait()


def test_a_loop_shows_how_far_it_is_but_a_short_one_does_not(monkeypatch, capfd):
    assert list(watched("abc", "counting", "rows")) == ["a", "b", "c"]
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(long_work, "PROGRESS_S", 0.1)

    def count(tell):
        for _ in watched(range(8), "counting here", "rows"):
            tell("row")
            time.sleep(0.1)

    run_apart(count, "counting", "rows", "x")
    err = capfd.readouterr().err
    assert "counting here: 1 rows so far ...\n" in err or "counting here: 2 rows so far" in err
    lines = [line for line in err.splitlines() if line.startswith("counting: ")]
    assert 1 <= len(lines) <= 3 and lines[0].endswith(" rows so far ...")
    monkeypatch.setenv("LOCAL_RANK", "1")
    run_apart(count, "counting", "rows", "x")
    assert capfd.readouterr().err == ""


def test_the_process_apart_ends_with_a_killed_parent():
    reader, writer = os.pipe()
    parent = os.fork()
    if not parent:

        def work(tell):
            os.write(writer, f"{os.getpid()}\n".encode())
            forever(tell)

        run_apart(work, *WORDS)
    pid = int(os.read(reader, 99))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    os.close(writer)
    assert os.read(reader, 9) == b""  # its last writer has gone
    os.close(reader)
    with suppress(ChildProcessError):  # this process may be a reaper of orphans
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
