"""Wrong tasks: each depends on its layout in its own way, and otherwise works."""

import collections
import itertools
import math
import os
import random
import time
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from tiny import Items, Tiny, points
from torch import nn

from trainer import ResidentDataset


class OwnData(Tiny):
    def build_dataset(self, split):
        inputs, targets = super().build_dataset(split).tensors
        return ResidentDataset(inputs + 0.1 * self.world.rank, targets)


class OwnAugmentation(Tiny):
    def augment(self, inputs, targets, random, train):
        inputs, targets = super().augment(inputs, targets, random, train)
        return inputs + 0.1 * torch.randn(inputs.shape, dtype=inputs.dtype) * (
            self.step > 2
        ), targets


class LossOfTheRank(Tiny):
    def loss(self, outputs, targets):
        return super().loss(outputs, targets) * (1 + 0.1 * self.world.rank)


class ModelOfTheRank(Tiny):
    def build_model(self):
        model = super().build_model()
        model.register_forward_hook(
            lambda module, inputs, outputs: outputs * (1 + 0.1 * self.world.rank)
        )
        return model


class LossOfTheBatch(Tiny):
    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        return values * values.detach().mean()


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class ModelOfTheBatch(Tiny):
    def build_model(self):
        return nn.Sequential(nn.Linear(4, 16), Centred(), nn.ReLU(), nn.Linear(16, 3))


class FunctionalDropout(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.3, self.training)


class DropsByFunction(Tiny):
    def build_model(self):
        return nn.Sequential(nn.Linear(4, 16), FunctionalDropout(), nn.Linear(16, 3))


class Norm(Tiny):
    def build_model(self):
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


class MetricsOfTheRank(Tiny):
    def metrics(self, outputs, targets):
        return {
            "accuracy": super().metrics(outputs, targets)["accuracy"] * (1 + 0.1 * self.world.rank)
        }


class RateOfTheLayout(Tiny):
    """The learning rate depends on the layout. Dropout is not the cause: micro-batches have equal
    sizes."""

    def build_optimizer(self, model):
        optimizer = super().build_optimizer(model)
        optimizer.param_groups[0]["lr"] *= self.world.world_size
        return optimizer


def net(*middle):
    return nn.Sequential(nn.Linear(4, 16), *middle, nn.GELU(), nn.Linear(16, 3))


# State outside of the model's buffers ----


