"""Compare eager and compiled training of a task, and torch.compile in a hand-written loop.

usage: python scripts/bench/bench_compile.py [--rounds 3] [--steps 30] [--json FILE] task=text ...

Contestants: Lockstep as it is, with run.compile=true, and a loop over the task's model, loss,
optimizer and rows with torch.compile(model), whose dropout is torch's. Each runs in a process of
its own, with an empty cache of the compiler in the first round. Printed are medians of the rounds:
milliseconds of a step (the median of the steps after the tenth), and seconds to the first step.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONTESTANTS = ("eager", "compiled", "plain torch.compile")
WARM = 10


def lockstep(words: list[str], steps: int) -> list[float]:
    from trainer import load_config
    from trainer.cli import load_task

    times = [time.time()]
    with tempfile.TemporaryDirectory() as folder:
        own = [f"run.dir={folder}", f"run.steps={steps + WARM}", "log.trackers=[]"]
        own += ["eval.every_epochs=null", "eval.every_steps=null", "checkpoint.every_steps=null"]
        config = load_config([*words, *own])
        kind = load_task(config)

        class Timed(kind):
            def train_step(self, batch):
                outcome = super().train_step(batch)
                times.append(time.time())
                return outcome

        Timed(config).fit()
    return times[1:]


def plain(words: list[str], steps: int) -> list[float]:
    import torch

    from trainer import load_config
    from trainer.cli import load_task

    config = load_config(words)
    torch.manual_seed(0)
    kind = load_task(config)
    model = kind(config).build_model()
    task = type("Plain", (kind,), {"model": model})(config)  # a loss may read it
    data, optimizers = task.build_dataset("train"), task.build_optimizer(model)
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    compiled = torch.compile(model)
    from trainer import Random

    times = []
    for _ in range(steps + WARM):
        indices = torch.randint(0, len(data), (config.data.global_batch,))
        rows = tuple(tensor[indices] for tensor in data.tensors)
        inputs, targets = task.augment(
            *task.split_batch(rows), Random(0, "train", 0, indices), True
        )
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        loss = task.loss(compiled(*given), targets)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        times.append(time.time())
    return times


def run(name: str, words: list[str], steps: int) -> dict[str, float]:
    begun = float(os.environ["BENCH_BEGUN"])
    if name == CONTESTANTS[2]:
        times = plain(words, steps)
    else:
        times = lockstep([*words, f"run.compile={str(name == 'compiled').lower()}"], steps)
    spans = [1e3 * (after - before) for before, after in itertools.pairwise(times[WARM:])]
    return {"ms_per_step": statistics.median(spans), "first_step_s": times[0] - begun}


def measure(name: str, words: list[str], steps: int, cache: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--as", name, "--steps", str(steps), *words]
    environment = {**os.environ, "BENCH_BEGUN": str(time.time()), "PYTHONPATH": str(ROOT)}
    environment["TORCHINDUCTOR_CACHE_DIR"] = cache
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"ms_per_step"')]
    if not lines:
        raise SystemExit(f"{name}:\n{done.stdout[-500:]}\n{done.stderr[-2000:]}")
    return json.loads(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--as", dest="name", choices=CONTESTANTS, help=argparse.SUPPRESS)
    given, words = parser.parse_known_args()
    if given.name:
        print(json.dumps(run(given.name, words, given.steps)), flush=True)
        return
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory() as cache:
        for number in range(given.rounds):
            for name in CONTESTANTS if number % 2 == 0 else CONTESTANTS[::-1]:
                turns[name].append(measure(name, words, given.steps, cache))
    rows = []
    for name, results in turns.items():
        step = statistics.median(each["ms_per_step"] for each in results)
        first, later = results[0]["first_step_s"], results[-1]["first_step_s"]
        rows.append({"name": name, "ms_per_step": step, "cold_s": first, "warm_s": later})
        speed = rows[0]["ms_per_step"] / step
        line = f"{name:<20} {step:8.1f} ms/step  {speed:.2f} times eager's speed"
        print(f"{line}   first step after {first:.1f} s, {later:.1f} s with a cache", flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
