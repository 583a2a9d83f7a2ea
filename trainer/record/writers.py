"""What a run shows and writes: TensorBoard, metrics.jsonl and the console. On every rank but 0 it is silent."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoints import packing
from trainer.checkpoints import transaction as checkpoint
from trainer.config.schema import Checkpoint, Log
from trainer.errors import CheckpointError, RunError, visible
from trainer.record import directory as rundir
from trainer.record.lease import Lease

LINE_EVERY_S = 5.0
BAR_EVERY_S = 0.2
REOPEN_S = 5.0  # after TensorBoard's files could not be written


class Writer:
    """The face, and the silent writer: callers never ask for the rank."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One line of metrics.jsonl and a point per name in TensorBoard; a name at most once per step."""

    def say(self, text: str = "") -> None:
        """A line for the person at the terminal."""

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None: ...

    def progress(self, step: int, num_steps: int) -> None:
        """Called after every step; costs a clock reading unless something is due. The bar goes when both are equal."""

    def hyper_parameters(self, values: Mapping[str, Any]) -> None: ...

    def images(self, inputs: Any) -> None:
        """Called with every training micro-batch; shows the first, where it is images and they are asked for."""

    def observe(self, step: int, model: torch.nn.Module) -> None:
        """Called after every step: histograms of the weights, and the profiler, when they are due."""

    def save(
        self, step: int, parts: Mapping[str, Any], facts: Mapping[str, Any], best: int | None
    ) -> None:
        """Publish a checkpoint, with everything logged before it on the disk; then remove older ones, not the best.

        With checkpoint.background behind the caller, one at a time: `settle` waits for it.
        """

    def settle(self) -> None:
        """Wait for what is being written. Raises RunError, one line, for what could not be."""

    @property
    def has_failed(self) -> bool:
        """Whether `settle` would raise now; asked after every step."""
        return False

    def exit(self, code: int, reason: str, **facts: Any) -> None:
        """Write exit.json."""

    def close(self) -> None: ...


