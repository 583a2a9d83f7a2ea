"""Strategies on several GPUs: sharded, divided into matrices or stages, and exact."""

from __future__ import annotations

import time

import torch
from torch.nn.attention import SDPBackend

from .probe import KERNELS
from .runs import Here, Skip, at_most, check_equal_bits, check_learned, distance, losses

TEXT = [  # of task=text, in 4 micro-batches on one rank
    *["task.options.layers=2", "data.micro_batch=4", "data.global_batch=16"],
    *["log.every_steps=1", "eval.every_steps=null"],
]
HSDP = ["strategy=hsdp", "strategy.mesh={replicate: 2, shard: 2}"]


def sharded(here: Here) -> str:
    """Check FSDP2 and HSDP against one rank, with recomputed layers, and a resume under another
    layout: over nccl, on the CPU over gloo."""
    recipe = ["strategy.precision=fp64", "run.clip_norm=1", "task.options.dropout=0.2"]
    num_devices = 4 if here.shares(4) else here.count_gpus(4)
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


def divided(here: Here, strategy: str, ranks: int) -> str:
    """Check a strategy that divides the model, its rows or its optimizer state, with task=text and
    dropout, against one rank: over nccl, or over gloo on the CPU and on a GPU that ranks share."""
    words = [*TEXT, "strategy.precision=fp64", "run.steps=12"]
    one = here.launch("one", *words, recipe="text")
    run = here.launch(strategy, *words, f"strategy={strategy}", ranks=ranks, recipe="text")
    place = "" if here.count_gpus(ranks) >= ranks else ", which share a GPU,"
    return at_most(distance(one, run), 1e-10, f"{strategy} on {ranks} ranks{place} and 1 differ")


def context_flash(here: Here) -> str:
    """Check that causal attention of context parallel takes torch's flash attention in bf16, and
    learns what one rank learns to the accuracy of bf16."""
    here.needs_ranks(2)
    words = [*TEXT, "strategy.precision=amp_bf16", "run.steps=8", "task.options.dropout=0"]
    one = here.launch("one", *words, recipe="text")
    task = "task.trainer=gpu_checks.probe.WithKernels"
    two = here.launch("two", *words, task, "strategy=cp", ranks=2, recipe="text")
    kernels = (here.folder / KERNELS).read_text().split()
    if here.device.type == "cuda":
        assert any("flash" in name for name in kernels), f"attention by {', '.join(kernels)}"
    note = at_most(distance(one, two), 2e-2, "cp on 2 ranks and 1 differ")
    return f"{note}; attention by {', '.join(kernels) or 'no kernel of its own'}"


def pipeline(here: Here) -> str:
    """Check a pipeline whose stages exchange 32 MB per micro-batch, more than NCCL buffers."""
    here.needs_ranks(2)
    words = ["task.trainer=gpu_checks.probe.Wide", "strategy.precision=fp64", "run.steps=6"]
    words += ["data.global_batch=16", "data.micro_batch=2", "eval.every_epochs=null"]
    one = here.launch("one", *words)
    began = time.monotonic()
    stages = ["strategy=pp", "strategy.schedule=1f1b", "dist.hang_timeout_s=10"]
    two = here.launch("two", *words, *stages, ranks=2)
    seconds = time.monotonic() - began
    note = at_most(distance(one, two), 1e-10, "2 stages and 1 rank differ")
    return f"8 micro-batches of 32 MB by 1f1b: {note}; {seconds:.0f} s"


def model_parallel(here: Here) -> str:
    """Check blocks over two devices of each rank, with a weighted loss, also under a loss scale."""
    here.needs(2)
    ranks = 2 if here.count_gpus(4) >= 4 else 1
    words = ["task.trainer=gpu_checks.probe.Weighted", "data.micro_batch=4"]
    one = here.launch("one", *words, "strategy.precision=fp64")
    run = here.launch("mp", *words, "strategy=mp", "strategy.precision=fp64", ranks=ranks)
    what = f"mp on {ranks} {'ranks' if ranks > 1 else 'rank'} of 2 devices"
    note = at_most(distance(one, run), 1e-10, f"{what} and one rank differ")
    scaled = here.launch("fp16", *words, "strategy=mp", "strategy.precision=amp_fp16", ranks=ranks)
    check_learned(losses(scaled), "mp with amp_fp16")
    return f"{note}; amp_fp16 trains" + ("; 2 ranks need 4 GPUs" if ranks == 1 else "")


def exact(here: Here) -> str:
    """Check that strategy=exact has the same bits twice, and on one rank and two, with attention in
    bf16."""
    words = ["strategy=exact", "strategy.precision=amp_bf16", "task.options.layers=2"]
    words += ["run.steps=12", "log.every_steps=1", "eval.every_steps=null"]
    first = here.launch("first", *words, recipe="text")
    second = here.launch("second", *words, recipe="text")
    check_equal_bits(first, second, "two runs on one rank")
    two = here.launch("two", *words, ranks=2, recipe="text")
    num_gpus = here.count_gpus(2)
    place = "2 ranks" if num_gpus > 1 else "2 ranks that share the GPU"
    check_equal_bits(first, two, f"one rank and {place}")
    return f"equal bits in two runs and on {place}; attention by {attention_kernel(here)}"


def attention_kernel(here: Here) -> str:
    """Return the kernel that torch chooses for the attention of task=text in bf16."""
    shape = (4, 4, 128, 32)
    query = torch.zeros(shape, dtype=torch.bfloat16, device=here.device, requires_grad=True)
    number = torch._fused_sdp_choice(query, query, query, is_causal=True)
    name = next((n for n, kind in SDPBackend.__members__.items() if int(kind) == number), "?")
    if here.device.type == "cuda":
        assert name != "MATH", "attention in bf16 is not fused here, so this check shows nothing"
    return name.lower()
