"""Trackers of vendors, by their own SDKs: Weights & Biases and MLflow.

None of them can end or delay a run: what fails is left out, with a warning.
"""

from __future__ import annotations

import json
import math
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config.plain_files import read_json
from trainer.config.schema import Config
from trainer.errors import one_line
from trainer.record import files
from trainer.record.trackers.base import Sink
from trainer.record.trackers.csv_file import CsvFile, Say

PATIENCE_S = 30.0  # at the end, for what was not sent yet
KNOWN = "trackers.json"  # in the run directory: its runs in the services
MOST_OF_KNOWN = 2**16  # bytes of it
MOST_OF_A_BATCH = 100  # MLflow's limit on parameters in one request
FOREIGN = re.compile(r"[^\w\-./: ]")  # characters that MLflow refuses in names


def open_services(config: Config, directory: Path, step: int, say: Say) -> list[Sink]:
    """Open the trackers of `log.trackers`, except TensorBoard. A run keeps its runs there."""
    names = config.log.trackers
    sinks: list[Sink] = [CsvFile(directory, say)] if "csv" in names else []
    for name in [name for name in names if name in SERVICES]:
        sinks.append(SERVICES[name](config, directory, step, say))
    return sinks


class Service(Sink):
    """A tracker of a vendor, called in a thread of its own."""

    name = ""

    def __init__(self, config: Config, directory: Path, step: int, say: Say):
        self._config = config
        self._directory = directory
        self._say = say
        self._problem = ""
        self._is_told = False
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"tracker {self.name}")
        self._thread.start()
        self._calls.put(partial(self.open, step))

    def open(self, step: int) -> None:
        """Open the run there, or open it again after a restart at `step`."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def finish(self, code: int) -> None: ...

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._later(partial(self.log, step, dict(values)))

    def exit(self, code: int, reason: str, facts: Mapping[str, Any]) -> None:
        self._later(partial(self.finish, code))

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            self._problem = f"has not taken everything within {PATIENCE_S:.0f} s"
        self._tell()

    def _later(self, call: Callable[[], None]) -> None:
        self._tell()
        self._calls.put(call)

    def _tell(self) -> None:
        if self._problem and not self._is_told:
            self._is_told = True
            why = f"{self._problem}; the run continues without it"
            self._say(f"warning: log.trackers: {self.name}: {why}")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if not self._problem:
                try:
                    call()
                except Exception as error:  # of the vendor's code, or of its network
                    self._problem = one_line(error)[:200] or type(error).__name__

    def known(self, make: Callable[[], str]) -> tuple[str, bool]:
        """Return the name of this run's run there, and whether an earlier process made it."""
        path = self._directory / KNOWN
        found = read_json(path, MOST_OF_KNOWN) if path.exists() else {}
        is_known = isinstance(found.get(self.name), str)
        if not is_known:
            found[self.name] = make()
            files.replace_file(path, json.dumps(found) + "\n")
        return found[self.name], is_known


class WandB(Service):
    """Weights & Biases. Its environment variables decide project, entity and mode."""

    name = "wandb"

    def open(self, step: int) -> None:
        import wandb

        name, _ = self.known(lambda: secrets.token_hex(8))
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", self._config.task.name),
            name=self._directory.name,
            id=name,
            resume="allow",
            dir=self._directory,
            config=self._config.flat(),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)  # it drops steps that it has

    def finish(self, code: int) -> None:
        self._run.finish(exit_code=code)


class MLflow(Service):
    """MLflow. MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME decide where the run goes."""

    name = "mlflow"

    def open(self, step: int) -> None:
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
        params = [Param(k, str(v)[:500]) for k, v in self._config.flat().items()]
        for first in range(0, len(params), MOST_OF_A_BATCH):
            self._client.log_batch(self._run, params=params[first : first + MOST_OF_A_BATCH])

    def _create(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", self._config.task.name)
        found = self._client.get_experiment_by_name(name)
        number = found.experiment_id if found else self._client.create_experiment(name)
        made = self._client.create_run(number, run_name=self._directory.name)
        return str(made.info.run_id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
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

    def finish(self, code: int) -> None:
        status = {0: "FINISHED", 75: "KILLED"}.get(code, "FAILED")
        self._client.set_terminated(self._run, status=status)


SERVICES: dict[str, type[Service]] = {"wandb": WandB, "mlflow": MLflow}
