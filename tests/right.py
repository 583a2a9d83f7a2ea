"""Right tasks that look like wrong ones: the start of a run has no note about them."""

import random
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from tiny import Tiny
from torch import nn
from torch.utils.checkpoint import checkpoint
from wrong import Norm, net


class NumpyCoin(nn.Module):
    """Draws a coin for the whole batch, which is the same in all micro-batches."""

    def forward(self, x):
        return x * 2 if np.random.rand() < 0.5 else x


class ModelOfNumpyCoin(Tiny):
    def build_model(self):
        return net(NumpyCoin())


class LossOfPythonCoin(Tiny):
    def loss(self, outputs, targets):
        return super().loss(outputs, targets) * (1 + 0.1 * random.random())


class TorchCoin(nn.Module):
    def forward(self, x):
        return x * 2 if torch.rand(()) < 0.5 else x


class ModelOfTorchCoin(Tiny):
    def build_model(self):
        return net(TorchCoin(), nn.Dropout(0.2))


class MeanForEachRow(Tiny):
    """The mean of a library's loss, given to each row: its sum is the same in parts."""

    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets).expand(len(targets))


class CastsLogits(Tiny):
    def loss(self, outputs, targets):
        return F.cross_entropy(outputs.float(), targets, reduction="none")


class MaskedWeights(Tiny):
    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        return values, (targets > 0).to(values.dtype)


class GathersRows(Tiny):
    def loss(self, outputs, targets):
        others, first = self.gather_rows(outputs)
        labels = first + torch.arange(len(outputs))
        return F.cross_entropy(outputs @ others.T, labels, reduction="none")


class WeightNorm(Tiny):
    def build_model(self):
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            old = nn.utils.weight_norm(nn.Linear(16, 16))
        return net(old, nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 8, 2, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.lstm(x.unsqueeze(1).expand(-1, 3, -1))[0][:, -1])


class Lstm(Tiny):
    def build_model(self):
        return Recurrent()


class SequenceFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(4, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.2)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.layer(self.into(x).unsqueeze(0).expand(5, -1, -1)).mean(0))


class Transformer(Tiny):
    def build_model(self):
        return SequenceFirst()


class HookScales(Tiny):
    def build_model(self):
        model = super().build_model()
        model[0].weight.register_hook(lambda gradient: gradient * 0.5)
        return model


class Clamps(nn.Module):
    """Writes a parameter in each forward pass, to the same value in all of them."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(16))

    def forward(self, x):
        with torch.no_grad():
            self.scale.clamp_(-0.5, 0.5)
        return x * self.scale


class ClampsWeights(Tiny):
    def build_model(self):
        return net(Clamps())


class Caches(nn.Module):
    """Keeps a table of the first dtype that it meets, outside of its buffers."""

    table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.linspace(0, 1, 16).to(x)
        assert self.table.dtype == x.dtype
        return x + self.table


class CachesTable(Tiny):
    def build_model(self):
        return net(Caches())


class PlainNorm(Norm):
    """BatchNorm, which has a line of its own."""


class GroupNorm(Tiny):
    def build_model(self):
        return net(nn.GroupNorm(4, 16), nn.LayerNorm(16))


class FixedNoise(nn.Module):
    """Noise on its weight, the same for the whole batch."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        return x @ (self.weight + 0.1 * torch.randn_like(self.weight))


class NoisyWeights(Tiny):
    def build_model(self):
        return net(FixedNoise())


class Calendar(Tiny):
    """A loss that changes later, alike in all layouts."""

    def loss(self, outputs, targets):
        return super().loss(outputs, targets) * (1 if self.step < 5 else 0.5)


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # without gradients
            return checkpoint(self.inner, x, use_reentrant=True)


class ReentrantRecomputation(Tiny):
    def build_model(self):
        return net(Recomputed())


class StopsLater(Tiny):
    """Asks for the end where few rows have a small loss, which a proof must not do."""

    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        if len(values) < 10:
            self.stop("few rows")
        return values


class DropsAgain(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class RecomputedDropout(Tiny):
    def build_model(self):
        return net(DropsAgain())


class ScriptedLayer(Tiny):
    def build_model(self):
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            return net(torch.jit.script(nn.Linear(16, 16)))


class GathersNoisyRows(GathersRows):
    """A loss over all rows that draws, behind BatchNorm in groups and dropout."""

    def build_model(self):
        return net(nn.Dropout(0.2))

    def loss(self, outputs, targets):
        return super().loss(outputs + 0.1 * torch.randn_like(outputs), targets)


class SumsInLists(Tiny):
    """Keeps state below its attributes, which a proof gives back."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen = {"rows": [torch.zeros(())]}

    def loss(self, outputs, targets):
        self.seen["rows"][0] += len(targets)
        return super().loss(outputs, targets)


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(2)


class InputsInPlace(Tiny):
    def build_model(self):
        return nn.Sequential(InPlace(), *super().build_model())


class TargetsInPlace(Tiny):
    def augment(self, inputs, targets, random, train):
        inputs, targets = super().augment(inputs, targets, random, train)
        return inputs, targets + 1

    def loss(self, outputs, targets):
        targets -= 1
        return super().loss(outputs, targets)


class DropConnect(nn.Module):
    """Dropout of a weight that has as many rows as some micro-batch has."""

    def __init__(self):
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(11, 16) / 4), nn.Linear(11, 16)

    def forward(self, x):
        dropped = F.dropout(self.weight, 0.3, self.training)
        return self.out(F.dropout(x, 0.3, self.training) @ dropped.T)


class ModelOfDropConnect(Tiny):
    def build_model(self):
        return net(DropConnect())


class CoinInTrainStep(Tiny):
    """Draws beside the update, alike on all ranks."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.coin = 1.0

    def loss(self, outputs, targets):
        return super().loss(outputs, targets) * self.coin

    def train_step(self, batch):
        self.coin = 0.5 + random.random() + float(torch.rand(()))
        return super().train_step(batch)


class RareCoin(nn.Module):
    def forward(self, x):
        return x * (1 + np.random.rand()) if torch.rand(()) < 0.2 else x


class ModelOfRareCoin(Tiny):
    def build_model(self):
        return net(RareCoin())


class Teacher(nn.Module):
    """Averages itself into a teacher that no module holds, once a step."""

    def __init__(self, task):
        super().__init__()
        self.student = net(nn.Identity())
        self.held = [net(nn.Identity()).requires_grad_(False)]
        self.tasks, self.last = [task], -1

    def forward(self, x):
        if self.training and self.last != self.tasks[0].step:
            self.last = self.tasks[0].step
            pairs = zip(self.held[0].parameters(), self.student.parameters(), strict=True)
            with torch.no_grad():
                for kept, own in pairs:
                    kept.lerp_(own.to(kept.dtype), 0.1)
        return self.student(x) + self.held[0].to(x.dtype)(x)


class HeldTeacher(Tiny):
    def build_model(self):
        return Teacher(self)
