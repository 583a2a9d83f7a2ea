"""Tensor, context and pipeline parallel, and their mixes: the numbers of one process."""

import os
import re
import signal
import time

import pytest
import torch
import torch.nn.functional as F
from harness import check_equal_bits, check_parity, fit_on, on_ranks, relative_distance
from harness.training import compose
from harness.verbs import audit
from mesh_gpt import Block, Meshed, Net
from torch import nn
from wrong_tasks import NormalisesGradient

from trainer import ResidentDataset, RunError, Trainer
from trainer.core.strategy.modules.tensor_memory import place_blocks
from trainer.mesh import parallel
from trainer.mesh.p2p import bubble, order
from trainer.show.replay import replay
from trainer.tasks.cifar import ResNet

TENSOR = ["strategy.mesh.tensor=2"]
TASK = ["task=meshed"]
MESHES = {
    "tp 2": (2, ["strategy=tp"]),
    "tp 4": (4, ["strategy.mesh.tensor=4"]),
    "cp 2": (2, ["strategy=cp"]),
    "pp 2": (2, ["strategy=pp"]),
    "pp 3": (3, ["strategy.mesh.pipeline=3"]),
    "pp 4": (4, ["strategy=pp", "strategy.mesh.pipeline=4", "strategy.schedule=gpipe"]),
    "fsdp 2 x tp 2": (4, ["strategy=fsdp_tp"]),
    "fsdp 2 x cp 2": (4, ["strategy.mesh.shard=2", "strategy.mesh.context=2"]),
    "pp 2 x tp 2": (4, ["strategy.mesh.pipeline=2", "strategy.mesh.tensor=2"]),
    "pp 2 x fsdp 2": (4, ["strategy=pp_fsdp"]),
    "pp 2 x ddp 2": (4, ["strategy=pp"]),
}
CASES = {
    "plain": [],
    "untied": ["task.options.tied=false"],
    "ragged": ["data.micro_batch=3"],
    "dropout": ["task.options.dropout=0.3", "data.micro_batch=4"],
    "masked": ["task.options.masked=true", "data.micro_batch=5"],
    "clipping": ["run.clip_norm=0.3", "optim=adamw", "optim.lr=0.01"],
    "EMA": ["run.ema_decay=0.9", "task.options.smoothing=0.1"],
    "recomputed": [
        *("strategy.recompute=blocks", "task.options.dropout=0.3", "data.micro_batch=3"),
    ],
    "Muon": ["task.options.muon=true"],
}


QUICK = [("pp 2", "clipping"), ("tp 2", "clipping")]
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


def steps_with_a_watched_loss(folder):
    """Return the steps, of a run on a mesh, in which uses of divided parameters were looked for."""
    steps = []
    task = Meshed(compose(folder, *TASK, "strategy=tp", "run.steps=5", "run.prove=false"))

    class Noted(parallel.DividedParameters):
        def __init__(self, parts):
            steps.append(task.step)
            super().__init__(parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "DividedParameters", Noted)
        task.fit()
    return steps


def test_a_loss_is_watched_in_the_dry_run_and_its_first_step_and_not_later(tmp_path):
    """It was known by the id of an object that each step makes anew: ranks differed, and waited."""
    assert on_ranks(2, steps_with_a_watched_loss, tmp_path) == [[0, 0], [0, 0]]


