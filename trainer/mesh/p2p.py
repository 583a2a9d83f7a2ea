"""Exchange between neighbouring stages of a pipeline, and the order in which they compute."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from trainer.base.codec import bytes_of, decode, dtype_of, encode, name_of
from trainer.base.errors import RunError
from trainer.core.distributed import accelerator
from trainer.core.distributed.world import RankGroup

Order = list[tuple[bool, int]]  # (is it forward, number of the micro-batch)


def order(schedule: str, num_stages: int, stage: int, count: int) -> Order:
    """Return what a stage does with `count` micro-batches. On one stage all schedules are alike.

    gpipe runs all of them forward, then all backward (Huang et al., arXiv:1811.06965). 1f1b
    alternates as soon as the first one comes back, so a stage keeps the activations of at most as
    many micro-batches as stages follow, and itself (Narayanan et al., arXiv:2006.09503).
    """
    ahead = min(count, num_stages - 1 - stage)
    if schedule == "gpipe" and num_stages > 1:
        ahead = count
    passes: Order = [(True, batch_number) for batch_number in range(ahead)]
    for batch_number in range(ahead, count):
        passes += [(True, batch_number), (False, batch_number - ahead)]
    passes += [(False, batch_number) for batch_number in range(count - ahead, count)]
    return passes


def most_kept(schedule: str, num_stages: int, stage: int, count: int) -> int:
    """Return how many of `count` micro-batches a stage keeps activations of at a time."""
    in_flight = most = 0
    for is_forward, _ in order(schedule, num_stages, stage, count):
        in_flight += 1 if is_forward else -1
        most = max(most, in_flight)
    return most


def bubble(num_stages: int, count: int) -> float:
    """Return the part of a step in which a stage waits, if all stages take equally long."""
    return (num_stages - 1) / (count + num_stages - 1)


@dataclass(frozen=True)
class Header:
    """The form of a message: dtype, shape and need of a gradient, for each tensor.

    `draws` is the number of random draws of the row so far.
    """

    forms: tuple[tuple[torch.dtype, tuple[int, ...], bool], ...]
    draws: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], draws: int) -> Header:
        forms = tuple((t.dtype, tuple(t.shape), t.requires_grad) for t in tensors)
        return cls(forms, draws)

    def encode(self) -> list[Any]:
        forms = [[name_of(d), shape, g] for d, shape, g in self.forms]
        return [forms, self.draws]

    @classmethod
    def decode(cls, raw: Any) -> Header:
        forms, draws = raw
        return cls(tuple((dtype_of(d), tuple(shape), g) for d, shape, g in forms), draws)


class ReceivedTensor:
    """A received tensor, and its gradient after backward.

    The tensor is the result of an operation, not a leaf, so that a block may change it in place.
    """

    def __init__(self, tensor: torch.Tensor, needs_grad: bool):
        self.needs_grad = needs_grad
        self._raw = tensor.detach()
        self._gradients: list[torch.Tensor] = []
        self.tensor = tensor
        if needs_grad:
            root = torch.empty((), device=tensor.device, requires_grad=True)
            self.tensor = _Arrival.apply(tensor, root, self._gradients)

    def gradient(self) -> torch.Tensor:
        """Return the gradient; zeros if nothing depends on the tensor."""
        return self._gradients[0] if self._gradients else torch.zeros_like(self._raw)


class _Arrival(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: torch.Tensor, gradients: list[Any]) -> Any:
        ctx.kept = gradients
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.kept.append(gradient)
        return None, None, None


class P2P:
    """Messages of this stage to the next and the previous one.

    Each direction has a group of its own: NCCL runs the messages of a pair of ranks in one order
    for a group, and waits for each. With one group for both, 1f1b sends on two stages at once, and
    hangs when a message is larger than NCCL's buffers. A header is sent once for each kind of
    message, `key`, which both sides know.
    """

    def __init__(self, axis: RankGroup, device: torch.device):
        self._down, self._up = (axis.open(axis.ranks, axis.name, True) for _ in range(2))
        self._rank = axis.rank
        self._device = device
        # gloo's send and recv read the memory of the host only
        is_carried = accelerator.carries(dist.get_backend(self._down.group))
        self._carrier = device if is_carried else torch.device("cpu")
        self._sent: dict[Hashable, Header] = {}
        self._known: dict[Hashable, Header] = {}
        self._wanted: dict[Hashable, list[int]] = {}
        self._under_way: list[tuple[Any, torch.Tensor]] = []

    def ask(self, mode: Hashable, wanted: list[int]) -> None:
        """Tell the previous stage, once, which of the arguments of the first block it must send."""
        if mode not in self._wanted:
            self._wanted[mode] = wanted
            self._send_json(wanted, self._rank - 1)

    def asked(self, mode: Hashable) -> list[int]:
        """Return which of the arguments of its first block the next stage asked for."""
        key = ("asked", mode)
        if key not in self._wanted:
            self._wanted[key] = self._receive_json(self._rank + 1)
        return self._wanted[key]

    def send(self, key: Hashable, tensors: Sequence[torch.Tensor], draws: int) -> None:
        header = Header.of(tensors, draws)
        if key not in self._sent:
            self._sent[key] = header
            self._send_json(header.encode(), self._rank + 1)
        elif self._sent[key] != header:
            raise RunError("""strategy.mesh.pipeline: the activations changed their sizes
                or their random draws between micro-batches alike:
                make them depend on the sizes of the inputs only""")
        for tensor in tensors:
            self._post(tensor.detach(), self._rank + 1, self._down)

    def receive(self, key: Hashable) -> tuple[list[ReceivedTensor], int]:
        """Return the tensors, and the number of random draws so far."""
        if key not in self._known:
            self._known[key] = Header.decode(self._receive_json(self._rank - 1))
        header = self._known[key]
        arrived = []
        for dtype, shape, needs_grad in header.forms:
            tensor = self._receive(shape, dtype, self._rank - 1, self._down)
            arrived.append(ReceivedTensor(tensor, needs_grad))
        return arrived, header.draws

    def send_gradients(self, received: Sequence[ReceivedTensor]) -> None:
        """Send the gradients of received tensors to the stage that they came from."""
        for each in received:
            if each.needs_grad:
                self._post(each.gradient(), self._rank - 1, self._up)

    def receive_gradients(self, sent: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients of the sent tensors that need one."""
        needed = [tensor for tensor in sent if tensor.requires_grad]
        return [self._receive(t.shape, t.dtype, self._rank + 1, self._up) for t in needed]

    def wait(self) -> None:
        """Wait until everything that was sent has arrived."""
        with self._down.waiting():
            for work, _ in self._under_way:
                work.wait()
        self._under_way.clear()

    def _post(self, tensor: torch.Tensor, target: int, axis: RankGroup) -> None:
        tensor = tensor.to(self._carrier).contiguous()
        work = dist.isend(bytes_of(tensor), group=axis.group, group_dst=target)
        self._under_way.append((work, tensor))

    def _receive(
        self, shape: Sequence[int], dtype: torch.dtype, source: int, axis: RankGroup
    ) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._carrier)
        with axis.waiting() as group:
            dist.recv(bytes_of(tensor), group=group, group_src=source)
        return tensor.to(self._device)

    def _send_json(self, value: Any, target: int) -> None:
        data = encode(value)
        for tensor in (torch.tensor([len(data)]), data):
            self._post(tensor, target, self._down)

    def _receive_json(self, source: int) -> Any:
        size = self._receive([1], torch.int64, source, self._down)
        return decode(self._receive([int(size)], torch.uint8, source, self._down))
