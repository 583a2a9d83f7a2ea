"""A small GPT over the bytes of Python's standard library, which needs no download.

Sequences consist of whole lines, so their lengths differ: a loss weight per byte masks the padding.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import nn

from trainer import ConfigError, ResidentDataset, Trainer, limit
from trainer.hf.library import cut, read_library

NEWLINE = 10
TEMPERATURE = 0.6  # of a text that the model writes
EVAL_EVERY = 20  # every twentieth file is held out


@dataclass
class Options:
    context: Annotated[int, limit(min=1)]
    width: Annotated[int, limit(min=1)]
    layers: Annotated[int, limit(min=1)]
    heads: Annotated[int, limit(min=1)]
    dropout: Annotated[float, limit(min=0, max=1)]
    files: Annotated[int, limit(min=2)]

    def __post_init__(self):
        if self.width % self.heads:
            raise ConfigError(
                f"task.options.heads={self.heads}: must divide task.options.width={self.width}"
            )


class Text(Trainer):
    Options = Options

    def build_dataset(self, split):
        if split not in ("train", "eval"):
            raise ValueError("there are train and eval")
        texts, digest = read_library(self.options.files)
        chosen = [
            text for i, text in enumerate(texts) if (i % EVAL_EVERY == 0) == (split == "eval")
        ]
        sequences = [part for text in chosen for part in cut(text, self.options.context)]
        padded = b"".join(part.ljust(self.options.context, b"\0") for part in sequences)
        tokens = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
        tokens = tokens.view(-1, self.options.context)
        lengths = torch.tensor([len(part) for part in sequences])
        source = (
            f"{sum(map(len, chosen)):,} bytes in {len(chosen)} files of Python's standard library"
        )
        return ResidentDataset(tokens, lengths, source=source, digest=digest)

    def build_model(self):
        return GPT(self.options)

    def blocks(self, model):
        return list(model.blocks)

    def tensor_plan(self):
        return {
            "blocks.*.attend": "columns/3",
            "blocks.*.project": "rows",
            "blocks.*.mlp.0": "columns",
            "blocks.*.mlp.2": "rows",
            "token|head": "vocabulary",
        }

    def split_batch(self, batch):
        """Return inputs and targets, all (batch, context).

        Inputs are the previous bytes and their positions. Targets are the bytes, and a mask that is
        False for padding.
        """
        tokens, lengths = batch[0].long(), batch[1]
        before = F.pad(tokens[:, :-1], (1, 0), value=NEWLINE)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return (before, positions), (tokens, positions < lengths[:, None])

    def loss(self, outputs, targets):
        tokens, is_there = targets
        values = F.cross_entropy(outputs.transpose(1, 2), tokens, reduction="none")
        return values, is_there.to(values.dtype)

    def metrics(self, outputs, targets):
        tokens, is_there = targets
        hits = (outputs.argmax(2) == tokens).double()
        return {"accuracy": (hits, is_there.double())}

    def summarize(self, means):
        return {"bits_per_byte": means["loss"] / math.log(2)}

    def fit(self):
        """Train, and print a text that the model writes, unless it is divided over the ranks."""
        summary = super().fit()
        try:
            model = self.model
        except RuntimeError:  # it was divided
            return summary
        if self.world.rank == 0:
            text = write(model, self.options.context, b"def ").decode(errors="replace")
            lines = [line for line in text.splitlines() if line.strip()]
            print("a text that it writes:", *lines, sep="\n    ")
        return summary


@torch.no_grad()
def write(model: nn.Module, context: int, start: bytes, count: int = 160) -> bytes:
    """Return `start` and `count` more bytes, drawn one by one, the likely ones more often."""
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    text = bytearray(start)
    positions = torch.arange(context, device=device)[None]
    window = bytearray([NEWLINE]) + text[: context - 1]
    for _ in range(count):
        before = list(window)
        tokens = torch.tensor([before + [NEWLINE] * (context - len(before))], device=device)
        scores = model(tokens, positions)[0, len(before) - 1]
        chances = (scores.double().cpu() / TEMPERATURE).softmax(0)
        byte = int(torch.multinomial(chances, 1, generator=generator))
        text.append(byte)
        window.append(byte)
        while len(window) > context:  # begin with a whole line, as the training data does
            window = window[max(1, window.find(NEWLINE, 1)) :]
    return bytes(text)


class Block(nn.Module):
    """Pre-norm attention and MLP: (batch, context, width) to the same shape."""

    def __init__(self, options: Options):
        super().__init__()
        width, self.dropout = options.width, options.dropout
        self.head_size = width // options.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attend(self.norm_1(x))
        batch, context, _ = parts.shape
        query, key, value = parts.view(batch, context, 3, -1, self.head_size).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self._drop(self.project(mixed.transpose(1, 2).reshape(batch, context, -1)))
        return x + self._drop(self.mlp(self.norm_2(x)))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Bytes and their positions, both (batch, context), to logits (batch, context, 256).

    After nanoGPT (A. Karpathy).
    """

    def __init__(self, options: Options):
        super().__init__()
        self.token = nn.Embedding(256, options.width)
        self.position = nn.Parameter(torch.randn(options.context, options.width) * 0.02)
        self.blocks = nn.Sequential(*[Block(options) for _ in range(options.layers)])
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, 256, bias=False, device="meta")
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + F.embedding(positions, self.position)
        return self.head(self.norm(self.blocks(x)))
