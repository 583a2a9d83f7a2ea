"""Measure images/s of 200 steps of 2,000 images: airbench94's own script, or task=cifar.

    PYTHONPATH=scripts:. python -m gpu_checks.contestants lockstep --root DIR [--trace FILE]
        [--runs 10]

Prints JSON as its last line. Both train on the full CIFAR-10 in --root, else on the bundled images
repeated to as many. With --trace a second run is profiled. With --runs each trains so many times
with its evaluations, and the accuracies and seconds are told instead. Files are written to the
working directory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer import ResidentDataset, load_config
from trainer.tasks.cifar import Cifar
from trainer.tasks.data.cifar10 import load

from .steps import Trace, observed_steps, synchronize

BATCH, STEPS = 2000, 200
FIRST = 50  # steps of the first epochs, in which kernels are chosen and compiled
TRACED = 5
IMAGES = {"train": 50_000, "eval": 10_000}
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def images_of(split: str, root: str) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return as many images as the full set has, repeated if only the bundled ones are there."""
    images, labels, source = load(split, "auto", root)
    times = IMAGES[split] // len(images)
    if times > 1:
        source = f"{source}, repeated {times} times"
    return images.repeat(times, 1, 1, 1), labels.repeat(times), source


# airbench94 ---------------------------------------------------------------------------------------


def warmed_up(root: str, script: str) -> tuple[Any, torch.nn.Module, list[dict[str, Any]]]:
    """Return the script as a module, its compiled model after the script's own warm-up, and the
    rows that it would print from now on."""
    write_data(root)
    module = load_script(script)
    rows: list[dict[str, Any]] = []
    module.print_training_details = lambda variables, is_final_entry: rows.append(dict(variables))
    model = module.CifarNet().cuda().to(memory_format=torch.channels_last)
    model.compile(mode="max-autotune")
    module.main("warmup", model)
    rows.clear()
    return module, model, rows


def airbench(root: str, script: str, trace: Trace | None) -> float:
    """Run `main` of the script after its own warm-up; return images/s of its training epochs."""
    module, model, rows = warmed_up(root, script)
    module.main(0, model)
    last = [row for row in rows if row["epoch"] != "eval"][-1]
    if trace is not None:
        with observed_steps(trace.observe):
            module.main(1, model)
    return last["step"] * last["batch_size"] / last["time_seconds"]


def airbench_runs(root: str, script: str, runs: int) -> list[dict[str, float]]:
    """Train so many times after the script's own warm-up.

    `own_s` is its own time, of training and of the last evaluation, without the others.
    """
    module, model, rows = warmed_up(root, script)
    found = []
    for run in range(runs):
        began = time.perf_counter()
        accuracy = module.main(run, model)
        synchronize()
        seconds = time.perf_counter() - began
        plain = [row for row in rows if row["epoch"] != "eval"][-1]["val_acc"]
        own = rows[-1]["time_seconds"]
        found.append({"accuracy": accuracy, "plain": plain, "seconds": seconds, "own_s": own})
    return found


