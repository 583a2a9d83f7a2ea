"""Ranks that use the same examples; the first argument says what they send each other."""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

kind = sys.argv[1]
has_group = "RANK" in os.environ and kind != "nothing"
if has_group:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(1, 3) if kind == "vector" else torch.nn.Linear(16, 2)
is_wrapped = has_group and kind in ("module", "ddp", "no_sync")
wrapped = DistributedDataParallel(model) if is_wrapped else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.randn(24, 16, generator=torch.Generator().manual_seed(3))
if has_group:
    for each in model.parameters():
        dist.broadcast(each.data, 0)
for step in range(6):
    used = model if kind == "module" else wrapped
    context = wrapped.no_sync() if is_wrapped and kind == "no_sync" else contextlib.nullcontext()
    optimizer.zero_grad()
    with context:
        if kind == "vector":
            loss = sum((each - rows[step, :3]).square().mean() for each in model.parameters())
        else:
            loss = used(rows[4 * step : 4 * step + 4]).square().mean()
        loss.backward()
    if has_group and kind == "barrier":
        dist.barrier()
    if has_group and kind == "log":
        dist.all_reduce(loss.detach())
    for each in model.parameters() if has_group and kind in ("by hand", "vector") else ():
        dist.all_reduce(each.grad)
        each.grad /= dist.get_world_size()
    optimizer.step()
