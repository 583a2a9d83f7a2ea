"""The tensors of a model in training: for optimizers, moving averages, checkpoints, digests."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.core.distributed.group import Group
from trainer.core.distributed.world import World
from trainer.core.strategy.modules.dry_run import describe_change
from trainer.core.strategy.tensor_shards import (
    Shard,
    TensorSource,
    check_model,
    is_extra,
    non_persistent,
    read_whole,
    tensors_of,
)


class Tensors:
    """Parameters, gradients and buffers of a model that each rank has whole.

    `structure` is the model with the shapes of the whole, whatever this rank has of it.
    `parameters` are this rank's parts by name, `trained` those of them that get a gradient.
    """

    def __init__(self, module: nn.Module, world: World):
        """`module` is the user's model, without any wrapper."""
        self.module = module
        self.structure = module
        self.parameters = self._list_parameters()
        self.trained = [p for p in self.parameters.values() if p.requires_grad]
        self._world = world
        self._known = {name: (p, p.requires_grad) for name, p in self._registered().items()}
        kinds: dict[Any, list[nn.Parameter]] = {}
        for parameter in self.trained:
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        self._kinds = list(kinds.values())

    def _list_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parts of the parameters: here the parameters themselves."""
        return self._registered()

    def _registered(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the model's modules have now."""
        return dict(self.module.named_parameters())

    def names(self) -> dict[torch.Tensor, str]:
        """Return the name of each of `parameters`."""
        return {parameter: name for name, parameter in self.parameters.items()}

    def find_change(self) -> str:
        """Return a line if the model has other parameters than at the start, else an empty one."""
        return describe_change(self._known, self._registered())

    def gradients(self) -> list[list[torch.Tensor]]:
        """Return the gradients, grouped by device and dtype as foreach operations require."""
        gradients = []
        for kind in self._kinds:
            gradients.append([g for p in kind if (g := p.grad) is not None])
        return gradients

    def drop_gradients(self) -> None:
        """Free all gradients."""
        for parameter in self.trained:
            parameter.grad = None

    def adopt(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Make an optimizer step this rank's parts, and return those of `parameters` it updates."""
        return [p for group in optimizer.param_groups for p in group["params"]]

    def collect_plain(self, states: list[dict[str, Any]], group: Group) -> list[dict[str, Any]]:
        """Return the optimizers' states without tensors, on rank 0 those of all ranks."""
        return states  # alike on all ranks

    def refresh(self) -> None:
        """Free what was gathered in a forward pass without backward, or before new values."""

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """Yield the whole model, to run and to replace tensors in the block. A collective."""
        yield self.module

    def shards(self) -> dict[str, Shard]:
        """Return this rank's parts of the model's tensors, with names of the unwrapped model."""
        return {name: self.shard_of(t) for name, t in tensors_of(self.module).items()}

    def non_persistent(self) -> dict[str, Shard]:
        """Return this rank's parts of the buffers that are not in the model's state."""
        return {name: self.shard_of(b) for name, b in non_persistent(self.module).items()}

    def shard_of(self, tensor: torch.Tensor, is_state: bool = False) -> Shard:
        """Return the shard that this rank has of a parameter, of its state, or of a buffer."""
        return Shard.whole(tensor.detach(), self._world.rank == 0)

    def writers(self) -> list[int]:
        """Return the ranks that write shards into a checkpoint."""
        return [0]

    def extra_state(self) -> dict[str, Any]:
        """Return the values in the model's state that are neither parameters nor buffers."""
        state = self.module.state_dict().items()
        return {name: value for name, value in state if is_extra(name, value)}

    def load(
        self, source: TensorSource, extra: Mapping[str, Any], left_out: Collection[str] = ()
    ) -> None:
        """Load the tensors of a whole model, and what `extra_state` returned.

        Those `left_out` keep their values. Raises CheckpointError, naming the first difference, if
        the state is of another model.
        """
        built = tensors_of(self.module)
        check_model(built, source.shapes(), left_out)
        saved = read_whole(source)
        same = {id(tensor): saved[name] for name, tensor in built.items() if name in saved}
        values = {name: same.get(id(tensor), tensor) for name, tensor in built.items()}
        self.module.load_state_dict({**values, **extra})


def join_states(states: list[dict[str, Any]], group: Group) -> list[dict[str, Any]]:
    """Add the optimizers' values that other ranks have, on rank 0. A collective."""
    for each in group.collect([state["state"] for state in states]):
        for state, others in zip(states, each, strict=True):
            state["state"] |= others
    return states
