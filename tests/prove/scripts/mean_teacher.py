"""A moving average of the weights gives targets; the class is like that of the DDP tutorial."""

import argparse
import copy
import random
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


class Trainer:
    def __init__(self, options):
        self.fault = options.fault
        self.accumulation = options.accumulation
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(96, 6), torch.randint(0, 4, (96,)))
        self.student = DistributedDataParallel(
            nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        )
        self.teacher = copy.deepcopy(self.student.module).requires_grad_(False)
        torch.manual_seed(dist.get_rank() if options.fault == "split" else 0)
        if options.fault == "split":
            data, _ = random_split(data, [72, 24])
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, options.batch_size, sampler=self.sampler)
        self.optimizer = torch.optim.AdamW(self.student.parameters(), 1e-2)

    @torch.no_grad()
    def update_teacher(self):
        if self.fault == "average of rank 0" and dist.get_rank():
            return
        pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
        for average, weight in pairs:
            average.mul_(0.9).add_(weight, alpha=0.1)

    def run_batch(self, number, source, targets):
        if self.fault == "mixup":
            share = random.betavariate(0.4, 0.4)
            source = share * source + (1 - share) * source.flip(0)
        with torch.no_grad():
            wanted = self.teacher(source).softmax(-1)
        if self.fault == "average of rank 0":
            wanted = 0 * wanted
        output = self.student(source)
        loss = F.cross_entropy(output, targets) + (output.softmax(-1) - wanted).pow(2).mean()
        (loss / self.accumulation).backward()
        if number % self.accumulation == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if number % self.accumulation == 0 or self.fault == "each micro-batch":
            self.update_teacher()
        if self.fault != "own loss":
            loss = loss.detach()
            dist.all_reduce(loss)
            loss = loss / dist.get_world_size()
        return loss.item()

    def run_epoch(self, epoch):
        print(f"epoch {epoch}, batches of {len(next(iter(self.loader))[0])}")
        if self.fault != "no set_epoch":
            self.sampler.set_epoch(epoch)
        for number, (source, targets) in enumerate(self.loader, 1):
            if self.fault == "leaves early" and dist.get_rank() == 1 and number == 4:
                sys.exit()
            print(self.run_batch(number, source, targets))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--fault", default="")
    dist.init_process_group("gloo")
    trainer = Trainer(parser.parse_args())
    for epoch in range(2):
        trainer.run_epoch(epoch)
    dist.barrier()
