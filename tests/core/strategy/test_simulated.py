"""The code for accelerators, on the simulated one of harness/simulated_accelerator.py."""

import contextlib
import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import simulated_accelerator, slow_but
from harness.internals import load_task
from harness.ranks import on_ranks
from harness.simulated import count_steps, fit_simulated, on_simulated, server
from harness.training import CONF, PARITY, check_parity, compose, fit, together
from torch import nn

from trainer import ConfigError, RunError, load_config
from trainer.core.distributed import accelerator
from trainer.core.distributed.devices import find_known
from trainer.core.distributed.group import process_group
from trainer.core.distributed.rendezvous import choose_backend, collective_limit
from trainer.core.distributed.watch.phases import PATIENCE, Phase, State
from trainer.core.distributed.world import RankGroup, World
from trainer.core.engine.deferred_reads import DeferredRows, HostCopy
from trainer.core.engine.precision import AUTOCAST, Precision
from trainer.core.record.startup import slow_reasons
from trainer.core.strategy import find_devices
from trainer.core.strategy.dp import DataParallel
from trainer.core.strategy.exact import Exact

REASON = simulated_accelerator.reason_to_skip()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "it can be used")
LAYOUTS = [
    *[
        (n, "tiny", f"strategy={name}")
        for name in ("ddp", "fsdp", "exact", "zero1")
        for n in (1, 2)
    ],
    *[(2, "meshed", f"strategy={name}") for name in ("pp", "tp", "cp")],
    *[(4, "meshed", f"strategy={name}") for name in ("pp_fsdp", "fsdp_tp", "hsdp")],
]


@pytest.fixture(scope="module", autouse=True)
def ranks_are_forked_from_a_server():
    with server():
        yield


@pytest.mark.parametrize(("ranks", "task", "word"), slow_but(LAYOUTS, (2, "tiny", "strategy=fsdp")))
def test_strategies_learn_the_same_as_on_the_cpu(ranks, task, word, tmp_path):
    words = (f"task={task}", *PARITY)
    one = together(on_ranks(1, lambda: fit(tmp_path / "cpu", *words)))
    check_parity(one, together(fit_simulated(ranks, tmp_path / "sim", *words, word)), falls=False)


# Waits and launches ----

WAIT = "Event.synchronize"
STEPS = ["task=tiny", "run.steps=7", "log.every_steps=100", "eval.every_epochs=null"]
STEADY = [
    *[(2, [f"strategy={name}"]) for name in ("ddp", "fsdp", "exact", "zero1")],
    (2, ["strategy=ddp", "strategy.sync_batchnorm=true", "task.options.norm=true"]),
    (1, ["optim=muon"]),
    (1, ["data.micro_batch=6", "task.options.dropout=0.1", "run.clip_norm=1.0"]),
    *[(ranks, ["log.every_steps=1", "log.train_metrics=true"]) for ranks in (1, 2)],
    (1, ["strategy.precision=amp_fp16", "optim=adamw"]),
    (1, ["data.path=streamed", "data.workers=2"]),
    (1, ["data.path=streamed", "data.workers=0"]),
]


OF_CHATS = [
    *("task=lm", "task.options.files=16", "task.options.context=192", "task.options.width=16"),
    *("task.options.layers=1", "task.options.heads=2", "task.options.answers=0"),
    *("data.global_batch=4", "data.micro_batch=2", "data.workers=0", "strategy.precision=fp32"),
]


@pytest.mark.slow
def test_the_host_waits_for_no_count_of_a_language_model(tmp_path, monkeypatch):
    """It waited for the numbers of learned tokens, in each micro-batch, four times. What is left is
    in transformers, which asks once whether rows are packed."""
    pytest.importorskip("transformers")
    from trainer.hf import causal

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = Path(causal.__file__).read_text(encoding="utf-8").splitlines()
    for _, _, _, waits in count(1, tmp_path, *OF_CHATS):
        lines = [text[int(place.rpartition(":")[2]) - 1] for what, place in waits if what != WAIT]
        assert len(lines) <= 2  # micro-batches
        assert all("self.base.base_model(**inputs)" in line for line in lines), waits


LAUNCHES = [([], 40), (["task.options.norm=true"], 50), (["task.options.dropout=0.1"], 46)]


