"""Everything that first happens late in a run, in each strategy: none of it ends the run."""

import re

import pytest
import torch
from harness import CONF, fit, on_ranks, slow_but
from harness.training import compose
from mesh_gpt import Meshed
from tiny import Tiny
from torch import nn

from trainer import ConfigError
from trainer.core.strategy.modules import dry_run
from trainer.startup_checks import row_independence

EARLY = ["data.global_batch=12", "run.ema_decay=0.9", "run.clip_norm=1", "optim=adamw"]
LATE = [
    *("run.steps=14", "log.every_steps=3", "log.train_metrics=true", "eval.splits=[eval,more]"),
    *("log.histograms_every_steps=4", "dist.drift_every_steps=2", "eval.every_steps=3"),
    *("run.stop_after_evals=2", "run.min_improvement=9", "run.on_bad_step=rollback"),
    *("checkpoint.every_steps=2", "checkpoint.keep_last=1"),
]
PROFILE = "log.profile_steps=[2,3]"  # dear
LAYERS = ["task.options.layers=3", "data.micro_batch=3"]  # stages with different tensors


class Late:
    """Task with a second split, and a step that is bad when it is made for the first time."""

    has_begun = False
    has_been = False

    def build_dataset(self, split):
        return super().build_dataset("eval" if split == "more" else split)

    def augment(self, inputs, targets, random, train):
        Late.has_been |= train and self.step < 5 and self.has_begun  # rolled back
        self.has_begun |= train and self.step == 5
        return super().augment(inputs, targets, random, train)

    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        if self.step != 5 or Late.has_been or not self.model.training or not self.has_begun:
            return values
        if isinstance(values, tuple):
            return values[0] * float("nan"), values[1]
        return values * float("nan")


class LateMeshed(Late, Meshed):
    pass


class LateTiny(Late, Tiny):
    pass


CASES = {
    "single": (1, ["strategy=single", PROFILE]),
    "ddp": (2, ["strategy=ddp"]),
    "syncbn and amp": (2, ["task=tiny", "strategy=ddp_syncbn_amp", "task.options.norm=true"]),
    "exact": (2, ["strategy=exact"]),
    "fsdp": (2, ["strategy=fsdp"]),
    "hsdp": (4, ["strategy=hsdp", PROFILE]),
    "tp": (2, ["strategy=tp"]),
    "cp": (2, ["strategy=cp"]),
    "pp": (2, ["strategy=pp", *LAYERS]),
    "gpipe": (2, [PROFILE, "strategy=pp", "strategy.schedule=gpipe", *LAYERS]),
    "pp x fsdp": (4, ["strategy=pp_fsdp", *LAYERS]),
}


@pytest.mark.parametrize("case", slow_but(CASES, "ddp"))
def test_everything_that_happens_late_in_a_run(case, tmp_path, capfd):
    ranks, words = CASES[case]
    is_tiny = "task=tiny" in words
    words = [*([] if is_tiny else ["task=meshed"]), *words, *EARLY, *LATE]
    task = LateTiny if is_tiny else LateMeshed
    compose(tmp_path, *words)
    first = on_ranks(ranks, lambda: fit(tmp_path, *words, task=task))[0]
    said = capfd.readouterr().out
    assert first["code"] == 0 and first["step"] == 9
    assert re.search(r"warning: step 6: .*; rolling back to the newest checkpoint", said), said
    assert "no better eval/loss in 2 evaluations (run.stop_after_evals)" in said
    assert {"eval/loss", "more/loss"} <= first["metrics"].keys()
    checkpoints = sorted(path.name for path in (first["directory"] / "checkpoints").iterdir())
    assert checkpoints[-1] == "step-00000009" and len(checkpoints) <= 2
    assert PROFILE not in words or list(first["directory"].rglob("*trace.json*"))


class LatePositions(Meshed):
    """Compares the positions of a row from the third step on."""

    def loss(self, outputs, targets):
        values, weights = super().loss(outputs, targets)
        late = values * values.detach().mean(1, keepdim=True)
        return (late if self.step > 2 else values), weights


@pytest.mark.parametrize(("strategy", "ranks"), slow_but([("cp", 2), ("tp", 2)], ("cp", 2)))
def test_a_loss_that_compares_positions_later_is_named_under_context_parallel(
    strategy, ranks, tmp_path
):
    words = ["task=meshed", f"strategy={strategy}", "data.global_batch=12", "run.steps=12"]
    words.append("strategy.precision=fp64")

    def body():
        with pytest.raises(ConfigError) as told:
            LatePositions(compose(tmp_path, *words)).fit()
        return str(told.value)

    if strategy == "tp":
        assert on_ranks(ranks, lambda: fit(tmp_path, *words, task=LatePositions))[0]["code"] == 0
        return
    line = on_ranks(ranks, body)[0]
    assert "the loss of the divided model is " in line and "from that of the whole" in line


