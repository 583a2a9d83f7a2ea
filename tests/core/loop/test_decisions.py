"""One decision, all ranks: a bad step is skipped on every rank, and an event on one rank is known
to all."""

import os
import re
import signal

import pytest
import torch
from harness import CONF, check_equal_bits, fit, fit_on, on_ranks, slow_but
from tiny import Begun, Tiny, points
from torch import nn

from trainer import ConfigError, ResidentDataset, RunError, World, load_config
from trainer.core.checkpoints.run_directory import BAD_STEP
from trainer.core.distributed.group import process_group
from trainer.core.engine.step import Outcome
from trainer.core.loop.decisions import DeferredOutcomes, StepReport
from trainer.core.record import fingerprint

RECIPE = ["task=tiny", "run.steps=12", "log.every_steps=1", "optim.lr=0.3"]


class Spoiled(Begun):
    """Task in which the loss of step 5 (from 0) is NaN on the last rank only."""

    spoiled = (5,)

    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        is_here = self.world.rank == self.world.world_size - 1 and self.model.training
        is_spoiled = is_here and self.has_begun and self.step in self.spoiled
        return values * float("nan") if is_spoiled else values


class Lost(Spoiled):
    spoiled = tuple(range(12))


class SeldomGood(Spoiled):
    spoiled = tuple({*range(25)} - {9, 15})


def test_bad_steps_count_towards_the_limit_in_a_row_only(tmp_path):
    """Each is in the record; ten in a row would end the run."""
    run = fit_on(1, tmp_path, *RECIPE, "run.steps=25", task=SeldomGood)
    assert run["step"] == 25
    noted = {e["step"]: e[BAD_STEP] for e in run["record"] if BAD_STEP in e}
    assert sorted(noted) == [step + 1 for step in SeldomGood.spoiled]
    for step, why in noted.items():
        assert why.startswith(f"step {step}: the loss of example "), why
        assert why.endswith("on rank 0; the update was skipped"), why


class Unweighted(Tiny):
    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        return values, torch.full_like(
            values, float(self.step != 5 or not self.model.training)
        ).detach()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("ranks", slow_but([1, 2, 3], 3))
def test_non_finite_gradient_on_one_rank_is_skipped_on_all(ranks, optimizer, tmp_path, capfd):
    run = fit_on(
        ranks, tmp_path, *RECIPE, f"optim={optimizer}", task=Spoiled
    )  # compares the ranks' weights
    assert run["step"] == 12 and all(
        torch.isfinite(tensor).all() for tensor in run["weights"].values()
    )
    said = capfd.readouterr().out
    assert (
        "warning: step 6: the loss of example " in said
        and f"on rank {ranks - 1}; the update was skipped" in said
    )
    entries = {e["step"]: e["train/loss"] for e in run["record"] if "train/loss" in e}
    assert entries[6] is None and all(
        loss is not None for step, loss in entries.items() if step != 6
    )


def test_skipped_first_step_leaves_no_trace_in_the_optimizer(tmp_path):
    class First(Spoiled):
        spoiled = (0,)

    run = fit_on(1, tmp_path / "a", *RECIPE, task=First)
    assert all(
        torch.isfinite(tensor).all() and tensor.abs().max() < 1e3
        for tensor in run["weights"].values()
    )


def fails(folder):
    with pytest.raises(
        RunError,
        match=r"^step 10: the loss of .* on rank 1; and no finite gradient in 10 steps in a row$",
    ):
        fit(folder, *RECIPE, "run.prove=false", task=Lost)  # its loss depends on the rank


def test_run_in_which_nothing_is_learned_fails(tmp_path):
    on_ranks(2, fails, tmp_path)
    assert '"code": 1' in (tmp_path / "tiny/run/exit.json").read_text()


