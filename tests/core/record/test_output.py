"""Output that cannot be written, shown or read ends no run; errors are safe for a terminal."""

import io
import json
import logging
import os
import pty
import re
import sys
import threading
import time
import warnings

import pytest
from harness import CONF, fit, on_ranks
from harness.training import compose
from tiny import Tiny

from trainer.base.errors import MOST_CHARACTERS, describe, one_line
from trainer.base.process.streams import (
    LastingStream,
    lasting_output,
    outlive_terminal,
    print_table,
)
from trainer.base.process.tracebacks import format_traceback

WORDS = ["task=tiny", "run.steps=4", "log.every_steps=1"]
ESCAPE = "\x1b]0;title\x07\x1b[2J"


class Broken(io.StringIO):
    """Stream like a tee to a full disk."""

    def write(self, text):
        raise OSError(28, "No space left on device")

    def flush(self):
        raise BrokenPipeError


class Talking(Tiny):
    """Task that prints, warns and logs what many streams cannot take."""

    def loss(self, outputs, targets):
        print("Verlust \N{GREEK SMALL LETTER ALPHA} \ud800", flush=True)
        sys.stdout.writelines(["a\n", "b\n"])
        warnings.warn("\N{SNOWMAN}", stacklevel=1)
        logging.warning("\N{SNOWMAN}")
        return super().loss(outputs, targets)


class Closing(Talking):
    """Task that closes its streams, or replaces them."""

    streams = "close"

    def build_model(self):
        if self.streams == "close":
            sys.stdout.close()
            sys.stderr.close()
        elif self.streams == "tee":
            sys.stdout = Broken()
            sys.stderr = Broken()
        else:
            os.close(1)
            os.close(2)
        return super().build_model()


def streams_of(kind):
    """Replace standard output and error by descriptors or streams that fail in this way."""
    if kind == "object":
        sys.stdout = sys.stderr = Broken()
        return
    if kind == "closed":
        os.close(1)
        os.close(2)
        return
    if kind == "terminal":
        ours, place = pty.openpty()
        os.close(ours)
    elif kind == "pipe":
        reader, place = os.pipe()
        os.close(reader)
    else:
        place = os.open("/dev/full" if kind == "full" else os.devnull, os.O_WRONLY)
    encoding = kind if kind in ("ascii", "latin-1") else "utf-8"
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(place, number)
        errors = "strict" if number == 1 else "backslashreplace"
        stream = open(number, "w", encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)


KINDS = ("object", "closed", "terminal", "pipe", "full", "ascii", "latin-1")


def test_a_run_survives_output_that_cannot_be_written(tmp_path):
    """Each kind is a process of its own, at once."""

    def body():
        kind = KINDS[int(os.environ["RANK"])]
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        streams_of(kind)
        warnings.simplefilter("always")
        logging.basicConfig(force=True)
        run = fit(tmp_path / kind, *WORDS, task=Talking)
        return kind, run["step"], sorted(run["losses"])

    compose(tmp_path, *WORDS)
    assert on_ranks(len(KINDS), body) == [(kind, 4, [1, 2, 3, 4]) for kind in KINDS]


@pytest.mark.parametrize("streams", ["close", "tee", "descriptors"])
def test_a_task_may_close_or_replace_its_streams(streams, command, tmp_path):
    (tmp_path / "closing.py").write_text(
        f"from test_output import Closing\nclass Task(Closing):\n    streams = {streams!r}\n"
    )
    words = ["--config-dir", CONF, *WORDS, "run.name=a", "task.trainer=closing.Task"]
    done = command(*words)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "runs/tiny/a/exit.json").read_text())
    assert (record["code"], record["step"]) == (0, 4)


def in_a_child(body):
    """Return what `body` returns in a fork."""
    (found,) = on_ranks(1, body)
    return found


def test_a_reader_that_does_not_read_delays_a_run_once_and_is_told_what_it_lost(monkeypatch):
    monkeypatch.setattr("trainer.base.process.streams.READER_WAIT_S", 0.3)

    def body():
        reader, place = os.pipe()
        os.dup2(place, 1)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        outlive_terminal()
        begun = time.monotonic()
        with lasting_output():
            for _ in range(300):
                print("x" * 999, flush=True)
        seconds = time.monotonic() - begun
        read = os.read(reader, 2**20)
        with lasting_output():
            print("after", flush=True)
        return seconds, len(read), os.read(reader, 2**20), os.get_blocking(1)

    seconds, size, rest, is_blocking = in_a_child(body)
    assert 0.3 <= seconds < 3 and size > 60_000
    assert re.fullmatch(rb"\n\[23\d,000 bytes of output were lost\]\nafter\n", rest)
    assert is_blocking, "the descriptor is shared with other processes"


def test_outside_of_a_run_a_slow_reader_gets_everything():
    def body():
        reader, place = os.pipe()
        os.dup2(place, 1)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        outlive_terminal()
        read = []

        def read_late():
            time.sleep(0.3)
            while sum(map(len, read)) < 300_000:
                read.append(os.read(reader, 2**16))

        thread = threading.Thread(target=read_late)
        thread.start()
        for _ in range(300):
            print("x" * 999, flush=True)
        thread.join(10)
        return sum(map(len, read))

    assert in_a_child(body) == 300_000