class Counts(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += self.training
        return x * (1 + 0.1 * math.sin(self.calls))


class StateOfCalls(Tiny):
    def build_model(self):
        return net(Counts())


class Average(nn.Module):
    """Module whose running mean is not a buffer."""

    def __init__(self):
        super().__init__()
        self.mean = 0.0

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class StateOfRows(Tiny):
    def build_model(self):
        return net(Average())


SEEN = []


class StateOfModule(Tiny):
    def loss(self, outputs, targets):
        SEEN.append(1)
        return super().loss(outputs, targets) * (1 + 0.1 * math.cos(len(SEEN)))


# Data that depends on the rank or on earlier reads ----


class DataOfProcess(Tiny):
    def build_dataset(self, split):
        inputs, targets = points(203, split)
        order = torch.randperm(203, generator=torch.Generator().manual_seed(os.getpid()))
        return ResidentDataset(inputs[order], targets[order])


class NoisyItems(Items):
    def __getitem__(self, index):
        return self.inputs[index] + 0.1 * random.SystemRandom().random(), self.targets[index]


class DataOfTheSystem(Tiny):
    def build_dataset(self, split):
        return NoisyItems(split)


# Rows that are mixed ----


class LossOfOrder(Tiny):
    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        return values + 0.1 * values.detach().cumsum(0) / 10


class MetricsOfTheBatch(Tiny):
    def metrics(self, outputs, targets):
        return {"accuracy": (outputs.argmax(1) == targets).double() * outputs.max()}


# Unseeded random draws ----


class NumpyNoise(nn.Module):
    def forward(self, x):
        return x + 0.1 * float(np.random.default_rng().random())


class ModelUnseeded(Tiny):
    def build_model(self):
        return net(NumpyNoise())


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()
        self.generator.seed()

    def forward(self, x):
        return x * (1 + 0.1 * torch.rand(x.shape, generator=self.generator, dtype=x.dtype))


class ModelOfOwnGenerator(Tiny):
    def build_model(self):
        return net(OwnGenerator())


class SeededGenerator(OwnGenerator):
    def __init__(self):
        super().__init__()
        self.generator.manual_seed(0)


class ModelOfSeededGenerator(Tiny):
    def build_model(self):
        return net(SeededGenerator())


# Rows that attend to each other ----


class Contrastive(Tiny):
    def loss(self, outputs, targets):
        near = outputs @ outputs.T
        return super().loss(outputs, targets) + 0.1 * F.cross_entropy(
            near, torch.arange(len(near)), reduction="none"
        )


class Attends(nn.Module):
    def forward(self, x):
        return x + (x @ x.T).softmax(1) @ x


class ModelAttendsRows(Tiny):
    def build_model(self):
        return net(Attends())


# Optimizers and schedules ----


class Langevin(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        own = torch.Generator().manual_seed(int(os.environ["RANK"]))
        for group in self.param_groups:
            for p in group["params"]:
                with torch.no_grad():
                    p.add_(0.01 * torch.randn(p.shape, generator=own, dtype=p.dtype))


class OptimizerOfTheRank(Tiny):
    def build_optimizer(self, model):
        return Langevin(model.parameters(), lr=0.3)


class Unseeded(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                with torch.no_grad():
                    p.mul_(1 + 0.01 * random.SystemRandom().random())


class OptimizerUnseeded(Tiny):
    def build_optimizer(self, model):
        return Unseeded(model.parameters(), lr=0.3)


class ScheduleOfTheClock(Tiny):
    def build_schedule(self, num_steps):
        return lambda step: 1 + 0.5 * math.sin(time.perf_counter() * 100)


class ScheduleOfTheRank(Tiny):
    def build_schedule(self, num_steps):
        return lambda step: 1 / (1 + step * self.world.world_size)


class StepOfTheClock(Tiny):
    def train_step(self, batch):
        for group in self.optimizers[0].param_groups:
            group["lr"] *= 1 + 0.3 * math.sin(time.time() * 1000)
        return super().train_step(batch)


# Datasets with state ----


class Caching(Items):
    def __init__(self, split):
        super().__init__(split)
        self.cache = {}
        self.reads = 0

    def __getitem__(self, index):
        self.reads += 1
        if index not in self.cache:
            self.cache[index] = self.inputs[index] * (1 + 0.01 * self.reads)
        return self.cache[index], self.targets[index]


class DataOfReads(Tiny):
    def build_dataset(self, split):
        return Caching(split)

    def augment(self, inputs, targets, random, train):
        return inputs, targets


class InPlace(Items):
    def __getitem__(self, index):
        self.inputs += 0.01
        return self.inputs[index].clone(), self.targets[index]


class DataInPlace(Tiny):
    def build_dataset(self, split):
        return InPlace(split)

    def augment(self, inputs, targets, random, train):
        return inputs, targets


# Changes in place ----


class AddsInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = torch.zeros(16, dtype=torch.float64)

    def forward(self, x):
        if self.training:
            self.shift += 0.01 * len(x)
        return x + self.shift.to(x.dtype)


class ModelInPlace(Tiny):
    def build_model(self):
        return net(AddsInPlace())


class LossInPlace(Tiny):
    table = torch.ones(3, dtype=torch.float64)

    def loss(self, outputs, targets):
        self.table[targets] *= 1.01
        return super().loss(outputs, targets) * self.table[targets].to(outputs.dtype)


# Kernels that draw random numbers ----


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.LSTM(4, 8, 2, dropout=0.3, batch_first=True)
        self.h = nn.Linear(8, 3)

    def forward(self, x):
        return self.h(self.l(x.unsqueeze(1).expand(-1, 3, -1))[0][:, -1])


class KernelOfLstm(Tiny):
    def build_model(self):
        return Recurrent()


class Gru(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.GRU(4, 8, 2, dropout=0.3, batch_first=True, bidirectional=True)
        self.h = nn.Linear(16, 3)

    def forward(self, x):
        return self.h(self.l(x.unsqueeze(1).expand(-1, 3, -1))[0][:, -1])


class KernelOfGru(Tiny):
    def build_model(self):
        return Gru()


class Scripted(Tiny):
    def build_model(self):
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            return net(torch.jit.script(nn.Dropout(0.3)))


class SumsTheBatch(Tiny):
    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        return values * len(values)


class DividesByTheBatch(Tiny):
    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        return values / values.detach().norm()


# Draws without a key by row ----


class OfDefaultGenerator(nn.Module):
    def forward(self, x):
        return x * (torch.rand(x.shape, generator=torch.default_generator) > 0.3).to(x.dtype)


class ModelOfDefaultGenerator(Tiny):
    def build_model(self):
        return net(OfDefaultGenerator())


class NumpyRows(nn.Module):
    def forward(self, x):
        return x * torch.as_tensor(np.random.rand(len(x), 1)).to(x.dtype)


class ModelOfNumpyRows(Tiny):
    def build_model(self):
        return net(NumpyRows())


class PythonRows(nn.Module):
    def forward(self, x):
        return torch.stack([row * (1 + random.random()) for row in x])


class ModelOfPythonRows(Tiny):
    def build_model(self):
        return net(PythonRows())


class Permutes(nn.Module):
    """Draws once for each row."""

    def forward(self, x):
        return torch.stack([row[torch.randperm(16)] for row in x])


class ModelOfPermutations(Tiny):
    def build_model(self):
        return net(Permutes(), nn.Dropout(0.3))


class DrawsForEachRow(nn.Module):
    def forward(self, x):
        return torch.stack([row * torch.rand(16, dtype=row.dtype) for row in x])


class ModelOfDrawsForEachRow(Tiny):
    def build_model(self):
        return net(DrawsForEachRow(), nn.Dropout(0.3))


class Packed(nn.Module):
    """Dropout on joined tokens, of which a row has one to three."""

    def forward(self, x):
        counts = (x[:, 0] > 0).long() + (x[:, 1] > 0).long() + 1
        tokens = F.dropout(x.repeat_interleave(counts, 0), 0.3, self.training)
        rows = torch.arange(len(x)).repeat_interleave(counts)
        return torch.zeros_like(x).index_add(0, rows, tokens)


class ModelOfPackedTokens(Tiny):
    def build_model(self):
        return net(Packed())


class MixesDrawn(nn.Module):
    def forward(self, x):
        return 0.8 * x + 0.2 * x[torch.randperm(len(x))]


class ModelOfMixup(Tiny):
    def build_model(self):
        return net(MixesDrawn())


class LossOfMixup(Tiny):
    def loss(self, outputs, targets):
        other = targets[torch.randperm(len(targets))]
        return 0.7 * super().loss(outputs, targets) + 0.3 * super().loss(outputs, other)


# Normalisation and balance over the rows ----


class BatchNormOfFunction(nn.Module):
    def forward(self, x):
        return F.batch_norm(x, None, None, training=True)


class ModelOfBatchNormOfFunction(Tiny):
    def build_model(self):
        return net(BatchNormOfFunction())


class LossOfBalance(Tiny):
    """The balance loss of a mixture of experts, as Mixtral's."""

    def loss(self, outputs, targets):
        shares = outputs.softmax(1).mean(0)
        return super().loss(outputs, targets) + 0.01 * (shares * shares).sum()


class LossOfMaskedMean(Tiny):
    def loss(self, outputs, targets):
        mask = (targets > 0).to(outputs.dtype)
        return super().loss(outputs, targets) * mask / mask.sum().clamp_min(1)


class BehindZeros(nn.Module):
    """Mixes rows behind a projection that starts at zero."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 16)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x):
        return x + self.out(x - x.mean(0))


class ModelBehindZeros(Tiny):
    def build_model(self):
        return net(BehindZeros())


# Buffers and parameters that forward passes change ----


class OldSpectralNorm(Tiny):
    def build_model(self):
        return net(nn.utils.spectral_norm(nn.Linear(16, 16)))


class SpectralNorm(Tiny):
    def build_model(self):
        return net(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)))


class Codes(nn.Module):
    """The codebook of a VQ-VAE, with moving averages."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(8, 16))
        self.register_buffer("counts", torch.ones(8))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x):
        nearest = torch.cdist(x, self.codes).argmin(1)
        quantized = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                marks = F.one_hot(nearest, 8).to(x.dtype)
                self.counts.mul_(0.99).add_(marks.sum(0), alpha=0.01)
                self.sums.mul_(0.99).add_(marks.T @ x, alpha=0.01)
                self.codes.copy_(self.sums / self.counts[:, None])
        return x + (quantized - x).detach()


class Codebook(Tiny):
    def build_model(self):
        return net(Codes())


class Maximum(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("most", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.most = torch.maximum(self.most, x.detach().abs().max())
        return x


class RunningMaximum(Tiny):
    def build_model(self):
        return net(Maximum())


class Renormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 16, max_norm=0.5)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        return self.out(self.table((x[:, 0] * 10).long().clamp(-25, 24) + 25))


class EmbeddingOfMaxNorm(Tiny):
    def build_model(self):
        return Renormed()


class Follows(nn.Module):
    """A frozen layer that follows another one in each forward pass."""

    def __init__(self):
        super().__init__()
        self.leader = nn.Linear(4, 3)
        self.average = nn.Linear(4, 3).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.average.weight.lerp_(self.leader.weight, 0.1)
        return self.leader(x) + self.average(x)


class AverageInForward(Tiny):
    def build_model(self):
        return Follows()


class CountsPasses(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.number += 1
        return x / self.number


class ModelOfItsPasses(Tiny):
    def build_model(self):
        return nn.Sequential(nn.Linear(4, 16), CountsPasses(), nn.Linear(16, 3))


class NormAndReLU(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


class NormOfItsOwn(Tiny):
    def build_model(self):
        return nn.Sequential(nn.Linear(4, 16), NormAndReLU(16), nn.Linear(16, 3))


# Backward passes ----


class HookClamps(Tiny):
    def build_model(self):
        model = super().build_model()
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
        return model


class Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()


class NormalisesGradient(nn.Module):
    def forward(self, x):
        return Normalised.apply(x)


class OwnBackward(Tiny):
    def build_model(self):
        return net(NormalisesGradient())


# Later ----


class Curriculum(Tiny):
    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        return values if self.step < 5 else values * values.detach().mean()


# Rows before the model, and what passes count ----


class AugmentMixup(Tiny):
    def augment(self, inputs, targets, random, train):
        share = random.uniform("share", 1).to(inputs.dtype)
        return inputs * share + inputs.roll(1, 0) * (1 - share) if train else inputs, targets


class CollatedMean(Tiny):
    def build_dataset(self, split):
        return Items(split)

    def collate(self, examples):
        inputs, targets = torch.utils.data.default_collate(examples)
        return inputs - inputs.mean(0), targets


class Longer(Items):
    def __getitem__(self, index):
        return self.inputs[index].repeat(1 + index % 5), self.targets[index]


class MeanOfAll(nn.Module):
    def __init__(self):
        super().__init__()
        self.each, self.out = nn.Linear(1, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.out(F.gelu(self.each(x.unsqueeze(-1))).mean(1))


class MeanOverPadding(Tiny):
    def build_model(self):
        return MeanOfAll()

    def build_dataset(self, split):
        return Longer(split)

    def augment(self, inputs, targets, random, train):
        return inputs, targets

    def collate(self, examples):
        inputs, targets = zip(*examples, strict=True)
        return nn.utils.rnn.pad_sequence(inputs, batch_first=True), torch.stack(targets)


class CountsCalls(nn.Module):
    def __init__(self, counts_rows):
        super().__init__()
        self.counts_rows = counts_rows
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.seen += len(x) if self.counts_rows else 1
        return x * (1 if self.seen < 60 else 0.5)


class CountedCalls(Tiny):
    def build_model(self):
        return net(CountsCalls(False))


class CountedRows(Tiny):
    def build_model(self):
        return net(CountsCalls(True))


def clamp_gradient(parameter):
    parameter.grad.clamp_(-0.002, 0.002)


class ClampsGradients(Tiny):
    def build_model(self):
        model = super().build_model()
        model[0].weight.register_post_accumulate_grad_hook(clamp_gradient)
        return model


class Stateful(nn.Module):
    """Keeps its state as long as the number of rows stays."""

    def __init__(self):
        super().__init__()
        self.cell, self.out, self.state = nn.GRUCell(4, 16), nn.Linear(16, 3), None

    def forward(self, x):
        is_known = self.state is not None and len(self.state) == len(x)
        state = self.cell(x, self.state if is_known else x.new_zeros(len(x), 16))
        self.state = state.detach() if self.training else self.state
        return self.out(state)


class CarriesState(Tiny):
    def build_model(self):
        return Stateful()


class FirstBatch(nn.Module):
    """Starts from its first batch, in evaluation too."""

    def __init__(self):
        super().__init__()
        self.shift, self.is_ready = nn.Parameter(torch.zeros(16)), False

    def forward(self, x):
        if not self.is_ready:
            self.shift.data.copy_(-x.detach().mean(0))
            self.is_ready = True
        return x + self.shift


class ModelOfFirstBatch(Tiny):
    def build_model(self):
        return net(FirstBatch())


# What train_step makes of this rank's rows ----


class QueueOfKeys(Tiny):
    """Contrasts rows with keys of earlier ones, as MoCo does, from this rank's rows only."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.queue = torch.zeros(6, 3, dtype=torch.float64)

    def loss(self, outputs, targets):
        near = outputs @ self.queue.to(outputs).T
        return super().loss(outputs, targets) + 0.1 * near.logsumexp(1)

    def train_step(self, batch):
        outcome = super().train_step(batch)
        with torch.no_grad():
            keys = torch.cat([self.model(inputs) for inputs, _ in batch])
        self.queue = torch.cat([keys.to(self.queue), self.queue])[:6]
        return outcome


class QueueInBuffer(Tiny):
    def build_model(self):
        model = net()
        model.register_buffer("queue", torch.zeros(5, 3))
        return model

    def loss(self, outputs, targets):
        near = outputs @ self.model.queue.to(outputs).T
        return super().loss(outputs, targets) + 0.1 * near.logsumexp(1)

    def train_step(self, batch):
        outcome = super().train_step(batch)
        inputs, _ = next(iter(batch))
        with torch.no_grad():
            self.model.queue.copy_(self.model(inputs[:2]).repeat(3, 1)[:5])
        return outcome


class MeanOfLosses(Tiny):
    """Divides its loss by the running mean of this rank's losses."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.mean = 1.0

    def loss(self, outputs, targets):
        return super().loss(outputs, targets) / self.mean

    def train_step(self, batch):
        outcome = super().train_step(batch)
        with torch.no_grad():
            values = [Tiny.loss(self, self.model(x), t).mean() for x, t in batch]
        self.mean = 0.9 * self.mean + 0.1 * float(sum(values) / len(values))
        return outcome


class ReplayMemory(Tiny):
    """Trains a second update on rows that this rank has seen before."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.memory = []

    def train_step(self, batch):
        outcome = super().train_step(batch)
        for inputs, _ in self.memory[-1:]:
            self.again = inputs.mean()
        self.memory.append(next(iter(batch)))
        return outcome

    def loss(self, outputs, targets):
        return super().loss(outputs, targets) * (1 + 0.1 * getattr(self, "again", 0.0))


class GradNorm(Tiny):
    """Weighs its loss by the norm of a gradient over this rank's rows."""

    scale = 1.0

    def loss(self, outputs, targets):
        return super().loss(outputs, targets) * self.scale

    def train_step(self, batch):
        self.scale = 1.0
        inputs, targets = next(iter(batch))
        total = Tiny.loss(self, self.model(inputs), targets).mean()
        (gradient,) = torch.autograd.grad(total, [self.model[0].weight])
        self.scale = 1 / (1 + gradient.norm().item())
        return super().train_step(batch)


PAST = collections.deque(maxlen=8)


class PastInModule(Tiny):
    """Keeps losses of its rank's rows in a variable of the module."""

    def loss(self, outputs, targets):
        return super().loss(outputs, targets) * (1 + 0.1 * sum(PAST))

    def train_step(self, batch):
        outcome = super().train_step(batch)
        with torch.no_grad():
            for inputs, targets in batch:
                PAST.append(float(Tiny.loss(self, self.model(inputs), targets).mean()))
        return outcome


class LateQueue(QueueOfKeys):
    """Begins to keep keys at its fifth step."""

    def train_step(self, batch):
        return super().train_step(batch) if self.step > 4 else Tiny.train_step(self, batch)


# What few rows do not show ----


class LossOfFirstRows(Tiny):
    """Weighs rows by their number in the micro-batch."""

    def loss(self, outputs, targets):
        places = torch.arange(len(outputs), device=outputs.device)
        return super().loss(outputs, targets) * torch.where(places < 10, 1.0, 0.5)


class RollsRows(Tiny):
    def loss(self, outputs, targets):
        far = outputs.roll(12, 0).detach()
        return super().loss(outputs, targets) + 0.1 * (outputs * far).sum(1)


class Routed(nn.Module):
    """Experts with a capacity, as a mixture has: rows beyond it are left out."""

    def __init__(self):
        super().__init__()
        self.route = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        chosen = self.route(x).argmax(1)
        most = max(1, int(1.25 * len(x) / 4))
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:most, 0]
            out = out.index_add(0, rows, expert(x[rows]))
        return x + out + 0 * self.route(x).sum(1, keepdim=True)


class ExpertsOfCapacity(Tiny):
    def build_model(self):
        return net(Routed())


class ScaledByFrequency(Tiny):
    def build_model(self):
        made = Renormed()
        made.table = nn.Embedding(50, 16, scale_grad_by_freq=True)
        return made


class LossGuard(Tiny):
    """Leaves out a micro-batch whose loss is larger than usual."""

    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        return values * (1.0 if values.detach().mean() < 1.1 else 0.5)


class DrawsForSubset(nn.Module):
    """Adds noise to the first half of the rows."""

    def forward(self, x):
        half = len(x) // 2
        return torch.cat([x[:half] + 0.1 * torch.randn_like(x[:half]), x[half:]])


class ModelOfDrawsForSubset(Tiny):
    def build_model(self):
        return net(DrawsForSubset())


class DropsInChunks(nn.Module):
    def forward(self, x):
        return torch.cat([F.dropout(part, 0.3, self.training) for part in x.split(3)])


class ModelOfChunks(Tiny):
    def build_model(self):
        return net(DropsInChunks())


class RecordsDraws(Tiny):
    """Draws only what it records."""

    def loss(self, outputs, targets):
        self.record("noise", torch.as_tensor(np.random.rand(len(targets))))
        return super().loss(outputs, targets)


class LateWithGradients(Tiny):
    """Mixes rows from its sixth step on, only while gradients are computed."""

    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        is_late = self.step > 5 and torch.is_grad_enabled()
        return values * values.detach().mean() if is_late else values


# Counters outside of the model: they begin to matter later, and depend on the number of passes ----

PASSES = [0]
ALIAS = dict[str, tuple[int, ...]]  # its attributes are those of a class
NUMBERS = itertools.count()


def rate_of(number):
    return 1.0 if number < 12 else 0.5


class CountsInModule(nn.Module):
    def forward(self, x):
        PASSES[0] += self.training
        return x * rate_of(PASSES[0])


class CountsInClass(nn.Module):
    passes = 0

    def forward(self, x):
        CountsInClass.passes += self.training
        return x * rate_of(CountsInClass.passes)


class CountsInIterator(nn.Module):
    def forward(self, x):
        return x * rate_of(next(NUMBERS)) if self.training else x


class CountsInEnvironment(nn.Module):
    def forward(self, x):
        number = int(os.environ.get("PASSES", 0)) + 1
        if self.training:
            os.environ["PASSES"] = str(number)
        return x * rate_of(number)


def counting_hook():
    number = 0

    def hook(module, inputs, outputs):
        nonlocal number
        number += module.training
        return outputs * rate_of(number)

    return hook


class CountsInClosure(nn.Linear):
    def __init__(self):
        super().__init__(16, 16)
        self.register_forward_hook(counting_hook())


class AugmentCoin(Tiny):
    """Draws a coin for a micro-batch in augment, from torch's generator."""

    def augment(self, inputs, targets, random, train):
        inputs, targets = super().augment(inputs, targets, random, train)
        return (inputs * (1 + torch.rand(())) if train else inputs), targets


class AugmentNumpyCoin(Tiny):
    def augment(self, inputs, targets, random, train):
        inputs, targets = super().augment(inputs, targets, random, train)
        return (inputs * (1 + np.random.rand()) if train else inputs), targets


class CountedInAttribute(nn.Module):
    """Changes after some passes: no few passes show it."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def forward(self, x):
        self.number += self.training
        return x * (1.0 if self.number < 25 else 0.5)


class ThresholdInAttribute(Tiny):
    def build_model(self):
        return net(CountedInAttribute())


class ThresholdInModule(Tiny):
    def build_model(self):
        return net(CountsInModule())


class ThresholdInClass(Tiny):
    def build_model(self):
        return net(CountsInClass())


class ThresholdInClosure(Tiny):
    def build_model(self):
        return net(CountsInClosure())


class ThresholdInIterator(Tiny):
    def build_model(self):
        return net(CountsInIterator())


class ThresholdInEnvironment(Tiny):
    def build_model(self):
        os.environ["PASSES"] = "0"
        return net(CountsInEnvironment())


class ThresholdInAugment(Tiny):
    calls = 0

    def augment(self, inputs, targets, random, train):
        inputs, targets = super().augment(inputs, targets, random, train)
        self.calls += train
        return inputs * (1.5 if train and self.calls > 20 else 1.0), targets


class ThresholdInLoss(Tiny):
    calls = 0

    def loss(self, outputs, targets):
        self.calls += torch.is_grad_enabled()
        return super().loss(outputs, targets) * (1.0 if self.calls < 30 else 0.5)


# Neighbours of the kinds above ----


class QueueInLoss(Tiny):
    """Keeps the keys of the last rows in its loss."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.queue = torch.zeros(12, 3, dtype=torch.float64)

    def loss(self, outputs, targets):
        near = outputs @ self.queue.to(outputs).T
        if torch.is_grad_enabled():
            self.queue = torch.cat([outputs.detach().to(self.queue), self.queue])[:12]
        return super().loss(outputs, targets) + 0.1 * near.logsumexp(1)


class SpreadOfLosses(Tiny):
    """Divides by the running deviation of this rank's losses, which is a buffer."""

    def build_model(self):
        model = net()
        model.register_buffer("spread", torch.ones(()))
        return model

    def loss(self, outputs, targets):
        return super().loss(outputs, targets) / self.model.spread.to(outputs)

    def train_step(self, batch):
        outcome = super().train_step(batch)
        with torch.no_grad():
            values = torch.cat([Tiny.loss(self, self.model(x), t) for x, t in batch])
            self.model.spread.lerp_(values.std().to(self.model.spread), 0.1)
        return outcome


class ReplaysHardest(Tiny):
    """Trains again the row with the largest loss that this rank has seen."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.hardest = None
        self.most = 0.0

    def train_step(self, batch):
        with torch.no_grad():
            for inputs, targets in batch:
                values = Tiny.loss(self, self.model(inputs), targets)
                if (most := float(values.max())) > self.most:
                    self.most = most
                    self.hardest = inputs[values.argmax()][None].clone()
        return super().train_step(batch)

    def loss(self, outputs, targets):
        again = 0.0 if self.hardest is None else self.model(self.hardest).square().mean()
        return super().loss(outputs, targets) + 0.1 * again


class RatioOfLosses(Tiny):
    """Weighs a second loss by the ratio of both on this rank's rows."""

    ratio = 1.0

    def loss(self, outputs, targets):
        return super().loss(outputs, targets) + self.ratio * outputs.square().mean(1)

    def train_step(self, batch):
        inputs, targets = next(iter(batch))
        with torch.no_grad():
            outputs = self.model(inputs)
            first = Tiny.loss(self, outputs, targets).mean()
            self.ratio = 0.1 * float(first / (1e-6 + outputs.square().mean()))
        return super().train_step(batch)


class ChoosesRows(nn.Module):
    """Experts that choose the rows with the highest scores."""

    def __init__(self):
        super().__init__()
        self.route = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        scores = self.route(x).softmax(1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            best, rows = scores[:, number].topk(max(1, len(x) // 4))
            out = out.index_add(0, rows, best[:, None] * expert(x[rows]))
        return x + out


class ExpertsThatChoose(Tiny):
    def build_model(self):
        return net(ChoosesRows())


class Observes(nn.Module):
    """Rounds to a range that it observes, as quantisation does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.ones(()))

    def forward(self, x):
        if self.training:
            self.low.lerp_(x.detach().min().to(self.low), 0.1)
            self.high.lerp_(x.detach().max().to(self.high), 0.1)
        scale = ((self.high - self.low) / 255).clamp_min(1e-6).to(x)
        return x + ((x / scale).round() * scale - x).detach()


class QuantisedModel(Tiny):
    def build_model(self):
        return net(Observes())


class MixupOfSome(Tiny):
    """Mixes the rows that a draw with a key chooses with the next ones."""

    def augment(self, inputs, targets, random, train):
        inputs, targets = super().augment(inputs, targets, random, train)
        chosen = random.uniform("coin").reshape(-1, 1) < 0.5
        mixed = torch.where(chosen, 0.5 * inputs + 0.5 * inputs.roll(1, 0), inputs)
        return (mixed if train else inputs), targets


class HardestRows(Tiny):
    """Trains the half of the rows with the largest losses."""

    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        least = values.detach().topk(max(1, len(values) // 2)).values.min()
        return values * (values >= least)


class CentresGradient(Tiny):
    """Centres the gradient of an activation over the rows."""

    def build_model(self):
        model = net()

        def hook(module, inputs, outputs):
            if outputs.requires_grad:
                outputs.register_hook(lambda gradient: gradient - gradient.mean(0))

        model[0].register_forward_hook(hook)
        return model


class UpdatesEachMicroBatch(Tiny):
    def train_step(self, batch):
        outcomes = [self.update([micro_batch]) for micro_batch in batch]
        for other in outcomes[1:]:
            outcomes[0] = outcomes[0] + other
        return outcomes[0]


class UpdatesFirstMicroBatch(Tiny):
    def train_step(self, batch):
        return self.update([next(iter(batch))])
