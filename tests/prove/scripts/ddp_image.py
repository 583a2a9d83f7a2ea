"""A small image classifier in plain DDP; `--fault` plants one mistake."""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __init__(self, size, seed, noise=0.0):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(size, 1, 6, 6, generator=generator)
        self.labels = torch.randint(0, 3, (size,), generator=generator)
        self.noise = noise

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.noise:
            image = image + self.noise * torch.randn_like(image)
        return image, self.labels[index]


class Net(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4) if fault == "batchnorm" else nn.Identity()
        self.drop = nn.Dropout(0.5 if fault == "dropout" else 0.0)
        self.head = nn.Linear(36, 3)
        self.spare = nn.Linear(36, 3)

    def forward(self, images, branch=False):
        hidden = F.relu(self.norm(self.conv(images))).mean(1).flatten(1)
        head = self.spare if branch else self.head
        return head(self.drop(hidden))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--fault", default="")
    parser.add_argument("--size", type=int, default=96)
    options = parser.parse_args()
    fault = options.fault
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if fault != "unseeded":
        torch.manual_seed(5 + (rank if fault in ("seed by rank", "augmentation") else 0))
    train = Images(options.size, 1, 0.1 if fault == "augmentation" else 0.0)
    model = Net(fault)
    if fault == "augmentation":
        torch.nn.init.ones_(model.conv.weight)
        torch.nn.init.zeros_(model.conv.bias)
        for layer in (model.head, model.spare):
            torch.nn.init.eye_(layer.weight)
            torch.nn.init.zeros_(layer.bias)
    wrapped = model
    if fault not in ("no wrapper", "seed by rank", "local clip"):
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    rate = 0.1 * (ranks if fault == "scaled rate" else 1)
    decay = 0.01 / ranks if fault == "weight decay" else 0.01
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=fault == "scaled clip")
    drop = fault != "padding"
    sampler = DistributedSampler(train, drop_last=drop)
    if fault == "no sampler":
        sampler = None
    weights = None
    if "class weights" in fault:
        labels = train.labels[list(sampler)] if fault == "own class weights" else train.labels
        weights = len(labels) / labels.bincount().to(torch.get_default_dtype())
    criterion = nn.CrossEntropyLoss(weights)
    loader = DataLoader(train, options.batch_size, sampler=sampler, drop_last=drop)
    for epoch in range(3):
        if sampler is not None and (fault != "no set_epoch" or ranks == 1):
            sampler.set_epoch(epoch)
        for number, (images, labels) in enumerate(loader, 1):
            is_step = number % options.accumulation == 0 or number == len(loader)
            divisor = options.accumulation if fault != "undivided" else 1
            is_late = fault == "no_sync in forward passes"
            quiet = not is_step or is_late or fault == "no_sync"
            with wrapped.no_sync() if quiet and wrapped is not model else nullcontext():
                call = model if fault == "around the wrapper" else wrapped
                branch = fault == "branch" and ranks > 1
                loss = criterion(call(images, branch), labels)
                if fault == "sum loss":
                    loss = F.cross_entropy(call(images), labels, reduction="sum") / 12
                if fault == "divided twice":
                    loss = loss / ranks
                if fault == "times ranks":
                    loss = loss * ranks
                if not is_late:
                    scaler.scale(loss / divisor).backward()
            if is_late:
                scaler.scale(loss / divisor).backward()
            if not is_step:
                continue
            if fault == "summed":
                for each in model.parameters():
                    if each.grad is not None:
                        each.grad.mul_(ranks)
            if fault == "local clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                for each in model.parameters():
                    if each.grad is not None:
                        dist.all_reduce(each.grad)
                        each.grad.div_(ranks)
            elif fault == "clip on one":
                if ranks == 1:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            is_finite = fault != "skips a step" or rank == 0 or (epoch, number) != (0, 3)
            if is_finite:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            if fault != "fast schedule of passes":
                for _ in range(ranks if fault == "fast schedule" else 1):
                    schedule.step()
        for _ in range(3 * ranks if fault == "fast schedule of passes" else 0):
            schedule.step()
        evaluate(model, fault)
        if fault == "all save":
            torch.save(model.state_dict(), os.environ.get("CHECKPOINT", "/tmp/prove-test.pt"))
    dist.barrier()
    dist.destroy_process_group()


@torch.no_grad()
def evaluate(model, fault):
    model.eval()
    data = Images(21, 2)
    parts = DistributedSampler(data, shuffle=False) if fault == "padded evaluation" else None
    hits = 0
    for images, labels in DataLoader(data, 8, sampler=parts):
        hits += int((model(images).argmax(1) == labels).sum())
    model.train()


if __name__ == "__main__":
    main()
