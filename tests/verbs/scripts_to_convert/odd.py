"""Two optimizers in turn, a model by argument, no DataLoader: nothing that a task can take."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1 + rank)
if len(sys.argv) > 1:
    net = nn.Linear(3, 1)
else:
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
nn.init.zeros_(net[-1].bias)
net = DDP(net)
opts = [torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.Adam(net.parameters(), lr=1e-3)]
inputs = torch.randn(256, 3)[rank :: dist.get_world_size()]
targets = inputs.sum(1, keepdim=True)
step = 0
while step < 40:
    opt = opts[step % 2]
    rows = torch.randint(len(inputs), (16,))
    out = net(inputs[rows])
    loss = ((out - targets[rows]) ** 2).mean() + 1e-4 * sum(p.abs().sum() for p in net.parameters())
    opt.zero_grad()
    loss.backward()
    opt.step()
    step += 1
dist.destroy_process_group()
