"""Process groups: the backend of the GPUs, ranks that share a GPU, and one visible GPU per rank."""

from __future__ import annotations

import os
import subprocess

from harness import free_port

from .probe import Watched
from .runs import Here, Skip, at_most, check_learned, distance, last_error, losses


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
    """Check two ranks, which share the GPU over gloo if there is only one."""
    one, two = (
        here.launch("one", "strategy.precision=fp64"),
        here.launch("two", "strategy.precision=fp64", ranks=2),
    )
    return at_most(distance(one, two), 1e-10, "2 ranks and 1 differ")


def syncbn(here: Here) -> str:
    """Check SyncBatchNorm on two ranks, which share the GPU over gloo if there is only one."""
    recipe = ["strategy.precision=fp64", "strategy.sync_batchnorm=true", "task.options.norm=true"]
    one = here.launch("one", *recipe)
    try:
        two = here.launch("two", *recipe, ranks=2)
    except RuntimeError as error:
        if "SyncBatchNorm" in str(error) or "gloo" in str(error).lower():
            raise Skip(f"torch refuses it: {error}") from None
        raise
    return at_most(distance(one, two), 1e-8, "2 ranks and 1 differ")


def one_gpu_each(here: Here) -> str:
    """Check two ranks that see one GPU each, as under srun --gpu-bind: the backend must be nccl."""
    here.needs(2)
    is_cuda = here.device.type == "cuda"
    shown = os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1"
    words = [*here.words("each"), "task.trainer=gpu_checks.probe.Telling", "dist.timeout_s=30"]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank, gpu in enumerate(shown.split(",")[:2] if is_cuda else ["", ""]):
        environment = here.environment(CUDA_VISIBLE_DEVICES=gpu, RANK=str(rank), **place)
        process = subprocess.Popen(
            here.command(words),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        ranks.append(process)
    outputs = [process.communicate()[0] for process in ranks]
    wanted = "nccl on cuda:0" if is_cuda else "gloo on cpu"
    for rank, (process, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert process.returncode == 0, f"rank {rank}: {last_error(output)}"
        found = [line for line in output.splitlines() if line.startswith(f"rank {rank}: ")]
        assert found == [f"rank {rank}: {wanted}"], f"rank {rank} says {found}, not {wanted}"
    one = here.launch("one")
    return at_most(
        distance(one, here.folder / "probe" / "each"), 1e-10, f"{wanted}: 2 ranks and 1 differ"
    )
