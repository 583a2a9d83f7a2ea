"""Checks that a rank makes alone, the facts that ranks compare, and the table of both."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch
import torch.distributed as dist

import trainer
from trainer.base.errors import ConfigError, RunError, counted, one_line
from trainer.base.process.streams import print_table
from trainer.cli import answer, tell
from trainer.core.config.schema import Config, LaunchSettings
from trainer.core.config.stores import StoreError
from trainer.core.distributed import accelerator
from trainer.core.distributed.rendezvous import choose_backend
from trainer.core.distributed.world import NVIDIA_DRIVER, World, explain_unseen_gpu
from trainer.core.record import fingerprint, startup
from trainer.core.record.startup import MOST_RANKS
from trainer.core.task import Task
from trainer.places.bucket import Bucket
from trainer.places.ray_cluster import CHECK_RAY
from trainer.shards.download import parts_of
from trainer.shards.http_source import open_source
from trainer.shards.index import load_index
from trainer.shards.sources import ResumeError, TemporaryError

RESULT_COLORS = {"ok": "green", "warn": "yellow", "fail": "bold red"}
ADVICE_BY_CHECK = {
    "rendezvous": "give every rank the address of rank 0's host, with its port open; "
    "start the ranks that are missing",
    "backends": "give dist.backend=gloo, or start one rank per GPU",
    "process": "ranks connect by host name: "
    "set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME for another interface",
    "all-reduce": "a rank, its GPU or its network hangs: "
    "set TORCH_CPP_LOG_LEVEL=INFO NCCL_DEBUG=INFO for more",
    "versions": "install the same versions on every node",
    "code": "copy the same code to every node",
    "settings": "start all ranks with the same command",
}


@dataclass(frozen=True)
class Check:
    """A row of the table; `result` is ok, warn or fail, and `advice` is empty if it is ok."""

    check: str
    result: str
    found: str
    advice: str = ""


def judge(check: str, is_good: bool, finding: str, advice: str) -> Check:
    """Return a check that is ok, or a warning with advice."""
    return Check(check, "ok", finding) if is_good else Check(check, "warn", finding, advice)


def list_ranks(ranks: Sequence[int | str]) -> str:
    """Return `rank 1` or `ranks 1, 2, ...`."""
    listed = ", ".join(map(str, ranks[:MOST_RANKS]))
    more = ", ..." if len(ranks) > MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"


def report(checks: Sequence[Check], is_part: bool = False) -> int:
    """Print the checks and return the exit code. `is_part`: other answers follow if none fails."""
    worst = max((check.result for check in checks), key=list(RESULT_COLORS).index, default="ok")
    if is_part and worst != "fail":
        tell(lambda: show(checks))
        return 0
    facts = as_facts(checks)
    return answer(int(worst == "fail"), worst, facts, lambda: show(checks))


def as_facts(checks: Sequence[Check]) -> dict[str, Any]:
    return {"checks": [asdict(check) for check in checks]}


def show(checks: Sequence[Check]) -> None:
    """Print the table, what fails last."""
    checks = sorted(checks, key=lambda check: check.result == "fail")
    columns = ("check", "result", "found", "advice")
    rows = [(check.check, check.result, check.found, check.advice) for check in checks]
    print_table(columns, rows, styles={"result": RESULT_COLORS})


# Limits for a warning.
LEAST_FREE_BYTES = 10**9
MIRRORED = 2**23  # bytes that are written to a bucket and read
MOST_OF_A_SHARD = 2**30  # bytes of one whose index does not say how many
FSYNC_S = 1.0
OPEN_FILES = 4096
_CODE_PREFIX = "the code of "  # prefix of the facts about code in a fingerprint


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
        if config.checkpoint.mirror is not None:
            checks.append(check_mirror(config.checkpoint.mirror, config.dist.timeout_s / 2))
    if url:
        checks.append(check_shards(url))
    return {
        "who": startup.describe_rank(world),
        "launcher": world.launcher.name,
        "backend": backend,
        "threads": world.divide_threads(),
        "cores": _list_cores(),
        "quota": cpu_quota(),
        "versions": _list_versions(),
        "code": {
            name.removeprefix(_CODE_PREFIX): str(digest)
            for name, digest in start.items()
            if name.startswith(_CODE_PREFIX)
        },
        "settings": {name: v for name, v in start.items() if not name.startswith(_CODE_PREFIX)},
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
    finding = f"dist.backend={config.dist.backend} is {backend}: {why}; available: {names}"
    if gpus:
        text = NVIDIA_DRIVER.read_text() if NVIDIA_DRIVER.is_file() else ""
        driver = re.search(r"\d+\.\d+(\.\d+)?", text)
        name = accelerator.describe(world.device)
        finding += f"; {name}, driver {driver[0] if driver else 'unknown'}"
    if unseen := explain_unseen_gpu():
        return Check("backend", "warn", finding, unseen)
    return Check("backend", "ok", finding, "")


def check_shared_memory(config: Config, backend: str) -> Check:
    """Warn if /dev/shm has less than 1 GB for data workers or nccl."""
    users = []
    if config.data.workers > 0:
        users.append("data.workers")
    if accelerator.carries(backend):
        users.append(backend)
    folder = Path("/dev/shm")  # noqa: S108
    size = shutil.disk_usage(folder) if folder.is_dir() else None
    finding = "none"
    if size is not None:
        finding = f"{size.free / 1e9:.2f} of {size.total / 1e9:.2f} GB are free"
    finding += f"; used by {' and '.join(users)}" if users else "; used by data workers only"
    is_enough = not users or (size is not None and size.free >= LEAST_FREE_BYTES)
    advice = "provide at least 1 GB, as docker run --shm-size=8g does; or data.workers=0"
    return judge("shared memory", is_enough, finding, advice)


def check_open_files() -> Check:
    """Warn if this process may open fewer than 4096 files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    is_unlimited = limit == resource.RLIM_INFINITY
    finding = "no limit" if is_unlimited else f"at most {limit:,}"
    is_good = is_unlimited or limit >= OPEN_FILES
    return judge("open files", is_good, finding, f"ulimit -n {OPEN_FILES}")