def check_losses(one, other, most):
    for step, loss in one["losses"].items():
        assert abs(other["losses"][step] - loss) <= most * loss


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_agrees_in_fp32_up_to_rounding(mesh, single, tmp_path):
    ranks, words = MESHES[mesh]
    fp32 = ("strategy.precision=fp32", "optim=adamw", "optim.lr=0.003")
    one = fit_on(1, tmp_path / "one", *TASK, "strategy=single", *fp32)
    other = fit_on(ranks, tmp_path / "many", *TASK, *words, *fp32)
    check_losses(one, other, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp 2", "pp 2"])
@pytest.mark.parametrize("precision, most", [("amp_bf16", 2e-2), ("fp16", 2e-2)])
def test_low_precisions_agree_up_to_rounding(mesh, precision, most, tmp_path):
    ranks, words = MESHES[mesh]
    low = [f"strategy.precision={precision}", "run.clip_norm=1", "optim.lr=0.01", "run.steps=8"]
    one = fit_on(1, tmp_path / "one", *TASK, "strategy=single", *low)
    check_losses(one, fit_on(ranks, tmp_path / "many", *TASK, *words, *low), most)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_pipeline_has_the_bits_of_one_process(schedule, tmp_path):
    """Of one that accumulates the same micro-batches; tied weights are summed in another order."""
    words = [
        *("task.options.tied=false", "task.options.dropout=0.2", "data.micro_batch=4"),
        *("strategy.precision=fp32", "run.ema_decay=0.9", "run.steps=8"),
    ]
    one = fit_on(1, tmp_path / "one", *TASK, "strategy=single", *words)
    words += ["strategy=pp", "strategy.mesh.pipeline=3", f"strategy.schedule={schedule}"]
    other = fit_on(3, tmp_path / "many", *TASK, *words)
    check_equal_bits(one, other)
    assert one["losses"] == other["losses"] and one["metrics"] == other["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [["strategy.mesh.tensor=2"], ["strategy=pp", *TENSOR]])
def test_sequence_parallel(mesh, tmp_path):
    words = ["task.options.dropout=0.3", "data.micro_batch=4", "run.clip_norm=0.5"]
    words += ["task.options.inner=false"]
    one = fit_on(1, tmp_path / "one", *TASK, "strategy=single", *words)
    other = fit_on(2 * len(mesh), tmp_path / "many", *TASK, *words, *mesh, "strategy.sequence=true")
    check_parity(one, other, falls=False)


# Other models -----------------------------------------------------------------------------------


class Convolutional(Trainer):
    """A ResNet with BatchNorm, whose stem and head are outside of its blocks."""

    def build_dataset(self, split):
        images = torch.randn(43, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        return ResidentDataset(images, torch.arange(43) % 10)

    def build_model(self):
        return ResNet([1, 1, 1, 1], 10, True)

    def blocks(self, model):
        return [m for m in model.modules() if type(m).__name__ == "Block"]

    def loss(self, outputs, targets):
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.slow
def test_a_resnet_over_a_pipeline(tmp_path):
    words = [*TASK, "run.norm_rows=4", "optim.lr=0.01"]
    words += ["data.global_batch=8", "data.micro_batch=4", "strategy.precision=fp64"]
    one = fit_on(1, tmp_path / "one", *words, "strategy=single", task=Convolutional)
    other = fit_on(2, tmp_path / "many", *words, "strategy=pp", task=Convolutional)
    check_parity(one, other, falls=False)
    check_equal_bits(one, other)


class Both(Net):
    """A network that evaluates the reversed sequence too."""

    def forward(self, tokens, positions):
        outputs = super().forward(tokens, positions)
        if self.training:
            return outputs
        return (outputs + super().forward(tokens.flip(1), positions).flip(1)) / 2


class Twice(Meshed):
    def build_model(self):
        return Both(self.options)


@pytest.mark.slow
def test_a_model_that_runs_its_blocks_twice(tmp_path):
    words = [*TASK, "eval.every_steps=5"]
    one = fit_on(1, tmp_path / "one", *words, "strategy=single", task=Twice)
    other = fit_on(3, tmp_path / "many", *words, "strategy.mesh.pipeline=3", task=Twice)
    check_parity(one, other, falls=False)


class Attention(nn.Module):
    """As in nanoGPT's model.py: sizes are those of the whole model."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head, self.n_embd, self.dropout = heads, width, dropout

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k, q, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (k, q, v))
        rate = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class Layer(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self, width=16, layers=3, dropout=0.2):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(11, width),
                "wpe": nn.Embedding(8, width),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList([Layer(width, 4, dropout) for _ in range(layers)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, 11, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx):
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


class Nano(Meshed):
    def build_model(self):
        return NanoGPT()

    def blocks(self, model):
        return list(model.transformer.h)

    def tensor_plan(self):
        return {"transformer.h.*.attn.c_attn": "columns", "transformer.h.*.attn.c_proj": "rows"}

    def split_batch(self, batch):
        (tokens, _), targets = super().split_batch(batch)
        return tokens, targets


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pp 2", "pp 3", "pp 2 x fsdp 2"])
def test_nanogpts_model_over_a_pipeline_as_it_is(mesh, tmp_path):
    ranks, mesh_words = MESHES[mesh]
    words = [*TASK, "data.micro_batch=4", "strategy.precision=fp64"]
    one = fit_on(1, tmp_path / "one", *words, "strategy=single", task=Nano)
    check_parity(one, fit_on(ranks, tmp_path / "many", *words, *mesh_words, task=Nano), falls=False)


@pytest.mark.parametrize("mesh", ["tp 2", "cp 2"])
def test_what_nanogpts_model_cannot_divide_is_refused(mesh, tmp_path):
    ranks, words = MESHES[mesh]
    line = {
        "tp 2": "divided by tensor_plan fails: .*; write -1 for the number of heads",
        "cp 2": "take positions",
    }
    with pytest.raises(AssertionError, match=line[mesh]):
        fit_on(ranks, tmp_path, *TASK, *words, task=Nano)


# What the rest of a run needs -------------------------------------------------------------------


class Scored(Meshed):
    def build_metrics(self, split):
        from torchmetrics.classification import MulticlassAccuracy

        class Accuracy(MulticlassAccuracy):
            def update(self, outputs, targets):
                super().update(outputs.flatten(0, 1), targets[0].flatten())

        return {"hits": Accuracy(11, average="micro")}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pp 2 x tp 2", "fsdp 2 x cp 2", "pp 2 x ddp 2", "pp 2"])
def test_evaluation_and_torchmetrics(mesh, tmp_path):
    pytest.importorskip("torchmetrics")  # before the forks: it takes 4 s
    ranks, mesh_words = MESHES[mesh]
    words = [*TASK, "eval.every_steps=7", "run.ema_decay=0.5", "eval.micro_batch=5"]
    one = fit_on(1, tmp_path / "one", *words, "strategy=single", task=Scored)
    other = fit_on(ranks, tmp_path / "many", *words, *mesh_words, task=Scored)
    assert len(one["metrics"]) == 3
    for name, value in one["metrics"].items():
        assert abs(other["metrics"][name] - value) < 1e-7, name


class Bad(Meshed):
    """A loss that is not finite for a sequence of the third step."""

    def loss(self, outputs, targets):
        values, weights = super().loss(outputs, targets)
        is_bad = (targets[0][:, :3] == torch.tensor([4, 5, 6])).all(1)
        return values * torch.where(is_bad, float("nan"), 1.0)[:, None], weights

    def build_dataset(self, split):
        data = super().build_dataset(split)
        if split == "train":
            data.tensors[0][41, :3] = torch.tensor([4, 5, 6])
        return data


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp 2", "pp 2 x tp 2"])
def test_a_bad_example_is_found_and_its_step_is_skipped(mesh, tmp_path, capfd):
    ranks, mesh_words = MESHES[mesh]
    one = fit_on(1, tmp_path / "one", *TASK, "strategy=single", task=Bad)
    capfd.readouterr()
    other = fit_on(ranks, tmp_path / "many", *TASK, *mesh_words, task=Bad)
    line = r"warning: step \d+: .*example 41 is not finite.*, on rank \d; the update was"
    out = capfd.readouterr().out
    assert re.search(line, out)
    for name, weight in one["weights"].items():
        assert relative_distance(weight, other["weights"][name]) < 1e-10, name
    step = re.search(r"warning: step (\d+)", out)[1]
    assert audit([str(other["directory"])]) == 0
    words = [str(other["directory"]), f"step={step}", "task.trainer=mesh_gpt.Meshed"]
    assert replay(words) == 0  # of a task without the example


@pytest.mark.slow
def test_process_groups_are_open_to_a_task_and_wait_as_long_as_is_set(tmp_path):
    words = [*TASK, "strategy.mesh.tensor=2", "strategy.mesh.shard=2", "run.steps=1"]
    config = compose(tmp_path, *words, "dist.timeout_s=77")

    def read():
        seen = {}

        class Task(Meshed):
            def loss(self, outputs, targets):
                for name, group in self.world.groups.items():
                    total = torch.tensor(float(self.world.rank))
                    torch.distributed.all_reduce(total, group=group.group)
                    seen[name] = (int(total), group.rank, group.size, group.ranks)
                    options = group.group._get_backend(torch.device("cpu")).options
                    assert options._timeout.total_seconds() == 77, name
                return super().loss(outputs, targets)

        Task(config).fit()
        return seen

    results = on_ranks(4, read)
    assert results[3] == {
        "pipeline": (3, 0, 1, (3,)),
        "replicate": (3, 0, 1, (3,)),
        "shard": (4, 1, 2, (1, 3)),
        "context": (3, 0, 1, (3,)),
        "tensor": (5, 1, 2, (2, 3)),
        "data": (4, 1, 2, (1, 3)),
    }


class Stopping(Meshed):
    """Task in which the last rank is stopped for a while, in a step."""

    def loss(self, outputs, targets):
        if self.step == 2 and self.model.training and self.world.rank == 3:
            pid = os.getpid()
            if not os.fork():
                time.sleep(12)
                os.kill(pid, signal.SIGCONT)
                os._exit(0)
            os.kill(pid, signal.SIGSTOP)
        return super().loss(outputs, targets)


@pytest.mark.slow
def test_rank_that_stops_ends_the_others_after_the_timeout_of_their_mesh(tmp_path):
    words = [*TASK, "strategy=tp", "dist.timeout_s=4", "dist.hang_timeout_s=null"]
    compose(tmp_path, *words)

    def body():
        began = time.monotonic()
        with pytest.raises(RunError) as told:
            Stopping(compose(tmp_path, *words)).fit()
        return time.monotonic() - began, str(told.value)

    for rank, (seconds, line) in enumerate(on_ranks(4, body)):
        assert line.startswith("another rank has exited or does not answer ("), line
        assert rank == 3 or seconds < 30, (rank, seconds)  # gloo's own would be 1,800


# Refusals ---------------------------------------------------------------------------------------


class Stepping(Meshed):
    def train_step(self, batch):
        return self.update(batch)


class Planless(Meshed):
    def tensor_plan(self):
        return {}


class Mixed(Meshed):
    def tensor_plan(self):
        return super().tensor_plan() | {"blocks.*.attend": "columns"}


class Half(Meshed):
    def tensor_plan(self):
        return {
            name: form for name, form in super().tensor_plan().items() if "embed" not in name
        } | {"embed": "vocabulary"}


class Unknown(Meshed):
    def tensor_plan(self):
        return {"blocks.*.foo": "rows"}


class Averaging(Meshed):
    def loss(self, outputs, targets):
        values, weights = super().loss(outputs, targets)
        return (values * weights).mean(1)


class Reversed(Meshed):
    def blocks(self, model):
        return list(model.blocks)[::-1]


class Skip(Net):
    def forward(self, tokens, positions):
        x = first = self.blocks[0](self.embed(tokens), positions, mask=None)
        for block in self.blocks[1:]:
            x = block(x, positions, mask=None)
        return self.head(self.norm(x + first)) * self.scale + self.position.sum()


class Skipping(Meshed):
    def build_model(self):
        return Skip(self.options)


class MixedBehindZeros(Mixed):
    def build_model(self):
        model = super().build_model()
        for block in model.blocks:
            nn.init.zeros_(block.project.weight)
            nn.init.zeros_(block.project.bias)
        return model


class NormalisedBlock(Block):
    """A backward pass that normalises, over the columns that a rank has."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.widen = nn.Sequential(self.widen, NormalisesGradient())


class WithOwnBackward(Meshed):
    def build_model(self):
        model = super().build_model()
        o = self.options
        model.blocks = nn.ModuleList(
            NormalisedBlock(o.width, 4, o.dropout, o.inner) for _ in range(o.layers)
        )
        return model

    def tensor_plan(self):
        return {"blocks.*.widen.0": "columns", "blocks.*.narrow": "rows"}


class Extra(Net):
    def get_extra_state(self):
        return torch.ones(2)

    def set_extra_state(self, state):
        assert torch.equal(state, torch.ones(2))


class Keeping(Meshed):
    def build_model(self):
        return Extra(self.options)


class Unet(Net):
    """Adds the output of the first block after the third one."""

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        first = self.blocks[0](x, positions, mask=None)
        x = self.blocks[2](self.blocks[1](first, positions, mask=None), positions, mask=None)
        x = self.blocks[3](x + first, positions, mask=None)
        return self.head(self.norm(x)) * self.scale + self.position.sum()


class Unetting(Meshed):
    def build_model(self):
        return Unet(self.options)


class Balanced(Block):
    def forward(self, x, positions, *, mask):
        x = super().forward(x, positions, mask=mask)
        return x, x.square().mean((1, 2))


class WithLosses(Net):
    """Each block returns a loss of its own beside its output."""

    def forward(self, tokens, positions):
        x = self.embed(tokens) * self.scale + F.embedding(positions, self.position)
        total = 0.0
        for block in self.blocks:
            x, loss = block(x, positions, mask=None)
            total = total + loss
        return self.head(self.norm(x)) + 0.01 * total[:, None, None]


class Balancing(Meshed):
    def build_model(self):
        model = WithLosses(self.options)
        o = self.options
        model.blocks = nn.ModuleList(
            Balanced(o.width, 4, o.dropout, o.inner) for _ in range(o.layers)
        )
        return model


USES = "uses what another stage has, a parameter or the output of a block; give a block inputs"
REFUSED = {
    "own step": (Stepping, ["strategy=pp"], "Stepping has a train_step of its own"),
    "few blocks": (
        Meshed,
        ["strategy=pp", "task.options.layers=1"],
        "the task has 1 block; define",
    ),
    "no plan": (Planless, ["strategy=tp"], "the task has no tensor_plan; define it"),
    "unnamed": (Unknown, ["strategy=tp"], r"tensor_plan: blocks.\*.foo: no module has this name"),
    "wrong plan": (
        Mixed,
        ["strategy=tp"],
        "the outputs of the divided model are .* check tensor_plan",
    ),
    "wrong plan behind zeros": (
        MixedBehindZeros,
        ["strategy=tp"],
        "the outputs of the divided model are .* check tensor_plan",
    ),
    "own backward": (
        WithOwnBackward,
        ["strategy=tp", "strategy.precision=fp64"],
        "the gradient of .* in the divided model is .* from that of the whole; check the",
    ),
    "half tied": (Half, ["strategy=tp"], "head.weight shares a parameter that tensor_plan divides"),
    "averages": (Averaging, ["strategy=cp"], r": must be values \(rows, positions\)"),
    "order": (
        Reversed,
        ["strategy=pp"],
        "must run in the order of the list, 0 to 3; they ran 3 2 1",
    ),
    "skip": (Skipping, ["strategy=pp"], "the outputs depend on blocks other than through the next"),
    "skip between stages": (Unetting, ["strategy=pp"], f"mesh.pipeline: .*{USES}"),
    "losses of blocks": (Balancing, ["strategy=pp"], f"mesh.pipeline: .*{USES}"),
    "torch's dropout": (
        Meshed,
        ["strategy=tp", "run.dropout=torch"],
        "run.dropout=torch: tensor 2",
    ),
    "extra state": (Keeping, ["strategy=pp"], "has get_extra_state, and a stage saves tensors"),
    "hook": (Meshed, ["strategy=tp", "strategy.comm_hook=fp16"], "takes no comm hook; use ddp"),
    "sequence": (
        Meshed,
        ["strategy=cp", "strategy.sequence=true"],
        "strategy.mesh.tensor must be above 1",
    ),
}


@pytest.mark.parametrize("cell", REFUSED)
def test_what_cannot_work_is_refused_by_name(cell, tmp_path):
    task, words, line = REFUSED[cell]
    with pytest.raises(AssertionError, match=line):
        fit_on(2, tmp_path, *TASK, *words, task=task)


def test_a_size_that_the_tensor_axis_does_not_divide_is_refused(tmp_path):
    line = r"strategy.mesh.tensor=3: blocks.0.attend.weight has 48 in 3 packed parts on axis 0"
    with pytest.raises(AssertionError, match=line):
        fit_on(3, tmp_path, *TASK, "strategy.mesh.tensor=3")


# Schedules --------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_orders_of_sends_and_receives_agree(schedule):
    """Up to 8 stages and 16 micro-batches: no stage waits forever, and messages arrive in the order
    in which they are sent."""
    for stages in range(1, 9):
        for count in range(1, 17):
            orders = [order(schedule, stages, stage, count) for stage in range(stages)]
            for made in orders:
                assert sorted(made) == sorted((f, n) for f in (True, False) for n in range(count))
                assert [n for forward, n in made if not forward] == list(range(count))
                done = {number: place for place, (forward, number) in enumerate(made) if forward}
                assert all(done[n] < made.index((False, n)) for n in range(count))
            run_to_the_end(orders)


def run_to_the_end(orders):
    """Run the stages with wires that keep their order in each direction."""
    down = [[] for _ in orders]  # messages under way to a stage
    up = [[] for _ in orders]
    places = [0] * len(orders)
    while any(place < len(made) for place, made in zip(places, orders, strict=True)):
        moved = False
        for stage, made in enumerate(orders):
            if places[stage] == len(made):
                continue
            forward, number = made[places[stage]]
            is_end = stage == (0 if forward else len(orders) - 1)
            wire = down[stage] if forward else up[stage]
            if not is_end:
                if not wire:
                    continue
                assert wire.pop(0) == number
            target = stage + (1 if forward else -1)
            if 0 <= target < len(orders):
                (down if forward else up)[target].append(number)
            places[stage] += 1
            moved = True
        assert moved, f"the stages wait for each other: {orders}"


def test_1f1b_keeps_fewer_activations():
    made = order("1f1b", 4, 0, 16)
    kept = [sum(1 if forward else -1 for forward, _ in made[:n]) for n in range(len(made) + 1)]
    assert max(kept) == 4
    assert bubble(4, 16) == 3 / 19


# Several devices of a rank ----------------------------------------------------------------------


def test_blocks_over_the_devices_of_a_rank(tmp_path):
    """On the meta device, since there is no second real one: each block gets inputs on its own."""
    model = Net(Meshed.Options())
    devices = [torch.device("cpu"), torch.device("meta")]
    places = place_blocks(model, list(model.blocks), devices)
    assert [place.type for place in places] == ["cpu", "cpu", "meta", "meta"]
    seen = []
    for block in model.blocks:
        block.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append((args[0].device.type, args[1].device.type)),
            with_kwargs=True,
        )
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="out of meta tensor"):  # the way back
        model(tokens, tokens)
    assert seen == [(place.type, place.type) for place in places]
    assert {p.device.type for p in model.blocks[3].parameters()} == {"meta"}
    assert model.head.weight.device.type == "cpu"


@pytest.mark.slow
def test_model_parallel_within_a_rank(tmp_path, capfd):
    one = fit_on(1, tmp_path / "one", *TASK, "strategy=single")
    for ranks in (1, 2):
        other = fit_on(ranks, tmp_path / f"{ranks}", *TASK, "strategy=mp")
        check_parity(one, other, falls=False)
    assert "devices of this rank: 4 blocks on cpu; the rest on cpu" in capfd.readouterr().out
