"""The state of a run as a checkpoint holds it, read by rank 0 and handed to all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoints import packing
from trainer.checkpoints.manifest import Manifest
from trainer.checkpoints.transaction import Loaded
from trainer.distributed.group import Group
from trainer.errors import CheckpointError

MODEL = "model.pt"
TRAINING = "training.pt"
Found = tuple[Loaded | None, list[str]]  # and a line for each checkpoint passed over


@dataclass(frozen=True)
class Restored:
    """A verified checkpoint, the same bytes on every rank."""

    manifest: Manifest
    model: dict[str, torch.Tensor]
    training: dict[str, Any]


def read_on_all_ranks(group: Group, read: Callable[[], Found]) -> tuple[Restored | None, list[str]]:
    """Rank 0 reads and verifies by `read`; all ranks unpack the same bytes. A collective.

    No shared file system is needed, and no rank can load another file. The second result holds
    a line for each checkpoint that did not verify.
    """
    loaded: Loaded | None = None
    skipped: list[str] = []
    with group.agreed("reading the checkpoint"):
        if group.world.rank == 0:
            loaded, skipped = read()
    raw, skipped = json.loads(
        group.share_text(json.dumps([loaded.manifest if loaded else None, skipped]))
    )
    if raw is None:
        return None, skipped
    name = f"step-{raw['step']:08d}"
    state = {}
    for file in sorted(raw["files"]):
        data = group.share_bytes(loaded.files[file] if loaded else None)
        state[file] = packing.unpack(data, torch.device("cpu"))
    for file in (MODEL, TRAINING):
        if file not in state:
            raise CheckpointError(f"{name}: holds no {file}: not one of a run")
    manifest = Manifest.of_run(raw, Path(name))
    return Restored(manifest, state[MODEL], state[TRAINING]), skipped
