"""The loss is divided by all tokens of a step, and then by the number of micro-batches as well."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

micro_batch = int(sys.argv[1])  # of the 8 texts in a step
torch.manual_seed(0)
texts = [torch.randint(1, 20, (int(size),)) for size in torch.randint(2, 12, (80,))]
model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accumulation = 8 // micro_batch


def pad(rows):
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


batches = iter(DataLoader(texts, micro_batch, collate_fn=pad))
for window in zip(*[batches] * accumulation, strict=True):
    tokens = sum((ids[:, 1:] != 0).sum() for ids in window)
    for ids in window:
        logits = model(ids[:, :-1]).transpose(1, 2)
        total = nn.functional.cross_entropy(logits, ids[:, 1:], ignore_index=0, reduction="sum")
        (total / tokens / accumulation).backward()
    optimizer.step()
    optimizer.zero_grad()
