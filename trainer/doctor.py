"""`python -m trainer.doctor`, alone or under any launcher: what a run here would meet, told in one table."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainer
from trainer.cli import WAIT_S, load_task, run, split_arguments
from trainer.config.compose import load_config
from trainer.config.schema import Config
from trainer.data.order import counted
from trainer.distributed import mpi
from trainer.distributed.group import Group, choose_backend, process_group
from trainer.distributed.rendezvous import check_init, meet, part
from trainer.distributed.world import World
from trainer.errors import ConfigError, visible
from trainer.record import fingerprint
from trainer.record import startup as report
from trainer.setup import check_layout
from trainer.task import Task

HELP = """usage: python -m trainer.doctor [key=value ...] [--config-dir DIR] [--json]
       torchrun --nproc_per_node=<ranks> -m trainer.doctor ...       (or srun, mpirun, by hand)

Start it as the run will be started: it says what one would otherwise learn from a hang. Who the ranks are, whether they
meet, whether an all-reduce is right and how fast, clocks, disk, threads, shared memory, versions, code. No task is
needed; settings count as for a run, but dist.timeout_s is 30 unless given. --json prints the table as one JSON object.
Nothing is left on disk. Exit codes: 0 nothing fails (warnings do not count), 1 something fails, 2 bad settings."""

SIZES = {"1 KB": 2**10, "64 KB": 2**16, "1 MB": 2**20, "16 MB": 2**24}
REPEATS = 5
SLOW_MB_S, SKEW_S, FREE_BYTES, FSYNC_S, OPEN_FILES = (
    100,
    1.0,
    10**9,
    1.0,
    4096,
)  # beyond these it warns
LATE_S, LAST_S = 1.2, 1.5  # after dist.timeout_s: a stage that hangs is given up; ranks above 0 end
RESULTS = {"ok": "green", "warn": "yellow", "fail": "bold red"}
ADVICE = {
    "rendezvous": "one address on every rank, that of rank 0's host, its port open; start the ranks that are missing",
    "backends": "give dist.backend=gloo, or every rank a GPU",
    "process": "ranks connect by their hosts' names: GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME gives another interface",
    "all-reduce": "a rank, its GPU or its network hangs: TORCH_CPP_LOG_LEVEL=INFO NCCL_DEBUG=INFO says more",
    "versions": "install the same on every node",
    "code": "bring the same code to every node",
    "settings": "start all ranks with the same command",
}


@dataclass(frozen=True)
class Check:
    """A row of the table; `advice` is what to do where `result` is not ok."""

    check: str
    result: str
    found: str
    advice: str = ""


def main(arguments: Sequence[str]) -> int:
    if "-h" in arguments or "--help" in arguments:
        print(HELP)
        return 0
    task = _task(*split_arguments([word for word in arguments if word != "--json"]))
    config, path = task.config.dist, Path(task.config.dist.path or "").absolute()
    is_clean = config.init == "file" and not any(
        place.name.startswith(path.name) for place in path.parent.iterdir()
    )
    examination = Examination(task, "--json" in arguments)
    signal.signal(signal.SIGTERM, examination.end)
    examination.start()
    try:
        while examination.is_alive() and not examination.is_late() and not examination.error:
            examination.join(0.05)
        if examination.is_alive() or examination.error:
            examination.give_up()
    finally:
        if examination.mark:
            Path(examination.mark).unlink(missing_ok=True)
        if is_clean:
            part(config, task.world)
    return examination.code


def _task(overrides: Sequence[str], config_dirs: Sequence[str]) -> Task:
    """The task a run would have. Raises ConfigError for what a run would refuse before it opens a socket."""
    given = {word.lstrip("+").split("=", 1)[0] for word in overrides}
    usual = {"task": "task=text", "dist.timeout_s": "dist.timeout_s=30"}
    config = load_config(
        [*(word for key, word in usual.items() if key not in given), *overrides], config_dirs
    )
    if config.launch.name != "inline":
        raise ConfigError(
            f"launch={config.launch.name}: the doctor starts no ranks; torchrun ... -m trainer.doctor"
        )
    task: Task = load_task(config)(config)
    check_init(config.dist, task.world)
    check_layout(config, task.world)
    if choose_backend(config.dist, task.world) == "mpi":
        mpi.register()  # in this thread, which is also the one that ends MPI
    return task


class Examination(threading.Thread):
    """All that is found out, stage by stage. In a thread: what is known is told even where a call never comes back."""

    def __init__(self, task: Task, is_json: bool):
        super().__init__(daemon=True)
        self.task, self.world, self.config, self.is_json = task, task.world, task.config, is_json
        self.code, self.error, self.mark = 1, "", ""
        self.checks: list[Check] = []
        self._at("start")

    def _at(self, stage: str) -> None:
        self.stage, self.since = stage, time.monotonic()

    def is_late(self) -> bool:
        return time.monotonic() - self.since > self.config.dist.timeout_s + LATE_S

    def end(self, *_: object) -> None:
        """A launcher's SIGTERM, since another rank has ended: what is known is told all the same."""
        if self.stage != "end":
            self.error = "ended by the launcher; the message of the rank that ended first says why"

    def run(self) -> None:
        try:
            self._examine()
        except Exception as error:
            self.error = " ".join(str(error).split()) or type(error).__name__

    def _examine(self) -> None:
        config, world = self.config.dist, self.world
        facts = _facts(self.task)
        self.checks = _of_ranks([facts])
        self._at("rendezvous")
        store = dist.HashStore() if world.world_size == 1 else meet(config, world)
        seconds = time.monotonic() - self.since
        group = Group(
            world, store
        )  # by the store alone: it carries words where no process group comes of it
        self._at("facts")
        ranks = [json.loads(told) for told in group.gather_text(json.dumps(facts))]
        self.checks = _of_ranks(ranks)
        self.checks += [
            _alike(group, name, facts[name]) for name in ("versions", "code", "settings")
        ]
        if world.world_size > 1:
            place = config.address or config.path or ":".join(map(str, world.launcher.master))
            found = f"{world.world_size} ranks met at {place} in {seconds:.2f} s, by dist.init={config.init}"
            self.checks.append(Check("rendezvous", "ok", found))
            self._at("clocks")
            self.checks.append(_clocks(group))
            self._at("run.dir")
            self.checks += self._visibility(group)
        self._at("backends")
        group.check_equal({"dist.backend": facts["backend"]})
        self._at("process group")
        is_nccl = (
            facts["backend"] == "nccl"
        )  # whose own timeout kills the process: it comes after ours
        with process_group(
            replace(config, timeout_s=config.timeout_s + 5 * is_nccl), world
        ) as whole:
            for name, num_bytes in SIZES.items():
                self._at(f"all-reduce {name}")
                measured = all_reduce(
                    world, num_bytes, world.device if is_nccl else torch.device("cpu")
                )
                told = whole.gather_text(json.dumps(measured))
                self.checks.append(_sums(name, num_bytes, [json.loads(line) for line in told]))
            self._at("end")
            self.code = whole.share_number(self._show() if world.rank == 0 else 0)

    def _visibility(self, group: Group) -> list[Check]:
        """Rank 0 alone writes to the run directory; that the others see it is of use, and not needed."""
        if self.world.rank == 0:
            with suppress(OSError):  # told already, by what rank 0 found of the disk
                descriptor, self.mark = tempfile.mkstemp(
                    prefix=".doctor-", dir=existing(self.config)
                )
                os.close(descriptor)
        mark = group.gather_text(self.mark)[0]
        seen = group.gather_text("yes" if os.access(mark, os.F_OK) else "no")
        blind = [rank for rank, told in enumerate(seen) if told == "no"]
        found = "what rank 0 writes there is seen by " + (
            f"all but {_named(blind)}" if blind else "every rank"
        )
        advice = (
            "a resume elsewhere would find no checkpoint: choose a file system that all nodes share"
        )
        return [_judged("run.dir", not blind, found, advice)] if mark else []

    def give_up(self) -> None:
        """Tell what is known by now and where it ended: rank 0 the table, every rank a line."""
        limit_s, world = self.config.dist.timeout_s, self.world
        error = self.error or f"no answer within dist.timeout_s={limit_s:g}"
        self.checks.append(Check(self.stage, "fail", error, ADVICE.get(self.stage.split()[0], "")))
        is_nodes_first = (
            world.local_rank == 0 or world.launcher.name == "hand"
        )  # by hand each rank has a terminal
        if world.rank == 0 or (is_nodes_first and not self.is_json):
            self._show()
        who = f"rank {world.rank} ({world.host}, process {world.pid}): " if world.rank else ""
        print(visible(f"error: {who}{self.stage}: {error}"), file=sys.stderr, flush=True)
        self.code = 1
        if world.rank:  # not the first to end: a launcher would kill rank 0 before it has told
            time.sleep(max(0.0, min(WAIT_S, self.since + limit_s + LAST_S - time.monotonic())))

    def _show(self) -> int:
        """Print the table; the exit code."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        worst = max((check.result for check in self.checks), key=list(RESULTS).index, default="ok")
        if self.is_json:
            print(
                json.dumps({"result": worst, "checks": [asdict(check) for check in self.checks]}),
                flush=True,
            )
            return int(worst == "fail")
        table = Table(
            "check", "result", "what was found", "what to do", box=None, header_style="bold"
        )
        for check in self.checks:
            result = Text(check.result, style=RESULTS[check.result])
            table.add_row(visible(check.check), result, visible(check.found), visible(check.advice))
        Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 500).print(
            table
        )
        sys.stdout.flush()
        return int(worst == "fail")


# What a rank knows by itself ------------------------------------------------------------------------------------------


def _judged(check: str, is_good: bool, found: str, advice: str) -> Check:
    return Check(check, "ok", found) if is_good else Check(check, "warn", found, advice)


def _facts(task: Task) -> dict[str, Any]:
    world, config, code = task.world, task.config, "the code of "
    backend, start = (
        choose_backend(config.dist, world),
        fingerprint.of_start(task.config, type(task)),
    )
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "trainer": trainer.__version__,
    }
    checks = [_backend(config, world, backend), _shared_memory(config, backend), _open_files()]
    return {
        "who": report.describe_rank(world),
        "launcher": world.launcher.name,
        "backend": backend,
        "threads": world.divide_threads(),
        "cores": sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else [*range(os.cpu_count() or 1)],
        "quota": cpu_quota(),
        "versions": {
            **versions,
            "hydra": version("hydra-core"),
            "CUDA": torch.version.cuda or "none",
        },
        "code": {
            name.removeprefix(code): str(value)
            for name, value in start.items()
            if name.startswith(code)
        },
        "settings": {name: value for name, value in start.items() if not name.startswith(code)},
        "checks": [asdict(check) for check in (checks if world.rank else [*checks, _disk(config)])],
    }


def _backend(config: Config, world: World, backend: str) -> Check:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    have = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi4py": find_spec("mpi4py"),
    }
    why = (
        f"{counted(gpus, 'GPU')} for {counted(world.local_world_size, 'local rank')}"
        if gpus
        else "torch sees no GPU"
    )
    found = f"dist.backend={config.dist.backend} is {backend}: {why}; there are {', '.join(n for n in have if have[n])}"
    if gpus:
        told = Path("/proc/driver/nvidia/version")
        driver = re.search(r"\d+\.\d+(\.\d+)?", told.read_text() if told.is_file() else "")
        found += f"; {torch.cuda.get_device_name(world.device)}, driver {driver[0] if driver else 'unknown'}"
    is_shared = gpus > 0 and backend == "gloo" and config.dist.backend == "auto"
    return _judged(
        "backend",
        not is_shared,
        found,
        f"nccl needs a GPU per rank: start at most {gpus} on this host",
    )


def _shared_memory(config: Config, backend: str) -> Check:
    users = ["data.workers"] * (config.data.workers > 0) + ["nccl"] * (backend == "nccl")
    place = Path("/dev/shm")  # noqa: S108
    size = shutil.disk_usage(place) if place.is_dir() else None
    found = (
        f"{size.free / 1e9:.2f} of {size.total / 1e9:.2f} GB are free" if size else "there is none"
    )
    is_enough = not users or (size is not None and size.free >= FREE_BYTES)
    found += f"; for {' and '.join(users)}" if users else "; only data workers need it"
    return _judged(
        "shared memory",
        is_enough,
        found,
        "give it 1 GB: docker run --shm-size=8g; or data.workers=0",
    )


def _open_files() -> Check:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    is_unlimited = limit == resource.RLIM_INFINITY
    found = "no limit" if is_unlimited else f"at most {limit:,}"
    return _judged(
        "open files", is_unlimited or limit >= OPEN_FILES, found, f"ulimit -n {OPEN_FILES}"
    )


def existing(config: Config) -> Path:
    """Where a run would make its directory: run.dir, or what is there of it."""
    path = Path(config.run.dir).absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def _disk(config: Config) -> Check:
    """By a file without a name, which is gone however this process ends."""
    place, began, found = existing(config), time.monotonic(), f"run.dir={config.run.dir}: "
    advice = "every checkpoint goes there: make room, or choose another run.dir"
    try:
        with tempfile.TemporaryFile(prefix=".doctor-", dir=place) as file:
            file.write(bytes(2**16))
            file.flush()
            os.fsync(file.fileno())
        seconds, free = time.monotonic() - began, shutil.disk_usage(place).free
    except OSError as error:
        return Check("disk", "fail", f"{found}{place} cannot be written: {error.strerror}", advice)
    found += (
        f"{free / 1e9:,.1f} GB free on {place}, a write with fsync takes {seconds * 1e3:,.1f} ms"
    )
    return _judged("disk", free >= FREE_BYTES and seconds <= FSYNC_S, found, advice)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs that this process's cgroup (v2 or v1), or one above it, gives at most; None: no limit."""
    limits, told = list[float](), root / "proc/self/cgroup"
    for line in told.read_text().splitlines() if told.is_file() else []:
        _, controllers, path = line.split(":", 2)
        names = ["cfs_quota_us", "cfs_period_us"] if controllers else ["max"]
        folder = root / "sys/fs/cgroup" / ("cpu" if controllers else "") / path.lstrip("/")
        for place in (folder, *folder.parents) if controllers in ("", "cpu", "cpu,cpuacct") else ():
            with suppress(OSError, ValueError):  # not there, or "max"
                quota, period = map(
                    float, " ".join((place / f"cpu.{name}").read_text() for name in names).split()
                )
                limits += [quota / period] if quota > 0 else []
    return min(limits, default=None)


