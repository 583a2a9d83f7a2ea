"""Measure milliseconds per step of nanoGPT: its own train.py, and a task with its model.

    python scripts/bench/bench_gpt.py --nanogpt DIR [--compile] [--accumulate 4] [--rounds 2]

DIR is a checkout of karpathy/nanoGPT, whose files are copied and not changed. The two take turns,
each in a process of its own: GPT-2 of 124 M parameters, 12 x 1,024 tokens a micro-batch, bf16
autocast, fused AdamW, clipped gradients, random tokens. MFU is nanoGPT's own formula over the peak
of the card's data sheet.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
FIRST = 10  # steps in which kernels are chosen and compiled
VOCABULARY, WIDTH, ROWS = 50_304, 768, 512
LR, BETAS, DECAY = 6e-4, (0.9, 0.95), 0.1
TOLD = "told: "


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nanogpt", type=Path, required=True, help="train.py, model.py, ...")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=12, help="rows of a micro-batch")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(TOLD + json.dumps(measure_lockstep(given)), flush=True)
        return
    found: dict[str, list[dict[str, float]]] = {"nanoGPT": [], "lockstep": []}
    for _ in range(given.rounds):
        found["nanoGPT"].append(run_script(given))
        found["lockstep"].append(run_lockstep(given))
    for name, rounds in found.items():
        times = ", ".join(f"{each['ms']:.2f}" for each in rounds)
        best = min(rounds, key=lambda each: each["ms"])
        mfu = told_mfu(best["ms"], found["nanoGPT"][0]["parameters"], given)
        print(f"{name:<9}{times} ms a step; first loss {best['loss']:.3f}; {mfu}")
    ratio = statistics.median(
        own["ms"] / other["ms"]
        for own, other in zip(found["lockstep"], found["nanoGPT"], strict=True)
    )
    print(f"lockstep takes {ratio:.3f} of the time of nanoGPT's train.py")


def told_mfu(ms: float, parameters: float, given: argparse.Namespace) -> str:
    """Return the part of the card's peak, by nanoGPT's formula."""
    import torch

    sys.path.insert(0, str(ROOT))
    from trainer.core.distributed.devices import find_known

    device = find_known(torch.cuda.get_device_name()) if given.device == "cuda" else None
    peak = device.peak("amp_bf16") if device is not None else None
    if peak is None:
        return "no MFU: the device's peak is not known"
    per_token = 6 * parameters + 12 * given.layers * WIDTH * given.context
    flops = per_token * given.context * given.rows * given.accumulate
    return f"MFU {flops / (ms / 1e3) / peak:.1%}"


# nanoGPT's script ---------------------------------------------------------------------------------


def run_script(given: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("train.py", "model.py", "configurator.py"):
            shutil.copy(given.nanogpt / file, folder)
        data = folder / "data" / "random"
        data.mkdir(parents=True)
        for split in ("train", "val"):
            tokens_of(given.context).tofile(data / f"{split}.bin")
        options = {
            "dataset": "random",
            "batch_size": given.rows,
            "block_size": given.context,
            "n_layer": given.layers,
            "gradient_accumulation_steps": given.accumulate,
            "max_iters": given.steps - 1,
            "eval_interval": 10**9,
            "eval_iters": 1,
            "always_save_checkpoint": False,
            "decay_lr": False,
            "compile": given.compile,
            "device": given.device,
            "dtype": "bfloat16",
        }
        words = [f"--{key}={value}" for key, value in options.items()]
        output = call([sys.executable, "train.py", *words], folder)
    times = re.findall(r"^iter (\d+): loss ([\d.]+), time ([\d.]+)ms", output, re.MULTILINE)
    steady = [float(ms) for number, _, ms in times if int(number) > FIRST]
    parameters = re.search(r"number of parameters: ([\d.]+)M", output)
    assert steady and parameters, output[-500:]
    return {
        "ms": statistics.mean(steady),
        "loss": float(times[0][1]),
        "parameters": float(parameters[1]) * 1e6,
    }


def tokens_of(context: int) -> np.ndarray:
    generator = np.random.default_rng(0)
    return generator.integers(VOCABULARY, size=ROWS * context + 1, dtype=np.uint16)


def call(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command[1]} failed:\n{done.stdout[-500:]}\n{done.stderr[-2000:]}")
    return done.stdout


# The task -----------------------------------------------------------------------------------------


def run_lockstep(given: argparse.Namespace) -> dict[str, float]:
    words = [word for word in sys.argv[1:] if word != "--measure"]
    with tempfile.TemporaryDirectory() as folder:
        script = str(Path(__file__).resolve())
        own = ["--nanogpt", str(given.nanogpt.resolve())]  # the last one counts
        output = call([sys.executable, script, *words, *own, "--measure", folder], Path(folder))
    told = next(line for line in output.splitlines() if line.startswith(TOLD))
    return json.loads(told[len(TOLD) :])


def measure_lockstep(given: argparse.Namespace) -> dict[str, float]:
    """Train the model of nanoGPT's model.py, and time its steps from FIRST to the last one."""
    sys.path[:0] = [str(ROOT), str(given.nanogpt)]
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch
    import torch.nn.functional as F
    from model import GPT, GPTConfig

    from trainer import ResidentDataset, Trainer, load_config

    class Logits(GPT):
        """Its forward computes all logits only together with a loss of its own."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            parts = self.transformer
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            x = parts.drop(parts.wte(tokens) + parts.wpe(positions))
            for block in parts.h:
                x = block(x)
            return self.lm_head(parts.ln_f(x))

    class NanoGPT(Trainer):
        times: list[float] = []  # noqa: RUF012

        def build_dataset(self, split: str) -> ResidentDataset:
            tokens = torch.from_numpy(tokens_of(given.context).astype(np.int64))
            windows = tokens[:-1].view(ROWS, -1), tokens[1:].view(ROWS, -1)
            return ResidentDataset(*windows, source="random tokens")

        def build_model(self) -> Any:
            settings = {"n_layer": given.layers, "bias": False, "dropout": 0.0}
            return Logits(GPTConfig(given.context, VOCABULARY, **settings))

        def blocks(self, model: Any) -> list[Any]:
            return list(model.transformer.h)

        def build_optimizer(self, model: Any) -> torch.optim.Optimizer:
            return model.configure_optimizers(DECAY, LR, BETAS, given.device)

        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
            return losses.view_as(targets)

        def train_step(self, batch: Any) -> Any:
            if self.step in (FIRST, given.steps - 1):
                if given.device == "cuda":
                    torch.cuda.synchronize()
                self.times.append(time.perf_counter())
            return super().train_step(batch)

    conf = Path(given.measure) / "conf" / "task"
    conf.mkdir(parents=True)
    (conf / "gpt.yaml").write_text(
        "# @package _global_\ntask: {name: gpt, trainer: __main__.NanoGPT, options: {}}\n"
        "optim: {lr: 6.0e-4}\n"
    )
    words = ["task=gpt", f"run.steps={given.steps}", "run.clip_norm=1"]
    words += [f"run.dir={given.measure}/runs", "strategy.precision=amp_bf16"]
    words += [
        f"data.micro_batch={given.rows}",
        f"data.global_batch={given.rows * given.accumulate}",
    ]
    words += [f"run.compile={str(given.compile).lower()}", "log.trackers=[]"]
    words += ["eval.every_epochs=null", "checkpoint.every_epochs=null"]
    trainer = NanoGPT(load_config(words, [str(conf.parent)]))
    trainer.fit()
    began, ended = NanoGPT.times
    metrics = next(Path(given.measure, "runs").rglob("metrics.jsonl")).read_text().splitlines()
    first = next(row for row in map(json.loads, metrics) if "train/loss" in row)
    return {
        "ms": 1e3 * (ended - began) / (given.steps - 1 - FIRST),
        "loss": first["train/loss"],
    }


if __name__ == "__main__":
    main()
