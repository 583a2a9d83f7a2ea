"""A slow line: a TCP proxy that passes at most so many bytes a second, over all connections."""

import mmap
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PIECE = 2**14
UP, DOWN = 0, 1


class Line:
    """A line to a server. `rates[UP]` and `rates[DOWN]` are bytes per second; ranks that were
    forked meanwhile may change them too."""

    def __init__(self, url: str):
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._behind = (host, int(port))
        self.rates = memoryview(mmap.mmap(-1, 16)).cast("d")
        self.rates[UP] = self.rates[DOWN] = 1e9
        self._turns = [threading.Lock(), threading.Lock()]
        self._free = [0.0, 0.0]
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._open: list[socket.socket] = []
        self._threads[0].start()

    def close(self) -> None:
        for each in (self._server, *self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in (self._server, *self._open):
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * PIECE)
                server = socket.create_connection(self._behind)
                self._open += [client, server]
                for ends in ((client, server, UP), (server, client, DOWN)):
                    self._threads.append(threading.Thread(target=self._pass, args=ends))
                    self._threads[-1].start()

    def _pass(self, source: socket.socket, to: socket.socket, way: int) -> None:
        with suppress(OSError):
            while data := source.recv(PIECE):
                with self._turns[way]:
                    begin = max(self._free[way], time.monotonic())
                    self._free[way] = begin + len(data) / self.rates[way]
                    time.sleep(max(0.0, self._free[way] - time.monotonic()))
                to.sendall(data)
        for end in (source, to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def slow_line(url: str) -> Iterator[Line]:
    line = Line(url)
    try:
        yield line
    finally:
        line.close()