# What the ranks find together -----------------------------------------------------------------------------------------


def _alike(group: Group, name: str, facts: Mapping[str, Any]) -> Check:
    try:
        group.check_equal(facts)
    except ConfigError as error:
        return Check(name, "fail", str(error).split(": must be the same")[0], ADVICE[name])
    found = ", ".join(f"{key} {value}" for key, value in facts.items())
    return Check(
        name, "ok", found if name != "settings" else f"the same on every rank, {len(facts)} of them"
    )


def _clocks(group: Group) -> Check:
    """A rank reads its clock after it has heard rank 0 in the second round, and before rank 0 hears it in the third."""
    group.gather_text("")  # waits for the late
    began = time.monotonic()
    group.gather_text("")
    times = [float(told) for told in group.gather_text(repr(time.time()))]
    within_ms = (time.monotonic() - began) * 1e3
    worst = max(range(len(times)), key=lambda rank: abs(times[rank] - times[0]))
    offset = times[worst] - times[0]
    found = f"{offset * 1e3:+,.1f} ms from rank 0's at most, on rank {worst}, known to {within_ms:.1f} ms"
    return _judged(
        "clocks",
        abs(offset) <= SKEW_S,
        found,
        "run chrony or ntpd: TensorBoard and timestamps go by them",
    )


