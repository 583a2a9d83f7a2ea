"""Names, types and ranges of all settings. Their default values are in conf/."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from trainer.core.config.typed import NO_SETTING, limit

# Settings of the layout: how a run is computed, saved and shown. All others belong to the run.
_LAYOUT = """
    checkpoint. dist. launch. log. eval.micro_batch run.dir run.name run.resume run.prove
    run.max_minutes run.stop_after_evals run.min_improvement
    data.micro_batch data.path data.timeout_s data.workers
    strategy.name strategy.device_ids strategy.devices_per_rank
    strategy.bucket_mb strategy.static_graph strategy.find_unused_parameters
    strategy.mesh. strategy.schedule strategy.sequence strategy.reshard strategy.recompute
"""
LAYOUT = tuple(_LAYOUT.split())


@dataclass
class RunSettings:
    name: str | None
    dir: str
    seed: Annotated[int, limit(min=0, max=2**63 - 1)]
    epochs: Annotated[int, limit(min=1)]
    steps: Annotated[int | None, limit(min=1)]
    resume: str | None
    init_from: str | None
    freeze: list[str]
    ema_decay: Annotated[float | None, limit(min=0, below=1)]
    lr_scaling: Literal["none", "linear", "sqrt"]
    lr_batch: Annotated[int | None, limit(min=1)]
    compile: bool | Literal["max-autotune", "blocks"]
    clip_norm: Annotated[float | None, limit(above=0)]
    dropout: Literal["example", "torch"]
    norm_rows: Annotated[int | None, limit(min=1)]
    buffers: Literal["per_pass", "per_step"]
    prove: bool | Literal["warn"]
    on_bad_step: Literal["skip", "stop", "rollback"]
    max_minutes: Annotated[float | None, limit(above=0)]
    stop_after_evals: Annotated[int | None, limit(min=1)]
    min_improvement: Annotated[float, limit(min=0)]


@dataclass
class DataSettings:
    global_batch: Annotated[int, limit(min=1)]
    micro_batch: Annotated[int, limit(min=1)] | Literal["auto"] | None
    workers: Annotated[int, limit(min=0)]
    timeout_s: Annotated[float, limit(min=0)]
    path: Literal["auto", "resident", "streamed"]
    on_error: Literal["raise", "skip"]

    @property
    def most_rows(self) -> int | None:
        """`micro_batch` as a number; None if it is null, or auto and not found yet."""
        return None if self.micro_batch == "auto" else self.micro_batch


Axis = Annotated[int, limit(min=1)]


@dataclass
class MeshSizes:
    """Sizes of the mesh's axes: their product is the number of ranks. One may be auto: the rest."""

    replicate: Axis | Literal["auto"]
    shard: Axis | Literal["auto", "node"]
    tensor: Axis | Literal["auto"]
    context: Axis | Literal["auto"]
    pipeline: Axis | Literal["auto"]

    @classmethod
    def of_copies(cls, ranks: int | Literal["auto"] = "auto") -> MeshSizes:
        """Return the mesh of ranks that each have the whole model."""
        return cls(ranks, 1, 1, 1, 1)


@dataclass
class StrategySettings:
    name: str
    precision: Literal[
        "default", "auto", "fp64", "fp32", "tf32", "amp_bf16", "amp_fp16", "bf16", "fp16"
    ]
    sync_batchnorm: bool
    channels_last: bool
    device_ids: list[Annotated[int, limit(min=0)]] | None
    devices_per_rank: Annotated[int, limit(min=1)]
    bucket_mb: Annotated[float, limit(above=0)]
    static_graph: bool
    find_unused_parameters: bool
    comm_hook: Literal["none", "fp16", "bf16", "powersgd", "parameter_server"]
    mesh: MeshSizes
    reshard: bool
    schedule: Literal["1f1b", "gpipe"]
    sequence: bool
    recompute: Literal["none", "blocks"] | list[str]

    @property
    def weights(self) -> str:
        """The precision of the weights: that of `precision` if it stores them in one of its own."""
        return self.precision if self.precision in ("fp64", "bf16", "fp16") else "fp32"


@dataclass
class DistSettings:
    backend: Literal["auto", "nccl", "gloo", "mpi"]
    init: Literal["env", "tcp", "file"]
    address: str | None
    path: str | None
    timeout_s: Annotated[float, limit(above=0, max=10**6)]
    hang_timeout_s: Annotated[float | None, limit(above=0, max=10**6)]
    drift_every_steps: Annotated[int | None, limit(min=1)]


@dataclass
class LaunchSettings:
    name: Literal["inline", "elastic", "spawn", "ray"]
    nproc_per_node: str | None
    ranks: Annotated[int, limit(min=1)] | list[Annotated[int, limit(min=1)]] | None
    cpus_per_rank: Annotated[float, limit(above=0)]
    gpus_per_rank: Annotated[float | None, limit(min=0)]
    resources: dict[str, Annotated[float, limit(above=0)]]
    labels: dict[str, str]
    max_restarts: Annotated[int, limit(min=0)]
    on_failed_job: Literal["continue", "stop"]
    jobs: Annotated[int, limit(min=1)]


