"""Measure microseconds per step on a tiny model, and seconds from process start to the first step.

    python scripts/bench/bench_step.py [--rounds 5] [--steps 2000] [--only NAME ...] [--beside DIR]

Contestants take turns, each in a separate process, on one rank and on two; the table has medians
over the rounds and ratios to the bare loop, which reads its batches through a DataLoader.
Lightning, Fabric and Accelerate take part if they are installed: pip install -e '.[bench]'.

On one rank Lockstep is also compared with the bare step: forward, loss, backward, SGD and
zero_grad on one batch that stays in memory. Blocks of both alternate in one process, and the
overhead is the median of Lockstep's single steps minus that of the bare ones.

Two further rows are of steps that use more: a model with dropout, and two updates in a step.

`--beside DIR` adds the Lockstep of another checkout, to compare two commits in the same rounds.
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
from collections.abc import Callable
from pathlib import Path

BATCH, EXAMPLES, WIDTH, WARM, LOG_EVERY = 32, 32_000, 128, 200, 50
ROOT = Path(__file__).resolve().parents[2]
NEEDS = {
    "bare": "torch",
    "lockstep": "trainer",
    "dropout": "trainer",
    "two_updates": "trainer",
    "lightning": "lightning",
    "fabric": "lightning",
    "accelerate": "accelerate",
}
OURS = ("lockstep", "dropout", "two_updates")
BESIDE = " of DIR"  # after the name of one of ours
MEASURES = ("us_per_step", "first_step_s")


class Stopwatch:
    """Timer that is called once per step: it measures the first step, and blocks of LOG_EVERY steps
    after WARM.

    The result is the median of the blocks: each has one log, and other load affects few of them.
    `between` runs after every other block and is not timed; the block that follows it fills the
    caches again and is not counted. `single` has the steps of the counted blocks.
    """

    def __init__(self, steps: int, between: Callable[[], None] | None = None):
        self.steps = steps
        self.between = between
        self.count = 0
        self.blocks: list[float] = []
        self.single: list[float] = []
        self.began = self.last = 0.0
        self.is_timed = False

    def __call__(self) -> None:
        now = time.perf_counter()
        if self.is_timed:
            self.single.append(now - self.last)
        self.last = now
        self.count += 1
        if self.count == 1:
            self.first = time.time() - float(os.environ["BENCH_BEGUN"])
        if self.count >= WARM and self.count % LOG_EVERY == 0:
            if self.is_timed:
                self.blocks.append(time.perf_counter() - self.began)
            self.is_timed = self.between is None or not self.is_timed
            if self.between is not None and not self.is_timed:
                self.between()
            self.began = self.last = time.perf_counter()

    def result(self) -> dict[str, float]:
        return {
            "first_step_s": self.first,
            "us_per_step": 1e6 * statistics.median(self.blocks) / LOG_EVERY,
            "single_us": 1e6 * statistics.median(self.single),
        }


class BareStep:
    """The bare step on resident tensors; a call runs one block to fill caches, then a timed one."""

    def __init__(self) -> None:
        self.single: list[float] = []
        self.run_block: Callable[[list[float]], None] | None = None

    def __call__(self) -> None:
        if self.run_block is None:  # built after the first step, whose time is measured too
            self.run_block = self.build()
        self.run_block([])
        self.run_block(self.single)

    def build(self) -> Callable[[list[float]], None]:
        from torch.nn.functional import cross_entropy

        model, data, optimizer = parts()
        inputs, targets = data[:BATCH]

        def run_block(single: list[float]) -> None:
            for _ in range(LOG_EVERY):
                began = time.perf_counter()
                loss = cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                single.append(time.perf_counter() - began)

        return run_block

    def result(self) -> dict[str, float]:
        return {"bare_step_us": 1e6 * statistics.median(self.single)}


def parts():
    """Return the model, its data and its optimizer, the same for all contestants."""
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
    result = _loop(loader, model, optimizer, torch.Tensor.backward, steps, sampler)
    if ranks > 1:
        del model
        dist.barrier()
        dist.destroy_process_group()
    return result


def lockstep(steps: int, ranks: int) -> dict[str, float]:
    return _ours(steps, ranks, dropout=False, updates=1)


def dropout(steps: int, ranks: int) -> dict[str, float]:
    return _ours(steps, ranks, dropout=True, updates=1)


def two_updates(steps: int, ranks: int) -> dict[str, float]:
    return _ours(steps, ranks, dropout=False, updates=2)


def _ours(steps: int, ranks: int, dropout: bool, updates: int) -> dict[str, float]:
    from trainer import Trainer, load_config  # before torch, as on the command line

    bare_step = BareStep()
    watch = Stopwatch(steps, bare_step) if ranks == 1 else Stopwatch(steps)
    from torch import nn
    from torch.nn.functional import cross_entropy

    class Tiny(Trainer):
        def build_model(self):
            model = parts()[0]
            return model.insert(2, nn.Dropout(0.1)) if dropout else model

        def build_dataset(self, split):
            return parts()[1] if split == "train" else None

        def loss(self, outputs, targets):
            return cross_entropy(outputs, targets, reduction="none")

        def update(self, batch, *arguments):  # train_step stays the default, as in most tasks
            outcome = super().update(batch, *arguments)
            if not arguments:
                watch()
            return outcome

    class TwoUpdates(Tiny):
        def train_step(self, batch):
            return self.update(batch, self.loss, None, "first") + self.update(batch)

    with tempfile.TemporaryDirectory() as folder:
        overrides = ["task=cifar", "run.norm_rows=null", "optim=sgd", "optim.lr=0.01"]
        overrides.append("strategy.precision=fp32")
        overrides += [f"run.dir={folder}", f"run.steps={WARM + steps}"]
        overrides += [f"data.global_batch={BATCH}", f"log.every_steps={LOG_EVERY}"]
        (Tiny if updates == 1 else TwoUpdates)(load_config(overrides)).fit()
    return {**watch.result(), **(bare_step.result() if ranks == 1 else {})}


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
    return watch.result()


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
    """Run a hand-written loop around objects that a framework has prepared, or bare ones."""
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
                return watch.result()
    raise AssertionError("unreachable")


def measure(name: str, ranks: int, steps: int, beside: Path | None) -> dict[str, float]:
    """Run one contestant in separate processes and return the result that it prints."""
    is_beside = name.endswith(BESIDE) and beside is not None
    checkout = beside.resolve() if is_beside else ROOT
    contestant = name.removesuffix(BESIDE)
    words = [__file__, "--as", contestant, "--ranks", str(ranks), "--steps", str(steps)]
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
    environment["BENCH_BEGUN"] = str(time.time())
    done = subprocess.run([*launcher, *words], capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"first_step_s"')]
    if not lines:
        raise SystemExit(f"{name} on {ranks} ranks:\n{done.stderr[-2000:]}")
    return json.loads(lines[0])


def compare(names: list[str], rounds: int, steps: int, beside: Path | None) -> list[dict]:
    """Return a row of medians for each contestant and number of ranks; print rows as they come."""
    rows = []
    for ranks in (1, 2):
        turns = []
        for number in range(rounds):
            order = names if number % 2 == 0 else names[::-1]
            turns.append({name: measure(name, ranks, steps, beside) for name in order})
        added = {name: summarize(name, ranks, turns) for name in names}
        for row in added.values():
            print_row(row)
        for row in added.values():
            if "bare_step_us" in row:
                print_overhead(row)
        for name in OURS:
            if name + BESIDE in added:
                print_ratio(name, added[name], added[name + BESIDE])
        rows += added.values()
    return rows


def summarize(name: str, ranks: int, turns: list[dict]) -> dict:
    """Return the medians over the rounds, and the median ratios to the bare loop of each round."""
    row = {"ranks": ranks, "name": name}
    for key in MEASURES:
        row[key] = statistics.median(turn[name][key] for turn in turns)
        ratios = [turn[name][key] / turn["bare"][key] for turn in turns]
        row[f"{key} ratio"] = statistics.median(ratios)
    if "bare_step_us" in turns[0][name]:
        row["bare_step_us"] = statistics.median(turn[name]["bare_step_us"] for turn in turns)
        shares = [turn[name]["single_us"] / turn[name]["bare_step_us"] - 1 for turn in turns]
        row["overhead"] = statistics.median(shares)
    return row


def print_row(row: dict) -> None:
    step = "{us_per_step:7.0f} us/step  x{us_per_step ratio:.2f}".format(**row)
    start = "first step after {first_step_s:.2f} s  x{first_step_s ratio:.2f}".format(**row)
    print(f"{row['ranks']} ranks  {row['name']:<18} {step}   {start}", flush=True)


def print_overhead(row: dict) -> None:
    """Print the overhead over the bare step, and the start-up time relative to the bare loop."""
    bare = row["bare_step_us"]
    overhead = row["overhead"]  # both steps of a round had the same load, so the ratio is steadier
    share = f"{overhead * bare:.0f} of {bare:.0f} us, {100 * overhead:.0f} %"
    start = f"start to first step: {row['first_step_s ratio']:.2f} times the bare loop"
    print(f"{row['name']}: overhead over the bare step: {share}; {start}", flush=True)


def print_ratio(name: str, ours: dict, other: dict) -> None:
    """Print the ratios of the medians of two checkouts."""
    step, start = (ours[key] / other[key] for key in MEASURES)
    print(f"{name} / {name}{BESIDE}: step x{step:.3f}, start x{start:.3f}", flush=True)


def run_contestant(name: str, steps: int, ranks: int) -> None:
    """Measure in this process and print the result on rank 0."""
    warnings.filterwarnings("ignore")
    if name in OURS:
        import trainer

        imported = Path(trainer.__file__).resolve().parent.parent
        if str(imported) != os.environ["PYTHONPATH"]:
            raise SystemExit(f"imports trainer from {imported}, not from PYTHONPATH")
    result = globals()[name](steps, ranks)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--only", nargs="+", choices=NEEDS, default=[*NEEDS], metavar="NAME")
    parser.add_argument("--beside", type=Path, metavar="DIR", help="another checkout of Lockstep")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--as", dest="name", choices=NEEDS, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.name:
        run_contestant(given.name, given.steps, given.ranks)
        return
    if given.beside is not None and not (given.beside / "trainer").is_dir():
        parser.error(f"--beside {given.beside}: no checkout of Lockstep")
    wanted = {"bare", *given.only, *(["lockstep"] if given.beside else [])}
    names = [n for n, package in NEEDS.items() if n in wanted and importlib.util.find_spec(package)]
    if given.beside:
        names += [name + BESIDE for name in names if name in OURS]
    rows = compare(names, given.rounds, given.steps, given.beside)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
