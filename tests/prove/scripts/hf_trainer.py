"""A tiny language model with the Trainer of transformers."""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Texts(Dataset):
    def __init__(self, size, ragged):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(4, 12, (size,), generator=generator).tolist()
        lengths = lengths if ragged else [8] * size
        self.ids = [torch.randint(1, 30, (n,), generator=generator).tolist() for n in lengths]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index]


def collate(rows):
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--per-rank-mean", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--schedule", default="linear")
    options = parser.parse_args()
    set_seed(1)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), options.dropout)
    sizes = {"vocab_size": 30, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulation,
        num_train_epochs=3,
        learning_rate=1e-2,
        lr_scheduler_type=options.schedule,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        average_tokens_across_devices=not options.per_rank_mean,
        eval_strategy="epoch",
    )
    model = GPT2LMHeadModel(config)
    Trainer(model, arguments, collate, Texts(64, options.ragged), Texts(21, True)).train()


if __name__ == "__main__":
    main()
