"""Checks of the environment under any launcher, for problems that would show up as a hang.

The ranks and their rendezvous, all-reduce (results and speed), clocks, disk, threads, shared
memory, versions, code and settings. Nothing is left on disk.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.base.errors import ConfigError, counted, one_line, visible
from trainer.check.rank_checks import (
    ADVICE_BY_CHECK,
    Check,
    check_ray,
    find_existing,
    gather_facts,
    judge,
    list_ranks,
    report,
)
from trainer.cli import WAIT_S, load_task
from trainer.core.config.compose import load_config
from trainer.core.distributed import accelerator
from trainer.core.distributed.group import Group, find_sharing, process_group
from trainer.core.distributed.launchers import Launcher
from trainer.core.distributed.rendezvous import check_init, choose_backend, meet, part
from trainer.core.distributed.watch.phases import name_ranks
from trainer.core.distributed.world import World
from trainer.core.record import startup
from trainer.core.setup.early_checks import check_layout
from trainer.core.task import Task
from trainer.places import mpi
from trainer.places.ray_cluster import range_of

MESSAGE_SIZES = {"1 KB": 2**10, "64 KB": 2**16, "1 MB": 2**20, "16 MB": 2**24}
REPEATS = 5
# Limits for a warning.
SLOW_MB_S = 100
SKEW_S = 1.0


def compare(group: Group, name: str, facts: Mapping[str, Any]) -> Check:
    """Return a failed check if the ranks differ in these facts."""
    try:
        group.check_equal(facts)
    except ConfigError as error:
        return Check(name, "fail", str(error).split(": must be the same")[0], ADVICE_BY_CHECK[name])
    finding = ", ".join(f"{key} {value}" for key, value in facts.items())
    if name == "settings":
        finding = f"{len(facts)} settings, the same on every rank"
    return Check(name, "ok", finding)


def check_clocks(group: Group) -> Check:
    """Compare the clocks of the ranks with that of rank 0.

    A rank reads its clock after it has received rank 0's message in the second round, and before
    rank 0 receives its answer in the third. The duration of both bounds the error.
    """
    group.gather(None)  # waits for the slowest rank
    began = time.monotonic()
    group.gather(None)
    times = group.gather(time.time())
    within_ms = (time.monotonic() - began) * 1e3
    worst = max(range(len(times)), key=lambda rank: abs(times[rank] - times[0]))
    offset = times[worst] - times[0]
    finding = f"largest offset from rank 0: {offset * 1e3:+,.1f} ms, on rank {worst}"
    finding += f", measured to {within_ms:.1f} ms"
    advice = "run chrony or ntpd: TensorBoard and timestamps use these clocks"
    return judge("clocks", abs(offset) <= SKEW_S, finding, advice)


def all_reduce(world: World, num_bytes: int, device: torch.device) -> dict[str, float]:
    """Return the number of wrong sums and the median seconds of one all-reduce.

    The values are integers that float64 represents exactly.
    """
    values = torch.arange(num_bytes // 8, device=device) % 1009 + 1
    size = world.world_size
    wrong = 0
    seconds = []
    for dtype in [torch.int64] + [torch.float64] * (1 + REPEATS):
        summed = (values * (world.rank + 1)).to(dtype)
        exact = (values * (size * (size + 1) // 2)).to(dtype)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(summed)
        if accelerator.is_used(device):
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - began)
        wrong += int((summed != exact).sum())
    return {
        "wrong": wrong,
        "seconds": statistics.median(seconds[2:]),
    }  # the first of each dtype is a warm-up


def judge_sums(name: str, num_bytes: int, measured: Sequence[Mapping[str, float]]) -> Check:
    """Return the check of one all-reduce from the measurements of all ranks.

    The speed is rank 0's bus bandwidth as nccl-tests define it: a ring all-reduce moves
    2 (n - 1) / n of the message.
    """
    check = f"all-reduce {name}"
    size = len(measured)
    seconds = measured[0]["seconds"]
    if wrong := [rank for rank, one in enumerate(measured) if one["wrong"]]:
        num_wrong_sums = sum(one["wrong"] for one in measured)
        finding = f"{num_wrong_sums:,} sums are wrong, on {list_ranks(wrong)}"
        advice = "do not train here; try dist.backend=gloo, and other hosts"
        return Check(check, "fail", finding, advice)
    speed = num_bytes * 2 * (size - 1) / size / seconds / 1e6
    finding = f"exact in int64 and float64; {seconds * 1e3:,.2f} ms"
    if size > 1:
        finding += f", {speed:,.1f} MB/s bus bandwidth on rank 0"
    is_slow = 0 < speed < SLOW_MB_S and num_bytes == max(MESSAGE_SIZES.values())
    return judge(check, not is_slow, finding, ADVICE_BY_CHECK["process"])


def list_checks(ranks: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Return a row per rank, then the checks of all ranks, with equal ones as one row."""
    checks = []
    rows = startup.rank_rows([f"{rank['who']}\t{rank['launcher']}" for rank in ranks])
    for name, *facts in rows:
        description = ""
        if any(facts):
            text = "local_rank {}, node {}, host {}, process {}, {}, by {}"
            description = text.format(*facts)
        checks.append(Check(f"rank {name}", "ok", description))
    ranks_by_check: dict[Check, list[int]] = {}
    for rank_number, rank in enumerate(ranks):
        for check in rank["checks"]:
            ranks_by_check.setdefault(Check(**check), []).append(rank_number)
    for check, where in sorted(ranks_by_check.items(), key=lambda pair: pair[0].check):
        if len(where) < len(ranks) and check.check != "disk":
            check = replace(check, found=f"{list_ranks(where)}: {check.found}")
        checks.append(check)
    return checks + _check_threads(ranks)


