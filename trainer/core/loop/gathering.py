"""The rows of all ranks, for losses that compare each row with all others."""

from __future__ import annotations

import torch

from trainer.base.errors import ConfigError
from trainer.core.engine.engine import Engine
from trainer.core.strategy.collectives import gather_parts, sizes_of


def gather_rows(engine: Engine, tensor: torch.Tensor, num_batches: int) -> tuple[torch.Tensor, int]:
    """Return the rows of all ranks, and the number of this rank's first one among them."""
    rows = engine.recorder.count_rows()
    if rows is None:
        return tensor, 0
    requirement = "gather_rows: needs the whole global batch at once"
    if num_batches > 1:
        raise ConfigError(f"""{requirement}, and a rank has {num_batches} micro-batches;
            set data.micro_batch=null, or use more ranks""")
    if not tensor.dim() or len(tensor) != rows:
        raise ConfigError(f"gather_rows got shape {tuple(tensor.shape)}: must have {rows} rows")
    axis = engine.strategy.world.groups["data"]
    total = engine.strategy.spec.config.data.global_batch
    sizes = sizes_of(total, axis)
    if sizes[axis.rank] != rows:
        raise ConfigError(f"""data.global_batch={total}:
            must be a multiple of {axis.size} x run.norm_rows for gather_rows""")
    first = sum(sizes[: axis.rank])
    if axis.size == 1:
        return tensor, 0
    return gather_parts(tensor, 0, total, axis), first
