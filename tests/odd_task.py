"""A task that does something odd in its data or at a step."""

import ctypes
import os
import sys
from dataclasses import dataclass

import torch
from tiny import Items, Tiny


class Odd(Tiny):
    """Task that does what `how` names at step `at`, or in one example."""

    @dataclass
    class Options(Tiny.Options):
        how: str
        at: int

    def build_dataset(self, split):
        if self.options.how == "sys.exit in build_dataset":
            sys.exit(0)
        return OddItems(split, self.options.how)

    def augment(self, inputs, targets, random, train):
        return inputs, targets

    def train_step(self, batch):
        how, _, what = self.options.how.partition(": ")
        if self.step == self.options.at:
            if how == "sys.exit in train_step":
                sys.exit(0)
            elif how == "moves its directory":
                os.rename("runs", "moved")  # even while files in it are being written
            elif how == "forks":
                self._fork(what)
        return super().train_step(batch)

    def _fork(self, what):
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
        elif what == "sys.exit":
            sys.exit(0)
        elif what == "os._exit":
            os._exit(0)
        elif what == "raises":
            raise ValueError("in a child")


class OddItems(Items):
    """Dataset in which example 100 is odd, or all examples are."""

    def __init__(self, split, how):
        super().__init__(split)
        self.is_train = split == "train"
        self.how = how

    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        how, _, which = self.how.partition(" of ")
        if which == "all" or (self.is_train and index == 100):
            if how == "sys.exit":
                sys.exit(0)
            elif how == "os._exit":
                ctypes.CDLL(None)._exit(0)  # Python's own would be noticed
            elif how == "gradient":
                inputs = inputs * torch.ones(1, requires_grad=True)
            elif how == "None":
                return None
            elif how == "text":
                return inputs, "a"
        return inputs, targets