def test_streams_are_given_back_after_a_run(tmp_path):
    def body():
        before = sys.stdout, sys.stderr
        fit(tmp_path, *WORDS, task=Tiny)
        return before == (sys.stdout, sys.stderr)

    assert in_a_child(body)


def test_a_lasting_stream_stays_open():
    inner = io.StringIO()
    stream = LastingStream(inner)
    stream.close()
    print("a", file=stream)
    assert (inner.getvalue(), stream.closed, stream.isatty()) == ("a\n", False, False)
    inner.close()
    print("b", file=stream, flush=True)
    assert not stream.isatty()


# Errors -------------------------------------------------------------------------------------------


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no message")

    __repr__ = __str__


def test_the_line_of_any_error_is_one_and_short():
    assert describe(ValueError("a\nb")) == "ValueError: a b"
    assert describe(ValueError()) == "ValueError"
    why = "its message cannot be shown, __str__ raised RuntimeError"
    assert describe(Unspeakable()) == f"Unspeakable: {why}"
    long = one_line(ValueError("a" * 6000 + "b" * 6000))
    assert len(long) < MOST_CHARACTERS + 50 and long.startswith("aaa") and long.endswith("bbb")
    assert "[... 10,000 more characters ...]" in long


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no groups of exceptions")
def test_the_line_of_a_group_names_its_exceptions():
    group = ExceptionGroup("two", [ValueError("a"), ExceptionGroup("in", [KeyError("b")])])  # noqa: F821
    inner = "ExceptionGroup: in (1 sub-exception): KeyError: 'b'"
    assert one_line(group) == f"two (2 sub-exceptions): ValueError: a; {inner}"


def test_a_traceback_is_safe_for_a_terminal():
    for error in (ValueError(ESCAPE + "x" * 12_000), ValueError("y\n" * 12_000), Unspeakable()):
        text = format_traceback(error)
        assert all(c.isprintable() or c == "\n" for c in text) and len(text) < 5000


RAISING = """
import sys, threading, warnings
from tiny import Tiny
class Task(Tiny):
    def loss(self, outputs, targets):
        if self.step == 3:
            warnings.warn({escape!r} + "warned", stacklevel=1)
            thread = threading.Thread(target=self.fail)
            thread.start()
            thread.join()
            {statement}
        return super().loss(outputs, targets)
    def fail(self):
        raise ValueError({escape!r} + "of a thread")
class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError
"""
RESUME = "python -m trainer run.resume=runs/tiny/a task.trainer=raising.Task"
SAVED = f"the newest checkpoint is of step 2; resume with: {RESUME}\n"
EARLY = "; raise an error, or set run.steps to end earlier"
STATEMENTS = {  # -> a part of the output, and of exit.json where that differs
    f"raise ValueError({ESCAPE!r} * 3000)": ("ValueError: \\x1b]0;title\\x07", "ValueError: \x1b"),
    "raise Unspeakable": ("Unspeakable: <exception str() failed>", "its message cannot be shown"),
    "raise KeyboardInterrupt": ("KeyboardInterrupt was raised at FILE", ""),
    "sys.exit(0)": (f"sys.exit(0) was called at FILE{EARLY}", ""),
    "quit()": (f"sys.exit(None) was called at FILE{EARLY}", ""),
    "import os; os._exit(0)": (f"os._exit(0) was called at FILE{EARLY}", ""),
    "raise type('Odd', (BaseException,), {})": ("Odd", ""),
}


def test_an_error_of_a_task_is_safe_for_a_terminal_and_told_in_exit_json(command, tmp_path):
    words = ["--config-dir", CONF, "task=tiny", "run.steps=9", "checkpoint.every_steps=2"]
    words += ["checkpoint.background=false", "task.trainer=raising.Task"]
    for number, (statement, (shown, stored)) in enumerate(STATEMENTS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        text = RAISING.format(escape=ESCAPE, statement=statement)
        (folder / "raising.py").write_text(text)
        process = command.start(*words, "run.name=a", folder=folder)
        out, err = process.communicate()
        reason = json.loads((folder / "runs/tiny/a/exit.json").read_text())["reason"]
        assert process.returncode == 1, statement
        shown = shown.replace("FILE", f"{folder}/raising.py:11")
        assert SAVED in out, (statement, out)
        assert shown in err and (stored or shown) in reason, (err, reason)
        assert all(c.isprintable() or c == "\n" for c in err), (statement, err)
        assert "of a thread" in err and "warned" in err and "nothing was saved" not in err
        assert len(err) < 12_000 and len(reason) < MOST_CHARACTERS + 100


def test_a_table_shows_its_texts_as_they_are_and_whole_in_a_pipe(capsys):
    rows = [["[red]a[/red]", ":smile:"], ["\x1b[31mb", "c" * 400]]
    print_table(["[bold]name[/bold]", "value"], rows, styles={"value": {":smile:": "green"}})
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["[bold]name[/bold]", "value"]
    assert first.split() == ["[red]a[/red]", ":smile:"]
    assert second.split() == ["\\x1b[31mb", "c" * 400]
