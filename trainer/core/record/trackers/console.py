"""The console: lines, tables, and progress as a bar on a terminal or else as regular lines."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.base.errors import visible
from trainer.base.process.streams import CurrentOutput, build_table, width_of
from trainer.core.record.trackers import SAMPLES, Sink

PROGRESS = {  # beside the losses, once they are logged
    "optim/lr": "lr {:,.3g}",
    "speed/examples_per_s": "{:,.0f} examples/s",
}
LINE_EVERY_S = 5.0
QUIET_S = 30.0  # without a logged value; then a line has the time left alone
NOTEBOOK_COLUMNS = 100  # columns that the line of progress covers
WIDE_COLUMNS = 80  # columns of a terminal with room for a bar
NOTICES = ("warning: ", "hint: ", "slower than ", "with more ", "without ")
LABEL = re.compile(r"(?=.{7} \S)[\w.-]+ +(?<=.{8})\S")  # of a line of the start
BAR_EVERY_S = 0.2
MOST_LOSSES = 4


class Console(Sink):
    """Rank 0's terminal, or the file that its output is redirected to."""

    def __init__(self) -> None:
        from rich.console import Console as Terminal

        file: Any = CurrentOutput()
        width = width_of(file)
        self._is_notebook = "ipykernel" in sys.modules
        self._is_line_open = False  # of progress, in a notebook
        # rich would print a block of HTML for each line
        self._terminal = Terminal(file=file, width=width, highlight=False, force_jupyter=False)
        self._is_live = self._is_notebook or self._terminal.is_terminal
        self._every_s = BAR_EVERY_S if self._is_live else LINE_EVERY_S
        self._bar: Any = None
        self._values: dict[str, float] = {}
        self._first_step: int | None = None  # that was told
        self._began = self._last = time.monotonic()

    def say(self, text: str) -> None:
        from rich.text import Text

        shown = Text(visible(text))
        if text.startswith(NOTICES):
            shown.stylize("yellow")
        elif LABEL.match(text):
            shown.stylize("bold", 0, text.index(" "))
        self._end_line()
        self._terminal.print(shown, soft_wrap=True)

    def _end_line(self) -> None:
        if self._is_line_open:
            self._terminal.file.write("\n")
        self._is_line_open = False

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._end_line()
        self._terminal.print(build_table(columns, rows))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._values |= values

    def note(self, step: int, facts: Mapping[str, Any]) -> None:
        for name, text in facts.items():
            if name.startswith(SAMPLES):
                self.say(f"{name.removeprefix(SAMPLES)}:")
                for line in text.splitlines():
                    self.say(f"    {line}")

    def progress(self, step: int, num_steps: int, is_last: bool) -> None:
        now_s = time.monotonic()
        if self._first_step is None:  # it compiles and chooses kernels: later ones are faster
            self._first_step, self._began = step, now_s
        is_new = self._is_live or self._values
        if now_s - self._last < (self._every_s if is_new else QUIET_S) and not is_last:
            return
        self._last = now_s
        values = self._values
        parts = [f"{name} {values[f'train/{name}']:,.4f}" for name in _losses(values)]
        parts += [words.format(values[name]) for name, words in PROGRESS.items() if name in values]
        if step > self._first_step or is_last:
            per_step = (now_s - self._began) / max(1, step - self._first_step)
            parts.append(f"{_clock(per_step * (num_steps - step))} left")
        shown = "  ".join(parts)
        if self._is_notebook:
            line = f"step {step:,}/{num_steps:,}  {shown}"
            self._terminal.file.write(f"\r{line:<{NOTEBOOK_COLUMNS}}")
            self._is_line_open = not is_last
            if is_last:
                self._terminal.file.write("\n")
            return
        if not self._terminal.is_terminal:
            self.say(f"step {step:,}/{num_steps:,}  {shown}")
            self._values.clear()  # a line between two logs would repeat them
            return
        if self._bar is None:
            self._open_bar(num_steps)
        self._bar.update(0, completed=step, shown=shown)
        self._bar.refresh()
        if is_last:
            self.close()

    def _open_bar(self, num_steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        label = TextColumn("{task.fields[shown]}")
        bar = BarColumn(None, complete_style="green", finished_style="green")
        is_wide = self._terminal.width >= WIDE_COLUMNS
        columns = (TextColumn("step"), *([bar] if is_wide else []), MofNCompleteColumn(), label)
        self._bar = Progress(*columns, console=self._terminal, auto_refresh=False, transient=True)
        self._bar.add_task("train", total=num_steps, shown="")
        self._bar.start()

    def close(self) -> None:
        self._end_line()
        if self._bar is not None:
            self._bar.stop()
        self._bar = None


def _losses(values: Mapping[str, float]) -> list[str]:
    """Return the names of the updates whose losses were logged, else of what a task recorded."""
    names = [name.removeprefix("train/") for name in values if name.startswith("train/")]
    updates = [name for name in names if name == "loss" or f"optim/grad_norm/{name}" in values]
    return (updates or names)[:MOST_LOSSES]


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
