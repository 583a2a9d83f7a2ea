"""The plan of `trainer.check` has the numbers of a real run, and needs neither memory nor ranks."""

import json
import os
import re
import resource
import shlex
import sys
from collections import Counter

import pytest
import torch
from harness import CONF, on_ranks, slow_but
from harness.command import refuse_meeting
from harness.internals import load_task
from harness.training import compose
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.base.errors import ConfigError
from trainer.check.plan_trial import SharedParts
from trainer.check.planning import PlannedLayout, make_plan
from trainer.core.checkpoints.tensor_files import memory_of
from trainer.core.distributed.devices import find_device
from trainer.core.strategy.cost import MEASURED
from trainer.core.trainer import active_run
from trainer.mesh.p2p import most_kept

# Resident rows are views. In the second step DDP tells how it has ordered its buckets.
SHARDED = ["task=sharded", "run.steps=3", "data.path=streamed"]
SMALL = [
    *("task=text", "task.options.files=24", "task.options.context=16", "task.options.width=16"),
    *("task.options.layers=2", "task.options.heads=2", "eval.every_steps=null", "run.steps=2"),
]
LARGE = [
    *("task=text", "task.options.width=3072", "task.options.layers=9", "task.options.heads=24"),
    *("task.options.context=1024", "data.global_batch=2048", "strategy.precision=amp_bf16"),
]


def plan(folder, *words, ranks=1, local_ranks=None, device=None):
    layout = PlannedLayout(ranks, local_ranks or min(ranks, 8), device)
    return make_plan(compose(folder, *words), layout, SharedParts())


def sizes(made):
    assert all(row.source == MEASURED for row in made.memory if row.name in EXACT)
    return {row.name: row.num_bytes for row in made.memory if row.name in EXACT}


EXACT = ("parameters", "gradients", "optimizer state", "moving average", "whole matrices")


def bytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors)


OF_PARTS = ("_allgather_base_", "_reduce_scatter_base_")


