"""strategy=exact: the same bits on any number of ranks (law 13)."""

import json
from pathlib import Path

import pytest
import torch
from harness import CONF, ended, fit_on, free_port, launch, newest, wait_for
from harness.launch import kill_with_descendants
from harness.stored import check_same_bits, optimizers_of, tensors_of
from tiny import Tiny
from torch import nn

from trainer.core.data.order import BatchPlan, split
from trainer.core.strategy.exact import Node, Tree, nodes_of

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
TEXT = [
    *("task=text", "task.options.files=24", "task.options.context=32", "task.options.width=32"),
    *("task.options.layers=2", "task.options.heads=2", "run.clip_norm=1.0", "run.steps=40"),
    *("data.global_batch=24", "eval.every_steps=20", "log.every_steps=5"),
]
CIFAR = [
    *("task=cifar", "task.options.data=bundled", "task.options.widths=[8,16,16]"),
    *("data.global_batch=96", "run.norm_rows=6", "run.steps=40", "task.options.bias_lr=0.002"),
    *("task.options.head_lr=0.02", "optim.lr=0.05", "eval.every_steps=20", "log.every_steps=5"),
    *("eval.micro_batch=100", "data.micro_batch=12"),
]
TINY = [
    *("task=tiny", "task.options.norm=true", "task.options.dropout=0.2", "run.norm_rows=3"),
    *("data.global_batch=24", "run.steps=40"),
]
RECIPES = {"text": TEXT, "cifar": CIFAR, "tiny": TINY}


def exact(recipe, precision):
    return [*RECIPES[recipe], "strategy=exact", f"strategy.precision={precision}"]


def check_same_runs(one, other):
    assert one["record"] == other["record"]
    for name, tensor in one["weights"].items():
        assert torch.equal(tensor, other["weights"][name]), name
    assert one["seen"] == other["seen"]
    check_same_bits(*(optimizers_of(newest(run["directory"])) for run in (one, other)))


@pytest.mark.parametrize("leaves", [*range(1, 20), 24, 37])
def test_tree_adds_in_one_order_however_leaves_are_dealt(leaves):
    values = [torch.randn(3) * 10.0 ** (n % 7) for n in range(leaves)]
    whole = Tree()
    for number, value in enumerate(values):
        whole.add(Node(0, number), value.clone())
    root = whole.root()
    for ranks in range(1, min(leaves, 9) + 1):
        joined = Tree()
        for rank in range(ranks):
            first, last = split((0, leaves), ranks, rank)
            own = Tree()
            for number in range(first, last):
                own.add(Node(0, number), values[number].clone())
            assert own.nodes() == nodes_of(first, last)
            for node, vector in zip(own.nodes(), own.vectors(), strict=True):
                joined.add(node, vector)
        assert torch.equal(joined.root(), root)
    torch.testing.assert_close(root, torch.stack(values).double().sum(0).float(), rtol=1e-4, atol=1)


@pytest.mark.parametrize("ranks", range(1, 10))
def test_ranks_take_whole_leaves_and_know_their_numbers(ranks):
    plan = BatchPlan(1000, 96, 12, min(ranks, 8), 12)
    found = []
    for rank in range(plan.ranks):
        assert plan.first(rank) == len(found)
        found += plan.micro_batches(rank)
    assert found == [(first, first + 12) for first in range(0, 96, 12)]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    made = {}

    def run(*words):
        if words not in made:
            made[words] = fit_on(1, tmp_path_factory.mktemp("one"), *words)
        return made[words]

    return run


SLOW = pytest.mark.slow
CASES = [
    pytest.param("text", "fp32", 3, marks=SLOW),
    *(pytest.param("text", "fp32", ranks, marks=SLOW) for ranks in (2, 4, 6, 8)),
    *(pytest.param("text", "amp_bf16", ranks, marks=SLOW) for ranks in (2, 3, 4, 6, 8)),
    *(pytest.param("cifar", "amp_bf16", ranks, marks=SLOW) for ranks in (2, 3, 4, 6, 8)),
    *(pytest.param("cifar", "fp32", ranks, marks=SLOW) for ranks in (2, 3, 4, 6, 8)),
    *(pytest.param("text", kind, 3, marks=SLOW) for kind in ("bf16", "fp64", "fp16")),
]


@pytest.mark.parametrize(("recipe", "precision", "ranks"), CASES)
def test_bits_are_those_of_one_rank(recipe, precision, ranks, references, tmp_path):
    words = exact(recipe, precision)
    check_same_runs(references(*words), fit_on(ranks, tmp_path, *words))


@pytest.mark.slow
def test_ddp_has_other_bits(references, tmp_path):
    """Otherwise the tests above would prove nothing."""
    words = [*TINY, "strategy.precision=fp32", "data.micro_batch=3", "log.every_steps=1"]
    one, three = references(*words), fit_on(3, tmp_path, *words)
    differ = [n for n, t in one["weights"].items() if not torch.equal(t, three["weights"][n])]
    assert differ
    assert one["record"] != three["record"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["run.ema_decay=0.9"],
        ["data.path=streamed", "data.workers=1"],
        ["task.options.weights=true", "data.micro_batch=2"],
    ],
    ids=str,
)
def test_settings_of_a_run_keep_its_bits(more, references, tmp_path):
    words = ["task=tiny", "task.options.norm=true", "task.options.dropout=0.2", "strategy=exact"]
    words += ["strategy.precision=fp32", "data.global_batch=24", "optim.lr=0.3", *more]
    check_same_runs(references(*words), fit_on(3, tmp_path, *words))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tiny", "text"])
