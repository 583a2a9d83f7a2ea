"""Weights that do not train are left out of checkpoints, which name their digests."""

import math
import shutil

import pytest
import torch
from harness import fit_on, newest, on_ranks, slow_but
from harness.stored import tensors_of
from harness.training import compose
from mesh_gpt import Meshed
from torch import nn

from trainer.core.loop.run import Run
from trainer.show.audit import audit
from trainer.use.export import write_stored

WORDS = ["task=meshed", "strategy.precision=fp64", "run.steps=3", "optim=adamw", "optim.lr=0.05"]
LAYOUTS = {
    "single": (1, ["strategy=single"]),
    "ddp 2": (2, ["strategy=ddp"]),
    "zero1 2": (2, ["strategy=zero1"]),
    "fsdp 2": (2, ["strategy=fsdp"]),
    "fsdp 3": (3, ["strategy=fsdp"]),
    "hsdp 4": (4, ["strategy=hsdp"]),
    "tp 2": (2, ["strategy=tp"]),
    "pp 2": (2, ["strategy=pp"]),
}


class Adapter(nn.Module):
    """A frozen linear layer, and two small matrices that train."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Adapted(Meshed):
    """The small GPT with adapters on two layers of each block; all else is frozen."""

    factor = 1.0
    is_open = False

    def build_model(self):
        model = super().build_model().requires_grad_(self.is_open)
        with torch.no_grad():
            model.position.mul_(self.factor)
        for block in model.blocks:
            block.widen = Adapter(block.widen)
            block.project = Adapter(block.project)
        return model

    def tensor_plan(self):
        return {
            "blocks.*.widen.base": "columns",
            "blocks.*.widen.up": "columns",
            "blocks.*.narrow": "rows",
        }


class OtherBase(Adapted):
    factor = 2.0


class Opened(Adapted):
    """The same model, of which everything trains but the layers under adapters."""

    is_open = True


class OpenedOtherBase(Opened):
    factor = 2.0


def run(folder, layout="single", *words, task=Adapted):
    ranks, strategy = LAYOUTS[layout]
    return fit_on(ranks, folder, *WORDS, *strategy, *words, task=task)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a run on one rank."""
    return run(tmp_path_factory.mktemp("trained"), "single", "run.ema_decay=0.5")["directory"]


def is_trained(name):
    return ".down." in name or ".up." in name


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "fsdp 2"))
def test_a_checkpoint_holds_what_trains_and_digests_of_the_rest(layout, tmp_path):
    checkpoint = newest(run(tmp_path, layout, "run.ema_decay=0.5")["directory"])
    for kind in ("model", "ema"):
        saved = tensors_of(checkpoint, kind)
        assert saved and all(map(is_trained, saved)), kind
    frozen = checkpoint.manifest["frozen"]
    assert not any(map(is_trained, frozen)) and {"embed.weight", "head.weight"} <= frozen.keys()
    assert frozen["position"][:2] == ["float32", [8, 16]]
    assert frozen["embed.weight"] == frozen["head.weight"]  # tied
    assert {entry["rank"] for entry in checkpoint.manifest["files"].values()} >= {0}