def count(ranks, folder, *words, evaluates=False):
    task = STEPS[:1] * (not words or not words[0].startswith("task="))
    words = [*task, *STEPS[1:], f"run.dir={folder}", *words]
    return on_simulated(ranks, count_steps, words, [CONF], None, evaluates)[0]


@pytest.mark.parametrize(("ranks", "words"), slow_but(STEADY, STEADY[0], STEADY[5], STEADY[-1]))
def test_the_host_waits_once_in_a_steady_step(ranks, words, tmp_path):
    for _, _, _, waits in count(ranks, tmp_path, *words):
        assert [what for what, _ in waits] == [WAIT], waits
        assert waits[0][1].startswith("engine/deferred_reads.py:")


@pytest.mark.parametrize(
    ("words", "most"),
    slow_but(LAUNCHES, LAUNCHES[1]),
)
def test_a_step_has_few_launches(words, most, tmp_path):
    assert max(launches for launches, *_ in count(1, tmp_path, *words)) <= most


def test_gradients_are_reduced_once_a_step_with_any_number_of_micro_batches(tmp_path):
    counts = []
    for size in (6, 2):
        words = [f"data.micro_batch={size}", "data.global_batch=12", "strategy=ddp"]
        steps = count(2, tmp_path / str(size), *words)
        counts.append([launched.get("nccl:all_reduce", 0) for _, launched, *_ in steps])
    assert counts[0] == counts[1] and max(counts[0]) >= 1


AMP = ["strategy.precision=amp_bf16", "run.norm_rows=null"]
RECIPES = [  # a GPU takes some 5 us for a launch from eager code
    (["task=text", "strategy.precision=fp32"], 200),
    (["task=cifar", "data.global_batch=64", *AMP], 260),
    (["task=cifar", "task.options.model=resnet18", "optim=sgd", "data.global_batch=8", *AMP], 350),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "most"), RECIPES)
def test_a_step_of_a_recipe_has_few_launches(words, most, tmp_path):
    steps = count(1, tmp_path, *words)
    for launches, _, _, waits in steps:
        assert launches <= most
        assert [what for what, _ in waits] == [WAIT]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "numbers"), [("resident", 3), ("streamed", 2)])
def test_evaluation_and_checkpoints_wait_a_few_times(path, numbers, tmp_path):
    words = [
        "run.steps=10",
        "eval.every_steps=4",
        "eval.micro_batch=20",
        f"data.path={path}",
        "data.workers=0",
    ]
    steps = count(1, tmp_path, *words, evaluates=True)
    (waits,) = {tuple(waits) for _, _, _, waits in steps[:-1] if len(waits) > 1}
    reads = ["copy device to host"] * numbers  # means of evaluation and training, resident: ledger
    assert [what for what, _ in waits] == [WAIT, *reads, "Stream.synchronize"]


@pytest.mark.parametrize("workers", slow_but([0, 2], 0))
def test_streamed_rows_are_copied_beside_what_is_computed(workers, tmp_path):
    more = ("data.path=streamed", "data.micro_batch=4", f"data.workers={workers}")
    one = together(on_ranks(1, lambda: fit(tmp_path / "cpu", "task=tiny", *PARITY, *more)))
    check_parity(one, together(fit_simulated(2, tmp_path / "sim", "task=tiny", *PARITY, *more)))


# Mutants, which the simulation must catch ----


def without_a_wait(folder):
    """Read the outcome of a step while its copy is under way."""
    HostCopy.read = lambda self, wait: self._tensors
    config = load_config([*STEPS, f"run.dir={folder}"], [CONF])
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        load_task(config)(config).fit()
    return said.getvalue()


def test_a_removed_wait_is_seen(tmp_path):
    (said,) = on_simulated(1, without_a_wait, tmp_path)
    assert said.count("the gradient is not finite") >= 2  # a copy under way reads as NaN


def without_record_stream(folder):
    """Let the memory of rows that were copied aside be used again while they are read."""
    torch.Tensor.record_stream = lambda self, stream: None
    return fit(folder, "task=tiny", "data.path=streamed", "run.steps=4")


def test_memory_that_is_used_again_too_early_is_seen(tmp_path):
    with pytest.raises(AssertionError, match=r"allocates memory that stream -\d+ still uses"):
        on_simulated(1, without_record_stream, tmp_path)


