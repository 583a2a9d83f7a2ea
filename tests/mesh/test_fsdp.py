"""FSDP2 and HSDP: the numbers of one process, whatever the mesh and the task."""

import gc
import re
from pathlib import Path

import pytest
import torch
from hard_to_shard import Sharded
from harness import (
    check_equal_bits,
    check_parity,
    fit,
    fit_on,
    on_ranks,
    relative_distance,
    slow_but,
)
from harness.training import compose
from harness.verbs import audit
from test_bad_steps import BAD, RECIPE, BadExample, BadGradient, Once, place_of_the_bad
from tiny import Begun, Tiny
from torch import nn

from trainer import ConfigError
from trainer.core.strategy.modules.tensor_memory import ActivationCheckpoint
from trainer.core.trainer import active_run
from trainer.show.replay import replay

MESHES = {
    "fsdp x 2": (2, ["strategy=fsdp"]),
    "fsdp x 3": (3, ["strategy=fsdp"]),
    "fsdp x 4": (4, ["strategy=fsdp"]),
    "hsdp 2 x 2": (4, ["strategy=hsdp"]),
}
TASK = ["task=sharded"]
CASES = {
    "plain": [],
    "one unit": ["task.options.blocks=false"],
    "built for real": ["task.options.reads=true"],
    "ragged micro-batches": ["data.micro_batch=3"],
    "dropout": ["task.options.dropout=0.3", "data.micro_batch=3"],
    "BatchNorm in groups": [
        *("task.options.norm=true", "run.norm_rows=6", "data.global_batch=24"),
    ],
    "SyncBN": ["task.options.norm=true", "strategy.sync_batchnorm=true"],
    "weights": ["task.options.weights=true", "data.global_batch=5"],
    "clipping": ["run.clip_norm=0.5", "optim=adamw", "optim.lr=0.01"],
    "EMA": ["run.ema_decay=0.9"],
    "kept parameters": ["strategy.reshard=false", "run.ema_decay=0.9"],
    "recomputed": [
        *("strategy.recompute=blocks", "task.options.dropout=0.3"),
        *("task.options.norm=true", "run.norm_rows=6", "data.global_batch=24"),
    ],
    "Muon": ["task.options.muon=true"],
}


QUICK = [("fsdp x 3", "clipping")]
EVERY = [(mesh, case) for mesh in MESHES for case in CASES if (mesh, case) not in QUICK]


def check_case(mesh, case, single, folder):
    ranks, words = MESHES[mesh]
    reference = single(case, folder, "strategy.precision=fp64")
    other = fit_on(ranks, folder / "many", *TASK, *words, *CASES[case], "strategy.precision=fp64")
    check_parity(reference, other, falls=False)


@pytest.mark.parametrize("mesh, case", QUICK)
def test_a_mesh_has_the_numbers_of_one_process(mesh, case, single, tmp_path):
    check_case(mesh, case, single, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mesh, case", EVERY)
def test_every_mesh_has_the_numbers_of_one_process(mesh, case, single, tmp_path):
    check_case(mesh, case, single, tmp_path)


LOW = {"fp32": 1e-5, "amp_bf16": 2e-2, "amp_fp16": 2e-3, "bf16": 1e-1, "fp16": 2e-2}


@pytest.mark.slow
@pytest.mark.parametrize("precision, most", LOW.items())
def test_low_precisions_agree_up_to_rounding(precision, most, tmp_path):
    words = [*TASK, f"strategy.precision={precision}", "run.clip_norm=1"]
    one = fit_on(1, tmp_path / "one", *words, "strategy=single")
    two = fit_on(2, tmp_path / "two", *words, "strategy=fsdp")
    for step, loss in one["losses"].items():
        assert abs(two["losses"][step] - loss) <= most * loss


class Two(Tiny):
    """Two networks with an optimizer and a loss each; an update reaches one of them."""

    def build_model(self):
        return Pair()

    def loss(self, outputs, targets):
        return self.first_loss(outputs, targets) + self.second_loss(outputs, targets)

    def first_loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs[0], targets, reduction="none")

    def second_loss(self, outputs, targets):
        return (outputs[1] ** 2).sum(1)

    def metrics(self, outputs, targets):
        return {}

    def build_optimizer(self, model):
        first = torch.optim.AdamW(model.first.parameters(), lr=0.01)
        return [first, torch.optim.SGD(model.second.parameters(), lr=0.01)]

    def train_step(self, batch):
        first, second = self.optimizers
        outcome = self.update(batch, self.first_loss, [first], "first")
        return outcome + self.update(batch, self.second_loss, [second], "second")


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(4, 5)

    def forward(self, inputs):
        return self.first(inputs), self.second(inputs)


