"""Start real processes, for tests of the launcher itself; other tests use harness.command."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from trainer.base.process.table import list_children as children_of

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
SCRIPTS = ROOT / "scripts"
OF_SCRIPTS = ("compare", "generate")  # folders whose modules tests import
PATHS = os.pathsep.join(map(str, [ROOT, TESTS, SCRIPTS, *(SCRIPTS / f for f in OF_SCRIPTS)]))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
ELASTIC = ("launch=elastic", "launch.nproc_per_node=2")
SPAWN = ("launch=spawn", "launch.nproc_per_node=2")
_NOISE = re.compile(
    r"nanobind: | - leaked | - ... skipped remainder|See https://nanobind|\[Gloo\] Rank \d+ is "
)
_OF_LAUNCHERS = re.compile(
    "RANK$|WORLD_|LOCAL_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|LOCKSTEP_|OMPI_|PMI_|PMIX_|SLURM_|PYTEST_"
)


def environment_of_a_command(**more: str) -> dict[str, str]:
    """Return this environment without variables of a launcher or pytest, and with a path to the
    package, the tests' tasks and those of scripts/; `python` is the one that runs the tests."""
    ours = {name: value for name, value in os.environ.items() if not _OF_LAUNCHERS.match(name)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**ours, "PATH": path, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", **more}


def launch(
    folder: Path,
    *words: str,
    launcher: tuple[str, ...] = (),
    verb: str = "trainer",
    is_session: bool = False,
    **environment: str,
) -> subprocess.Popen:
    """Start `python [launcher] -m verb words` in `folder`; with `is_session` signals can be sent to
    all its processes at once."""
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", verb, *words],
        cwd=folder,
        env=environment_of_a_command(**environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=is_session,
    )


def ended(process, limit_s: float = 120) -> tuple[int, str, str]:
    """Wait for a launch or a process of `command.start`; return (exit code, stdout, stderr)."""
    try:
        out, err = process.communicate(timeout=limit_s)
    finally:
        process.kill()
    return process.returncode, out, without_noise(err)


def finished(words: list[str], folder: Path, log: Path, limit_s: float = 400) -> tuple[int, str]:
    """Run a command in `folder`; return its exit code and its output, which is also in `log`.

    A process that it leaves behind cannot block the test, as it could with a pipe. After `limit_s`
    seconds all its processes are killed, and the code is None."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment_of_a_command(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            print(
                f"still running after {limit_s} s:", *map(command_of, descendants_of(process.pid))
            )
        finally:
            kill_with_descendants(process.pid)
            process.wait()
    return code, log.read_text()


def command_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return ""
    return f"\n{pid} {' '.join(words)}"


def without_noise(text: str) -> str:
    """Remove lines of torch: from gloo in 2.10 at its start, from triton in 2.15 with CUDA at its
    end."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not _NOISE.match(line))


def descendants_of(pid: int) -> list[int]:
    found = children_of(pid)
    return [*found, *(below for child in found for below in descendants_of(child))]


def ranks_of(process: subprocess.Popen) -> dict[int, int]:
    """Return rank to process id of the launcher's children; those of launch=spawn are numbered in
    their order."""
    found: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for child in children_of(process.pid):
            told = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            found |= {int(word[5:]): child for word in told if word.startswith(b"RANK=")}
            # its other child is Python's resource tracker
            if b"multiprocessing.spawn" in Path(f"/proc/{child}/cmdline").read_bytes():
                found[len(found)] = child
    return found


def kill_with_descendants(pid: int) -> None:
    """Send SIGKILL to the parent first, so that it restarts nothing, then to its descendants."""
    for each in (pid, *descendants_of(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
