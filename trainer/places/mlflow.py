"""MLflow as a tracker."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping

from trainer.places.known_observer import KnownObserver

MOST_OF_A_BATCH = 100  # MLflow's limit on parameters in one request
REFUSED_CHARACTERS = re.compile(r"[^\w\-./: ]")  # characters that MLflow refuses in names


class MLflow(KnownObserver):
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
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(name)
        )
        run = self._client.create_run(experiment_id, run_name=self.directory.name)
        return str(run.info.run_id)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        timestamp_ms = int(1000 * time.time())
        metrics = []
        for name, value in values.items():
            allowed = REFUSED_CHARACTERS.sub("_", name)
            if math.isfinite(value) and step > self._last.get(
                allowed, -1
            ):  # a restart repeats some
                metrics.append(Metric(allowed, value, timestamp_ms, step))
        self._client.log_batch(self._run, metrics=metrics)

    def end(self, code: int, reason: str) -> None:
        status = {0: "FINISHED", 75: "KILLED"}.get(code, "FAILED")
        self._client.set_terminated(self._run, status=status)


TRACKER = MLflow
