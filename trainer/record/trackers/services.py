"""Trackers of vendors, by their own SDKs: Weights & Biases and MLflow; and the user's observers."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from trainer.config.plain_files import read_json
from trainer.config.schema import Config
from trainer.config.targets import resolve
from trainer.errors import ConfigError
from trainer.record import files
from trainer.record.trackers.base import Sink
from trainer.record.trackers.csv_file import CsvFile
from trainer.record.trackers.observer import Observed, Observer, Say

KNOWN = "trackers.json"  # in the run directory: its runs in the services
MOST_OF_KNOWN = 2**16  # bytes of it
MOST_OF_A_BATCH = 100  # MLflow's limit on parameters in one request
FOREIGN = re.compile(r"[^\w\-./: ]")  # characters that MLflow refuses in names


def open_services(config: Config, directory: Path, step: int, say: Say) -> list[Sink]:
    """Open the trackers of `log.trackers`, except TensorBoard, and the observers.

    A run keeps its runs there. Raises ConfigError for an observer that is none.
    """
    names = config.log.trackers
    sinks: list[Sink] = [CsvFile(directory, say)] if "csv" in names else []
    kinds = {f"log.trackers: {name}": SERVICES[name] for name in names if name in SERVICES}
    for name in config.log.observers:
        kinds[f"log.observers: {name}"] = _find_observer(name, config.packages)
    sinks += [
        Observed(name, partial(kind, config, directory), step, say) for name, kind in kinds.items()
    ]
    return sinks


def _find_observer(name: str, packages: Sequence[str]) -> type[Observer]:
    kind = resolve(name, "log.observers", packages)
    if not (isinstance(kind, type) and issubclass(kind, Observer)):
        raise ConfigError(f"log.observers={name}: must be a subclass of trainer.Observer")
    return kind


class _Known(Observer):
    """An observer with a run of its own in a service, which trackers.json names."""

    name = ""

    def known(self, make: Callable[[], str]) -> tuple[str, bool]:
        """Return the name of this run's run there, and whether an earlier process made it."""
        path = self.directory / KNOWN
        found = read_json(path, MOST_OF_KNOWN) if path.exists() else {}
        is_known = isinstance(found.get(self.name), str)
        if not is_known:
            found[self.name] = make()
            files.replace_file(path, json.dumps(found) + "\n")
        return found[self.name], is_known


class WandB(_Known):
    """Weights & Biases. Its environment variables decide project, entity and mode."""

    name = "wandb"

    def start(self, step: int) -> None:
        import wandb

        name, _ = self.known(lambda: secrets.token_hex(8))
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", self.config.task.name),
            name=self.directory.name,
            id=name,
            resume="allow",
            dir=self.directory,
            config=self.config.flat(),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)  # it drops steps that it has

    def end(self, code: int, reason: str) -> None:
        self._run.finish(exit_code=code)


class MLflow(_Known):
    """MLflow. MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME decide where the run goes."""

    name = "mlflow"

    def start(self, step: int) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        self._run, is_known = self.known(self._create)
        self._last: dict[str, int] = {}  # the last step that it has, by metric
        if is_known:
            self._client.update_run(self._run, status="RUNNING")
            for name in self._client.get_run(self._run).data.metrics:
                history = self._client.get_metric_history(self._run, name)
                self._last[name] = max(point.step for point in history)
            return
        params = [Param(k, str(v)[:500]) for k, v in self.config.flat().items()]
        for first in range(0, len(params), MOST_OF_A_BATCH):
            self._client.log_batch(self._run, params=params[first : first + MOST_OF_A_BATCH])

    def _create(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", self.config.task.name)
        found = self._client.get_experiment_by_name(name)
        number = found.experiment_id if found else self._client.create_experiment(name)
        made = self._client.create_run(number, run_name=self.directory.name)
        return str(made.info.run_id)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = []
        for name, value in values.items():
            allowed = FOREIGN.sub("_", name)
            if math.isfinite(value) and step > self._last.get(
                allowed, -1
            ):  # a restart repeats some
                metrics.append(Metric(allowed, value, now, step))
        self._client.log_batch(self._run, metrics=metrics)

    def end(self, code: int, reason: str) -> None:
        status = {0: "FINISHED", 75: "KILLED"}.get(code, "FAILED")
        self._client.set_terminated(self._run, status=status)


SERVICES: dict[str, type[Observer]] = {"wandb": WandB, "mlflow": MLflow}
