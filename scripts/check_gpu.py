"""Check on one GPU everything that a GPU changes, in at most eight minutes: backends, precisions,
placement, speed.

    python scripts/check_gpu.py [--root data/cifar-10-batches-bin] [--json gpu.json]
        [--only nccl tf32]

Each check runs in a separate process with a time limit, so one failure does not affect the other
checks. Exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

# runs from a checkout that is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from harness import newest
from harness.stored import plain_of, tensors_of
from torch import nn

from trainer import ConfigError, Random, ResidentDataset, Summary, Trainer, load_config
from trainer.data.order import Order
from trainer.tasks.cifar import Cifar

BUDGET_S, TOLD = 460, "told: "
NO_GPU = "no GPU: torch sees no CUDA device; nothing was checked"
PRECISIONS = ("fp64", "fp32", "tf32", "amp_bf16", "amp_fp16", "bf16", "fp16")
LAYOUT = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
HSDP = ["strategy=hsdp", "strategy.mesh={replicate: 2, shard: 2}"]
RECIPE = """# @package _global_
task:
  name: probe
  trainer: check_gpu.Probe
  options: {norm: false, dropout: 0.0, amplify: 1.0}
data: {global_batch: 22}
run: {steps: 30}
optim: {lr: 0.3}
log: {every_steps: 1}
strategy: {precision: fp64}
"""


class Probe(Trainer):
    """Task with 203 points of 4 numbers in 3 classes; its noise has equal bits on every device."""

    @dataclass
    class Options:
        norm: bool
        dropout: float
        amplify: float

    def build_model(self):
        norm = nn.BatchNorm1d(16) if self.options.norm else nn.Identity()
        return nn.Sequential(
            nn.Linear(4, 16), norm, nn.GELU(), nn.Dropout(self.options.dropout), nn.Linear(16, 3)
        )

    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(int(split == "train"))
        inputs = torch.randn(203, 4, generator=generator)
        return ResidentDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long())

    def blocks(self, model):
        return [model[0], model[4]]

    def tensor_plan(self):
        return {"0": "columns", "4": "rows"}

    def augment(self, inputs, targets, random, train):
        return inputs + 0.1 * random.uniform("noise", 4) if train else inputs, targets

    def loss(self, outputs, targets):
        return self.options.amplify * nn.functional.cross_entropy(
            outputs, targets, reduction="none"
        )


class Around(nn.Module):
    """User-defined module that wraps another one."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, inputs):
        return self.inner(inputs)


class Own(Probe):
    def build_model(self):
        return Around(super().build_model())


class Watched(Probe):
    """Record the devices, the backend and an all-reduce that its steps receive."""

    def augment(self, inputs, targets, random, train):
        self.seen = {t.device.type for t in (inputs, targets, random.indices)} | getattr(
            self, "seen", set()
        )
        return super().augment(inputs, targets, random, train)

    def train_step(self, batch):
        one = torch.ones(3, device=self.world.device)
        dist.all_reduce(one)
        self.backend, self.reduced = dist.get_backend(), one.tolist()
        return super().train_step(batch)


class Strict(Watched):
    """Raise an error if an operation within a step makes the host wait for the GPU."""

    def train_step(self, batch):
        with synchronizing_is("error" if self.step else "default"):
            return Trainer.train_step(self, batch)


class Counted(Cifar):
    """CIFAR-10 that counts how often a step makes the host wait for the GPU, and measures the
    seconds since the first step."""

    def train_step(self, batch):
        self.began = getattr(self, "began", time.perf_counter())
        self.waits, self.accuracies = getattr(self, "waits", []), getattr(self, "accuracies", [])
        if self.step != 3:
            return super().train_step(batch)
        with warnings.catch_warnings(record=True) as caught, synchronizing_is("warn"):
            warnings.simplefilter("always")
            outcome = super().train_step(batch)
        self.waits = [str(w.message) for w in caught if "synchroniz" in str(w.message)]
        return outcome

    def summarize(self, means):
        if self.step:
            self.accuracies.append((time.perf_counter() - self.began, means["accuracy"]))
        return {}


@contextlib.contextmanager
def synchronizing_is(mode: str):
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")


# Runs ---------------------------------------------------------------------------------------------


