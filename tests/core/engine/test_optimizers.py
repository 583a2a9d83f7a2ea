"""Optimizers of users: steps that need a closure, hooks, other parameters, or two gradients."""

import copy
import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import check_parity, fit, fit_on, on_ranks, slow_but
from mesh_gpt import Meshed
from tiny import Tiny
from torch import nn

from trainer import Trainer
from trainer.base.errors import ConfigError
from trainer.core.engine.step import step_unless

PAGE = (Path(__file__).resolve().parents[3] / "docs/tasks.md").read_text()
WORDS = ("task=tiny", "data.global_batch=24", "eval.every_epochs=null", "run.steps=20")


class Plain(Tiny):
    def augment(self, inputs, targets, random, train):
        return inputs, targets


def recipe():
    """Return a task with the methods of the page's SAM."""
    names = {"torch": torch, "Plain": Plain}
    blocks = re.findall(r"```python\n(.*?)```", PAGE[PAGE.index("SAM takes") :], re.S)
    body = "".join(f"    {line}\n" for line in blocks[1].splitlines())
    exec(f"{blocks[0]}\nclass Sam(Plain):\n{body}", names)
    return names["Sam"]


Sam = recipe()


class Checked(Sam):
    """SAM beside the two steps of its paper, written in plain torch."""

    twin = None

    def train_step(self, batch):
        if self.twin is None:
            self.twin = copy.deepcopy(self.model)
            self.plain = torch.optim.SGD(self.twin.parameters(), lr=1.0, momentum=0.9)
        ((inputs, targets),) = batch
        weights = list(self.twin.parameters())
        gradients = torch.autograd.grad(self.loss(self.twin(inputs), targets).mean(), weights)
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        before = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.add_(0.05 * gradient / norm)
        self.loss(self.twin(inputs), targets).mean().backward()
        with torch.no_grad():
            for weight, value in zip(weights, before, strict=True):
                weight.copy_(value)
        outcome = super().train_step(batch)
        self.plain.param_groups[0]["lr"] = self.optimizers[1].param_groups[0]["lr"]
        self.plain.step()
        self.plain.zero_grad()
        for one, other in zip(self.model.parameters(), weights, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
        return outcome


@pytest.mark.slow
def test_sam_as_two_updates_is_sam_in_any_layout_with_whole_weights(tmp_path):
    words = (*WORDS, "experiment=parity", "run.clip_norm=null", "optim=sgd", "optim.momentum=0.9")
    (one,) = on_ranks(1, lambda: fit(tmp_path, *words, "strategy=single", task=Checked))
    for more in (("data.micro_batch=6",), ("strategy=exact",)):
        two = fit_on(2, tmp_path / more[0], *words, *more, task=Sam)
        two["seen"] = one["seen"]  # each rank takes its rows twice, one update after the other
        check_parity(one, two, falls=False)
    (record,) = [
        entry for entry in one["record"] if entry.get("step") == 20 and "optim/lr" in entry
    ]
    assert {"train/loss", "train/perturbed"} <= record.keys()


# Refused ------------------------------------------------------------------------------------------


class InLoop(Plain):
    """Task that steps a twin of its model in a plain loop, and compares the weights."""

    twin = None

    def train_step(self, batch):
        if self.twin is None:
            self.twin = copy.deepcopy(self.model)
            spec = dict(self.config.optim)
            kind = getattr(torch.optim, spec.pop("_target_").rpartition(".")[2])
            self.plain = kind(self.twin.parameters(), **spec)  # not fused
            self.before = [p.detach().clone() for p in self.model.parameters()]
        ((inputs, targets),) = batch
        self.plain.zero_grad()
        amp = self.config.strategy.precision.startswith("amp")
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = self.loss(self.twin(inputs), targets).mean()
        loss.backward()
        self.plain.step()
        outcome = super().train_step(batch)
        pairs = zip(self.model.parameters(), self.twin.parameters(), self.before, strict=True)
        for own, other, first in pairs:
            moved = (other.double() - first.double()).norm()
            off = (own.double() - other.double()).norm() / moved
            assert off < (0.1 if own.dtype == torch.bfloat16 else 1e-5)
        return outcome


KINDS = {
    "SGD": ["optim=sgd", "optim.nesterov=true", "optim.weight_decay=0.01"],
    "Adam": ["optim=adam", "optim.lr=0.01"],
    "AdamW": ["optim=adamw", "optim.lr=0.01"],
}
IN_LOOPS = list(itertools.product(KINDS, ("bf16", "fp64", "fp32", "amp_bf16")))


@pytest.mark.parametrize(("kind", "precision"), slow_but(IN_LOOPS, *IN_LOOPS[:2], IN_LOOPS[8]))
def test_fused_optimizers_step_as_in_a_plain_loop(kind, precision, tmp_path):
    words = [*KINDS[kind], f"strategy.precision={precision}", "strategy=single"]
    words += ["schedule=constant", "task.options.dropout=0", "run.steps=5"]
    fit(tmp_path, *WORDS, *words, task=InLoop)


class Asserting(torch.optim.SGD):
    def step(self, closure=None):
        if closure is None:
            raise AssertionError("SAM requires a closure")


class Moded(torch.optim.SGD):
    def train(self):
        raise AssertionError

    eval = train


class NormOfAll(torch.optim.SGD):
    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in every])
        for p in every:
            p.grad /= norm
        super().step()


