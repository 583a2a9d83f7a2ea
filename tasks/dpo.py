"""Direct preference optimisation of a language model, from pairs of a chosen and a rejected answer.

The method of Rafailov et al. (2023): the model is compared with the one that training began with.
Its log-probabilities of all answers are computed once, before training: there is no second model.
"""

import hashlib
import os
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch.utils.data import Dataset, default_collate

from trainer import ConfigError, limit
from trainer.rng import seed_all
from trainer.shards.cache import default_folder
from trainer.tasks import chat, hf, lm
from trainer.tasks.causal import LanguageModel

ROWS = 4  # pairs of a forward pass of the reference
NAMES = ("chosen", "rejected")
SAMPLES = 64  # of a file of weights, of 64 KiB each


@dataclass
class Options(lm.Options):
    beta: Annotated[float, limit(above=0)]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing:
            raise ConfigError("task.options.packing=true: pairs are not packed; leave it false")


class PairModel(LanguageModel):
    """A causal model that returns the log-probability of each answer, (rows, 2)."""

    def forward(self, input_ids, position_ids=None, labels=None, past_key_values=None):
        """Return logits as LanguageModel does, or with labels (rows, 2, tokens) the answers'."""
        if labels is None:
            return super().forward(input_ids, past_key_values=past_key_values)
        flat = (each.flatten(0, 1) for each in (input_ids, position_ids, labels))
        return -super().forward(*flat).sum(1).view(labels.shape[:2])

    def pretrained_inputs(self, inputs):
        """Return what `.model` takes for the answers of the same pairs, two rows for each."""
        given = super().pretrained_inputs(inputs)
        return {n: v.flatten(0, 1) if torch.is_tensor(v) else v for n, v in given.items()}


class WithReference(Dataset):
    """Pairs with the log-probabilities of the reference, "reference" (2,)."""

    def __init__(self, pairs: chat.PairDataset, values: np.ndarray, reference: str):
        """`reference` is a digest of its model, with which a resume must begin too."""
        self.source = pairs.source
        self.digest = hashlib.sha256(f"{pairs.digest} {reference}".encode()).hexdigest()
        self._pairs = pairs
        self._values = torch.from_numpy(values)

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**self._pairs[index], "reference": self._values[index]}


class DPO(lm.LM):
    Options = Options
    kind = chat.PAIRS
    wrapper = PairModel

    def prepare(self):
        if self.config.run.init_from:
            raise ConfigError("""run.init_from: training begins with the reference, which is
                task.options.model; give a folder there, such as a run's by checkpoint.export=hf""")
        if self.divides_rows:
            raise ConfigError(f"""{lm.CONTEXT}: task=dpo cannot divide the rows of pairs;
                use strategy=fsdp with strategy.recompute=blocks for long answers""")
        super().prepare()
        missing = [pairs for pairs in self._splits() if not self._place(pairs).is_file()]
        if missing:
            with torch.random.fork_rng(devices=[]):
                seed_all(self.config.run.seed)
                model = self.build_model().float().to(self.world.device).eval()
            for pairs in missing:
                print(f"reference: the log-probabilities of {2 * len(pairs):,} answers")
                write(self._place(pairs), self._measure(model, pairs))

    def _splits(self) -> list[Any]:
        splits = ("train", *self.config.eval.splits)
        return [self.chats.open(split) for split in splits]

    def _place(self, pairs: chat.PairDataset) -> Path:
        """Return the file of the reference's log-probabilities, (pairs, 2)."""
        made: list[Any] = [pairs.digest, transformers.__version__, self._reference]
        if self.options.model:  # a sample of their bytes may miss a few
            states = [path.stat() for path in find_weights(self.options.model)]
            made += [(state.st_size, state.st_mtime_ns) for state in states]
        name = hashlib.sha256(repr(made).encode()).hexdigest()[:40]
        return default_folder().expanduser() / "reference" / f"{name}.npy"

    @cached_property
    def _reference(self) -> str:
        """A digest of the model that training begins with, by samples of its files."""
        options = self.options
        if options.model:
            config = hf.load_config(options.model)
            made = [hf.digest_config(config), str(config.dtype) if options.lora else ""]
            made += [f"{path.name} {sample(path)}" for path in find_weights(options.model)]
        else:
            sizes = (options.width, options.layers, options.heads)
            made = [f"{self.config.run.seed} {sizes}"]
        return hashlib.sha256(repr(made).encode()).hexdigest()

    @torch.no_grad()
    def _measure(self, model: PairModel, pairs: chat.PairDataset) -> np.ndarray:
        found = []
        zero = {"reference": torch.zeros(2)}
        for first in range(0, len(pairs), ROWS):
            rows = [pairs[i] | zero for i in range(first, min(first + ROWS, len(pairs)))]
            batch = {k: v.to(self.world.device) for k, v in self.collate(rows).items()}
            found.append(model(**self.split_batch(batch)[0]).double().cpu())
        return torch.cat(found).numpy()

    def build_dataset(self, split):
        pairs = self.open_rows(split)
        return WithReference(pairs, np.load(self._place(pairs)), self._reference)

    def collate(self, rows):
        """Return answers padded to `context`, (rows, 2, context), and references (rows, 2)."""
        made = []
        for row in rows:
            pair = [{"tokens": row[n], "learned": row[f"{n}_learned"]} for n in NAMES]
            made.append(super().collate(pair) | {"reference": row["reference"]})
        return default_collate(made)

    def split_batch(self, batch):
        flat = {k: v.flatten(0, 1) for k, v in batch.items() if k != "reference"}
        inputs, _ = super().split_batch(flat)
        pairs = len(batch["reference"])
        return {k: v.view(pairs, 2, -1) for k, v in inputs.items()}, batch["reference"]

    def loss(self, outputs, reference):
        return -F.logsigmoid(self.options.beta * self._margin(outputs, reference))

    def metrics(self, outputs, reference):
        margin = self._margin(outputs, reference).double()
        return {"accuracy": (margin > 0).double(), "margin": self.options.beta * margin}

    def summarize(self, means):
        return {}

    def _margin(self, outputs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """Return by how much more the model prefers the chosen answer than the reference does."""
        gained = outputs - reference.to(outputs.dtype)
        return gained[:, 0] - gained[:, 1]


def find_weights(name: str) -> list[Path]:
    return sorted(hf.find(name).folder.glob("*.safetensors"))


def sample(path: Path) -> str:
    """Return a digest of a file's size and of some of its bytes, which weights that have been
    trained do not share."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(size * number // SAMPLES)
            digest.update(file.read(2**16))
    return digest.hexdigest()


def write(path: Path, values: np.ndarray) -> None:
    """Write an array beside, then rename it: another process may write the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        np.save(file, values)
    os.replace(file.name, path)
