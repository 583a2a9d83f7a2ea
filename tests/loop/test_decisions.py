"""One decision, all ranks: a bad step is skipped on every rank, and an event on one rank is known
to all."""

import pytest
import torch
from harness import CONF, fit, fit_on, on_ranks, slow_but
from tiny import Begun, Tiny, points
from torch import nn

from trainer import ConfigError, ResidentDataset, RunError, World, load_config
from trainer.distributed.group import process_group

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