class Collectives(TorchDispatchMode):
    """Count the collectives by the name of their operation, and the bytes of what is sent."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.sent = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("c10d::")
        if func.namespace == "c10d" and name != "recv_":
            self.counts[name] += 1
            if name == "send":
                self.sent += bytes_of(args[0])
            elif name in OF_PARTS:  # its part goes to each other rank, or theirs do
                self.sent += abs(args[0].nbytes - args[1].nbytes)
        return func(*args, **(kwargs or {}))


def run_watched(folder, *words):
    """Train a few steps as a rank; return bytes and collectives of the last step."""
    config = compose(folder, *words, "run.prove=false")
    trainer = load_task(config)(config)
    seen = {}

    def train_step(batch):
        engine = active_run(trainer).engine
        strategy = engine.strategy
        reduced = strategy.reduce
        kept = {}

        def pack(tensor):
            if tensor.is_meta:  # of another stage
                return tensor
            storage = tensor.untyped_storage()
            kept.setdefault(storage._cdata, storage)
            return tensor

        def reduce(*arguments):
            seen["gradients"] = bytes_of(g for kind in strategy.tensors.gradients() for g in kind)
            return reduced(*arguments)

        strategy.reduce = reduce
        if hasattr(strategy, "_pass"):
            passed = strategy._pass

            def keep_passage(*arguments):
                (total, passage), carried = passed(*arguments)
                received = [each.tensor for each in passage.received] if passage else []
                for tensor in [*received, *passage.sent] if passage else ():
                    pack(tensor)
                return (total, passage), carried

            strategy._pass = keep_passage
        own = [*trainer.model.parameters(), *trainer.model.buffers()]
        with Collectives() as collectives, saved_tensors_hooks(pack, lambda tensor: tensor):
            outcome = trainer.update(batch)
        strategy.reduce = reduced
        known = {getattr(t, "_local_tensor", t).untyped_storage()._cdata for t in own}
        states = [s for o in engine.optimizers for s in o.state.values()]
        seen["optimizer state"] = bytes_of(
            value for s in states for value in s.values() if isinstance(value, torch.Tensor)
        )
        seen["parameters"] = bytes_of(strategy.tensors.parameters.values())
        seen["saved"] = sum(s.nbytes() for key, s in kept.items() if key not in known)
        seen["counts"] = dict(collectives.counts)
        seen["sent"] = collectives.sent
        shards, _ = engine.state.saved_shards()
        seen["moving average"] = bytes_of(s.tensor for s in shards["ema"].values())
        written = [
            {memory_of(s.tensor): s.tensor for s in kind.values() if s.is_written}
            for kind in shards.values()
        ]
        seen["written"] = sum(bytes_of(kind.values()) for kind in written)
        seen["flops"] = strategy.flops
        wrapped = getattr(strategy, "_wrapped", None)
        if hasattr(wrapped, "_get_ddp_logging_data"):
            data = wrapped._get_ddp_logging_data()
            seen["buckets"] = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
        return outcome

    trainer.train_step = train_step
    trainer.fit()
    return seen


# Numbers ------------------------------------------------------------------------------------------

ADVICE = [(0.97, "data.micro_batch="), (0.93, "strategy=hsdp"), (0.75, "strategy=fsdp"), (0.01, "")]
OPTIMIZERS = {
    "SGD": ["optim.momentum=0.9"],
    "AdamW": ["optim=adamw", "run.ema_decay=0.9"],
    "Muon": ["task.options.muon=true"],
    "built for real": ["task.options.reads=true", "optim=adamw"],
    "one unit": ["task.options.blocks=false", "task.options.norm=true"],
}


@pytest.mark.parametrize("case", slow_but(OPTIMIZERS, "Muon"))
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
def test_bytes_of_a_rank_are_those_of_a_real_run(strategy, case, tmp_path):
    words = [*SHARDED, f"strategy={strategy}", *OPTIMIZERS[case]]
    made = plan(tmp_path, *words, ranks=2)
    planned = sizes(made)
    compose(tmp_path, *words)
    real = on_ranks(2, run_watched, tmp_path, *words)
    for name in planned.keys() & real[0].keys():
        assert planned[name] == real[0][name], name
    assert planned["parameters"] == max(seen["parameters"] for seen in real)
    assert made.checkpoint.num_bytes == sum(seen["written"] for seen in real)
    assert made.checkpoint.most_of_a_rank == real[0]["written"]


PASSES = {
    "plain": [*SMALL, "task.options.dropout=0"],
    "dropout": SMALL,
    "autocast": [*SMALL, "strategy.precision=amp_bf16"],
    "bf16": [*SMALL, "strategy.precision=bf16"],
    "recomputed": [*SMALL, "strategy.recompute=blocks"],
    "BatchNorm in groups": [
        *(*SHARDED, "task.options.norm=true", "run.norm_rows=6", "data.global_batch=24"),
    ],
    "weights": [*SHARDED, "task.options.weights=true"],
    "images": [
        *("task=cifar", "task.options.widths=[8,8,8]", "strategy.precision=fp32", "run.steps=2"),
        *(
            "data.global_batch=30",
            "data.path=streamed",
            "strategy.channels_last=true",
            "eval.every_epochs=null",
        ),
    ],
}


@pytest.mark.parametrize("case", slow_but(PASSES, "weights"))
def test_activations_and_operations_are_those_of_a_real_run(case, tmp_path):
    words = [*PASSES[case], "strategy=single"]
    made = plan(tmp_path, *words)
    (real,) = on_ranks(1, run_watched, tmp_path, *words)
    (row,) = [row for row in made.memory if row.name == "activations"]
    if case == "recomputed":
        assert real["saved"] < row.num_bytes
    else:
        assert row.num_bytes == real["saved"] and row.source == MEASURED
    assert made.flops == real["flops"]


MESSAGES = {
    "ddp": (2, ["strategy=ddp", "strategy.bucket_mb=0.0005"]),
    "fsdp": (2, ["strategy=fsdp", "data.micro_batch=6"]),
    "fsdp, kept": (2, ["strategy=fsdp", "data.micro_batch=6", "strategy.reshard=false"]),
    "hsdp": (4, ["strategy=hsdp", "data.micro_batch=3"]),
    "exact": (2, ["strategy=exact", "data.micro_batch=2"]),
    "zero1": (2, ["strategy=zero1"]),
}
OPERATIONS = {
    "all-gather of parameters": "_allgather_base_",
    "reduce-scatter of gradients": "_reduce_scatter_base_",
    "all-reduce of gradients": "allreduce_",
    "all-reduce of agreed values": "allreduce_",
    "broadcast of parameters": "broadcast_",
    "all-to-all of gradients": "alltoall_base_",
    "all-gather of gradients": "allgather_",
    "all-reduce of activations": "allreduce_",
    "all-gather of activations": "_allgather_base_",
    "reduce-scatter of activations": "_reduce_scatter_base_",
    "reduce-scatter of keys and values": "_reduce_scatter_base_",
    "all-gather of keys and values": "_allgather_base_",
    "sends of activations": "send",
    "sends of gradients": "send",
}


@pytest.mark.parametrize("case", slow_but(MESSAGES, "ddp", "exact"))
def test_number_of_messages_is_that_of_a_real_step(case, tmp_path):
    ranks, words = MESSAGES[case]
    made = plan(tmp_path, *SHARDED, *words, ranks=ranks)
    counts = Counter()
    for message in made.messages:
        counts[OPERATIONS[message.kind]] += message.count
    real = on_ranks(ranks, run_watched, tmp_path, *SHARDED, *words)
    assert counts == real[0]["counts"]
    sent = [m.num_bytes for m in made.messages if OPERATIONS[m.kind] in ("send", *OF_PARTS)]
    assert sum(sent) == real[0]["sent"]
    if case == "ddp":
        (message,) = made.messages
        assert message.num_bytes == sum(map(int, real[0]["buckets"].split(",")))  # 2 * (n - 1) / n


MESHED = [
    *("task=meshed", "run.steps=2", "strategy.precision=fp32", "optim=adamw", "optim.lr=0.01"),
    *("data.path=streamed", "run.ema_decay=0.9", "data.global_batch=24", "data.micro_batch=6"),
]
MESHES = {
    "tp 2": (2, ["strategy=tp"]),
    "tp 2, untied": (2, ["strategy=tp", "task.options.tied=false"]),
    "tp 2, sequence": (2, ["strategy=tp", "strategy.sequence=true", "task.options.inner=false"]),
    "tp 2, Muon": (2, ["strategy=tp", "task.options.muon=true"]),
    "cp 2": (2, ["strategy=cp"]),
    "cp 2, masked": (2, ["strategy=cp", "task.options.masked=true"]),
    "pp 2": (2, ["strategy=pp"]),
    "pp 3, gpipe": (3, ["strategy.mesh.pipeline=3", "strategy.schedule=gpipe"]),
    "pp 2, recomputed": (2, ["strategy=pp", "strategy.recompute=blocks"]),
    "fsdp 2 x tp 2": (4, ["strategy=fsdp_tp"]),
    "fsdp 2 x cp 2": (4, ["strategy.mesh.shard=2", "strategy.mesh.context=2"]),
    "pp 2 x fsdp 2": (4, ["strategy=pp_fsdp", "task.options.dropout=0.2"]),
    "pp 2 x ddp 2": (4, ["strategy.mesh.pipeline=2"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MESHES)
def test_numbers_of_a_mesh_are_those_of_a_real_step(case, tmp_path):
    ranks, words = MESHES[case]
    words = [*MESHED, *words]
    made = plan(tmp_path, *words, ranks=ranks)
    every = on_ranks(ranks, run_watched, tmp_path, *words)
    real = every[made.stage * ranks // made.axes.get("pipeline", 1)]
    planned = sizes(made)
    for name in planned.keys() & real.keys():
        assert planned[name] == real[name], name
    assert made.checkpoint.num_bytes == sum(seen["written"] for seen in every)
    assert made.checkpoint.most_of_a_rank == max(seen["written"] for seen in every)
    assert made.flops == real["flops"]
    if "Muon" not in case:  # whose exchange of matrices is not counted
        counts = Counter()
        for message in made.messages:
            counts[OPERATIONS[message.kind]] += message.count
        assert counts == real["counts"]
    sent = [m.num_bytes for m in made.messages if OPERATIONS[m.kind] in ("send", *OF_PARTS)]
    assert sum(sent) == real["sent"]
    (row,) = [row for row in made.memory if row.name == "activations"]
    accumulation = made.batches["accumulation"]
    kept = most_kept(
        made.config.strategy.schedule, made.axes.get("pipeline", 1), made.stage, accumulation
    )
    if "recomputed" in case:
        assert kept * real["saved"] < accumulation * row.num_bytes
    else:
        assert kept * real["saved"] == accumulation * row.num_bytes
        assert row.source == MEASURED


class Gathered(TorchDispatchMode):
    """Find the most bytes that FSDP's units have gathered, and what is in flight, at any time."""

    def __init__(self, units):
        super().__init__()
        self.most = 0
        states = [unit._get_fsdp_state() for unit in units]
        self._groups = [state._fsdp_param_group for state in states if state._fsdp_param_group]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        tensors = [
            tensor
            for group in self._groups
            for parameter in group.fsdp_params
            for tensor in parameter.all_gather_outputs
        ]
        results = [group._all_gather_result for group in self._groups]
        tensors += [result.all_gather_output for result in results if result is not None]
        self.most = max(self.most, sum(t.untyped_storage().size() for t in tensors))
        return made


