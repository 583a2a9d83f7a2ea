"""What grows with the number of ranks: seconds against N, and the exponent of the growth.

    python scripts/bench_scale.py [--ranks 16 64 256 1024] [--rounds 3] [--json FILE]

Each operation runs on N simulated ranks: threads of this process, each with its own connection to
a real TCPStore, do what one rank does with Lockstep's own code. The collectives between them are
left out, torch's own; what one rank computes alone (plans, digests, sums, ranges) is timed as it
is. All threads share this process's interpreter, so times are those of N ranks' work one after
another; beside them stands rank 0's own processor time, in microseconds for each rank. The exponent
is that of the last step: 1 is linear in N, 2 is quadratic.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import resource
import socket
import statistics
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest import mock

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it resolves each client's name

import torch
import torch.distributed as dist

from trainer import World, load_config
from trainer.data.order import BatchPlan, ShardSampler
from trainer.distributed import rendezvous
from trainer.distributed.group import Group
from trainer.distributed.watch.watcher import name_ranks

MOST = 1024  # ranks
numbers = itertools.count()
CPU = torch.device("cpu")
TEXT = "a fact of a rank, " * 100  # 1.8 KB


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


Times = tuple[float, float]  # seconds until the last rank is through; of rank 0's own work


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
    """A store per rank: rank 0's serves, the others are clients of it.

    Connected once: torch looks up the name of each client, which may take seconds.
    """
    timeout = timedelta(seconds=120)
    place = ("127.0.0.1", free_port(), None)
    served = dist.TCPStore(*place, True, timeout, wait_for_workers=False, multi_tenant=True)
    others = [
        dist.TCPStore(*place, False, timeout, wait_for_workers=False) for _ in range(size - 1)
    ]
    return [served, *others]


def roll_call(size: int) -> Times:
    """Meeting, once connected: every rank says hello and is answered."""
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
    """`call(group)` on every rank, before there are collectives."""

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
    """The rows of one rank of N, and its evaluation shard of a billion examples."""
    plan = BatchPlan(10**9, 4 * size, 1, size)

    def work() -> None:
        plan.micro_batches(size - 1)
        next(iter(ShardSampler(10**9, 512, size - 1, size, CPU)))

    return timed(work)


def drift(size: int) -> Times:
    """Comparing the digests of 1,000 tensors, after the all-reduce that brought them."""
    digests = torch.randint(-(2**62), 2**62, (1_000,))
    both = torch.stack([digests, ~digests])
    return timed(lambda: bool((both[0] != ~both[1]).any()))


def means(size: int) -> Times:
    """Adding the rows of 50 steps and 4 names of every rank, in rank order."""
    parts = [torch.rand(200, 2, dtype=torch.float64) for _ in range(size)]

    def work() -> None:
        total = torch.zeros_like(parts[0])
        for part in parts:
            total += part

    return timed(work)


def message(size: int) -> Times:
    """Naming all ranks but one."""
    return timed(lambda: name_ranks(rank for rank in range(size) if rank != 7))


OPERATIONS: dict[str, Callable[[int], Times]] = {
    "roll call": roll_call,
    "facts compared before the group": with_groups(lambda group: group.check_equal({"f": TEXT})),
    "texts to rank 0": with_groups(lambda group: group.collect_text(TEXT)),
    "facts of a node's 8 ranks": with_groups(
        lambda group: group.gather_text_of(str(group.world.rank // 8), TEXT[:200])
    ),
    "batch plan and shard": batch_plan,
    "drift of 1,000 tensors": drift,
    "means on rank 0": means,
    "a message about all ranks": message,
}
STORE = list(OPERATIONS)[:4]  # the start of a run does the third twice


def measure(sizes: list[int], rounds: int) -> list[dict]:
    rows = []
    for name, operation in OPERATIONS.items():
        operation(sizes[0])  # what is imported, and the caches
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
        cost = f"{row['rank_0_us_per_rank']:7.1f} us  N^{growth:.2f}"
        print(f"{name:<32} {shown} ms  {cost}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256, 1024])
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
    heads = "  ".join(f"{size:9}" for size in given.ranks)
    print(f"{'ranks':<32} {heads}     rank 0, each  growth")
    rows = measure(sorted(given.ranks), given.rounds)
    largest = max(given.ranks)
    start = sum(row["seconds"][largest] for row in rows if row["name"] in STORE)
    print(f"start-up work at {largest:,} ranks: {start:.2f} s")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
