"""Measure images per second of the CIFAR-10 recipe: Lockstep and a bare script with the same net.

    python scripts/bench/bench_cifar.py [--rounds 3] [--steps 100] [--json FILE]  # bundled images
    python scripts/bench/bench_cifar.py --epochs 8 --batch 2000 --root data/cifar-10-batches-bin

The two take turns, each in a separate process, on one rank; results are medians over the rounds. On
a busy machine, use OMP_NUM_THREADS=1 and compare the CPU time per step (over all threads), which is
more reliable than the speed. With --epochs both also evaluate after every epoch and report the
accuracy that they reach, and the seconds from the first step to 94 %, evaluations included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

WARM, LOG_EVERY, GOAL, TOLD = 10, 10, 0.94, "told: "
WIDTHS, LR, BIAS_LR, HEAD_LR, SMOOTHING, LOSS_BATCH = [64, 256, 256], 0.24, 0.053, 0.67, 0.2, 2000


class Stopwatch:
    """Timer that is called once before the first step and then after every step."""

    def __init__(self, steps: int | None):
        import torch

        self.steps, self.count, self.seconds, self.cpu_seconds = steps, -1, 0.0, 0.0
        self.is_paused = True
        self.accuracies: list[tuple[float, float]] = []
        self.wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def __call__(self) -> None:
        self.count += 1
        if self.count == 0:
            self.first = time.perf_counter()
        if self.count == WARM:
            self.wait()
            self.resume()
        if self.steps is not None and self.count == WARM + self.steps:
            self.pause()

    def resume(self) -> None:
        self.is_paused = False
        self.began, self.cpu_began = time.perf_counter(), time.process_time()

    def pause(self) -> None:
        """Count the time since `resume`, once: the last evaluation follows the last step."""
        if self.is_paused:
            return
        self.is_paused = True
        self.wait()
        self.seconds += time.perf_counter() - self.began
        self.cpu_seconds += time.process_time() - self.cpu_began

    def reached(self, accuracy: float) -> None:
        self.accuracies.append((time.perf_counter() - self.first, accuracy))

    def told(self, batch: int) -> dict[str, float | None]:
        import torch

        steps = self.steps if self.steps is not None else self.count - WARM
        told = {
            "images_per_s": steps * batch / self.seconds,
            "cpu_ms_per_step": 1e3 * self.cpu_seconds / steps,
        }
        told["threads"] = torch.get_num_threads()
        if self.accuracies:
            told["accuracy"] = self.accuracies[-1][1]
            told["seconds"] = self.accuracies[-1][0]
            told["to_goal_s"] = next(
                (s for s, accuracy in self.accuracies if accuracy >= GOAL), None
            )
        return told


def bare(given: argparse.Namespace) -> dict[str, float | None]:
    """Train with a hand-written script that uses the net, Muon and files of the task."""
    import torch
    import torch.nn.functional as F

    from trainer.tasks.cifar import Muon, Net, normalize
    from trainer.tasks.data.cifar10 import load

    torch.manual_seed(given.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = "full" if given.root else "bundled"
    train, labels, _ = load("train", source, given.root or "")
    test, answers, _ = load("eval", source, given.root or "")
    model = Net(WIDTHS, True, normalize(train[:5000])).to(device)
    train, labels, test, answers = (
        t.to(device) for t in (normalize(train), labels, normalize(test), answers)
    )
    train = F.pad(train, (2, 2, 2, 2), "reflect").permute(0, 2, 3, 1).contiguous()
    is_mirrored = torch.randint(2, (len(train),), device=device).bool()

    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in trained if p.dim() == dim],
            "lr": lr * LOSS_BATCH,
            "weight_decay": 2e-6 / lr,
        }
        for dim, lr in ((1, BIAS_LR), (2, HEAD_LR))
    ]
    optimizers = [
        Muon([p for p in trained if p.dim() == 4], LR, 0.6, 3, dtype=torch.bfloat16),
        torch.optim.SGD(groups, momentum=0.85, nesterov=True, fused=True),
    ]
    steps_per_epoch = len(train) // given.batch
    total = WARM + given.steps if given.epochs is None else given.epochs * steps_per_epoch
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 - step / total) for o in optimizers
    ]
    places, rows = (
        torch.arange(32, device=device),
        torch.arange(given.batch, device=device)[:, None, None],
    )

    def batches():
        epoch = 0
        while True:
            order = torch.randperm(len(train), device=device)[: steps_per_epoch * given.batch]
            for chosen in order.split(given.batch):
                shift = torch.randint(0, 5, (2, given.batch), device=device)[:, :, None] + places
                images = train.index_select(0, chosen)[
                    rows, shift[0][:, :, None], shift[1][:, None]
                ]
                flip = is_mirrored.index_select(0, chosen) ^ (epoch % 2 == 1)
                images = torch.where(flip[:, None, None, None], images.flip(2), images).permute(
                    0, 3, 1, 2
                )
                yield images, labels.index_select(0, chosen)
            epoch += 1

    def evaluate() -> float:
        model.eval()
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            parts = zip(test.split(given.batch), answers.split(given.batch), strict=True)
            right = sum((model(images).argmax(1) == wanted).sum() for images, wanted in parts)
        model.train()
        return int(right) / len(test)

    watch = Stopwatch(None if given.epochs else given.steps)
    watch()
    for step, (images, wanted) in enumerate(batches()):
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images), wanted, label_smoothing=SMOOTHING)
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
        if (step + 1) % LOG_EVERY == 0:
            loss.item()
        watch()
        if given.epochs and (step + 1) % steps_per_epoch == 0:
            watch.pause()
            watch.reached(evaluate())
            watch.resume()
        if step + 1 == total:
            return watch.told(given.batch)
    raise AssertionError("batches never end")


def lockstep(given: argparse.Namespace) -> dict[str, float | None]:
    from trainer import load_config
    from trainer.tasks.cifar import Cifar

    watch = Stopwatch(None if given.epochs else given.steps)

    class Timed(Cifar):
        def build_dataset(
            self, split
        ):  # without --epochs there is no evaluation, not even at the end of the run
            return super().build_dataset(split) if given.epochs or split == "train" else None

        def train_step(self, batch):
            if watch.count < 0:
                watch()
            outcome = super().train_step(batch)
            watch()
            return outcome

        def evaluate(self):  # its time is not part of a step
            watch.pause()
            metrics = super().evaluate()
            watch.resume()
            return metrics

        def summarize(self, means):
            if self.step:
                watch.reached(means["accuracy"])
            return {}

    words = [
        "task=cifar",
        f"data.global_batch={given.batch}",
        f"log.every_steps={LOG_EVERY}",
        f"run.seed={given.seed}",
        "strategy.precision=amp_bf16",
        "eval.every_epochs=1",
    ]
    words += ["checkpoint.every_epochs=null", "checkpoint.keep_best=0"]
    words += [f"run.epochs={given.epochs}"] if given.epochs else [f"run.steps={WARM + given.steps}"]
    words += [f"task.options.root={given.root}" if given.root else "task.options.data=bundled"]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        Timed(load_config([*words, f"run.dir={folder}"])).fit()
    return watch.told(given.batch)


def measure(name: str, words: list[str], seed: int) -> dict[str, float | None]:
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, __file__, *words, "--as", name, "--seed", str(seed)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root}
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(TOLD)]
    if not lines:
        raise SystemExit(f"{name}:\n{done.stderr[-2000:]}")
    return json.loads(lines[0][len(TOLD) :])


def compare(given: argparse.Namespace, words: list[str]) -> dict:
    taken = []
    for number in range(given.rounds):
        names = ["bare", "lockstep"] if number % 2 == 0 else ["lockstep", "bare"]
        turn = {name: measure(name, words, number) for name in names}
        if turn["bare"]["threads"] != turn["lockstep"]["threads"]:
            raise SystemExit(f"the numbers of threads differ: {turn}")
        taken.append(turn)
        print(f"round {number + 1}: {json.dumps(turn)}", flush=True)
    ratio = statistics.median(
        turn["lockstep"]["images_per_s"] / turn["bare"]["images_per_s"] for turn in taken
    )
    result = {"command": " ".join(["python", *sys.argv]), "rounds": taken, "speed ratio": ratio}
    for name in ("bare", "lockstep"):
        found = {}
        for key in taken[0][name]:
            values = [turn[name][key] for turn in taken]
            found[key] = None if None in values else type(values[0])(statistics.median(values))
        result[name] = found
        line = f"{name:<9}{found['images_per_s']:10,.1f} images/s on {found['threads']} threads, "
        line += f"{found['cpu_ms_per_step']:8,.1f} ms of CPU time per step"
        if "accuracy" in found:
            goal = (
                f"{found['to_goal_s']:.1f} s"
                if found["to_goal_s"]
                else "- (not reached in every round)"
            )
            line += f"   {found['accuracy']:.2%} after {found['seconds']:.1f} s, 94 % after {goal}"
        print(line)
    cpu = statistics.median(
        turn["lockstep"]["cpu_ms_per_step"] / turn["bare"]["cpu_ms_per_step"] for turn in taken
    )
    result["cpu ratio"] = cpu
    print(f"Lockstep / bare script: images/s x{ratio:.3f}, CPU time per step x{cpu:.3f}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=100, help=f"steps measured after {WARM} to warm up"
    )
    parser.add_argument("--epochs", type=int, help="train so many epochs instead, and evaluate")
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--root", help="folder of the full CIFAR-10; default: bundled images")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--as", dest="name", choices=("bare", "lockstep"), help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.name:
        warnings.filterwarnings("ignore")
        print(TOLD + json.dumps(globals()[given.name](given)), flush=True)
        return
    result = compare(given, sys.argv[1:])
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
