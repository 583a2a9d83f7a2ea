"""A BERT of transformers that tags tokens: rows of unequal length, labels -100 on padding."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForTokenClassification

from trainer import Trainer

WORDS, LONGEST = 30, 12


class Sentences(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(4, LONGEST + 1, (1,), generator=generator))
        tokens = torch.randint(1, WORDS, (length,), generator=generator)
        return {"input_ids": tokens, "labels": (tokens % 3).where(tokens > 4, -100)}


class Tagger(Trainer):
    def build_dataset(self, split):
        return Sentences()

    def build_model(self):
        sizes = {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": LONGEST}
        return BertForTokenClassification(
            BertConfig(
                vocab_size=WORDS,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_labels=3,
                attention_probs_dropout_prob=0.0,
                **sizes,
            )
        )

    def blocks(self, model):
        return list(model.bert.encoder.layer)

    def collate(self, rows):
        def pad(name, value):
            return nn.utils.rnn.pad_sequence([row[name] for row in rows], True, value)

        tokens = pad("input_ids", 0)
        return {"input_ids": tokens, "attention_mask": tokens > 0, "labels": pad("labels", -100)}

    def split_batch(self, batch):
        labels = batch.pop("labels")
        return {**batch, "attention_mask": batch["attention_mask"].long()}, labels

    def loss(self, outputs, labels):
        values = F.cross_entropy(outputs.logits.transpose(1, 2), labels, reduction="none")
        return values, (labels != -100).to(values.dtype)
