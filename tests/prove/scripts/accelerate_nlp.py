"""A classifier of token sequences with Accelerate, after its example nlp_example.py."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sentences(Dataset):
    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 9, (size,), generator=generator).tolist()
        self.ids = [torch.randint(1, 20, (n,), generator=generator).tolist() for n in lengths]
        self.labels = [sum(ids) % 2 for ids in self.ids]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def collate(examples):
    longest = max(len(each["input_ids"]) for each in examples)
    ids = [each["input_ids"] + [0] * (longest - len(each["input_ids"])) for each in examples]
    labels = torch.tensor([each["labels"] for each in examples])
    return {"input_ids": torch.tensor(ids), "labels": labels}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids, labels):
        mask = (input_ids != 0).unsqueeze(-1)
        mean = (self.embed(input_ids) * mask).sum(1) / mask.sum(1)
        logits = self.head(mean)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--schedule", action="store_true")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--global-seed", action="store_true")
    parser.add_argument("--gather", default="gather_for_metrics")
    options = parser.parse_args()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=options.accumulation,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=not options.global_seed),
    )
    set_seed(42)
    train = DataLoader(
        Sentences(options.size, 1), options.batch_size, shuffle=True, collate_fn=collate
    )
    evaluation = DataLoader(Sentences(21, 2), options.batch_size, collate_fn=collate)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=30)
    if options.schedule:
        schedule = accelerator.prepare(schedule)
    model, optimizer, train, evaluation = accelerator.prepare(model, optimizer, train, evaluation)
    for _ in range(4):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                if options.schedule:
                    schedule.step()
                optimizer.zero_grad()
        model.eval()
        for batch in evaluation:
            with torch.no_grad():
                logits = model(**batch)["logits"]
            gather = getattr(accelerator, options.gather)
            gather((logits.argmax(1), batch["labels"]))
    accelerator.end_training()


if __name__ == "__main__":
    main()
