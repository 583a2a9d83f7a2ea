"""Autocast, accumulation, arguments, and a loop in a function."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

NUM_CLASSES = 4


class Waves(Dataset):
    def __init__(self, size, length):
        generator = torch.Generator().manual_seed(size)
        self.labels = torch.randint(NUM_CLASSES, (size,), generator=generator)
        time = torch.linspace(0, 6.28, length)
        noise = torch.randn(size, length, generator=generator)
        self.waves = torch.sin(time * (1 + self.labels[:, None])) + noise

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.waves[index], self.labels[index]


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accum", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=48)
    return parser.parse_args()


def build(length, hidden):
    return nn.Sequential(nn.Linear(length, hidden), nn.ReLU(), nn.Linear(hidden, NUM_CLASSES))


def train_epoch(model, loader, optimizer, scaler, device, args):
    model.train()
    for i, (waves, labels) in enumerate(loader):
        waves, labels = waves.to(device), labels.to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(waves)
            loss = F.cross_entropy(logits, labels, label_smoothing=0.1) / args.accum
        scaler.scale(loss).backward()
        if (i + 1) % args.accum == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def main():
    args = parse()
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    device = torch.device("cpu")
    train_set = Waves(640, args.length)
    eval_set = Waves(101, args.length)
    sampler = DistributedSampler(train_set, seed=3)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, num_workers=0)
    eval_loader = DataLoader(eval_set, 50)
    model = build(args.length, args.hidden).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_epoch(model, loader, optimizer, scaler, device, args)
        model.eval()
        with torch.no_grad():
            hits = sum((model(x).argmax(1) == y).sum().item() for x, y in eval_loader)
        if dist.get_rank() == 0:
            print(epoch, hits / len(eval_set))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
