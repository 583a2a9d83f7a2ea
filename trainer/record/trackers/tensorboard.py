"""Trackers: destinations of curves."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoints.disk import Disk
from trainer.config.schema import LogSettings
from trainer.record.files import METRICS, read_entries
from trainer.record.trackers.base import Sink

REOPEN_S = 5.0  # after a failed write of TensorBoard's files


class TensorBoard(Sink):
    """Curves, hyperparameters, images, histograms of the weights, and profiles."""

    def __init__(
        self, directory: Path, step: int, is_resumed: bool, config: LogSettings, disk: Disk
    ):
        from torch.utils.tensorboard import SummaryWriter

        self._folder = directory / "tensorboard"
        self._metrics = directory / METRICS
        self._step = step
        self._disk = disk
        self._num_images = config.images
        self._profiled = config.profile_steps or [0, 0]
        self._profiler: Any = None
        self._open = partial(SummaryWriter, str(self._folder))
        self._board: Any = None
        self._file = self._folder
        self._status: os.stat_result | None = None
        self._purged = step + 1 if is_resumed else None
        self._is_gone = False
        self._reopen_at = 0.0
        self._try_to_open(self._purged)
        self._on_thread_error = threading.excepthook
        threading.excepthook = self._hide_thread_error

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if not self._replace_removed():
            self._draw_scalars(step, values)

    def _draw_scalars(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = Summary(value=points)  # one event for all
        self._draw(partial(_add_summaries, [summary], step))

    def hyper_parameters(self, values: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.summary import hparams

        kinds = (bool, int, float, str)
        plain = {k: v if isinstance(v, kinds) else str(v) for k, v in values.items()}

        self._draw(partial(_add_summaries, hparams(plain, {}), None))

    def images(self, step: int, inputs: Any) -> None:
        is_batch = isinstance(inputs, torch.Tensor) and inputs.dim() == 4
        if not is_batch or inputs.shape[1] not in (1, 3):
            return
        shown = inputs[: self._num_images].detach().float()
        low = shown.amin((1, 2, 3), keepdim=True)
        high = shown.amax((1, 2, 3), keepdim=True)
        shown = (shown - low) / (high - low).clamp_min(1e-12)
        self._draw(lambda board: board.add_images("train/images", shown, step))

    def histogram(self, step: int, name: str, values: torch.Tensor) -> None:
        shown = values.detach().float()
        self._draw(lambda board: board.add_histogram(f"weights/{name}", shown, step))

    def observe(self, step: int) -> None:
        if step == self._profiled[0]:
            trace = torch.profiler.tensorboard_trace_handler(str(self._folder))
            self._profiler = torch.profiler.profile(on_trace_ready=trace)
            self._profiler.start()
        elif step == self._profiled[1]:
            self._stop_profiler()

    def flush(self) -> None:
        self._draw(lambda board: board.flush())

    def close(self) -> None:
        self._stop_profiler()
        self.flush()
        self._replace_removed()
        with contextlib.suppress(OSError):  # a full disk, already reported
            if self._board is not None:
                self._board.close()
        threading.excepthook = self._on_thread_error

    def _stop_profiler(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
        self._profiler = None

    def _draw(self, draw: Callable[[Any], None]) -> None:
        """Write to the board. Its thread ends at an error; a new board is opened seconds later."""
        self._replace_removed()
        if self._board is None and time.monotonic() > self._reopen_at:
            self._try_to_open()
        try:
            if self._board is not None:
                draw(self._board)
        except (FileNotFoundError, NotADirectoryError):  # in the thread, which writes by name
            self._is_gone = True
        except OSError as error:
            self._board = None
            self._reopen_at = time.monotonic() + REOPEN_S
            self._disk.report(error, "writing TensorBoard's events")

    def _replace_removed(self) -> bool:
        """Open a new board if its file was removed or replaced, with the curves so far.

        Returns True if it did; the curves are those of metrics.jsonl, including the last entry.
        """
        if self._board is None or not (self._is_gone or self._is_other()):
            return False
        with contextlib.suppress(OSError):
            self._board.close()
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)  # it lacks events
        has_earlier = any(self._folder.glob("events.out.tfevents.*"))
        self._disk.tell(f"{self._file}: was removed or replaced; the curves are written again")
        self._board = None
        self._is_gone = False
        self._try_to_open(self._purged if has_earlier else None)
        for _, entry in read_entries(self._metrics):
            step = entry.pop("step")
            values = {name: v for name, v in entry.items() if isinstance(v, (int, float))}
            if values and (step > self._step or not has_earlier):
                self._draw_scalars(step, values)
        return True

    def _is_other(self) -> bool:
        """Return True unless the file with the name is the one that the board has opened."""
        try:
            return self._status is None or not os.path.samestat(self._status, self._file.stat())
        except OSError:
            return True

    def _try_to_open(self, purge_step: int | None = None) -> None:
        """Open a board or warn: a run works without, and metrics.jsonl reports disk errors too."""
        try:
            self._board = self._open(purge_step=purge_step)
            self._file = Path(self._board.file_writer.event_writer._file_name)
            self._status = self._file.stat()
        except OSError as error:
            self._reopen_at = time.monotonic() + REOPEN_S
            self._disk.bear(error, "opening TensorBoard's events")

    def _hide_thread_error(self, error: threading.ExceptHookArgs) -> None:
        """Hide the traceback of TensorBoard's thread: `_draw` fails too, and reports the error."""
        is_boards = type(error.thread).__module__.startswith("tensorboard.")
        if not (isinstance(error.exc_value, OSError) and is_boards):
            self._on_thread_error(error)


def _add_summaries(summaries: Iterable[Any], step: int | None, board: Any) -> None:
    for summary in summaries:
        board._get_file_writer().add_summary(summary, step)
