"""Fixtures and checks for all tests: a test must restore environment, process group, threads,
processes and working directory, and must be quick."""

import ctypes
import functools
import gc
import os
import re

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch, which else starts two spinning threads per rank
# as on a user's machine: else each new process compiles all modules of the package
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# torch's compiler in this process: forked ranks would wait for its worker processes
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
import subprocess
import sys
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path

import trainer  # noqa: F401  # before torch, whose log level it sets

# isort: split
import harness  # before any fork
import pytest
import torch
import torch._dynamo  # once before any fork: it would take a second in each child
import torch.distributed as dist
from harness.huge_pages import use_huge_pages
from harness.launch import OF_SCRIPTS, SCRIPTS, children_of, kill_with_descendants
from harness.waiting import QUIET_S, seconds_of_importing_torch, wait_for

from trainer.core.distributed import signals

sys.dont_write_bytecode = False
torch.set_num_threads(1)  # a parent with an OpenMP pool hangs its forked children
harness.warm_up()
sys.path += [str(SCRIPTS), *(str(SCRIPTS / folder) for folder in OF_SCRIPTS)]
LONGEST_S = 5.0  # limit of a default test, on an idle machine
FAILS_AT = 6.0  # times the limit, in CI: a test with Ray took 3 times as long beside two others
END_S = 10.0  # processes of a test must end within this time after it
LIVE_LONGER = ("munged", "slurmctld", "slurmd", "slurmstepd")  # they run as long as their module
PR_SET_CHILD_SUBREAPER = 36


def pytest_configure(config):
    """Make processes that a test leaves running children of this process, to find them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    """A server of S3 for the tests of a file."""
    from harness.s3 import serving_s3

    with serving_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def command(tmp_path):
    return harness.Command(tmp_path)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """Return the path of the project's wheel, built from the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    words = ["-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(
        [sys.executable, *words], cwd=Path(__file__).parents[1], check=True, capture_output=True
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    environment = dict(os.environ)
    threads = threading.active_count()
    files = set(Path().iterdir())
    children = set(children_of(os.getpid()))
    yield
    assert not dist.is_initialized()
    assert not signals._early, "signals are caught to the end of this process: use a child"
    assert torch.get_num_threads() == 1, "a fit in this process: use on_ranks(1, ...)"
    environment["PYTEST_CURRENT_TEST"] = os.environ.get("PYTEST_CURRENT_TEST", "")
    os.environ.pop("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", None)  # set by torch's compiler
    assert dict(os.environ) == environment
    # a library's pool of threads ends behind its last result
    wait_for(lambda: threading.active_count() <= threads, END_S)
    # another process of tests, in this directory too, may have a file here for a moment
    with suppress(AssertionError):
        wait_for(lambda: left_in_directory() <= files, END_S)
    assert left_in_directory() <= files, "files in the working directory"
    check_processes(children)


def left_in_directory() -> set[Path]:
    return set(Path().iterdir()) - {Path(".pytest_cache")}


def check_processes(before: set[int]) -> None:
    """Check that no new child is left; children that are ending get some seconds."""
    end = time.monotonic() + END_S
    while left := living(set(children_of(os.getpid())) - before):
        if time.monotonic() > end:
            for pid in left:
                kill_with_descendants(pid)
            raise AssertionError(f"processes are left running: {left}")
        time.sleep(0.01)


def living(pids: set[int]) -> dict[int, str]:
    """Reap ended processes; return process id to command line of the others."""
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


# Two processes that share the files --------------------------------------------------------------


def pytest_addoption(parser):
    parser.addoption("--share", metavar="DIR", help="run the files that are not in DIR, each once")
    parser.addoption("--part", help="a part of the slow tests: its number from 0, as in 3/12")
    parser.addoption("--touched", default="", help="folders of more slow tests, as in tests/use")
    parser.addoption("--until", type=float, help="the time after which those are skipped")


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # a collection while a fork lives would copy the memory that it shares
    use_huge_pages()


