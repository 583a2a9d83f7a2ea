"""Failures of a run, each reported in one line that names its place in the task."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

from trainer.config.hints import suggest_attribute
from trainer.config.schema import Config
from trainer.config.typed import show
from trainer.data.workers import workers_named
from trainer.distributed.group import Group
from trainer.errors import ConfigError, RunError, one_line, place_of
from trainer.hook_errors import (
    LOSS,
    is_of_compiler,
    is_of_second_backward,
    is_without_gpu,
    place_in_task,
)
from trainer.setup.capacity import memory_named
from trainer.strategy.mesh import Mesh
from trainer.strategy.mesh_model.divided_parameters import parts_named
from trainer.task import Task

TWICE = (
    f"backward() went twice through the graph of {LOSS}: leave the call out of hooks, "
    "since the trainer makes it; if the model keeps a tensor for the next batch, detach() it"
)


class EarlyExit(SystemExit):
    """os._exit(0), called by the task in the process of the run."""


@contextmanager
def failures_named(group: Group, config: Config) -> Iterator[None]:
    """Raise RunError, one line, if a peer or data worker exits or hangs, or memory is not enough.

    And ConfigError if torch cannot compile the model on this machine, such as without g++, if the
    task asks for a GPU that is not there, or if a backward pass was made before the trainer's.

    On sys.exit and os._exit too: a run that ends before its last step is not done, even with exit
    code 0. And on a KeyboardInterrupt of the task, since Ctrl-C is a stop request.
    """
    advice = "raise an error, or set run.steps to end earlier"
    with (
        group.peers_named(),
        workers_named(),
        memory_named(config, group.world),
        exits_raised(),
        parts_named(Mesh.of(config.strategy.mesh, group.world)),
    ):
        try:
            yield
        except EarlyExit as error:
            raise RunError(f"{error}; {advice}") from None
        except SystemExit as error:
            what = f"sys.exit({error.code!r}) was called at {place_of(error)}"
            raise RunError(f"{what}; {advice}") from None
        except KeyboardInterrupt as error:
            what = f"KeyboardInterrupt was raised at {place_of(error)}"
            raise RunError(f"{what}") from None
        except (RuntimeError, AssertionError, AttributeError) as error:
            if line := _explain(error, config):
                raise ConfigError(line) from error
            raise


def _explain(error: Exception, config: Config) -> str:
    """Return the line for an exception of torch's that a task or machine causes; empty if none."""
    if is_of_second_backward(error):
        return TWICE
    if is_without_gpu(error):
        why = "torch sees no GPU here; leave out .cuda() and .to(): the trainer moves the model"
        return f"{one_line(error)[:300]}{place_in_task(error)}: {why} and its batches"
    if isinstance(error, AttributeError):
        return _explain_attribute(error, error.obj, error.name or "")
    if is_of_compiler(error):
        why = f"torch cannot compile here: {one_line(error)[:300]}"
        return f"run.compile={show(config.run.compile)}: {why}; use run.compile=false"
    return ""


def _explain_attribute(error: AttributeError, owner: object, name: str) -> str:
    """Return the line for an attribute that a task or a mapping of settings does not have."""
    missing = f"{type(owner).__name__} has no attribute {name}{place_in_task(error)}"
    if isinstance(owner, Mapping) and name in owner:
        return f"{missing}; use [{name!r}]"
    known = [each for each in dir(owner) if not each.startswith("_")]
    advice = suggest_attribute(name, known) if isinstance(owner, Task) else ""
    return f"{missing}; {advice}" if advice else ""


@contextmanager
def exits_raised() -> Iterator[None]:
    """Raise EarlyExit if this thread calls os._exit(0), which launchers take for success.

    Another thread of this process exits with 1, and a process that the task forked as it asks.
    """
    leave = os._exit
    pid = os.getpid()
    thread = threading.get_ident()

    def leave_as_failure(status: int) -> NoReturn:
        if status or os.getpid() != pid:
            leave(status)
        frame = sys._getframe(1)
        what = f"os._exit(0) was called at {frame.f_code.co_filename}:{frame.f_lineno}"
        if threading.get_ident() == thread:
            raise EarlyExit(what)
        print(f"error: {what}, in another thread", file=sys.stderr, flush=True)
        leave(1)

    os._exit = leave_as_failure
    try:
        yield
    finally:
        os._exit = leave
