"""Correct training loops in several styles, which learn the same on any number of ranks."""

import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

ROWS, STEPS = 72, 12


class Numbers(Dataset):
    """Dicts of a dataset with an image-like array, a label and a string."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randn(ROWS, 2, 4, generator=generator)

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        row = self.rows[index]
        return {"image": row.numpy(), "label": int(row.sum() > 0), "name": f"row {index}"}


class Stream(IterableDataset):
    """Rows in a fixed order, of which each rank takes every n-th batch-sized part."""

    def __init__(self, rank, ranks):
        self.rank, self.ranks = rank, ranks
        self.data = Numbers()

    def __iter__(self):
        for index in range(self.rank, len(self.data), self.ranks):
            yield self.data[index]


def build():
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 2))


def plain_sum(rank, ranks):
    """Sum over examples divided by the global batch, gradients summed by hand."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Numbers()
    for step in range(STEPS):
        rows = [data[(step * 12 + place) % ROWS] for place in range(rank, 12, ranks)]
        images = torch.stack([torch.from_numpy(row["image"]) for row in rows])
        labels = torch.tensor([row["label"] for row in rows])
        loss = F.cross_entropy(model(images), labels, reduction="sum") / 12
        optimizer.zero_grad()
        loss.backward()
        for each in model.parameters():
            if ranks > 1:
                dist.all_reduce(each.grad)
        optimizer.step()


def summed_losses(rank, ranks):
    """Accumulation by adding the losses of two batches before one backward pass."""
    model = build()
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
    sampler = DistributedSampler(Numbers(), ranks, rank, seed=3)
    loader = DataLoader(Numbers(), 6 // ranks, sampler=sampler, num_workers=1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = 0.0
        for number, batch in enumerate(loader, 1):
            total = total + F.cross_entropy(wrapped(batch["image"]), batch["label"])
            if number % 2 == 0:
                optimizer.zero_grad()
                (total / 2).backward()
                optimizer.step()
                total = 0.0


class Fitter:
    """A class with callbacks, a prefetching loop and two optimizers."""

    def __init__(self, rank, ranks):
        self.ranks = ranks
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(8, 12), nn.Tanh())
        self.head = nn.Linear(12, 2)
        torch.manual_seed(2)
        for module in (self.body[1], self.head):
            module.reset_parameters()
        if ranks > 1:
            self.body = DistributedDataParallel(self.body)
            self.head = DistributedDataParallel(self.head)
        self.optimizers = [
            torch.optim.SGD(self.body.parameters(), lr=0.1, momentum=0.9),
            torch.optim.RMSprop(self.head.parameters(), lr=0.01),
        ]
        self.loader = DataLoader(Stream(rank, ranks), 12 // ranks)

    def batches(self):
        while True:
            iterator = iter(self.loader)
            following = next(iterator)
            for batch in iterator:
                yield following
                following = batch
            yield following

    def fit(self):
        for step, batch in zip(range(STEPS), self.batches(), strict=False):
            loss = F.cross_entropy(self.head(self.body(batch["image"])), batch["label"])
            loss.backward()
            self.optimizers[0].step()
            if step % 2:
                self.optimizers[1].step()
            for optimizer in self.optimizers:
                optimizer.zero_grad()


def gan(rank, ranks):
    """Two models, two optimizers, three backward passes per batch; noise by example."""
    torch.manual_seed(4)
    maker = nn.Sequential(nn.Linear(3, 8))
    critic = nn.Sequential(nn.Linear(8, 6), nn.LeakyReLU(), nn.Linear(6, 1))
    if ranks > 1:
        maker = DistributedDataParallel(maker)
        critic = DistributedDataParallel(critic)
    first = torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.9))
    second = torch.optim.Adam(maker.parameters(), lr=0.01, betas=(0.5, 0.9))
    sampler = DistributedSampler(Numbers(), ranks, rank, shuffle=False)
    for _ in range(2):
        for batch in DataLoader(Numbers(), 12 // ranks, sampler=sampler):
            real = torch.as_tensor(batch["image"]).flatten(1)
            noise = real[:, :3].roll(1, 1)
            fake = maker(noise)
            critic.zero_grad()
            F.softplus(-critic(real)).mean().backward()
            F.softplus(critic(fake.detach())).mean().backward()
            first.step()
            maker.zero_grad()
            F.softplus(-critic(fake)).mean().backward()
            second.step()


def masked(rank, ranks):
    """Padded token batches, where the mean is taken over the tokens of all ranks."""
    generator = torch.Generator().manual_seed(0)
    texts = [
        torch.randint(1, 9, (int(n),), generator=generator)
        for n in torch.randint(2, 9, (ROWS,), generator=generator)
    ]
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9))
    if ranks > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = DistributedSampler(texts, ranks, rank, shuffle=False)
    pad = nn.utils.rnn.pad_sequence
    loader = DataLoader(texts, 12 // ranks, sampler=sampler, collate_fn=lambda r: pad(r, True))
    for _ in range(2):
        for ids in loader:
            targets = ids[:, 1:].reshape(-1)
            count = (targets != 0).sum()
            if ranks > 1:
                dist.all_reduce(count)
            logits = model(ids[:, :-1]).flatten(0, 1)
            total = F.cross_entropy(logits, targets, ignore_index=0, reduction="sum")
            (total * ranks / count).backward()
            optimizer.step()
            optimizer.zero_grad()


def work(rank, ranks, style, port):
    random.seed(rank)
    if ranks > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
    if style == "class":
        Fitter(rank, ranks).fit()
    else:
        globals()[style](rank, ranks)
    if ranks > 1:
        dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("style")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--port", type=int, default=29517)
    options = parser.parse_args()
    if options.ranks == 1:
        work(0, 1, options.style, options.port)
    else:
        mp.spawn(work, (options.ranks, options.style, options.port), options.ranks)