def _check_threads(ranks: Sequence[Mapping[str, Any]]) -> list[Check]:
    hosts: dict[str, list[Mapping[str, Any]]] = {}
    for rank in ranks:
        hosts.setdefault(rank["who"].split("\t")[3], []).append(rank)
    checks: dict[Check, list[str]] = {}
    for host, here in hosts.items():
        checks.setdefault(_check_host(here), []).append(host)
    return [
        replace(check, found=f"{', '.join(names[:8])}: {check.found}")
        for check, names in checks.items()
    ]


def _check_host(ranks: Sequence[Mapping[str, Any]]) -> Check:
    """Warn if the ranks of a host have more threads than cores."""
    cores = len({core for rank in ranks for core in rank["cores"]})
    threads = sum(rank["threads"] for rank in ranks)
    quota = min([cores, *(rank["quota"] for rank in ranks if rank["quota"] is not None)])
    finding = f"{counted(len(ranks), 'rank')} with {counted(threads, 'thread')}"
    finding += f" on {counted(cores, 'core')}"
    if quota < cores:
        finding += f", of which a cgroup allows {quota:g}"
    advice = f"start at most {max(1, int(quota))} ranks per host"
    if threads > len(ranks):
        advice += ", or set OMP_NUM_THREADS=1"
    return judge("threads", threads <= quota, finding, advice)


# Seconds after dist.timeout_s: when a hanging stage is given up, and when ranks above 0 exit.
LATE_S = 1.2
LAST_S = 1.5


