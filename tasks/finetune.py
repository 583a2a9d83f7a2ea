"""A classifier of transformers that tells from which package of the standard library a text is.

Without `task.options.model` nothing is downloaded: a new BERT and its words are built.
"""

import hashlib
import sys
import sysconfig
from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Annotated

import torch.nn.functional as F
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

from trainer import Trainer, limit
from trainer.hf import loading, task_exports
from trainer.hf.library import cut

PACKAGES = ("asyncio", "email", "http", "importlib", "multiprocessing", "unittest", "urllib", "xml")
EVAL_EVERY = 5  # every fifth file of a package is held out
NUM_BYTES = 512  # of a text
SPECIAL = ("[PAD]", "[UNK]", "[CLS]")
NO_LABEL = -100  # as everywhere in transformers: such a row has no weight


@dataclass
class Options:
    model: str | None
    context: Annotated[int, limit(min=8)]
    texts: Annotated[int, limit(min=1)]
    words: Annotated[int, limit(min=1)]
    width: Annotated[int, limit(min=1)]
    layers: Annotated[int, limit(min=1)]
    heads: Annotated[int, limit(min=1)]
    dropout: Annotated[float, limit(min=0, max=1)]
    lora: Annotated[int, limit(min=1)] | None
    targets: str | list[str]


class Finetune(Trainer):
    Options = Options
    labels = PACKAGES

    def prepare(self):
        loading.fetch(self.options.model)

    @cached_property
    def tokenizer(self):
        options = self.options
        if options.model is None:
            tokenizer = build_tokenizer(self.read_texts("train")[0], options.words)
        else:
            tokenizer = loading.load_tokenizer(options.model)
        if tokenizer.pad_token_id is None:  # as of a language model
            tokenizer.pad_token = tokenizer.eos_token
        # an export's pipeline truncates there too
        tokenizer.model_max_length = min(tokenizer.model_max_length, options.context)
        return tokenizer

    def read_texts(self, split: str) -> tuple[list[str], list[int]]:
        """Return texts, and for each the number of its label."""
        return read_packages(split, self.options.texts)

    def build_dataset(self, split):
        if split not in ("train", "eval"):
            raise ValueError("there are train and eval")
        texts, labels = self.read_texts(split)
        tokens = self.tokenizer(texts, truncation=True, max_length=self.options.context)
        return Dataset.from_dict({**tokens, "labels": labels})

    def collate(self, rows):
        """Pad to one length: with attention dropout, others would depend on the micro-batch."""
        pad = DataCollatorWithPadding(self.tokenizer, "max_length", self.options.context)
        return dict(pad(rows))

    def split_batch(self, batch):
        return {name: batch[name] for name in batch if name != "labels"}, batch["labels"]

    def build_model(self):
        options = self.options
        model = self.build_new() if options.model is None else self.load(options.model)
        if options.lora is None:
            return model
        return loading.adapt(model, options.lora, options.targets)

    def load(self, name):
        model = loading.load_model(
            "AutoModelForSequenceClassification",
            name,
            say=partial(print, file=sys.stderr) if self.world.rank == 0 else None,
            **task_exports.named_classes(self.labels),
        )
        model.config.pad_token_id = self.tokenizer.pad_token_id
        return model

    def build_new(self):
        options = self.options
        config = BertConfig(
            **task_exports.named_classes(self.labels),
            vocab_size=len(self.tokenizer),
            pad_token_id=self.tokenizer.pad_token_id,
            max_position_embeddings=options.context,
            hidden_size=options.width,
            intermediate_size=4 * options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            hidden_dropout_prob=options.dropout,
            attention_probs_dropout_prob=options.dropout,
        )
        return BertForSequenceClassification(config)

    def pipeline_calls(self):
        """Return what an export must answer as the run does: it is compared with that."""
        texts, _ = self.read_texts("eval")
        return task_exports.text_classification(self.tokenizer, texts[:2])

    def blocks(self, model):
        return loading.blocks_of(model)

    def tensor_plan(self):
        return "auto"

    def loss(self, outputs, labels):
        values = F.cross_entropy(outputs.logits, labels, reduction="none", ignore_index=NO_LABEL)
        return values, (labels != NO_LABEL).to(values.dtype)

    def metrics(self, outputs, labels):
        hits = (outputs.logits.argmax(1) == labels).double()
        return {"accuracy": (hits, (labels != NO_LABEL).double())}

    def predict(self, outputs):
        probabilities = outputs.logits.float().softmax(1)
        return {"class": probabilities.argmax(1), "probability": probabilities.amax(1)}


@cache
def read_packages(split: str, most: int) -> tuple[list[str], list[int]]:
    """Return at most `most` texts of each package, of whole lines, and their labels."""
    texts: list[str] = []
    labels: list[int] = []
    root = Path(sysconfig.get_path("stdlib"))
    for label, package in enumerate(PACKAGES):
        found: list[str] = []
        files = (path for path in (root / package).rglob("*.py") if "test" not in path.parts)
        for number, path in enumerate(sorted(files)):
            if (number % EVAL_EVERY == 0) == (split != "train"):
                found += [
                    part.decode(errors="ignore") for part in cut(path.read_bytes(), NUM_BYTES)
                ]
        found.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
        texts += found[:most]
        labels += [label] * len(found[:most])
    return texts, labels


def build_tokenizer(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer that knows the `size` most frequent words of the texts."""
    split = Whitespace()
    counts = Counter(word for text in texts for word, _ in split.pre_tokenize_str(text))
    words = [*SPECIAL, *(word for word, _ in counts.most_common(size))]
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, SPECIAL[1]))
    made.pre_tokenizer = split
    made.post_processor = TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 2)])
    pad, unknown, first = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, unk_token=unknown, cls_token=first
    )
