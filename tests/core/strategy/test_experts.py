"""Experts that the rows of some ranks do not use."""

import inspect
import re

import pytest
import torch
import torch.distributed as dist
from harness import CONF, check_parity, fit, fit_on, on_ranks, slow_but
from tiny import Tiny
from torch import nn

from trainer import ConfigError
from trainer.core.strategy.base import Strategy
from trainer.core.strategy.modules import dry_run

WORDS = (
    *("task=tiny", "data.global_batch=8", "run.steps=22", "experiment=parity"),
    *("eval.every_epochs=null", "strategy.find_unused_parameters=true", "optim=adamw"),
)


class Experts(nn.Module):
    """The first expert gets most rows, the second few, and others none."""

    def __init__(self, count):
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(count))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        hidden = self.embed(x)
        mixed = hidden
        for number, expert in enumerate(self.experts):
            rows = ((x[:, 0] > 1.2).long() == number).nonzero().flatten()
            if len(rows):
                mixed = mixed.index_add(0, rows, expert(hidden[rows]))
        return self.head(torch.tanh(mixed))


class Sparse(Tiny):
    count = 3

    def build_model(self):
        return Experts(self.count)

    def augment(self, inputs, targets, random, train):
        return inputs, targets


def test_experts_that_some_ranks_do_not_use_train_as_on_one(tmp_path):
    (one,) = on_ranks(1, lambda: fit(tmp_path, *WORDS, "strategy=single", task=Sparse))
    two = fit_on(2, tmp_path / "2", *WORDS, "strategy=fsdp", "data.micro_batch=2", task=Sparse)
    check_parity(one, two, falls=False)


class Two(Sparse):
    count = 2


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("task", "expert"), [("Two", 1), ("Sparse", 2)])
def test_unused_experts_are_named_without_the_setting(task, expert, strategy, command, tmp_path):
    """Also where one rank only does not use it, in a later step."""
    sources = [inspect.getsource(each) for each in (Experts, Sparse, Two)]
    header = "import torch\nfrom tiny import Tiny\nfrom torch import nn\n"
    (tmp_path / "sparse.py").write_text(header + "\n".join(sources))
    words = [f"task.trainer=sparse.{task}", *WORDS[:-2], f"strategy={strategy}"]
    _, _, err = command("--config-dir", CONF, *words, ranks=2)
    line = f"strategy={strategy}: the loss does not depend on the parameter experts.{expert}.weight"
    advice = "use it, set requires_grad=False, or set strategy.find_unused_parameters=true"
    assert f"{line}; {advice}" in err
    assert "Traceback" not in err and "enforce fail" not in err


class Blocks(Sparse):
    """Task whose experts are units, and which in the first steps uses all of them on each rank."""

    count, first = 2, 4

    def blocks(self, model):
        return list(model.experts)

    def augment(self, inputs, targets, random, train):
        if self.step < self.first:
            inputs[:, 0] = torch.arange(len(inputs)) % 2 * 2
        return inputs, targets


@pytest.mark.parametrize("first", slow_but([0, 4], 0))
def test_units_that_some_ranks_do_not_run_are_named_before_they_are_gathered(first, tmp_path):
    """Else parts of different experts would be joined, or gloo would end the process."""

    def train():
        task = type("Early", (Blocks,), {"first": first})
        words = [*WORDS[:-1], "strategy=fsdp", "data.micro_batch=2", "dist.timeout_s=3"]
        words.append("run.prove=false")  # it would name what augment does
        with pytest.raises((ConfigError, RuntimeError)) as error:
            fit(tmp_path, *words, task=task)
        return str(error.value)

    lines = on_ranks(2, train)
    others = "another rank does not" if first == 0 else "the other ranks do not"
    must = "each rank must run the same blocks in the same order: return larger blocks, such as"
    line = (
        rf"blocks\(model\): rank \d (runs experts.\d|ends a forward pass) where {others}; {must} "
    )
    assert any(re.match(line, each) for each in lines), "\n".join(lines)


class DrawsForPairs(Tiny):
    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        return values * torch.rand(len(values)) if len(values) > 1 else values


class SumsOnRanks(Tiny):
    def loss(self, outputs, targets):
        if len(targets) == 1 and self.world.rank:
            raise ValueError("a row has no other one")
        values = super().loss(outputs, targets)
        dist.all_reduce(values.detach().sum())
        return values


class Normed(Tiny):
    def build_model(self):
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))


def rows_of_dry_runs(folder, task, *words):
    """Return the rows that the dry run of a large model takes, and the losses of a few steps."""
    rows = []
    run = Strategy._dry_pass

    def noted(self, batch, objective):
        rows.append(len(batch[0]))
        return run(self, batch, objective)

    dry_run.LARGE_BYTES, Strategy._dry_pass = 0, noted
    return rows, fit(folder, *words, task=task)["losses"]


@pytest.mark.companion("startup_checks")
@pytest.mark.parametrize(
    ("task", "words", "rows"),
    [
        (Tiny, [], [1]),
        (Tiny, ["task.options.dropout=0.2"], [1]),
        (DrawsForPairs, [], [1]),  # and the proof finds that more rows draw
        (SumsOnRanks, [], [1, 4]),  # where a rank that fails would not be waited for
        (Blocks, [], [1, 4]),  # which reaches one of two experts
        (Normed, [], [1, 4]),  # which one row has no statistics for
    ],
)
def test_a_dry_run_takes_one_row_of_a_large_model_if_that_is_enough(task, words, rows, tmp_path):
    words = [*WORDS[:-2], "run.steps=3", "run.prove=warn", "data.micro_batch=4", *words]
    found = on_ranks(2, rows_of_dry_runs, tmp_path / "a", task, *words)
    assert [each for each, _ in found] == [rows, rows]
    losses = fit_on(2, tmp_path / "b", *words, task=task)["losses"]
    assert found[0][1] == losses


class Dropped(Blocks):
    """Task that leaves out a block in every third step, on all ranks."""

    def build_model(self):
        model = super().build_model()
        model.forward = lambda x: model.head(
            torch.tanh(sum(e(model.embed(x)) for e in model.experts if e not in self.left_out))
        )
        return model

    def train_step(self, batch):
        self.left_out = [self.model.experts[0]] if self.step % 3 == 2 else []
        return super().train_step(batch)

    left_out, first = (), 0


@pytest.mark.slow
def test_a_block_that_all_ranks_leave_out_is_none_of_their_differences(tmp_path):
    (one,) = on_ranks(1, lambda: fit(tmp_path, *WORDS, "strategy=single", task=Dropped))
    two = fit_on(2, tmp_path / "2", *WORDS, "strategy=fsdp", task=Dropped)
    check_parity(one, two, falls=False)
