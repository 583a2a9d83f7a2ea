"""An S3 server of moto in a process of its own, which checks credentials."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from harness.waiting import free_port, wait_for

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

    def answers() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    try:
        wait_for(answers)
        yield S3(process, port)
    finally:
        process.kill()
        process.wait()