@dataclass
class Here:
    """Environment of a check: its device, a scratch folder, and the folder of CIFAR-10."""

    device: torch.device
    folder: Path
    root: str

    def config_dir(self) -> str:
        file = self.folder / "conf" / "task" / "probe.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(RECIPE)
        return str(file.parent.parent)

    def fit(self, name: str, *overrides: str, task: type[Trainer] = Probe) -> tuple[Any, Summary]:
        """Train in this process."""
        words = ["task=probe", f"run.dir={self.folder}", f"run.name={name}", *overrides]
        trainer = task(load_config(words, [self.config_dir()]))
        return trainer, trainer.fit()

    def launch(self, name: str, *overrides: str, ranks: int = 1, device: str | None = None) -> Path:
        """Train in separate processes, on several ranks or another device; return the run
        directory."""
        launcher = (
            ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m"]
            if ranks > 1
            else []
        )
        words = ["task=probe", f"run.dir={self.folder}", f"run.name={name}", *overrides]
        environment = {key: value for key, value in os.environ.items() if key not in LAYOUT}
        scripts = Path(__file__).resolve().parent
        environment["PYTHONPATH"] = os.pathsep.join([str(scripts), str(scripts.parent)])
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        command = [
            sys.executable,
            "-m",
            *launcher,
            "trainer",
            "--config-dir",
            self.config_dir(),
            *words,
        ]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(last_error(done.stderr) or done.stdout[-300:])
        wanted = "cuda" if device != "cpu" and self.device.type == "cuda" else "cpu"
        assert wanted in done.stdout, f"{wanted} is not in the run's output:\n{done.stdout[:1500]}"
        return self.folder / "probe" / name


def last_error(text: str) -> str:
    """Return the first line that names an error; torchrun's own report follows it."""
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if "rror: " in line and "ChildFailedError" not in line]
    return (found or [line for line in lines if line] or [""])[0][:400]


def losses(directory: Path) -> dict[int, float]:
    record = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: r["train/loss"] for r in record if "train/loss" in r}


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return tensors_of(newest(directory))


def distance(one: Path, other: Path) -> float:
    """Return the largest relative difference between the losses and weights of two runs."""
    a, b = losses(one), losses(other)
    assert a.keys() == b.keys() and a, f"steps {min(a)} to {max(a)} and {min(b)} to {max(b)}"
    found = [abs(a[step] - b[step]) / abs(a[step]) for step in a]
    ours, theirs = weights(one), weights(other)
    found += [
        relative(ours[name].double(), theirs[name].double())
        for name in ours
        if ours[name].is_floating_point()
    ]
    return max(found)


def relative(wanted: torch.Tensor, found: torch.Tensor) -> float:
    return float((wanted - found).norm() / wanted.norm().clamp_min(1e-300))


def at_most(found: float, most: float, what: str) -> str:
    assert found <= most, f"{what} by {found:.1e}, more than {most:.0e}"
    return f"{what} by {found:.1e}"


# Checks: each returns a note or raises an error ---------------------------------------------------


class Skip(Exception):
    """Raised when a check does not apply here."""


def nccl(here: Here) -> str:
    """Check a process group of one rank, an all-reduce in it, and DDP with every hook."""
    wanted = "nccl" if here.device.type == "cuda" else "gloo"
    _, plain = here.fit("plain", "strategy=single", "strategy.precision=fp64")
    server = ["strategy=ddp", "strategy.precision=fp64", "strategy.comm_hook=parameter_server"]
    trainer, summary = here.fit("server", *server, f"dist.backend={wanted}", task=Watched)
    assert trainer.backend == wanted and trainer.reduced == [1.0] * 3, (
        trainer.backend,
        trainer.reduced,
    )
    note = at_most(
        distance(plain.directory, summary.directory), 1e-12, f"{wanted}: DDP and single differ"
    )
    hooks = ("fp16", "bf16", "powersgd") if wanted == "nccl" else ("fp16", "powersgd")
    for hook in hooks:
        _, run = here.fit(
            hook, "strategy=ddp", "strategy.precision=fp32", f"strategy.comm_hook={hook}"
        )
        check_learned(losses(run.directory), hook)
    return f"{note}; hooks {', '.join(hooks)} train"


def check_learned(curve: dict[int, float], name: str) -> None:
    values = list(curve.values())
    assert all(v is not None and math.isfinite(v) for v in values), f"{name}: a loss is not finite"
    assert min(values[-5:]) < 0.9 * values[0], (
        f"{name}: the loss went from {values[0]:.3f} to {values[-1]:.3f}"
    )


