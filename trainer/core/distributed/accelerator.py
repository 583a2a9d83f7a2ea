"""The accelerator of this machine, such as CUDA or XPU, as torch.accelerator describes it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from trainer.base.errors import one_line

HOST_BACKENDS = ("gloo", "mpi")  # carry tensors of the CPU; others those of their device


def kind() -> str:
    """Return the type of the devices: that of the accelerator that torch sees, else "cpu".

    MPS has no float64, in which sums and metrics are kept.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if device is None or device.type == "mps" else device.type


def count() -> int:
    """Return how many devices of the accelerator this process sees."""
    return torch.accelerator.device_count() if kind() != "cpu" else 0


def module(device: torch.device) -> Any:
    """Return torch's module of a device, such as torch.cuda."""
    return torch.get_device_module(device)


def is_used(device: torch.device) -> bool:
    """Return True for a device whose work goes on while the host does something else."""
    return device.type not in ("cpu", "meta")


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on a device; the host does not wait for the copy."""
    return tensor.pin_memory().to(device, non_blocking=True) if is_used(device) else tensor


@functools.cache
def _stream_of_copies(device: torch.device) -> Any:
    return module(device).Stream(device)


def copy_aside(tree: Any, device: torch.device) -> Any:
    """Return a tree of tensors on a device, copied from the host on a stream of its own.

    What the device computes next waits for the copy, and what it computes now goes on beside it.
    """
    if not is_used(device):
        return tree
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    move = functools.partial(torch.Tensor.to, device=device, non_blocking=True)
    if all(is_used(leaf.device) for leaf in leaves):
        return tree_map_only(torch.Tensor, move, tree)
    own = module(device)
    with own.stream(_stream_of_copies(device)):
        copies = tree_map_only(torch.Tensor, move, tree)
    user = own.current_stream(device)
    user.wait_stream(_stream_of_copies(device))
    for leaf in tree_leaves(copies):
        if isinstance(leaf, torch.Tensor):
            leaf.record_stream(user)  # else its memory is used again when this stream frees it
    return copies


def wait(device: torch.device) -> None:
    """Wait for what a device was asked to do."""
    if is_used(device):
        module(device).current_stream(device).synchronize()


def own_backend() -> str:
    """Return the backend for tensors of the accelerator, such as nccl; gloo if there is none."""
    name = dist.get_default_backend_for_device(kind())
    is_built = name != "nccl" or dist.is_nccl_available()
    return name if is_built else "gloo"


def carries(backend: str) -> bool:
    """Return True if a backend carries tensors of the accelerator."""
    return backend not in HOST_BACKENDS


def generators(device: torch.device) -> list[torch.Generator]:
    """Return the default generators that draws on a device use, the CPU's first."""
    if not is_used(device):
        return [torch.default_generator]
    # CUDA's are there once it is initialised
    defaults = getattr(module(device), "default_generators", ())
    return [torch.default_generator, *defaults[device.index or 0 : (device.index or 0) + 1]]


def fork_rng(devices: Sequence[torch.device]) -> AbstractContextManager[None]:
    """Return a context that restores the generators of the CPU and of devices at its end."""
    used = [device for device in devices if is_used(device)]
    return torch.random.fork_rng(used, device_type=used[0].type if used else "cuda")


def describe(device: torch.device) -> str:
    """Return the name of a device, as its driver says it."""
    name = getattr(module(device), "get_device_name", None)
    return name(device) if name is not None else device.type


def identity(device: torch.device) -> str:
    """Return what tells a device of this machine from its others, also where one is visible."""
    properties = module(device).get_device_properties(device)
    return str(getattr(properties, "uuid", device))


def fused(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function of tensors that is compiled on accelerators, where it takes few kernels.

    On a CPU it is called as it is, and after a warning where torch cannot compile, as without
    Triton. Its first argument is a tensor, and what it returns has no gradient.
    """
    chosen: list[Callable[..., torch.Tensor]] = []

    @functools.wraps(function)
    def call(first: torch.Tensor, *rest: Any) -> torch.Tensor:
        return on_device(first, *rest) if is_used(first.device) else function(first, *rest)

    @torch.no_grad()
    def on_device(first: torch.Tensor, *rest: Any) -> torch.Tensor:
        from torch._dynamo.exc import TorchDynamoException  # here: it takes 2 s to import

        if not chosen:
            chosen.append(torch.compile(function, dynamic=True))
        try:
            return chosen[0](first, *rest)
        except TorchDynamoException as error:
            warnings.warn(f"{function.__name__} is not compiled: {one_line(error)}", stacklevel=2)
            chosen[0] = function
            return function(first, *rest)

    return call
