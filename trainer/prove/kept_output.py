"""The output of a command in a file of a limited size: its first and its last bytes."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from pathlib import Path

HEAD = 1 << 20  # bytes of the beginning, and of the end, that are kept
TAIL = 1 << 20
POLL_MS = 100
TOUCH_S = 1.0  # between two updates of the file's time: a command that prints is not silent


class OutputKeeper:
    """Reads `writer`, the end of a pipe for the command, in a thread until it is closed.

    The end of a long output is added to the file when the command has ended.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file = path.open("wb", buffering=0)
        self._reader, self.writer = os.pipe()
        self._num_written = 0
        self._num_bytes = 0
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._touched = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def start(self) -> None:
        """Begin to read, once the command has its own copy of `writer`."""
        os.close(self.writer)
        self._thread.start()

    def close(self) -> None:
        """Take what is left in the pipe, and complete the file."""
        if not self._thread.ident:
            os.close(self.writer)
        else:
            self._is_over.set()
            self._thread.join()
        os.close(self._reader)
        tail = b"".join(self._tail)[-TAIL:]
        left_out = self._num_bytes - self._num_written - len(tail)
        if left_out > 0:
            self._write(f"\n[{left_out:,} bytes of the output are left out here]\n".encode())
        self._write(tail)
        self._file.close()

    def _copy(self) -> None:
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        while True:
            if not poll.poll(POLL_MS):
                if self._is_over.is_set():  # a process that nobody could end holds the pipe
                    return
                continue
            data = os.read(self._reader, 1 << 16)
            if not data:
                return
            self._take(data)

    def _take(self, data: bytes) -> None:
        self._num_bytes += len(data)
        first = data[: max(0, HEAD - self._num_written)]
        if first:
            self._write(first)
            self._num_written += len(first)
        rest = data[len(first) :]
        if not rest:
            return
        self._tail.append(rest)
        self._tail_size += len(rest)
        while self._tail_size - len(self._tail[0]) >= TAIL:
            self._tail_size -= len(self._tail.popleft())
        if time.monotonic() - self._touched > TOUCH_S:
            self._touched = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def _write(self, data: bytes) -> None:
        """Write to the file; a full disk or a limit of the shell must not stop the command."""
        with contextlib.suppress(OSError):
            while data:
                data = data[self._file.write(data) or len(data) :]