class RankZeroWriter(Writer):
    """`step` is where the run goes on: what an earlier process wrote beyond it is dropped from both records."""

    def __init__(
        self,
        directory: Path,
        step: int,
        is_resumed: bool,
        config: Log,
        keep: Checkpoint,
        lease: Lease | None,
    ):
        from rich.console import Console
        from torch.utils.tensorboard import SummaryWriter

        self._console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
        self._every_s = BAR_EVERY_S if self._console.is_terminal else LINE_EVERY_S
        self._bar: Any = None
        self._task: Any = None
        self._shown = {
            "train/loss": math.nan,
            "optim/lr": math.nan,
            "speed/examples_per_s": math.nan,
        }
        self._began, self._last = (step, time.monotonic()), time.monotonic()
        self._directory, self._num_images = directory, config.images
        self._keep, self._lease, self._warned = keep, lease, set[tuple[str, int | None]]()
        self._pool: ThreadPoolExecutor | None = None
        self._saving: Future[None] | None = None
        self._failure: RunError | None = None
        self._profiler: Any = None
        self._histograms, self._profiled = (
            config.histograms_every_steps,
            config.profile_steps or [0, 0],
        )
        path = directory / rundir.METRICS
        _keep_until(path, step)
        self._metrics = open(path, "a", encoding="utf-8", opener=rundir.opener)  # noqa: SIM115
        self._open_board = partial(SummaryWriter, str(directory / "tensorboard"))
        self._board: Any = self._open_board(purge_step=step + 1 if is_resumed else None)
        self._reopen_at, self._on_thread_error = 0.0, threading.excepthook
        threading.excepthook = self._heed

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._record({"step": step, **rundir.strict(values)})
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._show(
            lambda board: board._get_file_writer().add_summary(Summary(value=points), step)
        )  # one event for all
        self._shown |= {name: value for name, value in values.items() if name in self._shown}

    def say(self, text: str = "") -> None:
        self._console.print(visible(text), markup=False, soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table(*columns, box=None, header_style="bold")
        for row in rows:
            table.add_row(
                *(Text(visible(cell)) for cell in row)
            )  # a Text: its brackets are no markup
        self._console.print(table)

    def progress(self, step: int, num_steps: int) -> None:
        now = time.monotonic()
        if now - self._last < self._every_s and step < num_steps:
            return
        self._last = now
        loss, rate, speed = self._shown.values()
        left = (now - self._began[1]) / max(1, step - self._began[0]) * (num_steps - step)
        shown = f"loss {_short(loss)}  lr {_short(rate)}  {_short(speed, 0)} examples/s  {_clock(left)} left"
        if not self._console.is_terminal:
            self.say(f"step {step:,}/{num_steps:,}  {shown}")
            return
        if self._bar is None:
            self._open_bar(num_steps)
        self._bar.update(self._task, completed=step, shown=shown)
        self._bar.refresh()
        if step == num_steps:
            self._close_bar()

    def _open_bar(self, num_steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (
            TextColumn("step"),
            BarColumn(None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
        )
        self._bar = Progress(*columns, console=self._console, auto_refresh=False, transient=True)
        self._task = self._bar.add_task("train", total=num_steps, shown="")
        self._bar.start()

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = None

    def hyper_parameters(self, values: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.summary import hparams

        plain = {
            k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in values.items()
        }
        for summary in hparams(plain, {}):
            self._show(lambda board, summary=summary: board._get_file_writer().add_summary(summary))  # type: ignore[misc]

    def images(self, inputs: Any) -> None:
        if (
            self._num_images
            and isinstance(inputs, torch.Tensor)
            and inputs.dim() == 4
            and inputs.shape[1] in (1, 3)
        ):
            shown = inputs[: self._num_images].detach().float()
            low, high = shown.amin((1, 2, 3), keepdim=True), shown.amax((1, 2, 3), keepdim=True)
            shown = (shown - low) / (high - low).clamp_min(1e-12)
            self._show(lambda board: board.add_images("train/images", shown, self._began[0]))
        self._num_images = 0

    def observe(self, step: int, model: torch.nn.Module) -> None:
        if self._histograms and step % self._histograms == 0:
            for name, parameter in model.named_parameters():
                weights = (f"weights/{name}", parameter.detach().float(), step)
                self._show(lambda board, weights=weights: board.add_histogram(*weights))  # type: ignore[misc]
        if step == self._profiled[0]:
            kept = torch.profiler.tensorboard_trace_handler(str(self._directory / "tensorboard"))
            self._profiler = torch.profiler.profile(on_trace_ready=kept)
            self._profiler.start()
        elif step == self._profiled[1]:
            self._stop_profiler()

    def _stop_profiler(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
        self._profiler = None

    def save(
        self, step: int, parts: Mapping[str, Any], facts: Mapping[str, Any], best: int | None
    ) -> None:
        self.settle()
        self._record({"step": step, "ledger": facts["ledger"]})
        if not self._keep.background:
            self._publish(step, parts, facts, best)
            return
        self._pool = self._pool or ThreadPoolExecutor(1, "checkpoint")
        self._saving = self._pool.submit(
            self._publish, step, packing.private_copy(parts), facts, best
        )

    def settle(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()
        if self._failure is not None:
            raise self._failure

    @property
    def has_failed(self) -> bool:
        saving = self._saving
        return self._failure is not None or bool(saving and saving.done() and saving.exception())

    def _publish(
        self, step: int, parts: Mapping[str, Any], facts: Mapping[str, Any], best: int | None
    ) -> None:
        root, keep = self._directory / "checkpoints", self._keep
        also = {best} if keep.keep_best else set()
        try:
            os.fsync(self._metrics.fileno())
            self._show(lambda board: board.flush())
            checkpoint.save(root, step, packing.packed(parts), facts, self._check_owner)
            self._warned = {
                kind for kind in self._warned if kind[0] != "saving"
            }  # the next failure is another one
            checkpoint.prune(
                root,
                keep.keep_last,
                keep.keep_best,
                keep.metric,
                keep.best_mode,
                also,
                self._check_owner,
            )
        except OSError as error:
            self._check_owner()  # a successor has swept what was being written
            self._blame(error, f"saving step {step}", packing.size_of(parts))
            if self._failure is not None:
                raise self._failure from None

    def _show(self, draw: Callable[[Any], None]) -> None:
        """Something for TensorBoard. Its thread ends with the first error; some seconds later another takes over."""
        try:
            if self._board is None and time.monotonic() > self._reopen_at:
                self._board = self._open_board()
            if self._board is not None:
                draw(self._board)
        except OSError as error:
            self._board, self._reopen_at = None, time.monotonic() + REOPEN_S
            self._blame(error, "writing TensorBoard's events", 0)

    def _heed(self, error: threading.ExceptHookArgs) -> None:
        """TensorBoard's thread fails where we do, and `_show` tells of it: no traceback besides."""
        if not (
            isinstance(error.exc_value, OSError)
            and type(error.thread).__module__.startswith("tensorboard.")
        ):
            self._on_thread_error(error)

    def _record(self, entry: Mapping[str, Any]) -> None:
        try:
            self._metrics.write(json.dumps(entry) + "\n")
            self._metrics.flush()  # what could not be written stays in the buffer for the next time
        except OSError as error:
            self._blame(error, "writing metrics.jsonl", 0)

    def _check_owner(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def _blame(self, error: OSError, doing: str, need: int) -> None:
        """What checkpoint.on_error says: the run ends at the next boundary, or a warning, once for each kind."""
        place, free = error.filename or self._directory, shutil.disk_usage(self._directory).free
        sizes = f"{need / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB free"
        line = f"{place}: {error.strerror or error} in {doing}; {sizes}"
        if self._keep.on_error == "stop":
            advice = "make room and go on with run.resume, or give checkpoint.on_error=continue"
            self._failure = RunError(f"{line}; {advice}")
        elif (kind := (doing.split(" step ")[0], error.errno)) not in self._warned:
            self._warned.add(kind)
            self.say(f"warning: {line}; going on, as checkpoint.on_error=continue says")

    def exit(self, code: int, reason: str, **facts: Any) -> None:
        try:
            self._check_owner()
            rundir.write_exit(self._directory, code, reason, **facts)
        except CheckpointError:
            return  # it is another's to write
        except OSError as error:
            self.say(f"warning: {self._directory / 'exit.json'}: {error.strerror}")

    def close(self) -> None:
        self._close_bar()
        self._stop_profiler()
        if self._pool is not None:
            self._pool.shutdown()
        for record in filter(None, (self._metrics, self._board)):
            with contextlib.suppress(OSError):  # a full disk, and it was said
                record.close()
        threading.excepthook = self._on_thread_error
        if self._lease is not None:
            self._lease.release()


def open_writer(
    rank: int,
    directory: Path,
    step: int,
    is_resumed: bool,
    config: Log,
    keep: Checkpoint,
    lease: Lease | None = None,
) -> Writer:
    return (
        RankZeroWriter(directory, step, is_resumed, config, keep, lease) if rank == 0 else Writer()
    )


def _keep_until(path: Path, step: int) -> None:
    """Drop what stands beyond `step` in metrics.jsonl, and a last line that was cut off."""
    if path.exists():
        rundir.replace(
            path,
            "".join(f"{line}\n" for line, entry in rundir.entries(path) if entry["step"] <= step),
        )


def _short(value: float, digits: int = 4) -> str:
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
