"""Hooks: everything that is watched once the script has imported torch, and each optimizer step."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from . import LAUNCHED, calls
from .calls import CONTRIBUTIONS, random_state, watch_contributions, watch_criteria
from .data_loaders import PASSES, READS, watch_loaders, watch_reads
from .digests import encode
from .exchanges import EXCHANGES, watch_exchanges
from .parameters import (
    MODES,
    Part,
    Rest,
    describe_models,
    find_part,
    flat_parts,
    name_parameters,
    roots,
    sketch_of,
)
from .updates import (
    CLIPPING,
    LastWeights,
    settings_of_groups,
    watch_clipping,
    watch_scaling,
    watch_schedules,
)
from .wrapping import LOG, SETTINGS, meet, quietly, watch, watch_builtins


def whoami() -> tuple[int, int]:
    """Return (rank, world size): of the process group, or as the launcher said."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, size = (os.environ.get(name, LAUNCHED[name]) for name in ("RANK", "WORLD_SIZE"))
    return int(rank or 0), int(size or 1)


def _number(rate: Any) -> float | None:
    return float(rate) if isinstance(rate, (int, float, torch.Tensor)) else None


# The code that calls the hooks, in `step` of each class of optimizers.
STEP = torch.optim.Optimizer.profile_hook_step(lambda _: None).__code__


def is_within_step() -> bool:
    """Return True if the step whose hooks are called is a part of another one.

    A class may call `step` of the class that it inherits from, or of an optimizer that it wraps. An
    outer step that has raised an error is not on the stack any more.
    """
    frame: Any = sys._getframe()
    count = 0
    while frame is not None:
        count += frame.f_code is STEP
        frame = frame.f_back
    return count > 1


