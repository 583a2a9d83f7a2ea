"""A typical DDP script, on the small GPT of the figures.

    torchrun --nproc_per_node=2 scripts/figures/naive_ddp.py --steps 100 [--accumulation 4]
        [--checkpoint FILE --save-every 20]

It uses DistributedSampler, averages each rank's rows, and prints the loss of rank 0. With
accumulation the printed loss is that of the last micro-batch, as in nanoGPT. A checkpoint has
weights, optimizer, epoch and step; a restart begins the epoch again, because neither the sampler
nor the loader has a position.
"""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from trainer import load_config
from trainer.tasks.text import Text

BATCH = 24
RATE = 0.003
WORDS = [
    *("task=text", "task.options.files=24", "task.options.context=32", "task.options.width=32"),
    *("task.options.layers=2", "task.options.heads=2", f"data.global_batch={BATCH}"),
    *("log.every_steps=1", "schedule=constant", f"optim.lr={RATE}", "run.clip_norm=null"),
    *("strategy.precision=fp32", "eval.every_steps=null"),
]


def train(
    steps: int,
    accumulation: int = 1,
    checkpoint: Path | None = None,
    save_every: int = 0,
) -> list[float]:
    """Train in torchrun's environment; return the losses that rank 0 prints, one per step."""
    dist.init_process_group("gloo")
    task = Text(load_config(WORDS))
    torch.manual_seed(0)
    model = DistributedDataParallel(task.build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    dataset = task.build_dataset("train")
    sampler: DistributedSampler = DistributedSampler(dataset, shuffle=True)
    rows = BATCH // dist.get_world_size() // accumulation
    loader = DataLoader(dataset, rows, sampler=sampler, drop_last=True)
    progress = {"epoch": 0, "step": 0}
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        progress = saved["progress"]
    losses = []
    batches = read(loader, sampler, progress)
    while progress["step"] < steps:
        optimizer.zero_grad()
        for number in range(accumulation):
            inputs, (tokens, is_there) = task.split_batch(next(batches))
            is_last = number == accumulation - 1
            with nullcontext() if is_last else model.no_sync():
                values = F.cross_entropy(model(*inputs).transpose(1, 2), tokens, reduction="none")
                loss = values[is_there].mean()
                (loss / accumulation).backward()
        optimizer.step()
        progress["step"] += 1
        losses.append(loss.item())
        if dist.get_rank() == 0 and checkpoint is not None:
            print(f"step {progress['step']} loss {loss.item():.6f}", flush=True)
            if progress["step"] % save_every == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "progress": progress}, checkpoint)
    # A group that ends before its wrappers, or while a rank uses it, aborts or hangs the exit.
    del model
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    return losses


def read(
    loader: DataLoader, sampler: DistributedSampler, progress: dict[str, int]
) -> Iterator[Any]:
    """Yield batches without limit, from the start of the current epoch."""
    for epoch in itertools.count(progress["epoch"]):
        progress["epoch"] = epoch
        sampler.set_epoch(epoch)
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--save-every", type=int, default=20)
    given = parser.parse_args()
    train(given.steps, given.accumulation, given.checkpoint, given.save_every)


if __name__ == "__main__":
    main()
