"""The progress of a TrainJob of Kubeflow."""

from __future__ import annotations

import json
import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainer.base.errors import ConfigError, RunError, one_line
from trainer.core.api import Sink

OF_TRAINJOB = {  # variables that Kubeflow sets, and the one that turns it off in transformers too
    "url": "KUBEFLOW_TRAINER_SERVER_URL",
    "ca": "KUBEFLOW_TRAINER_SERVER_CA_CERT",
    "token": "KUBEFLOW_TRAINER_SERVER_TOKEN",
    "off": "DISABLE_KUBEFLOW_INTEGRATION",
}
POST_EVERY_S = 5.0  # as transformers posts: the server limits the rate
POST_S = 5.0
MOST_METRICS = 200
HEADER_CHARACTERS = re.compile(r"[\x21-\x7e]+")  # of a header


def open_sink(address: str, say: Callable[[str], None]) -> Sink | None:
    """Return the sink for a TrainJob, None where it is turned off."""
    is_off = os.environ.get(OF_TRAINJOB["off"], "").upper() == "TRUE"
    return None if is_off else Kubeflow(address, say)


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

    def __init__(self, address: str, say: Callable[[str], None]):
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
        clock = time.monotonic()
        self._first = self._first or (step, clock)
        first, since = self._first
        values = {**self._values, "current_step": step, "total_steps": num_steps}
        names = sorted(values, key=lambda name: name not in ("current_step", "total_steps"))
        metrics = [{"name": name, "value": str(values[name])} for name in names[:MOST_METRICS]]
        percent = min(99, 100 * step // num_steps)
        status: dict[str, Any] = {"progressPercentage": percent, "metrics": metrics}
        if self._is_done:
            status |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
        elif step > first:
            left_s = (clock - since) / (step - first) * (num_steps - step)
            status["estimatedRemainingSeconds"] = min(int(left_s), 2**31 - 1)
        return status

    def _post(self, status: Mapping[str, Any]) -> None:
        """Post it. Raises errors whose texts have nothing of the token."""
        address = urlsplit(self._address)
        if address.scheme != "https" or not address.hostname:
            raise ConfigError(
                f"{OF_TRAINJOB['url']}: must be an address, as in https://host/status"
            )
        with _named(OF_TRAINJOB["token"]):
            token_path = Path(os.environ.get(OF_TRAINJOB["token"]) or "no file")
            token = token_path.read_text(errors="replace").strip()
        if not HEADER_CHARACTERS.fullmatch(token):
            raise ConfigError(f"{OF_TRAINJOB['token']}: must be a file with a token")
        timestamp = datetime.now(timezone.utc).isoformat(timespec="seconds")
        body = json.dumps({"trainerStatus": {**status, "lastUpdatedTime": timestamp}})
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        with _named(OF_TRAINJOB["ca"]):
            context = ssl.create_default_context(cafile=os.environ.get(OF_TRAINJOB["ca"]))
        # follows no redirect, which would send the token elsewhere
        link = HTTPSConnection(address.hostname, address.port, timeout=POST_S, context=context)
        try:
            link.request("POST", f"{address.path}?{address.query}".rstrip("?"), body, headers)
            code = link.getresponse().status
        finally:
            link.close()
        if not 200 <= code < 300:
            raise RunError(f"it answers {code}")

    def _tell(self, why: str) -> None:
        if not self._is_told:
            self._is_told = True
            prefix = f"{OF_TRAINJOB['url']}: " if not why.startswith("KUBEFLOW") else ""
            self._say(f"warning: {prefix}{why}; the run goes on, and it is tried again")