def with_one_group_for_both_ways(folder):
    opened = RankGroup.open
    RankGroup.open = lambda self, ranks, name="", is_separate=False: opened(self, ranks, name)
    return fit(folder, "task=meshed", *PARITY, "strategy=pp", "data.micro_batch=4")


@pytest.mark.slow
def test_a_pipeline_with_one_group_for_both_ways_is_seen(tmp_path):
    with pytest.raises(AssertionError, match="which deadlocks on NCCL"):
        on_simulated(2, with_one_group_for_both_ways, tmp_path)


def reduce_on_the_host(folder):
    config = compose(folder, "task=tiny")
    world = World.from_environment()
    world = world.with_devices(find_devices(config.strategy, world))
    with process_group(config.dist, world):
        dist.all_reduce(torch.ones(3))


def test_a_tensor_of_the_host_in_a_collective_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="Tensors must be CUDA and dense"):
        on_simulated(2, reduce_on_the_host, tmp_path)


class Reads(torch.optim.SGD):
    """Reads a number of the device in each step."""

    def step(self, closure=None):
        float(self.param_groups[0]["params"][0].sum())
        return super().step(closure)


def count_with_a_reader(folder):
    config = load_config(STEPS, [CONF])
    kind = load_task(config)
    task = type("Reading", (kind,), {"build_optimizer": lambda self, m: Reads(m.parameters(), 0.1)})
    return count_steps([*STEPS, f"run.dir={folder}"], [CONF], task)


def test_a_number_read_in_an_optimizer_is_seen(tmp_path):
    for _, _, _, waits in on_simulated(1, count_with_a_reader, tmp_path)[0]:
        assert "_local_scalar_dense" in [what for what, _ in waits]


# Rows of predictions, and autocast ----


def late_rows():
    rows = DeferredRows(torch.device("sim"))
    for number in range(3):
        rows.add({"prediction": torch.full((4,), number, device="sim")})
    rows.flush()
    parts = rows.parts["prediction"]
    return [part.tolist() for part in parts], [part.is_pinned() for part in parts]


def test_predictions_do_not_keep_the_pinned_memory_of_their_copies():
    ((values, are_pinned),) = on_simulated(1, late_rows)
    assert values == [[number] * 4 for number in range(3)] and not any(are_pinned)


def dtypes_of_products():
    """Return the dtype of a product in each precision."""
    device = torch.device("sim")
    matrix = torch.ones(2, 2, device=device)
    found = {}
    for name in AUTOCAST:
        with Precision(name, device).autocast():
            found[name] = (matrix @ matrix).dtype
    return found


def test_autocast_computes_in_the_type_of_the_precision():
    """Without a dtype, CUDA's autocast computes in fp16, and that of a CPU in bf16."""
    assert on_simulated(1, dtypes_of_products) == [AUTOCAST]


# The backend and the devices ----


def open_and_name_backend(folder, backend):
    config = compose(folder, "task=tiny")
    world = World.from_environment()
    world = world.with_devices(find_devices(config.strategy, world))
    said = io.StringIO()
    with (
        contextlib.redirect_stderr(said),
        process_group(replace(config.dist, backend=backend), world),
    ):
        return dist.get_backend(), said.getvalue()


def test_a_rank_that_sees_one_device_of_its_own_uses_the_backend_of_devices(tmp_path):
    found = on_simulated(2, open_and_name_backend, tmp_path, "auto", devices=0)
    assert found == [("simccl", "")] * 2


def test_ranks_that_share_a_device_use_gloo_and_say_so(tmp_path):
    found = on_simulated(2, open_and_name_backend, tmp_path, "auto", devices=1)
    assert [backend for backend, _ in found] == ["gloo", "gloo"]
    assert found[0][1].startswith("warning: ranks 0, 1 share GPUs: dist.backend=auto is gloo")
    assert not found[1][1]


def test_a_backend_that_ranks_cannot_share_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="needs one GPU per rank, but ranks 0, 1 share GPUs"):
        on_simulated(2, open_and_name_backend, tmp_path, "simccl", devices=1)


def test_the_watcher_is_before_the_backends_own_watchdog(tmp_path):
    config = replace(compose(tmp_path, "task=tiny").dist, hang_timeout_s=100.0)
    assert collective_limit(config, "gloo") == config.timeout_s
    assert collective_limit(config, "nccl") > PATIENCE * config.hang_timeout_s
    assert collective_limit(replace(config, hang_timeout_s=None), "nccl") > config.timeout_s


