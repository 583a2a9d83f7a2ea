"""A checkpoint that somebody changed: one of its files is a pickle that runs a command."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import torch

from trainer.base.plain_files import digest_json
from trainer.core.checkpoints.transaction import MANIFEST


class Hostile:
    """Object whose pickle makes the file `marker` when it is loaded."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.system, (f"touch '{self.marker}'",)


def plant(file: Path, marker: Path) -> None:
    """Replace a file of a checkpoint; digests that the checkpoint has are right again.

    Weights in safetensors are replaced by the pickled file that is loaded in their absence.
    """
    if file.name == "model.safetensors" and not (file.parent / MANIFEST).exists():
        file.unlink()
        file = file.with_name("pytorch_model.bin")
    torch.save(Hostile(marker), file)
    if (file.parent / MANIFEST).exists() and file.name != MANIFEST:
        seal(file)


def seal(file: Path) -> None:
    """Write the digests of a changed file and of its manifest anew, as Lockstep writes them."""
    place = file.parent / MANIFEST
    manifest = json.loads(place.read_text())
    content = file.read_bytes()
    entry = manifest["files"][file.name]
    entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["sha256"] = digest_json({k: v for k, v in manifest.items() if k != "sha256"})
    place.write_text(json.dumps(manifest))
