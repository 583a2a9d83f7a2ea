"""Start the runs of a check, and compare them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import newest
from harness.stored import tensors_of

from trainer import Summary, Trainer, load_config

from .probe import RECIPE, Probe

SCRIPTS = Path(__file__).resolve().parents[2]
LAYOUT = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


class Skip(Exception):
    """Raised when a check does not apply here."""


@dataclass
class Here:
    """Environment of a check.

    - `device`: the device to check.
    - `folder`: a scratch folder.
    - `root`: the folder of the full CIFAR-10, if it is there.
    - `airbench`: the file of airbench94's script, or "".
    - `traces`: the folder for traces.
    """

    device: torch.device
    folder: Path
    root: str
    airbench: str = ""
    traces: Path = Path()

    def needs(self, num_gpus: int) -> None:
        """Raise Skip if there are fewer GPUs. A rank on the CPU needs none."""
        found = self.count_gpus(num_gpus)
        if found < num_gpus:
            raise Skip(f"needs {num_gpus} GPUs; {found} found")

    def needs_ranks(self, ranks: int) -> None:
        """Raise Skip if there are fewer GPUs, and ranks cannot share one over NCCL."""
        if not self.shares(ranks):
            self.needs(ranks)

    def shares(self, ranks: int) -> bool:
        """Return True if ranks must share a GPU, and NCCL lets them."""
        is_let = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        return self.count_gpus(ranks) < ranks and is_let

    def backend_of(self, ranks: int) -> list[str]:
        """Return the override that ranks need which share a GPU over NCCL."""
        return ["dist.backend=nccl"] if self.shares(ranks) else []

    def count_gpus(self, on_cpu: int) -> int:
        """Return the number of GPUs; on the CPU return `on_cpu`."""
        return torch.cuda.device_count() if self.device.type == "cuda" else on_cpu

    def config_dir(self) -> str:
        file = self.folder / "conf" / "task" / "probe.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(RECIPE)
        return str(file.parent.parent)

    def words(self, name: str, task: str = "probe") -> list[str]:
        return [f"task={task}", f"run.dir={self.folder}", f"run.name={name}"]

    def fit(
        self, name: str, *overrides: str, task: type[Trainer] = Probe, recipe: str = "probe"
    ) -> tuple[Any, Summary]:
        """Train in this process."""
        words = [*self.words(name, recipe), *overrides]
        trainer = task(load_config(words, [self.config_dir()]))
        return trainer, trainer.fit()

    def launch(
        self,
        name: str,
        *overrides: str,
        ranks: int = 1,
        device: str | None = None,
        recipe: str = "probe",
    ) -> Path:
        """Train in separate processes, on several ranks or another device; return the run
        directory."""
        # all of the start, which has a table of the devices
        words = [*self.words(name, recipe), "log.start=full", *self.backend_of(ranks), *overrides]
        began = time.monotonic()
        done = self.run(words, launcher_of(ranks), device)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)  # if a check takes too long
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-8000:])  # kept with the check's result
            raise RuntimeError(last_error(done.stderr) or done.stdout[-300:])
        wanted = "cuda" if device != "cpu" and self.device.type == "cuda" else "cpu"
        assert wanted in done.stdout, f"{wanted} is not in the run's output:\n{done.stdout[:1500]}"
        return self.folder / recipe / name

    def run(
        self, words: Sequence[str], launcher: Sequence[str] = (), device: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the command of a training run, and return its output also if it fails."""
        return self._do(self.command(words, launcher), device)

    def call(self, verb: str, *words: str, device: str | None = None) -> str:
        """Run another command of the trainer, and return what it printed.

        Raises RuntimeError if it fails.
        """
        done = self._do([sys.executable, "-m", f"trainer.{verb}", *words], device)
        if done.returncode:
            raise RuntimeError(f"{verb}: {last_error(done.stderr)}")
        return done.stdout

    def _do(self, command: list[str], device: str | None) -> subprocess.CompletedProcess[str]:
        environment = self.environment(device)
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    def command(self, words: Sequence[str], launcher: Sequence[str] = ()) -> list[str]:
        own = ["-m", "trainer", "--config-dir", self.config_dir()]
        return [sys.executable, *launcher, *own, *words]

    def environment(self, device: str | None = None, **more: str) -> dict[str, str]:
        """Return the environment of a command, without the variables of a launcher."""
        kept = {key: value for key, value in os.environ.items() if key not in LAYOUT}
        own = [str(SCRIPTS / "gpu"), str(SCRIPTS.parent)]
        kept["PYTHONPATH"] = os.pathsep.join([*own, kept.get("PYTHONPATH", "")])
        if device == "cpu":
            kept["CUDA_VISIBLE_DEVICES"] = ""
        return {**kept, **more}


def launcher_of(ranks: int) -> list[str]:
    """Return torchrun's command for several ranks; one rank is started directly."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return torchrun if ranks > 1 else []


def last_error(text: str) -> str:
    """Return the first line that names an error; torchrun's own report follows it."""
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if "rror: " in line and "ChildFailedError" not in line]
    return (found or [line for line in lines if line] or [""])[0][:400]


# Comparisons --------------------------------------------------------------------------------------


def record_of(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def losses(directory: Path) -> dict[int, float]:
    return {r["step"]: r["train/loss"] for r in record_of(directory) if "train/loss" in r}


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return tensors_of(newest(directory))


def check_learned(curve: dict[int, float], name: str) -> None:
    values = list(curve.values())
    assert all(v is not None and math.isfinite(v) for v in values), f"{name}: a loss is not finite"
    assert min(values[-5:]) < 0.9 * values[0], (
        f"{name}: the loss went from {values[0]:.3f} to {values[-1]:.3f}"
    )


def check_equal_bits(one: Path, other: Path, what: str) -> None:
    """Check that the losses and the last weights of two runs are equal in every bit."""
    ours, theirs = weights(one), weights(other)
    differing = [name for name, weight in ours.items() if not torch.equal(weight, theirs[name])]
    assert not differing, f"{what}: different bits in {', '.join(differing)}"
    assert losses(one) == losses(other), f"{what}: different losses"


def distance(one: Path, other: Path) -> float:
    """Return the largest relative difference between the losses and weights of two runs."""
    a, b = losses(one), losses(other)
    assert a.keys() == b.keys() and a, f"steps {list(a)} and {list(b)}"
    found = [abs(a[step] - b[step]) / abs(a[step]) for step in a]
    ours, theirs = weights(one), weights(other)
    found += [
        relative(ours[name].double(), theirs[name].double())
        for name in ours
        if ours[name].is_floating_point()
    ]
    return max(found)


def relative(wanted: torch.Tensor, found: torch.Tensor) -> float:
    return float((wanted - found).norm() / wanted.norm().clamp_min(1e-300))


def at_most(found: float, most: float, what: str) -> str:
    assert found <= most, f"{what} by {found:.1e}, more than {most:.0e}"
    return f"{what} by {found:.1e}"
