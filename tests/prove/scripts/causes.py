"""Texts of unequal lengths in plain DDP, right on any layout; `--fault` plants one mistake.

A fault is planted in the command that has `--planted` alone.
"""

import argparse
import copy
import math
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORDS = 12
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=12)
parser.add_argument("--acc", type=int, default=1)
parser.add_argument("--fault", default="")
parser.add_argument("--planted", action="store_true")
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--snapshot", default="")
options = parser.parse_args()
fault = options.fault if options.planted else ""
shared = options.fault  # what both commands do
rank = int(os.environ.get("RANK", "0"))
ranks = int(os.environ.get("WORLD_SIZE", "1"))


class Texts(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(2, 9, (96,), generator=generator).tolist()
        self.ids = [torch.randint(1, WORDS, (n,), generator=generator) for n in lengths]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8, padding_idx=0)
        self.body = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if shared.startswith("norm") else nn.Identity()
        self.drop = nn.Dropout(0.4 if fault == "more dropout" else options.dropout)
        self.head = nn.Linear(8, WORDS)

    def forward(self, ids):
        with torch.no_grad() if fault == "no gradient in a part" else nullcontext():
            hidden = self.embed(ids)
        hidden = torch.tanh(self.body(hidden))
        if shared.startswith("norm"):
            hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden)
        if fault == "scaled by rows":
            hidden = hidden / len(ids)
        return self.head(self.drop(hidden))


def smooth(logits, targets):
    """Label smoothing by hand, summed over the targets that count."""
    kept = targets != 0
    logs = logits.log_softmax(-1)[kept]
    picked = logs.gather(1, targets[kept].unsqueeze(1)).squeeze(1)
    return -(0.9 * picked + 0.1 * logs.mean(-1)).sum()


def compute(logits, targets, count, acc):
    """Return the loss of a micro-batch whose gradients are averaged over ranks."""
    own = (targets != 0).sum()
    if shared == "undivided":
        return F.cross_entropy(logits, targets, ignore_index=0)
    if shared == "mean of means":
        return F.cross_entropy(logits, targets, ignore_index=0) / acc
    if shared == "mean of smooth means":
        return F.cross_entropy(logits, targets, ignore_index=0, label_smoothing=0.2) / acc
    if shared == "smooth means by hand":
        return smooth(logits, targets) / own / acc
    if shared == "class weights":
        weight = torch.arange(1.0, WORDS + 1)
        return F.cross_entropy(logits, targets, weight, ignore_index=0) / acc
    if shared == "own class weights":
        weight = torch.arange(1.0, WORDS + 1)[targets] * (targets != 0)
        each = F.cross_entropy(logits, targets, reduction="none")
        return (each * weight).sum() / weight.sum() / acc
    if fault == "smooth":
        return smooth(logits, targets) * ranks / count
    if fault == "smoothing":
        given = {"ignore_index": 0, "reduction": "sum", "label_smoothing": 0.1}
        return F.cross_entropy(logits, targets, **given) * ranks / count
    total = F.cross_entropy(logits, targets, ignore_index=0, reduction="sum")
    if shared == "padded":
        return total / len(targets) / acc
    if fault == "added penalty":
        return total * ranks / count + 0.01 * logits.pow(2).mean()
    if fault == "count of rank":
        return total / (count / ranks if ranks == 1 else own * acc)
    return total * ranks / count


def groups(model):
    """Weights with decay, and others without."""
    decay = [each for name, each in model.named_parameters() if each.dim() > 1]
    rest = [each for name, each in model.named_parameters() if each.dim() < 2]
    if fault == "membership":
        rest.append(decay.pop())
    if fault == "not in the optimizer":
        rest.pop()
    rate = 0.02 if fault == "decay of a group" else 0.0
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": rate}]


def change_gradients(model):
    if fault == "freed after clipping":
        model.head.bias.grad = None
    if fault == "zeroed after clipping":
        model.body.weight.grad.zero_()
    if fault == "scaled after clipping":
        model.body.weight.grad.mul_(0.5)
    if fault == "noise":
        generator = torch.Generator().manual_seed(3)
        noise = torch.randn(model.body.weight.shape, generator=generator)
        model.body.weight.grad.add_(0.01 * noise)


def clip(model):
    if fault == "clips a part":
        nn.utils.clip_grad_norm_(model.head.parameters(), 0.1)
    elif fault == "other norm":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=math.inf)
    else:
        nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=0.1)


