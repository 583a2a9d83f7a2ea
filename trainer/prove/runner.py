"""Runs of the user's commands, with the recorder in every Python process that they start."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.errors import ConfigError, shortened, visible
from trainer.prove.rank_reading import find_records

STARTUP = Path(__file__).with_name("startup")
VARIABLE = "LOCKSTEP_PROVE"
KILLED = "killed"  # file that the recorder makes at the step of the kill
LOADED = "loaded"  # file of the recorder, made as it is loaded
SHOWN_LINES = 12  # of a failed command
TRACEBACK_LINES = 24
PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)  # the shell takes it as it is, in quotes or not
FLAGS = r"[abd-ln-zA-Z]"  # -c and -m end Python's own
ISOLATED = re.compile(rf"\bpython[\d.]*(\s+-[XW]\s*\S+|\s+-{FLAGS}+)*?\s+-{FLAGS}*[IES]")
MOST_BYTES = 1 << 18  # of its output that are read for them
AGENT = re.compile(r"^[WE]\d{4} \S+ \d+ torch/distributed/elastic/multiprocessing/api", re.M)
GRACE_S = 5.0  # for the processes of a command that is ended
SILENCE_S = 60.0  # after the end of a rank, while others neither print nor record: they wait for it
POLL_S = 0.05


@dataclass(frozen=True)
class Recording:
    """How a command is recorded. `kill` is the number of steps after which it is killed."""

    steps: int
    dtype: str  # fp64 or native
    kill: int | None = None
    is_perturbed: bool = False  # first weights changed by their last bit, other thread count
    begun: float = field(default_factory=time.time)  # of the proof: files since then are new

    def variables(self, folder: Path) -> dict[str, str]:
        """Return the environment of a recorded command."""
        settings = {"folder": str(folder), "steps": self.steps, "dtype": self.dtype}
        settings |= {"kill": self.kill, "perturb": self.is_perturbed}
        settings["begun"] = self.begun
        settings["threads"] = 2 if self.is_perturbed else None
        paths = [str(STARTUP), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        programs = [*os.environ.get("PATH", "").split(os.pathsep), str(Path(sys.executable).parent)]
        return {
            **os.environ,
            VARIABLE: json.dumps(settings),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PATH": os.pathsep.join(programs),
            "PYTHONUNBUFFERED": "1",
        }


@dataclass(frozen=True)
class CommandRun:
    """A command that has ended: its records are in `folder`, its output in output.txt.

    `stopped` says why we ended it; "" if it ended by itself, or was killed at a step.
    """

    command: str
    folder: Path
    code: int
    stopped: str
    records: list[Path] = field(default_factory=list)

    @property
    def is_killed(self) -> bool:
        """Return True if the command came to the step at which it was to be killed."""
        return (self.folder / KILLED).exists()

    @property
    def is_complete(self) -> bool:
        """Return True if each rank with records came to the last step that is compared."""
        ranks = {each.name.split("-")[0].removeprefix("rank") for each in self.records}
        done = {each.name.removeprefix("done-") for each in self.folder.glob("done-*")}
        return bool(ranks) and ranks <= done

    @property
    def has_failed(self) -> bool:
        """Return True if the command ended by itself, and no rank made all steps successfully."""
        is_done = any(self.folder.glob("done-*")) or (self.code == 0 and self.records)
        return not self.stopped and not is_done

    def last_lines(self) -> str:
        """Return the traceback of the first rank that failed, or else the end of the output.

        The outputs of ranks are mixed, and a launcher adds its own report of the failure.
        """
        errors = sorted(self.folder.glob("error-*.txt"))
        of_ranks = [each for each in errors if not each.stem.endswith("-launcher")]
        if errors:
            text = _read_end((of_ranks or errors)[0])
            return _shorten(text.splitlines()[-TRACEBACK_LINES:])
        text = _read_end(self.folder / "output.txt")
        text = re.split(AGENT, text, maxsplit=1)[0] or text
        return _shorten(text.splitlines()[-SHOWN_LINES:])

    def check(self) -> None:
        """Raise ConfigError for a command that failed, or that made no optimizer step."""
        what = ""
        if not (self.folder / "output.txt").is_file():
            what = f"the records in {self.folder} are gone; the command may not delete that folder"
        elif not self.records and ISOLATED.search(self.command):
            what = "python -I, -E and -S load no recorder; run it without them"
        elif self.stopped and not self.records:
            advice = "read its last lines above, or give limit=SECONDS"
            what = f"{self.stopped} and made no step; {advice}"
        elif self.code != 0 and self.has_failed:
            what = f"failed with code {self.code}; read its last lines above"
        elif not self.records:
            what = self._explain_no_records()
        if what:
            print(self.last_lines(), file=sys.stderr)
            raise ConfigError(f"{self.command}: {what}")

    def _explain_no_records(self) -> str:
        if not (self.folder / LOADED).exists():
            why = "a Python with -I, -E or -S, or without PYTHONPATH, shuts it out"
            return f"no Python process of it loaded the recorder: {why}; run it without that"
        why = "in a Python process that keeps PYTHONPATH (no -I, -E or -S, no cleared environment)"
        return f"must step an optimizer of torch.optim, {why}; read its last lines above"


def _read_end(path: Path) -> str:
    """Return the end of a file, or "" if it is gone or no plain file."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _shorten(lines: Sequence[str]) -> str:
    return "\n".join(shortened(visible(line)) for line in lines)