class Steps:
    """The optimizer steps of this process."""

    def __init__(self) -> None:
        # by id of an optimizer, which the next one may get when it is gone
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._counts: list[int] = []
        self._parameters: list[list[torch.Tensor]] = []
        self._parts: dict[int, Part] = {}
        self._gradients: dict[str, Any] = {}
        self._settings: list[Any] = []  # of groups, by optimizer
        self._last: list[LastWeights] = []  # by optimizer
        self._rest = Rest()
        self._start = time.perf_counter()

    @quietly
    def before(self, optimizer: Any, arguments: Any, options: Any) -> Any:
        """Take the gradients; with a closure, as soon as it has computed them."""
        if is_within_step():
            return None
        self.begin(optimizer)
        closure = options.get("closure") or (arguments[1] if len(arguments) > 1 else None)
        if not callable(closure):
            self.take_gradients(optimizer)
            return None
        is_taken = False

        def noting() -> Any:
            nonlocal is_taken
            value = closure()
            if not is_taken:
                is_taken = True
                self.take_gradients(optimizer)
            return value

        if "closure" in options:
            return arguments, {**options, "closure": noting}
        return (arguments[0], noting, *arguments[2:]), options

    def number_of(self, optimizer: Any) -> int:
        """Return the number of an optimizer, in the order of their first steps."""
        known_as, optimizer_number = self._numbers.get(id(optimizer), (None, 0))
        if known_as is None or known_as() is not optimizer:
            optimizer_number = len(self._counts)
            self._numbers[id(optimizer)] = (weakref.ref(optimizer), optimizer_number)
        return optimizer_number

    @quietly
    def begin(self, optimizer: Any) -> None:
        """Number the step, and end the process if enough steps were made."""
        if not LOG.is_open:
            LOG.open(*whoami())
        optimizer_number = self.number_of(optimizer)
        if optimizer_number == len(self._counts):
            self._counts.append(0)
            self._parameters.append([])
            self._settings.append(None)
            self._last.append(LastWeights())
        done = self._counts[optimizer_number]
        if done == SETTINGS["kill"]:
            meet(*whoami())
            (Path(SETTINGS["folder"]) / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if done == SETTINGS["steps"]:
            self.leave()
        mine = [each for group in optimizer.param_groups for each in group["params"]]
        if list(map(id, mine)) != list(map(id, self._parameters[optimizer_number])):
            self._parameters[optimizer_number] = mine
            self.describe(optimizer, optimizer_number)
            changed = (
                [] if done else [n for n, p in enumerate(mine) if CONTRIBUTIONS.has_changed(p)]
            )
        else:
            changed = self.find_changes(optimizer_number)
        if changed:
            LOG.add("changed", optimizer=optimizer_number, places=changed)

    def find_changes(self, optimizer_number: int) -> list[int]:
        """Return the parameters that were changed since the last step of their optimizer."""
        mine = self._parameters[optimizer_number]
        last = self._last[optimizer_number]
        return [n for n in last.suspects(mine) if last.is_changed(n, self.sketch(mine[n], mine[n]))]

    def leave(self) -> None:
        """End the process as a finished script does."""
        meet(*whoami())
        sys.stdout.flush()
        sys.stderr.flush()
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(0)

    def describe(self, optimizer: Any, optimizer_number: int) -> None:
        """Note names, shapes and values of an optimizer's parameters before a step."""
        mine = self._parameters[optimizer_number]
        every = roots()
        MODES.name(every)
        self._rest.watch(every, [each for parameters in self._parameters for each in parameters])
        self._parts |= flat_parts()
        parts = [find_part(each) or self._parts.get(id(each)) for each in mine]
        LOG.add(
            "optimizer",
            number=optimizer_number,
            kind=type(optimizer).__name__,
            names=name_parameters(mine),
            shapes=[
                list(p.shape if p else each.shape) for each, p in zip(mine, parts, strict=True)
            ],
            parts=[part and [part.local, part.offset, part.is_partial] for part in parts],
            dtypes=sorted({str(each.dtype) for each in mine}),
            tags=[CONTRIBUTIONS.tag(each) for each in mine],
            weights=encode([self.sketch(each, each) for each in mine]),
            seed=torch.initial_seed(),
            flags={
                "float32_matmul_precision": torch.get_float32_matmul_precision(),
                "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
            },
            rest=self._rest.num_elements,
            has_group=dist.is_available() and dist.is_initialized(),
            **describe_models(every, mine),
        )

    def sketch(self, parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Return what this rank adds to the sketch of a parameter, or of its gradient."""
        return sketch_of(tensor, self._parts.get(id(parameter)))

    @quietly
    def take_gradients(self, optimizer: Any) -> None:
        """Take the gradients as the update will use them, and the learning rates."""
        scale = getattr(optimizer, "grad_scale", None)  # of a fused optimizer, which divides by it
        factor = 1.0 if scale is None else 1.0 / float(scale)
        mine = self._parameters[self.number_of(optimizer)]
        gradients = [each.grad for each in mine]
        sketches = [
            None if gradient is None else self.sketch(each, gradient) * factor
            for each, gradient in zip(mine, gradients, strict=True)
        ]
        groups = optimizer.param_groups
        rates = [_number(group.get("lr")) for group in groups for _ in group["params"]]
        rest = self._rest.sketch()
        frozen = [index for index, each in enumerate(mine) if not each.requires_grad]
        self._gradients = {"gradients": encode(sketches), "rates": rates, "rest": encode([rest])[0]}
        self._gradients |= {"frozen": frozen} if frozen else {}
        if CLIPPING.before:
            raw = [CLIPPING.before.get(id(each)) for each in mine]
            self._gradients["unclipped"] = encode(raw)
            self._gradients["clips"] = list(CLIPPING.calls)
        self.take_settings(optimizer)

    def take_settings(self, optimizer: Any) -> None:
        """Take the settings of an optimizer's groups and the modes of modules, if they changed."""
        optimizer_number = self.number_of(optimizer)
        settings = settings_of_groups(optimizer)
        if settings != self._settings[optimizer_number]:
            self._settings[optimizer_number] = settings
            self._gradients["groups"] = settings
        if (modes := MODES.end_step()) is not None:
            self._gradients["modes"] = modes

    @quietly
    def after(self, optimizer: Any, arguments: Any, options: Any) -> None:
        """Take the weights after the outermost step, and write."""
        if not is_within_step():
            self.end(optimizer)

    @quietly
    def end(self, optimizer: Any) -> None:
        """Write all events up to the end of a step."""
        optimizer_number = self.number_of(optimizer)
        self._counts[optimizer_number] += 1
        mine = self._parameters[optimizer_number]
        sketches = [self.sketch(each, each) for each in mine]
        self._last[optimizer_number].keep(mine, sketches)
        LOG.add(
            "step",
            optimizer=optimizer_number,
            step=self._counts[optimizer_number],
            weights=encode(sketches),
            random=random_state(),
            reads=list(READS),
            seconds=time.perf_counter() - self._start,
            recording=LOG.seconds,
            time=time.time(),
            exchanged=EXCHANGES.take(),
            **self._gradients,
        )
        self._gradients = {}
        READS.clear()
        CLIPPING.forget_step()
        PASSES.is_fresh = False
        LOG.flush()


STEPS = Steps()


def install(module: Any) -> None:
    """Watch everything, now that torch is imported."""
    if SETTINGS["dtype"] == "fp64":
        torch.set_default_dtype(torch.float64)
    if SETTINGS.get("threads"):
        torch.set_num_threads(SETTINGS["threads"])
    register_optimizer_step_pre_hook(STEPS.before)
    register_optimizer_step_post_hook(STEPS.after)
    calls.watch_forward()
    calls.watch_backward()
    calls.watch_wrappers()
    calls.watch_saving()
    watch_clipping()
    watch_scaling()
    watch_contributions()
    watch_criteria()
    watch_schedules()
    watch_loaders()
    watch_reads()
    watch_exchanges()
    watch_builtins()


def watch_accelerator(module: Any) -> None:
    """Note that an evaluation leaves out the examples with which Accelerate filled its batches."""
    watch(module.Accelerator, "gather_for_metrics", lambda _: LOG.add("gather for metrics"))