def is_of_part(item):
    """Return True for a test that is not slow, and for the slow ones of the part that runs."""
    part, parts = map(int, item.config.getoption("part").split("/"))
    is_slow = item.get_closest_marker("slow")
    return not is_slow or zlib.crc32(item.nodeid.encode()) % parts == part


def is_touched(item):
    folders = filter(None, item.config.getoption("touched").split(","))
    return any(item.nodeid.startswith(f"{folder}/") for folder in folders)


def pytest_collection_modifyitems(config, items):
    if config.getoption("part") is None:
        return
    left_out = [item for item in items if not is_of_part(item) and not is_touched(item)]
    config.hook.pytest_deselected(items=left_out)
    names = set(map(id, left_out))
    items[:] = [item for item in items if id(item) not in names]


@functools.cache
def takes(folder: str, name: str) -> bool:
    """Return True if this process is the first to take a file of tests."""
    try:
        os.close(os.open(Path(folder, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    folder = item.config.getoption("share")
    if not folder or takes(folder, item.path.name):
        return None
    # the test before took this one for the next one, and left the folder of both open
    item.session._setupstate.teardown_exact(nextitem)
    return True


# Without companions -------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]
# in the tree of scripts/run_core_tests.py
IS_ALONE = not (ROOT / "trainer/startup_checks").is_dir()
MISSING = re.compile(
    r"(trainer\.[\w.]+): is not part of this installation|[Nn]o module named '?(trainer\.[\w.]+)"
)


def pytest_runtest_setup(item):
    until = item.config.getoption("until")
    if until and time.time() > until and not is_of_part(item):
        pytest.skip("the time for slow tests of touched packages is over")
    needed = item.get_closest_marker("companion")
    if IS_ALONE and needed:
        pytest.skip(f"needs trainer.{needed.args[0]}")


def skip_without_companion(item, report):
    """Make a failure a skip if the test met a companion that was deleted."""
    missing = MISSING.search(report.longreprtext)
    if missing:
        path, line, _ = item.location
        report.outcome = "skipped"
        report.longrepr = (path, line, f"Skipped: needs {missing[1] or missing[2]}")


# Tests that take too long -------------------------------------------------------------------------

too_long = pytest.StashKey[list]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Record a default test that takes more than 5 s, scaled by the current import time of torch
    relative to 0.7 s."""
    report = (yield).get_result()
    if IS_ALONE and report.failed:
        skip_without_companion(item, report)
    if call.duration > LONGEST_S and item.get_closest_marker("slow") is None:
        limit_s = LONGEST_S * max(1.0, seconds_of_importing_torch() / QUIET_S)
        if call.duration > limit_s:
            line = (
                f"{call.duration:.1f} s, {limit_s:.1f} s are allowed: {call.when} of {item.nodeid}"
            )
            found = (call.duration > FAILS_AT * limit_s, line)
            item.session.stash.setdefault(too_long, []).append(found)


def failing(session):
    """Return the lines of tests that took so long that they fail, which only CI lets them."""
    found = session.stash.get(too_long, []) if os.environ.get("CI") == "true" else []
    return [line for fails, line in found if fails]


def pytest_sessionfinish(session):
    if failing(session):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    keep_failures(terminalreporter)
    lines = terminalreporter._session.stash.get(too_long, [])
    if lines:
        terminalreporter.section(
            "default tests that take too long: mark them slow or make them quick"
        )
        for _, line in lines:
            terminalreporter.line(line)


def keep_failures(terminalreporter):
    """Leave a line for each failure in the folder that processes share; it is printed last."""
    folder = terminalreporter.config.getoption("share")
    lines = [
        f"{kind} {report.nodeid} {(report.longreprtext.splitlines() or [''])[-1]}"
        for kind in ("failed", "error")
        for report in terminalreporter.stats.get(kind, [])
    ]
    lines += failing(terminalreporter._session)
    if folder and lines:
        Path(folder, f"{os.getpid()}.failures").write_text("".join(f"{line}\n" for line in lines))
