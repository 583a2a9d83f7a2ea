"""Measure a step of DataParallel's kind beside one of DDP, on two CPU cores.

    torchrun --standalone --nproc_per_node=2 scripts/bench/bench_dp.py [--rounds 25]

torch's DataParallel needs GPUs: without one it calls the model itself. So its step is done by hand:
two threads of one process, each with a copy of the weights and half of the batch, and the sum of
their gradients. Backward runs in both threads, as on GPUs, and nothing is sent, as memory is
shared. DDP has two processes. One process with the whole batch is the third contestant.

They take turns, and the fastest step of each counts, which other load on the machine changes least.
"""

from __future__ import annotations

import argparse
import copy
import math
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

CASES = ((8, 128, 64), (32, 64, 256), (8, 256, 1024))  # (layers, width, batch)
STEPS = 10  # of a turn
NAMES = ("one process", "dp", "ddp")


class ThreadedStep:
    """Forward and backward by threads of one process, each on a part of the batch."""

    def __init__(self, model: nn.Module, size: int = 2):
        self.copies = [model, *(copy.deepcopy(model) for _ in range(size - 1))]

    def __call__(self, inputs: torch.Tensor) -> None:
        self._send_weights()
        pairs = zip(self.copies, inputs.chunk(len(self.copies)), strict=True)
        threads = [threading.Thread(target=run_backward, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._add_gradients()

    def _send_weights(self) -> None:
        first, *others = self.copies
        for other in others:
            other.zero_grad()
            with torch.no_grad():
                for source, target in zip(first.parameters(), other.parameters(), strict=True):
                    target.copy_(source)

    def _add_gradients(self) -> None:
        first, *others = self.copies
        for other in others:
            for target, source in zip(first.parameters(), other.parameters(), strict=True):
                target.grad += source.grad


def run_backward(model: nn.Module, inputs: torch.Tensor) -> None:
    mse_loss(model(inputs), inputs).backward()


def build_model(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    pairs = ((nn.Linear(width, width), nn.ReLU()) for _ in range(layers))
    return nn.Sequential(*(module for pair in pairs for module in pair))


def time_turn(run: Callable[[torch.Tensor], None], model: nn.Module, inputs: torch.Tensor) -> float:
    """Return the milliseconds of the fastest step, with its update by SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        run(inputs)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    return 1000 * min(times)


def measure(layers: int, width: int, batch: int, rounds: int) -> list[float]:
    """Return the milliseconds of each contestant, on rank 0."""
    whole = torch.randn(batch, width, generator=torch.Generator().manual_seed(1))
    part = whole.chunk(dist.get_world_size())[dist.get_rank()]
    alone, threaded, divided = (build_model(layers, width) for _ in range(3))
    by_threads, wrapped = ThreadedStep(threaded), DistributedDataParallel(divided)
    fastest = [math.inf] * len(NAMES)
    for _ in range(rounds):
        times = [math.inf, math.inf]
        if dist.get_rank() == 0:  # the other rank waits in the barrier
            times[0] = time_turn(lambda inputs: run_backward(alone, inputs), alone, whole)
            times[1] = time_turn(by_threads, threaded, whole)
        dist.barrier()
        times.append(time_turn(lambda inputs: run_backward(wrapped, inputs), divided, part))
        dist.barrier()
        fastest = [min(pair) for pair in zip(fastest, times, strict=True)]
    return fastest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for layers, width, batch in CASES:
        result = measure(layers, width, batch, rounds)
        if dist.get_rank() == 0:
            values = ", ".join(f"{n} {v:.1f} ms" for n, v in zip(NAMES, result, strict=True))
            print(f"{layers} layers of width {width}, batch {batch}: {values}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