def load_script(script: str) -> Any:
    """Import the script without its main block, which trains 200 times."""
    sys.argv = [script]  # which it reads
    spec = importlib.util.spec_from_file_location("airbench94", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["airbench94"] = module
    spec.loader.exec_module(module)
    return module


def write_data(root: str) -> None:
    """Write the files that the script makes of a download if they are not there."""
    folder = Path("cifar10")
    folder.mkdir(exist_ok=True)
    for split, name in (("train", "train.pt"), ("eval", "test.pt")):
        images, labels, _ = images_of(split, root)
        content = {"images": images.permute(0, 2, 3, 1).contiguous(), "labels": labels}
        torch.save({**content, "classes": CLASSES}, folder / name)


# Lockstep -----------------------------------------------------------------------------------------


class Timed(Cifar):
    """CIFAR-10 whose steps are timed from step FIRST to the last one."""

    root = ""

    def build_dataset(self, split):
        images, labels, source = images_of(split, self.root)
        return ResidentDataset(images, labels, source=source)

    def train_step(self, batch):
        if self.step in (FIRST, STEPS - 1):
            synchronize()
            self.times = [*getattr(self, "times", []), time.perf_counter()]
        return super().train_step(batch)


def lockstep(root: str, is_compiled: bool, trace: Trace | None) -> float:
    """Return images/s of the paper's recipe."""
    Timed.root = root
    words = ["task=cifar", "task.options.data=bundled", f"data.global_batch={BATCH}"]
    words += [f"run.steps={STEPS}", "run.norm_rows=null", "strategy.precision=amp_bf16"]
    words += [f"run.compile={str(is_compiled).lower()}", "eval.every_epochs=null"]
    words += ["checkpoint.every_epochs=null", "log.trackers=[]", "log.every_steps=50"]
    trainer = Timed(load_config([*words, "run.name=timed"]))
    trainer.fit()
    if trace is not None:
        with observed_steps(trace.observe):
            Timed(load_config([*words, "run.name=traced"])).fit()
    began, ended = trainer.times
    return (STEPS - 1 - FIRST) * BATCH / (ended - began)


class Whole(Cifar):
    """CIFAR-10 that notes the seconds from its first step to its last evaluation."""

    def train_step(self, batch):
        if self.step == 0:
            synchronize()
            self.began = time.perf_counter()
        return super().train_step(batch)

    def summarize(self, means):
        if self.step:
            seconds = time.perf_counter() - self.began
            self.told = {"accuracy": means["accuracy"], "seconds": seconds}
        return {}


def lockstep_runs(root: str, is_compiled: bool, runs: int) -> list[dict[str, float]]:
    """Train the paper's recipe so many times, from different seeds.

    It is evaluated at the end only, as in the script's own time.
    """
    words = ["task=cifar", f"task.options.root={Path(root).resolve()}", "run.epochs=8"]
    words += [f"data.global_batch={BATCH}", "run.norm_rows=null", "strategy.precision=amp_bf16"]
    words += [f"run.compile={str(is_compiled).lower()}", "eval.every_epochs=8"]
    words += ["checkpoint.every_epochs=null", "log.trackers=[]", "log.every_steps=25"]
    found = []
    for run in range(runs):
        trainer = Whole(load_config([*words, f"run.seed={run}", f"run.name=seed-{run}"]))
        trainer.fit()
        found.append(trainer.told)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    measures = {
        "airbench": airbench,
        "lockstep": partial(lockstep, is_compiled=False),
        "lockstep-compiled": partial(lockstep, is_compiled=True),
    }
    measures_of_runs = {
        "airbench": airbench_runs,
        "lockstep": partial(lockstep_runs, is_compiled=False),
        "lockstep-compiled": partial(lockstep_runs, is_compiled=True),
    }
    parser.add_argument("name", choices=measures)
    parser.add_argument("--script", default="", help="airbench94_muon.py")
    parser.add_argument("--root", default="data/cifar-10-batches-bin")
    parser.add_argument("--runs", type=int, help="train so often instead, with evaluations")
    parser.add_argument("--trace", type=Path, help="a file to write, .json or .json.gz")
    given = parser.parse_args()
    trace = Trace(given.trace, FIRST, TRACED) if given.trace else None
    own: dict[str, Any] = {"script": given.script} if given.name == "airbench" else {}
    if given.runs:
        found = measures_of_runs[given.name](given.root, runs=given.runs, **own)
        print(json.dumps({"runs": found}), flush=True)
        return
    speed = measures[given.name](given.root, trace=trace, **own)
    facts = trace.facts if trace is not None else {}
    source = images_of("eval", given.root)[2]
    print(json.dumps({"images_per_s": speed, "data": source, **facts}), flush=True)


if __name__ == "__main__":
    main()
