"""Measure seconds per step on a mesh beside torch's own functions for it, on two ranks.

    python scripts/bench/bench_mesh.py [--rounds 5] [--steps 40] [--only NAME ...] [--json FILE]

Each pair trains the GPT of task=text (width 256, 4 blocks, fp32, AdamW, gradients clipped) under
torchrun with one thread per rank: once by Lockstep with all that a run does, and once by a loop as
torch's documentation writes it, over a DataLoader: with fully_shard, with parallelize_module and
loss_parallel, or with Schedule1F1B of four micro-batches (the last two without clipping, which
refuses their mix of tensors, or needs a sum over the stages). Both take turns; the ratio is that of
the medians of all steps after the first ten. A ratio above 1 is the cost of Lockstep.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from contest import answer, build_plain, build_whole, launch, options, write

WARM, RANKS, ROWS, LOG_EVERY, PARTS = 10, 2, 16, 10, 4
MODEL = [
    *("task=text", "task.options.width=256", "task.options.dropout=0.0", "task.options.files=60"),
    *(f"data.global_batch={ROWS}", "strategy.precision=fp32", "eval.every_steps=null"),
    *("checkpoint.every_steps=null", f"log.every_steps={LOG_EVERY}"),
]
PAIRS = {
    "fsdp": ["strategy=fsdp"],
    "fsdp, parameters kept": ["strategy=fsdp", "strategy.reshard=false"],
    "tp": ["strategy=tp", "run.clip_norm=null"],
    "pp": ["strategy=pp", "run.clip_norm=null", f"data.micro_batch={ROWS // PARTS}"],
}


def lockstep(words: list[str], folder: str) -> list[float]:
    """Return the seconds of each step of a run."""
    from trainer import load_config
    from trainer.tasks.text import Text

    times: list[float] = []

    class Timed(Text):
        def update(self, *args: Any, **kwargs: Any) -> Any:
            outcome = super().update(*args, **kwargs)
            times.append(time.perf_counter())
            return outcome

    Timed(load_config([*words, f"run.dir={folder}"])).fit()
    return [after - before for before, after in itertools.pairwise(times)]


def plain(words: list[str], folder: str) -> list[float]:
    """Return the seconds of each step of a loop without Lockstep, for the same model and data."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    task, data, model, optimizer = build_plain(words, folder)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, ROWS // RANKS, sampler=sampler, drop_last=True)
    times: list[float] = []
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for batch in loader:
            inputs, targets = task.split_batch(batch)
            values, weights = task.loss(model(*inputs), targets)
            loss = (values * weights).sum() / weights.sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if len(times) % LOG_EVERY == 0:
                dist.all_reduce(loss.detach())
            times.append(time.perf_counter())
            if len(times) == task.config.run.steps:
                dist.barrier()
                dist.destroy_process_group()
                return [after - before for before, after in itertools.pairwise(times)]
    raise AssertionError("unreachable")


def by_parts(words: list[str], folder: str) -> list[float]:
    """Return the seconds of each step of a loop over the same rows on both ranks."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    task, data, step = (tensor_parallel if "strategy=tp" in words else pipeline)(words, folder)
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(data, ROWS, shuffle=True, drop_last=True, generator=generator)
    times: list[float] = []
    while True:
        for batch in loader:
            loss = step(*task.split_batch(batch))
            if len(times) % LOG_EVERY == 0:
                dist.all_reduce(loss)
            times.append(time.perf_counter())
            if len(times) == task.config.run.steps:
                dist.barrier()
                dist.destroy_process_group()
                return [after - before for before, after in itertools.pairwise(times)]


def tensor_parallel(words: list[str], folder: str) -> Any:
    """Return a task, its data, and a step with parallelize_module and loss_parallel."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    task, data, model = build_whole(words, folder)
    plan = {
        "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "blocks.*.attend": ColwiseParallel(),
        "blocks.*.project": RowwiseParallel(),
        "blocks.*.mlp.0": ColwiseParallel(),
        "blocks.*.mlp.2": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)
    model.head.weight = model.token.weight  # which it unties
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) is k] for k in (True, False)]
    optimizers = [torch.optim.AdamW(kind, lr=0.001) for kind in kinds]  # none takes a mix

    def step(inputs: Any, targets: Any) -> torch.Tensor:
        with loss_parallel():
            values, weights = task.loss(model(*inputs), targets)
            loss = (values.to_local() * weights).sum() / weights.sum()
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return task, data, step


def pipeline(words: list[str], folder: str) -> Any:
    """Return a task, its data, and a step with Schedule1F1B; embedding and head are not tied."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    task, data, model = build_whole(words, folder)
    rank = dist.get_rank()
    half = len(model.blocks) // 2

    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.position = model.token, model.position
            self.blocks = model.blocks[:half]

        def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self.blocks(self.token(tokens) + F.embedding(positions, self.position))

    last = torch.nn.Sequential(*model.blocks[half:], model.norm, model.head)
    part = last if rank else First()
    optimizer = torch.optim.AdamW(part.parameters(), lr=0.001)

    def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs.transpose(1, 2), targets, ignore_index=-100)

    stage = PipelineStage(part, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, PARTS, loss_of)

    def step(inputs: Any, targets: Any) -> torch.Tensor:
        tokens, is_there = targets
        losses: list[torch.Tensor] = []
        if rank:
            schedule.step(target=tokens.masked_fill(~is_there, -100), losses=losses)
        else:
            schedule.step(*(each.contiguous() for each in inputs))
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return task, data, step


CONTESTANTS: dict[str, Callable[[list[str], str], list[float]]] = {
    "lockstep": lockstep,
    "plain": lambda words, folder: (plain if "strategy=fsdp" in words else by_parts)(words, folder),
}


def compare(pair: str, rounds: int, steps: int) -> dict[str, float]:
    words = [*MODEL, *PAIRS[pair], f"run.steps={WARM + steps}"]
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for number in range(rounds):
        for name in list(CONTESTANTS)[:: 1 if number % 2 == 0 else -1]:
            times[name] += launch(__file__, name, words, RANKS)[0][WARM - 1 :]
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {**medians, "ratio": medians["lockstep"] / medians["plain"]}


def main() -> int:
    parser = options(__doc__, PAIRS, rounds=5)
    parser.add_argument("--steps", type=int, default=40)
    given = vars(parser.parse_args())
    if name := given["as"]:
        answer(given["folder"], CONTESTANTS[name](given["words"], given["folder"]))
        return 0
    found = {}
    for pair in given["only"]:
        found[pair] = compare(pair, given["rounds"], given["steps"])
        row = "lockstep {lockstep:.4f} s, torch alone {plain:.4f} s, x{ratio:.3f}"
        print(f"{pair:24}", row.format(**found[pair]), flush=True)
    write(given["json"], found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