def amp_fp16(here: Here) -> str:
    """Check that steps are skipped, the loss scale decreases and the run succeeds if the scaled
    gradient overflows."""
    overflow = ["strategy.precision=amp_fp16", "task.options.amplify=256", "optim.lr=0.001"]
    _, summary = here.fit("overflow", *overflow)
    state, found = plain_of(newest(summary.directory))["precision"], weights(summary.directory)
    scale = float(state["scale"])
    assert scale < 2**16, f"no step was skipped: the scale is still {scale:g}"
    assert all(bool(w.isfinite().all()) for w in found.values()), "a weight is not finite"
    check_learned(losses(summary.directory), "amp_fp16")
    return (
        f"{round(math.log2(2**16 / scale))} steps skipped, the scale went from 65,536 to "
        f"{scale:,.0f}"
    )


def tf32(here: Here) -> str:
    """Check that tf32 sets torch's two flags and rounds, and that fp32 clears them and does not."""
    errors = {}
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(1024, 1024, generator=generator).to(here.device) for _ in range(2))
    images = torch.randn(16, 64, 32, 32, generator=generator).to(here.device)
    filters = torch.randn(64, 64, 3, 3, generator=generator).to(here.device)
    convolve = nn.functional.conv2d
    for name in ("tf32", "fp32"):
        try:
            here.fit(name, f"strategy.precision={name}")
        except ConfigError as error:
            assert here.device.type == "cpu" and name == "tf32", error
            continue
        if here.device.type == "cuda":
            flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
            assert flags == (name == "tf32",) * 2, (
                f"{name}: allow_tf32 is {flags} for (matmul, cudnn)"
            )
        exact = a.double() @ b.double(), convolve(images.double(), filters.double())
        errors[name] = (
            relative(exact[0], (a @ b).double()),
            relative(exact[1], convolve(images, filters).double()),
        )
    assert max(errors["fp32"]) < 1e-5, (
        f"fp32 is not fp32: (matmul, convolution) off by {errors['fp32']}"
    )
    notes = [
        "{}: matmul off by {:.1e}, convolution by {:.1e}".format(name, *found)
        for name, found in errors.items()
    ]
    if "tf32" not in errors:
        return f"refused on the CPU; {notes[0]}"
    assert 1e-5 < errors["tf32"][0] < 1e-2 and errors["tf32"][1] < 1e-2, (
        f"tf32 is off by {errors['tf32']}"
    )
    return "; ".join(notes)


def resident(here: Here) -> str:
    """Check that the data are on the device and that a step of fused SGD never makes the host
    wait; count how often a step of CIFAR-10 does."""
    trainer, _ = here.fit(
        "resident", "strategy.precision=fp32", "run.clip_norm=1", "run.ema_decay=0.9", task=Strict
    )
    assert trainer.seen == {here.device.type}, f"micro-batches were on {trainer.seen}"
    words = [
        "task=cifar",
        "task.options.data=bundled",
        "run.steps=6",
        f"run.dir={here.folder}",
        "data.global_batch=50",
    ]
    cifar = Counted(load_config(words))
    cifar.fit()
    return (
        f"micro-batches on {here.device.type}; the host waits 0 times a step, in task=cifar "
        f"{len(cifar.waits)} times"
    )


def map_location(here: Here) -> str:
    """Check that a checkpoint written on the CPU resumes on the GPU, and the reverse."""
    adam = ["optim=adam", "optim.lr=0.01", "strategy.precision=fp64"]
    whole = here.launch("whole", *adam, device="cpu")
    for steps, device in ((10, "cpu"), (20, None), (30, "cpu")):
        parts = here.launch("parts", *adam, f"run.steps={steps}", "run.resume=auto", device=device)
    return at_most(
        distance(whole, parts), 1e-9, f"cpu, {here.device.type}, cpu and cpu only differ"
    )


def resume(here: Here) -> str:
    """Check that a run stopped and resumed on the device has the same bits, with dropout."""
    recipe = ["strategy.precision=fp32", "task.options.dropout=0.2", "run.ema_decay=0.9"]
    _, whole = here.fit("whole", *recipe)
    here.fit("parts", *recipe, "run.steps=13")
    _, parts = here.fit("parts", *recipe, "run.resume=auto")
    differing = [
        n
        for n, w in weights(whole.directory).items()
        if not torch.equal(w, weights(parts.directory)[n])
    ]
    assert not differing, f"different bits after the resume: {', '.join(differing)}"
    assert losses(whole.directory) == losses(parts.directory) and whole.metrics == parts.metrics, (
        "different losses"
    )
    return "30 steps and 13 + 17 end with equal bits"


