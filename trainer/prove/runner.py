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

from trainer.errors import ConfigError, visible

STARTUP = Path(__file__).with_name("startup")
VARIABLE = "LOCKSTEP_PROVE"
SHOWN_LINES = 12  # of a failed command
AGENT = re.compile(r"^[WE]\d{4} \S+ \d+ torch/distributed/elastic/multiprocessing/api", re.M)
GRACE_S = 5.0  # for the processes of a killed command


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
    """A command that has ended: its records are in `folder`, its output in output.txt."""

    command: str
    folder: Path
    code: int
    seconds: float
    limit_s: float
    records: list[Path] = field(default_factory=list)

    @property
    def is_late(self) -> bool:
        """Return True if the command was killed because its time was over."""
        return self.seconds >= self.limit_s

    def last_lines(self) -> str:
        """Return the end of the command's output, without torchrun's report of the failure."""
        text = (self.folder / "output.txt").read_text(encoding="utf-8", errors="replace")
        text = re.split(AGENT, text, maxsplit=1)[0] or text
        return "\n".join(visible(line) for line in text.splitlines()[-SHOWN_LINES:])

    def check(self) -> None:
        """Raise ConfigError for a command that failed, or that made no optimizer step."""
        what = ""
        if self.is_late and not self.records:
            what = f"did not end within {self.limit_s:.0f} s; give limit=SECONDS"
        elif self.code != 0 and not self.is_late:
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
    start = time.monotonic()
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
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        finally:
            _end_group(process)
    seconds = time.monotonic() - start
    records = sorted(folder.glob("rank*.jsonl"))
    return CommandRun(command, folder, code, seconds, limit_s, records)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what a command has left running in its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM if process.poll() is None else signal.SIGKILL)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
