"""The examples that tests write as shards."""

from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

NUM = 203


def rows(count: int = NUM) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 3, 4, generator=generator)
    return TensorDataset(inputs, inputs.flatten(1)[:, :5].argmax(1))


class Padded(Dataset):
    """The same rows with bytes beside them, so that a shard arrives in several pieces."""

    def __init__(self, pad: int):
        self._rows = rows()
        self._pad = bytes(pad)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        inputs, targets = self._rows[index]
        return {"inputs": inputs, "targets": targets, "pad": self._pad}
