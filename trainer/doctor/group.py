"""Checks that the ranks make together, and the table rows of all ranks on rank 0."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from trainer.distributed import accelerator
from trainer.distributed.group import Group
from trainer.distributed.world import World
from trainer.doctor.table import ADVICE, Check, judge, list_ranks
from trainer.errors import ConfigError, counted
from trainer.record import startup as report

SIZES = {"1 KB": 2**10, "64 KB": 2**16, "1 MB": 2**20, "16 MB": 2**24}
REPEATS = 5
# Limits for a warning.
SLOW_MB_S = 100
SKEW_S = 1.0


def compare(group: Group, name: str, facts: Mapping[str, Any]) -> Check:
    """Return a failed check if the ranks differ in these facts."""
    try:
        group.check_equal(facts)
    except ConfigError as error:
        return Check(name, "fail", str(error).split(": must be the same")[0], ADVICE[name])
    found = ", ".join(f"{key} {value}" for key, value in facts.items())
    if name == "settings":
        found = f"{len(facts)} settings, the same on every rank"
    return Check(name, "ok", found)


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
    found = f"largest offset from rank 0: {offset * 1e3:+,.1f} ms, on rank {worst}"
    found += f", measured to {within_ms:.1f} ms"
    advice = "run chrony or ntpd: TensorBoard and timestamps use these clocks"
    return judge("clocks", abs(offset) <= SKEW_S, found, advice)


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
        number = sum(one["wrong"] for one in measured)
        found = f"{number:,} sums are wrong, on {list_ranks(wrong)}"
        advice = "do not train here; try dist.backend=gloo, and other hosts"
        return Check(check, "fail", found, advice)
    speed = num_bytes * 2 * (size - 1) / size / seconds / 1e6
    found = f"exact in int64 and float64; {seconds * 1e3:,.2f} ms"
    if size > 1:
        found += f", {speed:,.1f} MB/s bus bandwidth on rank 0"
    is_slow = 0 < speed < SLOW_MB_S and num_bytes == max(SIZES.values())
    return judge(check, not is_slow, found, ADVICE["process"])


def list_checks(ranks: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Return a row per rank, then the checks of all ranks, with equal ones as one row."""
    checks = []
    rows = report.rank_rows([f"{rank['who']}\t{rank['launcher']}" for rank in ranks])
    for name, *facts in rows:
        found = ""
        if any(facts):
            text = "local_rank {}, node {}, host {}, process {}, {}, by {}"
            found = text.format(*facts)
        checks.append(Check(f"rank {name}", "ok", found))
    places: dict[Check, list[int]] = {}
    for number, rank in enumerate(ranks):
        for check in rank["checks"]:
            places.setdefault(Check(**check), []).append(number)
    for check, where in sorted(places.items(), key=lambda pair: pair[0].check):
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
    found = f"{counted(len(ranks), 'rank')} with {counted(threads, 'thread')}"
    found += f" on {counted(cores, 'core')}"
    if quota < cores:
        found += f", of which a cgroup allows {quota:g}"
    advice = f"start at most {max(1, int(quota))} ranks per host"
    if threads > len(ranks):
        advice += ", or set OMP_NUM_THREADS=1"
    return judge("threads", threads <= quota, found, advice)
