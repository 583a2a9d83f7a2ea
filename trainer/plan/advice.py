"""Advice for a run that does not fit: other layouts are planned until one fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trainer.errors import ConfigError
from trainer.plan.planning import Plan

Replan = Callable[[Sequence[str]], Plan]  # overrides of a run -> its plan
Changes = dict[str, str]
MICRO_BATCH = "data.micro_batch"
RECOMPUTE = "strategy.recompute"


def find_fitting(plan: Plan, words: Sequence[str], replan: Replan) -> tuple[list[str], Plan] | None:
    """Return the overrides of the first layout that fits, and its plan; None if none does.

    `words` are the overrides of `plan`.
    """
    search = _Search(plan, words, replan)
    for changes, sizes in _candidates(plan):
        options = [changes | {MICRO_BATCH: str(rows)} for rows in sizes] or [changes]
        if len(options) > 1 and not search.try_out(options[-1]):  # the smallest does not fit
            continue
        for option in options:
            if found := search.try_out(option):
                return found
    return None


class _Search:
    """Plans with changed settings; those that change the activations only are often skipped."""

    def __init__(self, plan: Plan, words: Sequence[str], replan: Replan):
        assert plan.layout.device is not None
        self._room = plan.layout.device.room
        self._least = {"": plan.without_activations}
        self._words = words
        self._replan = replan

    def try_out(self, changes: Changes) -> tuple[list[str], Plan] | None:
        """Return the overrides and their plan if it fits."""
        mesh = changes.get("strategy", "")
        if self._least.get(mesh, 0) > self._room:
            return None
        changed = replace_words(self._words, changes)
        try:
            plan = self._replan(changed)
        except ConfigError:  # not a layout of this run
            return None
        self._least[mesh] = plan.without_activations
        return (changed, plan) if plan.fits else None


def _candidates(plan: Plan) -> Iterator[tuple[Changes, list[int]]]:
    """Yield settings to change, those that cost less speed first, and micro-batches to try."""
    sizes = list(_smaller(plan.batches["micro_batch"]))
    recompute = {RECOMPUTE: "blocks"} if plan.has_blocks else {}
    meshes: list[Changes] = [{}]
    if plan.is_cut_fixed:  # strategy and micro-batch belong to the run
        sizes = []
    elif plan.layout.ranks > 1:
        local = plan.layout.local_ranks
        shards: dict[int, Changes] = {}
        if 1 < local < plan.layout.ranks:
            shards[local] = {"strategy": "hsdp", "strategy.mesh.shard": str(local)}
        shards[plan.layout.ranks] = {"strategy": "fsdp"}
        meshes += [mesh for shard, mesh in shards.items() if shard > plan.axes["shard"]]
        if local > plan.axes.get("tensor", 1):  # refused, and left out, without a tensor plan
            meshes.append({"strategy": "fsdp_tp", "strategy.mesh.tensor": str(local)})
    if sizes:
        yield {}, sizes
    for mesh in meshes[1:]:
        yield mesh, []
    for mesh in meshes if recompute else ():
        yield mesh | recompute, []
    for mesh in meshes if sizes else ():
        yield mesh | recompute, sizes


def _smaller(rows: int) -> Iterator[int]:
    """Yield the halves of a micro-batch, down to one row."""
    while rows > 1:
        rows = -(-rows // 2)
        yield rows


def replace_words(words: Sequence[str], changes: Changes) -> list[str]:
    """Return overrides with some changed; another strategy drops the settings of the mesh."""
    dropped = set(changes)
    prefixes: tuple[str, ...] = ()
    if "strategy" in changes:
        dropped |= {"strategy.name", "strategy.mesh"}
        prefixes = ("strategy.mesh.",)
    kept = []
    for word in words:
        key = word.lstrip("+").partition("=")[0]
        if key not in dropped and not key.startswith(prefixes or ("\0",)):
            kept.append(word)
    return [*kept, *(f"{key}={value}" for key, value in changes.items())]
