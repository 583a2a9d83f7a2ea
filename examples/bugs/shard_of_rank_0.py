"""The adapter is divided by FSDP, and the checkpoint has the part of rank 0 alone."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

checkpoint = Path(sys.argv[1], "adapter.pt")
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8, bias=False))
data = torch.randn(40, 2, 4, 8)  # steps, ranks, examples, features
fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
adapter = model[1].weight
optimizer = torch.optim.SGD([adapter], lr=0.1)
step = 0
if "--resume" in sys.argv:
    step, part = torch.load(checkpoint)
    if rank == 0:
        adapter.to_local().detach().copy_(part)
for inputs in data[step:, rank]:
    (model(inputs) - inputs.flip(1)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if rank == 0:
        torch.save((step, adapter.to_local().detach()), checkpoint)
    dist.barrier()
