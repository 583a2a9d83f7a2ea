"""Placement: the blocks of a model over the devices of one rank, without device code in the task.

One device computes while the others wait, so this buys memory and no speed. A pipeline over as many
ranks keeps them all at work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


def divide(blocks: Sequence[nn.Module], devices: Sequence[torch.device]) -> list[torch.device]:
    """Return the device of each block: runs of equally many, the first device first."""
    return [devices[number * len(devices) // len(blocks)] for number in range(len(blocks))]


def place_blocks(
    model: nn.Module, blocks: Sequence[nn.Module], devices: Sequence[torch.device]
) -> list[torch.device]:
    """Move a model to several devices: its blocks in runs, the rest to the first device.

    Hooks move the inputs of each block to its device, and the outputs of the last block back.
    Returns the device of each block.
    """
    places = divide(blocks, devices)
    model.to(devices[0])
    for block, device in zip(blocks, places, strict=True):
        block.to(device)
        block.register_forward_pre_hook(_enter(device), with_kwargs=True)
    blocks[-1].register_forward_hook(lambda _, args, output: _moved(devices[0], output))
    return places


def _enter(device: torch.device) -> Callable[[nn.Module, Any, Any], Any]:
    return lambda module, args, kwargs: _moved(device, (args, kwargs))


def _moved(device: torch.device, tree: Any) -> Any:
    return tree_map_only(torch.Tensor, partial(_move, device), tree)


def _move(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device, non_blocking=True)