@dataclass
class CheckpointSettings:
    every_steps: Annotated[int | None, limit(min=1)]
    every_epochs: Annotated[int | None, limit(min=1)]
    keep_last: Annotated[int, limit(min=1)]
    keep_best: Annotated[int, limit(min=0)]
    background: bool
    sharded: Literal["auto"] | bool
    on_error: Literal["stop", "continue"]
    best_metric: str | None
    best_mode: Literal["min", "max"] | None
    export: Literal["hf"] | None
    mirror: str | None
    mirror_timeout_s: Annotated[float, limit(min=0)]

    @property
    def copy_s(self) -> float | None:
        """How long the end of a run may copy to the mirror; None without one."""
        return None if self.mirror is None else self.mirror_timeout_s

    def score(self, step: int, manifest: Mapping[str, Any]) -> dict[int, float]:
        """Return the metric of a checkpoint, the smaller the better; nothing without one."""
        value = manifest.get("metrics", {}).get(self.best_metric)
        if not isinstance(value, (int, float)) or value != value:
            return {}
        return {step: -value if self.best_mode == "max" else value}

    def kept(self, steps: Iterable[int], scores: Mapping[int, float]) -> Set[int | None]:
        """Return the steps to keep, of those with a checkpoint: the newest and the best."""
        best = sorted(scores, key=lambda step: (scores[step], step))[: self.keep_best]
        return {*sorted(steps)[-self.keep_last :], *best}


@dataclass
class EvalSettings:
    splits: list[str]
    every_steps: Annotated[int | None, limit(min=1)]
    every_epochs: Annotated[int | None, limit(min=1)]
    micro_batch: Annotated[int | None, limit(min=1)]


@dataclass
class LogSettings:
    start: Literal["short", "full"]
    every_steps: Annotated[int, limit(min=1)]
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "csv"]]
    observers: list[str]
    train_metrics: bool
    images: Annotated[int, limit(min=0)]
    histograms_every_steps: Annotated[int | None, limit(min=1)]
    profile_steps: list[int] | None


@dataclass
class TaskSettings:
    name: str
    trainer: str
    packages: list[str]
    options: dict[str, Any]


@dataclass
class Config:
    """All settings, such as `run.steps`. `optim` and `schedule` have `_target_` and arguments."""

    run: RunSettings
    data: DataSettings
    strategy: StrategySettings
    dist: DistSettings
    launch: LaunchSettings
    checkpoint: CheckpointSettings
    eval: EvalSettings
    log: LogSettings
    task: TaskSettings
    optim: dict[str, Any]
    schedule: dict[str, Any]
    # not settings: the working directory at load time, where relative paths start even after a
    # task calls os.chdir; names given in task.options that the task's YAML does not have; names
    # that only the task's `Options` give
    folder: str = field(default_factory=os.getcwd, metadata=NO_SETTING)
    unlisted: list[str] = field(default_factory=list, metadata=NO_SETTING)
    implied: list[str] = field(default_factory=list, metadata=NO_SETTING)

    @property
    def runs(self) -> Path:
        """Path of `run.dir`, independent of the current working directory."""
        return Path(self.folder, self.run.dir)

    def shown(self, path: Path) -> Path:
        """Return a path relative to the folder where the run was started, if it is inside it."""
        return path.relative_to(self.folder) if path.is_relative_to(self.folder) else path

    @property
    def norm_rows(self) -> int | None:
        """`run.norm_rows`, or None with SyncBN, which normalises over all rows."""
        return None if self.strategy.sync_batchnorm else self.run.norm_rows

    @property
    def best_metric(self) -> str:
        """Name of the metric that decides which checkpoint is best, such as eval/loss.

        Without a split in `checkpoint.best_metric` it is that of the first one of `eval.splits`.
        """
        name = self.checkpoint.best_metric or "loss"
        split, _, rest = name.partition("/")
        return name if rest and split in self.eval.splits else f"{self.eval.splits[0]}/{name}"

    @property
    def best_mode(self) -> Literal["min", "max"]:
        """`min` or `max`: whether a smaller or a larger `best_metric` is better."""
        return self.checkpoint.best_mode or "min"

    @property
    def packages(self) -> list[str]:
        """Packages that a `_target_` may come from, besides torch and trainer."""
        return [self.task.trainer.split(".")[0], *self.task.packages]

    def flat(self) -> dict[str, Any]:
        """Return all values by full name, `{"data.global_batch": 250, ...}`."""
        return flatten(self.plain())

    def plain(self) -> dict[str, Any]:
        """Return the groups of settings as nested dicts."""
        groups = dataclasses.asdict(self)
        for name in ("folder", "unlisted", "implied"):
            del groups[name]
        return groups

    def run_hash(self, more: Collection[str] = ()) -> str:
        """Return a digest of the run's settings, which is the same in any layout.

        `more` are settings of the layout that belong to this run.
        """
        flat = self.flat().items()
        run = {key: v for key, v in flat if key in more or not key.startswith(LAYOUT)}
        text = json.dumps(run, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested mapping by dotted name."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        is_group = isinstance(value, Mapping) and value
        flat |= flatten(value, f"{prefix}{key}.") if is_group else {f"{prefix}{key}": value}
    return flat
