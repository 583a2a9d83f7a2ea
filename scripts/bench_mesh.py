"""Measure seconds per step of sharded training beside torch's own functions for it, on two ranks.

    python scripts/bench_mesh.py [--rounds 5] [--steps 40] [--only NAME ...] [--json FILE]

Each pair trains the GPT of task=text (width 256, 4 blocks, fp32, AdamW, gradients clipped) under
torchrun with one thread per rank: once by Lockstep with all that a run does, and once by a loop as
torch's documentation writes it, over a DataLoader. Both take turns; the ratio is that of the
medians of all steps after the first ten. A ratio above 1 is the cost of Lockstep.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WARM, RANKS, ROWS, LOG_EVERY = 10, 2, 16, 10
MODEL = [
    *("task=text", "task.options.width=256", "task.options.dropout=0.0", "task.options.files=60"),
    *(f"data.global_batch={ROWS}", "strategy.precision=fp32", "eval.every_steps=null"),
    *("checkpoint.every_steps=null", f"log.every_steps={LOG_EVERY}"),
]
PAIRS = {
    "fsdp": ["strategy=fsdp"],
    "fsdp, parameters kept": ["strategy=fsdp", "strategy.reshard=false"],
}


def lockstep(words: list[str], steps: int, folder: str) -> list[float]:
    """Return the seconds of each step of a run."""
    from trainer import load_config
    from trainer.tasks.text import Text

    times: list[float] = []

    class Timed(Text):
        def train_step(self, batch: Any) -> Any:
            outcome = super().train_step(batch)
            times.append(time.perf_counter())
            return outcome

    config = load_config([*words, f"run.dir={folder}", f"run.steps={WARM + steps}"])
    Timed(config).fit()
    return [after - before for before, after in itertools.pairwise(times)]


def plain(words: list[str], steps: int, folder: str) -> list[float]:
    """Return the seconds of each step of a loop without Lockstep, for the same model and data."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader, DistributedSampler

    from trainer import load_config
    from trainer.tasks.text import Text

    dist.init_process_group("gloo")
    config = load_config([*words, f"run.dir={folder}"])
    task = Text(config)
    data = task.build_dataset("train")
    torch.manual_seed(0)
    model = task.build_model()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=config.strategy.reshard)
    fully_shard(model, reshard_after_forward=config.strategy.reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, betas=(0.9, 0.999))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, ROWS // RANKS, sampler=sampler, drop_last=True)
    times: list[float] = []
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for batch in loader:
            inputs, targets = task.split_batch(batch)
            values, weights = task.loss(model(inputs), targets)
            loss = (values * weights).sum() / weights.sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if len(times) % LOG_EVERY == 0:
                dist.all_reduce(loss.detach())
            times.append(time.perf_counter())
            if len(times) == WARM + steps:
                dist.destroy_process_group()
                return [after - before for before, after in itertools.pairwise(times)]
    raise AssertionError("unreachable")


CONTESTANTS: dict[str, Callable[[list[str], int, str], list[float]]] = {
    "lockstep": lockstep,
    "plain": plain,
}


def measure(contestant: str, pair: str, steps: int) -> list[float]:
    """Run a contestant under torchrun; return the seconds of its steps on rank 0."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    words = [__file__, "--as", contestant, "--only", pair, "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"steps"')]
    if not lines:
        raise SystemExit(f"{contestant}, {pair}:\n{done.stderr[-3000:]}")
    return json.loads(lines[0])["steps"]


def compare(pair: str, rounds: int, steps: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for number in range(rounds):
        for name in list(CONTESTANTS)[:: 1 if number % 2 == 0 else -1]:
            times[name] += measure(name, pair, steps)
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {**medians, "ratio": medians["lockstep"] / medians["plain"]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--as", dest="contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contestant:
        with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
            words = [*MODEL, *PAIRS[given.only[0]]]
            times = CONTESTANTS[given.contestant](words, given.steps, folder)
        if os.environ["RANK"] == "0":
            print(json.dumps({"steps": times[WARM - 1 :]}), flush=True)
        return 0
    found = {}
    for pair in given.only:
        found[pair] = compare(pair, given.rounds, given.steps)
        row = "lockstep {lockstep:.4f} s, torch alone {plain:.4f} s, x{ratio:.3f}"
        print(f"{pair:24}", row.format(**found[pair]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