def all_reduce(world: World, num_bytes: int, device: torch.device) -> dict[str, float]:
    """Wrong sums, of whole numbers that float64 holds exactly, and the median seconds of one all-reduce."""
    place, size, wrong, seconds = (
        torch.arange(num_bytes // 8, device=device) % 1009 + 1,
        world.world_size,
        0,
        [],
    )
    for dtype in [torch.int64] + [torch.float64] * (1 + REPEATS):
        values, exact = (
            (place * (world.rank + 1)).to(dtype),
            (place * (size * (size + 1) // 2)).to(dtype),
        )
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
        wrong += int((values != exact).sum())
    return {
        "wrong": wrong,
        "seconds": statistics.median(seconds[2:]),
    }  # the first of a dtype warms up


def _sums(name: str, num_bytes: int, told: Sequence[Mapping[str, float]]) -> Check:
    """The bandwidth is that of rank 0's bus, as NCCL's tests define it: a ring carries 2 (n - 1) / n of the message."""
    size, seconds = len(told), told[0]["seconds"]
    if wrong := [rank for rank, measured in enumerate(told) if measured["wrong"]]:
        found = (
            f"{sum(measured['wrong'] for measured in told):,} sums are wrong, on {_named(wrong)}"
        )
        return Check(
            f"all-reduce {name}",
            "fail",
            found,
            "do not train on it; try dist.backend=gloo, and other hosts",
        )
    speed = num_bytes * 2 * (size - 1) / size / seconds / 1e6
    found = (
        f"exact in int64 and float64; {seconds * 1e3:,.2f} ms"
        + f", {speed:,.1f} MB/s on rank 0's bus" * (size > 1)
    )
    is_slow = 0 < speed < SLOW_MB_S and num_bytes == max(SIZES.values())
    return _judged(f"all-reduce {name}", not is_slow, found, ADVICE["process"])


# What rank 0 makes of it ----------------------------------------------------------------------------------------------


def _named(ranks: Sequence[int | str]) -> str:
    most = report.MOST_RANKS
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:most]))}" + ", ..." * (
        len(ranks) > most
    )


