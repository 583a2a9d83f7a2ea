"""Two steps in a forked process of multiprocessing."""

import multiprocessing

import torch


def train():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.ones(2)).sum().backward()
        optimizer.step()


process = multiprocessing.get_context("fork").Process(target=train)
process.start()
process.join()