def test_mpi_is_refused_where_torch_sees_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerator, "count", lambda: 2)
    config = compose(tmp_path, "task=tiny")
    world = replace(World(), launcher=replace(World().launcher, name="mpirun"))
    with pytest.raises(ConfigError, match=r"dist\.backend=mpi: carries CPU tensors only"):
        choose_backend(replace(config.dist, backend="mpi"), world)


class Odd(nn.Linear):
    """A layer with a buffer of a dtype that NCCL has not."""

    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("small", torch.arange(5, dtype=torch.int16))


def fit_odd(folder, *words):
    words = ("task=tiny", *PARITY, *words)
    kind = load_task(compose(folder, *words))
    task = type("Odd", (kind,), {"build_model": lambda self: nn.Sequential(Odd())})
    return fit(folder, *words, task=task)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_buffers_of_any_dtype_are_sent(strategy, tmp_path):
    one = together(on_ranks(1, lambda: fit_odd(tmp_path / "cpu")))
    found = on_simulated(2, fit_odd, tmp_path / "sim", f"strategy={strategy}")
    check_parity(one, together(found), falls=False)


class TwoHalves(nn.Module):
    """A model that lies on two devices, as its strategy asks for."""

    def __init__(self, devices):
        super().__init__()
        self.one = nn.Linear(4, 16).to(devices[0])
        self.other = nn.Linear(16, 3).to(devices[1])

    def forward(self, x):
        return self.other(torch.relu(self.one(x)).to(self.other.weight.device))


def fit_halves(folder, *words):
    words = ("task=tiny", *PARITY, "task.options.weights=true", *words)
    kind = load_task(compose(folder, *words))

    class Halves(kind):
        def build_model(self):
            return TwoHalves([*self.world.devices, *self.world.devices])

        def loss(self, outputs, targets):
            return super().loss(outputs, targets.to(outputs.device))

        def metrics(self, outputs, targets):
            return super().metrics(outputs, targets.to(outputs.device))

    return fit(folder, *words, task=Halves)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_on_two_devices_of_each_rank_learns_the_same(ranks, tmp_path):
    one = together(on_ranks(1, lambda: fit_halves(tmp_path / "cpu")))
    words = ("strategy=mp", "strategy.precision=fp64")
    check_parity(one, together(on_simulated(ranks, fit_halves, tmp_path / "sim", *words)))


@pytest.mark.parametrize("word", ["run.compile=true", "strategy.recompute=blocks"])
def test_dp_refuses_what_copies_of_a_model_break(word, tmp_path):
    config = compose(tmp_path, "task=tiny", "strategy=dp", word)
    devices = (torch.device("cuda", 0), torch.device("cuda", 1))
    with pytest.raises(ConfigError, match=f"{word.partition('=')[0]}: torch's DataParallel makes"):
        DataParallel.check(config, World(devices=devices))


def ask_for_determinism():
    Exact.set_threads(World(devices=(torch.device("sim", 0),)))
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        os.environ["CUBLAS_WORKSPACE_CONFIG"],
    )


def test_exact_asks_for_deterministic_kernels_and_takes_no_others():
    assert on_simulated(1, ask_for_determinism) == [(True, False, False, ":4096:8")]


def list_reasons(folder, *words):
    config = compose(folder, "task=tiny", *words)
    world = World.from_environment()
    world = world.with_devices(find_devices(config.strategy, world))
    return slow_reasons(config, world, 1)


def test_fp32_on_a_device_with_bf16_is_said(tmp_path):
    said = "fp32 leaves bf16 arithmetic unused (strategy.precision=default takes it)"
    assert on_simulated(4, list_reasons, tmp_path, "strategy.precision=fp32") == [said] * 4
    assert on_simulated(4, list_reasons, tmp_path, "strategy.precision=amp_bf16") == [""] * 4


def test_idle_devices_are_said(tmp_path):
    words = ("strategy.precision=amp_bf16",)
    said = "1 of this node's 4 GPUs is used; torchrun --nproc_per_node=4 uses all"
    assert on_simulated(1, list_reasons, tmp_path, *words) == [said]
    assert on_simulated(1, list_reasons, tmp_path, *words, "strategy=dp") == [""]