def data_parallel(here: Here) -> str:
    """Check torch's DataParallel with the one GPU listed twice."""
    _, single = here.fit("single", "strategy=single", "strategy.precision=fp64")
    trainer, twice = here.fit(
        "twice", "strategy=dp", "strategy.device_ids=[0,0]", "strategy.precision=fp64"
    )
    replicas = len(trainer.world.devices)
    assert replicas == (2 if here.device.type == "cuda" else 1)
    return at_most(
        distance(single.directory, twice.directory), 1e-10, f"{replicas} replicas and single differ"
    )


def two_ranks(here: Here) -> str:
    """Check two gloo ranks that share the GPU."""
    one, two = (
        here.launch("one", "strategy.precision=fp64"),
        here.launch("two", "strategy.precision=fp64", ranks=2),
    )
    return at_most(distance(one, two), 1e-10, "2 ranks and 1 differ")


def syncbn(here: Here) -> str:
    """Check torch's SyncBatchNorm on two gloo ranks that share the GPU."""
    recipe = ["strategy.precision=fp64", "strategy.sync_batchnorm=true", "task.options.norm=true"]
    one = here.launch("one", *recipe)
    try:
        two = here.launch("two", *recipe, ranks=2)
    except RuntimeError as error:
        if "SyncBatchNorm" in str(error) or "gloo" in str(error).lower():
            raise Skip(f"torch refuses it: {error}") from None
        raise
    return at_most(distance(one, two), 1e-8, "2 ranks and 1 differ")


def sharded(here: Here) -> str:
    """Check FSDP2 and HSDP against one rank, with recomputed layers, and a resume under another
    layout: over nccl with a GPU for each rank, on the CPU over gloo."""
    recipe = ["strategy.precision=fp64", "run.clip_norm=1", "task.options.dropout=0.2"]
    num_devices = torch.cuda.device_count() if here.device.type == "cuda" else 4
    layouts = {2: ["strategy=fsdp", "strategy.recompute=['2']"], 4: HSDP}
    tried = {ranks: words for ranks, words in layouts.items() if ranks <= num_devices}
    if not tried:
        raise Skip(f"fsdp needs 2 GPUs and hsdp needs 4; {num_devices} found")
    one = here.launch("one", *recipe)
    notes = []
    for ranks, words in tried.items():
        name = words[0].removeprefix("strategy=")
        run = here.launch(name, *recipe, *words, ranks=ranks)
        notes.append(at_most(distance(one, run), 1e-10, f"{name} on {ranks} ranks and 1 differ"))
    here.launch("parts", *recipe, *layouts[2], "run.steps=15", ranks=2)
    parts = here.launch("parts", *recipe, "run.resume=auto")
    notes.append(at_most(distance(one, parts), 1e-10, "fsdp resumed on 1 rank differs"))
    notes += [f"{words[0]} not tried" for ranks, words in layouts.items() if ranks not in tried]
    return "; ".join(notes)


def meshes(here: Here) -> str:
    """Check tensor and pipeline parallel on two ranks, and blocks over two devices of one rank,
    against one rank: over nccl with a GPU for each, on the CPU over gloo."""
    num_devices = torch.cuda.device_count() if here.device.type == "cuda" else 2
    if num_devices < 2:
        raise Skip(f"needs 2 GPUs; {num_devices} found")
    recipe = ["strategy.precision=fp64", "task.options.dropout=0.2", "data.micro_batch=4"]
    one = here.launch("one", *recipe)
    notes = []
    for name, ranks in (("tp", 2), ("pp", 2), ("mp", 1)):
        run = here.launch(name, *recipe, f"strategy={name}", ranks=ranks)
        notes.append(at_most(distance(one, run), 1e-10, f"{name} and one rank differ"))
    return "; ".join(notes)


