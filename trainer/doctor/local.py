"""Checks that a rank makes alone, and the facts that the ranks compare."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainer
from trainer.config.schema import Config
from trainer.data.shards.addresses import open_source
from trainer.data.shards.download import parts_of
from trainer.data.shards.index import load_index
from trainer.data.shards.sources import ResumeError, TemporaryError
from trainer.distributed import accelerator
from trainer.distributed.backend import choose_backend
from trainer.distributed.world import NVIDIA_DRIVER, World, explain_unseen_gpu
from trainer.doctor.table import Check, judge
from trainer.errors import ConfigError, RunError, counted, one_line
from trainer.record import fingerprint
from trainer.record import startup as report
from trainer.task import Task

# Limits for a warning.
FREE_BYTES = 10**9
MOST_OF_A_SHARD = 2**30  # bytes of one whose index does not say how many
FSYNC_S = 1.0
OPEN_FILES = 4096
_CODE = "the code of "  # prefix of the facts about code in a fingerprint


def gather_facts(task: Task, url: str = "") -> dict[str, Any]:
    """Return the facts and checks of this rank, as plain values for JSON.

    `url` is that of data in shards.
    """
    world = task.world
    config = task.config
    backend = choose_backend(config.dist, world)
    start = fingerprint.of_start(task.config, type(task))
    checks = [check_backend(config, world, backend), check_shared_memory(config, backend)]
    checks.append(check_open_files())
    if world.rank == 0:
        checks.append(check_disk(config))
    if url:
        checks.append(check_shards(url))
    return {
        "who": report.describe_rank(world),
        "launcher": world.launcher.name,
        "backend": backend,
        "threads": world.divide_threads(),
        "cores": _list_cores(),
        "quota": cpu_quota(),
        "versions": _list_versions(),
        "code": {
            name.removeprefix(_CODE): str(digest)
            for name, digest in start.items()
            if name.startswith(_CODE)
        },
        "settings": {name: v for name, v in start.items() if not name.startswith(_CODE)},
        "checks": [asdict(check) for check in checks],
    }


def _list_versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "trainer": trainer.__version__,
        "hydra": version("hydra-core"),
        "CUDA": torch.version.cuda or "none",
    }


def _list_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]


def check_backend(config: Config, world: World, backend: str) -> Check:
    """Warn if torch sees no GPU despite a driver."""
    gpus = accelerator.count()
    available = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi4py": find_spec("mpi4py"),
    }
    ranks = counted(world.local_world_size, "local rank")
    why = f"{counted(gpus, 'GPU')} for {ranks}" if gpus else "torch sees no GPU"
    names = ", ".join(name for name in available if available[name])
    found = f"dist.backend={config.dist.backend} is {backend}: {why}; available: {names}"
    if gpus:
        text = NVIDIA_DRIVER.read_text() if NVIDIA_DRIVER.is_file() else ""
        driver = re.search(r"\d+\.\d+(\.\d+)?", text)
        name = accelerator.describe(world.device)
        found += f"; {name}, driver {driver[0] if driver else 'unknown'}"
    if unseen := explain_unseen_gpu():
        return Check("backend", "warn", found, unseen)
    return Check("backend", "ok", found, "")


def check_shared_memory(config: Config, backend: str) -> Check:
    """Warn if /dev/shm has less than 1 GB for data workers or nccl."""
    users = []
    if config.data.workers > 0:
        users.append("data.workers")
    if accelerator.carries(backend):
        users.append(backend)
    place = Path("/dev/shm")  # noqa: S108
    size = shutil.disk_usage(place) if place.is_dir() else None
    found = "none"
    if size is not None:
        found = f"{size.free / 1e9:.2f} of {size.total / 1e9:.2f} GB are free"
    found += f"; used by {' and '.join(users)}" if users else "; used by data workers only"
    is_enough = not users or (size is not None and size.free >= FREE_BYTES)
    advice = "provide at least 1 GB, as docker run --shm-size=8g does; or data.workers=0"
    return judge("shared memory", is_enough, found, advice)


def check_open_files() -> Check:
    """Warn if this process may open fewer than 4096 files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    is_unlimited = limit == resource.RLIM_INFINITY
    found = "no limit" if is_unlimited else f"at most {limit:,}"
    is_good = is_unlimited or limit >= OPEN_FILES
    return judge("open files", is_good, found, f"ulimit -n {OPEN_FILES}")


def find_existing(config: Config) -> Path:
    """Return run.dir, or its nearest parent that exists: a run creates its directory there."""
    path = config.runs
    return next(place for place in (path, *path.parents) if place.exists())


def check_disk(config: Config) -> Check:
    """Test run.dir with an unnamed file, which vanishes even if this process is killed."""
    place = find_existing(config)
    found = f"run.dir={config.run.dir}: "
    advice = "checkpoints are written there: make room, or choose another run.dir"
    began = time.monotonic()
    try:
        with tempfile.TemporaryFile(prefix=".doctor-", dir=place) as file:
            file.write(bytes(2**16))
            file.flush()
            os.fsync(file.fileno())
        seconds = time.monotonic() - began
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Check("disk", "fail", f"{found}{place} cannot be written: {error.strerror}", advice)
    found += f"{free / 1e9:,.1f} GB free on {place}"
    found += f", a write with fsync takes {seconds * 1e3:,.1f} ms"
    return judge("disk", free >= FREE_BYTES and seconds <= FSYNC_S, found, advice)


def check_shards(url: str) -> Check:
    """Read the index of data in shards, and the first shard, into no cache."""
    advice = "check the address, the network and the credentials, or write an index there"
    try:
        began = time.monotonic()
        source = open_source(url)
        index = load_index(source)
        opened = time.monotonic()
        blocks = (source.stream(index.name(0), *part) for part in parts_of(index.span(0)))
        size = 0
        for block in chain.from_iterable(blocks):
            size += len(block)
            if size > (index.size(0) or MOST_OF_A_SHARD):  # it may have no end
                break
    except ResumeError as error:
        why, _, advice = str(error).partition("; ")
        return Check("data", "fail", f"data.url={url}: {why}", advice)
    except (ConfigError, RunError, TemporaryError, OSError) as error:
        return Check("data", "fail", f"data.url: {one_line(error)}", advice)
    seconds = time.monotonic() - opened
    found = f"data.url={source.url}: {counted(int(index.rows.sum()), 'example')} in "
    found += f"{counted(len(index), 'shard')}; the index took {opened - began:.2f} s, "
    found += f"the first shard {seconds:.2f} s, {size / 1e6 / max(seconds, 1e-6):,.0f} MB/s"
    is_right = index.size(0) in (None, size)
    return judge("data", is_right, found, f"it has {size:,} bytes, not as many as in its index")


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPUs that this process's cgroup (v2 or v1) and its parents allow, None if all."""
    limits: list[float] = []
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "cpu", "cpu,cpuacct"):
            continue
        names = ["cfs_quota_us", "cfs_period_us"] if controllers else ["max"]
        folder = root / "sys/fs/cgroup" / ("cpu" if controllers else "") / path.lstrip("/")
        for place in (folder, *folder.parents):
            with suppress(OSError, ValueError):  # not there, or "max"
                words = " ".join((place / f"cpu.{name}").read_text() for name in names)
                quota, period = map(float, words.split())
                limits += [quota / period] if quota > 0 else []
    return min(limits, default=None)
