"""Experts that the rows of some ranks do not use."""

import inspect

import pytest
import torch
from harness import CONF, check_parity, fit, fit_on, on_ranks
from tiny import Tiny
from torch import nn

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