def bits(here: Here) -> str:
    """Check that counter-based draws are equal on both devices; normal numbers are rounded."""
    indices = torch.cat([torch.arange(5000), torch.tensor([2**31, 2**32 + 7, 2**40])])
    for epoch, per in ((0, "epoch"), (2**31, "epoch"), (3, "run")):
        ours, theirs = (
            Random(2**40 + 1, "train", epoch, where) for where in (indices, indices.to(here.device))
        )
        for name, arguments in (
            ("bits", (3, 5)),
            ("uniform", (7,)),
            ("integers", (-5, 2**31 - 5, 2)),
        ):
            wanted = getattr(ours, name)(name, *arguments, per=per)
            found = getattr(theirs, name)(name, *arguments, per=per)
            assert found.device.type == here.device.type and torch.equal(wanted, found.cpu()), (
                f"{name} differs"
            )
    assert torch.equal(
        Order(7, 1, 5003)(torch.arange(5003)),
        Order(7, 1, 5003)(indices[:5000].new_tensor(range(5003))),
    )
    off = float((ours.normal("noise", 8) - theirs.normal("noise", 8).cpu()).abs().max())
    assert off < 1e-5, f"normal differs by {off:.1e}"
    return f"bits, uniform, integers are equal; normal differs by at most {off:.1e}"


def precisions(here: Here) -> str:
    """Check that every precision trains, with clipping and an EMA, under SGD and Adam."""
    names = [name for name in PRECISIONS if here.device.type == "cuda" or name != "tf32"]
    problems = []
    for name in names:
        for optim in (
            ["optim=sgd", "optim.lr=0.3"],
            ["optim=adam", "optim.lr=0.02", "optim.eps=1e-4"],
        ):
            words = [f"strategy.precision={name}", "run.clip_norm=5", "run.ema_decay=0.9", *optim]
            try:
                _, run = here.fit(f"{name}-{optim[0][6:]}", *words)
                check_learned(losses(run.directory), name)
            except Exception as error:  # report the other precisions too
                problems.append(
                    f"{name}, {optim[0][6:]}: {type(error).__name__}: {error}".splitlines()[0]
                )
    assert not problems, "; ".join(problems)
    return f"{', '.join(names)}: each with SGD and Adam"


def compiled(here: Here) -> str:
    """Check torch.compile on a user-defined module and on a bare nn.Sequential; each must really
    be compiled."""
    from torch._dynamo.utils import counters

    notes = []
    for task in (Own, Probe):
        counters.clear()
        _, plain = here.fit(f"plain-{task.__name__}", "strategy.precision=fp32", task=task)
        _, run = here.fit(
            f"compiled-{task.__name__}", "strategy.precision=fp32", "run.compile=true", task=task
        )
        check_learned(losses(run.directory), "compiled")
        off, graphs = distance(plain.directory, run.directory), counters["stats"]["unique_graphs"]
        notes.append(
            f"{'nn.Sequential' if task is Probe else 'own module'}: {graphs} graphs, off by "
            f"{off:.1e}"
        )
        assert off < 1e-3, f"compiled and plain differ: {'; '.join(notes)}"
        assert graphs, f"nothing was compiled: {'; '.join(notes)}"
    return "; ".join(notes)


def cifar(here: Here) -> str:
    """Train the CIFAR-10 recipe: on the full set with the paper's batch size and epochs, else on
    the bundled images with the task's own."""
    is_full = (Path(here.root) / "test_batch.bin").is_file()
    words = ["task=cifar", f"run.dir={here.folder}", f"task.options.root={here.root}"]
    if is_full:
        words += ["task.options.data=full", "data.global_batch=2000", "run.epochs=8"]
    else:
        words += [
            "task.options.data=bundled",
            *(["run.epochs=1"] if here.device.type == "cpu" else []),
        ]
    trainer = Counted(load_config(words))
    summary = trainer.fit()
    reached, goal = summary.metrics["eval/accuracy"], 0.94
    first = next((seconds for seconds, accuracy in trainer.accuracies if accuracy >= goal), None)
    note = (
        f"{'full' if is_full else 'bundled'} set: {reached:.2%} after "
        f"{trainer.accuracies[-1][0]:.1f} s with"
    )
    note += f" {len(trainer.accuracies)} evaluations, {summary.examples_per_s:,.0f} images/s"
    if is_full:
        note += f"; 94 % after {first:.1f} s" if first else "; 94 % was not reached"
    least = 0.93 if is_full else 0.78 if here.device.type == "cuda" else 0.2
    assert reached >= least, f"{note}, less than {least:.0%}"
    return note


