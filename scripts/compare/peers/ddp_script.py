"""A plain DDP script after pytorch/examples, imagenet/main.py, in torchrun's environment.

Taken from there: DistributedSampler and set_epoch; a checkpoint of weights, optimizer, schedule and
epoch at the end of each epoch, after which a restart continues with the next epoch; each rank
prints its own loss; evaluation gives each rank an equal part, and the remaining examples to every
rank. Accumulation follows the DDP documentation: `no_sync()`, and the loss divided by the number of
micro-batches.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from peers.problem import (
    BATCH,
    EPOCHS,
    SEED,
    Points,
    Recorder,
    Settings,
    build_model,
    build_optimizer,
    build_schedule,
)


def main() -> None:
    settings = Settings.from_environment()
    recorder = Recorder(settings)
    dist.init_process_group("gloo", timeout=timedelta(seconds=settings.timeout_s))
    torch.manual_seed(SEED)
    model = DistributedDataParallel(build_model(settings.dropout))
    optimizer = build_optimizer(model)
    dataset = Points("train", settings.fault)
    sampler: DistributedSampler = DistributedSampler(dataset, seed=SEED)
    rows = BATCH // settings.accumulation // dist.get_world_size()
    loader = DataLoader(dataset, rows, sampler=sampler, drop_last=settings.drop_last)
    steps_per_epoch = -(-len(loader) // settings.accumulation)
    schedule = build_schedule(optimizer, EPOCHS * steps_per_epoch)
    checkpoint = settings.path / "checkpoint.pt"
    start_epoch = 0
    if settings.resume and checkpoint.exists():
        saved = torch.load(checkpoint)
        start_epoch = saved["epoch"]
        model.module.load_state_dict(saved["state_dict"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["scheduler"])
    for epoch in range(start_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        step = epoch * steps_per_epoch
        for number, (features, classes, indices) in enumerate(loader, 1):
            is_step = number % settings.accumulation == 0 or number == len(loader)
            with nullcontext() if is_step else model.no_sync():
                losses = recorder.losses(step, model(features), classes, indices)
                (losses.mean() / settings.accumulation).backward()
            if is_step:
                if dist.get_rank() == 0:
                    recorder.log(step, losses.mean().item(), schedule.get_last_lr()[0])
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                step += 1
        if dist.get_rank() == 0:
            state = {"epoch": epoch + 1, "state_dict": model.module.state_dict()}
            state |= {"optimizer": optimizer.state_dict(), "scheduler": schedule.state_dict()}
            torch.save(state, checkpoint)
    accuracy, counted = validate(model)
    if dist.get_rank() == 0:
        recorder.finish(model.module, accuracy, counted)
    # A group that ends before its wrappers, or while a rank uses it, aborts or hangs the exit.
    del model
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


@torch.no_grad()
def validate(model: DistributedDataParallel) -> tuple[float, int]:
    """Evaluate as imagenet/main.py does: an equal part on each rank, then the rest on all ranks."""
    model.eval()
    dataset = Points("eval")
    sampler: DistributedSampler = DistributedSampler(dataset, shuffle=False, drop_last=True)
    hits, counted = count(model, DataLoader(dataset, 8, sampler=sampler))
    sums = torch.tensor([hits, counted])
    dist.all_reduce(sums)
    rest = Subset(dataset, range(len(sampler) * dist.get_world_size(), len(dataset)))
    sums += torch.tensor(count(model, DataLoader(rest, 8)))
    return (sums[0] / sums[1]).item(), int(sums[1])


def count(model: DistributedDataParallel, loader: DataLoader) -> tuple[int, int]:
    """Return (number of right answers, number of examples)."""
    hits = 0
    counted = 0
    for features, classes, _ in loader:
        hits += int((model.module(features).argmax(1) == classes).sum())
        counted += len(classes)
    return hits, counted


if __name__ == "__main__":
    main()