class Norms(torch.optim.SGD):
    """Optimizer that needs whole parameters, one at a time."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad /= p.grad.norm()
        super().step()


class Listing(torch.optim.SGD):
    def __init__(self, parameters, **options):
        self.listed = list(parameters)
        super().__init__(self.listed, **options)

    def step(self, closure=None):
        super().step()


class Wrapper(torch.optim.SGD):
    def __init__(self, parameters, **options):
        parameters = list(parameters)
        super().__init__(parameters, **options)
        self.base = torch.optim.SGD(parameters, **options)
        self.base.state = self.state


def hooked(parameters, **options):
    optimizer = torch.optim.SGD(parameters, **options)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


NEEDS = "step needs a closure, and `update` has none"
DIVIDED = "and ranks step different ones"


def scheduled(parameters, lr):
    optimizer = torch.optim.SGD(parameters, lr=lr)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


EVERYWHERE = {
    scheduled: "SGD has a scheduler of torch, whose rates schedule= would overwrite; leave it out,"
    " and write build_schedule",
    torch.optim.LBFGS: f"LBFGS.{NEEDS} (LBFGS.step() missing 1 required positional argument:"
    " 'closure'); see SAM in docs/tasks.md",
    Asserting: f"Asserting.{NEEDS} (SAM requires a closure); see SAM in docs/tasks.md",
    Moded: "Moded has train() and eval(), which move the weights between steps; use an optimizer"
    " without, such as optim=adamw with run.ema_decay",
}
ON_A_MESH = {
    hooked: "SGD has a step hook, which would get parts of parameters; put it into the step of a"
    " class of your own, or use ddp",
    NormOfAll: f"NormOfAll steps a parameter by the values of others, {DIVIDED}; use ddp",
    Listing: f"Listing keeps parameters outside of param_groups, {DIVIDED}; read them from"
    " param_groups, or use ddp",
    Wrapper: f"Wrapper wraps an optimizer with param_groups of its own, {DIVIDED}; share them, or"
    " use ddp",
}


def built(kind):
    class Built(Plain):
        def build_optimizer(self, model):
            return kind(model.parameters(), lr=0.1)

    return Built


def refusals(folder, kinds, *words):
    lines = {}
    for number, kind in enumerate(kinds):
        try:
            fit(folder / str(number), *WORDS[:-1], "run.steps=2", *words, task=built(kind))
        except ConfigError as error:
            lines[kind.__name__] = str(error)
            if dist.is_initialized():
                dist.destroy_process_group()
    return lines


def test_optimizers_that_an_update_cannot_step_are_refused_before_training(tmp_path):
    (lines,) = on_ranks(1, refusals, tmp_path, EVERYWHERE, "strategy=single")
    assert lines == {k.__name__: f"build_optimizer: {line}" for k, line in EVERYWHERE.items()}


def test_optimizers_that_need_the_whole_model_are_refused_where_it_is_divided(tmp_path):
    expected = {k.__name__: f"build_optimizer: {line}" for k, line in ON_A_MESH.items()}
    for strategy in ("fsdp", "zero1"):
        words = [*ON_A_MESH, Norms], f"strategy={strategy}"
        for lines in on_ranks(2, refusals, tmp_path / strategy, *words):
            assert lines == expected
    (lines,) = on_ranks(1, refusals, tmp_path, ON_A_MESH, "strategy=single")
    assert lines == {}


MUON = ("task=meshed", "optim=muon", "data.global_batch=24", "run.steps=4", "optim.lr=0.01")


class Seen(Meshed):
    """Task that checks what its optimizers step."""

    def build_optimizer(self, model):
        optimizers = Trainer.build_optimizer(self, model)
        names = {p: name for name, p in model.named_parameters()}
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        muon, adamw = ({names[p] for p in group["params"]} for group in groups)
        assert [type(each).__name__ for each in optimizers] == ["Muon", "AdamW"]
        assert muon and all(dict(model.named_parameters())[name].dim() == 2 for name in muon)
        assert "embed.weight" in adamw and muon | adamw == set(names.values())
        return optimizers


@pytest.mark.parametrize("layout", slow_but(["strategy=ddp", "strategy=fsdp"], "strategy=ddp"))
def test_optim_muon_steps_the_matrices_of_any_task(layout, tmp_path):
    one = fit_on(1, tmp_path / "one", *MUON, "strategy=single", task=Seen)
    two = fit_on(2, tmp_path / "two", *MUON, layout, task=Seen)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)


class Late(Plain):
    """Task with a layer that is used from the third step on."""

    def build_model(self):
        return TwoLayers()

    def train_step(self, batch):
        self.model.is_on = self.step >= 2
        return super().train_step(batch)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 3)
        self.two = nn.Linear(4, 3)
        self.is_on = True

    def forward(self, inputs):
        return self.one(inputs) + self.two(inputs) if self.is_on else self.one(inputs)


def test_a_parameter_may_get_its_first_gradient_late(tmp_path):
    """With the default optimizer: torch's fused SGD takes no parameter without momentum then."""
    words = [*WORDS, "strategy.precision=fp64", "log.every_steps=1"]
    one = fit_on(1, tmp_path / "one", *words, "strategy=single", task=Late)
    two = fit_on(2, tmp_path / "two", *words, "strategy.find_unused_parameters=true", task=Late)
    check_parity(one, two, falls=False)
    assert one["code"] == 0


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}])
def test_a_late_parameter_steps_as_with_torchs_plain_sgd(options):
    """Its first update is that of a new buffer; with dampening a buffer of zeros gives another."""

    def trained(is_fused):
        parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
        optimizer = torch.optim.SGD(parameters, lr=0.1, fused=is_fused, **options)
        for step in range(4):
            for number, parameter in enumerate(parameters):
                is_late = number == 1 and step < 2
                parameter.grad = None if is_late else torch.full_like(parameter, 1.0 + step)
            if is_fused:
                step_unless([optimizer], torch.zeros(()))
            else:
                optimizer.step()
        return torch.cat([p.detach() for p in parameters])

    if options.get("dampening"):
        with pytest.raises((TypeError, ConfigError, RuntimeError)):
            trained(True)
        return
    torch.testing.assert_close(trained(True), trained(False))


class Exchanging(torch.optim.SGD):
    """An optimizer that sums its gradients itself, as nanochat's."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
        super().step(closure)


class WithExchange(Tiny):
    def build_optimizer(self, model):
        return Exchanging(model.parameters(), lr=0.1)


def test_an_optimizer_that_communicates_is_named(tmp_path):
    line = "build_optimizer: Exchanging.step exchanges tensors between ranks itself; the gradients"
    with pytest.raises(AssertionError, match=line):
        fit_on(2, tmp_path, "task=tiny", task=WithExchange)
