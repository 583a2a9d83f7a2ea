"""Ranks that hang or die: the others must end soon, and the report must name the rank."""

from __future__ import annotations

import re
import time
from pathlib import Path

from .probe import FATAL_STEP, VICTIM
from .runs import Here, launcher_of

HANG_S, LIMIT_S = 5, 15
LAUNCHERS = {
    "torchrun": (launcher_of(2), []),
    "launch=spawn": ([], ["launch=spawn", "launch.nproc_per_node=2"]),
}


def hang(here: Here) -> str:
    """Check that a rank stopped by a signal is named by the hang report, and that the others are
    ended."""
    here.needs_ranks(2)
    output, seconds = run_until_the_end(
        here, "Stopped", "torchrun", f"dist.hang_timeout_s={HANG_S}"
    )
    lines = [line for line in output.splitlines() if line.startswith("error: hang detected: ")]
    assert len(lines) == 1, f"{len(lines)} reports of a hang; {output[-300:]}"
    report = lines[0]
    named = report.split(";")[0]
    assert f"detected: rank {VICTIM} (" in named and "stopped by a signal" in named, report
    assert "rank 0 waits in" in report, report
    assert seconds < HANG_S + LIMIT_S, f"{report}; all ended only after {seconds:.0f} s"
    of_recorder = r"rank 0 waits in (\w+ number \d+ of .*)"
    call = re.search(of_recorder, output)
    assert call is not None, f"no collective is named; {output[-600:]}"
    return f"rank {VICTIM} is named, rank 0 waits in {call[1]}; all ended {seconds:.0f} s later"


def kill(here: Here) -> str:
    """Check that the other rank ends within seconds after one was killed, under two launchers."""
    here.needs_ranks(2)
    notes = []
    for launcher in LAUNCHERS:
        output, seconds = run_until_the_end(here, "Killed", launcher, "dist.hang_timeout_s=60")
        named = f"error: rank {VICTIM} (process "
        assert any(
            line.startswith(named) and "ended without an error message" in line
            for line in output.splitlines()
        ), f"{launcher}: no line names rank {VICTIM}; {output[-300:]}"
        assert seconds < LIMIT_S, f"{launcher}: the other rank ended only after {seconds:.0f} s"
        notes.append(f"{launcher} after {seconds:.1f} s")
    return f"rank {VICTIM} is named, and the other one ended: {', '.join(notes)}"


def run_until_the_end(here: Here, task: str, launcher: str, word: str) -> tuple[str, float]:
    """Run a task one of whose ranks gets a signal; return the output, and the seconds from the
    signal to the end of the launcher.

    Raises AssertionError if the run does not fail, or if a rank is left.
    """
    before, after = LAUNCHERS[launcher]
    name = f"{task.lower()}-{len(before)}"
    words = [*here.words(name), f"task.trainer=gpu_checks.probe.{task}", "strategy=ddp", word]
    words += here.backend_of(2)
    done = here.run([*words, *after], before)
    ended = time.time()
    output = done.stdout + "\n" + done.stderr
    signalled = re.search(r"signalled at ([\d.]+)", output)
    assert signalled, f"{launcher}: step {FATAL_STEP} was not reached; {output[-300:]}"
    assert done.returncode, f"{launcher}: exit code 0 after a lost rank"
    processes = re.findall(r"process (\d+) of rank (\d+)", output)
    left = [rank for process, rank in processes if is_running(process)]
    assert not left, f"{launcher}: rank {', '.join(left)} is still running"
    return output, ended - float(signalled[1])


def is_running(process: str) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
