"""State beyond parameters and persistent buffers: a resume has it, or a line names it."""

import itertools
import json
import random

import pytest
import torch
from harness import fit, fit_on, newest, on_ranks, slow_but
from harness.stored import plain_of
from harness.training import compose
from mesh_gpt import Block, Meshed, Net
from tiny import Tiny
from torch import nn

from trainer import ConfigError
from trainer.core.trainer import active_run

SHORT = [
    *("run.steps=4", "data.global_batch=12", "log.every_steps=1", "strategy.precision=fp64"),
    "eval.every_epochs=null",
]


class Normed(Block):
    """Block that divides by a moving average of its inputs' size, in a buffer."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.register_buffer("size_of_inputs", torch.ones(()), persistent=False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x, positions, *, mask):
        outputs = super().forward(x / self.size_of_inputs.clone(), positions, mask=mask)
        if self.training:
            with torch.no_grad():
                self.size_of_inputs.lerp_(x.square().mean(), 0.1)
        return outputs


class Moving(Meshed):
    def build_model(self):
        model = Net(self.options)
        options = (self.options.width, 4, self.options.dropout, self.options.inner)
        model.blocks = nn.ModuleList(Normed(*options) for _ in range(self.options.layers))
        return model


MESHES = {
    "ddp": (2, ["strategy=ddp"]),
    "pp": (2, ["strategy=pp"]),
    "fsdp": (2, ["strategy=fsdp"]),
    "tp": (2, ["strategy=tp"]),
    "exact": (2, ["strategy=exact", "data.micro_batch=3"]),
    "pp x fsdp": (4, ["strategy=pp_fsdp"]),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return fit_on(1, folder, "task=meshed", *SHORT, "run.steps=8", task=Moving)


@pytest.mark.parametrize("mesh", slow_but(MESHES, "pp"))
def test_buffer_that_the_model_does_not_save_is_resumed_in_any_layout(mesh, whole, tmp_path):
    ranks, words = MESHES[mesh]
    first = fit_on(ranks, tmp_path, "task=meshed", *words, *SHORT, task=Moving)
    index = json.loads(newest(first["directory"])["tensors.json"])
    assert sorted(index["buffer"]) == [f"blocks.{n}.size_of_inputs" for n in range(4)]
    assert not any("size_of_inputs" in name for name in index["model"])
    words = [
        f"run.resume={first['directory']}",
        "run.steps=8",
        "strategy=single",
        "data.micro_batch=null",
    ]
    then = fit_on(1, tmp_path, *words, task=Moving)
    for step in range(5, 9):
        assert then["losses"][step] == pytest.approx(whole["losses"][step], rel=1e-12)


class Rule:
    def __init__(self):
        self.calls = 0

    def __call__(self, step):
        self.calls += 1
        return 1.0


class Counting(torch.optim.SGD):
    """SGD that counts in an attribute, and in state that is of no parameter."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        self.state["steps"] = self.state.get("steps", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.state["steps"]
        return super().step(closure)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, x):
        self.calls += 1
        self.cache = torch.zeros(self.calls)
        return x


