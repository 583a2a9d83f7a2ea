"""What one layout's ranks note while they train the user's task: the evidence that `trainer.verify` compares."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves, tree_map_only

from trainer.cli import load_task, run
from trainer.config.compose import load_config
from trainer.data.order import FixedSampler, Order
from trainer.data.randomness import Random, seed_layers
from trainer.data.sources import open_loader
from trainer.engine.means import count_rows, weigh
from trainer.record import directory as rundir
from trainer.strategy.base import call, untouched

PROBED = 8  # examples that every rank looks at, the same on all


def main(arguments: Sequence[str]) -> int:
    """The argument is a JSON file: {"out", "config_dirs", "runs": [[name, overrides], ...], "kill": [step, rank]}."""
    plan = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    for name, overrides in plan["runs"]:
        config = load_config(overrides, plan["config_dirs"])
        task = recorded(load_task(config), plan.get("kill"))(config)
        directory = task.fit().directory
        task.notes["weights"] = {
            key: value.detach().cpu() for key, value in task.model.state_dict().items()
        }
        if task.world.rank == 0:
            task.notes["record"] = [
                entry for _, entry in rundir.entries(directory / rundir.METRICS)
            ]
        torch.save(task.notes, Path(plan["out"]) / f"{name}-{task.world.rank}.pt")
    return 0


def recorded(base: type, kill: Sequence[int] | None) -> Any:
    """The user's task with a pen: it learns exactly what it would learn without."""

    class Recorded(base):
        def __init__(self, config: Any):
            super().__init__(config)
            self.notes: dict[str, Any] = {"ids": [], "rows": {}, "gradients": {}}
            self._is_stepping = False

        def augment(
            self, inputs: Any, targets: Any, random: Random, train: bool
        ) -> tuple[Any, Any]:
            inputs, targets = super().augment(inputs, targets, random, train)
            if self._is_stepping:
                for index, digest in zip(
                    random.indices.tolist(), row_digests((inputs, targets)), strict=True
                ):
                    self.notes["rows"][f"{random.epoch}/{index}"] = digest
            return inputs, targets

        def train_step(self, micro_batches: Any) -> None:
            if kill and (self.step, self.world.rank) == tuple(kill):
                os.kill(os.getpid(), signal.SIGKILL)
            if not self.notes["ids"]:
                self.notes["probe"] = probe(self)
                self.notes["begun"] = {
                    key: value.detach().cpu().clone()
                    for key, value in self.model.state_dict().items()
                }
                self._watch_gradients()
            self.notes["ids"].append(
                [i for _, indices in micro_batches.batches for i in indices.tolist()]
            )
            self._is_stepping = True
            super().train_step(micro_batches)
            self._is_stepping = False

        def _watch_gradients(self) -> None:
            """Note the reduced gradients of the first update, as the optimizer sees them before clipping."""
            precision, strategy, notes = (
                self._now.precision,
                self._now.strategy,
                self.notes["gradients"],
            )
            names = {id(p): name for name, p in strategy.module.named_parameters()}
            update = precision.update

            def noting(optimizers: Any, gradients: Any, factor: Any, clip: Any) -> torch.Tensor:
                if not notes:
                    found = [
                        p
                        for p in strategy.module.parameters()
                        if p.requires_grad and p.grad is not None
                    ]
                    by = 1.0 if factor is None else factor
                    notes.update(
                        {names[id(p)]: (p.grad * by).detach().cpu().clone() for p in found}
                    )
                return update(optimizers, gradients, factor, clip)

            precision.update = noting

    return Recorded


def probe(task: Any) -> dict[str, Any]:
    """How model and loss treat a few examples, the same on every rank: what explains a difference.

    Run twice with the same seeds, and the last half of the rows once more by themselves.
    """
    now, config = task._now, task.config
    count = min(PROBED, config.data.global_batch)
    indices = Order(config.run.seed, 0, now.plan.num_examples)(torch.arange(count))
    sampler = FixedSampler([indices.to(now.sampler.device)])
    here = replace(config.data, workers=0)
    loader = open_loader(
        now.datasets["train"], sampler, here, config.run.seed, "train", task.world.device
    )
    batch, taken = next(iter(loader))
    inputs, targets = now.prepare(batch, taken, "train", 0)
    module = now.strategy.module
    kinds = {type(m).__name__ for m in module.modules()}
    dropouts = [m for m in module.modules() if isinstance(m, _DropoutNd) and m.p > 0]
    found = {
        "indices": indices.tolist(),
        "data": row_digests((inputs, targets)),
        "batchnorm": any(
            type(m).__module__.startswith("torch.") and isinstance(m, _BatchNorm)
            for m in module.modules()
        ),
        "maxpool": any("MaxPool" in kind for kind in kinds),
        "optimizers": [type(optimizer).__name__ for optimizer in now.optimizers],
        "num_dropouts": len(dropouts),
    }
    rates = [m.p for m in dropouts]
    with torch.no_grad(), untouched(module):
        found["first"], found["second"] = (_values(task, module, inputs, targets) for _ in range(2))
        for dropout in dropouts:
            dropout.p = 0.0
        other = _values(task, module, inputs, targets, number=1)
        found["draws"] = not _equal(
            other, _values(task, module, inputs, targets)
        )  # such as F.dropout
        module.train(not found["draws"])  # else the rows would differ by what they draw
        whole, half = (
            _values(task, module, *_rows((inputs, targets), first)) for first in (0, count // 2)
        )
        module.train()
        for dropout, rate in zip(dropouts, rates, strict=True):
            dropout.p = rate
    part = {name: whole[name][count // 2 :] for name in whole}
    found["mixed"] = {
        name: not torch.allclose(part[name], half[name], rtol=1e-3, atol=1e-6) for name in part
    }
    return found


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def _values(
    task: Any, module: nn.Module, inputs: Any, targets: Any, number: int = 0
) -> dict[str, torch.Tensor]:
    """{"outputs": (rows, ...) of the model flattened, "values": (rows, ...) of the loss}."""
    seed_layers(task.config.run.seed, 0, number, task.world.device)
    with task._now.precision.autocast():
        outputs = call(module, inputs)
        rows = count_rows(targets, outputs)
        values, weights = weigh("loss", task.loss(outputs, targets), rows)
    leaves = [
        leaf.reshape(rows, -1).double().cpu()
        for leaf in tree_leaves(outputs)
        if _is_rows(leaf, rows)
    ]
    flat = [values.reshape(rows, -1).double().cpu()] + (
        [] if weights is None else [weights.reshape(rows, -1).cpu()]
    )
    return {"outputs": torch.cat(leaves or flat, 1), "values": torch.cat(flat, 1)}


def _rows(tree: Any, first: int) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t[first:], tree)


def _is_rows(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == rows


def row_digests(tree: Any) -> list[float]:
    """A number per example that a change of its tensors changes; equal to rounding wherever it is computed."""
    total: Any = 0.0
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            flat = leaf.detach().reshape(len(leaf), -1).double()
            places = torch.arange(1, flat.shape[1] + 1, device=flat.device, dtype=torch.float64)
            total = total + (flat * torch.cos(places)).sum(1) + 3 * flat.sum(1)
    return total.tolist() if isinstance(total, torch.Tensor) else []


if __name__ == "__main__":
    run(main)
