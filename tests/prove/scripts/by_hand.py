"""A stream that ranks and workers divide, and gradients averaged by hand; `--fault` plants one."""

import argparse
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, size, fault):
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randn(size, 5, generator=generator)
        self.fault = fault
        self.epoch = 0

    def __iter__(self):
        worker = get_worker_info()
        start = dist.get_rank() * worker.num_workers + worker.id
        step = dist.get_world_size() * worker.num_workers
        if self.fault == "whole on each rank":
            start, step = worker.id, worker.num_workers
        elif self.fault == "whole in each worker":
            start, step = dist.get_rank(), dist.get_world_size()
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.epoch))
        for place in islice(order.tolist(), start, None, step):
            yield self.rows[place], self.rows[place].sum().tanh()


def average_gradients(model, fault):
    for number, each in enumerate(model.parameters()):
        if fault == "one is not averaged" and number == 3:
            continue
        dist.all_reduce(each.grad)
        each.grad /= dist.get_world_size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--size", type=int, default=144)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--fault", default="")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = Stream(options.size, options.fault)
    loader = DataLoader(data, options.batch_size, num_workers=options.workers)
    for epoch in range(2):
        data.epoch = epoch
        for rows, targets in loader:
            loss = F.mse_loss(model(rows).squeeze(1), targets)
            optimizer.zero_grad()
            loss.backward()
            if options.fault == "clipped first":
                nn.utils.clip_grad_value_(model.parameters(), 0.02)
            average_gradients(model, options.fault)
            nn.utils.clip_grad_value_(model.parameters(), 0.02)
            optimizer.step()
    dist.barrier()


if __name__ == "__main__":
    main()
