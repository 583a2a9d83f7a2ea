"""Caches of shards that others change, delete and lock, and shards without end.

A run ends like an undisturbed one, or in one line.
"""

from __future__ import annotations

import bz2
import fcntl
import functools
import gzip
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from harness.command import Done
from harness.shard_server import serving

from faults.common import wait_for
from faults.shards import LIMIT_S, Attack, Case, end, measure_case, quick, refused
from trainer.shards import sources
from trainer.shards.index import INDEX_NAME, OF_MDS

BOMB = 2**28  # bytes that a small file decompresses to
MOST = 2**20  # bytes of the cache that it is read into
STUCK_S = 3.0


def _some(attack: Attack) -> int:
    return int(attack.chance.choice((1300, 10**6)))


def linked_root(attack: Attack) -> str | None:
    (attack.place / "disk").mkdir(mode=0o700)
    attack.cache.symlink_to(attack.place / "disk")
    with serving(attack.data) as server:
        return attack.judge(attack.run(server.url, most=_some(attack)))


def kept_times(attack: Attack) -> str | None:
    """Flip a bit in every cached shard, before a run or during one, and restore the times."""

    def flip_all() -> None:
        for path in attack.cached():
            with suppress(FileNotFoundError):
                status = path.stat()
                attack.flip(path)
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    with serving(attack.data) as server:
        problem = attack.judge(attack.run(server.url))
        flip_all()
        shutil.rmtree(attack.place / "runs")
        return problem or attack.judge(attack.run(server.url))


def evicted(attack: Attack) -> str | None:
    """Delete shards all the time while they are opened: none counts as damaged."""
    words = attack.chance.choice(((), ("data.on_error=skip",)))
    workers = f"data.workers={attack.chance.choice((0, 2))}"
    with serving(attack.data, 0.1, attack.chance.random()) as server, quick():
        process = attack.start(server.url, *words, workers, most=_some(attack))
        while process.poll() is None:
            for path in attack.cached():
                path.unlink(missing_ok=True)
            time.sleep(0.002)
        return attack.judge(end(process))


@contextmanager
def _watched(place: Path) -> Iterator[list[int]]:
    """Yield a list of one number, the most bytes that a folder has had during the block."""
    highest = [0]
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            total = 0
            for path in place.rglob("*"):
                with suppress(OSError):
                    total += path.stat().st_blocks * 512 * path.is_file()
            highest[0] = max(highest[0], total)
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield highest
    finally:
        is_over.set()
        thread.join()


def bomb(attack: Attack) -> str | None:
    """Compress shards with many zeros after them; a block of the disk more is rounding."""
    name, pack = attack.chance.choice((("gz", gzip.compress), ("bz2", bz2.compress)))
    index = json.loads((attack.data / OF_MDS).read_text())
    packed = None
    for shard in index["shards"]:
        path = attack.data / shard["raw_data"]["basename"]
        packed = packed or pack(path.read_bytes() + bytes(BOMB))
        path.write_bytes(packed)
        zipped = {"basename": path.name, "bytes": len(packed), "hashes": {}}
        shard |= {"compression": name, "zip_data": zipped}
    (attack.data / OF_MDS).write_text(json.dumps(index))
    (attack.data / INDEX_NAME).unlink()
    attack.ranks = 0
    with _watched(attack.cache) as highest:
        done = attack.run(attack.data, most=MOST)
    must = rf"cache_bytes={MOST}: must hold shard shard\.\d+\.mds, which has more bytes"
    most = 8 * (MOST + len(packed or b"") + 2**14)  # of as many downloads at once
    if highest[0] > most:
        return f"the cache had {highest[0]:,} bytes, and at most {most:,}"
    return refused(done, 1, must)


@contextmanager
def _replying(attack: Attack, reply: Callable[[Any], None]) -> Iterator[tuple[str, list[str]]]:
    """Serve the index; every request for a shard gets `reply(connection)`."""
    server = socket.create_server(("127.0.0.1", 0))
    requests: list[str] = []
    index = (attack.data / INDEX_NAME).read_bytes()

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(4096)
            path = head.split()[1].decode()
            if path.endswith(INDEX_NAME):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(index))
                connection.sendall(index)
            else:
                requests.append(path)
                reply(connection)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}", requests
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def _send(*lines: str) -> Callable[[Any], None]:
    data = "\r\n".join([*lines, "", ""]).encode()
    return lambda connection: connection.sendall(data)


