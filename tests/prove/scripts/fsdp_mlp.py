"""An MLP in FSDP2 (fully_shard), with AdamW and clipping; `--fault` plants one mistake."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

fault = sys.argv[2] if len(sys.argv) > 2 else ""
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
data = TensorDataset(torch.randn(60, 10), torch.randn(60, 3))
model = nn.Sequential(
    *(nn.Sequential(nn.Linear(10, 10), nn.LayerNorm(10), nn.GELU()) for _ in range(2)),
    nn.Linear(10, 3),
)
for block in model[:2]:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
if fault == "summed":
    for block in (*model[:2], model):
        block.set_gradient_divide_factor(1.0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler = DistributedSampler(data, drop_last=True)
loader = DataLoader(data, 12 // dist.get_world_size() // int(sys.argv[1]), sampler=sampler)
micro = int(sys.argv[1])
for epoch in range(4):
    sampler.set_epoch(epoch)
    for number, (features, targets) in enumerate(loader, 1):
        loss = nn.functional.mse_loss(model(features), targets) / micro
        loss.backward()
        if number % micro:
            continue
        if fault == "local clip":
            norms = [each.grad.to_local().norm() for each in model.parameters()]
            norm = torch.stack(norms).norm()
            for each in model.parameters():
                each.grad.mul_((0.05 / norm).clamp(max=1).item())
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
