"""Measure tokens per second, memory and the start of task=lm beside TRL's SFTTrainer.

    python scripts/bench/bench_lm.py --trl PYTHON [--model FOLDER] [--rounds 1] [--steps 5]

PYTHON is that of a venv with trl, transformers, peft and datasets. The model is SmolLM2-135M, or a
folder or GGUF file; the rows are the docstrings that are task=lm's default data and fit into the
context. Both read the same file, make tokens of it, and take the same rows in each step unless they
pack them; fp32, AdamW, clipped gradients, no activation checkpointing, one thread per rank.

Contestants take turns, each under torchrun. Tokens per second are of the median step, without
padding; so are the seconds of a processor that 1,000 tokens take on all ranks, which other load
changes less. Memory is the sum of the ranks' peaks in training. The start ends with the first step:
imports, weights, tokens, and for Lockstep the proof that the layout does not matter.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "compare"))
from harness.launch import kill_with_descendants
from peers.lm_launch import TITLES, read, start, versions
from peers.lm_problem import Settings

LIMIT_S = 1800
RANK, RATE, SEED = 8, 1e-4, 0
KINDS = {"lora": RANK, "full": None}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl", required=True, metavar="PYTHON", help="of a venv with trl")
    parser.add_argument("--model", help="folder or GGUF file; by default SmolLM2-135M")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4, help="rows of a step, over all ranks")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--packing", nargs="+", choices=("no", "yes"), default=["no", "yes"])
    parser.add_argument("--no-proof", action="store_true", help="Lockstep with run.prove=false")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    print(versions(given.trl), flush=True)
    found = []
    with tempfile.TemporaryDirectory(prefix="lockstep-lm-") as folder:
        problem = Problem(given, Path(folder))
        for kind, packing, ranks in itertools.product(given.kinds, given.packing, given.ranks):
            turns = []
            for number in range(given.rounds):
                order = [*TITLES] if number % 2 == 0 else [*TITLES][::-1]
                turns.append({n: problem.measure(n, ranks, kind, packing) for n in order})
            found.append(summarize(kind, packing, ranks, turns))
            print_row(found[-1])
            if given.json:
                given.json.write_text(json.dumps(found, indent=1) + "\n")


class Problem:
    """A model in a folder, and rows in the order in which Lockstep takes them."""

    def __init__(self, given: argparse.Namespace, folder: Path):
        self.given = given
        self.folder = folder
        self.rows = folder / "rows.jsonl"
        self.ordered = folder / "ordered.jsonl"
        self.evaluated = folder / "eval.jsonl"
        self.numbers = itertools.count()
        self.model = self._find_model()
        self._write_rows()

    def _find_model(self) -> str:
        from trainer.hf import loading as hf

        name = self.given.model
        if name is None:
            from harness.weights import smollm2

            name = str(smollm2())
        hf.fetch(name)
        return str(hf.find(name).folder.resolve())

    def _write_rows(self) -> None:
        import torch

        from trainer.core.data.sampling import Shuffle
        from trainer.hf import loading as hf
        from trainer.hf.chat.rows import open_source

        tokenizer = hf.load_tokenizer(self.model)
        rows = []
        for _, row in open_source(None, "task.options.data=null", 200, True).read():
            chat = row["messages"]
            text = tokenizer.apply_chat_template(chat, tokenize=False)
            if len(tokenizer(text)["input_ids"]) <= self.given.context:
                rows.append(json.dumps({"prompt": chat[:-1], "completion": chat[-1:]}) + "\n")
        self.evaluated.write_text(rows.pop())
        self.rows.write_text("".join(rows))
        order = Shuffle(len(rows)).order(SEED, 0, self.given.batch)
        self.ordered.write_text("".join(rows[i] for i in order(torch.arange(len(rows))).tolist()))
        print(f"{len(rows):,} rows of at most {self.given.context} tokens", flush=True)

    def measure(self, name: str, ranks: int, kind: str, packing: str) -> dict[str, float]:
        """Run one contestant, with empty caches, and return what it needed."""
        folder = self.folder / f"{name}-{next(self.numbers)}"
        settings = Settings(
            folder=str(folder),
            model=self.model,
            rows=str(self.rows if name == "lockstep" else self.ordered),
            eval=str(self.evaluated),
            batch=self.given.batch,
            micro_batch=self.given.batch // ranks,
            steps=self.given.steps,
            context=self.given.context,
            packing=packing == "yes",
            lora=KINDS[kind],
            optimizer="adamw",
            rate=RATE,
            is_watched=False,
            prove=not self.given.no_proof,
        )
        python = self.given.trl if name == "trl" else sys.executable
        own = {"XDG_CACHE_HOME": str(folder), "HF_DATASETS_CACHE": str(folder)}
        process, output = start(name, python, ranks, settings, **own)
        try:
            code = process.wait(LIMIT_S)
        finally:
            kill_with_descendants(process.pid)
        steps = [read(folder / f"steps-{rank}.jsonl") for rank in range(ranks)]
        if code or any(len(each) != self.given.steps for each in steps):
            raise SystemExit(f"{TITLES[name]}:\n{output.read_text()[-3000:]}")
        print(f"    {name}: {find_proof(output.read_text())}", flush=True)
        return needed(steps)


def find_proof(output: str) -> str:
    """Return the line of the proof at Lockstep's start, whose seconds are part of the start."""
    return next((line for line in output.splitlines() if line.startswith("proof")), "no proof")


def needed(steps: list[list[dict[str, Any]]]) -> dict[str, float]:
    """Return the measures of a run from the records of its ranks: [rank][step]."""
    speeds, costs = [], []
    for before, now in itertools.pairwise(zip(*steps, strict=True)):
        tokens = sum(each["tokens"] for each in now)
        seconds = max(a["time"] for a in now) - max(b["time"] for b in before)
        used = sum(a["cpu"] - b["cpu"] for a, b in zip(now, before, strict=True))
        speeds.append(tokens / seconds)
        costs.append(1e3 * used / tokens)
    return {
        "tokens_s": statistics.median(speeds),
        "cpu_s": statistics.median(costs),
        "peak": sum(each[-1]["peak"] for each in steps) / 1e9,
        "first_s": max(each[0]["time"] for each in steps),
        "first_cpu_s": sum(each[0]["cpu"] for each in steps),
    }


def summarize(
    kind: str, packing: str, ranks: int, turns: list[dict[str, dict[str, float]]]
) -> dict[str, Any]:
    """Return medians over the rounds, and the median ratios of Lockstep to TRL in each."""
    row: dict[str, Any] = {"kind": kind, "packing": packing, "ranks": ranks}
    for key in turns[0]["trl"]:
        for name in TITLES:
            row[f"{name} {key}"] = statistics.median(turn[name][key] for turn in turns)
        row[f"ratio {key}"] = statistics.median(
            turn["lockstep"][key] / turn["trl"][key] for turn in turns
        )
    return row


def print_row(row: dict[str, Any]) -> None:
    rows = "packed" if row["packing"] == "yes" else "padded"
    print(f"{row['kind']}, {rows}, {row['ranks']} ranks", flush=True)
    for key in [key for key in row if key.startswith("ratio ")]:
        key = key.removeprefix("ratio ")
        one, other = (f"{name} {row[f'{name} {key}']:.2f}" for name in TITLES)
        print(f"    {key:<12} {one}   {other}   ratio {row[f'ratio {key}']:.2f}", flush=True)


if __name__ == "__main__":
    main()
