"""Opens trackers: files, vendors' services by their SDKs, and the observers of a user."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainer.checkpoints import run_directory
from trainer.config.plain_files import read_json
from trainer.config.schema import Config
from trainer.config.targets import resolve
from trainer.errors import ConfigError, RunError, one_line
from trainer.record.trackers import Observed, Observer, Say, Sink
from trainer.record.trackers.jsonl import CsvFile

KNOWN = "trackers.json"  # in the run directory: its runs in the services
MOST_OF_KNOWN = 2**16  # bytes of it
MOST_OF_A_BATCH = 100  # MLflow's limit on parameters in one request
OF_TRAINJOB = {  # variables that Kubeflow sets, and the one that turns it off in transformers too
    "url": "KUBEFLOW_TRAINER_SERVER_URL",
    "ca": "KUBEFLOW_TRAINER_SERVER_CA_CERT",
    "token": "KUBEFLOW_TRAINER_SERVER_TOKEN",
    "off": "DISABLE_KUBEFLOW_INTEGRATION",
}
POST_EVERY_S = 5.0  # as transformers posts: the server limits the rate
POST_S = 5.0
MOST_METRICS = 200
PLAIN = re.compile(r"[\x21-\x7e]+")  # of a header
FOREIGN = re.compile(r"[^\w\-./: ]")  # characters that MLflow refuses in names


def open_services(config: Config, directory: Path, step: int, say: Say) -> list[Sink]:
    """Open the trackers of `log.trackers`, except TensorBoard, and the observers.

    A TrainJob of Kubeflow is told its progress too, unless `log.trackers` is empty. A run keeps its
    runs there. Raises ConfigError for an observer that is none.
    """
    names = config.log.trackers
    sinks: list[Sink] = [CsvFile(directory, say)] if "csv" in names else []
    address = os.environ.get(OF_TRAINJOB["url"])
    is_off = not names or os.environ.get(OF_TRAINJOB["off"], "").upper() == "TRUE"
    if address and not is_off:
        sinks.append(Kubeflow(address, say))
    kinds = {f"log.trackers: {name}": SERVICES[name] for name in names if name in SERVICES}
    for name in config.log.observers:
        kinds[f"log.observers: {name}"] = _find_observer(name, config.packages)
    sinks += [
        Observed(name, partial(kind, config, directory), step, say) for name, kind in kinds.items()
    ]
    return sinks


@contextmanager
def _named(variable: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", "") or one_line(error)
        raise ConfigError(f"""{variable}={os.environ.get(variable, "")}:
            must be a file that can be read: {why}""") from None


class Kubeflow(Sink):
    """The progress of a TrainJob (KEP-2779), posted by a thread where Kubeflow asks for it.

    Kubeflow sets the variables in the pods of a TrainJob. The token changes each hour, so it is
    read for each post; neither it nor an answer is ever shown.
    """

    def __init__(self, address: str, say: Say):
        self._address = address
        self._say = say
        self._is_told = False
        self._values: dict[str, float] = {}
        self._at = (0, 0)  # step, number of steps
        self._first: tuple[int, float] | None = None  # step that the thread saw first, and when
        self._is_done = False
        self._is_last = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="kubeflow")
        self._thread.start()

    def progress(self, step: int, num_steps: int, is_last: bool) -> None:
        self._at = (step, num_steps)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._values = {**self._values, **values}

    def exit(self, code: int, reason: str, facts: Mapping[str, Any]) -> None:
        self._is_done = code == 0

    def close(self) -> None:
        self._is_last.set()
        self._thread.join(2 * POST_S)

    def _follow(self) -> None:
        sent: dict[str, Any] = {}
        is_last = False
        while not is_last:
            is_last = self._is_last.wait(POST_EVERY_S)
            status = self._status()
            if not status or status == sent:
                continue
            try:
                self._post(status)
                sent = status
            except Exception as error:  # the run goes on without it
                self._tell(one_line(error) or type(error).__name__)

    def _status(self) -> dict[str, Any]:
        """Return what Kubeflow is told; nothing before the first step."""
        step, num_steps = self._at
        if not num_steps:
            return {}
        now = time.monotonic()
        self._first = self._first or (step, now)
        first, since = self._first
        values = {**self._values, "current_step": step, "total_steps": num_steps}
        names = sorted(values, key=lambda name: name not in ("current_step", "total_steps"))
        metrics = [{"name": name, "value": str(values[name])} for name in names[:MOST_METRICS]]
        percent = min(99, 100 * step // num_steps)
        status: dict[str, Any] = {"progressPercentage": percent, "metrics": metrics}
        if self._is_done:
            status |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
        elif step > first:
            left_s = (now - since) / (step - first) * (num_steps - step)
            status["estimatedRemainingSeconds"] = min(int(left_s), 2**31 - 1)
        return status

    def _post(self, status: Mapping[str, Any]) -> None:
        """Post it. Raises errors whose texts have nothing of the token."""
        place = urlsplit(self._address)
        if place.scheme != "https" or not place.hostname:
            raise ConfigError(
                f"{OF_TRAINJOB['url']}: must be an address, as in https://host/status"
            )
        with _named(OF_TRAINJOB["token"]):
            place_of = Path(os.environ.get(OF_TRAINJOB["token"]) or "no file")
            token = place_of.read_text(errors="replace").strip()
        if not PLAIN.fullmatch(token):
            raise ConfigError(f"{OF_TRAINJOB['token']}: must be a file with a token")
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        body = json.dumps({"trainerStatus": {**status, "lastUpdatedTime": now}})
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        with _named(OF_TRAINJOB["ca"]):
            context = ssl.create_default_context(cafile=os.environ.get(OF_TRAINJOB["ca"]))
        # follows no redirect, which would send the token elsewhere
        link = HTTPSConnection(place.hostname, place.port, timeout=POST_S, context=context)
        try:
            link.request("POST", f"{place.path}?{place.query}".rstrip("?"), body, headers)
            code = link.getresponse().status
        finally:
            link.close()
        if not 200 <= code < 300:
            raise RunError(f"it answers {code}")

    def _tell(self, why: str) -> None:
        if not self._is_told:
            self._is_told = True
            place = f"{OF_TRAINJOB['url']}: " * (not why.startswith("KUBEFLOW"))
            self._say(f"warning: {place}{why}; the run goes on, and it is tried again")


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
            run_directory.replace_file(path, json.dumps(found) + "\n")
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


class Trackio(_Known):
    """Trackio. TRACKIO_DIR and TRACKIO_SPACE_ID decide where the run goes; it prints that."""

    name = "trackio"

    def start(self, step: int) -> None:
        import trackio

        name, _ = self.known(lambda: f"{self.directory.name}-{secrets.token_hex(2)}")
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", self.config.task.name),
            name=name,
            resume="allow",
            config=self.config.flat(),
            embed=False,
        )
        # it has no public name (0.43.0), and would draw a step twice after a resume
        self._next_step = int(getattr(self._run, "_next_step", 0))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self._next_step:
            self._run.log(dict(values), step)

    def end(self, code: int, reason: str) -> None:
        self._run.finish()


class SwanLab(_Known):
    """SwanLab. SWANLAB_PROJ_NAME, SWANLAB_WORKSPACE and SWANLAB_MODE decide where the run goes."""

    name = "swanlab"

    def start(self, step: int) -> None:
        import swanlab

        name, _ = self.known(lambda: secrets.token_hex(8))
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", self.config.task.name),
            name=self.directory.name,
            id=name,
            resume="allow",
            log_dir=str(self.directory / "swanlab"),
            config=self.config.flat(),
            settings=swanlab.Settings(interactive=False),  # it would ask for a key
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step)

    def end(self, code: int, reason: str) -> None:
        state = {0: "success", 75: "aborted"}.get(code, "crashed")
        self._run.finish(state, None if state == "success" else reason)


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


SERVICES: dict[str, type[Observer]] = {
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
    "swanlab": SwanLab,
}
