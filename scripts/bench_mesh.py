"""Measure seconds per step of sharded training beside torch's own functions for it, on two ranks.

    python scripts/bench_mesh.py [--rounds 5] [--steps 40] [--only NAME ...] [--json FILE]

Each pair trains the GPT of task=text (width 256, 4 blocks, fp32, AdamW, gradients clipped) under
torchrun with one thread per rank: once by Lockstep with all that a run does, and once by a loop as
torch's documentation writes it, over a DataLoader. Both take turns; the ratio is that of the
medians of all steps after the first ten. A ratio above 1 is the cost of Lockstep.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from contest import answer, build_plain, launch, options, write

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


def lockstep(words: list[str], folder: str) -> list[float]:
    """Return the seconds of each step of a run."""
    from trainer import load_config
    from trainer.tasks.text import Text

    times: list[float] = []

    class Timed(Text):
        def train_step(self, batch: Any) -> Any:
            outcome = super().train_step(batch)
            times.append(time.perf_counter())
            return outcome

    Timed(load_config([*words, f"run.dir={folder}"])).fit()
    return [after - before for before, after in itertools.pairwise(times)]


def plain(words: list[str], folder: str) -> list[float]:
    """Return the seconds of each step of a loop without Lockstep, for the same model and data."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    task, data, model, optimizer = build_plain(words, folder)
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
            if len(times) == task.config.run.steps:
                dist.destroy_process_group()
                return [after - before for before, after in itertools.pairwise(times)]
    raise AssertionError("unreachable")


CONTESTANTS: dict[str, Callable[[list[str], str], list[float]]] = {
    "lockstep": lockstep,
    "plain": plain,
}


def compare(pair: str, rounds: int, steps: int) -> dict[str, float]:
    words = [*MODEL, *PAIRS[pair], f"run.steps={WARM + steps}"]
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for number in range(rounds):
        for name in list(CONTESTANTS)[:: 1 if number % 2 == 0 else -1]:
            times[name] += launch(__file__, name, words, RANKS)[0][WARM - 1 :]
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {**medians, "ratio": medians["lockstep"] / medians["plain"]}


def main() -> int:
    parser = options(__doc__, PAIRS, rounds=5)
    parser.add_argument("--steps", type=int, default=40)
    given = vars(parser.parse_args())
    if name := given["as"]:
        answer(given["folder"], CONTESTANTS[name](given["words"], given["folder"]))
        return 0
    found = {}
    for pair in given["only"]:
        found[pair] = compare(pair, given["rounds"], given["steps"])
        row = "lockstep {lockstep:.4f} s, torch alone {plain:.4f} s, x{ratio:.3f}"
        print(f"{pair:24}", row.format(**found[pair]), flush=True)
    write(given["json"], found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
