"""A model or optimizer that the task changes in mid-run: it works, or one line says why not."""

import pytest
import torch
from harness import fit, fit_on, newest, on_ranks, slow_but
from harness.stored import tensors_of
from harness.training import compose
from tiny import Tiny
from torch import nn

from trainer import ConfigError

WORDS = [
    *("task=tiny", "run.steps=6", "eval.every_epochs=null", "log.every_steps=2"),
    "checkpoint.every_steps=6",
]


class Changed(Tiny):
    """Task that changes its model before step 4 as `how` says, on the ranks from `first` on."""

    how = ""
    first = 0

    def build_model(self):
        model = super().build_model()
        model[0].weight.requires_grad_(self.how != "unfreeze")
        return model

    def build_optimizer(self, model):
        trained = [p for p in model.parameters() if p.requires_grad]
        late = [model[0].weight] if self.how in ("group", "foreign group") else []
        early = [p for p in trained if not any(p is each for each in late)]
        return torch.optim.SGD(early, lr=0.1, momentum=0.9)

    def train_step(self, batch):
        if self.step == 3 and self.world.rank >= self.first:
            self.change(self.model)
        return super().train_step(batch)

    def change(self, model):
        last = model[4]
        (optimizer,) = self.optimizers
        if self.how == "freeze":
            model[0].weight.requires_grad_(False)
        elif self.how == "unfreeze":
            model[0].weight.requires_grad_(True)
        elif self.how == "append":
            model.append(nn.Linear(3, 3).double())
        elif self.how == "replace":
            model[4] = nn.Linear(16, 3).double()
        elif self.how == "recreate":
            last.weight = nn.Parameter(last.weight.detach().clone())
        elif self.how == "remove":
            last.bias = None
        elif self.how == "reshape":
            last.register_buffer("counts", torch.ones(3))
        elif self.how == "data":
            last.weight.data = last.weight.data / 2
        elif self.how == "copy":
            last.weight.data.copy_(last.weight.data / 2)
        elif self.how == "group":
            optimizer.add_param_group({"params": [model[0].weight], "lr": 0.05})
        elif self.how == "foreign group":
            optimizer.add_param_group({"params": [torch.ones(2, requires_grad=True)]})


def of(how, first=0):
    return type("Changed", (Changed,), {"how": how, "first": first})


OLD = "is another tensor than at the start, which alone is trained; write its values into the old"
LOST = "after the start, so no resume could load a checkpoint; "
REFUSED = {
    "append": "the parameter 5.weight was added after the start: nothing trains it; build it in",
    "replace": f"the parameter 4.weight {OLD}",
    "recreate": f"the parameter 4.weight {OLD}",
    "remove": f"the parameter 4.bias was removed {LOST}keep it",
    "unfreeze": "the parameter 0.weight requires a gradient now, but nothing trains it; build it",
    "reshape": f"4.counts was added {LOST}build it with its final shape, or use persistent=False",
    "foreign group": "optimizer SGD: a parameter group was added with a tensor that is not one of",
}


def refusal(how, folder, *words, first=0):
    with pytest.raises(ConfigError) as told:
        fit(folder / how, *words, task=of(how, first))
    return str(told.value)


def test_change_of_the_model_that_training_would_ignore_is_refused_by_name(tmp_path):
    words = [*WORDS, "strategy=single"]
    compose(tmp_path, *words)
    said = on_ranks(1, lambda: {how: refusal(how, tmp_path, *words) for how in REFUSED})[0]
    for how, line in REFUSED.items():
        assert said[how].startswith(line), said[how]


FROZEN = "the parameter 0.weight was frozen after the start; freeze it from the start by run.freeze"
ON_RANKS = {
    "ddp, on one rank": (["strategy=ddp"], "append", 1, REFUSED["append"]),
    "ddp": (["strategy=ddp"], "freeze", 0, f"strategy=ddp: {FROZEN}"),
    "fsdp": (["strategy=fsdp"], "recreate", 0, "a parameter called weight was replaced or"),
    "fsdp, a group": (
        *(["strategy=fsdp"], "group", 0),
        "optimizer SGD: a parameter group was added after the start, and this rank has parts only",
    ),
}


@pytest.mark.parametrize("case", slow_but(ON_RANKS, "ddp, on one rank", "fsdp"))
def test_change_of_the_model_is_refused_on_all_ranks_alike(case, tmp_path):
    words, how, first, line = ON_RANKS[case]
    words = [*WORDS, *words]
    compose(tmp_path, *words)
    said = on_ranks(2, lambda: refusal(how, tmp_path, *words, first=first))
    assert len(set(said)) == 1 and said[0].startswith(line), said


def test_parameter_group_that_is_added_in_training_is_resumed(tmp_path):
    words = [*WORDS, "run.steps=5", "checkpoint.every_steps=5"]
    compose(tmp_path, *words)

    def body():
        whole = fit(tmp_path / "whole", *words, "run.steps=7", task=of("group"))
        first = fit(tmp_path, *words, task=of("group"))
        words_ = [f"run.resume={first['directory']}", "run.steps=7"]
        return whole, fit(tmp_path, *words_, task=of("group"))

    check_same(*on_ranks(1, body)[0])


def check_same(one, other):
    loaded = [newest(each["directory"]) for each in (one, other)]
    for kind in ("model", "optimizer", "ema"):
        first, second = (tensors_of(each, kind) for each in loaded)
        assert first.keys() == second.keys()
        for name, tensor in first.items():
            assert torch.equal(tensor, second[name]), (kind, name)


@pytest.mark.slow
def test_moving_average_follows_a_parameter_whose_data_are_replaced(tmp_path):
    words = [*WORDS, "run.ema_decay=0.5"]
    check_same(*(fit_on(1, tmp_path / how, *words, task=of(how)) for how in ("data", "copy")))


@pytest.mark.slow
def test_parameter_that_is_frozen_in_training_is_frozen_in_any_layout(tmp_path, capfd):
    unused = [*WORDS, "strategy.find_unused_parameters=true"]
    single = fit_on(1, tmp_path / "1", *WORDS, "strategy=single", task=of("freeze"))
    assert "does not hold requires_grad of 0.weight: training changes it" in capfd.readouterr().out
    for strategy in ("ddp", "exact", "fsdp"):
        double = fit_on(2, tmp_path / strategy, *unused, f"strategy={strategy}", task=of("freeze"))
        for name, weight in single["weights"].items():
            assert torch.allclose(weight, double["weights"][name], rtol=1e-10), (strategy, name)