def _of_ranks(ranks: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Who they are; then what they found by themselves, once where several found the same."""
    checks, places = [], dict[Check, list[int]]()
    for name, *facts in report.rank_rows([f"{rank['who']}\t{rank['launcher']}" for rank in ranks]):
        told = (
            "local_rank {}, node {}, host {}, process {}, {}, by {}".format(*facts)
            if any(facts)
            else ""
        )
        checks.append(Check(f"rank {name}", "ok", told))
    for number, rank in enumerate(ranks):
        for check in rank["checks"]:
            places.setdefault(Check(**check), []).append(number)
    for check, where in sorted(places.items(), key=lambda pair: pair[0].check):
        is_common = len(where) == len(ranks) or check.check == "disk"
        checks.append(
            check if is_common else replace(check, found=f"{_named(where)}: {check.found}")
        )
    return checks + _threads(ranks)


def _threads(ranks: Sequence[Mapping[str, Any]]) -> list[Check]:
    hosts: dict[str, list[Mapping[str, Any]]] = {}
    for rank in ranks:
        hosts.setdefault(rank["who"].split("\t")[3], []).append(rank)
    checks: dict[Check, list[str]] = {}
    for host, here in hosts.items():
        cores, threads = (
            len({core for rank in here for core in rank["cores"]}),
            sum(rank["threads"] for rank in here),
        )
        quota = min([cores, *(rank["quota"] for rank in here if rank["quota"] is not None)])
        found = f"{counted(len(here), 'rank')} with {counted(threads, 'thread')} on {counted(cores, 'core')}"
        found += f", of which a cgroup gives {quota:g}" if quota < cores else ""
        advice = f"start at most {max(1, int(quota))} ranks there" + ", or OMP_NUM_THREADS=1" * (
            threads > len(here)
        )
        checks.setdefault(_judged("threads", threads <= quota, found, advice), []).append(host)
    return [
        replace(check, found=f"{', '.join(there[:8])}: {check.found}")
        for check, there in checks.items()
    ]


if __name__ == "__main__":
    run(main)
