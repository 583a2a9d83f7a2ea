"""A run on two ranks with accumulation learns what a loop of a page in plain PyTorch learns.

Other tests compare layouts with one another: what is wrong in all of them shows here.
"""

import copy
import math

import torch
from harness import fit, newest, on_ranks, relative_distance
from harness.stored import tensors_of
from tiny import Tiny, points
from torch import nn

STEPS, WARMUP, LR, DECAY, LIMIT, GLOBAL_BATCH = 12, 3, 0.02, 0.8, 0.05, 22
WORDS = [
    *("task=tiny", "strategy=ddp", "strategy.precision=fp64", "optim=adamw", "schedule=cosine"),
    *("task.options.weights=true", "task.options.dropout=0", "data.micro_batch=4"),
    *(f"data.global_batch={GLOBAL_BATCH}", f"run.steps={STEPS}", f"optim.lr={LR}"),
    *(f"schedule.warmup_steps={WARMUP}", f"run.ema_decay={DECAY}", f"run.clip_norm={LIMIT}"),
    *("run.lr_scaling=sqrt", "run.lr_batch=11"),
    *("log.every_steps=1", "eval.every_steps=6", "checkpoint.every_steps=6"),
]


class Recorded(Tiny):
    """Records its first weights and the rows of each step."""

    first = None
    rows: list = []

    def train_step(self, batch):
        if self.first is None:
            Recorded.first = copy.deepcopy(self.model)
        self.rows.append([(inputs.clone(), targets) for inputs, targets in batch])
        return super().train_step(batch)


def train(folder):
    return fit(folder, *WORDS, task=Recorded), Recorded.rows, Recorded.first


def weighted_mean(model, inputs, targets):
    values = nn.functional.cross_entropy(model(inputs), targets, reduction="none")
    weights = 0.5 + targets.double()
    return (values * weights).sum() / weights.sum()


def factor(step):
    if step < WARMUP:
        return (step + 1) / (WARMUP + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def test_a_run_is_a_plain_loop_with_weights_clipping_schedule_and_moving_average(tmp_path):
    (run, mine, model), (_, theirs, _) = on_ranks(2, train, tmp_path)
    average = copy.deepcopy(model)
    inputs, targets = points(203, "eval")
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    losses, rates, scores = {}, {}, {}
    for step, parts in enumerate(zip(mine, theirs, strict=True)):
        assert [len(rows) for part in parts for rows, _ in part] == [4, 4, 3, 4, 4, 3]
        rows, labels = (torch.cat(each) for each in zip(*parts[0], *parts[1], strict=True))
        optimizer.param_groups[0]["lr"] = rates[step + 1] = LR * factor(step) * math.sqrt(2)
        optimizer.zero_grad()
        loss = weighted_mean(model, rows, labels)
        loss.backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), LIMIT) > LIMIT
        optimizer.step()
        losses[step + 1] = loss.item()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.copy_(DECAY * mean + (1 - DECAY) * weight)
            scores[step + 1] = weighted_mean(average, inputs.double(), targets).item()
    found = {r["step"]: r["eval/loss"] for r in run["record"] if "eval/loss" in r}
    assert found.keys() == {6, 9, 12}  # epochs have 9 steps
    for step in range(1, STEPS + 1):
        entry = next(r for r in run["record"] if r["step"] == step and "optim/lr" in r)
        assert math.isclose(entry["train/loss"], losses[step], rel_tol=1e-12)
        assert math.isclose(entry["optim/lr"], rates[step], rel_tol=1e-12)
        if step in found:
            assert math.isclose(found[step], scores[step], rel_tol=1e-12)
    saved = tensors_of(newest(run["directory"]), "ema")
    for name, weight in model.state_dict().items():
        assert relative_distance(weight, run["weights"][name]) < 1e-12
        assert relative_distance(average.state_dict()[name], saved[name]) < 1e-12
