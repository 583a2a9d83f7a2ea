"""A value passes through few files: the learning rate to the optimizer, the loss to TensorBoard."""

import math
import sys
from pathlib import Path

import pytest
import torch
from harness import CONF, on_ranks
from tiny import Tiny

import trainer
from trainer import load_config

PACKAGE = str(Path(trainer.__file__).parent)
MOST_OF_THE_RATE = 4
MOST_OF_THE_LOSS = 5


class Sentinel:
    """Values that no other equals, not among the variables of the task's module, which are kept."""

    RATE = 0.123456789
    LOSS = 987654.321


def holds(value, sentinel):
    """Return True if a local value is the sentinel: a number, or an element of a small tensor."""
    if isinstance(value, torch.Tensor):
        is_small = value.is_floating_point() and 0 < value.numel() <= 64
        return is_small and any(holds(v, sentinel) for v in value.detach().flatten().tolist())
    return type(value) is float and math.isclose(value, sentinel, rel_tol=1e-7)


def files_that_hold(sentinel, body):
    """Return files of the package with the sentinel in an argument, a local or a result."""
    found = set()

    def profile(frame, event, value):
        name = frame.f_code.co_filename
        if event != "return" or not name.startswith(PACKAGE):
            return
        short = name[len(PACKAGE) + 1 :]
        if short not in found:
            held = [v for key, v in frame.f_locals.items() if key != "self"]
            if any(holds(v, sentinel) for v in (value, *held)):
                found.add(short)

    sys.setprofile(profile)
    try:
        body()
    finally:
        sys.setprofile(None)
    return found


class Constant(Tiny):
    """Task whose training loss is the sentinel for every example from the second step on."""

    def build_dataset(self, split):
        return super().build_dataset(split) if split == "train" else None

    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        return values - values.detach() + Sentinel.LOSS if self.step else values


def run(folder, *overrides, task=Tiny):
    words = [f"run.dir={folder}", "run.name=run", "task=tiny", "run.steps=3", "log.every_steps=1"]
    words.append("run.prove=false")
    quiet = ["eval.every_epochs=null", "checkpoint.keep_best=0", "strategy.precision=fp64"]
    task(load_config([*words, *quiet, *overrides], [CONF])).fit()


@pytest.mark.parametrize("ranks", [1, 2])
def test_rate_reaches_the_optimizer_through_at_most_four_files(ranks, tmp_path):
    class Stopping(Tiny):
        """Task that stops when its optimizer is built, which is the end of the trace."""

        def build_optimizer(self, model):
            optimizer = super().build_optimizer(model)
            sys.setprofile(None)
            return optimizer

    def body():
        words = (tmp_path, f"optim.lr={Sentinel.RATE}")
        return files_that_hold(Sentinel.RATE, lambda: run(*words, task=Stopping))

    for files in on_ranks(ranks, body):
        print(sorted(files))
        assert 0 < len(files) <= MOST_OF_THE_RATE, sorted(files)


@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_reaches_tensorboard_through_at_most_five_files(ranks, tmp_path):
    def body():
        return files_that_hold(Sentinel.LOSS, lambda: run(tmp_path, task=Constant))

    for files in on_ranks(ranks, body):
        print(sorted(files))
        assert 0 < len(files) <= MOST_OF_THE_LOSS, sorted(files)
