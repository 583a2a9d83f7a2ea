"""The texts of these scripts as a task of Lockstep; options.bug plants two of the bugs."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from trainer import Trainer


class Texts(Dataset):
    """Texts of 2 to 11 tokens; some tokens are replaced at random."""

    def __init__(self, count, random):
        generator = torch.Generator().manual_seed(count)
        sizes = torch.randint(2, 12, (count,), generator=generator)
        self.texts = [torch.randint(1, 20, (int(n),), generator=generator) for n in sizes]
        self.random = random

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        text = self.texts[index].clone()
        text[self.random.integers(len(text))] = self.random.integers(1, 20)
        return text


class Seeded:
    """numpy's own generator, which Lockstep seeds for each example."""

    integers = staticmethod(np.random.randint)


class Here(Trainer):
    def build_dataset(self, split):
        is_copied = self.options["bug"] == "copied_generator"
        random = np.random.default_rng(0) if is_copied else Seeded()
        return Texts(81 if split == "train" else 21, random)

    def collate(self, rows):
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def split_batch(self, batch):
        return batch[:, :-1], batch[:, 1:]

    def build_model(self):
        return nn.Sequential(
            nn.Embedding(20, 16), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 20)
        )

    def loss(self, outputs, targets):
        reduction = "mean" if self.options["bug"] == "mean_of_means" else "none"
        logits = outputs.transpose(1, 2)
        values = nn.functional.cross_entropy(logits, targets, ignore_index=0, reduction=reduction)
        return values, (targets != 0).to(values.dtype)
