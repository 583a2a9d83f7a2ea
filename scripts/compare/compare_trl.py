"""Compare what stays the same in another layout when a language model learns: TRL's SFTTrainer and
task=lm.

    python scripts/compare/compare_trl.py --trl PYTHON [--only NAME ...] [--checks N ...]

PYTHON is that of a venv with trl, transformers, peft and datasets, so that its packages need not be
those of this project. Both train LoRA of rank 4 on a small new Llama in fp64, from the same
adapters, on the same batches of docstrings, by SGD with clipped gradients. The losses are those
that both compute, not those that they print. Kills are real.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import torch
from harness.launch import kill_with_descendants
from peers.lm_launch import TITLES, data_words, read, start, versions
from peers.lm_problem import KILL_STEP, Settings
from safetensors.torch import load_file

EQUAL = 1e-6
LIMIT_S = 900
RANK, CONTEXT, BATCH, STEPS, RATE, SEED = 4, 192, 12, 12, 0.5, 0
SAVE_EVERY = 3
EVAL = "eval.jsonl"
FEW = 12  # chats, which are one batch, packed or not
SIZES = ["task.options.width=32", "task.options.layers=2", "task.options.heads=2"]


def short(value: float) -> str:
    return f"{value:.0e}" if 0 < value < 0.001 else f"{value:.2g}"


# What both train ----------------------------------------------------------------------------------


class Problem:
    """A model, adapters and rows, as files that both contestants read."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.chats = folder / "chats.jsonl"
        self.few = folder / "few.jsonl"
        self.model = str(folder / "model")
        self.adapters = str(folder / "adapters")
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        self._write_chats()
        self._write_model()

    def _write_chats(self) -> None:
        from trainer.hf.chat.rows import open_source

        source = open_source(None, "task.options.data=null", 16, True)
        chats = [row["messages"] for _, row in source.read()]
        rows = [{"prompt": chat[:1], "completion": chat[1:]} for chat in chats]
        brief = [row for row in rows if len(row["prompt"][0]["content"]) < CONTEXT // 2]
        self.chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.few.write_text("".join(json.dumps(row) + "\n" for row in brief[:FEW]))
        self.chats.with_name(EVAL).write_text(json.dumps(brief[FEW]) + "\n")

    def _write_model(self) -> None:
        from trainer.core.rng import seed_all

        task = self.task(self.chats, SIZES)
        seed_all(SEED)
        model = task.build_model()
        model.base.save_pretrained(self.model)
        task.tokenizer.save_pretrained(self.model)
        task = self.task(self.chats, [f"task.options.model={self.model}"], RANK)
        seed_all(SEED)
        task.build_model().model.save_pretrained(self.adapters)

    def task(self, rows: Path, words: list[str], lora: int | None = None) -> Any:
        from trainer import load_config
        from trainer.tasks.lm import LM

        given = data_words(str(rows), str(rows.with_name(EVAL)), CONTEXT, lora)
        return LM(load_config(["task=lm", *words, *given, f"run.seed={SEED}"]))

    def tokens(self, rows: Path, packing: bool, steps: int, batch: int) -> str:
        """Write the rows that Lockstep takes, in its order and with its labels, for TRL."""
        place = self.folder / f"tokens-{rows.stem}-{packing}.jsonl"
        task = self.task(rows, [f"task.options.model={self.model}"])
        task.options.packing = packing
        task.prepare()
        data = task.build_dataset("train")
        order = self._order(len(data), steps, batch)
        with place.open("w") as file:
            for index in order:
                file.write(json.dumps(labelled(data[index])) + "\n")
        return str(place)

    def _order(self, size: int, steps: int, batch: int) -> list[int]:
        from trainer.core.data.sampling import Shuffle

        per_epoch = size // batch
        orders = Shuffle(size)
        found: list[int] = []
        for step in range(steps):
            order = orders.order(SEED, step // per_epoch, batch)
            first = step % per_epoch * batch
            found += order(torch.arange(first, first + batch)).tolist()
        return found

    def num_rows(self, rows: Path, packing: bool) -> int:
        task = self.task(rows, [f"task.options.model={self.model}"])
        task.options.packing = packing
        task.prepare()
        return len(task.build_dataset("train"))


def labelled(row: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    """Return a row of Lockstep as TRL takes it."""
    tokens = row["tokens"]
    labels = tokens.masked_fill(~row["learned"], -100)
    if "segments" not in row:
        return {"input_ids": tokens.tolist(), "labels": labels.tolist()}
    is_real = row["segments"] > 0
    lengths = row["segments"][is_real].unique_consecutive(return_counts=True)[1]
    return {
        "input_ids": tokens[is_real].tolist(),
        "labels": labels[is_real].tolist(),
        "seq_lengths": lengths.tolist(),
    }


# Their runs ---------------------------------------------------------------------------------------


@dataclass
class Done:
    """A run that has ended."""

    settings: Settings
    code: int | None
    output: str

    def losses(self) -> dict[int, float]:
        """Return the loss of each step over all ranks; of a repeated step, the last one."""
        rows = [row for file in self.settings.path.glob("seen-*.jsonl") for row in read(file)]
        found = {}
        for step in sorted({row["step"] for row in rows}):
            made = [row for row in rows if row["step"] == step]
            last = [row for row in made if row["resume"]] or made
            total = sum(row["loss"] for row in last)
            found[step] = total / (sum(row["count"] for row in last) or 1)
        return found

    def resumed_at(self) -> int | None:
        rows = read(self.settings.path / "seen-0.jsonl")
        return min((row["step"] for row in rows if row["resume"]), default=None)

    def adapter(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the adapter that the run wrote at its end."""
        files = sorted(self.settings.path.rglob("adapter_model.safetensors"))
        files = [f for f in files if "last" in f.parts or "export" in f.parts] or files
        return {name: value.double() for name, value in load_file(files[-1]).items()}

    @property
    def reason(self) -> str:
        """The line in which it says why it failed."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line and "ChildFailed" not in line]
        return (errors or lines or ["no output"])[0][-200:]


class Bench:
    """Runs of one contestant; a run without a fault is made only once."""

    def __init__(self, name: str, python: str, problem: Problem, folder: Path):
        self.name = name
        self.python = python
        self.problem = problem
        self.folder = folder
        self._runs: dict[str, Done] = {}

    def settings(self, ranks: int, **given: Any) -> Settings:
        words = [f"{k}-{v}" for k, v in given.items() if k != "rows"]
        rows = given.pop("rows", self.problem.chats)
        packing = given.get("packing", False)
        batch = given.pop("batch", BATCH)
        steps = given.pop("steps", STEPS)
        accumulation = given.pop("accumulation", 1)
        if self.name == "lockstep":
            given.pop("in_order", None)  # it always shuffles
        else:
            rows = self.problem.tokens(rows, packing, steps, batch)
        return Settings(
            folder=str(self.folder / "-".join([self.name, str(ranks), Path(rows).stem, *words])),
            model=self.problem.model,
            rows=str(rows),
            eval=str(self.problem.chats.with_name(EVAL)),
            batch=batch,
            micro_batch=batch // ranks // accumulation,
            steps=steps,
            context=CONTEXT,
            lora=RANK,
            adapters=self.problem.adapters,
            precision="fp64",
            rate=RATE,
            **given,
        )

    def run(self, ranks: int, **given: Any) -> Done:
        settings = self.settings(ranks, **given)
        if settings.folder not in self._runs:
            self._runs[settings.folder] = self.finish(ranks, settings)
        return self._runs[settings.folder]

    def finish(self, ranks: int, settings: Settings) -> Done:
        process, output = start(self.name, self.python, ranks, settings)
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        kill_with_descendants(process.pid)
        process.wait()
        return Done(settings, code, output.read_text())

    def kill(self, ranks: int, **given: Any) -> Settings:
        """Run until KILL_STEP, with a checkpoint before it, and SIGKILL all ranks."""
        settings = self.settings(ranks, fault="pause", save_every=SAVE_EVERY, **given)
        process, output = start(self.name, self.python, ranks, settings)
        end = time.monotonic() + LIMIT_S
        while not any(r["step"] == KILL_STEP for r in read(settings.path / "seen-0.jsonl")):
            if time.monotonic() > end or process.poll() is not None:
                raise SystemExit(f"no step {KILL_STEP}:\n{output.read_text()[-3000:]}")
            time.sleep(0.05)
        kill_with_descendants(process.pid)
        process.wait()
        return settings

    @cached_property
    def undisturbed(self) -> Done:
        return self.run(1)


# Checks -------------------------------------------------------------------------------------------


@dataclass
class Result:
    passed: bool
    figure: str


def compare(one: Done, other: Done) -> Result:
    """Compare losses of all steps, relatively, and adapters."""
    for run in (one, other):
        if run.code != 0:
            return Result(False, f"failed: {run.reason}")
    far = difference(one, other)
    apart = distance(one, other)
    figure = f"losses {short(far)}, adapters {short(apart)}"
    return Result(far < EQUAL and apart < EQUAL, figure)


def difference(one: Done, other: Done) -> float:
    first, second = one.losses(), other.losses()
    if first.keys() != second.keys():
        return float("inf")
    return max(abs(first[step] - second[step]) / abs(first[step]) for step in first)


def distance(one: Done, other: Done) -> float:
    first, second = one.adapter(), other.adapter()
    if first.keys() != second.keys():
        return float("inf")
    return max((first[name] - second[name]).abs().max().item() for name in first)


def same_on_two_ranks(bench: Bench) -> Result:
    """2 ranks: those of 1"""
    return compare(bench.undisturbed, bench.run(2))


def same_by_accumulation(bench: Bench) -> Result:
    """4 micro-batches of uneven lengths: those of 1"""
    return compare(bench.undisturbed, bench.run(1, accumulation=4))


def same_packed(bench: Bench) -> Result:
    """12 chats packed into fewer rows: those of 12 rows"""
    rows = bench.problem.few
    batch = bench.problem.num_rows(rows, packing=True)
    apart = bench.run(1, rows=rows, batch=FEW, steps=6)
    return compare(apart, bench.run(1, rows=rows, batch=batch, steps=6, packing=True))


def resumed_on_three_ranks(bench: Bench) -> Result:
    """Killed (SIGKILL) on 2 ranks, resumed on 3: those of an undisturbed run on 1"""
    settings = bench.kill(2, in_order=False)
    again = replace(settings, fault=None, resume=True, micro_batch=settings.batch // 3)
    done = bench.finish(3, again)
    return resumed(bench, done)


def sharded_adapter(bench: Bench) -> Result:
    """`fsdp` on 2 ranks: those of 1"""
    return compare(bench.undisturbed, bench.run(2, strategy="fsdp"))


def sharded_then_alone(bench: Bench) -> Result:
    """`fsdp` on 2 ranks, killed, loaded on 1: those of an undisturbed run on 1"""
    settings = bench.kill(2, strategy="fsdp", in_order=False)
    again = replace(settings, fault=None, resume=True, strategy="ddp", micro_batch=settings.batch)
    done = bench.finish(1, again)
    return resumed(bench, done)


def resumed(bench: Bench, done: Done) -> Result:
    """Compare a run that was killed with an undisturbed one."""
    found = compare(bench.run(1, in_order=False), done)
    return replace(found, figure=f"after step {done.resumed_at()}, {found.figure}")


CHECKS: list[Callable[[Bench], Result]] = [
    same_on_two_ranks,
    same_by_accumulation,
    same_packed,
    resumed_on_three_ranks,
    sharded_adapter,
    sharded_then_alone,
]


def title(check: Callable[[Bench], Result]) -> str:
    return (check.__doc__ or "").split("\n")[0]


# The table ----------------------------------------------------------------------------------------


def cell(result: Result) -> str:
    return f"{'**yes**' if result.passed else 'no'}: {result.figure}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = list(range(1, len(CHECKS) + 1))
    parser.add_argument("--trl", required=True, metavar="PYTHON", help="of a venv with trl")
    parser.add_argument("--only", nargs="+", choices=TITLES, default=[*TITLES])
    parser.add_argument("--checks", nargs="+", type=int, choices=numbers, default=numbers)
    parser.add_argument("--keep", type=Path, help="a folder for all files of the runs")
    given = parser.parse_args()
    told = versions(given.trl)
    pythons = {"trl": given.trl, "lockstep": sys.executable}
    with tempfile.TemporaryDirectory(prefix="lockstep-trl-") as scratch:
        folder = (given.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        problem = Problem(folder)
        benches = {name: Bench(name, pythons[name], problem, folder) for name in given.only}
        print(told)
        lines = ["|check|" + "|".join(TITLES[name] for name in benches) + "|"]
        lines.append("|-" * (len(benches) + 1) + "|")
        if len(benches) == 2:
            found = difference(*(bench.undisturbed for bench in benches.values()))
            print(f"losses of both on 1 rank differ by up to {short(found)}", flush=True)
        for number in given.checks:
            check = CHECKS[number - 1]
            cells = []
            for name, bench in benches.items():
                cells.append(cell(check(bench)))
                print(f"{TITLES[name]}, {number}. {title(check)}: {cells[-1]}", flush=True)
            lines.append("|" + "|".join([title(check), *cells]) + "|")
    print(f"\n{time.strftime('%Y-%m-%d')}: {told}\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
