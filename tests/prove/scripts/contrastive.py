"""Two encoders with a contrastive loss over the examples of all ranks; `--fault` plants one."""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Encoders(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Linear(8, 6)
        self.text = nn.Linear(5, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, images, texts):
        first = F.normalize(self.image(images), dim=-1)
        return first, F.normalize(self.text(texts), dim=-1), self.scale.exp()


def gather(features, fault):
    if dist.get_world_size() == 1 or fault == "local negatives":
        return features
    if fault == "gather without gradient":
        parts = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, features.detach())
        parts[dist.get_rank()] = features
        return torch.cat(parts)
    return torch.cat(torch.distributed.nn.functional.all_gather(features))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--fault", default="")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Encoders())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = TensorDataset(torch.randn(96, 8), torch.randn(96, 5))
    sampler = DistributedSampler(data, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, texts in DataLoader(data, options.batch_size, sampler=sampler):
            first, second, scale = model(images, texts)
            every_first = gather(first, options.fault)
            every_second = gather(second, options.fault)
            is_local = options.fault == "local negatives"
            labels = torch.arange(len(first)) + (0 if is_local else dist.get_rank() * len(first))
            loss = F.cross_entropy(scale * first @ every_second.t(), labels)
            loss = loss + F.cross_entropy(scale * second @ every_first.t(), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.barrier()


if __name__ == "__main__":
    main()
