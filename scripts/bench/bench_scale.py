"""Measure the costs that grow with the number of ranks: time for N ranks, and the growth exponent.

    python scripts/bench/bench_scale.py [--ranks 16 64 256 1024] [--real 2 4 8 16] [--rounds 3]
        [--json FILE]

Each operation runs on N simulated ranks: threads of this process, each with its own connection to
a real TCPStore, that run Lockstep's own code. Work of a single rank (plans, digests, sums, ranges)
is timed directly. All threads share one interpreter, so the times are those of the work of N ranks
one after another. The next column is the CPU time of rank 0, in microseconds per rank. The exponent
is that between the two largest N: 1 is linear in N, 2 is quadratic. Operations that need
collectives run on real ranks over gloo, next to a bare all-reduce of the same number of values.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest import mock

# torch looks up the name of each client of a store, and a name server may be silent.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from harness import free_port, on_ranks

from trainer import World, load_config
from trainer.core.data.eval_batches import ShardSampler
from trainer.core.data.ledger import Ledger
from trainer.core.data.order import BatchPlan
from trainer.core.distributed import rendezvous
from trainer.core.distributed.group import Group, process_group
from trainer.core.distributed.watch.phases import name_ranks
from trainer.core.engine.means import Means
from trainer.core.loop.diagnosis import check_drift
from trainer.core.strategy.mesh_sizes import Mesh
from trainer.core.strategy.tensor_shards import Shard

MOST = 1024  # ranks
numbers = itertools.count()
CPU = torch.device("cpu")
TEXT = "a fact of a rank, " * 100  # 1.8 KB


Times = tuple[float, float]  # seconds until the last rank has finished; seconds of rank 0's work


def on_threads(size: int, body: Callable[[int], object]) -> Times:
    """Run `body(rank)` on `size` threads."""
    errors: list[BaseException] = []
    gate = threading.Barrier(size + 1)
    work: list[float] = []

    def run(rank: int) -> None:
        gate.wait()
        began = time.thread_time()
        try:
            body(rank)
        except BaseException as error:
            errors.append(error)
        if rank == 0:
            work.append(time.thread_time() - began)

    threading.stack_size(2**18)
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    gate.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if errors:
        raise errors[0]
    return seconds, work[0]


@functools.cache
def connect(size: int) -> list[dist.Store]:
    """Return a store per rank: that of rank 0 is the server, the others are its clients.

    They connect only once: torch looks up the name of each client, which may take seconds.
    """
    timeout = timedelta(seconds=120)
    place = ("127.0.0.1", free_port(), None)
    served = dist.TCPStore(*place, True, timeout, wait_for_workers=False, multi_tenant=True)
    others = [
        dist.TCPStore(*place, False, timeout, wait_for_workers=False) for _ in range(size - 1)
    ]
    return [served, *others]


def startup_exchange(size: int) -> Times:
    """Time the startup exchange over open connections: each rank sends a message and receives a
    reply."""
    words = ["task=cifar", "dist.init=tcp", "dist.address=127.0.0.1:1", "dist.timeout_s=300"]
    config = load_config(words).dist
    stores = connect(MOST)
    rendezvous.num_meetings += 1

    def meet(rank: int) -> None:
        world = World(rank=rank, world_size=size, pid=rank)
        rendezvous._Meeting(config, world, "here").hold()

    with mock.patch.object(rendezvous, "_open", lambda _, world, *rest: stores[world.rank]):
        return on_threads(size, meet)


def with_groups(call: Callable[[Group], object]) -> Callable[[int], Times]:
    """Return an operation that times `call(group)` on every rank, before there are collectives."""

    def operation(size: int) -> Times:
        name = str(next(numbers))
        stores = [dist.PrefixStore(name, store) for store in connect(MOST)[:size]]
        made = [Group(World(rank=r, world_size=size), store) for r, store in enumerate(stores)]
        return on_threads(size, lambda rank: call(made[rank]))

    return operation


def timed(body: Callable[[], object]) -> Times:
    began = time.perf_counter()
    body()
    seconds = time.perf_counter() - began
    return seconds, seconds


def batch_plan(size: int) -> Times:
    """Time the rows of one rank of N, and its evaluation shard of a billion examples."""
    plan = BatchPlan(10**9, 4 * size, 1, size)

    def work() -> None:
        plan.micro_batches(size - 1)
        next(iter(ShardSampler(10**9, 512, size - 1, size, CPU)))

    return timed(work)


def drift(size: int) -> Times:
    """Time the comparison of the digests of 1,000 tensors after their all-reduce."""
    digests = torch.randint(-(2**62), 2**62, (1_000,))
    both = torch.stack([digests, ~digests])
    return timed(lambda: bool((both[0] != ~both[1]).any()))


def means(size: int) -> Times:
    """Time the sum of the rows of 50 steps and 4 names of every rank, in rank order."""
    parts = [torch.rand(200, 2, dtype=torch.float64) for _ in range(size)]

    def work() -> None:
        total = torch.zeros_like(parts[0])
        for part in parts:
            total += part

    return timed(work)


def message(size: int) -> Times:
    """Time a message that names all ranks but one."""
    return timed(lambda: name_ranks(rank for rank in range(size) if rank != 7))


OPERATIONS: dict[str, Callable[[int], Times]] = {
    "startup exchange": startup_exchange,
    "comparison of settings, data and code before the process group": with_groups(
        lambda group: group.check_equal({"f": TEXT})
    ),
    "strings to rank 0": with_groups(lambda group: group.collect(TEXT)),
    "facts of the 8 ranks of a node": with_groups(
        lambda group: group.gather_of(str(group.world.rank // 8), TEXT[:200])
    ),
    "batch plan and shard": batch_plan,
    "drift of 1,000 tensors": drift,
    "means on rank 0": means,
    "a message about all ranks": message,
}
# How often the start of a run performs each operation.
AT_START = {
    "startup exchange": 1,
    "comparison of settings, data and code before the process group": 1,
    "strings to rank 0": 2,
    "facts of the 8 ranks of a node": 1,
}


# Real ranks ---------------------------------------------------------------------------------------

TENSORS = 1_000
STEPS = 50  # between two logs
TURNS = 30


def bare(group: Group, rank: int) -> None:
    dist.all_reduce(torch.zeros(2 * TENSORS, dtype=torch.int64))


def real_drift(group: Group, rank: int) -> None:
    """Compare the digests of `TENSORS` tensors of one number each."""
    weights = {str(n): Shard.whole(torch.ones(1), rank == 0) for n in range(TENSORS)}
    check_drift(group, 1, {"model": weights}, Mesh(rank, replicate=group.world.world_size))


def real_means(group: Group, rank: int) -> None:
    means = Means()
    for _ in range(STEPS):
        for name in ("loss", "accuracy", "top5", "norm"):
            means.count(name, torch.ones(()), 1.0)
        means.end_row()
    means.read(group)


def real_ledger(group: Group, rank: int) -> None:
    size = group.world.world_size
    ledger = Ledger(BatchPlan(10**6, 8 * size, 8, size), rank)
    for _ in range(STEPS):
        ledger.pending.append([torch.arange(8)])
    ledger.close(group)


REAL = {
    "a bare all-reduce of 2,000 numbers": bare,
    "drift of 1,000 tensors": real_drift,
    "means of 50 steps": real_means,
    "ledger of 50 steps": real_ledger,
}


def on_real_ranks(size: int) -> dict[str, float]:
    """Return the median seconds of each operation on rank 0."""
    config = load_config(["task=cifar"]).dist

    def on_rank() -> dict[str, float]:
        torch.set_num_threads(1)
        with process_group(config, World.from_environment()) as group:
            times: dict[str, list[float]] = {name: [] for name in REAL}
            for _ in range(TURNS):
                for name, body in REAL.items():
                    dist.barrier()
                    began = time.perf_counter()
                    body(group, group.world.rank)
                    times[name].append(time.perf_counter() - began)
        return {name: statistics.median(each) for name, each in times.items()}

    return on_ranks(size, on_rank)[0]


def measure_real(sizes: list[int]) -> list[dict]:
    found = {size: on_real_ranks(size) for size in sizes}
    rows = []
    for name in REAL:
        seconds = {size: found[size][name] for size in sizes}
        rows.append({"name": name, "seconds": seconds})
        shown = "  ".join(f"{1e3 * value:9.2f}" for value in seconds.values())
        print(f"{name:<62} {shown} ms", flush=True)
    return rows


def measure(sizes: list[int], rounds: int) -> list[dict]:
    rows = []
    for name, operation in OPERATIONS.items():
        operation(sizes[0])  # warm up imports and caches
        seconds = []
        for size in sizes:
            turns = [operation(size) for _ in range(rounds)]
            seconds.append(statistics.median(whole for whole, _ in turns))
            own = statistics.median(part for _, part in turns)
        growth = math.log(seconds[-1] / seconds[-2]) / math.log(sizes[-1] / sizes[-2])
        row = {"name": name, "seconds": dict(zip(sizes, seconds, strict=True))}
        row |= {"rank_0_us_per_rank": 1e6 * own / sizes[-1], "exponent": growth}
        rows.append(row)
        shown = "  ".join(f"{1e3 * value:9.2f}" for value in seconds)
        cost = f"{row['rank_0_us_per_rank']:10.1f} us  N^{growth:.2f}"
        print(f"{name:<62} {shown} ms  {cost}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--real", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    if len(given.ranks) < 2 or max(given.ranks) > MOST:
        parser.error(f"--ranks: give at least two numbers, of at most {MOST}")
    files = 4 * MOST + 100  # a socket at each end, and more while they connect
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < files:
        parser.error(f"--ranks: needs {files} open files, and ulimit -Hn allows {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    sys.setswitchinterval(0.1)  # else a thousand threads compete every 5 ms
    heads = "  ".join(f"{size:9}" for size in sorted(given.real))
    print(f"{'operation (real ranks)':<62} {heads}")
    real = measure_real(sorted(given.real))  # first, because forks must come before threads
    heads = "  ".join(f"{size:9}" for size in sorted(given.ranks))
    print(f"{'operation (simulated ranks)':<62} {heads}  rank 0, per rank  growth")
    rows = measure(sorted(given.ranks), given.rounds)
    largest = max(given.ranks)
    start = sum(row["seconds"][largest] * AT_START.get(row["name"], 0) for row in rows)
    print(f"start-up work at {largest:,} ranks: {start:.2f} s")
    if given.json:
        given.json.write_text(json.dumps([*real, *rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
