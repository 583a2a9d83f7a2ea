"""An nn.Transformer that reverses sequences of unequal length."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from trainer import Trainer

WORDS, START, LONGEST = 12, 1, 9


class Pairs(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(3, 9, (1,), generator=generator))
        tokens = torch.randint(2, WORDS, (length,), generator=generator)
        return tokens, torch.cat([torch.tensor([START]), tokens.flip(0)])


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.places = nn.Embedding(16, 16)
        self.layers = nn.Transformer(16, 2, 1, 1, 32, 0.1, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, source, target):
        def embed(tokens):
            return self.words(tokens) + self.places.weight[: tokens.shape[1]]

        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1]).to(embed(target))
        masks = {"src_key_padding_mask": source == 0, "memory_key_padding_mask": source == 0}
        mixed = self.layers(embed(source), embed(target), tgt_mask=mask, **masks)
        return torch.tanh(self.head(mixed))


class Reversing(Trainer):
    def build_dataset(self, split):
        return Pairs()

    def build_model(self):
        return Translator()

    def collate(self, rows):  # to a fixed length, as attention has dropout
        def pad(tokens):
            return F.pad(tokens, (0, LONGEST - len(tokens)))

        return tuple(torch.stack([pad(row[side]) for row in rows]) for side in (0, 1))

    def split_batch(self, batch):
        source, target = batch
        return (source, target[:, :-1]), target[:, 1:]

    def loss(self, outputs, targets):
        values = F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
        return values, (targets != 0).to(values.dtype)
