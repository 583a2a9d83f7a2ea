"""The dataset has a generator of its own, and each data worker has a copy of it."""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __init__(self):
        self.inputs = torch.arange(480, dtype=torch.float32).view(80, 6) / 480
        self.random = np.random.default_rng(0)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index] + self.random.normal(0, 0.1, 6)


torch.manual_seed(0)
model = nn.Linear(6, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs in DataLoader(Noisy(), 8, num_workers=int(sys.argv[1])):
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
