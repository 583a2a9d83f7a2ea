"""Each micro-batch averages the loss over its own tokens, so tokens of short texts count more."""

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


for number, ids in enumerate(DataLoader(texts, micro_batch, collate_fn=pad), 1):
    logits = model(ids[:, :-1]).transpose(1, 2)
    loss = nn.functional.cross_entropy(logits, ids[:, 1:], ignore_index=0)
    (loss / accumulation).backward()
    if number % accumulation == 0:
        optimizer.step()
        optimizer.zero_grad()