@pytest.mark.parametrize("ranks", [1, 2])
def test_step_without_weight_updates_nothing_and_is_reported(ranks, tmp_path, capfd):
    run = fit_on(ranks, tmp_path, *RECIPE, task=Unweighted)
    assert all(torch.isfinite(tensor).all() for tensor in run["weights"].values())
    assert (
        "warning: step 6: the weights of its examples sum to 0, so no parameter was updated"
        in capfd.readouterr().out
    )
    losses = {e["step"]: e["train/loss"] for e in run["record"] if "train/loss" in e}
    assert [step for step, loss in losses.items() if loss is None] == [6]
    words = [*RECIPE, "schedule=constant", "optim.momentum=0"]
    five, six = (
        fit_on(ranks, tmp_path / f"{n}", *words, f"run.steps={n}", task=Unweighted) for n in (5, 6)
    )
    check_equal_bits(five, six)


def part(weight=4.0, stops=0.0, found_inf=0.0):
    return Outcome(((torch.tensor([weight, stops]), torch.tensor(found_inf)),))


@pytest.mark.parametrize(
    ("odd", "report"),
    [
        (part(), StepReport(True, False, False)),
        (part(weight=0.0), StepReport(False, False, False)),
        (part(found_inf=1.0), StepReport(True, True, False)),
        (part(stops=2.0), StepReport(True, False, True)),
        (part(0.0, 1.0, 1.0), StepReport(False, True, True)),
    ],
)
def test_what_happened_in_either_of_two_updates_is_reported(odd, report):
    outcomes = DeferredOutcomes(wait=int)
    assert outcomes.push(odd + part()) is None
    assert outcomes.push(part() + odd) == report, "one step later"
    assert outcomes.flush() == report
    assert outcomes.flush() is None


class AskedIn(Begun):
    """Is asked to stop while it computes the loss of its step `asked` (from 0)."""

    asked = 0

    def build_dataset(self, split):
        return super().build_dataset(split) if split == "train" else None

    def loss(self, outputs, targets):
        if self.has_begun and self.step == self.asked:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(outputs, targets)


class AskedInTheLast(AskedIn):
    asked = 11


class AskedInABad(AskedIn):
    asked = 5

    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        return values * float("nan" if self.has_begun and self.step == 5 else 1)


@pytest.mark.parametrize(
    ("task", "step", "code"), [(AskedInTheLast, 12, 0), (AskedInABad, 7, 75), (AskedIn, 2, 75)]
)
def test_a_stop_counts_in_any_step_but_the_last(task, step, code, tmp_path):
    run = fit_on(1, tmp_path, *RECIPE, task=task)
    assert (run["step"], run["code"]) == (step, code)


class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(4, 3), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


class Partly(Tiny):
    def build_model(self):
        return Spare()


def refused(folder):
    with pytest.raises(
        ConfigError, match=r"strategy=ddp: the loss does not depend on the parameter spare\.weight"
    ):
        fit(folder, *RECIPE, task=Partly)


def test_parameter_without_a_gradient_is_named_under_ddp(tmp_path):
    on_ranks(2, refused, tmp_path)
    assert not list(tmp_path.glob("tiny/*/checkpoints/step-*"))


ONE_RANK = """from tiny import Tiny
from trainer import ConfigError
class Late(Tiny):
    def augment(self, inputs, targets, random, train):
        if self.world.rank == 1 and self.step == 3:
            raise ConfigError("this rank alone knows")
        return inputs, targets
"""


def test_error_of_the_user_on_one_rank_is_reported(command, tmp_path):
    (tmp_path / "late.py").write_text(ONE_RANK)
    done = command("--config-dir", CONF, "task=tiny", "task.trainer=late.Late", ranks=2)
    assert done.returncode != 0 and "this rank alone knows" in done.stderr


def two_groups():
    world = World.from_environment()
    with process_group(load_config(["task=tiny"], [CONF]).dist, world) as group:
        first = group.max(world.rank)
    with process_group(load_config(["task=tiny"], [CONF]).dist, world) as group:
        return first, group.max(world.rank)


