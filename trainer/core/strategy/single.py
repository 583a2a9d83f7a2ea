"""One process, one device."""

from __future__ import annotations

import torch
from torch import nn

from trainer.base.errors import ConfigError
from trainer.core.config.schema import Config
from trainer.core.distributed.world import World
from trainer.core.hook_calls import call
from trainer.core.micro_batch import MicroBatch, MicroBatches
from trainer.core.state.sandbox import BufferCopies, keep_passes, sandbox
from trainer.core.strategy.base import ModelSpec, ObjectiveProtocol, Strategy


class SingleDevice(Strategy):
    """One process and one device: gradients accumulate in place, without any all-reduce."""

    def __init__(self, spec: ModelSpec):
        super().__init__(spec)
        self._wrapped: nn.Module = self.module

    @classmethod
    def check(cls, config: Config, world: World) -> None:
        if world.world_size > 1:
            raise ConfigError(f"""strategy=single: must run on 1 rank, and {world.started};
                use strategy=ddp""")
        super().check(config, world)

    def prepare(self, batch: MicroBatch, objective: ObjectiveProtocol) -> None:
        before = BufferCopies(self.module)
        with sandbox(keep_passes(self.module, before, has_large=False)):
            self._dry_run(batch, objective)
            self.statistics.find(self.module, before)

    def forward_backward(self, batch: MicroBatches, objective: ObjectiveProtocol) -> torch.Tensor:
        totals = None
        precision, statistics = self.precision, self.statistics
        if statistics.are_used:
            statistics.begin()
        for inputs, targets in batch:
            if statistics.are_used:
                statistics.rewind()
            with precision.autocast():
                total, carried = objective(call(self._wrapped, inputs, self.rows), targets)
            if statistics.are_used:
                statistics.note(targets, inputs)
            torch.autograd.backward(total, precision.root(total, objective.scale))
            totals = carried if totals is None else totals + carried
        assert totals is not None
        if statistics.are_used and statistics.rows is not None:
            statistics.write(statistics.read())  # else each pass has left its own, which stay
        return totals


STRATEGY = SingleDevice