class MixesFrom(Tiny):
    """Scales the losses by the mean of their micro-batch from step `since` on."""

    since = 0

    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        return values * values.detach().mean() if self.step >= self.since else values


@pytest.mark.parametrize(("since", "step"), [(3, 9), (30, 99), (300, 999)])
def test_what_begins_late_is_looked_for_after_9_99_and_999_steps(since, step, tmp_path):
    words = ["task=tiny", "run.steps=1002", "data.global_batch=4", "data.micro_batch=2"]
    words += ["eval.every_epochs=null", "checkpoint.every_epochs=null", "log.every_steps=500"]
    words.append("optim.lr=0.0001")

    def body():
        with pytest.raises(ConfigError) as told:
            fit(tmp_path, *words, task=type("Late", (MixesFrom,), {"since": since}))
        return str(told.value)

    (line,) = on_ranks(1, body)
    assert line.startswith("run.prove=true: the loss mixes the rows of a micro-batch: ")
    assert f"; the state after step {step} is saved; " in line


def test_later_proofs_of_a_large_model_have_no_backward(tmp_path, monkeypatch):
    calls = []
    backward = torch.autograd.backward

    def counted(*arguments, **named):
        calls.extend(["proof"] if named.get("inputs") else [])
        return backward(*arguments, **named)

    monkeypatch.setattr(torch.autograd, "backward", counted)

    def count(name, steps):
        calls.clear()
        words = ["task=tiny", "strategy=single", f"run.steps={steps}", "data.global_batch=8"]
        assert fit(tmp_path / name, *words, task=Tiny)["code"] == 0
        return len(calls)

    first = count("first", 1)
    assert count("small", 3) > first > 0
    monkeypatch.setattr(row_independence, "LARGE_BYTES", 0)
    monkeypatch.setattr(dry_run, "LARGE_BYTES", 0)
    assert count("large", 3) == first


TICKING = """
import threading
from tiny import Tiny

DONE = threading.Event()

def tick():
    for number in range(2000):
        print(f"tick {number}", flush=True)
        if DONE.wait(0.001):
            break

class Ticking(Tiny):
    def build_model(self):
        threading.Thread(target=tick, daemon=True).start()
        return super().build_model()

    def train_step(self, batch):
        print("a step of a trial or of the run")
        return super().train_step(batch)
"""


def test_a_trial_hides_what_its_steps_print_and_nothing_of_other_threads(command):
    (command.folder / "ticking.py").write_text(TICKING)
    words = ["task=tiny", "task.trainer=ticking.Ticking", "run.steps=12"]
    done = command("--config-dir", CONF, *words)
    assert done.returncode == 0, done.stderr
    ticks = [int(number) for number in re.findall(r"tick (\d+)", done.stdout)]
    assert len(ticks) > 20 and ticks == [*range(len(ticks))]  # 87 came on a busy machine
    assert done.stdout.count("a step of a trial or of the run") == 12


class Counting(nn.Module):
    """Counts its passes in a buffer, which more micro-batches count faster."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, inputs):
        if self.training:
            self.passes += 1
        return inputs * (1 - 0.5 ** (1 + self.passes))


class CountsAnd(Tiny):
    """Has a note about more micro-batches at its first step."""

    def build_model(self):
        return nn.Sequential(Counting(), *super().build_model())


class ScalesByRank(CountsAnd):
    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        return values * (1 + self.world.rank) if self.step >= 3 else values


class OtherWeightsByRank(CountsAnd):
    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1 * (1 + 0.1 * self.world.rank))


class StepsByRank(CountsAnd):
    """Remembers a row of its rank in train_step, on which the next step depends."""

    row = 0.0

    def train_step(self, batch):
        if self.step >= 5:
            self.row = float(next(iter(batch))[1][0])
        return super().train_step(batch)

    def loss(self, outputs, targets):
        return super().loss(outputs, targets) * (1 + self.row)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (ScalesByRank, "differs on rank 1"),
        (OtherWeightsByRank, "rank 1 has other weights"),
        (StepsByRank, "rank 1 has other values of self.row"),
    ],
)
def test_a_note_about_another_layout_ends_no_check_of_this_one(task, words, tmp_path, capfd):
    more = ["task=tiny", "run.steps=12", "data.global_batch=12", "strategy=ddp", "optim=sgd"]

    def body():
        with pytest.raises(ConfigError) as told:
            fit(tmp_path, *more, task=task)
        return str(told.value)

    lines = on_ranks(2, body)
    assert words in lines[0]
    said = capfd.readouterr().out
    assert said.count("with more micro-batches this run would differ") == 1, said


def test_a_note_about_another_layout_is_said_once(tmp_path, capfd):
    more = ["task=tiny", "run.steps=12", "data.global_batch=12", "strategy=ddp"]
    (first, _) = on_ranks(2, lambda: fit(tmp_path, *more, task=CountsAnd))
    said = capfd.readouterr().out
    assert first["code"] == 0 and said.count("this run would differ") == 1, said