class Examination(threading.Thread):
    """All checks, stage by stage. If a call hangs, the results so far are still shown."""

    def __init__(self, task: Task, url: str = "", is_part: bool = False):
        """`url`: that of data in shards, to be examined too; `is_part`: other answers follow."""
        super().__init__(daemon=True)
        self.task = task
        self.url = url
        self.is_part = is_part
        self.world = task.world
        self.config = task.config
        self.code = 1
        self.error = ""
        self.mark = ""  # path of a file in run.dir that the other ranks should find
        self.checks: list[Check] = []
        self._begin("start")

    def _begin(self, stage: str) -> None:
        self.stage = stage
        self.since = time.monotonic()

    def is_late(self) -> bool:
        return time.monotonic() - self.since > self.config.dist.timeout_s + LATE_S

    def end(self, *_: object) -> None:
        """Handle SIGTERM, sent by a launcher when another rank exits: show the results so far."""
        if self.stage != "end":
            self.error = "ended by the launcher; the rank that exited first reports the reason"

    def run(self) -> None:
        try:
            cluster_checks = self._check_cluster()
            facts = gather_facts(self.task, self.url)
            facts["checks"] += cluster_checks
            self.checks = list_checks([facts])
            group = self._meet(facts)
            self._begin("backends")
            group.check_equal({"dist.backend": facts["backend"]})
            self._reduce()
        except Exception as error:
            self.error = one_line(error) or type(error).__name__

    def _check_cluster(self) -> list[dict[str, str]]:
        """Check the cluster of `launch=ray`, on which this process will place the ranks."""
        if self.config.launch.name != "ray":
            return []
        self._begin("ray")
        check = check_ray(self.config.launch, self.config.dist.timeout_s)
        self._begin("start")
        return [asdict(check)]

    def _meet(self, facts: dict[str, Any]) -> Group:
        """Rendezvous, compare facts, and make the checks that need the store only."""
        block = self.config.dist
        world = self.world
        self._begin("rendezvous")
        store = dist.HashStore() if world.world_size == 1 else meet(block, world)
        seconds = time.monotonic() - self.since
        group = Group(world, store)
        self._begin("facts")
        self.checks = list_checks(group.gather(facts))
        may_share = accelerator.is_used(world.device) and block.backend == "auto"
        if may_share and (shared := find_sharing(group)):
            finding = f"{name_ranks(shared)} share GPUs, so dist.backend=auto is gloo"
            advice = f"start one rank for each of the {accelerator.count()} GPUs"
            self.checks.append(Check("devices", "warn", finding, advice))
        self.checks += [compare(group, n, facts[n]) for n in ("versions", "code", "settings")]
        if world.world_size > 1:
            address = block.address or block.path or ":".join(map(str, world.launcher.master))
            finding = f"{world.world_size} ranks connected at {address} in {seconds:.2f} s"
            self.checks.append(Check("rendezvous", "ok", f"{finding}, by dist.init={block.init}"))
            self._begin("clocks")
            self.checks.append(check_clocks(group))
            self._begin("run.dir")
            self.checks += self._check_visibility(group)
        return group

    def _reduce(self) -> None:
        """Test all-reduce with several sizes, then print the table on rank 0."""
        world = self.world
        self._begin("process group")
        with process_group(self.config.dist, world) as group:
            is_carried = dist.is_initialized() and accelerator.carries(dist.get_backend())
            device = world.device if is_carried else torch.device("cpu")
            for name, num_bytes in MESSAGE_SIZES.items():
                self._begin(f"all-reduce {name}")
                measurements = group.gather(all_reduce(world, num_bytes, device))
                self.checks.append(judge_sums(name, num_bytes, measurements))
            self._begin("end")
            code = report(self.checks, self.is_part) if world.rank == 0 else 0
            self.code = group.tell_all(code)

    def _check_visibility(self, group: Group) -> list[Check]:
        """Check that every rank sees a file that rank 0 writes to run.dir.

        A run does not need it, because only rank 0 writes there; a resume on another node does.
        """
        if self.world.rank == 0:
            with suppress(OSError):  # the disk check of rank 0 has reported it
                folder = find_existing(self.config)
                descriptor, self.mark = tempfile.mkstemp(prefix=".doctor-", dir=folder)
                os.close(descriptor)
        mark = group.tell_all(self.mark)
        if not mark:
            return []
        seen = group.gather(os.access(mark, os.F_OK))
        blind = [rank for rank, is_seen in enumerate(seen) if not is_seen]
        who = f"all but {list_ranks(blind)}" if blind else "every rank"
        finding = f"a file that rank 0 writes is visible to {who}"
        advice = "a resume on another node would find no checkpoint: "
        advice += "choose a file system that all nodes share"
        return [judge("run.dir", not blind, finding, advice)]

    def give_up(self) -> None:
        """Print the results so far: on rank 0 the table, on every rank the stage that failed."""
        limit_s = self.config.dist.timeout_s
        world = self.world
        error = self.error or f"no answer within dist.timeout_s={limit_s:g}"
        self.checks.append(
            Check(self.stage, "fail", error, ADVICE_BY_CHECK.get(self.stage.split()[0], ""))
        )
        # ranks started by hand have their own terminals
        has_terminal = world.local_rank == 0 or world.launcher.name == "hand"
        if world.rank == 0 or has_terminal:
            report(self.checks)
        who = f"rank {world.rank} ({world.host}, process {world.pid}): " if world.rank else ""
        print(visible(f"error: {who}{self.stage}: {error}"), file=sys.stderr, flush=True)
        self.code = 1
        # A launcher kills all ranks at the first exit: rank 0 must have reported by then.
        if world.rank:
            left_s = self.since + limit_s + LAST_S - time.monotonic()
            time.sleep(max(0.0, min(WAIT_S, left_s)))


