"""Training runs in this process or on forked ranks, and comparisons of their results."""

import contextlib
import copy
import dataclasses
import functools
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from harness.compositions import remember_compositions
from harness.internals import checkpoint, load_task
from harness.ranks import on_ranks
from trainer import Config, Trainer, load_config
from trainer.core.config.schema import CheckpointSettings
from trainer.core.engine.trial import Trial
from trainer.core.extensions import STRATEGIES
from trainer.core.loop.run import Run
from trainer.core.record import fingerprint
from trainer.core.record.startup import Summary
from trainer.core.strategy.tensor_shards import slices

CONF = str(Path(__file__).resolve().parents[1] / "conf")
PARITY = ["experiment=parity", "run.steps=24"]  # enough for a loss to fall, half as long
IMPORTED = (  # by runs, not at the import of trainer
    "rich._emoji_codes",
    "tensorboard.plugins.hparams.api_pb2",
    "torch.distributed.fsdp",
    "torch.distributed._tools",
    "torch.profiler._cupti_monitor",
)


def warm_up() -> None:
    """Import before any fork what each run imports, and parse once; saves 0.3 s per child."""
    for name in (*_strategies(), *IMPORTED):
        with contextlib.suppress(ModuleNotFoundError):  # without companions; of another torch
            importlib.import_module(name)
    fingerprint._package_digest()
    remember_compositions()
    load_config(["task=tiny"], [CONF])


def _strategies() -> list[str]:
    folder = Path(importlib.import_module("trainer.core.strategy").__path__[0])
    own = [f"trainer.core.strategy.{path.stem}" for path in folder.glob("[!_]*.py")]
    return [*own, *(each.module for each in STRATEGIES.values())]


def compose(folder: Path, *overrides: str) -> Config:
    """Return the config of a run in `folder`.

    It is composed once, in the parent process if ranks are forked.
    """
    if any(word.startswith("run.resume=") and word != "run.resume=auto" for word in overrides):
        return load_config([f"run.dir={folder}", "run.name=run", *overrides], [CONF])
    config = copy.deepcopy(_compose(overrides))
    return dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(folder)))


def keep_rules(keep_last: int, keep_best: int, mode: str = "min") -> CheckpointSettings:
    """Return settings that keep the newest checkpoints, and the best by eval/loss."""
    keep = compose(Path(), "task=tiny").checkpoint
    return dataclasses.replace(
        keep, keep_last=keep_last, keep_best=keep_best, best_metric="eval/loss", best_mode=mode
    )


@functools.cache
def _compose(overrides: tuple[str, ...]) -> Config:
    return load_config(["run.name=run", *overrides], [CONF])


def fit(folder: Path, *overrides: str, task: type[Trainer] | None = None) -> dict[str, Any]:
    """Train in this process, as the rank that the environment describes; return the values that
    tests compare."""
    config = compose(folder, *overrides)
    trainer = (task or load_task(config))(config)
    seen: list[list[int]] = []
    _record(trainer, seen)
    state: dict[str, Any] = {}
    with _recorded_state(state):
        summary = trainer.fit()
    record = [
        json.loads(line) for line in (summary.directory / "metrics.jsonl").read_text().splitlines()
    ]
    return {
        "losses": {r["step"]: r["train/loss"] for r in record if "train/loss" in r},
        "record": [
            {k: v for k, v in r.items() if not k.startswith("speed/")}
            for r in record
            if "ledger" not in r
        ],
        "weights": state["parts"],
        "boxes": state["boxes"],
        "is_first": state["is_first"],
        "seen": seen,
        "metrics": summary.metrics,
        "code": summary.exit_code,
        "step": summary.step,
        "directory": summary.directory,
    }


def _record(trainer: Trainer, seen: list[list[int]]) -> None:
    """Record the indices of the examples that each training step really augments."""
    augment = trainer.augment
    train_step = trainer.train_step
    is_stepping = [False]

    def noting_augment(inputs, targets, random, train):
        if train and is_stepping[0]:
            seen[-1] += random.indices.tolist()
        return augment(inputs, targets, random, train)

    def noting_step(batch):
        if isinstance(trainer._run, Trial):  # of the step
            return train_step(batch)
        seen.append([])
        is_stepping[0] = True
        outcome = train_step(batch)
        is_stepping[0] = False
        return outcome

    trainer.augment = noting_augment  # type: ignore[method-assign]
    trainer.train_step = noting_step  # type: ignore[method-assign]


