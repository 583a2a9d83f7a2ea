"""Shared by benchmarks: their options, contestants under torchrun, a model without Lockstep."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def options(doc: str | None, parts: Iterable[str], rounds: int) -> argparse.ArgumentParser:
    """Return a parser of --rounds, --only some of these parts, --json, and what `launch` gives."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--json", type=Path, metavar="FILE")
    for hidden in ("--as", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--words", nargs="+", help=argparse.SUPPRESS)
    return parser


def write(file: Path | None, found: Any) -> None:
    """Write what was found to the file of --json, if it was given."""
    if file:
        file.write_text(json.dumps(found, indent=1), encoding="utf-8")


def launch(script: str, name: str, words: list[str], ranks: int) -> list[Any]:
    """Run `script --as name --folder FOLDER --words ...` under torchrun with one thread per rank.

    Returns what each rank gave to `answer`. Raises SystemExit with what it printed if it failed.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        own = [script, "--as", name, "--folder", folder, "--words", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, *launcher, *own]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        files = [Path(folder) / f"found-{rank}.json" for rank in range(ranks)]
        if done.returncode:
            raise SystemExit(f"{name} {' '.join(words)}:\n{done.stderr[:4000]}")
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def answer(folder: str, found: Any) -> None:
    """Hand what this rank found to `launch`."""
    file = Path(folder) / f"found-{os.environ['RANK']}.json"
    file.write_text(json.dumps(found), encoding="utf-8")


def build_whole(words: list[str], folder: str) -> tuple[Any, Any, Any]:
    """Return (task, its data, its model) in a process group."""
    import torch
    import torch.distributed as dist

    from trainer import load_config
    from trainer.tasks.text import Text

    dist.init_process_group("gloo")
    config = load_config([*words, f"run.dir={folder}"])
    task = Text(config)
    data = task.build_dataset("train")
    torch.manual_seed(0)
    return task, data, task.build_model()


def build_plain(words: list[str], folder: str) -> tuple[Any, Any, Any, Any]:
    """Return (task, its data, its model, AdamW) with torch's fully_shard, as its docs write it."""
    import torch
    from torch.distributed.fsdp import fully_shard

    task, data, model = build_whole(words, folder)
    config = task.config
    for part in [*model.blocks, model]:
        fully_shard(part, reshard_after_forward=config.strategy.reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, betas=(0.9, 0.999))
    return task, data, model, optimizer