def _without_end(head: bytes, rest: bytes) -> Callable[[Any], None]:
    def reply(connection: Any) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(rest)

    return reply


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
# reply, and words of the line that ends the run
ANSWERS: dict[str, tuple[Callable[[Any], None], str]] = {
    "416": (_send("HTTP/1.1 416 No", "Content-Length: 0"), "HTTP 416: it has no bytes"),
    "empty": (_send("HTTP/1.1 200 OK", "Content-Length: 0"), "has 0 bytes, and 58. in its index"),
    "endless": (
        _without_end(CHUNKED, b"1000\r\n" + bytes(4096) + b"\r\n"),
        "has more than the 58. bytes of its index",
    ),
    "continue": (
        _without_end(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        "after 8 tries: it answers .100 Continue. without end",
    ),
    "ipv6": (
        _send("HTTP/1.1 302 Found", "Location: http://[::1:8/a", "Content-Length: 0"),
        "redirects to an address that cannot be one",
    ),
    "loop": (_send("HTTP/1.1 302 Found", "Location: /a", "Content-Length: 0"), "infinite loop"),
}


def odd_answers(attack: Attack) -> str | None:
    attack.ranks = 0
    reply, wanted = attack.chance.choice([*ANSWERS.values()])
    with quick(), _replying(attack, reply) as (url, requests):
        done = attack.run(url)
    many = 8 * 29
    problem = f"{len(requests):,} requests" if len(requests) > many else None
    return problem or refused(done, 1, wanted, r"shard\.\d+\.mds")


def silent_server(attack: Attack) -> str | None:
    """Ask a run to stop while a server does not answer, and never will."""
    is_over = threading.Event()
    with _replying(attack, lambda connection: is_over.wait(LIMIT_S) and None) as (url, requests):
        process = attack.start(url)
        wait_for(lambda: requests or process.poll() is not None, LIMIT_S)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        done = end(process)
        seconds = time.monotonic() - began
        is_over.set()
    if seconds > 20:
        return f"it ended after {seconds:.0f} s"
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    is_said = any("asked to stop (SIGTERM)" in line for line in errors)
    is_right = done.returncode == 1 and is_said and "Traceback" not in done.stderr
    return None if is_right else f"exit code {done.returncode}: {done.stderr[-500:]}"


def _hold(path: Path) -> None:
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.kill(os.getpid(), signal.SIGSTOP)


def stopped_holder(attack: Attack) -> str | None:
    """Lock a file of the cache in a process that is stopped: it is named, and has a limit."""
    attack.ranks = 0
    before = sources.STUCK_IF_STOPPED_S
    sources.STUCK_IF_STOPPED_S = STUCK_S  # in forks of this process
    with serving(attack.data) as server:
        problem = attack.judge(attack.run(server.url))
        path = attack.chance.choice(attack.cached())
        (attack.cached()[0].with_name("free")).touch()
        for each in attack.cached():
            each.unlink()
        shutil.rmtree(attack.place / "runs")
        names = (path.with_name(path.name + ".part"), path.with_name("free"))
        holder = get_context("fork").Process(target=_hold, args=(attack.chance.choice(names),))
        holder.start()
        try:
            time.sleep(0.2)
            done: Done = attack.run(server.url, most=1300)
        finally:
            sources.STUCK_IF_STOPPED_S = before
            holder.kill()
            holder.join()
        wanted = f"process {holder.pid} .stopped. has locked it"
        problem = problem or refused(done, 1, wanted, "give another cache= folder")
        shutil.rmtree(attack.place / "runs", ignore_errors=True)
        return problem or attack.judge(attack.run(server.url))


CASES: dict[str, tuple[str, Case]] = {
    "linked_root": ("cache behind a link of one's own", linked_root),
    "kept_times": ("flipped bits in cached shards, times kept", kept_times),
    "evicted": ("shards deleted while they are opened", evicted),
    "bombs": ("shards that decompress without end", bomb),
    "stopped": ("lock of a stopped process", stopped_holder),
    "answers": ("answers that are no shards", odd_answers),
    "silent": ("stop asked while a server is silent", silent_server),
}
ROWS = {
    f"cache_{name}": (functools.partial(measure_case, *fault), 6, 1)
    for name, fault in CASES.items()
}
