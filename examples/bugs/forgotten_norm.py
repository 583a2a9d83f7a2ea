"""FSDP divides all weights but the norm's, and nobody adds up the gradients of those."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

rank = int(os.environ.get("RANK", "0"))
ranks = int(os.environ.get("WORLD_SIZE", "1"))
dist.init_process_group("gloo")
torch.manual_seed(0)
data = torch.randn(20, 8, 6)  # steps, examples, features
model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 1))
mesh = dist.init_device_mesh("cpu", (ranks,))
fully_shard(model, mesh=mesh, ignored_params=set(model[1].parameters()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in data:
    inputs = batch[rank::ranks]
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
