"""A plain DDP script, all of which a task can take."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 4
BATCH_SIZE = 32


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, 3))

    def forward(self, x):
        return self.layers(x)


def rings(count, seed):
    generator = torch.Generator().manual_seed(seed)
    ring = torch.randint(3, (count,), generator=generator)
    turn, noise = torch.rand(2, count, generator=generator)
    points = torch.polar(1 + ring + noise, 6.2832 * turn)
    return TensorDataset(torch.view_as_real(points), ring)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Net())
    train_set = rings(1024, 0)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=BATCH_SIZE, sampler=sampler)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for points, ring in loader:
            optimizer.zero_grad()
            loss = criterion(model(points), ring)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