def test_process_forms_one_group_after_another():
    """Each group has its own names in the store, because the addresses of the first are stale when
    the second forms."""
    for _ in range(3):
        assert on_ranks(2, two_groups) == [([1.0], [1.0])] * 2


def started_apart(folder, overrides):
    """Start each rank with its own overrides."""
    with pytest.raises(ConfigError) as error:
        fit(folder, *RECIPE, *overrides[World.from_environment().rank])
    return str(error.value)


@pytest.mark.parametrize(
    ("second", "line"),
    [
        (["optim.lr=0.2"], "optim.lr is 0.3 on rank 0 and 0.2 on rank 1: must be the same"),
        (["run.seed=1"], "run.seed is 0 on rank 0 and 1 on rank 1"),
        (["data.global_batch=24"], "data.global_batch is 22 on rank 0 and 24 on rank 1"),
        (["run.steps=13"], "run.steps is 12 on rank 0 and 13 on rank 1"),
        (["strategy.precision=fp32"], "strategy.precision is fp64 on rank 0 and fp32 on rank 1"),
        (["task.options.examples=204"], "task.options.examples is 203 on rank 0 and 204 on rank 1"),
        (["dist.hang_timeout_s=20"], "dist.hang_timeout_s is None on rank 0 and 20.0 on rank 1"),
    ],
)
def test_ranks_started_differently_are_refused_by_name(second, line, tmp_path):
    for said in on_ranks(2, started_apart, tmp_path, [[], second]):
        assert said.startswith(line), said
    assert not (tmp_path / "tiny").exists()


def change_lockstep():
    fingerprint._package_digest.cache_clear()
    fingerprint.PACKAGE = fingerprint.PACKAGE / "core"


DIGEST = "[0-9a-f]{12}"
UNLIKE = {  # -> (what a rank does, the key, the value on the others, its own one)
    "dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        *("the default dtype", "torch.float32", "torch.float64"),
    ),
    "torch": (
        lambda: setattr(torch, "__version__", "9.9.9"),
        *("torch's version", re.escape(torch.__version__), "9.9.9"),
    ),
    "Lockstep": (change_lockstep, "the code of trainer", DIGEST, DIGEST),
    "task": (
        lambda: setattr(fingerprint, "_module_digest", lambda base: "other"),
        *("the code of tiny", DIGEST, "other"),
    ),
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_rank_that_differs_without_a_setting_is_refused_by_name(kind, tmp_path):
    change, key, most, one = UNLIKE[kind]

    def refused():
        if World.from_environment().rank == 1:
            change()
        with pytest.raises(ConfigError) as error:
            fit(tmp_path, *RECIPE)
        return str(error.value)

    sides = f"{most} on ranks 0, 2 and {one} on rank 1"
    for line in on_ranks(3, refused):
        assert re.match(f"{key} is {sides}: must be the same; start all ranks with", line), line
    assert not (tmp_path / "tiny").exists()


class Uneven(Tiny):
    """Task that differs between ranks without a difference in the settings."""

    differs = ""

    def build_dataset(self, split):
        if self.differs == "eval" and split == "eval" and self.world.rank:
            return None
        return ResidentDataset(*points(203 + (self.differs == "length") * self.world.rank, split))

    def build_model(self):
        return nn.Linear(4, 3 + self.world.rank) if self.differs == "model" else nn.Linear(4, 3)


@pytest.mark.parametrize(
    ("differs", "line"),
    [
        ("length", "the train data's length is 203 on rank 0 and 204 on rank 1"),
        ("eval", "the eval data's length is 203 on rank 0 and None on rank 1"),
        ("model", r"the shape of weight is \[3, 4\] on rank 0 and \[4, 4\] on rank 1"),
    ],
)
def test_ranks_that_build_different_things_are_refused_by_name(differs, line, tmp_path):
    def refused():
        with pytest.raises(ConfigError, match=f"^{line}"):
            fit(tmp_path, *RECIPE, task=type("Differs", (Uneven,), {"differs": differs}))
        return True

    assert on_ranks(2, refused) == [True, True]