TINY = ["task=tiny", "run.steps=12", "log.every_steps=1"]


@pytest.mark.slow
def test_updates_of_parts_of_the_model(tmp_path):
    words = [*TINY, "strategy.find_unused_parameters=true", "run.clip_norm=0.3"]
    one = fit_on(1, tmp_path / "one", *words, "strategy=single", task=Two)
    two = fit_on(2, tmp_path / "two", *words, "strategy=fsdp", task=Two)
    for name, weight in one["weights"].items():
        assert relative_distance(weight, two["weights"][name]) < 1e-12, name


@pytest.mark.parametrize("task", slow_but([BadExample, BadGradient], BadGradient))
def test_a_bad_example_is_found_and_its_step_is_skipped(task, tmp_path, capfd):
    step, rank = place_of_the_bad(2)
    one = fit_on(1, tmp_path / "one", *RECIPE, "strategy=single", task=task)
    capfd.readouterr()
    two = fit_on(2, tmp_path / "two", *RECIPE, "strategy=fsdp", "run.ema_decay=0.9", task=task)
    assert re.search(
        rf"warning: step {step}: .*example {BAD} is not finite.*, on rank {rank}; the update was",
        capfd.readouterr().out,
    )
    for name, weight in one["weights"].items():
        assert relative_distance(weight, two["weights"][name]) < 1e-12, name
    assert audit([str(two["directory"])]) == 0
    words = [str(two["directory"]), f"step={step}", "task.trainer=tiny.Tiny"]
    assert replay(words) == 0  # of a task without the example


@pytest.mark.slow
def test_a_transient_fault_is_rolled_back(tmp_path):
    words = [*RECIPE, "strategy=fsdp", "run.on_bad_step=rollback", "checkpoint.every_steps=2"]
    hit = fit_on(2, tmp_path / "hit", *words, task=Once)
    check_equal_bits(hit, fit_on(2, tmp_path / "plain", *words, task=Begun))


class Changing(Tiny):
    """Task in which rank 3 changes its own part of a weight in step 5."""

    def train_step(self, batch):
        outcome = super().train_step(batch)
        if self.step == 5 and self.world.rank == 3:
            with torch.no_grad():
                active_run(self).engine.strategy.tensors.parameters["0.weight"] += 1e-7
        return outcome


def test_drift_names_the_rank_whose_copy_of_a_shard_changed(tmp_path):
    line = "model.0.weight on rank 3 differs from the other ranks"
    with pytest.raises(AssertionError, match=line):
        words = [*TINY, "strategy=hsdp", "dist.drift_every_steps=2"]
        fit_on(4, tmp_path, *words, task=Changing)


@pytest.mark.slow
def test_evaluation_and_torchmetrics(tmp_path):
    from torchmetrics.classification import MulticlassAUROC

    class Scored(Tiny):
        def build_metrics(self, split):
            return {"auroc": MulticlassAUROC(3)}

    words = [*TINY, "eval.every_steps=4", "run.ema_decay=0.5"]
    one = fit_on(1, tmp_path / "one", *words, "strategy=single", task=Scored)
    three = fit_on(3, tmp_path / "three", *words, "strategy=fsdp", task=Scored)
    for name, value in one["metrics"].items():
        assert abs(three["metrics"][name] - value) < 1e-12, name


@pytest.mark.slow
def test_recomputed_modules_by_name_under_ddp(tmp_path):
    words = [*TASK, "task.options.dropout=0.3", "task.options.norm=true", "run.norm_rows=11"]
    one = fit_on(1, tmp_path / "one", *words, "strategy=single")
    names = "strategy.recompute=[layers.*]"
    check_parity(one, fit_on(2, tmp_path / "two", *words, names), falls=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_compiled_blocks(tmp_path):
    words = [*TASK, "run.compile=true", "run.steps=5"]
    one = fit_on(1, tmp_path / "one", *words, "strategy=single")
    two = fit_on(2, tmp_path / "two", *words, "strategy=fsdp", "strategy.recompute=blocks")
    for step, loss in one["losses"].items():
        assert abs(two["losses"][step] - loss) < 1e-10 * loss


class Caching(nn.Module):
    def forward(self, x, cache):
        cache.append(x)
        return x * torch.stack(cache).view_as(x)  # not possible with two


def test_a_module_that_changes_what_it_is_given_cannot_be_recomputed():
    module = Caching()
    module.forward = ActivationCheckpoint(module)
    out = module(torch.randn(4, 3, requires_grad=True), [])
    line = r"^strategy\.recompute: Caching cannot run twice with what it is given: .*use_cache"
    with pytest.raises(ConfigError, match=line):
        out.sum().backward()


class Lazy(Tiny):
    def build_model(self):
        return nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3))