_DEFAULT_OVERRIDES = {"task": "task=text", "dist.timeout_s": "dist.timeout_s=30"}


def examine_ranks(
    overrides: Sequence[str], config_dirs: Sequence[str], url: str = "", is_part: bool = False
) -> tuple[int, list[Check]]:
    """Check these ranks, print a table on rank 0, and return the exit code and the checks.

    `url` is that of data in shards, which is read on each rank. `is_part`: other answers follow.
    """
    task = load(overrides, config_dirs)
    block = task.config.dist
    path = Path(block.path or "").absolute()
    is_ours = block.init == "file" and not any(
        entry.name.startswith(path.name) for entry in path.parent.iterdir()
    )
    examination = Examination(task, url, is_part)
    before = signal.signal(signal.SIGTERM, examination.end)
    examination.start()
    try:
        while examination.is_alive() and not examination.is_late() and not examination.error:
            examination.join(0.05)
        if examination.is_alive() or examination.error:
            examination.give_up()
    finally:
        if examination.mark:
            Path(examination.mark).unlink(missing_ok=True)
        if is_ours:
            part(block, task.world)
    if is_part and not examination.code:
        signal.signal(signal.SIGTERM, before)  # what follows is stopped as a run is
    return examination.code, examination.checks


def load(overrides: Sequence[str], config_dirs: Sequence[str]) -> Task:
    """Return the task that a run with these settings would have.

    Raises ConfigError for errors that a run would report before it opens a socket.
    """
    overridden_keys = {word.lstrip("+").split("=", 1)[0] for word in overrides}
    defaults = [word for key, word in _DEFAULT_OVERRIDES.items() if key not in overridden_keys]
    config = load_config([*defaults, *overrides], config_dirs)
    if config.launch.name not in ("inline", "ray"):
        advice = "check starts no ranks; run torchrun ... -m trainer.check"
        raise ConfigError(f"launch={config.launch.name}: {advice}")
    task: Task = load_task(config)(config)
    check_init(config.dist, task.world)
    world = task.world
    if config.launch.name == "ray":  # this process is not one of the ranks
        least = range_of(config.launch)[0]
        meeting = Launcher.on_this_machine("ray")
        world = replace(world, world_size=least, local_world_size=least, launcher=meeting)
    check_layout(config, world)
    if choose_backend(config.dist, task.world) == "mpi":
        mpi.register()  # in the main thread, which also finalises MPI
    return task