def find_most_gathered(folder, *words):
    config = compose(folder, *words, "run.prove=false")
    trainer = load_task(config)(config)
    seen = []

    def train_step(batch):
        with Gathered(active_run(trainer).engine.strategy._division.sharding._units) as gathered:
            outcome = trainer.update(batch)
        seen.append(gathered.most)
        return outcome

    trainer.train_step = train_step
    trainer.fit()
    return seen[-1]


GATHERED = {
    "blocks": [*SMALL, "task.options.layers=4"],
    "kept": [*SMALL, "task.options.layers=4", "strategy.reshard=false"],
    "recomputed": [*SMALL, "strategy.recompute=blocks"],
    "one block": [*SMALL, "task.options.layers=1"],
    "no blocks": [*SHARDED, "task.options.blocks=false"],
    "no blocks, kept": [*SHARDED, "task.options.blocks=false", "strategy.reshard=false"],
}


@pytest.mark.parametrize("case", slow_but(GATHERED, "no blocks"))
def test_gathered_parameters_are_the_most_that_a_real_step_gathers(case, tmp_path):
    words = [*GATHERED[case], "strategy=fsdp"]
    made = plan(tmp_path, *words, ranks=2)
    (row,) = [row for row in made.memory if row.name == "gathered parameters"]
    assert on_ranks(2, find_most_gathered, tmp_path, *words) == [row.num_bytes] * 2


