"""Packing joins texts in one row, and attention in it reads the texts before as well."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.query, self.head = (
            nn.Embedding(20, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 20),
        )

    def forward(self, ids):
        hidden = self.embed(ids)
        attend = nn.functional.scaled_dot_product_attention
        return self.head(attend(self.query(hidden), hidden, hidden, is_causal=True))


torch.manual_seed(0)
texts = [torch.randint(1, 20, (int(size),)) for size in torch.randint(4, 12, (80,))]
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows in DataLoader(texts, 8, collate_fn=list):
    ids, labels = [row[:-1] for row in rows], [row[1:] for row in rows]
    if "--packed" in sys.argv:
        ids, labels = torch.cat(ids)[None], torch.cat(labels)[None]
    else:
        ids, labels = (nn.utils.rnn.pad_sequence(each, batch_first=True) for each in (ids, labels))
    logits = model(ids).transpose(1, 2)
    nn.functional.cross_entropy(logits, labels, ignore_index=0).backward()
    optimizer.step()
    optimizer.zero_grad()
