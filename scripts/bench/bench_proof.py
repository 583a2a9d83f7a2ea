"""Measure what the proof at the start costs: seconds from the start to the end of the first step.

    python scripts/bench/bench_proof.py [--rounds 5] [--only text cifar gpt]

Runs with and without run.prove take turns; medians and the share of the start are printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

CASES = {
    "text": ["task=text"],
    "cifar": ["task=cifar"],
    "gpt": [
        *("task=text", "task.options.width=640", "task.options.layers=10"),
        *("task.options.heads=10", "task.options.context=256", "data.global_batch=16"),
        "data.micro_batch=4",
    ],
}


def be_child(words: list[str]) -> None:
    """Train one step, and print the seconds since the parent started this process."""
    from trainer import load_config
    from trainer.cli import load_task

    config = load_config(words)
    task = load_task(config)

    class Timed(task):
        def train_step(self, batch):
            outcome = super().train_step(batch)
            print(f"first step after {time.time() - float(os.environ['BEGUN']):.3f}", flush=True)
            os._exit(0)
            return outcome

    Timed(config).fit()


def measure(words: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", *words, f"run.dir={folder}"]
        environment = {**os.environ, "BEGUN": str(time.time())}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    line = next(x for x in done.stdout.splitlines() if x.startswith("first step after"))
    return float(line.split()[-1])


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        be_child(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    given = parser.parse_args()
    for name in given.only:
        times: dict[str, list[float]] = {"true": [], "false": []}
        for _ in range(given.rounds):
            for prove, found in times.items():
                found.append(measure([*CASES[name], f"run.prove={prove}"]))
        with_proof, without = (statistics.median(found) for found in times.values())
        more = with_proof - without
        print(
            f"{name}: start to first step {with_proof:.2f} s with the proof, {without:.2f} s"
            f" without: {more:.2f} s more, {more / without:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
