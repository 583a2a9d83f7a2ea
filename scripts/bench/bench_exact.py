"""Measure the cost of dropout by example, groups of rows and strategy=exact: ratios of step times.

    python scripts/bench/bench_exact.py [--rounds 3] [--steps 30] [--json FILE]

Each pair trains a built-in task under torchrun on two ranks with one thread each, with and without
the feature, in turns. It compares the medians over all rounds of the seconds per example, from
metrics.jsonl without the first quarter. A ratio above 1 is the cost of the feature.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from contest import options, write

REPOSITORY = Path(__file__).resolve().parents[2]
EVERY = 2  # steps between two logs
COMMON = [
    *("checkpoint.every_epochs=null", "checkpoint.every_steps=null", "eval.every_epochs=null"),
    *("eval.every_steps=null", f"log.every_steps={EVERY}"),
]
TEXT = ["task=text", "data.micro_batch=4"]
CIFAR = ["task=cifar", "data.micro_batch=30", "strategy.precision=amp_bf16"]
# name: (with the feature, without it, the largest allowed ratio)
PAIRS = {
    "dropout by example, text": (["task=text"], ["task=text", "run.dropout=torch"], 1.03),
    "groups of 10 rows, cifar": (["task=cifar"], ["task=cifar", "run.norm_rows=null"], 1.05),
    "exact, text": ([*TEXT, "strategy=exact"], TEXT, 1.25),
    "exact, cifar": ([*CIFAR, "strategy=exact"], CIFAR, 1.25),
}


def train(folder: Path, words: list[str], steps: int) -> list[float]:
    """Train and return the seconds per example between two logs, without the warm-up."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    run = [f"run.dir={folder}", "run.name=run", f"run.steps={steps}"]
    command = [sys.executable, *launcher, "-m", "trainer", *words, *COMMON, *run]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    (file,) = folder.glob("*/run/metrics.jsonl")
    entries = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    config = json.loads((file.parent / "exit.json").read_text(encoding="utf-8"))
    assert config["code"] == 0
    speeds = [entry["speed/examples_per_s"] for entry in entries if "speed/examples_per_s" in entry]
    return [1 / speed for speed in speeds[len(speeds) // 4 :]]


def compare(name: str, rounds: int, steps: int) -> dict[str, float]:
    ours, theirs, aim = PAIRS[name]
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)  # neither is always first
        for which in order:
            with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
                times[which].extend(train(Path(folder), (ours, theirs)[which], steps))
    medians = [statistics.median(each) for each in times]
    return {"ratio": medians[0] / medians[1], "aim": aim, "rounds": rounds, "steps": steps}


def main() -> int:
    parser = options(__doc__, PAIRS, rounds=3)
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    found = {}
    for name in given.only:
        found[name] = compare(name, given.rounds, given.steps)
        print(f"{name:26} x{found[name]['ratio']:.3f}  (at most {found[name]['aim']})", flush=True)
    write(given.json, found)
    return int(any(each["ratio"] > each["aim"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