def test_run_that_changes_its_ranks_at_every_resume_keeps_its_bits(recipe, references, tmp_path):
    words = [*exact(recipe, "fp32"), "schedule=constant", "log.every_steps=8"]
    words += ["optim.lr=0.003" if recipe == "text" else "optim.lr=0.3"]
    whole = references(*words)
    fit_on(4, tmp_path, *words, "run.steps=16")
    fit_on(2, tmp_path, *words, "run.steps=24", "run.resume=auto")
    last = fit_on(3, tmp_path, *words, "run.resume=auto")
    for name, tensor in whole["weights"].items():
        assert torch.equal(tensor, last["weights"][name]), name
    assert {**whole["losses"], **last["losses"]} == whole["losses"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["data.micro_batch=5"],
            "data.micro_batch=5: must divide data.global_batch=22 under strategy=exact; set 2",
        ),
        (
            ["strategy.sync_batchnorm=true"],
            "strategy.sync_batchnorm=true: has no fixed order of sums; set run.norm_rows under"
            " strategy=exact",
        ),
        (
            ["strategy.comm_hook=fp16"],
            "strategy.comm_hook=fp16: strategy=exact sums in its own order; use none, or ddp",
        ),
    ],
)
def test_setting_without_a_fixed_order_is_refused(words, line, command):
    code, _, err = command("--config-dir", CONF, "task=tiny", "strategy=exact", *words)
    assert code == 2
    assert f"error: {line}" in err.splitlines()


class Strided(Tiny):
    """Task with weights that are views of a larger tensor, and with a layer that is never used."""

    def build_model(self):
        model = super().build_model()
        whole = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
        model[0].weight = nn.Parameter(whole[:, :4])
        model[0].unused = nn.Linear(2, 2)
        return model


@pytest.mark.slow
def test_parameters_may_be_strided_or_unused(references, tmp_path):
    words = ["task=tiny", "strategy=exact", "optim=adamw", "strategy.precision=fp32"]
    words += ["strategy.find_unused_parameters=true", "data.micro_batch=2"]
    runs = [fit_on(ranks, tmp_path / str(ranks), *words, task=Strided) for ranks in (1, 3)]
    check_same_runs(*runs)
    plain = fit_on(1, tmp_path / "plain", *words[:1], *words[2:4], task=Strided)
    for name, tensor in plain["weights"].items():
        torch.testing.assert_close(runs[0]["weights"][name], tensor, msg=name)


def test_too_many_ranks_are_refused(command):
    words = ["task=tiny", "strategy=exact", "data.micro_batch=11"]
    code, _, err = command("--config-dir", CONF, *words, ranks=3)
    count = "data.global_batch=22 is 2 leaves, and 3 ranks need one each"
    assert code
    assert f"error: data.micro_batch=11: {count}; make it smaller" in err.splitlines()


NODES = ["keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3"]
PACED = [
    *("--config-dir", str(SCRIPTS / "faults/conf"), "task=slow", "strategy=exact"),
    *("strategy.precision=fp32", "task.options.norm=true", "data.micro_batch=2"),
    *("checkpoint.every_steps=5", "checkpoint.background=false", "run.steps=60"),
]


def record_of(directory):
    entries = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {
        (entry["step"], name): value
        for entry in entries
        for name, value in entry.items()
        if not name.startswith(("speed/", "ledger", "time"))
    }


@pytest.mark.slow
def test_job_that_loses_two_of_its_four_nodes_keeps_its_bits(tmp_path):
    """torchrun restarts the other nodes, with two ranks, from the newest checkpoint."""
    meet = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--rdzv_id=job"]
    words = [*PACED, "task.options.pause_s=0.15", "run.name=lost", "run.resume=auto"]
    agents = []
    for number in range(4):
        conf = f"--rdzv_conf=is_host={int(number == 0)},{NODES[0]}"
        launcher = ("-m", "torch.distributed.run", "--nnodes=1:4", "--nproc_per_node=1", *meet)
        launcher += (conf, "--max_restarts=3", "--local_addr=127.0.0.1")
        more = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        agents.append(launch(tmp_path, *words, launcher=launcher, **more))
    directory = tmp_path / "runs/slow/lost"
    try:
        wait_for(lambda: (directory / "checkpoints/step-00000010").exists(), 90)
        for agent in agents[2:]:
            kill_with_descendants(agent.pid)
        out = [ended(agent)[1] for agent in agents]
    finally:
        for agent in agents:
            kill_with_descendants(agent.pid)
    assert [agent.returncode for agent in agents[:2]] == [0, 0], out
    said = "".join(out)
    assert ", 4 ranks on " in said and ", 2 ranks on " in said, said
    whole = launch(tmp_path, *PACED, "task.options.pause_s=0", "run.name=whole")
    assert ended(whole)[0] == 0
    assert record_of(directory) == record_of(tmp_path / "runs/slow/whole")
    one, other = (newest(tmp_path / "runs/slow" / name) for name in ("whole", "lost"))
    check_same_bits(tensors_of(one), tensors_of(other))
