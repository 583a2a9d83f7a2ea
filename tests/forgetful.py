"""A task that only a resume shows to be wrong."""

from tiny import Tiny


class Forgetful(Tiny):
    """Task with state that is not in the checkpoint."""

    factor = 1.0

    def loss(self, outputs, targets):
        if self.model.training:
            self.factor *= 0.9
        return super().loss(outputs, targets) * self.factor
