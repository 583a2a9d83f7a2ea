"""Runs of the user's commands, with the recorder in every Python process that they start."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from trainer.errors import ConfigError, shortened, visible

STARTUP = Path(__file__).with_name("startup")
VARIABLE = "LOCKSTEP_PROVE"
KILLED = "killed"  # file that the recorder makes at the step of the kill
SHOWN_LINES = 12  # of a failed command
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

    def variables(self, folder: Path) -> dict[str, str]:
        """Return the environment of a recorded command."""
        settings = {"folder": str(folder), "steps": self.steps, "dtype": self.dtype}
        settings |= {"kill": self.kill, "perturb": self.is_perturbed}
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
    def has_failed(self) -> bool:
        """Return True if the command ended by itself, and no rank made all steps successfully."""
        is_done = any(self.folder.glob("done-*")) or (self.code == 0 and self.records)
        return not self.stopped and not is_done

    def last_lines(self) -> str:
        """Return the end of the command's output, without torchrun's report of the failure."""
        with (self.folder / "output.txt").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_BYTES))
            text = file.read().decode(errors="replace")
        text = re.split(AGENT, text, maxsplit=1)[0] or text
        return "\n".join(shortened(visible(line)) for line in text.splitlines()[-SHOWN_LINES:])

    def check(self) -> None:
        """Raise ConfigError for a command that failed, or that made no optimizer step."""
        what = ""
        if self.stopped and not self.records:
            advice = "read its last lines above, or give limit=SECONDS"
            what = f"{self.stopped} and made no step; {advice}"
        elif self.code != 0 and self.has_failed:
            what = f"failed with code {self.code}; read its last lines above"
        elif not self.records:
            what = "must step an optimizer of torch.optim; read its last lines above"
        if what:
            print(self.last_lines(), file=sys.stderr)
            raise ConfigError(f"{self.command}: {what}")


def run_command(
    command: str, folder: Path, recording: Recording, limit_s: float, work: Path
) -> CommandRun:
    """Run a command in the shell with its output in a file, and return how it ended.

    `{dir}` in the command is the folder `work`.
    """
    folder.mkdir(parents=True)
    work.mkdir(exist_ok=True)
    command_line = command.replace("{dir}", str(work))
    stopped = ""
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(  # noqa: S603  # the user's own command
            ["/bin/sh", "-c", command_line],
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
    records = sorted(folder.glob("rank*.jsonl"))
    return CommandRun(command, folder, process.returncode, stopped, records)


def _wait(process: subprocess.Popen[bytes], folder: Path, limit_s: float) -> str:
    """Wait until a command ends, comes to its kill, or must be ended; return why it must be."""
    end = time.monotonic() + limit_s
    while not (folder / KILLED).exists():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
            return ""
        if time.monotonic() > end:
            return f"did not end within {limit_s:.0f} s"
        latest = max(each.stat().st_mtime for each in folder.iterdir())
        if any(folder.glob("ended-*")) and time.time() - latest > SILENCE_S:
            return f"did nothing for {SILENCE_S:.0f} s after one of its ranks had ended,"
    return ""


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
