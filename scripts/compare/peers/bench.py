"""The contestants and their runs: real processes under torchrun, and the files that they write."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from harness.launch import environment_of_a_command, kill_with_descendants

from peers.hostile import plant
from peers.problem import KILL_STEP, Settings

LIMIT_S = 60
LOADED_LIMIT_S = 600  # for the start of a run on a busy machine
PEERS = Path(__file__).resolve().parent


def script(name: str) -> Callable[[Settings], list[str]]:
    return lambda settings: [str(PEERS / f"{name}_script.py")]


def lockstep(settings: Settings) -> list[str]:
    words = ["-m", "trainer", "--config-dir", str(PEERS / "conf"), "task=points"]
    words += [f"run.dir={settings.folder}", "run.name=run"]
    words += [f"task.options.dropout={settings.dropout}"]
    words += [f"checkpoint.every_steps={settings.save_every}"]
    words += [f"dist.hang_timeout_s={settings.timeout_s}"]
    if settings.accumulation > 1:
        words.append("data.micro_batch=5")  # of 12 rows: 5, 5 and 2
    if settings.resume:
        words.append("run.resume=auto")
    return words


@dataclass(frozen=True)
class Contestant:
    """A way to train. `checkpoint` matches the files of the last checkpoint before KILL_STEP."""

    title: str
    words: Callable[[Settings], list[str]]
    checkpoint: str
    packages: tuple[str, ...] = ("torch",)


CONTESTANTS = {
    "ddp": Contestant("plain DDP", script("ddp"), "checkpoint.pt"),
    "lightning": Contestant(
        "Lightning",
        script("lightning"),
        "checkpoints/last.ckpt",
        ("lightning", "torchmetrics", "torchdata"),
    ),
    "accelerate": Contestant(
        "Accelerate", script("accelerate"), "checkpoints/*10/*", ("accelerate",)
    ),
    "hf_trainer": Contestant(
        "HF Trainer", script("hf_trainer"), "checkpoints/*10/*", ("transformers",)
    ),
    "lockstep": Contestant(
        "Lockstep", lockstep, "points/run/checkpoints/*10/*", ("lockstep-trainer",)
    ),
}


@dataclass
class Done:
    """A run that has ended, or was killed after LIMIT_S."""

    folder: Path
    code: int | None
    seconds: float
    output: str

    def seen(self) -> dict[int, list[tuple[int, float]]]:
        """Return (example, loss) by step, over all ranks; for a repeated step, its last time."""
        steps: dict[int, list[tuple[int, float]]] = {}
        for path in self.folder.glob("seen-*.jsonl"):
            rows = read(path)
            for row in rows:
                later = [r for r in rows if r["session"] > row["session"]]
                if not later or row["step"] < min(r["step"] for r in later):
                    steps.setdefault(row["step"], []).extend(
                        zip(row["index"], row["loss"], strict=True)
                    )
        return dict(sorted(steps.items()))

    def last_steps(self) -> list[int]:
        """Return the last step of each rank."""
        return [read(path)[-1]["step"] for path in sorted(self.folder.glob("seen-*.jsonl"))]

    def resumed_at(self) -> int | None:
        """Return the first step of the second session; None if it made none."""
        rows = read(self.folder / "seen-0.jsonl")
        later = [row["step"] for row in rows if row["session"] > rows[0]["session"]]
        return min(later, default=None)

    def losses(self) -> dict[int, float]:
        """Return the mean over all examples of the global batch, by step."""
        return {step: fmean(loss for _, loss in rows) for step, rows in self.seen().items()}

    def logged(self, key: str) -> dict[int, float]:
        return {row["step"]: row[key] for row in read(self.folder / "logged.jsonl")}

    def has_aborted_at_exit(self) -> bool:
        """Return True if torch 2.13 ended a rank with SIGABRT after its work, as it may do."""
        return self.weights() is not None and "without an active exception" in self.output

    def weights(self) -> dict[str, torch.Tensor] | None:
        path = self.folder / "weights.pt"
        return torch.load(path) if path.exists() else None


def read(path: Path) -> list[dict]:
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


@dataclass
class Started:
    """A run that is still in progress."""

    process: subprocess.Popen
    settings: Settings
    output: Path

    def wait_for_step(self, step: int) -> None:
        """Wait until rank 0 has reached the step."""
        end = time.monotonic() + LOADED_LIMIT_S
        while not any(row["step"] == step for row in read(self.settings.path / "seen-0.jsonl")):
            if time.monotonic() > end or self.process.poll() is not None:
                raise SystemExit(f"no step {step}:\n{self.output.read_text()[-3000:]}")
            time.sleep(0.01)


class Bench:
    """Runs of one contestant; a run without a fault is made only once."""

    def __init__(self, name: str, folder: Path):
        self.contestant = CONTESTANTS[name]
        self.folder = folder
        self._runs: dict[tuple, Done] = {}

    def settings(self, name: str, **options: object) -> Settings:
        return Settings(str(self.folder / name), **options)  # type: ignore[arg-type]

    def run(self, ranks: int, **options: object) -> Done:
        """Return an undisturbed run."""
        key = (ranks, *sorted(options.items()))
        if key not in self._runs:
            name = "-".join([f"{ranks}", *(f"{k}-{v}" for k, v in key[1:])])
            done = self.finish(self.start(ranks, self.settings(name, **options)))
            if done.code != 0 and not done.has_aborted_at_exit():
                raise SystemExit(f"{self.contestant.title}, {key}:\n{done.output[-3000:]}")
            self._runs[key] = done
        return self._runs[key]

    def start(self, ranks: int, settings: Settings) -> Started:
        settings.path.mkdir(parents=True, exist_ok=True)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        output = settings.path / f"output-{len(list(settings.path.glob('output-*')))}"
        with output.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, *launcher, *self.contestant.words(settings)],
                cwd=settings.path,
                env=environment_of_a_command(**settings.environment()),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        return Started(process, settings, output)

    def finish(self, started: Started, limit_s: float = LOADED_LIMIT_S) -> Done:
        """Wait for the end; the exit code is None if the run did not end."""
        began = time.monotonic()
        try:
            code = started.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        kill_with_descendants(started.process.pid)
        started.process.wait()
        seconds = time.monotonic() - began
        return Done(started.settings.path, code, seconds, started.output.read_text())

    def killed(self, ranks: int = 2, dropout: float = 0.2) -> Done:
        """Run two ranks, SIGKILL all in the middle of the second epoch, and restart on `ranks`."""
        key = ("killed", ranks, dropout)
        if key not in self._runs:
            settings = self.kill(f"killed-{ranks}-{dropout}", 2, dropout=dropout)
            again = replace(settings, fault=None, resume=True)
            self._runs[key] = self.finish(self.start(ranks, again))
        return self._runs[key]

    def kill(self, name: str, ranks: int, **options: object) -> Settings:
        """Run until the middle of the second epoch, and SIGKILL all ranks."""
        settings = self.settings(name, fault="pause", **options)
        started = self.start(ranks, settings)
        started.wait_for_step(KILL_STEP)
        self.finish(started, 0)
        return settings

    def hostile(self) -> dict[str, bool]:
        """Resume from a checkpoint of which one file is hostile; return which files ran code."""
        settings = self.kill("saved", 1)
        ran = {}
        for file in sorted(settings.path.glob(self.contestant.checkpoint)):
            folder = self.folder / f"hostile-{file.name}"
            shutil.copytree(settings.path, folder, symlinks=True)
            marker = folder / "code-ran"
            plant(folder / file.relative_to(settings.path), marker)
            again = replace(settings, folder=str(folder), fault=None, resume=True)
            self.finish(self.start(1, again))
            ran[file.name] = marker.exists()
        return ran
