"""Run a verb in a fork of the tests, which has torch loaded: 0.1 s instead of 2 s for a new
interpreter.

The fork has its own working directory, environment, arguments and files, as a separate process has.
With `ranks` it is an agent like torchrun's, whose ranks are forks too: it forwards signals, ends
all ranks when one fails, and then exits with 1. Use real launches (harness.launch) to test restarts
and the output of a launcher.
"""

import atexit
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.launcher.api  # binds Popen, before fork_jobs replaces it

from harness.compositions import compose_before_fork, remember_compositions
from harness.launch import (
    PATHS,
    environment_of_a_command,
    kill_with_descendants,
    without_noise,
)
from harness.ranks import LIMIT_S as HANG_S
from harness.ranks import begin_child, environment_of_torchrun, open_store

GRACE_S = 30.0  # torchrun's, from SIGTERM to SIGKILL
LIMIT_S = 120.0
CRASHED = 99


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


class Process:
    """A running command, with the methods of subprocess.Popen."""

    def __init__(self, pid: int, files: tuple[int, ...] = ()):
        self.pid = pid
        self.returncode: int | None = None
        self._files = files
        self._read: tuple[str, str] | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout or LIMIT_S)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}\n{self.read()}", timeout or 0)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float = LIMIT_S) -> tuple[str, str]:
        """Wait for the end and return (stdout, stderr)."""
        self.wait(timeout)
        if self._read is None:
            self._read = self.read()
            for file in self._files:
                os.close(file)
        return self._read

    def read(self) -> tuple[str, str]:
        """Return (stdout, stderr) so far."""
        if self._read is not None:
            return self._read
        found = [os.pread(file, os.fstat(file).st_size, 0) for file in self._files]
        texts = [data.decode(errors="replace") for data in found]
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it and all processes that it has started."""
        if self.poll() is None:
            kill_with_descendants(self.pid)
            self.wait()


class Command:
    """Run verbs in the folder of the test: `command(*words, ranks=, environment=, verb=)` returns
    exit code and output."""

    verb = "trainer"  # unless verb= names another

    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(self, *words: str, limit_s: float = LIMIT_S, **options: Any) -> Done:
        process = self.start(*words, hang_s=max(HANG_S, 2 * limit_s), **options)
        try:
            out, err = process.communicate(limit_s)
        finally:
            process.kill()
        return Done(process.returncode or 0, without_noise(out), without_noise(err))

    def start(
        self,
        *words: str,
        ranks: int = 0,
        environment: Mapping[str, str] | None = None,
        verb: str = "",
        folder: Path | None = None,
        is_session: bool = False,
        is_fresh: bool = False,
        before: Callable[[], object] = lambda: None,
        hang_s: float = HANG_S,
    ) -> Process:
        """Start the command and return its process.

        `before` is called in each of its processes before the verb. With `is_session` signals can
        be sent to all of them, as a terminal does. With `is_fresh`, and in ranks, the package is
        imported again, for modules that inspect the process at import. After `hang_s` seconds one
        without ranks prints its stacks and ends.
        """
        verb = verb or self.verb
        told = environment_of_a_command(**(environment or {}))
        compose_before_fork(words)
        files = (_open_nameless(), _open_nameless())
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return Process(pid, files)
        try:
            if is_session:
                os.setsid()
            _become(folder or self.folder, told, files)
            if ranks:
                _be_agent(ranks, verb, words, before)
            begin_child(hang_s)
            if is_fresh:
                _forget("trainer")
                remember_compositions()
            before()
            _run(verb, words)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(CRASHED)


def _open_nameless() -> int:
    """Open a file that is deleted with its last descriptor; a process that outlives the command
    would keep a pipe open."""
    descriptor, name = tempfile.mkstemp()
    Path(name).unlink()
    return descriptor


def _become(folder: Path, environment: Mapping[str, str], files: tuple[int, int]) -> None:
    """Set files, working directory, environment and warnings as in a new process."""
    null = os.open(os.devnull, os.O_RDONLY)
    for number, source in enumerate((null, *files)):
        os.dup2(source, number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    paths = environment["PYTHONPATH"].split(os.pathsep)
    known = {*paths, *PATHS.split(os.pathsep)}
    sys.path[:] = [str(folder), *paths, *(path for path in sys.path if path not in known)]
    atexit._clear()  # pytest's
    _reset_signals()
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    warnings.showwarning = _show_warning


def _reset_signals() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    print(warnings.formatwarning(message, category, filename, lineno, line), file=sys.stderr)


def _run(verb: str, words: tuple[str, ...]) -> None:
    """Run `python -m verb words` and exit this process with its exit code."""
    sys.argv = [verb, *words]
    package = f"{verb}.__main__"
    for name in (verb, package):
        if name != "trainer":
            sys.modules.pop(name, None)  # else runpy warns
    code: Any = 0
    try:
        runpy.run_module(verb, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)  # without the exit handlers of pytest


# The agent ----------------------------------------------------------------------------------------


def _be_agent(size: int, verb: str, words: tuple[str, ...], before: Callable[[], object]) -> None:
    """Fork the ranks and wait for them; does not return."""
    job = uuid.uuid4().hex
    pids: list[int] = []
    gates: list[int] = []
    for rank in range(size):
        entrance, gate = os.pipe()
        pid = os.fork()
        if not pid:
            for other in (*gates, gate):
                os.close(other)
            _be_rank(rank, size, job, entrance, verb, words, before)
        os.close(entrance)
        pids.append(pid)
        gates.append(gate)

    def pass_on(number: int, frame: object) -> None:
        nonlocal is_ending, deadline
        is_ending = True
        deadline = time.monotonic() + GRACE_S
        _send(alive, number)

    alive = set(pids)
    is_ending = False
    deadline = float("inf")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    server = open_store(gates)
    while alive:
        for pid in tuple(alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                alive.discard(pid)
            if ended and status and not is_ending:
                pass_on(signal.SIGTERM, None)
        if time.monotonic() > deadline:
            _send(alive, signal.SIGKILL)
        time.sleep(0.005)
    del server
    os._exit(int(is_ending))


def _send(pids: set[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _be_rank(rank, size, job, entrance, verb, words, before) -> None:
    begin_child()
    _reset_signals()
    os.environ |= environment_of_torchrun(rank, size) | {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "MASTER_PORT": os.read(entrance, 16).decode(),
    }
    os.close(entrance)
    _forget("trainer")
    remember_compositions()
    before()
    _run(verb, words)


def _forget(*packages: str) -> None:
    """Have the tests' tasks and `packages` imported again: they inspect the process at import."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tiny", "mesh_gpt", "hanging_tasks", "faults", *packages):
            del sys.modules[name]


