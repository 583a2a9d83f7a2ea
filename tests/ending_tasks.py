"""A task that ends a run in the way that a test selects."""

import os
import signal
import time
from dataclasses import dataclass

from tiny import Tiny

from trainer import ConfigError


class Ends(Tiny):
    """Task whose `ranks` do `how` before the step after `at`, but not in a restart: raise an error,
    kill themselves, or make one loss that is not finite."""

    @dataclass
    class Options(Tiny.Options):
        how: str
        ranks: list[int]
        at: int
        pause_s: float
        refused: list[int]  # numbers of ranks

    had_nan = False

    def build_model(self):
        if self.world.world_size in self.options.refused:
            raise ConfigError(f"{self.world.world_size} ranks: refused by the task")
        return super().build_model()

    def train_step(self, batch):
        time.sleep(self.options.pause_s)
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        is_there = self.step == self.options.at and self.world.rank in self.options.ranks
        if is_first and is_there:
            if self.options.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.options.how == "raise":
                raise ValueError("of the task")
            if self.options.how == "nan" and not self.had_nan:
                self.had_nan = True
                return self.update(batch, lambda *given: self.loss(*given) * float("nan"))
        return super().train_step(batch)
