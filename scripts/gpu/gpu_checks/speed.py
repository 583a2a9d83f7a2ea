"""Speed: the CIFAR-10 recipe, and airbench94's own script beside it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from harness.launch import kill_with_descendants

from trainer import load_config
from trainer.core.distributed.devices import find_device, find_known
from trainer.tasks.cifar import Cifar

from .runs import Here, Skip, last_error, record_of

TURNS = 2
CONTESTANTS = ("airbench-eager", "lockstep", "lockstep-compiled", "airbench")
COMPILED = CONTESTANTS[2:]  # once
LIMIT_S = 180  # of a contestant


class Timed(Cifar):
    """CIFAR-10 that measures the seconds from its first step to each evaluation."""

    def train_step(self, batch):
        self.began = getattr(self, "began", time.perf_counter())
        self.accuracies = getattr(self, "accuracies", [])
        return super().train_step(batch)

    def summarize(self, means):
        if self.step:
            self.accuracies.append((time.perf_counter() - self.began, means["accuracy"]))
        return {}


def cifar(here: Here) -> str:
    """Train the CIFAR-10 recipe: on the full set with the paper's batch size and epochs, else on
    the bundled images with the task's own."""
    is_full = (Path(here.root) / "test_batch.bin").is_file()
    words = ["task=cifar", f"run.dir={here.folder}", f"task.options.root={here.root}"]
    if is_full:
        words += ["task.options.data=full", "data.global_batch=2000", "run.epochs=8"]
    else:
        words += [
            "task.options.data=bundled",
            *(["run.epochs=1"] if here.device.type == "cpu" else []),
        ]
    trainer = Timed(load_config(words))
    summary = trainer.fit()
    reached, goal = summary.metrics["eval/accuracy"], 0.94
    first = next((seconds for seconds, accuracy in trainer.accuracies if accuracy >= goal), None)
    note = (
        f"{'full' if is_full else 'bundled'} set: {reached:.2%} after "
        f"{trainer.accuracies[-1][0]:.1f} s with"
    )
    note += f" {len(trainer.accuracies)} evaluations, {summary.examples_per_s:,.0f} images/s"
    if is_full:
        note += f"; 94 % after {first:.1f} s" if first else "; 94 % was not reached"
    least = 0.93 if is_full else 0.78 if here.device.type == "cuda" else 0.2
    assert reached >= least, f"{note}, less than {least:.0%}"
    return note


PLANNED = [  # a GPT of 85 M parameters
    *["task.options.width=768", "task.options.layers=12", "task.options.heads=12"],
    *["task.options.context=1024", "task.options.dropout=0", "strategy.precision=amp_bf16"],
    *["data.global_batch=16", "log.every_steps=10", "eval.every_steps=null"],
]


def plan(here: Here) -> str:
    """Compare the memory and the time of trainer.check with those of a real run."""
    is_cuda = here.device.type == "cuda"
    known = find_known(torch.cuda.get_device_name()) if is_cuda else find_device("cpu", None)
    if known is None:
        raise Skip(f"{torch.cuda.get_device_name()} is not in the table of devices")
    words = PLANNED if is_cuda else []
    told = json.loads(here.call("check", "task=text", *words, f"device={known.name}", "--json"))
    run = here.launch("run", *words, "run.steps=30", recipe="text")
    last = [row for row in record_of(run) if "speed/examples_per_s" in row][-1]
    batch = told["batches"]["global_batch"]
    seconds = batch / last["speed/examples_per_s"]
    least, most = told["time"]["least_s"], told["time"]["most_s"]
    note = f"{1e3 * seconds:.1f} ms a step, planned {1e3 * least:.1f} to {1e3 * most:.1f}"
    if not is_cuda:
        return note
    memory, planned = last["speed/memory_gb"], told["total_bytes"] / 1e9
    note += f"; {memory:.2f} GB, planned {planned:.2f}; MFU {last['speed/mfu']:.0%}"
    assert 0.5 < memory / planned < 2, note
    return note


def airbench(here: Here) -> str:
    """Measure images/s of airbench94's own script and of task=cifar, eager and compiled, which take
    turns in processes of their own; write a profiler trace of each."""
    if not here.airbench:
        raise Skip("needs --airbench FILE, airbench94_muon.py of KellerJordan/cifar10-airbench")
    if here.device.type != "cuda":
        raise Skip("airbench94's script needs a GPU")
    if find_spec("torchvision") is None:
        raise Skip("airbench94's script needs torchvision")
    return take_turns(here)


def take_turns(here: Here) -> str:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTESTANTS}
    for turn in range(TURNS):
        for name in CONTESTANTS:
            if turn and name in COMPILED:
                continue
            trace = here.traces / f"trace_{name}.json.gz"
            more = ["--trace", str(trace)] if turn == TURNS - 1 or name in COMPILED else []
            found[name] += measure(here, name, here.folder / f"{name}-{turn}", more)
    notes = []
    for name, turns in found.items():
        speeds = [f"{turn['images_per_s']:,.0f}" for turn in turns]
        if not turns:
            notes.append(f"{name} was not done after {LIMIT_S} s")
            continue
        last = turns[-1]
        launches = f"{last['launches']:.0f} launches a step, GPU busy {last['busy']:.0%}"
        notes.append(f"{name} {' and '.join(speeds)} images/s, {launches}")
    best = {
        name: max(each["images_per_s"] for each in turns) for name, turns in found.items() if turns
    }
    pairs = (("lockstep", "airbench-eager"), ("lockstep-compiled", "airbench"))
    ratios = [f"{a} x{best[a] / best[b]:.2f} of {b}" for a, b in pairs if {a, b} <= best.keys()]
    return f"{'; '.join(notes)}; {', '.join(ratios)}; {found['lockstep'][0]['data']}"


def measure(here: Here, name: str, folder: Path, more: list[str]) -> list[dict[str, Any]]:
    """Run a contestant in a process of its own, in a new folder; return nothing if it takes too
    long, as the script's max-autotune may."""
    folder.mkdir()
    script = str(Path(here.airbench).resolve())
    files = ["--script", script, "--root", str(Path(here.root).resolve())]
    own = name.removesuffix("-eager")
    command = [sys.executable, "-m", "gpu_checks.contestants", own, *files, *more]
    eager = {"TORCHDYNAMO_DISABLE": "1"} if name != own else {}
    log = folder / "output"
    with log.open("w") as file:  # no pipe, which compiler processes would keep open
        done = subprocess.Popen(
            command, cwd=folder, stdout=file, stderr=file, env=here.environment(**eager)
        )
        try:
            code = done.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            kill_with_descendants(done.pid)
            done.wait()
            return []
    lines = log.read_text().splitlines()
    assert code == 0, f"{name}: {last_error(log.read_text())}"
    return [json.loads(next(line for line in reversed(lines) if line.startswith("{")))]
