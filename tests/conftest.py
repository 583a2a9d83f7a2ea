"""Every test leaves environment, group, threads, processes and working directory as it found
them, and is quick."""

import ctypes
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two spinning threads for each rank
import sys
import threading
import time
from pathlib import Path

import harness  # before any fork
import pytest
import torch
import torch._dynamo  # imported once before any fork: in the children it would cost a second each
import torch.distributed as dist
from harness.launch import SCRIPTS, children_of, kill_with_descendants
from harness.waiting import QUIET_S, seconds_of_importing_torch

torch.set_num_threads(1)  # a parent with an OpenMP pool hangs its forked children
harness.warm_up()
sys.path.append(str(SCRIPTS))
LONGEST_S = 5.0  # of a default test, on a quiet machine
END_S = 10.0  # so long processes of a test may take to end behind it
LIVE_LONGER = ("munged", "slurmctld", "slurmd", "slurmstepd")  # as long as their module
PR_SET_CHILD_SUBREAPER = 36


def pytest_configure(config):
    """What a test leaves running becomes our child, so that it is seen."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@pytest.fixture
def command(tmp_path):
    return harness.Command(tmp_path)


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    environment = dict(os.environ)
    threads = threading.active_count()
    files = set(Path().iterdir())
    children = set(children_of(os.getpid()))
    yield
    assert not dist.is_initialized()
    assert torch.get_num_threads() == 1, "a fit in this process: use on_ranks(1, ...)"
    environment["PYTEST_CURRENT_TEST"] = os.environ.get("PYTEST_CURRENT_TEST", "")
    assert dict(os.environ) == environment
    assert threading.active_count() <= threads
    assert set(Path().iterdir()) - {Path(".pytest_cache")} <= files, (
        "files in the working directory"
    )
    check_processes(children)


def check_processes(before: set[int]) -> None:
    """No child is left that was not there before; those that are ending have some seconds for
    it."""
    end = time.monotonic() + END_S
    while left := living(set(children_of(os.getpid())) - before):
        if time.monotonic() > end:
            for pid in left:
                kill_with_descendants(pid)
            raise AssertionError(f"processes are left running: {left}")
        time.sleep(0.01)


def living(pids: set[int]) -> dict[int, str]:
    """Process id to command line, once those that have ended are reaped."""
    found = {}
    for pid in pids:
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                continue
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except (ChildProcessError, FileNotFoundError):
            continue
        if Path(words[0].rstrip(":")).name not in LIVE_LONGER and "resource_tracker" not in str(
            words
        ):
            found[pid] = " ".join(words)[:200]
    return found


# Too long -----------------------------------------------------------------------------------------

too_long = pytest.StashKey[list]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Note a default test that takes more than 5 s, scaled by what importing torch takes just
    then beside 0.7 s."""
    yield
    if call.duration > LONGEST_S and item.get_closest_marker("slow") is None:
        limit_s = LONGEST_S * max(1.0, seconds_of_importing_torch() / QUIET_S)
        if call.duration > limit_s:
            line = (
                f"{call.duration:.1f} s, {limit_s:.1f} s are allowed: {call.when} of {item.nodeid}"
            )
            item.session.stash.setdefault(too_long, []).append(line)


def pytest_sessionfinish(session):
    if session.stash.get(too_long, []) and os.environ.get("CI") == "true":
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    lines = terminalreporter._session.stash.get(too_long, [])
    if lines:
        terminalreporter.section(
            "default tests that take too long: mark them slow or make them quick"
        )
        for line in lines:
            terminalreporter.line(line)