def main():
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    if options.snapshot and Path(options.snapshot).exists():
        model.load_state_dict(torch.load(options.snapshot))
    if fault == "frozen":
        model.body.bias.requires_grad_(False)
    if fault == "tied":
        model.head.weight = model.embed.weight = nn.Parameter(model.head.weight.detach().clone())
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    betas = (0.8, 0.999) if fault == "other betas" else (0.9, 0.999)
    optimizer = torch.optim.AdamW(groups(model), lr=0.01, betas=betas, amsgrad=fault == "amsgrad")
    if fault == "norm momentum":
        model.norm.momentum = 0.5
    base = 0.8 if fault == "other schedule" else 0.9
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: base**step)
    seed = 3 if fault == "seed of the sampler" else 0
    sampler = DistributedSampler(Texts(), ranks, rank, shuffle=fault != "no shuffle", seed=seed)
    loader = DataLoader(
        Texts(),
        options.batch_size,
        sampler=sampler,
        collate_fn=lambda rows: nn.utils.rnn.pad_sequence(rows, batch_first=True),
    )
    average = copy.deepcopy(model).requires_grad_(False)
    if fault in ("eval on rank 0", "norm in eval on rank 0") and rank == 0:
        model.eval()
    if fault == "eval of a part":
        model.drop.eval()
    if fault == "norm in eval":
        model.norm.eval()
    step = 0
    for epoch in range(3):
        if fault != "no set_epoch":
            sampler.set_epoch(epoch)
        window = []
        for batch in loader:
            window.append(batch)
            if len(window) == options.acc:
                update(model, wrapped, optimizer, schedule, window, step)
                window = []
                step += 1
                decay = 0.9 ** (options.acc if fault == "average by micro-batches" else 1)
                if fault == "stays in eval" and step == 4:
                    model.eval()
                if fault == "freezes later" and step == 4:
                    model.body.weight.requires_grad_(False)
                if fault == "decays later" and step == 4:
                    optimizer.param_groups[0]["weight_decay"] = 0.3
                if fault == "forgets moments" and step == 4:
                    optimizer.state.clear()
                for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                    mean.mul_(decay).add_(weight.detach(), alpha=1 - decay)
    if options.snapshot:
        torch.save(model.state_dict(), options.snapshot)
    if fault == "fails at its end":
        raise RuntimeError("cannot write the result")


def update(model, wrapped, optimizer, schedule, window, step):
    count = sum((batch[:, 1:] != 0).sum() for batch in window)
    if ranks > 1:
        dist.all_reduce(count)
    dtype = torch.float16 if fault == "other autocast" else torch.bfloat16
    is_low = "autocast" in shared and (options.planted or shared != "autocast")
    context = torch.autocast("cpu", dtype=dtype) if is_low else nullcontext()
    for number, batch in enumerate(window, 1):
        is_last = number == len(window)
        if fault == "leaves out the last" and is_last and number > 1:
            continue
        with nullcontext() if is_last or ranks == 1 else wrapped.no_sync(), context:
            logits = wrapped(batch[:, :-1]).flatten(0, 1)
            if fault == "detached":
                logits = logits + 0 * logits.detach()
            loss = compute(logits, batch[:, 1:].reshape(-1), count, options.acc)
            if "nan" in shared and step == 3:
                loss = loss * math.nan
            if fault == "not a number in one" and step == 2:
                loss = loss * math.nan
            if fault == "the last counts more" and is_last:
                loss = loss * options.acc
            if fault == "loss on rank 0" and rank == 0:
                loss = 2 * loss
        if "no backward" not in shared:
            loss.backward()
        if fault == "zero_grad in micro-batches" and not is_last:
            optimizer.zero_grad()
        if fault == "schedule in micro-batches" and not is_last:
            schedule.step()
        if fault == "clips micro-batches":
            clip(model)
    if fault == "clamps before the step":
        with torch.no_grad():
            model.head.weight.clamp_(-0.2, 0.2)
    if fault == "keeps gradients":
        clip(model)
        optimizer.step()
        schedule.step()
        return
    if fault == "freed before clipping":
        model.body.weight.grad = None
    if fault == "rank 1 clips more" and rank == 1:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    if "unclipped" not in shared and "no backward" not in shared:
        clip(model)
    change_gradients(model)
    optimizer.step()
    if fault == "two steps":
        optimizer.step()
    schedule.step()
    if fault == "decay by hand":
        for each in model.body.parameters():
            each.data.mul_(0.99)
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
