"""A loss that is not finite on one rank, and the cost of saving checkpoints."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from harness.launch import environment_of_a_command as environment

from faults.common import REPOSITORY, Row, folder, random_of

BATCH, EXAMPLES = 22, 203


def nonfinite(amount: int, seed: int) -> Row:
    """Make one example NaN: the output names it and its rank, and no weight changes."""
    row, chance, hit = Row("loss not finite on one rank", amount), random_of(seed), Counter[str]()
    with folder() as base:
        for number in range(amount):
            size, example = chance.choice([2, 3]), chance.randrange(EXAMPLES)
            row.note(
                f"example {example} on {size} ranks",
                _poison(base / str(number), size, example, hit),
            )
    row.detail = (
        f"{hit['poisoned']} runs with poisoned weights, {hit['named']} named, "
        f"{hit['untaken']} not taken"
    )
    return row


def _poison(place: Path, size: int, example: int, hit: Counter[str]) -> str | None:
    from harness import on_ranks

    place.mkdir()
    found = on_ranks(size, _train_poisoned, place, example)
    taken = [
        rank
        for step in zip(*(seen for _, seen in found), strict=True)
        for rank, ids in enumerate(step)
        if example in ids
    ]
    if not taken:
        hit["untaken"] += 1
        return "the example was not taken within the run"
    is_clean = all(
        torch.isfinite(t).all() and torch.equal(t, found[0][0][n])
        for w, _ in found
        for n, t in w.items()
    )
    hit["poisoned"] += not is_clean
    said = "".join(path.read_text() for path in place.glob("rank-*.log"))
    lines = [line for line in said.splitlines() if "not finite" in line]
    is_named = any(re.search(rf"example {example}\b.*rank {taken[0]}\b", line) for line in lines)
    hit["named"] += is_named
    if not is_clean:
        return "weights are not finite, or not the same on all ranks"
    return None if is_named else f"rank {taken[0]} and example {example} are not named: {lines[:1]}"


def _train_poisoned(place: Path, example: int) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    """Train two epochs, so that each example is taken; return the final weights and the examples
    that this rank took."""
    from harness import fit

    from faults.task import Slow

    log = os.open(place / f"rank-{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    steps = 2 * (EXAMPLES // BATCH)
    run = fit(
        place,
        "task=tiny",
        *_slow_options(example),
        f"run.steps={steps}",
        "optim.lr=0.01",
        task=Slow,
    )
    return run["weights"], run["seen"]


def _slow_options(example: int) -> list[str]:
    return [
        "+task.options.pause_s=0.0",
        f"+task.options.poison={example}",
        "+task.options.build=''",
        "+task.options.build_s=0.0",
        "task.trainer=faults.task.Slow",
    ]


# Cost of saving -----------------------------------------------------------------------------------

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
