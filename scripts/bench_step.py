"""Microseconds per step around one tiny model, and seconds from process start to the first step, side by side.

    python scripts/bench_step.py [--rounds 5] [--steps 2000] [--json FILE]

Contestants take turns, each in a process of its own, on one rank and on two; medians and ratios to the bare loop.
Lightning, Fabric and Accelerate take part where they are installed: pip install -e '.[bench]'.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

BATCH, EXAMPLES, WIDTH, WARM, LOG_EVERY = 32, 32_000, 128, 200, 50
NEEDS = {
    "bare": "torch",
    "lockstep": "trainer",
    "lightning": "lightning",
    "fabric": "lightning",
    "accelerate": "accelerate",
}


class Stopwatch:
    """Called once per step: notes the first, and how long blocks of LOG_EVERY steps take after the warm-up.

    Of the blocks the median counts: each holds one log, and what else the machine does is in few of them.
    """

    def __init__(self, steps: int):
        self.steps, self.count = steps, 0
        self.marks: list[float] = []

    def __call__(self) -> None:
        self.count += 1
        if self.count == 1:
            self.first = time.time() - float(os.environ["BENCH_BEGUN"])
        if self.count >= WARM and self.count % LOG_EVERY == 0:
            self.marks.append(time.perf_counter())

    def told(self) -> dict[str, float]:
        blocks = [after - before for before, after in itertools.pairwise(self.marks)]
        return {
            "first_step_s": self.first,
            "us_per_step": 1e6 * statistics.median(blocks) / LOG_EVERY,
        }


def parts():
    """The model, its data and its optimizer: the same for all."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    inputs = torch.randn(EXAMPLES, 32)
    data = torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > 0).long())
    model = nn.Sequential(nn.Linear(32, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    return model, data, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def bare(steps: int, ranks: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    (model, data, optimizer), sampler = parts(), None
    if ranks > 1:
        dist.init_process_group("gloo")
        model, sampler = torch.nn.parallel.DistributedDataParallel(model), DistributedSampler(data)
    loader = DataLoader(
        data, BATCH // ranks, shuffle=sampler is None, sampler=sampler, drop_last=True
    )
    told = _loop(loader, model, optimizer, torch.Tensor.backward, steps, sampler)
    if ranks > 1:
        del model
        dist.barrier()
        dist.destroy_process_group()
    return told


def lockstep(steps: int, ranks: int) -> dict[str, float]:
    from torch.nn.functional import cross_entropy

    from trainer import Trainer, load_config

    watch = Stopwatch(steps)

    class Tiny(Trainer):
        def build_model(self):
            return parts()[0]

        def build_dataset(self, split):
            return parts()[1] if split == "train" else None

        def loss(self, outputs, targets):
            return cross_entropy(outputs, targets, reduction="none")

        def train_step(self, micro_batches):
            super().train_step(micro_batches)
            watch()

    with tempfile.TemporaryDirectory() as folder:
        wanted = [
            f"run.dir={folder}",
            f"run.steps={WARM + steps}",
            f"data.global_batch={BATCH}",
            "optim.lr=0.01",
        ]
        Tiny(
            load_config(
                [
                    "task=cifar",
                    "optim=sgd",
                    "strategy.precision=fp32",
                    f"log.every_steps={LOG_EVERY}",
                    *wanted,
                ]
            )
        ).fit()
    return watch.told()


def lightning(steps: int, ranks: int) -> dict[str, float]:
    from lightning.pytorch import LightningModule, Trainer
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader

    model, data, optimizer = parts()
    watch = Stopwatch(steps)

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, number):
            loss = cross_entropy(self.model(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return optimizer

        def on_train_batch_end(self, *arguments):
            watch()

    with tempfile.TemporaryDirectory() as folder:
        layout = {
            "accelerator": "cpu",
            "devices": ranks,
            "strategy": "ddp" if ranks > 1 else "auto",
        }
        quiet = {
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "log_every_n_steps": LOG_EVERY,
        }
        loop = Trainer(
            max_steps=WARM + steps,
            default_root_dir=folder,
            enable_progress_bar=False,
            **layout,
            **quiet,
        )
        loop.fit(Module(), DataLoader(data, BATCH // ranks, shuffle=True, drop_last=True))
    return watch.told()


def fabric(steps: int, ranks: int) -> dict[str, float]:
    from lightning.fabric import Fabric
    from torch.utils.data import DataLoader

    model, data, optimizer = parts()
    made = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    made.launch()
    model, optimizer = made.setup(model, optimizer)
    loader = made.setup_dataloaders(DataLoader(data, BATCH // ranks, shuffle=True, drop_last=True))
    return _loop(loader, model, optimizer, made.backward, steps)


def accelerate(steps: int, ranks: int) -> dict[str, float]:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    made = Accelerator(cpu=True)
    model, data, optimizer = parts()
    loader = DataLoader(data, BATCH // ranks, shuffle=True, drop_last=True)
    model, optimizer, loader = made.prepare(model, optimizer, loader)
    return _loop(loader, model, optimizer, made.backward, steps)


def _loop(loader, model, optimizer, backward, steps: int, sampler=None) -> dict[str, float]:
    """The loop that one writes by hand, around what a framework has prepared or nothing has."""
    from torch.nn.functional import cross_entropy

    watch = Stopwatch(steps)
    for epoch in itertools.count():
        if sampler is not None:
            sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            if watch.count % LOG_EVERY == 0:
                loss.item()
            watch()
            if watch.count == WARM + steps:
                return watch.told()
    raise AssertionError("unreachable")


def measure(name: str, ranks: int, steps: int) -> dict[str, float]:
    words = [__file__, "--as", name, "--ranks", str(ranks), "--steps", str(steps)]
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    root = str(Path(__file__).resolve().parent.parent)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": root,
        "BENCH_BEGUN": str(time.time()),
    }
    done = subprocess.run([*launcher, *words], capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"first_step_s"')]
    if not lines:
        raise SystemExit(f"{name} on {ranks} ranks:\n{done.stderr[-2000:]}")
    return json.loads(lines[0])


def compare(rounds: int, steps: int) -> list[dict]:
    names = [name for name, package in NEEDS.items() if importlib.util.find_spec(package)]
    rows = []
    for ranks in (1, 2):
        taken = [{name: measure(name, ranks, steps) for name in names} for _ in range(rounds)]
        for name in names:
            row = {"ranks": ranks, "name": name}
            for key in ("us_per_step", "first_step_s"):
                row[key] = statistics.median(turn[name][key] for turn in taken)
                row[f"{key} ratio"] = statistics.median(
                    turn[name][key] / turn["bare"][key] for turn in taken
                )
            rows.append(row)
            print(
                "{ranks} ranks  {name:<11} {us_per_step:7.0f} us/step  x{us_per_step ratio:.2f}   ".format(
                    **row
                ),
                end="",
            )
            print(
                "first step after {first_step_s:.2f} s  x{first_step_s ratio:.2f}".format(**row),
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--as", dest="name", choices=NEEDS, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.name:
        warnings.filterwarnings("ignore")
        told = globals()[given.name](given.steps, given.ranks)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(told), flush=True)
        return
    rows = compare(given.rounds, given.steps)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