@pytest.mark.slow
def test_a_device_gets_bf16_by_default_and_a_cpu_fp32(tmp_path, capfd):
    words = ("task=tiny", "run.steps=2", "strategy.precision=default")
    on_ranks(1, lambda: fit(tmp_path / "cpu", *words))
    assert "fp32" in capfd.readouterr().out
    fit_simulated(1, tmp_path / "sim", *words)
    (settings,) = (tmp_path / "sim").rglob("config.json")
    assert '"precision": "amp_bf16"' in settings.read_text()


def fit_puts(folder):
    class Puts(nn.Module):
        def forward(self, x):
            return torch.zeros_like(x).put_(torch.arange(x.numel(), device=x.device), x)

    words = ("task=tiny", "strategy=exact")
    kind = load_task(compose(folder, *words))

    class Task(kind):
        def build_model(self):
            return nn.Sequential(nn.Linear(4, 16), Puts(), nn.Linear(16, 3))

    try:
        fit(folder, *words, task=Task)
    except ConfigError as error:
        return str(error)


def test_exact_names_an_operation_without_a_deterministic_kernel(tmp_path):
    (line,) = on_simulated(1, fit_puts, tmp_path)
    assert line.startswith("strategy=exact: put_ has no deterministic kernel on this device; cho")


def test_a_rank_that_waits_for_its_device_is_not_the_one_that_hangs():
    facts = {"rank": 1, "place": "", "pid": 1, "step": 3, "seconds": 9.0, "total": 1.0, "steps": 3}
    more = {"group": "", "is_stopped": False, "stopped_children": []}
    stack = ['File "torch/cuda/streams.py", line 1 in synchronize', 'File "outcome.py", line 1']
    assert State(**facts, **more, phase=Phase.DEVICE).is_waiting(stack)
    assert not State(**facts, **more, phase=Phase.UPDATE).is_waiting(stack)


def log_of(folder):
    words = ("task=tiny", "run.steps=6", "log.every_steps=2", "strategy.precision=fp32")
    fit(folder, *words)
    (file,) = folder.rglob("metrics.jsonl")
    entries = map(json.loads, file.read_text().splitlines())
    return [entry for entry in entries if "train/loss" in entry]


@pytest.mark.slow
def test_each_log_of_a_device_is_there_with_its_own_step(tmp_path):
    (entries,) = on_simulated(1, log_of, tmp_path / "sim")
    (on_cpu,) = on_ranks(1, lambda: log_of(tmp_path / "cpu"))
    assert [entry["step"] for entry in entries] == [2, 4, 6]
    losses = [[entry["train/loss"] for entry in each] for each in (entries, on_cpu)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert all(0 < e["speed/memory_gb"] <= e["speed/reserved_gb"] for e in entries)
    assert "speed/mfu" not in entries[0], "the peak of this device is not known"


def test_the_peak_of_a_card_is_found_by_its_name():
    assert find_known("NVIDIA H100 80GB HBM3").peak("amp_bf16") == 989e12
    assert find_known("NVIDIA GeForce RTX 4090").peak("tf32") == 82.6e12
    assert find_known("AMD Instinct MI300X").peak("amp_fp16") == 1307e12
    assert find_known("Tesla V100-SXM2-32GB").peak("amp_bf16") is None, "it has no bf16"
    assert find_known("NVIDIA H100 PCIe") is None and find_known("NVIDIA T4") is None


def fit_until_bad(folder):
    words = ("task=tiny", "run.steps=8", "log.every_steps=1", "run.on_bad_step=stop")
    kind = load_task(compose(folder, *words))

    class Bad(kind):
        def loss(self, outputs, targets):
            return super().loss(outputs, targets) * (float("nan") if self.step == 4 else 1.0)

    try:
        fit(folder, *words, task=Bad)
    except RunError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_log_before_a_bad_step_is_kept(ranks, tmp_path):
    assert on_simulated(ranks, fit_until_bad, tmp_path)[0].startswith("step 5: ")
    (file,) = tmp_path.rglob("metrics.jsonl")
    logged = [json.loads(line) for line in file.read_text().splitlines()]
    assert [entry["step"] for entry in logged if "train/loss" in entry][:4] == [1, 2, 3, 4]
