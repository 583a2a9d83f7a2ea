"""Measure what checkpoint.mirror costs the loop: the time of a step without it, and with one.

    python scripts/bench/bench_mirror.py [--rounds N] [--steps N] [--only NAME ...] [--apart]

Pairs in turn, in alternating order: a run without a mirror, and one with it: in a folder, in moto's
S3 server (whose work is on the same cores, unless `--apart` keeps one core for servers and the
others for the runs), and in a server that answers each request after half a second. Prints the
medians of the pairs' ratios with their quartiles: of the median step, of the mean of all steps with
their saves, of which there is one each 20 steps, and of the process's CPU time, with all its
threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / each) for each in ("", "tests")]
SAVED_EVERY = 20
WARM_UP = 10
PLACES = ("folder", "moto", "slow")


def run(steps: int, mirror: str) -> None:
    """Train as one rank; print the seconds of a step: median, mean, and the mean of CPU time."""
    import torch
    from torch import nn

    from trainer import ResidentDataset, Trainer, load_config

    times: list[float] = []
    spent: list[float] = []

    class Wide(Trainer):
        """3 million parameters: with its optimizer's state a checkpoint has 24 MB."""

        def build_model(self):
            return nn.Sequential(nn.Linear(1000, 1500), nn.ReLU(), nn.Linear(1500, 1000))

        def build_dataset(self, split):
            inputs = torch.randn(512, 1000, generator=torch.Generator().manual_seed(0))
            return ResidentDataset(inputs, torch.arange(512)) if split == "train" else None

        def loss(self, outputs, targets):
            return nn.functional.cross_entropy(outputs, targets, reduction="none")

        def train_step(self, batch):
            outcome = super().train_step(batch)
            times.append(time.perf_counter())
            spent.append(time.process_time())
            return outcome

    with tempfile.TemporaryDirectory() as folder:
        words = [f"run.dir={folder}", f"run.steps={steps}", "data.global_batch=256"]
        words += [f"checkpoint.every_steps={SAVED_EVERY}", "run.norm_rows=null", "log.trackers=[]"]
        words += [
            "checkpoint.every_epochs=null",
            *([f"checkpoint.mirror={mirror}"] if mirror else []),
        ]
        Wide(load_config(["task=cifar", "optim=sgd", "strategy.precision=fp32", *words])).fit()
    own = times[WARM_UP - steps :]  # without those of the start's proof
    gaps = [after - before for before, after in pairwise(own)]
    cpu = (spent[-1] - spent[WARM_UP - steps]) / len(gaps)
    told = {"median": statistics.median(gaps), "mean": statistics.mean(gaps), "cpu": cpu}
    print("TOLD " + json.dumps(told), flush=True)


def measure(
    steps: int, mirror: str, environment: dict[str, str], cores: set[int]
) -> dict[str, float]:
    words = [sys.executable, __file__, "--steps", str(steps), "--rank", mirror]
    more = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        words,
        env=more,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    if not told:
        raise SystemExit(done.stdout + done.stderr)
    return json.loads(told[0].removeprefix("TOLD "))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="+", choices=PLACES, default=[*PLACES])
    parser.add_argument("--apart", action="store_true", help="keep one core for the servers")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        return run(given.steps, given.rank)
    from harness.s3 import proxied, serving_s3

    ratios: dict[str, list[dict[str, float]]] = {name: [] for name in given.only}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving_s3(Path(folder)) as server,
        proxied(server.environment["AWS_ENDPOINT_URL"]) as proxy,
    ):
        cores = keep_apart(server.process.pid) if given.apart else os.sched_getaffinity(0)
        proxy.slow_s = 0.5
        proxy.begin(lambda number, method, path: "slow")
        behind = {**server.environment, "AWS_ENDPOINT_URL": proxy.url}
        for number in range(given.rounds):
            places = {
                "folder": (f"file://{folder}/{number}/first", {}),
                "moto": (f"s3://data/moto-{number}", server.environment),
                "slow": (f"s3://data/slow-{number}", behind),
            }
            for name in given.only:
                pair = [("", {}), places[name]]
                turns = pair[:: 1 - 2 * (number % 2)]
                told = {place[0]: measure(given.steps, *place, cores) for place in turns}
                base, own = told[""], told[places[name][0]]
                ratios[name].append({key: own[key] / base[key] for key in base})
                print(name, {key: round(value, 3) for key, value in ratios[name][-1].items()})
    print(f"{'mirror':8}" + "".join(f"{key:>22}" for key in ("median", "mean", "cpu")))
    for name, found in ratios.items():
        cells = [spread([each[key] for each in found]) for key in ("median", "mean", "cpu")]
        print(f"{name:8}" + "".join(f"{cell:>22}" for cell in cells))


def keep_apart(server: int) -> set[int]:
    """Give new threads of a server and of this process the last core; return the others."""
    *others, last = sorted(os.sched_getaffinity(0))
    for process in (server, 0):
        os.sched_setaffinity(process, {last})
    return set(others)


def spread(values: list[float]) -> str:
    """Return the median with the quartiles."""
    low, middle, high = statistics.quantiles([*values] * (1 + (len(values) < 2)), n=4)
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


if __name__ == "__main__":
    main()
