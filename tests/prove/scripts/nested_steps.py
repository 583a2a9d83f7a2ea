"""Optimizers that call each other's step or fail in it, and TorchScript over watched functions."""

import copy
import functools
import inspect
import pickle

import torch
from torch.nn import functional as F


class OwnAdam(torch.optim.Adam):
    def step(self, closure=None):
        return super().step(closure)


class Failing(torch.optim.SGD):
    num_calls = 0

    def step(self, closure=None):
        self.num_calls += 1
        super().step()
        if self.num_calls == 2:
            raise ValueError


@torch.jit.script
def loss_of(outputs, targets):
    return F.cross_entropy(outputs, targets)


class Odd(torch.nn.Linear):
    def parameters(self, recurse=True):
        return list(super().parameters(recurse))


class Fixed(dict):
    def __setitem__(self, key, value):
        raise TypeError("it is fixed")


def main():
    torch.manual_seed(0)
    models = [Odd(4, 3), torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)]
    kinds = (OwnAdam, torch.optim.Adam, Failing)
    optimizers = [kind(model.parameters(), 0.1) for kind, model in zip(kinds, models, strict=True)]
    for _ in range(6):
        inputs, targets = torch.randn(4, 4), torch.randint(3, (4,))
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            try:
                optimizer.step()
            except ValueError:
                print("a step has failed")
    rows = [Fixed(x=torch.ones(2))]
    for row in torch.utils.data.DataLoader(rows, collate_fn=lambda batch: batch[0]):
        assert isinstance(row, Fixed)
    check_functions()
    torch.jit.script(models[1])(inputs)
    torch.jit.trace(models[1], inputs)(inputs)


@torch.jit.script
def gradients_of(value):
    torch.autograd.backward([value])


def check_functions():
    for function in (F.cross_entropy, F.mse_loss, torch.nn.utils.clip_grad_norm_, torch.save):
        assert pickle.loads(pickle.dumps(function)) is function
        assert copy.deepcopy(function) is function
        assert inspect.isfunction(function) and inspect.getsource(function).startswith("def ")
        assert functools.partial(function).func is function
        assert "args" not in inspect.signature(function).parameters


main()
