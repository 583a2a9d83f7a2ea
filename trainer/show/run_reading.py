"""The files of a run directory, read for a page or a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.base.errors import CheckpointError, ConfigError, one_line
from trainer.core.api import (
    CONFIG,
    SAMPLES,
    Manifest,
    Mesh,
    address_of,
    convert,
    ledger,
    read_settings,
    transaction,
)
from trainer.core.api import run_directory as rundir

EPOCH = "epoch"  # the curve of progress
LEDGER = "ledger"
# settings that name a run, and change nothing
PLACE_SETTINGS = (
    "run.dir",
    "run.name",
    "run.resume",
    "checkpoint.mirror",
    "checkpoint.mirror_timeout_s",
)
# Settings that are needed of any config.json
_NEEDED: dict[str, Any] = {
    **dict.fromkeys(("task.name", "strategy.name", "strategy.precision"), str),
    **{"data.global_batch": int, "run.seed": int, "eval.splits": list[str]},
    **dict.fromkeys(("checkpoint.best_metric", "checkpoint.best_mode"), str | None),
}
Curve = dict[int, float]  # values by step


@dataclass(frozen=True)
class RunFiles:
    """A run as its directory tells it. `manifest` is that of the newest checkpoint, if any."""

    path: Path
    settings: dict[str, Any]
    curves: dict[str, Curve]
    ledger: dict[int, str]  # the chain of examples at each save
    bad_steps: dict[int, str]
    samples: dict[str, tuple[int, str]]  # the last text of each name, and its step
    exit: dict[str, Any]
    manifest: Manifest | None
    checkpoints: dict[int, Path] = field(repr=False)

    @classmethod
    def read(cls, directory: str) -> RunFiles:
        """Read a run directory. Raises ConfigError if it is none, or a file is not its own."""
        path = Path(directory)
        if not (path / CONFIG).is_file():
            raise ConfigError(f"{directory}: has no {CONFIG}; give a run directory")
        rundir.check_plain(path)
        curves: dict[str, Curve] = {}
        ledger: dict[int, str] = {}
        bad_steps: dict[int, str] = {}
        samples: dict[str, tuple[int, str]] = {}
        for step, name, value in rundir.read_values(path):
            if name == LEDGER:
                ledger[step] = str(value)
            elif name == rundir.BAD_STEP:
                bad_steps[step] = str(value)
            elif name.startswith(SAMPLES):
                samples[name.removeprefix(SAMPLES)] = step, str(value)
            elif isinstance(value, (int, float, type(None))):
                curves.setdefault(name, {})[step] = float("nan") if value is None else value
        checkpoints = transaction.steps(path / "checkpoints")
        newest = transaction.newest_manifest(path / "checkpoints")
        return cls(
            path=path,
            settings=_read_settings(path / CONFIG),
            curves=curves,
            ledger=ledger,
            bad_steps=bad_steps,
            samples=samples,
            exit=rundir.read_exit(path),
            manifest=None if newest is None else Manifest.of_run(newest, path),
            checkpoints=checkpoints,
        )

    @property
    def name(self) -> str:
        return address_of(self.path) or str(self.path)

    @property
    def task(self) -> str:
        return str(self.settings["task.name"])

    @property
    def strategy(self) -> str:
        return str(self.settings["strategy.name"])

    @property
    def ranks(self) -> str:
        """The number of ranks; empty without a checkpoint."""
        return str(self.manifest.world_size) if self.manifest else ""

    @property
    def end(self) -> str:
        return str(self.exit.get("reason", "not ended"))

    @property
    def splits(self) -> tuple[str, ...]:
        """Beginnings of the names of evaluated curves: `eval/`."""
        return tuple(f"{split}/" for split in self.settings["eval.splits"])

    @property
    def evaluated(self) -> list[str]:
        """Names of what is evaluated, without the split; the loss at least."""
        own = [name.partition("/")[2] for name in self.curves if name.startswith(self.splits)]
        return [*dict.fromkeys(["loss", *own])]

    @property
    def begin(self) -> int:
        """The step after which its record begins: above 0 if it continues another run."""
        sessions = self.manifest.sessions if self.manifest else []
        logs = [
            step for name in self.curves if name.startswith("train/") for step in self.curves[name]
        ]
        earliest = min([*logs, *self.ledger], default=0)  # what came before is in other files
        return max((first for first, _ in sessions if first < earliest), default=0)

    @property
    def step(self) -> int:
        """The last step that the record knows."""
        steps = [step for curve in self.curves.values() for step in curve]
        return max([*steps, *self.ledger, self.exit.get("step", 0)], default=0)

    @property
    def best_metric(self) -> str:
        """Name of the metric that decides which checkpoint is best."""
        name = self.settings.get("checkpoint.best_metric") or "loss"
        splits = self.settings["eval.splits"] or [""]
        return name if name.partition("/")[0] in splits else f"{splits[0]}/{name}"

    @property
    def metric_name(self) -> str:
        """The metric's name for people: without its split."""
        return self.best_metric.partition("/")[2]

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and value of the best evaluation; None without one."""
        curve = {s: v for s, v in self.curves.get(self.best_metric, {}).items() if v == v}
        if not curve:
            return None
        choose = max if self.settings.get("checkpoint.best_mode") == "max" else min
        step = choose(curve, key=lambda s: curve[s])
        return step, curve[step]

    @cached_property
    def seconds(self) -> float:
        """Seconds of training, without evaluations and saves, by the logged speeds."""
        total = 0.0
        last = 0
        for step, speed in sorted(self.curves.get("speed/examples_per_s", {}).items()):
            total += (step - last) * self.settings["data.global_batch"] / max(speed, 1e-9)
            last = step
        return total

    def facts(self) -> dict[str, str]:
        """Return versions, device, data and code, by name."""
        if self.manifest is None:
            return {}
        facts = {name: str(value) for name, value in self.manifest.machine.items()}
        for split, values in self.manifest.data.items():
            shown = {**values, "content": ledger.short(values.get("content"))}
            facts |= {f"the {split} data's {name}": str(v) for name, v in shown.items()}
        return facts | {f"the code of {n}": str(v) for n, v in self.manifest.code.items()}

    def load_model(self, step: int) -> tuple[Any, Mapping[str, Any]]:
        """Return the source of a checkpoint's weights, and the facts of those that it leaves out.

        Raises CheckpointError.
        """
        from trainer.core.api import open_content

        loaded = transaction.load(self.checkpoints[step])
        content = open_content(loaded)
        content.hold()
        return content.sources["model"], loaded.manifest.get("frozen", {})

    def weights_digest(self, step: int) -> dict[str, Any]:
        """Return the SHA-256 of a checkpoint's files with tensors by name, and what it leaves out.

        Raises CheckpointError if a file has another one.
        """
        manifest = transaction.load(self.checkpoints[step]).manifest
        files = manifest["files"].items()
        digests: dict[str, Any] = {n: e["sha256"] for n, e in files if n.endswith(".safetensors")}
        return {**digests, "frozen": manifest.get("frozen")}


def _read_settings(path: Path) -> dict[str, Any]:
    """Return the settings by full name. Raises ConfigError unless a run has written them."""
    try:
        settings = read_settings(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; make it readable") from None
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read: {one_line(error)}; give another") from None
    for name, kind in _NEEDED.items():
        if name not in settings:
            raise ConfigError(f"{path}: was not written by a run: it has no {name}; give another")
        convert(kind, settings[name], f"{path}: {name}")
    return settings


def mesh_of(manifest: Manifest) -> Mesh:
    """Return the mesh of a run's last layout, as its rank 0 saw it."""
    return Mesh.of_saved(manifest.config, manifest.world_size)


def read_runs(directories: list[str]) -> list[RunFiles]:
    """Read several runs. Raises ConfigError or CheckpointError, naming the directory."""
    runs = []
    for directory in directories:
        try:
            runs.append(RunFiles.read(directory))
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}") from None
    return runs