def find_existing(config: Config) -> Path:
    """Return run.dir, or its nearest parent that exists: a run creates its directory there."""
    path = config.runs
    return next(folder for folder in (path, *path.parents) if folder.exists())


def check_disk(config: Config) -> Check:
    """Test run.dir with an unnamed file, which vanishes even if this process is killed."""
    folder = find_existing(config)
    finding = f"run.dir={config.run.dir}: "
    advice = "checkpoints are written there: make room, or choose another run.dir"
    began = time.monotonic()
    try:
        with tempfile.TemporaryFile(prefix=".doctor-", dir=folder) as file:
            file.write(bytes(2**16))
            file.flush()
            os.fsync(file.fileno())
        seconds = time.monotonic() - began
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check(
            "disk", "fail", f"{finding}{folder} cannot be written: {error.strerror}", advice
        )
    finding += f"{free / 1e9:,.1f} GB free on {folder}"
    finding += f", a write with fsync takes {seconds * 1e3:,.1f} ms"
    return judge("disk", free >= LEAST_FREE_BYTES and seconds <= FSYNC_S, finding, advice)


def check_mirror(address: str, limit_s: float) -> Check:
    """Try the bucket of `checkpoint.mirror` as a run uses it; remove what was written there.

    The thread of a store that does not answer is left behind.
    """
    checks: list[Check] = []
    work = threading.Thread(target=lambda: checks.append(_try_bucket(address)), daemon=True)
    work.start()
    work.join(limit_s)
    if checks:
        return checks[0]
    advice = "check the address and the network, or set a larger dist.timeout_s"
    what = f"no answer to {MIRRORED / 1e6:.0f} MB within {limit_s:g} s"
    return Check("mirror", "fail", f"checkpoint.mirror={address}: {what}", advice)


