"""Standard streams that outlive their terminal, and tables on them.

Output that cannot be written is dropped.
"""

from __future__ import annotations

import io
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from trainer.base.errors import visible

READER_WAIT_S = 5.0  # while it does not read; the watcher would take a longer wait for a hang
STREAM_NAMES = ("stdin", "stdout", "stderr")
TABLE_WIDTH = 500  # columns of a table in a file or a pipe: nearly every line is whole
# Hugging Face's libraries, which draw bars on stderr; by the variable that hides them at an import
BARS = {
    "HF_HUB_DISABLE_PROGRESS_BARS": ("transformers.utils.logging", "huggingface_hub.utils"),
    "HF_DATASETS_DISABLE_PROGRESS_BARS": ("datasets.utils",),
}
_limits: list[float] = []  # how long to wait for a reader; empty: without limit


class _Descriptor(io.RawIOBase):
    """Output of a descriptor; what has no reader or no room is dropped, and counted.

    A pipe or terminal is opened again for this process, so that its writes do not block: a frozen
    reader, or Ctrl-S, would stop the run. The original is shared with other processes.
    """

    def __init__(self, descriptor: int):
        super().__init__()
        self._number = descriptor
        self._own = _reopen(descriptor)
        self._is_read = True
        self._lost = 0

    def write(self, data: Any) -> int:
        size = len(data)
        if self._lost and self._send(f"\n[{self._lost:,} bytes of output were lost]\n".encode()):
            self._lost = 0
        if self._lost or not self._send(bytes(data)):
            self._lost += size
        return size

    def _send(self, data: bytes) -> bool:
        """Write, and return False if that fails; after a first wait in vain do not wait again."""
        end = time.monotonic() + _limits[-1] * self._is_read if _limits else None
        while data:
            try:
                data = data[os.write(self._own, data) :]
            except BlockingIOError:
                self._is_read = self._wait(end)
                if not self._is_read:
                    return False
            except OSError:
                return False
        self._is_read = True
        return True

    def _wait(self, end: float | None) -> bool:
        poll = select.poll()
        poll.register(self._own, select.POLLOUT)
        return bool(poll.poll(None if end is None else max(0.0, end - time.monotonic()) * 1000))

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number  # child processes get the one that blocks

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def close(self) -> None:
        if not self.closed and self._own != self._number:
            os.close(self._own)
        super().close()


def _reopen(descriptor: int) -> int:
    """Open the pipe or terminal of a descriptor again, non-blocking; else return the descriptor."""
    with suppress(OSError):
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode) or os.isatty(descriptor):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            return os.open(f"/proc/self/fd/{descriptor}", flags)
    return descriptor


class LastingStream:
    """Text stream in place of another one; a write never fails, and it cannot be closed."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # ValueError: it is closed, or cannot encode the text
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def close(self) -> None:
        self.flush()

    def isatty(self) -> bool:
        with suppress(OSError, ValueError):
            return bool(self._stream.isatty())
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_terminal() -> None:
    """Have standard output and error never fail, and open closed streams on /dev/null.

    Otherwise the next files to be opened would get the descriptors of the closed streams. It may
    be called again, for streams that the program has replaced since.
    """
    for stream_number, name in enumerate(STREAM_NAMES):
        try:
            os.fstat(stream_number)
        except OSError:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free one: `stream_number`
            os.set_inheritable(descriptor, True)
            mode = "r" if stream_number == 0 else "w"
            setattr(sys, name, open(stream_number, mode, closefd=False))  # noqa: SIM115
        stream = getattr(sys, name)
        if stream_number and not isinstance(stream, LastingStream) and _is_replaceable(stream):
            own = _open_text(stream_number, stream) if _is_on(stream, stream_number) else stream
            setattr(sys, name, LastingStream(own))
    if hasattr(signal, "SIGTTOU") and signal.getsignal(signal.SIGTTOU) == signal.SIG_DFL:
        with suppress(ValueError):  # in another thread
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # stops a background process that writes


def _is_replaceable(stream: Any) -> bool:
    """Return False for the stream of a progress bar, which writes to ours."""
    return stream is not None and not hasattr(stream, "rich_proxied_file")


def _open_text(descriptor: int, stream: Any) -> io.TextIOWrapper:
    """Return a text stream like Python's own, which escapes characters that it cannot encode."""
    with suppress(OSError, ValueError):
        stream.flush()
    raw = io.BufferedWriter(_Descriptor(descriptor))
    is_quick = stream.line_buffering or stream.write_through or descriptor == 2
    return io.TextIOWrapper(raw, stream.encoding, "backslashreplace", None, is_quick)


