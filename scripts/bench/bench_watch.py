"""Measure the cost of the watcher: the heartbeat and the check of the stop flag, per step.

    python scripts/bench/bench_watch.py [--steps N]

Prints one table: the microseconds per step that the loop spends on it, the median step of the tiny
model of bench_step.py on one rank and on two, their ratio, and the CPU time of the watcher.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
CALLS, ROUNDS = 20_000, 15


def cost(ranks: int) -> float:
    """Return the microseconds per step that the loop spends on heartbeat and stop flag."""
    from trainer.core.distributed.signals import StopRequest
    from trainer.core.distributed.watch.heartbeat import Heartbeat, Phase

    page = os.memfd_create("bench")
    os.ftruncate(page, mmap.PAGESIZE)
    stop, rounds = StopRequest(), []
    heartbeat = Heartbeat(memoryview(mmap.mmap(page, mmap.PAGESIZE)))
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for step in range(CALLS):
            bool(stop)
            heartbeat.begin_step(step)
            heartbeat.enter(Phase.COMPUTE)
            if ranks > 1:
                heartbeat.reduce_begun(None)
            heartbeat.enter(Phase.UPDATE)
            heartbeat.end_step()
        rounds.append((time.perf_counter() - began) / CALLS * 1e6)
    return statistics.median(rounds)


def run(steps: int) -> None:
    """Train as one rank; print the median time of a step and the CPU seconds of the watcher."""
    import torch
    from bench_step import BATCH, parts
    from torch.nn.functional import cross_entropy

    from trainer import Trainer, load_config

    times: list[float] = []

    class Tiny(Trainer):
        def build_model(self):
            return parts()[0]

        def build_dataset(self, split):
            return parts()[1] if split == "train" else None

        def loss(self, outputs, targets):
            return cross_entropy(outputs, targets, reduction="none")

        def train_step(self, batch):
            outcome = super().train_step(batch)
            times.append(time.perf_counter())
            if self.step + 1 == steps and self.world.local_rank == 0:
                seconds = times[-1] - times[0]
                gaps = torch.tensor(times[200:], dtype=torch.float64).diff()
                told = {
                    "step_us": float(gaps.median()) * 1e6,
                    "watcher": watcher_seconds() / seconds,
                }
                print("TOLD " + json.dumps(told), flush=True)
            return outcome

    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"run.dir={folder}",
            f"run.steps={steps}",
            f"data.global_batch={BATCH}",
            "log.every_steps=50",
            "run.norm_rows=null",
        ]
        Tiny(load_config(["task=cifar", "optim=sgd", "strategy.precision=fp32", *words])).fit()


def watcher_seconds() -> float:
    """Return the CPU seconds of the watcher, the child of this process."""
    pid = os.getpid()
    ticks = 0
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"watch.watcher" in Path(f"/proc/{child}/cmdline").read_bytes():
            ticks += sum(
                map(int, Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:13])
            )
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        return run(given.steps)
    print("ranks  watching us/step  median step us  ratio  watcher, of one core")
    for ranks in (1, 2):
        words = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={ranks}",
            __file__,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        words += ["--rank", f"--steps={given.steps // ranks}"]
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
        told = json.loads(
            next(line for line in done.stdout.splitlines() if line.startswith("TOLD "))[5:]
        )
        us = cost(ranks)
        print(
            f"{ranks:>5}  {us:>16.2f}  {told['step_us']:>14.0f}  {us / told['step_us']:>5.2%}"
            f"  {told['watcher']:>20.2%}"
        )


if __name__ == "__main__":
    main()
