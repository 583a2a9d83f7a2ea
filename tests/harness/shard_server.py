"""An HTTP server of files that fails as servers and networks do, by chance with a seed."""

import random
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

FAULTS = ("drop", "delay", "truncate", "503")  # and "slow"
PIECES = 10  # of a slow answer


class Handler(SimpleHTTPRequestHandler):
    """Sends files, or parts of them; counts their bytes in `server.sent`.

    `server.answering` are the answers that have not ended, also those to a client that was killed.
    `server.most_at_once` were under way at the same time.
    """

    def log_message(self, *_):
        pass

    def do_GET(self):
        with self.server.lock:
            self.server.answering += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.answering)
        try:
            self._answer()
        finally:
            with self.server.lock:
                self.server.answering -= 1

    def _answer(self):
        server = self.server
        with server.lock:
            is_hit = server.draw.random() < server.rate
            fault = server.draw.choice(server.faults) if is_hit else ""
        if fault == "delay":
            time.sleep(0.2)
        if fault == "503":
            self.send_error(503)
            return
        path = self.translate_path(self.path)
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError:
            self.send_error(404)
            return
        begin = end = 0
        if (given := self.headers.get("Range")) and server.has_ranges:
            first, _, last = given.removeprefix("bytes=").partition("-")
            begin, end = int(first), int(last or -1) + 1
        if begin and begin >= len(data):
            self.send_error(416)
            return
        rest = data[begin : end or None]
        self.send_response(206 if begin or end else 200)
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        if fault in ("drop", "truncate"):
            rest = rest[: len(rest) // 2]
        size = -(-len(rest) // PIECES) if fault == "slow" else len(rest)
        for begin in range(0, len(rest), size or 1):
            self._send(rest[begin : begin + size])
            if fault == "slow":
                time.sleep(server.slow_s / PIECES)
        if fault in ("drop", "truncate"):
            self.close_connection = True

    def _send(self, data):
        name = self.path.rpartition("/")[2]
        with self.server.lock:  # first: who has it may look at once
            self.server.sent[name] = self.server.sent.get(name, 0) + len(data)
        with suppress(ConnectionError):  # the client was killed
            self.wfile.write(data)


@contextmanager
def serving(folder, rate=0.0, seed=0, has_ranges=True, port=0, faults=FAULTS, slow_s=0.5):
    """Serve a folder. A request fails with probability `rate`; `server.url` is the address.

    `server.rate` and `server.faults` may be changed; a slow answer takes `slow_s`.
    """
    server = ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, directory=str(folder)))
    server.daemon_threads = True
    server.faults = faults
    server.slow_s = slow_s
    server.draw = random.Random(seed)
    server.rate = rate
    server.has_ranges = has_ranges
    server.lock = threading.Lock()
    server.sent = {}
    server.answering = server.most_at_once = 0
    server.url = f"http://127.0.0.1:{server.server_port}"
    with running(server):
        yield server


@contextmanager
def running(server):
    """Serve in a thread, for the duration of the block."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
