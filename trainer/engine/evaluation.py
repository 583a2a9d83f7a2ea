"""Evaluation: every example of the eval split counts exactly once, whatever the layout."""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from trainer.data.randomness import seed_layers
from trainer.distributed.watch.heartbeat import Phase
from trainer.engine.means import Means, count_rows, weigh
from trainer.errors import ConfigError
from trainer.run import Session

STOP_EVERY_S = 0.5


class Stopped(Exception):
    """All ranks agreed, within an evaluation, to stop."""


def score(session: Session, limit: int | None = None) -> dict[str, float]:
    """`{"eval/loss": ...}`, alike on every rank; what pads a shard is cut off before it is counted.

    With `limit`, so many micro-batches only, and the names of the metrics are compared over the ranks. A collective.
    Raises Stopped where a rank was asked to stop.
    """
    means, task, every, begun = Means(), session.task, 1, time.monotonic()
    if "eval" not in session.loaders:
        return {}
    task.model.eval()
    batches = zip(islice(session.loaders["eval"], limit), session.shard.rows, strict=False)
    with session.group.agreed("trying metrics") if limit is not None else nullcontext():
        for number, ((batch, indices), rows) in enumerate(batches, 1):
            session.heartbeat.enter(Phase.EVALUATE)
            inputs, targets = session.prepare(batch, indices, "eval", 0)
            seed_layers(session.config.run.seed, -1, number, session.world.device)
            _count(session, means, session.strategy.forward(session.wrapped, inputs), targets, rows)
            if number % every == 0 and limit is None:
                asked, seconds = session.group.max(
                    float(session.wants_stop), time.monotonic() - begun
                )
                if asked:
                    raise Stopped
                every = max(1, int(number * STOP_EVERY_S / max(seconds, 1e-9)))
    task.model.train()
    if limit is not None:
        _check_names(session, means.names())
    values = means.read(session.group)
    for name, metric in session.metrics.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a rank that had no row to update it with
            values[name] = metric.compute().item()
        metric.reset()
    return {
        f"eval/{name}": float(value)
        for name, value in (values | task.summarize(dict(values))).items()
    }


def _count(session: Session, means: Means, outputs: Any, targets: Any, rows: int) -> None:
    with session.precision.autocast():
        returned = session.task.metrics(outputs, targets)
        if "loss" in returned:
            raise ConfigError(
                "metrics returned a value called loss: the loss is there already; choose another name"
            )
        returned["loss"] = session.task.loss(outputs, targets)
    for name, value in returned.items():
        values, weights = weigh(name, value, count_rows(targets, outputs))
        means.add(name, values[:rows], None if weights is None else weights[:rows])
    if session.metrics and (rows or not any(session.shard.rows)):
        real = tree_map_only(torch.Tensor, lambda t: t[:rows] if t.dim() else t, (outputs, targets))
        _feed(session, real[0], real[1], rows)


def _feed(session: Session, outputs: Any, targets: Any, rows: int) -> None:
    """A rank without a row feeds none, so that metrics which keep rows have the right shapes to gather."""
    for metric in session.metrics.values():
        try:
            metric.update(outputs, targets)
        except (RuntimeError, ValueError):
            if rows:
                raise


def _check_names(session: Session, names: list[str]) -> None:
    lines = session.group.gather_text(", ".join(names))
    for rank, line in enumerate(lines):
        if line != lines[0]:
            raise ConfigError(
                f"metrics returned {lines[0]} on rank 0 and {line} on rank {rank}: must be the same"
            )
