"""The trained model of a task on one process, with inputs of real examples, for exports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from trainer import Config, World
from trainer.core.api import Evaluator, MeshSizes, examine, kept_task

EXPORT_ROWS = 7  # of the examples that an export is compared on


def on_one_process(config: Config, precision: Any = "fp32") -> Config:
    """Return the settings of a run, to load its model on one process, as a rule in fp32."""
    strategy = replace(
        config.strategy,
        name="single",
        precision=precision,
        mesh=MeshSizes.of_copies(1),
        comm_hook="none",
        recompute="none",
        sequence=False,
        sync_batchnorm=False,
        channels_last=False,
        devices_per_rank=1,
        device_ids=None,
    )
    return replace(
        config,
        strategy=strategy,
        run=replace(config.run, compile=False),
        data=replace(config.data, micro_batch=None, workers=0),
        eval=replace(config.eval, micro_batch=EXPORT_ROWS),
    )


def take_trained(task: Any) -> tuple[nn.Module, Any, int]:
    """Return the model with the weights of an evaluation, on the CPU, and the inputs of examples.

    The third value is the number of examples, 0 if the first split of the evaluation has none.
    """
    collected: list[tuple[nn.Module, Any, int]] = []

    def keep(evaluator: Evaluator) -> bool:
        with evaluator.first_batch() as (model, inputs, rows):
            own = tree_map_only(torch.Tensor, lambda t: t.cpu().clone(), inputs)
            weights = {name: t.cpu().clone() for name, t in model.state_dict().items()}
        model.load_state_dict(weights)
        collected.append((model.cpu().eval(), own, rows))
        return True

    examine(task, keep)
    (trained,) = collected
    trained[0].eval()
    return trained


def load_alone(task: Any, config: Config, is_stored: bool) -> tuple[nn.Module, Any, int]:
    """Return a task's model with trained weights, and inputs of real examples, on the CPU.

    They are those of the first split of the evaluation that has any, else of the training. The
    task is left as it was.
    """
    config = on_one_process(config, config.strategy.weights if is_stored else "fp32")
    if is_stored:
        config = replace(config, run=replace(config.run, ema_decay=None))
    with kept_task(task):
        task.world = World()
        for splits in (config.eval.splits, ["train"]):
            task.config = replace(config, eval=replace(config.eval, splits=splits))
            model, inputs, rows = take_trained(task)
            if rows:
                break
        return model, inputs, rows