def _try_bucket(address: str) -> Check:
    key = f"checkpoint.mirror={address}"
    name = f".check-{secrets.token_hex(8)}"
    content = os.urandom(MIRRORED)
    stage, advice = "opened", "check the address, the login and the network"
    folder = Path(unquote(urlsplit(address).path))
    is_new = address.startswith("file:") and not folder.exists()
    try:
        bucket = Bucket(address, is_new=True)
        try:
            stage = "written"
            began = time.monotonic()
            bucket.put(f"{name}-data", content)
            written = time.monotonic()
            stage = "read"
            is_equal = bucket.get(f"{name}-data") == content
            read = time.monotonic()
            stage = "written by a conditional put"
            is_created = bucket.create(name, b"first")
            is_refused = not bucket.create(name, b"second")
        finally:
            with suppress(StoreError):  # of the first error
                bucket.remove([name, f"{name}-data"])
        left = [each for each in bucket.sizes() if each.startswith(name)]
        if is_new:
            folder.rmdir()  # it is empty again
    except (StoreError, OSError) as error:
        return Check("mirror", "fail", f"{key}: cannot be {stage}: {error}", advice)
    except ConfigError as error:  # obstore is not installed
        return Check("mirror", "fail", f"{key}: obstore is not installed", _next_step(error))
    if not (is_created and is_refused):
        advice = "use a store that supports If-None-Match, such as S3, Google Cloud, Azure or MinIO"
        why = "the store did not refuse the second conditional put of a file"
        return Check("mirror", "fail", f"{key}: {why}, so two runs could write there", advice)
    if not is_equal or left:
        why = "was not removed" if is_equal else "was read with other content"
        return Check("mirror", "fail", f"{key}: {name} {why}", "use another store")
    speeds = [MIRRORED / 1e6 / max(s, 1e-6) for s in (written - began, read - written)]
    text = f"{key}: writes {speeds[0]:,.0f} MB/s, reads {speeds[1]:,.0f} MB/s"
    return Check("mirror", "ok", f"{text}, refuses a second conditional put")


def _next_step(error: ConfigError) -> str:
    return str(error).partition(": ")[2]


def check_ray(config: LaunchSettings, limit_s: float) -> Check:
    """Report the cluster on which `launch=ray` would start its ranks. Starts none."""
    words = [sys.executable, "-m", "trainer.places.ray_cluster", json.dumps(asdict(config))]
    home = Path(trainer.__file__).parents[1]  # a folder of the user's may have a trainer.py
    try:
        done = subprocess.run(  # noqa: S603  # no shell
            words, cwd=home, capture_output=True, text=True, timeout=limit_s
        )
        told = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Check("ray", "fail", f"launch=ray: no answer within {limit_s:g} s", CHECK_RAY)
    except (ValueError, IndexError):
        why = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
        return Check("ray", "fail", f"launch=ray: {why[:200]}", CHECK_RAY)
    return Check("ray", **told)


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
    finding = f"data.url={source.url}: {counted(int(index.rows.sum()), 'example')} in "
    finding += f"{counted(len(index), 'shard')}; the index took {opened - began:.2f} s, "
    finding += f"the first shard {seconds:.2f} s, {size / 1e6 / max(seconds, 1e-6):,.0f} MB/s"
    is_right = index.size(0) in (None, size)
    return judge("data", is_right, finding, f"it has {size:,} bytes, not as many as in its index")


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
        for cgroup in (folder, *folder.parents):
            with suppress(OSError, ValueError):  # not there, or "max"
                words = " ".join((cgroup / f"cpu.{name}").read_text() for name in names)
                quota, period = map(float, words.split())
                limits += [quota / period] if quota > 0 else []
    return min(limits, default=None)