def fit_on(
    ranks: int, folder: Path, *overrides: str, task: type[Trainer] | None = None
) -> dict[str, Any]:
    """Run `fit` on several ranks; return rank 0's result with the examples of all ranks by step."""
    compose(folder, *overrides)
    return together(on_ranks(ranks, lambda: fit(folder, *overrides, task=task)))


@contextlib.contextmanager
def _recorded_state(found: dict[str, Any]) -> Iterator[None]:
    """Record the model's state at the end of a run: afterwards a sharded model is gone."""
    finish = Run.finish

    def finish_and_record(run: Run, *arguments: Any) -> Summary:
        summary = finish(run, *arguments)
        strategy = run.engine.strategy
        shards = strategy.tensors.shards()
        if hasattr(strategy, "_division"):  # stages that do not own a buffer may have an old one
            owners = strategy._division.placements._owners
            own = strategy.mesh["pipeline"]
            shards = {name: s for name, s in shards.items() if owners.get(name, own) == own}
        found["parts"] = {name: s.tensor.detach().cpu().clone() for name, s in shards.items()}
        found["is_first"] = run.engine.strategy.mesh.is_first
        found["boxes"] = {
            name: (s.shape, [(offset, list(box.shape)) for box, offset in s.boxes()])
            for name, s in shards.items()
        }
        return summary

    Run.finish = finish_and_record  # type: ignore[method-assign]
    try:
        yield
    finally:
        Run.finish = finish  # type: ignore[method-assign]


def whole_weights(results: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the weights joined from the ranks' parts; ranks with the same part must agree."""
    weights: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    for rank, result in enumerate(results):
        for name, (shape, boxes) in result["boxes"].items():
            part = result["weights"][name]
            whole = weights.setdefault(name, torch.zeros(shape, dtype=part.dtype))
            known = seen.setdefault(name, torch.zeros(shape, dtype=torch.bool))
            begin = 0
            for offset, size in boxes:
                place = slices(offset, size)
                piece = part[begin : begin + size[0]] if size else part
                begin += size[0] if size else 0
                same = whole[place] == piece
                assert bool((same | ~known[place]).all()), f"{name} on rank {rank} differs"
                whole[place] = piece
                known[place] = True
    for name, known in seen.items():
        assert bool(known.all()), f"{name}: no rank has some elements"
    return weights


def together(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the results of `fit` into rank 0's view; all ranks must have the same weights."""
    steps = zip(*(r["seen"] for r in results if r["is_first"]), strict=True)
    joined = [[index for part in parts for index in part] for parts in steps]
    return {**results[0], "seen": joined, "weights": whole_weights(results)}


def join(*outcomes: Any) -> Any:
    """Join outcomes as a train_step with several updates must return them."""
    joined = outcomes[0]
    for outcome in outcomes[1:]:
        joined = None if joined is None else joined + outcome
    return joined


def newest(directory: Path) -> checkpoint.CheckpointFiles:
    loaded, skipped = checkpoint.find_newest(directory / "checkpoints", checkpoint.load)
    assert loaded is not None and not skipped
    return loaded


def relative_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return norm(a - b) / norm(a), in fp64."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / a.norm().clamp_min(1e-300))


def check_equal_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, tensor in one["weights"].items():
        assert torch.equal(tensor, other["weights"][name]), name


def check_parity(reference, other, tolerance=1e-10, weights_tolerance=1e-10, falls=True):
    """Check that two runs took the same examples and have equal results up to rounding."""
    assert other["seen"] == reference["seen"], "other examples"
    assert len(reference["losses"]) >= 20
    for step, loss in reference["losses"].items():
        assert abs(other["losses"][step] - loss) <= tolerance * abs(loss), f"loss of step {step}"
    for name, tensor in reference["weights"].items():
        if weights_tolerance is not None:
            assert relative_distance(tensor, other["weights"][name]) <= weights_tolerance, name
    for name, value in reference["metrics"].items():
        assert abs(other["metrics"][name] - value) <= max(tolerance, 1e-10) * abs(value), name
    losses = list(reference["losses"].values())
    assert not falls or sum(losses[-5:]) < 0.9 * sum(losses[:5]), (
        "the loss did not fall, so nothing is shown"
    )