@contextlib.contextmanager
def plain_path(folder: Path) -> Iterator[str]:
    """Yield a path to a folder that the shell takes as it is, wherever it is in a command.

    A name with spaces or other signs that the shell interprets is reached through a link.
    """
    if PLAIN.fullmatch(str(folder)):
        yield str(folder)
        return
    root = tempfile.gettempdir()
    root = root if PLAIN.fullmatch(root) else "/tmp"  # noqa: S108  # mkdtemp makes its own there
    place = Path(tempfile.mkdtemp(prefix="lockstep-dir-", dir=root))
    link = place / "dir"
    link.symlink_to(folder, target_is_directory=True)
    try:
        yield str(link)
    finally:
        link.unlink(missing_ok=True)
        place.rmdir()


def run_command(
    command: str, folder: Path, recording: Recording, limit_s: float, work: Path
) -> CommandRun:
    """Run a command in the shell with its output in a file, and return how it ended.

    `{dir}` in the command is the folder `work`.
    """
    folder.mkdir(parents=True)
    work.mkdir(exist_ok=True)
    stopped = ""
    with plain_path(work) as place, (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(  # noqa: S603  # the user's own command
            ["/bin/sh", "-c", command.replace("{dir}", place)],
            env=recording.variables(folder.absolute()),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            stopped = _wait(process, folder, limit_s)
        finally:
            _end(process, folder)
    return CommandRun(command, folder, process.returncode, stopped, find_records(folder))


def _wait(process: subprocess.Popen[bytes], folder: Path, limit_s: float) -> str:
    """Wait until a command ends, comes to its kill, or must be ended; return why it must be."""
    end = time.monotonic() + limit_s
    while not (folder / KILLED).exists():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
            return ""
        if time.monotonic() > end:
            return f"did not end within {limit_s:.0f} s"
        if not folder.is_dir():
            return "deleted the folder of its records"
        latest = _last_change(folder)
        if any(folder.glob("ended-*")) and time.time() - latest > SILENCE_S:
            return f"did nothing for {SILENCE_S:.0f} s after one of its ranks had ended,"
    return ""


def _last_change(folder: Path) -> float:
    """Return when a file in a folder was last written; files may go meanwhile."""
    times = [0.0]
    for each in folder.glob("*"):
        with contextlib.suppress(OSError):
            times.append(each.stat().st_mtime)
    return max(times)


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End all processes of a command, with time for its launcher unless it is to be killed.

    Ranks of torchrun are in sessions of their own, so processes are found by their environment.
    """
    try:
        if process.poll() is None and not (folder / KILLED).exists():
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        end = time.monotonic() + GRACE_S
        while (left := _find_processes(folder)) and time.monotonic() < end:
            for each in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            time.sleep(0.01)
        process.wait()


def _find_processes(folder: Path) -> list[int]:
    """Return the processes that record in a folder; none where there is no /proc."""
    mark = json.dumps(str(folder.absolute())).encode()
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in place.read_bytes():
                found.append(int(place.parent.name))
    return found
