"""Losses that use parameters: penalties and teachers, with whole and with divided models."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import check_parity, fit, fit_on, on_ranks
from tiny import Tiny
from torch import nn

from trainer.base.errors import ConfigError

WORDS = (
    *("task=tiny", "data.global_batch=24", "run.steps=20", "experiment=parity"),
    *("eval.every_epochs=null", "optim=sgd"),
)


class Taught(Tiny):
    """Distillation from a teacher that is an attribute of the task."""

    def build_model(self):
        self.teacher = nn.Linear(4, 3).requires_grad_(False).double()
        return super().build_model()

    def augment(self, inputs, targets, random, train):
        return inputs, targets

    def split_batch(self, batch):
        inputs, targets = batch
        return inputs, (inputs, targets)

    def metrics(self, outputs, targets):
        return {}

    def loss(self, outputs, targets):
        inputs, classes = targets
        soft = self.teacher(inputs).softmax(1)
        return super().loss(outputs, classes) + F.cross_entropy(outputs, soft, reduction="none")


class Penalised(Taught):
    def loss(self, outputs, targets):
        penalty = sum(p.square().sum() for p in self.model.parameters())
        return super().loss(outputs, targets) + 1e-2 * penalty


class PenalisedStep(Taught):
    def train_step(self, batch):
        penalty = sum(p.square().sum() for p in self.model.parameters())
        return self.update(batch, lambda *pair: self.loss(*pair) + penalty)


class Copied(Taught):
    def train_step(self, batch):
        self.teacher = copy.deepcopy(self.model)
        return super().train_step(batch)


@pytest.mark.parametrize(
    ("task", "words"),
    [(Penalised, ["strategy=ddp", "data.micro_batch=6"]), (Taught, ["strategy=fsdp"])],
)
def test_penalties_and_teachers_train_as_on_one_rank(task, words, tmp_path):
    (one,) = on_ranks(1, lambda: fit(tmp_path, *WORDS, "strategy=single", task=task))
    check_parity(one, fit_on(2, tmp_path / "2", *WORDS, *words, task=task), falls=False)


def refusals(folder, tasks, *words):
    lines = []
    for task in tasks:
        try:
            fit(folder / task.__name__, *WORDS, *words, task=task)
        except ConfigError as error:
            lines.append(str(error))
            dist.destroy_process_group()
    return lines


def test_parameters_that_a_mesh_divides_are_named_where_a_task_uses_them(tmp_path):
    advice = (
        "use weight_decay for a penalty, an attribute of the task for a fixed teacher, a frozen"
    )
    advice += " part of the model for one that follows it (docs/tasks.md, Penalties and teachers)"
    for lines in on_ranks(
        2, refusals, tmp_path, [Penalised, PenalisedStep, Copied], "strategy=fsdp"
    ):
        loss, step, copied = lines
        given = "strategy.mesh: the loss uses 0.weight, which this mesh divides"
        assert loss == f"{given}; {advice}, or strategy=zero1"
        for line in (step, copied):
            assert f"{__file__}:" in line
            why = "uses parameters that this mesh divides, or that other ranks have"
            assert line.endswith(f"{why}; {advice}, or strategy=zero1")


class Pair(nn.Module):
    """A student, and a frozen teacher."""

    def __init__(self):
        super().__init__()
        self.student = nn.Linear(4, 3)
        self.teacher = nn.Linear(4, 3).requires_grad_(False)

    def forward(self, inputs):
        return self.student(inputs), self.teacher(inputs)


class Following(Tiny):
    """Distillation from a teacher that follows the model, as docs/tasks.md shows."""

    def build_model(self):
        return Pair()

    def loss(self, outputs, targets):
        student, teacher = outputs
        values = F.cross_entropy(student, teacher.softmax(1), reduction="none")
        return values + super().loss(student, targets)

    def metrics(self, outputs, targets):
        return {}

    def train_step(self, batch):
        outcome = self.update(batch)
        pair = (self.model.teacher.parameters(), self.model.student.parameters())
        with torch.no_grad():
            for own, other in zip(*pair, strict=True):
                own.lerp_(other, 0.01)
        return outcome


def test_a_teacher_that_follows_the_model_may_be_a_frozen_part_of_it(tmp_path):
    (one,) = on_ranks(1, lambda: fit(tmp_path, *WORDS, "strategy=single", task=Following))
    two = fit_on(2, tmp_path / "2", *WORDS, "strategy=fsdp", task=Following)
    check_parity(one, two, falls=False)


class DoubleGradient(Taught):
    """A penalty on the gradient of the loss by the inputs, which the loss takes itself."""

    def build_model(self):
        model = super().build_model()
        model.register_forward_pre_hook(self._as_leaf)
        return model

    def _as_leaf(self, module, args):
        self.inputs = args[0].detach().requires_grad_()
        return (self.inputs,)

    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        if not torch.is_grad_enabled():
            return values
        (slope,) = torch.autograd.grad(values.sum(), self.inputs, create_graph=True)
        return values + slope.square().sum(1)


def test_gradients_of_gradients_train_under_ddp_and_are_refused_under_fsdp(tmp_path):
    one = fit_on(1, tmp_path / "one", *WORDS, "strategy=single", task=DoubleGradient)
    two = fit_on(2, tmp_path / "two", *WORDS, "strategy=ddp", task=DoubleGradient)
    check_parity(one, two, falls=False)
    line = "a gradient of a gradient needs parameters that are freed"
    with pytest.raises(AssertionError, match=line):
        fit_on(2, tmp_path / "parts", *WORDS, "strategy=fsdp", task=DoubleGradient)


class DoubleGradientOfRows(DoubleGradient):
    """The same through the rows of all ranks."""

    def loss(self, outputs, targets):
        if not torch.is_grad_enabled():
            return Taught.loss(self, outputs, targets)
        others, first = self.gather_rows(outputs)
        labels = first + torch.arange(len(outputs))
        values = nn.functional.cross_entropy(outputs @ others.T, labels, reduction="none")
        (slope,) = torch.autograd.grad(values.sum(), self.inputs, create_graph=True)
        return values + slope.square().sum(1)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (DoubleGradient, ["task.options.norm=true", "strategy.sync_batchnorm=true"]),
        (DoubleGradientOfRows, ["optim.lr=0.001"]),
    ],
)
def test_gradients_of_gradients_pass_through_all_ranks(task, words, tmp_path):
    one = fit_on(1, tmp_path / "one", *WORDS, *words, task=task)
    two = fit_on(2, tmp_path / "two", *WORDS, *words, "strategy=ddp", task=task)
    check_parity(one, two, falls=False)