def _is_on(stream: Any, descriptor: int) -> bool:
    """Return True for Python's own stream of a descriptor, False for a program's replacement."""
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == descriptor
    except (OSError, ValueError):
        return False


@contextmanager
def lasting_output() -> Iterator[None]:
    """Have the output neither fail nor stop this process during the block."""
    before = (sys.stdout, sys.stderr)
    outlive_terminal()
    ours = (sys.stdout, sys.stderr)
    _limits.append(READER_WAIT_S)
    try:
        yield
    finally:
        _limits.pop()
        for name, old, new in zip(STREAM_NAMES[1:], before, ours, strict=True):
            if getattr(sys, name) is new and old is not None:
                new.flush()
                setattr(sys, name, old)


class HidingStream(LastingStream):
    """Output without texts that name a folder, such as one that is removed at the end."""

    def __init__(self, stream: Any, hidden: str):
        super().__init__(stream)
        self._hidden = hidden

    def write(self, text: str) -> int:
        return len(text) if self._hidden in text else super().write(text)


class MutedStream(LastingStream):
    """Output without what the thread that makes the stream writes; other threads' lines stay."""

    def __init__(self, stream: Any):
        super().__init__(stream)
        self._muted = threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._muted else super().write(text)


@contextmanager
def without_bars() -> Iterator[None]:
    """Hide progress bars of Hugging Face's libraries in the block: each rank would draw its own.

    Those that are imported in the block stay without. A variable that the user has set decides.
    """
    with ExitStack() as stack:
        for variable in BARS.keys() - os.environ.keys():
            os.environ[variable] = "1"
            stack.callback(os.environ.pop, variable, None)
            for library in BARS[variable]:
                if (module := sys.modules.get(library)) is not None:
                    stack.enter_context(_hidden_bars(module))
        yield


@contextmanager
def _hidden_bars(library: Any) -> Iterator[None]:
    is_single = hasattr(library, "is_progress_bar_enabled")  # of transformers and datasets
    end = "" if is_single else "s"
    if is_single:
        is_drawn = library.is_progress_bar_enabled()
    else:
        is_drawn = not library.are_progress_bars_disabled()
    getattr(library, f"disable_progress_bar{end}")()
    try:
        yield
    finally:
        if is_drawn:
            getattr(library, f"enable_progress_bar{end}")()


class SoleDocument:
    """Standard output, kept for one text: all else that is printed goes to standard error."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._own: int | None = os.dup(1)
        os.dup2(2, 1)  # for child processes, and for libraries that are not Python
        sys.stdout = sys.stderr

    def write(self, text: str) -> None:
        """Write the text; a second one is dropped."""
        if self._own is not None:
            with suppress(OSError), open(self._own, "w", encoding="utf-8") as file:
                file.write(text)
        self._own = None


class CurrentOutput:
    """Standard output as it is at each write, which never fails.

    rich ends the process at a broken pipe, and its progress bar replaces sys.stdout.
    """

    def __getattr__(self, name: str) -> Any:
        stream = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
        return getattr(LastingStream(stream), name)


def build_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Sequence[str] = (),
    styles: Mapping[str, Mapping[str, str]] | None = None,
    **options: Any,
) -> Any:
    """Return a table of rich that shows each text as it is, with control characters escaped.

    `numbers`: columns that are aligned on the right; `styles[column][text]`: style of a cell;
    `options`: more arguments of rich's Table.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", **options)
    for column in columns:
        side: Any = "right" if column in numbers else "left"
        table.add_column(Text(visible(column)), justify=side)
    own = [(styles or {}).get(column, {}) for column in columns]
    for row in rows:
        cells = zip(row, own, strict=False)  # the last columns of a row may be empty
        table.add_row(
            *(Text(visible(text), styles_by_text.get(text, "")) for text, styles_by_text in cells)
        )
    return table


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], **options: Any) -> None:
    """Print a table with the options of `build_table`."""
    from rich.console import Console

    Console(width=width_of(sys.stdout)).print(build_table(columns, rows, **options))
    sys.stdout.flush()


def width_of(stream: Any) -> int | None:
    """Return the width of a table: None for that of the terminal."""
    return None if stream.isatty() else TABLE_WIDTH
