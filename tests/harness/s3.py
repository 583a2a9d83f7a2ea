"""An S3 server of moto in a process of its own, which checks credentials, and a proxy before it."""

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from harness.waiting import free_port, wait_for_port

DROPPED_S = 60.0
FREE_CALLS = 4  # without credentials, by which they are made
ALL = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}


class S3:
    """A running server with the bucket `data`; `environment` is that of its users."""

    def __init__(self, process: subprocess.Popen, port: int):
        import boto3

        self.process = process
        url = f"http://127.0.0.1:{port}"
        options = {"endpoint_url": url, "region_name": "us-east-1"}
        keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none"}
        users = boto3.client("iam", **options, **keys)
        policy = json.dumps({"Version": "2012-10-17", "Statement": [ALL]})
        users.create_user(UserName="user")
        users.put_user_policy(UserName="user", PolicyName="all", PolicyDocument=policy)
        made = users.create_access_key(UserName="user")["AccessKey"]
        boto3.client("s3", **options, **keys).create_bucket(Bucket="data")
        self.environment = {
            "AWS_ENDPOINT_URL": url,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": made["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": made["SecretAccessKey"],
            "AWS_MAX_ATTEMPTS": "1",  # botocore tries 5 times, Lockstep 8 times
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def serving_s3(folder: Path) -> Iterator[S3]:
    """Skip the test where moto or s3fs is not installed."""
    for name in ("moto.server", "s3fs"):
        pytest.importorskip(name, reason=f"{name} is not installed: make setup")
    port = free_port()
    with open(folder / "moto.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            env={**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": str(FREE_CALLS)},
            stdout=log,
            stderr=log,
        )

    try:
        wait_for_port(port)
        yield S3(process, port)
    finally:
        process.kill()
        process.wait()


Plan = Callable[
    [int, str, str], str
]  # (number of the request, its method, its path) -> what is done


class Proxy(ThreadingHTTPServer):
    """A proxy in front of a store that does to each request what its `plan` returns.

    "" passes it on; "503", "501" and "409" refuse it; "cut" closes the connection before it is
    passed on, "lost" after that, without the answer, "torn" in the middle of the answer; "drop"
    leaves the client without any; "slow" passes it on after `slow_s`, "hold" once `hold` has
    returned; "200" only says that it was done. `requests` has them all.
    """

    daemon_threads = True

    def __init__(self, url: str):
        super().__init__(("127.0.0.1", 0), _Passing)
        self.behind = url.removeprefix("http://")
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.plan: Plan = lambda number, method, path: ""
        self.after: Callable[[int], None] = lambda number: None
        self.hold: Callable[[], None] = lambda: None
        self.requests: list[tuple[str, str]] = []
        self.slow_s = 0.2
        self._turn = threading.Lock()

    def begin(self, plan: Plan, after: Callable[[int], None] = lambda number: None) -> None:
        """Count the requests anew, under another plan; `after` gets the number of a request before
        its answer is lost."""
        with self._turn:
            self.requests = []
            self.plan = plan
            self.after = after

    def decide(self, method: str, path: str) -> tuple[int, str]:
        with self._turn:
            self.requests.append((method, path))
            number = len(self.requests)
            return number, self.plan(number, method, path)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients are killed while they wait."""


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the acknowledgement of its headers
    server: Proxy

    def log_message(self, format: str, *args: Any) -> None: ...

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        number, done = self.server.decide(self.command, self.path)
        if done in ("503", "501", "409", "200"):
            self.send_response(int(done))
            self.send_header("ETag", '"none"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if done == "cut":
            self.connection.close()
            self.close_connection = True
            return
        if done == "drop":
            self.connection.settimeout(DROPPED_S)
            with suppress(OSError):
                self.connection.recv(1)  # until the client gives up
            self.close_connection = True
            return
        if done == "slow":
            time.sleep(self.server.slow_s)
        if done == "hold":
            self.server.hold()
        behind = http.client.HTTPConnection(self.server.behind, timeout=60)
        behind.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            behind.putheader(name, value)
        behind.endheaders(body)
        answer = behind.getresponse()
        data = answer.read()
        behind.close()
        if done == "lost":
            self.server.after(number)
            self.connection.close()
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        size = answer.getheader("Content-Length") if self.command == "HEAD" else len(data)
        self.send_header("Content-Length", str(size or 0))
        self.end_headers()
        if done == "torn":
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.connection.close()
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass


@contextmanager
def proxied(url: str) -> Iterator[Proxy]:
    with Proxy(url) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
