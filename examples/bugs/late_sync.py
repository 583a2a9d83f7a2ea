"""DDP is told to average the gradients after the forward pass, which is too late."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ.get("RANK", "0"))
ranks = int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
data = torch.randn(20, 4, 4, 6)  # steps, micro-batches of a step, examples, features
model = nn.Linear(6, 1)
if ranks > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accumulation = 4 // ranks
for step in data:
    for number, inputs in enumerate(step[rank::ranks]):
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        if ranks > 1:
            model.require_backward_grad_sync = number == accumulation - 1
        (loss / accumulation).backward()
    optimizer.step()
    optimizer.zero_grad()
