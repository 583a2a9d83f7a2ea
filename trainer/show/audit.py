"""Proof that no restart of a run repeated or skipped an example.

During training the examples of each step enter a hash chain, which checkpoints and metrics.jsonl
store. The audit recomputes the chain from the seed and the size of the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer.base.errors import ConfigError, counted, visible
from trainer.base.plain_files import digest_json
from trainer.core.api import OF_MODEL, Manifest, Sampling, chains_of, read_sampling
from trainer.core.api import run_directory as rundir
from trainer.core.api import transaction as checkpoint

LONG = "--long"
MOST_EXAMPLES = 2**28  # computed without --long, 5 million a second (1 core, torch 2.13)
PER_STEP = 20  # a step takes as long as so many examples
EXAMPLES_PER_BLOCK = 2**20  # examples per block: memory does not grow with the data


@dataclass(frozen=True)
class Agreement:
    """Number of saves that agree with the recomputed order, and the steps of one that differs."""

    num_equal: int
    different: str = ""


class Audit(NamedTuple):
    """Exit code, lines and facts about the examples of a run."""

    code: int
    lines: list[str]
    facts: dict[str, Any]


def audit(directory: Path, is_long: bool = False) -> Audit:
    """Return 0 if a run repeated and skipped no example, else 1, and what says so.

    Raises ConfigError or CheckpointError if there is nothing to audit, or too much.
    """
    manifest = checkpoint.newest_manifest(directory / "checkpoints")
    if manifest is None:
        raise ConfigError(f"{directory}: has no checkpoint to audit; give a run directory")
    Manifest.of_run(manifest, directory)
    sampling = read_sampling(directory, manifest["data"]["train"])
    if not is_long:
        _check_length(manifest, directory)
    chains = {**_read_chains(directory), manifest["step"]: manifest["ledger"]}
    comparison = _compare(manifest, sampling, chains)
    facts: dict[str, Any] = {"run": manifest["run"], "step": manifest["step"]}
    facts["saves_that_agree"] = comparison.num_equal
    if steps := comparison.different:
        what = "at least one took other examples than the order requires"
        return Audit(1, [f"DIFFERENT: of the steps {steps}, {what}"], facts)
    num_later = len(chains) - comparison.num_equal
    sessions = [{"from_step": first, "ranks": ranks} for first, ranks in manifest["sessions"]]
    facts |= {"sessions": sessions, "replaced": manifest["replaced"], "not_compared": num_later}
    examples = _name_examples(manifest, sampling, comparison, num_later)
    lines = [*_name_sessions(manifest, sampling), *examples, *_name_frozen(manifest["frozen"])]
    return Audit(0, lines, facts)


def _check_length(manifest: Mapping[str, Any], directory: Path) -> None:
    """Raise ConfigError if a manifest claims more steps than can be computed soon."""
    batch = manifest["config"]["data.global_batch"]
    length = manifest["data"]["train"]["size"]
    step = manifest["step"]
    epochs = -(-step // (length // batch))
    if step * (batch + PER_STEP) + length * (1 + epochs) > MOST_EXAMPLES:
        raise ConfigError(f"""{directory}: {step:,} steps of {batch:,} of {length:,}
            examples take long to compute; give {LONG}: python -m trainer.show RUN {LONG}""")


def expected(
    sampling: Sampling,
    seed: int,
    global_batch: int,
    num_steps: int,
    replaced: Mapping[str, int] | None = None,
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield (step, chain after it, its example indices) for each step of an uninterrupted run.

    `replaced` maps "<epoch>/<index>" of each unreadable example to the one used instead.
    """
    chain = ""
    others = _by_epoch(replaced or {})
    per_block = max(1, EXAMPLES_PER_BLOCK // global_batch)
    for epoch, num_taken in _epochs(sampling.size, global_batch, num_steps):
        order = sampling.order(seed, epoch, global_batch)
        begin = epoch * (sampling.size // global_batch)
        last = num_taken // global_batch
        for first in range(0, last, per_block):
            end = min(first + per_block, last)
            indices = order(torch.arange(first * global_batch, end * global_batch))
            if epoch in others:
                unread, taken = others[epoch]
                positions = torch.searchsorted(unread, indices).clamp_(max=len(unread) - 1)
                indices = torch.where(unread[positions] == indices, taken[positions], indices)
            rows = indices.view(end - first, -1)
            chains = chains_of(chain, begin + first, rows)
            for step, (chain, row) in enumerate(zip(chains, rows, strict=True), begin + first):
                yield step + 1, chain, row


def _epochs(size: int, global_batch: int, num_steps: int) -> Iterator[tuple[int, int]]:
    """Yield (epoch, number of examples used in it) for each epoch that was started."""
    per_epoch = size // global_batch
    for epoch in range(math.ceil(num_steps / per_epoch)):
        yield epoch, min(per_epoch, num_steps - epoch * per_epoch) * global_batch


def _by_epoch(replaced: Mapping[str, int]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return, by epoch, the sorted indices of unreadable examples and those used instead."""
    by_epoch: dict[int, dict[int, int]] = {}
    for key, other in replaced.items():
        epoch, index = map(int, key.split("/"))
        by_epoch.setdefault(epoch, {})[index] = other
    return {
        epoch: tuple(torch.tensor(sorted(pairs.items())).t().contiguous())
        for epoch, pairs in by_epoch.items()
    }


def count_taken(
    sampling: Sampling, seed: int, global_batch: int, num_steps: int, replaced: Mapping[str, int]
) -> tuple[int, int]:
    """Return the smallest and the largest number of times that an example was used."""
    if sampling.is_each_once:
        return _count_by_epoch(sampling, seed, global_batch, num_steps, replaced)
    times = torch.zeros(sampling.num_examples, dtype=torch.int64)
    for _, _, indices in expected(sampling, seed, global_batch, num_steps, replaced):
        times += torch.bincount(indices, minlength=len(times))
    return int(times.min()), int(times.max())


def _count_by_epoch(
    sampling: Any, seed: int, global_batch: int, num_steps: int, replaced: Mapping[str, int]
) -> tuple[int, int]:
    """Count by blocks of examples and their positions in each epoch's order, so no counter per
    example is stored."""
    orders = []  # with the number of examples used in each epoch
    moved: list[tuple[torch.Tensor, int]] = []  # examples used once less, or once more
    others = _by_epoch(replaced)
    for epoch, num_taken in _epochs(sampling.size, global_batch, num_steps):
        order = sampling.order(seed, epoch, global_batch)
        orders.append((order, num_taken))
        if epoch in others:
            unread, taken = others[epoch]
            is_met = order.invert(unread) < num_taken
            moved += [(unread[is_met], -1), (taken[is_met], 1)]
    fewest, most = num_steps * global_batch, 0
    for first in range(0, sampling.num_examples, EXAMPLES_PER_BLOCK):
        indices = torch.arange(first, min(first + EXAMPLES_PER_BLOCK, sampling.num_examples))
        times = torch.zeros_like(indices)
        for order, num_taken in orders:
            times += order.invert(indices) < num_taken
        for changed, sign in moved:
            here = changed[(changed >= first) & (changed < first + len(indices))] - first
            times.index_add_(0, here, torch.full_like(here, sign))
        fewest = min(fewest, int(times.min()))
        most = max(most, int(times.max()))
    return fewest, most


def _read_chains(directory: Path) -> dict[int, str]:
    """Return the chain at each save, from metrics.jsonl."""
    return {step: value for step, name, value in rundir.read_values(directory) if name == "ledger"}


def _compare(manifest: dict[str, Any], sampling: Sampling, chains: dict[int, str]) -> Agreement:
    """Compare the chain of each save with the order recomputed up to the newest checkpoint."""
    config = manifest["config"]
    run = (sampling, config["run.seed"], config["data.global_batch"])
    last_equal = 0
    num_equal = 0
    for step, chain, _ in expected(*run, manifest["step"], manifest["replaced"]):
        if step not in chains:
            continue
        if chains[step] != chain:
            return Agreement(num_equal, f"{last_equal + 1:,} to {step:,}")
        last_equal = step
        num_equal += 1
    return Agreement(num_equal)


def _name_sessions(manifest: dict[str, Any], sampling: Sampling) -> list[str]:
    batch = manifest["config"]["data.global_batch"]
    step = manifest["step"]
    epochs, rest = divmod(step, sampling.size // batch)
    length = f"{step:,} steps of {batch:,} examples, so {counted(epochs, 'epoch')}"
    length += f" and {counted(rest, 'step')}" if rest else ""
    sessions = [
        f"from step {first:,} on {counted(ranks, 'rank')}" for first, ranks in manifest["sessions"]
    ]
    lines = [
        f"run {visible(manifest['run'])}: {length}",
        f"{counted(len(sessions), 'session')}: {', '.join(sessions)}",
    ]
    return lines + _name_data(manifest["data"]) * (len(sessions) > 1)


def _name_data(data: dict[str, Any]) -> list[str]:
    """Return a line about what each resume compared of the data."""
    facts = data["train"]
    places = facts.get("content")
    compared = "its content was not compared"
    if facts.get("digest"):
        compared = f"and its digest {visible(str(facts['digest']))}"
    elif isinstance(places, dict) and places:
        compared = f"and its content in {visible(', '.join(places))}"
    return [f"at each resume the train data had this length, {compared}"]


def _name_frozen(frozen: Mapping[str, Any]) -> list[str]:
    """Return a line about the weights that the newest checkpoint does not hold."""
    shapes = [shape for name, (_, shape, _) in frozen.items() if name != OF_MODEL]
    if not shapes:
        return []
    elements = sum(map(math.prod, shapes))
    held = f"its digests of them are {digest_json(frozen)[:16]}"
    named = f"{counted(len(shapes), 'tensor')} of {elements:,} elements"
    return [f"{named} did not train and are not in the checkpoint: build_model makes them; {held}"]


def _name_examples(
    manifest: dict[str, Any], sampling: Sampling, comparison: Agreement, num_later: int
) -> list[str]:
    config = manifest["config"]
    replaced = manifest["replaced"]
    run = (sampling, config["run.seed"], config["data.global_batch"])
    fewest, most = count_taken(*run, manifest["step"], replaced)
    times = counted(most, "time") if fewest == most else f"{fewest} to {most} times"
    lines = [f"each of the {sampling.num_examples:,} examples was used {times}"]
    if not sampling.is_each_once:
        epochs = manifest["step"] * config["data.global_batch"] / sampling.size
        rarest, commonest = sampling.expect(epochs)
        lines[0] += f"; expected of the sampling: {rarest:.3g} to {commonest:.3g} times"
    for key, other in replaced.items():
        epoch, index = key.split("/")
        why = f"could not be read in epoch {epoch}"
        instead = f"example {other} was used instead (data.on_error=skip)"
        lines.append(f"example {index} {why}: {instead}")
    but = ", except for these" if replaced else ""
    saves = counted(comparison.num_equal, "save")
    agree = "agrees" if comparison.num_equal == 1 else "agree"
    nothing = f"nothing was repeated or skipped{but}"
    lines.append(f"{saves} {agree} with the recomputed order: {nothing}")
    if num_later:
        later = f"{counted(num_later, 'save')} after step {manifest['step']:,}"
        lines.append(f"{later} not compared: their checkpoints no longer exist")
    return lines