# For `before` ----------------------------------------------------------------------------------


def fork_jobs() -> None:
    """Replace child processes `python -m trainer ...` of the verb by forks."""
    start = subprocess.Popen

    def begin(words, *, start_new_session=False, **options):
        if options or words[:3] != [sys.executable, "-m", "trainer"]:
            return start(words, start_new_session=start_new_session, **options)
        pid = os.fork()
        if pid:
            return Process(pid)
        if start_new_session:
            os.setsid()
        _reset_signals()
        _forget()  # without begin_child: a second timer would wait for the thread of the first
        _run("trainer", tuple(words[3:]))

    subprocess.Popen = begin  # type: ignore[misc,assignment]


def refuse_meeting() -> None:
    """Make any attempt to open a socket or form a process group fail."""
    socket.socket = _NoSocket  # type: ignore[misc]
    for name in ("init_process_group", "TCPStore", "FileStore", "HashStore"):
        setattr(dist, name, _refused)


def hide_gpus() -> None:
    """Hide the GPUs, as on a machine without any."""
    torch.cuda.is_available = lambda: False


def _refused(*arguments, **options):
    raise AssertionError("a bad setting has to be refused before ranks meet")


class _NoSocket(socket.socket):
    def __init__(self, *arguments, **options):
        _refused()
