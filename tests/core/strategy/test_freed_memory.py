"""Under fsdp: outputs that share the memory of parameters, gradients that a task takes itself."""

import re

import pytest
import torch
import torch.nn.functional as F
from harness import check_parity, fit_on, on_ranks
from test_divided_parameters import WORDS, refusals
from tiny import Tiny
from torch import nn


class Net(nn.Module):
    """A net that returns a parameter, or a view of one, beside its scores."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.first = nn.Linear(4, 16)
        self.last = nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.ones(6, 3))

    def forward(self, x):
        scores = self.last(torch.tanh(self.first(x))) * self.scale.mean(0)
        if self.how == "attribute":
            self.kept = self.scale[:2]
        beside = {
            "view": lambda: (self.scale[:2],),
            "parameter": lambda: (self.scale,),
            "in a dict": lambda: {"weights": [self.scale.detach().t()]},
            "evaluation": lambda: self.scale[0] if not self.training else self.scale[0].clone(),
            "clone": lambda: self.scale[:2].clone(),
        }
        return scores, beside.get(self.how, lambda: ())()


class Returning(Tiny):
    how = ""

    def build_model(self):
        return Net(self.how)

    def loss(self, outputs, targets):
        scores, beside = outputs
        values = super().loss(scores, targets)
        every = (
            [self.model.kept]
            if self.how == "attribute"
            else torch.utils._pytree.tree_leaves(beside)
        )
        return values + 0.01 * sum(tensor.square().sum() for tensor in every)

    def metrics(self, outputs, targets):
        return {}


def returning(how):
    return type(how, (Returning,), {"how": how})


OUTPUT = "strategy.mesh: the output of the model shares memory with the parameter scale, which fsdp"
OUTPUT += " frees after the forward pass; return .clone() of it"
KEPT = "strategy.mesh: the loss uses a part of a parameter, which fsdp frees after the forward"
KEPT += " pass; keep .clone() of it"
VIEWS = {
    **dict.fromkeys(("view", "parameter", "in a dict", "evaluation"), OUTPUT),
    "attribute": KEPT,
}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_an_output_that_is_a_view_of_a_sharded_parameter_is_named_on_all_ranks(tmp_path):
    tasks = [returning(how) for how in VIEWS]
    for lines in on_ranks(2, refusals, tmp_path, tasks, "strategy=fsdp", "eval.every_epochs=1"):
        assert lines == list(VIEWS.values())


@pytest.mark.slow
def test_a_clone_of_a_parameter_may_be_an_output(tmp_path):
    task = returning("clone")
    one = fit_on(1, tmp_path / "one", *WORDS, "strategy=single", task=task)
    two = fit_on(2, tmp_path / "two", *WORDS, "strategy=fsdp", task=task)
    check_parity(one, two, falls=False)


class OfParameters(Tiny):
    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        if torch.is_grad_enabled():
            every = list(self.model.parameters())
            found = torch.autograd.grad(values.mean(), every, create_graph=True)
            values = values + 0.01 * sum(gradient.square().sum() for gradient in found)
        return values


class InStep(Tiny):
    def train_step(self, batch):
        ((inputs, targets),) = batch
        value = F.cross_entropy(self.model(inputs), targets)
        torch.autograd.grad(value, list(self.model.parameters()), allow_unused=True)
        return self.update(batch)


def test_torchs_gradients_of_sharded_parameters_are_refused(tmp_path):
    why = "is asked for gradients of parameters, which this mesh divides"
    advice = "use strategy=ddp, as only update computes gradients of parameters there"
    line = rf"strategy.mesh: torch.autograd.grad at {re.escape(__file__)}:\d+ {why}; {advice}"
    for lines in on_ranks(2, refusals, tmp_path, [OfParameters, InStep], "strategy=fsdp"):
        assert len(lines) == 2 and all(re.fullmatch(line, each) for each in lines)
