"""Direct preference optimisation of a language model, from pairs of a chosen and a rejected answer.

The method of Rafailov et al. (2023): the model is compared with the one that training began with.
Its log-probabilities of all answers are computed once, before training: there is no second model.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from trainer import ConfigError, RunError, limit
from trainer.hf import chat, loading
from trainer.hf.causal import LanguageModel
from trainer.hf.file_digests import digest_files
from trainer.hf.reference import ReferenceValues, compute, seeded
from trainer.tasks import lm

ROWS = 4  # pairs of a forward pass of the reference
NAMES = ("chosen", "rejected")


@dataclass
class Options(lm.Options):
    beta: Annotated[float, limit(above=0)]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing:
            raise ConfigError("task.options.packing=true: pairs are not packed; leave it false")


class PairModel(LanguageModel):
    """A causal model that returns the log-probability of each answer, (rows, 2)."""

    def forward(self, input_ids, position_ids=None, labels=None, past_key_values=None, counts=None):
        """Return logits as LanguageModel does, or with labels (rows, 2, tokens) the answers'."""
        if labels is None:
            return super().forward(input_ids, past_key_values=past_key_values)
        flat = (each.flatten(0, 1) for each in (input_ids, position_ids, labels))
        return -super().forward(*flat, counts=counts).sum(1).view(labels.shape[:2])

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
        missing = [pairs for pairs in self._splits() if self._values_of(pairs).read() is None]
        if missing:
            with seeded(self.config.run.seed):
                model = self.build_model().float().to(self.world.device).eval()
            for pairs in missing:
                print(f"reference: the log-probabilities of {2 * len(pairs):,} answers")
                self._values_of(pairs).write(self._measure(model, pairs))

    def _splits(self) -> list[Any]:
        splits = ("train", *self.config.eval.splits)
        return [self.chats.open(split) for split in splits]

    def _values_of(self, pairs: chat.PairDataset) -> ReferenceValues:
        """Return the file of the reference's log-probabilities, (pairs, 2)."""
        return ReferenceValues((pairs.digest, self._reference), (len(pairs), 2))

    @cached_property
    def _reference(self) -> str:
        """A digest of the model that training begins with: of the files whose weights are loaded,
        and of what else decides its outputs."""
        options = self.options
        if options.model:
            config = loading.load_config(options.model)
            made = [loading.digest_config(config), str(config.dtype) if options.lora else ""]
            made.append(digest_files(loading.find_weights(options.model)))
        else:
            sizes = (options.width, options.layers, options.heads)
            made = [f"{self.config.run.seed} {sizes}"]
        return hashlib.sha256(repr(made).encode()).hexdigest()

    def _measure(self, model: PairModel, pairs: chat.PairDataset) -> np.ndarray:
        zero = {"reference": torch.zeros(2)}

        def inputs_of(first: int) -> Any:
            rows = [pairs[i] | zero for i in range(first, min(first + ROWS, len(pairs)))]
            return self.split_batch(self.collate(rows))[0]

        inputs = map(inputs_of, range(0, len(pairs), ROWS))
        return compute(model, inputs, self.world.device, f"times {ROWS} pairs")

    def build_dataset(self, split):
        pairs = self.open_rows(split)
        kept = self._values_of(pairs)
        values = kept.read()
        if values is None:
            raise RunError(f"""{kept.path}: is not what `prepare` has written;
                remove it and start again""")
        return WithReference(pairs, values, self._reference)

    def collate(self, rows):
        """Return answers padded to `context`, (rows, 2, context), and references (rows, 2)."""
        answers = [{"tokens": r[n], "learned": r[f"{n}_learned"]} for r in rows for n in NAMES]
        flat = super().collate(answers)
        counts = flat.pop("counts")
        batch = {name: values.unflatten(0, (-1, 2)) for name, values in flat.items()}
        references = torch.stack([row["reference"] for row in rows])
        return batch | {"reference": references, "counts": counts}

    def split_batch(self, batch):
        whole = {name: batch[name] for name in ("reference", "counts")}
        flat = {name: each.flatten(0, 1) for name, each in batch.items() if name not in whole}
        inputs, _ = super().split_batch(flat | whole)
        counts = inputs.pop("counts")
        pairs = {name: each.unflatten(0, (-1, 2)) for name, each in inputs.items()}
        return pairs | {"counts": counts}, batch["reference"]

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
