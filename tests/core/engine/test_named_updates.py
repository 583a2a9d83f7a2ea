"""Updates that name their optimizers: the loss of one need not reach the parameters of another."""

import pytest
import torch
from gan import Both, Gan
from harness import PARITY, check_parity, fit_on, slow_but
from torch import nn

WORDS = ["task=gan", *PARITY, "run.clip_norm=0.5", "eval.every_epochs=null"]
LAYOUTS = {
    "ddp, accumulation": (2, ["data.micro_batch=5"]),
    "ddp": (2, []),
    "ddp x 3": (3, []),
    "static graph": (2, ["strategy.static_graph=true", "data.micro_batch=6"]),
    "unused are found": (2, ["strategy.find_unused_parameters=true"]),
    "zero1": (2, ["strategy=zero1"]),
    "exact": (2, ["strategy=exact"]),
    "fsdp": (2, ["strategy=fsdp", "data.micro_batch=6"]),
    "hsdp": (4, ["strategy=fsdp", "strategy.mesh.replicate=2", "strategy.mesh.shard=2"]),
}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return _sorted(fit_on(1, tmp_path_factory.mktemp("one"), *WORDS, task=Gan))


def _sorted(run):
    return {**run, "seen": [sorted(step) for step in run["seen"]]}  # each row once per update


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "ddp, accumulation"))
def test_an_update_needs_gradients_for_its_own_optimizers_only(layout, one, tmp_path):
    ranks, words = LAYOUTS[layout]
    check_parity(one, _sorted(fit_on(ranks, tmp_path, *WORDS, *words, task=Gan)), falls=False)


@pytest.mark.slow
def test_named_updates_go_on_after_a_resume_on_more_ranks(one, tmp_path):
    fit_on(1, tmp_path, *WORDS, "run.steps=10", task=Gan)
    two = _sorted(fit_on(2, tmp_path, *WORDS, "run.resume=auto", task=Gan))
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], weight, rtol=1e-9, atol=1e-11)


class Spare(Both):
    """Model whose judge has a layer that no update reaches."""

    def __init__(self):
        super().__init__()
        self.judge[0].spare = nn.Linear(2, 2)


class WithSpare(Gan):
    def build_model(self):
        return Spare()


class Unnamed(Gan):
    def train_step(self, batch):
        return self.update(batch)


REFUSED = {WithSpare: "judge.0.spare.weight", Unnamed: "make.0.weight"}


@pytest.mark.parametrize("strategy", slow_but(["ddp", "zero1", "exact", "fsdp"], "ddp"))
@pytest.mark.parametrize("task", REFUSED)
def test_a_parameter_that_an_update_steps_and_does_not_reach_is_named(task, strategy, tmp_path):
    line = f"strategy={strategy}: the loss does not depend on the parameter {REFUSED[task]}; use it"
    with pytest.raises(AssertionError, match=line):
        fit_on(2, tmp_path, *WORDS, f"strategy={strategy}", task=task)
