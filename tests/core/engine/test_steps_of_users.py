"""Optimizers whose step changes gradients or weights around that of another class or optimizer."""

import pytest
import torch
from harness import PARITY, check_parity, fit_on, on_ranks, slow_but
from mesh_gpt import Meshed
from test_optimizers import DIVIDED, refusals
from torch.optim import SGD, AdamW, Muon, Optimizer


def stepped(optimizer):
    every = [p for group in optimizer.param_groups for p in group["params"]]
    return [p for p in every if p.grad is not None]


class Adaptive(SGD):
    """Adaptive gradient clipping: by the norm of each row of a weight."""

    def step(self, closure=None):
        for p in stepped(self):
            dims = tuple(range(1, p.dim())) or None
            norm = p.detach().norm(dim=dims, keepdim=True).clamp_min(1e-3)
            size = p.grad.norm(dim=dims, keepdim=True).clamp_min(1e-6)
            p.grad.mul_((0.1 * norm / size).clamp_max(1))
        return super().step(closure)


class Twofold(Adaptive):
    """Changes the gradients twice, and reads them after the step of its base."""

    def step(self, closure=None):
        before = [p.grad.clone() for p in stepped(self)]
        super().step(closure)
        with torch.no_grad():
            for p, gradient in zip(stepped(self), before, strict=True):
                p.add_(gradient - p.grad, alpha=-0.01)


class Central(Muon):
    def step(self, closure=None):
        for p in stepped(self):
            p.grad = p.grad - p.grad.mean(dim=1, keepdim=True)
        return super().step(closure)


class Cautious(AdamW):
    """Moves only where the step has the sign of the gradient (Liang et al., arXiv:2411.16085)."""

    @torch.no_grad()
    def step(self, closure=None):
        before = [p.clone() for p in stepped(self)]
        super().step(closure)
        for p, was in zip(stepped(self), before, strict=True):
            mask = ((was - p) * p.grad > 0).to(p.dtype)
            p.copy_(was + (p - was) * mask / mask.mean().clamp_min(1e-3))


class Lookahead(Optimizer):
    """Wrapper that does not call Optimizer.__init__, as the best-known one."""

    def __init__(self, base):
        self.base = base
        self.param_groups = base.param_groups
        self.state = base.state
        for group in self.param_groups:
            group["count"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step(closure)
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                if group["count"] % 3 == 0:
                    p.copy_(slow.lerp_(p, 0.5))


class ByUsers(Meshed):
    """Task with an optimizer of each kind."""

    def build_optimizer(self, model):
        AdamW([torch.nn.Parameter(torch.zeros(1))])  # torch wraps the steps of its classes now
        every = list(model.parameters())
        matrices = [p for p in every if p.dim() == 2]
        rest = [p for p in every if p.dim() != 2]
        momentum = {"lr": 0.1, "momentum": 0.9}
        return [
            Adaptive([*matrices[::5], *rest[::4]], **momentum),
            Twofold([*matrices[1::5], *rest[1::4]], **momentum),
            Central(matrices[2::5], lr=0.02),
            Cautious([*matrices[3::5], *rest[2::4]], lr=0.01),
            Lookahead(SGD([*matrices[4::5], *rest[3::4]], **momentum)),
        ]


WORDS = ["task=meshed", *PARITY, "data.global_batch=24", "run.clip_norm=null"]
MESH = ["strategy=parallel", "strategy.mesh.replicate=1"]
LAYOUTS = {
    "fsdp": ["strategy=fsdp"],
    "zero1": ["strategy=zero1"],
    "ddp": ["strategy=ddp"],
    "exact": ["strategy=exact"],
    "tensor": [*MESH, "strategy.mesh.tensor=2"],
    "pipeline": [*MESH, "strategy.mesh.pipeline=2", "data.micro_batch=6"],
}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return fit_on(1, tmp_path_factory.mktemp("one"), *WORDS, "strategy=single", task=ByUsers)


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "fsdp", "zero1"))
def test_steps_around_other_steps_are_the_same_in_any_layout(layout, one, tmp_path):
    check_parity(one, fit_on(2, tmp_path, *WORDS, *LAYOUTS[layout], task=ByUsers), falls=False)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "zero1"])
def test_a_wrapped_optimizer_goes_on_after_a_resume(layout, one, tmp_path):
    begun = [*WORDS, "run.steps=10", "strategy=single"]
    fit_on(1, tmp_path, *begun, task=ByUsers)
    more = [*WORDS, "run.resume=auto", *LAYOUTS[layout]]
    two = fit_on(2, tmp_path, *more, task=ByUsers)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], weight, rtol=1e-9, atol=1e-11)


# Refused ------------------------------------------------------------------------------------------


class WithState(Lookahead):
    def __init__(self, parameters, **options):
        super().__init__(SGD(parameters, **options))
        self.state = {}


class WithList(Lookahead):
    def __init__(self, parameters, **options):
        super().__init__(SGD(parameters, **options))
        self.slow = [p.detach().clone() for p in stepped(self)]
        self.slow += [p.detach().clone() for g in self.param_groups for p in g["params"]]


class Limited(SGD):
    """Clips the norm of all gradients, to one that is seldom reached."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(stepped(self), 100.0)
        super().step(closure)


def replaced(parameters, **options):
    optimizer = SGD(parameters, **options)
    step = optimizer.step
    optimizer.step = lambda closure=None: step(closure)
    return optimizer


REFUSED = {
    WithState: "WithState wraps an optimizer whose state no checkpoint holds; share it:"
    " self.state = base.state",
    WithList: f"WithList keeps tensors of its parameters outside of its state, {DIVIDED}; make"
    " them in the first step, in self.state[parameter], or use ddp",
    Limited: f"Limited steps a parameter by the values of others, {DIVIDED}; use ddp",
    replaced: "SGD has another step than its class, which cannot be tried; write a class with this"
    " step, or use ddp",
}


def test_steps_that_a_divided_model_cannot_make_are_refused(tmp_path):
    expected = {k.__name__: f"build_optimizer: {line}" for k, line in REFUSED.items()}
    for lines in on_ranks(2, refusals, tmp_path, REFUSED, "strategy=fsdp"):
        assert lines == expected
    (lines,) = on_ranks(1, refusals, tmp_path, REFUSED, "strategy=single")
    assert lines == {"WithState": expected["WithState"]}
