"""Time of a step, estimated from the device's peaks, the operations and the messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.distributed.devices import Device
from trainer.plan.passes import Passes
from trainer.plan.trial import Trial
from trainer.strategy.cost import MemoryRow, Message
from trainer.strategy.mesh import AXES
from trainer.strategy.pipeline_parallel.schedule import bubble


@dataclass(frozen=True)
class Speed:
    """Seconds of a step, all estimated: computation, waiting for other stages, update of the
    weights, and communication."""

    compute_s: float
    wait_s: float
    update_s: float
    communicate_s: float

    @property
    def least_s(self) -> float:
        """Time of a step whose communication runs at the same time as its computation."""
        return max(self.compute_s, self.communicate_s) + self.wait_s + self.update_s

    @property
    def most_s(self) -> float:
        """Time of a step that communicates before or after it computes."""
        return self.compute_s + self.communicate_s + self.wait_s + self.update_s

    @property
    def efficiency(self) -> tuple[float, float]:
        """Least and largest part of the step in which the device computes."""
        busy = self.compute_s + self.update_s
        return busy / self.most_s, busy / self.least_s


def estimate(
    trial: Trial,
    device: Device,
    memory: Sequence[MemoryRow],
    messages: Sequence[Message],
    stages: Sequence[Passes],
) -> Speed:
    """Return the time of a step: over a pipeline, that of the slowest stage and of its waiting."""
    speed = device.flops_per_s(trial.config.strategy.precision)
    num_rows = trial.batches.plan.micro_batches(0)[-1][1]
    operations = max(passes.flops + passes.flops_again for passes in stages) / trial.rows * num_rows
    waited = bubble(len(stages), trial.batches.plan.accumulation)
    known = {row.name: row.num_bytes or 0 for row in memory}
    # weights and state are read and written, gradients are read
    moved = 2 * known["parameters"] + 2 * known["optimizer state"] + known["gradients"]
    communicate = sum(_seconds(trial, device, message) for message in messages)
    compute = operations / speed
    wait = compute * waited / (1 - waited)
    return Speed(compute, wait, moved / (device.memory_gb_s * 1e9), communicate)


def _seconds(trial: Trial, device: Device, message: Message) -> float:
    sizes = trial.mesh.sizes
    axes = list(sizes) if message.axis == "world" else message.axis.split(" x ")
    size = math.prod(sizes[axis] for axis in axes)
    bandwidth = _bandwidth(trial, device, axes, size) * device.assumed["links"]
    latency = device.assumed["latency_us"] * 1e-6 * math.log2(size)
    return message.num_bytes / bandwidth + message.count * latency


def _bandwidth(trial: Trial, device: Device, axes: Sequence[str], size: int) -> float:
    """Return the bandwidth of a rank along axes of `size` ranks, in bytes per second.

    Ranks of one node that are in the same group share the network links of the node.
    """
    local = trial.task.world.local_world_size
    inner = AXES[AXES.index(axes[-1]) + 1 :]
    stride = math.prod(trial.mesh.sizes[axis] for axis in inner)
    node = device.node_gb_s * 1e9
    if size * stride <= local:
        return node
    together = max(1, local // stride)
    return min(node, device.network_gb_s * 1e9 * together)
