"""A loop that saves a checkpoint every 4 steps and resumes; `--lost` names what it forgets."""

import argparse
import copy
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--lost", default="")
options = parser.parse_args()
torch.manual_seed(0)


class Noisy(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(6), y


kind = Noisy if options.lost == "augmentation" else TensorDataset
data = kind(torch.randn(40, 6), torch.randn(40, 2))
drop = nn.Dropout(0.3) if options.lost == "random" else nn.Identity()
alike = [nn.Linear(8, 8), nn.Linear(8, 8)]
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), drop, *alike, nn.Linear(8, 2))
average = copy.deepcopy(model).requires_grad_(False)
parameters = list(model.parameters())
if options.lost == "order" and options.resume:
    parameters[2:6] = [*alike[1].parameters(), *alike[0].parameters()]
optimizer = torch.optim.Adam(parameters, lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
saved = options.folder / "last.pt"
step = 0
if options.resume:
    state = torch.load(saved)
    if options.lost == "a layer":
        state["model"] = {k: v for k, v in state["model"].items() if not k.startswith("5.")}
    if options.lost != "model":
        model.load_state_dict(state["model"], strict=options.lost != "a layer")
    if options.lost != "average":
        average.load_state_dict(state["average"])
    if options.lost == "moments":
        state["optimizer"]["state"] = {}
    if options.lost != "optimizer":
        optimizer.load_state_dict(state["optimizer"])
    if options.lost != "schedule":
        schedule.load_state_dict(state["schedule"])
    else:
        for group in optimizer.param_groups:
            group["lr"] = 0.01
    step = 0 if options.lost == "position" else state["step"]
if options.lost == "augmentation":
    torch.manual_seed(1 + options.resume)
per_epoch = 5
for epoch in range(step // per_epoch, 4):
    seed = 0 if options.lost == "epoch" and options.resume else epoch
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(seed))
    for number, (x, y) in enumerate(DataLoader(data, 8, sampler=sampler)):
        if epoch * per_epoch + number < step:
            continue
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
            mean.data.mul_(0.9).add_(weight.data, alpha=0.1)
        step += 1
        if step % 4 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"schedule": schedule.state_dict(), "average": average.state_dict()}
            torch.save({**state, "step": step}, saved)
sys.exit(0)