CHECKS: dict[str, tuple[Callable[[Here], str], int]] = {  # name: (check, seconds it may take)
    "nccl": (nccl, 90),
    "amp_fp16": (amp_fp16, 60),
    "tf32": (tf32, 60),
    "resident": (resident, 60),
    "map_location": (map_location, 120),
    "resume": (resume, 60),
    "data_parallel": (data_parallel, 60),
    "two_ranks": (two_ranks, 90),
    "syncbn": (syncbn, 90),
    "sharded": (sharded, 120),
    "meshes": (meshes, 120),
    "bits": (bits, 40),
    "precisions": (precisions, 90),
    "compiled": (compiled, 150),
    "cifar": (cifar, 180),
}


# The command --------------------------------------------------------------------------------------


def check_here(name: str, device: str, root: str) -> None:
    """Run a check in this process and print its result as the last line."""
    warnings.filterwarnings("ignore", message="There are no gradients|.*TensorFloat32")
    with tempfile.TemporaryDirectory() as folder:
        here = Here(torch.device(device), Path(folder), root)
        try:
            told = {"result": "ok", "note": CHECKS[name][0](here)}
        except Skip as skip:
            told = {"result": "skipped", "note": str(skip)}
        except Exception as error:
            line = " ".join(f"{type(error).__name__}: {error}".split())
            told = {
                "result": "FAILED",
                "note": line[:600],
                "traceback": traceback.format_exc()[-4000:],
            }
    print(TOLD + json.dumps(told), flush=True)


def run(name: str, device: str, root: str, limit_s: float) -> dict[str, Any]:
    """Run a check in a separate process group; at the limit, kill it with all its children."""
    began = time.monotonic()
    row: dict[str, Any] = {"check": name}
    if limit_s < 5:
        return {
            **row,
            "result": "FAILED",
            "seconds": 0.0,
            "note": f"no time left of the {BUDGET_S} s",
        }
    words = [sys.executable, __file__, "--check", name, "--device", device, "--root", root]
    environment = {**os.environ, "TORCH_SHOW_CPP_STACKTRACES": "0"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    child = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output = child.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output = child.communicate()[0]
        row |= {
            "result": "FAILED",
            "note": f"not done after {limit_s:.0f} s",
            "output": output[-3000:],
        }
    told = [line for line in output.splitlines() if line.startswith(TOLD)]
    if told:
        row = {**json.loads(told[-1][len(TOLD) :]), **row}
    elif "result" not in row:
        row |= {
            "result": "FAILED",
            "note": f"ended with code {child.returncode}",
            "output": output[-3000:],
        }
    if row["result"] == "FAILED":
        row.setdefault("output", output[-3000:])
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def facts(device: str) -> dict[str, Any]:
    found = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "device": device,
        "card": None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if device == "cuda":
        found["card"] = torch.cuda.get_device_name(0)
        found["cudnn"] = torch.backends.cudnn.version()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def show(rows: list[dict[str, Any]], found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = (
        f"{found['card'] or found['device']}, torch {found['torch']}, CUDA {found['cuda']}, "
        f"{found['date']}"
    )
    table = Table("check", "result", "seconds", "note", title=title)
    colours = {"ok": "green", "FAILED": "bold red", "skipped": "yellow"}
    for row in rows:
        result = f"[{colours[row['result']]}]{row['result']}[/]"
        table.add_row(
            row["check"], result, f"{row['seconds']:.1f}", row["note"].replace("[", r"\[")
        )
    console = Console()
    Console(width=None if console.is_terminal else 140).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--root", default="data/cifar-10-batches-bin", help="CIFAR-10's binary files"
    )
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--check", choices=CHECKS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.check:
        check_here(given.check, given.device, given.root)
        return 0
    if given.device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU)
        given.json.write_text(
            json.dumps({**facts("cpu"), "note": NO_GPU, "checks": []}, indent=1) + "\n"
        )
        return 0
    found, rows, began = facts(given.device), [], time.monotonic()
    for name in given.only:
        left = BUDGET_S - (time.monotonic() - began)
        rows.append(run(name, given.device, given.root, min(CHECKS[name][1], left)))
        print("{check:<14}{result:<8}{seconds:6.1f} s  {note}".format(**rows[-1])[:200], flush=True)
        given.json.write_text(json.dumps({**found, "checks": rows}, indent=1) + "\n")
    show(rows, found)
    return int(any(row["result"] == "FAILED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
