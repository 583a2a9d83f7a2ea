"""TensorBoard: curves, images, histograms and profiles in the run directory."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch

from trainer.core.checkpoints.disk import Disk
from trainer.core.checkpoints.run_directory import METRICS, read_entries
from trainer.core.config.schema import LogSettings
from trainer.core.record.trackers import SAMPLES, Sink

REOPEN_S = 5.0  # after a failed write of TensorBoard's files


class TensorBoard(Sink):
    """Curves, hyperparameters, images, histograms of the weights, and profiles."""

    def __init__(
        self,
        directory: Path,
        step: int,
        is_resumed: bool,
        config: LogSettings,
        splits: Sequence[str],
        disk: Disk,
    ):
        self._folder = directory / "tensorboard"
        self._metrics = directory / METRICS
        self._step = step
        self._num_images = config.images
        self._splits = ("train", *splits)
        self._purged = step + 1 if is_resumed else None
        self._profiler = Profiler(self._folder, config.profile_steps or [0, 0])
        self._file = EventFile(self._folder, self._purged, disk)
        self._on_thread_error = threading.excepthook
        threading.excepthook = self._hide_thread_error
        self._draw_layout()

    def _draw_layout(self) -> None:
        """Ask for one chart with the losses of training and evaluation, in Custom Scalars."""
        tags = [f"{re.escape(split)}/loss$" for split in self._splits]  # they are patterns
        layout = {"loss": {"training and evaluation": ["Multiline", tags]}}
        self._file.write(lambda board: board.add_custom_scalars(layout))

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

    def note(self, step: int, facts: Mapping[str, Any]) -> None:
        for name, text in facts.items():
            if name.startswith(SAMPLES):
                block = "\n".join(f"    {line}" for line in text.splitlines())  # of Markdown
                self._draw(methodcaller("add_text", name, block, step))

    def histogram(self, step: int, name: str, values: torch.Tensor) -> None:
        shown = values.detach().float()
        self._draw(lambda board: board.add_histogram(f"weights/{name}", shown, step))

    def profile(self, step: int) -> None:
        self._profiler.profile(step)

    def flush(self) -> None:
        self._draw(lambda board: board.flush())

    def close(self) -> None:
        self._profiler.stop()
        self.flush()
        self._replace_removed()
        self._file.close()
        threading.excepthook = self._on_thread_error

    def _draw(self, draw: Callable[[Any], None]) -> None:
        self._replace_removed()
        self._file.write(draw)

    def _replace_removed(self) -> bool:
        """Open a new file if the file was removed or replaced, and write the curves again.

        Returns True if it did. The curves are those of metrics.jsonl, including the last entry.
        """
        if not self._file.is_removed:
            return False
        self._file.discard()
        has_earlier = any(self._folder.glob("events.out.tfevents.*"))
        self._file.open(self._purged if has_earlier else None)
        self._draw_layout()
        for _, entry in read_entries(self._metrics):
            step = entry.pop("step")
            values = {name: v for name, v in entry.items() if isinstance(v, (int, float))}
            if values and (step > self._step or not has_earlier):
                self._draw_scalars(step, values)
        return True

    def _hide_thread_error(self, error: threading.ExceptHookArgs) -> None:
        """Hide the traceback of TensorBoard's thread: `EventFile.write` reports the error."""
        is_boards = type(error.thread).__module__.startswith("tensorboard.")
        if not (isinstance(error.exc_value, OSError) and is_boards):
            self._on_thread_error(error)


class EventFile:
    """The file of events. Another program may remove it; after an error it is opened again."""

    def __init__(self, folder: Path, purge_step: int | None, disk: Disk):
        from torch.utils.tensorboard import SummaryWriter

        self._open = partial(SummaryWriter, str(folder))
        self._disk = disk
        self._board: Any = None
        self._path = folder
        self._status: os.stat_result | None = None  # None: it was removed
        self._reopen_at = 0.0
        self.open(purge_step)

    def open(self, purge_step: int | None = None) -> None:
        """Open a file, or warn: a run works without, and metrics.jsonl reports disk errors too."""
        try:
            self._board = self._open(purge_step=purge_step)
            self._path = Path(self._board.file_writer.event_writer._file_name)
            self._status = self._path.stat()
        except OSError as error:
            self._reopen_at = time.monotonic() + REOPEN_S
            self._disk.bear(error, "opening TensorBoard's events")

    def write(self, draw: Callable[[Any], None]) -> None:
        """Call `draw(board)`. An error ends the board's thread: open another, seconds later."""
        if self._board is None and time.monotonic() > self._reopen_at:
            self.open()
        try:
            if self._board is not None:
                draw(self._board)
        except (FileNotFoundError, NotADirectoryError):  # in the thread, which writes by name
            self._status = None
        except OSError as error:
            self._board = None
            self._reopen_at = time.monotonic() + REOPEN_S
            self._disk.report(error, "writing TensorBoard's events")

    @property
    def is_removed(self) -> bool:
        """True if the file was removed or replaced after it was opened."""
        own = self._status
        with contextlib.suppress(OSError):
            if self._board is None or (own and os.path.samestat(own, self._path.stat())):
                return False
        return True

    def discard(self) -> None:
        """Close a file that was removed or replaced, and remove the rest: it lacks events."""
        self.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        self._disk.tell(f"{self._path}: was removed or replaced; the curves are written again")
        self._board = None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, already reported
            if self._board is not None:
                self._board.close()


class Profiler:
    """A profile by torch.profiler, from one step to another."""

    def __init__(self, folder: Path, steps: Sequence[int]):
        self._folder = folder
        self._steps = steps
        self._profile: Any = None

    def profile(self, step: int) -> None:
        """Start or stop after this step, if it is the first or the last one."""
        if step == self._steps[0]:
            trace = torch.profiler.tensorboard_trace_handler(str(self._folder))
            self._profile = torch.profiler.profile(on_trace_ready=trace)
            self._profile.start()
        elif step == self._steps[1]:
            self.stop()

    def stop(self) -> None:
        if self._profile is not None:
            self._profile.stop()
        self._profile = None


def _add_summaries(summaries: Iterable[Any], step: int | None, board: Any) -> None:
    for summary in summaries:
        board._get_file_writer().add_summary(summary, step)
