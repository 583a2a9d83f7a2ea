"""A folder is put into its place as a whole: kills at each step, other processes, full disks."""

import errno
import os
import resource
import signal
import subprocess
import sys

import pytest

from trainer.base.errors import ConfigError
from trainer.hf import staged_folder
from trainer.hf.staged_folder import open_scratch, publish, why_full


def write(place, content):
    """Put a folder of two files into its place, as an export does."""
    with open_scratch(place) as scratch:
        (scratch / "new").mkdir()
        for name in ("a", "b"):
            (scratch / "new" / name).write_text(content)
        publish(scratch, scratch / "new", place)


def contents(place):
    return [(path.name, path.read_text()) for path in sorted(place.iterdir())]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


OLD, NEW = ([(name, word) for name in "ab"] for word in ("old", "new"))


def kill_at(step, place, content, has_exchange):
    """Write in a fork that is killed before its system call number `step`; True if it was."""
    pid = os.fork()
    if pid == 0:
        if not has_exchange:
            staged_folder._exchange = lambda one, other: False
        exchange = staged_folder._exchange
        count = 0

        def count_one():
            nonlocal count
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

        def exchange_or_die(one, other):
            count_one()
            done = exchange(one, other)
            count_one()
            return done

        staged_folder._exchange = exchange_or_die
        sys.addaudithook(lambda name, given: count_one() if name in AUDITED else None)
        write(place, content)
        os._exit(0)
    return os.waitpid(pid, 0)[1] != 0


AUDITED = ("open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "os.scandir", "os.listdir")


@pytest.mark.parametrize("has_exchange", [True, False])
def test_a_kill_at_any_step_leaves_the_old_folder_or_the_new_one(has_exchange, tmp_path):
    """Without an exchange of names the next process finds the old one between two renames."""
    place = tmp_path / "out"
    step, seen = 0, set()
    while True:
        write(place, "old")
        was_killed = kill_at(step, place, "new", has_exchange)
        if has_exchange or place.exists():
            assert contents(place) in (OLD, NEW), step
            seen.add(contents(place)[0][1])
        with open_scratch(place) as scratch:
            assert contents(place) in (OLD, NEW), step
            assert not [*scratch.iterdir()]
        assert names(tmp_path) == ["out"], step
        if not was_killed:
            break
        step += 1
    assert step > 12 and seen == {"old", "new"}


def test_a_folder_is_there_at_each_moment_of_a_replacement(tmp_path):
    """As a process that reads it all the time sees it."""
    place = tmp_path / "out"
    write(place, "0")
    code = "import os, sys\nwhile True:\n os.listdir(sys.argv[1]); print(flush=True)"
    reader = subprocess.Popen([sys.executable, "-c", code, place], stdout=subprocess.PIPE)
    try:
        reader.stdout.readline()
        for number in range(100):
            write(place, str(number))
        assert reader.poll() is None, "the folder was away"
    finally:
        reader.kill()
        reader.wait()
        reader.stdout.close()


def test_two_processes_do_not_write_one_folder_at_once(tmp_path):
    place = tmp_path / "more" / "out"
    with open_scratch(place):
        with pytest.raises(ConfigError, match=f"{place}: another process writes it; wait for its"):
            write(place, "x")
        write(place.with_name("other"), "x")
    write(place, "y")
    assert names(tmp_path / "more") == ["other", "out"]


def test_parents_that_a_failed_write_has_made_are_removed_and_no_others(tmp_path):
    (tmp_path / "own").mkdir()
    for place in (tmp_path / "own" / "out", tmp_path / "made" / "too" / "out"):
        with pytest.raises(KeyError), open_scratch(place):
            raise KeyError
    assert names(tmp_path) == ["own"] and names(tmp_path / "own") == []


def test_a_scratch_folder_that_is_a_link_or_anothers_is_refused(tmp_path, monkeypatch):
    place = tmp_path / "out"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    scratch = staged_folder._scratch_of(place)
    scratch.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        write(place, "x")
    assert names(tmp_path / "elsewhere") == ["kept"]
    scratch.unlink()
    scratch.mkdir()
    (scratch / "left").touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="is another user's; give another place"):
        write(place, "x")
    assert names(scratch) == ["left"]


class LibraryError(Exception):
    pass


def test_a_full_disk_is_named_whatever_a_library_raises(tmp_path):
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        text = os.strerror(code)
        assert why_full(OSError(code, text), tmp_path) == text
        assert (
            why_full(LibraryError(f"while serializing: I/O error: {text} (os)"), tmp_path) == text
        )
        cause = LibraryError("unexpected pos")
        cause.__cause__ = OSError(code, text)
        assert why_full(cause, tmp_path) == text
    assert why_full(OSError(errno.EACCES, "Permission denied"), tmp_path) == ""
    assert why_full(LibraryError("unexpected pos"), tmp_path) == ""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        assert why_full(LibraryError("unexpected pos"), tmp_path) == "File too large"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [*tmp_path.iterdir()]