def test_bytes_of_messages_follow_the_formulas(tmp_path):
    words = [*SHARDED, "data.global_batch=64", "data.micro_batch=4", "strategy.precision=fp64"]
    made = plan(tmp_path, *words, "strategy=hsdp", "strategy.mesh.shard=4", ranks=8, local_ranks=4)
    gather, scatter, reduce, *_ = made.messages
    # parameters by shape: 10x7 and 2x7 with the rest; 13x7, 13 and 7x13 in each of two layers
    rest = (3 + 1) * 7
    layers = [4 * 7 + 4 + 2 * 13] * 2
    shard = rest + sum(layers)
    assert gather.num_bytes == 2 * 2 * 3 * 8 * shard  # 2 passes, 2 micro-batches, to 3 ranks
    trained = shard - 4  # without the frozen bias
    assert scatter.num_bytes == 2 * 3 * 8 * trained
    assert reduce.num_bytes == 8 * trained  # 2 * (2 - 1) / 2
    assert sizes(made)["parameters"] == 8 * (shard + 1)  # each rank has the scalar


# Layouts ------------------------------------------------------------------------------------------


def measure_plan(folder):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = plan(folder, *LARGE, "strategy=hsdp", ranks=1024)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return made.parameters, made.axes, made.batches["micro_batch"], (after - before) * 1024


@pytest.mark.slow
def test_plan_of_a_large_model_on_1024_ranks_needs_little_memory(tmp_path):
    compose(tmp_path, *LARGE, "strategy=hsdp")
    ((parameters, axes, rows, grown),) = on_ranks(1, measure_plan, tmp_path)
    assert parameters > 1e9
    assert axes == {"replicate": 128, "shard": 8} and rows == 2
    assert grown < 400e6  # the parameters alone have 4 GB


