"""One process, one device."""

from __future__ import annotations

import torch
from torch import nn

from trainer.config.schema import Config
from trainer.data.preparation import MicroBatch
from trainer.distributed.world import World
from trainer.errors import ConfigError
from trainer.hook_errors import call
from trainer.strategy.base import Blueprint, MicroBatches, ObjectiveProtocol, Strategy
from trainer.strategy.modules.dry_run import untouched


class SingleDevice(Strategy):
    """One process and one device: gradients accumulate in place, without any all-reduce."""

    def __init__(self, blueprint: Blueprint):
        super().__init__(blueprint)
        self._wrapped: nn.Module = self.module

    @classmethod
    def check(cls, config: Config, world: World) -> None:
        if world.world_size > 1:
            started = f"must run on 1 rank, and {world.started}"
            raise ConfigError(f"strategy=single: {started}; use strategy=ddp")
        super().check(config, world)

    def prepare(self, batch: MicroBatch, objective: ObjectiveProtocol) -> None:
        with untouched(self.module) as before:
            self._rehearse(batch, objective)
            self.statistics.find(self.module, before)

    def forward_backward(self, batch: MicroBatches, objective: ObjectiveProtocol) -> torch.Tensor:
        totals = None
        self.statistics.begin()
        for inputs, targets in batch:
            self.statistics.rewind()
            with self.precision.autocast():
                total, carried = objective(call(self._wrapped, inputs, self.rows), targets)
            self.statistics.note(targets, inputs)
            torch.autograd.backward(total, self.precision.root(total, objective.scale))
            totals = carried if totals is None else totals + carried
        assert totals is not None
        if self.statistics.rows is not None:  # else each pass has left its own, which stay
            self.statistics.write(self.statistics.read())
        return totals


STRATEGY = SingleDevice