class Stateful(Tiny):
    """Task with every kind of state that a checkpoint does not hold, and with constants."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen = {"rows": [0]}
        self.random = random.Random(0)
        self.draws = random.Random(0)
        self.teacher = nn.Linear(4, 3)
        self.constants = (nn.Linear(4, 3), [1, 2], torch.ones(3), {"a": {4}}, print)
        self.rule = Rule()

    def build_model(self):
        return nn.Sequential(Counter(), super().build_model())

    def build_optimizer(self, model):
        return Counting(model.parameters(), lr=0.1, momentum=0.9)

    def build_schedule(self, num_steps):
        return self.rule

    def train_step(self, batch):
        outcome = super().train_step(batch)
        self.seen["rows"][0] += 22
        self.random.random()
        self.teacher.weight.data.mul_(0.9)
        return outcome


class Holding(Tiny):
    """Task whose optimizer keeps `value` in the state of its first parameter, or beside it."""

    key = "history"
    value = None

    def train_step(self, batch):
        outcome = super().train_step(batch)
        (optimizer,) = active_run(self).engine.optimizers
        if self.key == "beside":
            optimizer.state[self.key] = self.value
        else:
            optimizer.state[next(iter(optimizer.state))][self.key] = self.value
        return outcome


@pytest.mark.companion("startup_checks")
def test_state_that_no_checkpoint_holds_is_named_at_the_first_save(tmp_path, capfd):
    words = ["task=tiny", *SHORT, "checkpoint.every_steps=2"]
    first = fit_on(1, tmp_path, *words, task=Stateful)
    again = "so a resume starts from its first value"
    (line, cache) = [x for x in capfd.readouterr().out.splitlines() if x.startswith("warning:")]
    assert line == (
        "warning: a checkpoint does not hold Stateful.seen, Stateful.random, Stateful.teacher, "
        f"Stateful.rule and 3 more: training changes it, {again}; use self.step, torch's "
        "own generator, or register_buffer"
    )
    assert cache == (
        f"warning: a checkpoint does not hold 0.cache: its shape changed in training, {again}; "
        "build it with its final shape"
    )
    whole = fit_on(1, tmp_path / "whole", *words, "run.steps=8", task=Stateful)
    words = [f"run.resume={first['directory']}", "run.steps=8"]
    then = fit_on(1, tmp_path, *words, task=Stateful)
    assert then["losses"][8] == whole["losses"][8], "the optimizer's own count is lost"


class Slowing(torch.optim.SGD):
    count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        return super().step(closure)


class WithSlowing(Tiny):
    def build_optimizer(self, model):
        return Slowing(model.parameters(), lr=0.1)


class WithRule(Tiny):
    def build_schedule(self, num_steps):
        return Rule()


class Freezing(Tiny):
    def train_step(self, batch):
        if self.step == 1:
            next(self.model.parameters()).requires_grad_(False)
        return super().train_step(batch)


class Hooking(Tiny):
    def train_step(self, batch):
        if self.step == 1:
            self.model.register_forward_hook(lambda module, inputs, outputs: outputs / 2)
        return super().train_step(batch)


class Iterating(Tiny):
    """Task that takes the factors of its loss from iterators."""

    factor = 1.0

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.factors = iter([0.1 * number for number in range(99)])
        self.numbers = itertools.count()

    def train_step(self, batch):
        self.factor = next(self.factors) + next(self.numbers)
        return super().train_step(batch)

    def loss(self, outputs, targets):
        return super().loss(outputs, targets) * self.factor


LOST = {  # what is named of each task, on its own: no other state makes the trial impossible
    WithSlowing: "Slowing.count",
    WithRule: "Rule.calls",
    Freezing: "requires_grad of 0.weight",
    Hooking: "the hooks of model",
    Iterating: "Iterating.factors, Iterating.numbers, Iterating.factor",
}


def test_state_that_no_trial_can_give_back_is_named_too(tmp_path, capfd):
    """Such as that of an optimizer, which a trial does not step."""
    words = ["task=tiny", *SHORT, "checkpoint.every_steps=4"]
    compose(tmp_path, *words)

    def body():
        for task in LOST:
            fit(tmp_path / task.__name__, *words, task=task)
        known = fit(tmp_path / "whole", *words, task=Hooking)
        untried = fit(tmp_path / "untried", *words, "run.prove=false", task=Hooking)
        return known["losses"], untried["losses"]

    tried, untried = on_ranks(1, body)[0]
    assert tried == untried, "a hook of a trial stays"
    said = [x for x in capfd.readouterr().out.splitlines() if x.startswith("warning:")]
    for line, names in zip(said, LOST.values(), strict=False):
        assert line.startswith(f"warning: a checkpoint does not hold {names}: training changes it")


def test_optimizer_state_that_a_resume_could_not_load_is_refused_by_name(tmp_path):
    words = ["task=tiny", *SHORT, "optim=adamw"]
    compose(tmp_path, *words)
    no_layout = "has a tensor, which not every layout can load; keep each tensor as an entry"
    plain = "a checkpoint holds tensors, numbers and strings; keep it in the config"

    def body():
        for key, value, said in (
            ("history", {1, 2}, f"state[0.weight]['history'] has a set: {plain}"),
            ("history", [object()], f"state[0.weight]['history'] has a object: {plain}"),
            ("beside", torch.ones(2), f"state['beside'] {no_layout}"),
        ):
            Holding.key, Holding.value = key, value
            with pytest.raises(ConfigError) as told:
                Holding(compose(tmp_path / str(len(said)), *words)).fit()
            assert str(told.value).startswith(f"optimizer AdamW: {said}")

    on_ranks(1, body)


class Extra(nn.Module):
    """Module whose extra state is a tensor that grows."""

    calls = 0

    def forward(self, x):
        self.calls += self.training
        return x

    def get_extra_state(self):
        return torch.ones(self.calls)

    def set_extra_state(self, state):
        self.calls = len(state)


class WithExtra(Tiny):
    def build_model(self):
        return nn.Sequential(Extra(), super().build_model())


@pytest.mark.parametrize("strategy", slow_but(["ddp", "fsdp"], "fsdp"))
def test_extra_state_of_a_module_is_resumed_whatever_its_type(strategy, tmp_path):
    words = ["task=tiny", *SHORT, f"strategy={strategy}"]
    compose(tmp_path, *words)

    def body():
        seen = []
        for more in (words, [f"run.resume={tmp_path}/tiny/run", "run.steps=5"]):
            task = WithExtra(compose(tmp_path, *more))
            task.fit()
            state = plain_of(newest(tmp_path / "tiny" / "run"))["extra"]
            seen.append({name: len(value) for name, value in state.items()})
        return seen

    first, then = on_ranks(2, body)[0]
    assert first.keys() == then.keys() == {"0._extra_state"}
    assert then["0._extra_state"] == first["0._extra_state"] + 1