REFUSED = {
    "single": ["task=tiny", "strategy=single"],
    "a small batch": ["task=tiny", "data.global_batch=1"],
    "mesh": ["task=tiny", "strategy=fsdp", "strategy.mesh.shard=3"],
    "nothing to divide": [
        *("task=tiny", "strategy=fsdp", "strategy.mesh.shard=1", "strategy.mesh.replicate=auto"),
    ],
    "exact": ["task=tiny", "strategy=exact", "data.global_batch=32", "data.micro_batch=5"],
    "no blocks": ["task=tiny", "strategy.recompute=blocks"],
    "data": ["task=tiny", "data.global_batch=10000"],
    "setting": ["task=tiny", "data.global_bach=10"],
    "optimizer": ["task=tiny", "optim.momentum=-1"],
    "unused parameter": ["task=tiny", "task.trainer=spare.Spare"],
    "lazy layer": ["task=tiny", "task.trainer=spare.Lazy", "strategy=fsdp"],
    "no module": ["task=tiny", "task.trainer=spare.NoModule", "strategy=fsdp"],
    "hook on a gradient": ["task=tiny", "task.trainer=spare.HasHook", "strategy=fsdp"],
    "hook of a task": ["task=tiny", "task.trainer=spare.WrongHook"],
    "synchronized": ["task=tiny", "task.trainer=spare.OwnNorm", "strategy.sync_batchnorm=true"],
    "part of a batch": [
        *("task=tiny", "task.options.norm=true", "strategy.sync_batchnorm=true"),
        *("data.global_batch=24", "data.micro_batch=6"),
    ],
    "evaluation": ["task=tiny", "eval.splits=[train]"],
    "schedule": ["task=tiny", "schedule._target_=os.system"],
}
SPARE = """
from tiny import Tiny, nn

class Spare(Tiny):
    def build_model(self):
        model = super().build_model()
        model[1].spare = nn.Parameter(model[0].bias * 0)
        return model

class Lazy(Tiny):
    def build_model(self):
        return nn.Sequential(nn.LazyLinear(16), nn.Linear(16, 3))

class NoModule(Tiny):
    def build_model(self):
        return 3

class HasHook(Tiny):
    def build_model(self):
        model = super().build_model()
        model[0].weight.register_hook(lambda gradient: gradient)
        return model

class WrongHook(Tiny):
    def loss(self, outputs):
        return outputs

class Norm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) + 1

class OwnNorm(Tiny):
    def build_model(self):
        return nn.Sequential(nn.Linear(4, 16), Norm(16), nn.Linear(16, 3))
"""


@pytest.mark.parametrize(
    "case", slow_but(REFUSED, "single", "exact", "mesh", "unused parameter", "setting")
)
def test_refusals_are_those_of_a_real_start(case, command):
    (command.folder / "spare.py").write_text(SPARE)
    words = [f"--config-dir={CONF}", *REFUSED[case]]
    planned = command(*words, "ranks=2", verb="trainer.check", before=refuse_meeting)
    started = command(*words, "run.name=one", ranks=2)
    assert planned.returncode == 2
    assert planned.stderr.strip() in started.stderr
    assert planned.stderr.startswith("error: ") and planned.stderr.count("\n") == 1


OF_THE_SETUP = {
    "lazy layer": "strategy.mesh: 0 is a LazyLinear; give its sizes, or use ddp",
    "no module": "build_model returned a int: must be a torch.nn.Module",
    "hook on a gradient": "strategy.mesh: a divided 0.weight would lose the hook on its gradient; ",
    "hook of a task": "WrongHook.loss takes (outputs): must take (outputs, targets)",
    "synchronized": "strategy.sync_batchnorm=true: 1 is a Norm with a forward pass of its own; use",
    "part of a batch": "BatchNorm sees one of 2 micro-batches at a time (data.micro_batch=6), so",
    "evaluation": "eval.splits=['train']: must not have train: ",
    "schedule": "schedule._target_=os.system: must be under ",
}


@pytest.mark.parametrize("case", OF_THE_SETUP)
def test_plan_refuses_what_the_setup_of_a_run_refuses(case, tmp_path, monkeypatch):
    (tmp_path / "spare.py").write_text(SPARE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "spare", raising=False)
    with pytest.raises(ConfigError, match=re.escape(OF_THE_SETUP[case])):
        plan(tmp_path, *REFUSED[case], ranks=2)