class Hooked(Tiny):
    def build_model(self):
        model = super().build_model()
        model[0].weight.register_hook(lambda gradient: 2 * gradient)
        return model


class Foreign(Tiny):
    def blocks(self, model):
        return [nn.Linear(2, 2)]


class Shared(Sharded):
    def blocks(self, model):
        return [model.embed]


class Unreached(Tiny):
    def build_model(self):
        model = Pair()
        model.forward = lambda inputs: model.first(inputs)
        return model


REFUSED = {
    "lazy": (2, Lazy, [], "strategy.mesh: 0 is a LazyLinear; give its sizes, or use ddp"),
    "gradient hook": (2, Hooked, [], "a divided 0.weight would lose the hook on its gradient"),
    "foreign block": (2, Foreign, [], r"blocks\(model\): must return a list of modules of the"),
    "unreached": (2, Unreached, [], "the loss does not depend on the parameter second.weight"),
    "hook": (2, Tiny, ["strategy.comm_hook=fp16"], "strategy.comm_hook=fp16: strategy=fsdp takes"),
    "product": (2, Tiny, ["strategy.mesh.shard=3"], "and 2 ranks were started; start 3 or set"),
    "odd": (3, Tiny, ["strategy.mesh.replicate=auto", "strategy.mesh.shard=2"], "multiple of 2"),
    "two autos": (2, Tiny, ["strategy.mesh.replicate=auto"], "set auto for one axis only"),
    "nothing": (2, Tiny, ["strategy.mesh={replicate: 2, shard: 1}"], "has nothing to divide"),
    "no blocks": (2, Tiny, ["strategy.recompute=blocks"], "the task has no blocks; define blocks"),
    "no name": (2, Tiny, ["strategy.recompute=[foo]"], "recompute=foo: no module has this name"),
}


@pytest.mark.parametrize("cell", REFUSED)
def test_what_cannot_work_is_refused_by_name(cell, tmp_path):
    ranks, task, words, line = REFUSED[cell]
    with pytest.raises(AssertionError, match=line):
        fit_on(ranks, tmp_path, *TINY, "strategy=fsdp", *words, task=task)


def test_a_block_that_shares_a_parameter_is_refused(tmp_path):
    with pytest.raises(AssertionError, match=r"embed shares a parameter with head\.weight; leave"):
        fit_on(2, tmp_path, *TASK, "strategy=fsdp", task=Shared)


def test_exact_refuses_to_divide_a_model(tmp_path):
    with pytest.raises(AssertionError, match="strategy=exact has the whole model on each rank"):
        fit_on(2, tmp_path, *TINY, "strategy=exact", "strategy.mesh={replicate: 1, shard: 2}")


@pytest.mark.parametrize("strategy, ranks", slow_but([("fsdp", 2), ("hsdp", 4)], ("fsdp", 2)))
def test_no_process_group_outlives_a_run(strategy, ranks, tmp_path):
    """At the exit of a process its threads could end it with SIGABRT, after a finished run."""
    words = [*TASK, f"strategy={strategy}", "run.steps=2"]
    compose(tmp_path, *words)

    def threads():
        fit(tmp_path, *words)
        gc.collect()
        return [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]

    for names in on_ranks(ranks, threads):
        assert not [name for name in names if "gloo" in name]


def test_a_sharded_model_is_gone_after_a_run(tmp_path):
    words = [*TASK, "strategy=fsdp", "run.steps=2"]
    config = compose(tmp_path, *words)

    def read():
        task = Sharded(config)
        task.fit()
        with pytest.raises(RuntimeError, match=r"^model: was in the ranks, whose group"):
            task.model.train()
        return True

    assert all(on_ranks(2, read))
