"""Azurite, Microsoft's own emulator of Azure's blobs, in a process of its own (npm installs it)."""

import base64
import hashlib
import hmac
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import pytest

from harness.waiting import free_port, wait_for_port
from harness.weights import CACHE, LIMIT_S

PACKAGE = "azurite@3.35.0"
ACCOUNT = "first"
CONTAINER = "data"
VERSION = "2021-08-06"  # of the service's interface


@contextmanager
def serving_azure(folder: Path) -> Iterator[dict[str, str]]:
    """Serve the container `data`; yield the environment of its users.

    Skip the test where Azurite cannot be installed.
    """
    program = _installed()
    port = free_port()
    key = base64.b64encode(os.urandom(32)).decode()
    words = [str(program), "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    process = subprocess.Popen(
        [*words, "--location", str(folder), "--blobPort", str(port)],
        env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{key}"},
        stdout=subprocess.DEVNULL,
    )

    url = f"http://127.0.0.1:{port}/{ACCOUNT}"
    try:
        wait_for_port(port)
        _make_container(url, key)
        yield {
            "AZURE_STORAGE_ENDPOINT": url,
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": key,
        }
    finally:
        process.kill()
        process.wait()


def _installed() -> Path:
    """Return Azurite's program for blobs; install it if it is not there."""
    place = CACHE / PACKAGE.replace("@", "-")
    if not place.exists():
        if shutil.which("npm") is None or shutil.which("node") is None:
            pytest.skip("npm is not installed, which installs Azurite")
        CACHE.mkdir(parents=True, exist_ok=True)
        words = ["npm", "install", "--silent", "--prefix", f"{place}-new", PACKAGE]
        try:
            subprocess.run(words, check=True, capture_output=True, timeout=LIMIT_S)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"{PACKAGE} cannot be installed: {error}")
        Path(f"{place}-new").rename(place)
    return place / "node_modules/.bin/azurite-blob"


def _make_container(url: str, key: str) -> None:
    """Make the container by one request that is signed as the service's reference says
    (learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key)."""
    date = datetime.now(timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = f"x-ms-date:{date}\nx-ms-version:{VERSION}"
    place = f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
    text = "\n".join(["PUT", *[""] * 11, headers, place])
    digest = hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()
    signed = {
        "x-ms-date": date,
        "x-ms-version": VERSION,
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
        "Content-Length": "0",
    }
    request = urllib.request.Request(
        f"{url}/{CONTAINER}?restype=container", method="PUT", headers=signed
    )
    assert urllib.request.urlopen(request).status == 201