def test_a_method_that_nothing_calls_is_named_in_the_plan(tmp_path, monkeypatch):
    (tmp_path / "typo.py").write_text(
        "from tiny import Tiny\n\nclass Typo(Tiny):\n    def build_optimiser(self, model): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    made = plan(tmp_path, "task=tiny", "task.trainer=typo.Typo", ranks=2)
    assert made.notes[0].startswith("warning: Typo.build_optimiser is never called by the trainer")


def test_sequence_without_a_tensor_axis_divides_no_block(tmp_path):
    words = ["task=tiny", "strategy.sequence=true"]
    assert plan(tmp_path, *words, ranks=2).memory == plan(tmp_path, *words[:1], ranks=2).memory


def test_plan_gives_the_number_of_threads_back(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    plan(tmp_path, "task=tiny", "strategy=exact", ranks=2)
    assert torch.get_num_threads() == before


WRONG = {
    "device=h10": "device=h10: must be one of cpu, v100, a100, h100, h200, b200, l40s, rtx4090, "
    "mi300x; did you mean h100?",
    "devcie=h100": "devcie is not a setting; did you mean device?",
    "ranks=0": "ranks=0: must be an integer of at least 1",
    "local_ranks=3": "local_ranks=3: must divide ranks=8; give another number of ranks per node",
    "disk_gb_s=fast": "disk_gb_s=fast: must be a number above 0, GB per second",
    "devices=none.yaml": "devices=none.yaml: give device=<name> too, an entry of it",
    "strategy.mesh.tensor=2": "strategy.mesh.tensor=2: the task has no tensor_plan; define it, or "
    "choose another axis",
    "strategy.devices_per_rank=2": "strategy.devices_per_rank=2: a plan knows one device per "
    "rank; set 1",
    "device=v100 strategy.precision=amp_bf16": "strategy.precision=amp_bf16: device=v100 has fp64, "
    "fp32, fp16; choose another precision",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_argument_is_refused_in_one_line(words, command):
    known = {word.partition("=")[0] for word in words.split()}
    ranks = [] if "ranks" in known else ["ranks=8"]
    given = ["task=tiny", f"--config-dir={CONF}", *ranks, *words.split()]
    done = command(*given, verb="trainer.check")
    assert (done.returncode, done.stderr) == (2, f"error: {WRONG[words]}\n")


def test_plan_meets_no_ranks_and_writes_nothing(command):
    words = ["task=sharded", f"--config-dir={CONF}", "strategy=fsdp", "ranks=11", "local_ranks=11"]
    done = command(*words, "device=a100", verb="trainer.check", before=refuse_meeting)
    assert done.returncode == 0, done.stderr
    assert not list(command.folder.iterdir())
    for part in ("11 ranks x 1 micro-batch of 2", "gathered parameters", "fits: "):
        assert part in done.stdout
    assert len(done.stdout.splitlines()) < 30


def small_table(folder, memory):
    """Write a table with a device that has so many bytes for tensors."""
    table = folder / "devices.yaml"
    table.write_text(
        "assumed: {compute: 0.5, links: 1, memory: 1, latency_us: 1}\n"
        f"devices: {{toy: {{tflops: {{fp64: 1}}, memory_gb: {memory / 1e9}, memory_gb_s: 1,"
        " node_gb_s: 1, network_gb_s: 0.1}}\n"
    )
    return ["device=toy", f"devices={table}"]


def test_a_pipe_in_place_of_a_table_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="/pipe: cannot be read: is not a regular file; copy "):
        find_device("h100", str(tmp_path / "pipe"))


@pytest.mark.parametrize(
    "part, change",
    slow_but(ADVICE, (0.75, "strategy=fsdp")),
)
def test_advice_is_a_layout_whose_own_plan_fits(part, change, command):
    words = ["task=sharded", f"--config-dir={CONF}", "optim=adamw", "task.options.width=60"]
    words += ["data.path=streamed", "data.global_batch=16", "ranks=4", "local_ranks=2", "--json"]
    whole = json.loads(command(*words, verb="trainer.check").stdout)
    table = small_table(command.folder, int(part * whole["total_bytes"]))
    done = command(*words, *table, verb="trainer.check")
    made = json.loads(done.stdout)
    assert done.returncode == 1 and made["fits"] is False
    assert (made["advice"] or "").startswith("python -m trainer.check " if change else "")
    if change:
        assert change in made["advice"]
        again = command(*shlex.split(made["advice"])[3:], "--json", verb="trainer.check")
        assert again.returncode == 0 and json.loads(again.stdout)["fits"] is True


@pytest.mark.slow
def test_advice_divides_the_matrices_where_nothing_else_fits(command):
    words = ["task=meshed", f"--config-dir={CONF}", "task.options.width=64", "data.global_batch=2"]
    words += ["data.path=streamed", "ranks=2", "--json"]
    sharded, tensor = (
        command(*words, strategy, "strategy.recompute=blocks", verb="trainer.check").stdout
        for strategy in ("strategy=fsdp", "strategy=tp")
    )
    sizes = [json.loads(text)["total_bytes"] for text in (sharded, tensor)]
    assert sizes[1] < sizes[0]
    table = small_table(command.folder, sum(sizes) // 2)
    made = json.loads(command(*words, "strategy=fsdp", *table, verb="trainer.check").stdout)
    assert "strategy=fsdp_tp strategy.mesh.tensor=2" in made["advice"]


def test_a_stage_waits_for_the_others_as_the_schedule_says(command):
    words = ["task=meshed", f"--config-dir={CONF}", "--json", *small_table(command.folder, 1e9)]
    words += ["strategy=pp", "data.global_batch=24", "data.micro_batch=6", "ranks=2"]
    made = json.loads(command(*words, verb="trainer.check").stdout)
    time = made["time"]
    assert time["wait_s"] == pytest.approx(time["compute_s"] / 4)  # 1 of 5, beside 4 of 5
    assert time["most_s"] > time["least_s"] > time["compute_s"] + time["wait_s"]


def test_time_of_a_step_follows_the_table(command):
    words = ["task=sharded", f"--config-dir={CONF}", "data.path=streamed", "--json"]
    words += small_table(command.folder, 1e9)
    made = json.loads(command(*words, "ranks=2", verb="trainer.check").stdout)
    (message,) = made["messages"]
    time = made["time"]
    assert time["compute_s"] == pytest.approx(11 * made["flops_per_example"] / 0.5e12)
    assert time["communicate_s"] == pytest.approx(message["num_bytes"] / 1e9 + 1e-6)
    assert time["least_s"] < time["most_s"] and made["efficiency"][0] < made["efficiency"][1] <= 1


def test_a_plan_ends_with_hours_sizes_and_tokens_per_second_of_the_whole_run(command):
    out = command(*SMALL, "device=h100", verb="trainer.check").stdout.splitlines()
    numbers = r"[\d.,]+ \w+"
    whole = rf"the whole run: 2 steps, {numbers} without evaluations, checkpoints of {numbers}"
    assert re.fullmatch(whole, out[-3]), out[-3]
    rates = re.fullmatch(r"  ([\d.,]+) examples/s, ([\d.,]+) tokens/s with padding", out[-2])
    examples, tokens = (float(each.replace(",", "")) for each in rates.groups())
    assert tokens / examples == pytest.approx(16, rel=0.01)  # task.options.context
    assert out[-1].startswith("fits: ")


@pytest.mark.parametrize(("words", "tokens"), [(SMALL, 16), (["task=cifar"], 0), (SHARDED, 0)])
def test_only_a_loss_of_several_values_over_integers_counts_tokens(words, tokens, tmp_path):
    assert plan(tmp_path, *words).tokens.count == tokens


NEEDS_VALUES = """
from hard_to_shard import Sharded

class Values(Sharded):
    def loss(self, outputs, targets):
        if bool((outputs > 1e9).any()):
            raise ValueError
        return super().loss(outputs, targets)
"""


def test_a_loss_that_reads_values_is_named(command):
    (command.folder / "values.py").write_text(NEEDS_VALUES)
    words = ["task=sharded", f"--config-dir={CONF}", "task.trainer=values.Values", "device=cpu"]
    done = command(*words, verb="trainer.check")
    assert done.returncode == 0, done.stderr
    assert "not known: DataDependentOutputException" in done.stdout
    assert "total, at least" in done.stdout and "fits: not known" in done.stdout
