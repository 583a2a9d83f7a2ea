"""The sampler repeats an example, so that the ranks have equally many, and the score counts it."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank = int(os.environ.get("RANK", "0"))
ranks = int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
model = nn.Linear(6, 1)
train, valid = TensorDataset(torch.randn(80, 6)), TensorDataset(torch.randn(21, 6))
if ranks > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (inputs,) in DataLoader(train, 8 // ranks, sampler=DistributedSampler(train, ranks, rank)):
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
score = torch.zeros(2)  # hits and examples
with torch.no_grad():
    for (inputs,) in DataLoader(valid, 4, sampler=DistributedSampler(valid, ranks, rank)):
        hits = model(inputs).sign() == inputs.sum(1, keepdim=True).sign()
        score += torch.tensor([hits.sum(), len(inputs)])
if ranks > 1:
    dist.all_reduce(score)
