"""Drift: a difference between the copies of the state that ranks have."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import torch

from trainer.codec import digest
from trainer.distributed.group import Group, number_of
from trainer.distributed.watch.collectives import name_ranks
from trainer.engine.engine import Shards
from trainer.errors import RunError
from trainer.strategy.mesh import SHARDED, WHOLE, Mesh

ABSENT = -(2**63)
FORMS = ((), WHOLE, SHARDED)  # of a tensor: the axes along which ranks have other parts of it
Digests = dict[str, int]


def check_drift(group: Group, step: int, state: Shards, mesh: Mesh) -> None:
    """Compare weights, buffers and optimizer state by digest, over the ranks with the same parts.

    Integer tensors are left out: a buffer may count a rank's own rows. Raises the same RunError on
    every rank, naming the first tensor that differs and the ranks. Collective: every rank must
    call it.
    """
    parts = {form: _digest_all(state, form) for form in FORMS}
    numbers: list[int] = []
    own: dict[int, Digests] = {}
    for form, digests in parts.items():
        place = len(numbers) + mesh.number_of_part(*form)
        numbers += [ABSENT] * mesh.num_parts(*form)
        if digests:
            own[place] = digests
            numbers[place] = number_of(json.dumps(digests))
    unequal = group.find_unequal(torch.tensor(numbers), ABSENT).nonzero()
    if not len(unequal):
        return
    line = group.tell_all(_name_drift(group.collect(own.get(int(unequal[0])))))
    why = "a rank changed only its own copy, or memory failed"
    advice = "resume from an earlier checkpoint with run.resume"
    raise RunError(f"step {step}: {line}; {why}; {advice}")


def _digest_all(state: Shards, form: tuple[str, ...]) -> Digests:
    return {
        f"{kind}.{name}".replace("/", "."): digest(shard.tensor)
        for kind, shards in state.items()
        for name, shard in shards.items()
        if shard.axes == form and shard.tensor.is_floating_point() and kind != "ema"
    }


def _name_drift(ranks: Sequence[Digests | None]) -> str:
    """Describe the first tensor that differs between the ranks that have the same part."""
    alike = {rank: digests for rank, digests in enumerate(ranks) if digests is not None}
    for name in {name: None for digests in alike.values() for name in digests}:
        found = {rank: digests.get(name) for rank, digests in alike.items()}
        usual, count = Counter(found.values()).most_common(1)[0]  # of two ranks, that of the first
        if count < len(found):
            drifted = name_ranks(rank for rank, value in found.items() if value != usual)
            return f"{name} on {drifted} differs from the other ranks"
    return ""