PAIRS = list(zip(LAYOUTS, [*LAYOUTS][3:] + [*LAYOUTS][:3], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("saved, resumed", PAIRS)
def test_any_layout_resumes_the_adapters_of_any_other(saved, resumed, trained, tmp_path):
    words = ["run.ema_decay=0.5"]
    shutil.copytree(trained.parent.parent, tmp_path / "whole")
    whole = run(tmp_path / "whole", "single", *words, "run.steps=5", "run.resume=auto")
    whole = newest(whole["directory"])
    run(tmp_path / "parts", saved, *words)
    last = run(tmp_path / "parts", resumed, *words, "run.steps=5", "run.resume=auto")
    found = newest(last["directory"])
    assert found.manifest["frozen"] == whole.manifest["frozen"]
    for kind in ("model", "ema", "optimizer"):
        one, other = (tensors_of(each, kind) for each in (whole, found))
        assert one.keys() == other.keys()
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=1e-9, atol=1e-11)


def refusal(folder, layout="single", *words, task=OtherBase):
    with pytest.raises(AssertionError) as caught:
        run(folder, layout, *words, task=task)
    return str(caught.value)


def test_another_base_is_refused_by_resume_evaluation_and_init_from(trained, tmp_path):
    directory = shutil.copytree(trained, tmp_path / "meshed" / "run")
    resume = ["run.steps=5", "run.resume=auto"]
    line = (
        "build_model: makes other frozen weights than the run trained on, and its checkpoint holds "
        "their digests only: position was float32 with digest "
    )
    told = refusal(tmp_path, "single", *resume)
    assert line in told and "give the base of the run" in told

    def evaluate():
        config = compose(tmp_path, *WORDS, f"run.resume={directory}")
        with pytest.raises(Exception, match="digests only: position was") as caught:
            OtherBase(config).evaluate()
        return str(caught.value)

    assert line in on_ranks(1, evaluate)[0]
    fresh = [f"run.init_from={directory}", "run.name=fresh", "optim.lr=0.0"]
    told = refusal(tmp_path, "single", *fresh)
    assert f"init_from={directory}: its checkpoint does not hold position, which did not" in told


class Configured(Adapted):
    """The same model, which says what decides its outputs beside weights."""

    config_of_base = "rope_theta 10000"

    def build_model(self):
        model = super().build_model()
        model.digest = self.config_of_base
        return model


class OtherConfig(Configured):
    config_of_base = "rope_theta 50"


RESUME = ["run.steps=5", "run.resume=auto"]


def test_equal_weights_with_another_config_are_refused(tmp_path):
    run(tmp_path, "single", task=Configured)
    told = refusal(tmp_path, "single", *RESUME, task=OtherConfig)
    assert "makes a model of another config than the run's (digest " in told


@pytest.mark.slow
def test_a_config_is_compared_only_by_resumes_of_runs_that_had_one(trained, tmp_path):
    first = run(tmp_path, "single", task=Configured)
    run(tmp_path, "fsdp 2", *RESUME, task=Configured)
    shutil.copytree(trained, tmp_path / "older" / "run")
    run(tmp_path / "older", "single", *RESUME, "run.ema_decay=0.5", task=Configured)
    fresh = [f"run.init_from={first['directory']}", "run.name=fresh"]
    run(tmp_path, "single", *fresh, task=OtherConfig)


@pytest.mark.slow
def test_what_a_run_unfreezes_is_compared_too(trained, tmp_path):
    words = [f"run.init_from={trained}", "optim.lr=0.0"]
    told = refusal(tmp_path, "single", *words, task=OpenedOtherBase)
    assert "does not hold position" in told  # which trains in this run
    told = refusal(tmp_path / "sharded", "fsdp 2", *words, task=OpenedOtherBase)
    assert "does not hold position" in told
    before = tensors_of(newest(trained), "ema")
    for task in (Adapted, Opened):
        again = run(tmp_path, "fsdp 2", *words, f"run.name={task.__name__}", task=task)
        found = tensors_of(newest(again["directory"]))
        assert all(torch.equal(found[name], value) for name, value in before.items())
        assert ("position" in found) == (task is Opened)


def test_a_run_says_which_frozen_weights_its_start_was_given(trained, tmp_path, capfd):
    run(tmp_path, "single", f"run.init_from={trained}", "run.name=fresh")
    told = capfd.readouterr().out
    line = next(line for line in told.splitlines() if line.startswith("run.init_from="))
    assert "loaded 16 of 70 tensors; 54 frozen there and equal as built: position" in line


class Following(Adapted):
    """A frozen weight that each step moves, as that of a teacher."""

    def train_step(self, batch):
        outcome = super().train_step(batch)
        with torch.no_grad():
            self.model.norm.weight.mul_(0.5)
        return outcome


def test_a_frozen_weight_that_a_step_moves_is_saved(tmp_path):
    checkpoint = newest(run(tmp_path, task=Following)["directory"])
    saved = tensors_of(checkpoint)
    assert "norm.weight" in saved and "norm.weight" not in checkpoint.manifest["frozen"]
    last = run(tmp_path, "single", "run.steps=4", "run.resume=auto", task=Following)
    again = tensors_of(newest(last["directory"]))
    assert torch.equal(again["norm.weight"], saved["norm.weight"] / 2)


@pytest.mark.parametrize("layout", slow_but(["single", "fsdp 2"], "single"))
def test_frozen_weights_that_a_file_gave_are_saved(layout, tmp_path):
    state = {"position": torch.full((8, 16), 0.25)}
    torch.save(state, tmp_path / "weights.pt")
    words = [f"run.init_from={tmp_path}/weights.pt"]
    checkpoint = newest(run(tmp_path / layout, layout, *words)["directory"])
    assert torch.equal(tensors_of(checkpoint)["position"], state["position"].double())
    assert "embed.weight" in checkpoint.manifest["frozen"]


class Once(Adapted):
    """Step 3 is not finite, until the run is rolled back."""

    is_bad = True

    def train_step(self, batch):
        if self.step == 2 and Once.is_bad and isinstance(self._run, Run):
            Once.is_bad = False
            self.model.blocks[0].widen.up.weight.data.fill_(torch.nan)
        return super().train_step(batch)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["single", "fsdp 2"])
def test_a_rollback_builds_frozen_weights_again(layout, trained, tmp_path):
    words = ["run.on_bad_step=rollback", "checkpoint.every_steps=1", "run.ema_decay=0.5"]
    found = newest(run(tmp_path, layout, *words, task=Once)["directory"])
    for name, value in tensors_of(newest(trained)).items():
        torch.testing.assert_close(tensors_of(found)[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_another_precision_resumes_adapters(trained, tmp_path):
    shutil.copytree(trained.parent.parent, tmp_path / "runs")
    words = ["run.steps=4", "run.resume=auto", "run.ema_decay=0.5", "strategy.precision=bf16"]
    assert run(tmp_path / "runs", "fsdp 2", *words)["step"] == 4


def test_an_audit_and_a_file_of_stored_weights_tell_what_did_not_train(trained, tmp_path, capsys):
    (line,) = [line for line in audit(trained).lines if "did not train" in line]
    elements = sum(math.prod(s) for _, s, _ in newest(trained).manifest["frozen"].values())
    assert line.startswith(f"54 tensors of {elements:,} elements did not train and are not in the")
    write_stored(trained, tmp_path / "out.safetensors")
    told = capsys.readouterr().out
    assert "32 tensors of step 3; 54 more did not train, so the checkpoint has their" in told
