"""A DDP script that forgot its sampler: every rank reads the same batches.

python train.py --batch-size 64
torchrun --nproc_per_node=2 train.py --batch-size 32
python train.py DIR, and after a kill: python train.py DIR --resume
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path, nargs="?", help="for a checkpoint of every step")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()
torch.manual_seed(0)
inputs = torch.randn(640, 16)
labels = inputs @ torch.randn(16, 4)
dataset = TensorDataset(inputs, labels.argmax(1))
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
step = 0
if options.resume:
    state = torch.load(options.folder / "last.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
if "RANK" in os.environ:
    dist.init_process_group("gloo")
wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
per_epoch = len(dataset) // options.batch_size
for epoch in range(step // per_epoch, 4):
    order = RandomSampler(dataset, generator=torch.Generator().manual_seed(epoch))
    for number, (rows, targets) in enumerate(
        DataLoader(dataset, options.batch_size, sampler=order)
    ):
        if epoch * per_epoch + number < step:
            continue
        loss = nn.functional.cross_entropy(wrapped(rows), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if options.folder and os.environ.get("RANK", "0") == "0":
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, options.folder / "last.pt")
if dist.is_initialized():
    del wrapped  # a wrapper that outlives its group can hang the exit
    dist.barrier()
    dist.destroy_process_group()
