"""One rank has a batch less and leaves the loop; the other one waits for its gradients."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

rank = int(os.environ.get("RANK", "0"))
ranks = int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
data = torch.randn(81, 6)
model = nn.Linear(6, 1)
if ranks > 1:
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))  # by default 30 minutes
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs in DataLoader(data[rank::ranks], 8 // ranks):
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if ranks > 1:
    dist.barrier()
