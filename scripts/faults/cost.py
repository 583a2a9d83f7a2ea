"""The cost of saving checkpoints."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from harness.launch import environment_of_a_command as environment

from faults.common import REPOSITORY, Row, folder

EPOCHS = 2
LIMIT = 3.5  # percent


def cost(amount: int, seed: int) -> Row:
    """Run task=cifar with checkpoints in the background at the default interval, and with only
    the last checkpoint, in turns."""
    row, stalls, saves = Row("run time that checkpoints add, at most 3.5 %", 1), [], []
    ratios: dict[str, list[float]] = {"seconds": [], "cpu": []}
    with folder() as base:
        for turn in range(amount):
            order = ("on", "off") if (turn + seed) % 2 == 0 else ("off", "on")
            taken = {name: _measure(base / f"{turn}-{name}", name == "on") for name in order}
            for key, found in ratios.items():
                found.append(100 * taken["on"][key] / taken["off"][key] - 100)
            stalls += taken["on"]["stalls"]
            saves += taken["on"]["saves"]
    over, turns = (
        statistics.median(ratios["seconds"]),
        ", ".join(f"{r:+.1f}" for r in ratios["seconds"]),
    )
    row.detail = (
        f"{over:+.1f} % of run time (turns {turns}), "
        f"{statistics.median(ratios['cpu']):+.1f} % of CPU time; "
    )
    row.detail += f"the loop stalls {1e3 * statistics.median(stalls):.1f} ms per save, "
    row.detail += f"torch.save of the same state takes {1e3 * statistics.median(saves):.1f} ms"
    row.note("overhead", None if over <= LIMIT else f"{over:.1f} % of run time")
    return row


def _measure(place: Path, is_on: bool) -> dict[str, Any]:
    """Run in a separate process; return its seconds, and for each save the stall of the loop and
    the time of torch.save on the same state."""
    place.mkdir()
    program = "import sys; from faults.numbers import timed; timed(*sys.argv[1:])"
    words = [sys.executable, "-c", program, str(place), "1" if is_on else "null"]
    done = subprocess.run(
        words, env=environment(), capture_output=True, text=True, timeout=600, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stderr[-500:]
    return json.loads((place / "timed.json").read_text())


def timed(place: str, every: str) -> None:
    """Run and measure in this process; the time of the extra torch.save is subtracted from its
    seconds."""
    from trainer import load_config
    from trainer.core.checkpoints.saver import Publisher, Snapshot
    from trainer.core.loop.run import Run
    from trainer.tasks.cifar import Cifar

    told: dict[str, Any] = {"stalls": [], "saves": []}
    beside = [0.0]
    cpu = [0.0]
    save = Run.save
    write = Publisher.save

    def stalled(self: Run) -> None:
        begun = time.perf_counter()
        before = beside[0]
        save(self)
        told["stalls"].append(time.perf_counter() - begun - (beside[0] - before))

    def written(self: Publisher, staging: str, snapshot: Snapshot) -> None:
        begun = time.perf_counter()
        used = time.thread_time()
        tensors = [[s.tensor for s in named.values()] for named in snapshot.shards.values()]
        with open(f"{place}/plain.pt", "wb") as file:
            torch.save([tensors, dict(snapshot.training)], file)
        told["saves"].append(time.perf_counter() - begun)
        beside[0] += time.perf_counter() - begun
        cpu[0] += time.thread_time() - used
        write(self, staging, snapshot)

    Run.save = stalled  # type: ignore[method-assign]
    Publisher.save = written  # type: ignore[method-assign]
    wanted = [
        f"run.epochs={EPOCHS}",
        f"run.dir={place}",
        f"checkpoint.every_epochs={every}",
        "checkpoint.keep_best=0",
    ]
    begun, used = time.perf_counter(), time.process_time()
    Cifar(load_config(["task=cifar", *wanted])).fit()
    told |= {
        "seconds": time.perf_counter() - begun - beside[0],
        "cpu": time.process_time() - used - cpu[0],
    }
    Path(place, "timed.json").write_text(json.dumps(told))
