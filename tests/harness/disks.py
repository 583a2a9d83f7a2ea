"""A disk that is soon full."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """Mount a small disk of this user at a new folder; skip the test if that is not allowed."""
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k,mode=700", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(options, capture_output=True).returncode != 0:
        pytest.skip("needs root and tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
