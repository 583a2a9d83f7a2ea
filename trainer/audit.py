"""`python -m trainer.audit DIR`: was any example repeated or skipped, over all restarts?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoints import transaction as checkpoint
from trainer.checkpoints.manifest import Manifest
from trainer.cli import run, single
from trainer.data.ledger import digests, extend
from trainer.data.order import Order, counted
from trainer.errors import ConfigError, visible
from trainer.record import directory as rundir

HELP = """usage: python -m trainer.audit DIR

DIR is a run directory. Each step's examples entered a hash chain as they were taken; every
checkpoint and metrics.jsonl hold it. This recomputes it from the seed and the size of the data, and
names the first save that differs.

Exit codes: 0 every example was taken as it should be, 1 one was not, 2 nothing to audit."""


@dataclass(frozen=True)
class Comparison:
    """How often each example was taken, how many saves agree, and the steps of one that differs."""

    taken: torch.Tensor
    num_equal: int
    different: str = ""


def main(arguments: Sequence[str]) -> int:
    advice = "give one run directory: python -m trainer.audit DIR"
    directory = Path(single(arguments, advice))
    manifest = checkpoint.newest_manifest(directory / "checkpoints")
    if manifest is None:
        raise ConfigError(f"{directory}: has no checkpoint to audit; give a run directory")
    Manifest.of_run(manifest, directory)
    chains = {**_read_chains(directory), manifest["step"]: manifest["ledger"]}
    comparison = _compare(manifest, chains)
    if steps := comparison.different:
        place = "one did not take the examples of its place in the order"
        print(f"DIFFERENT: of the steps {steps} {place}")
        return 1
    _print_sessions(manifest)
    _print_examples(manifest, comparison, num_later=len(chains) - comparison.num_equal)
    return 0


def expected(
    seed: int,
    num_examples: int,
    global_batch: int,
    num_steps: int,
    replaced: Mapping[str, int] | None = None,
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """(step, chain after it, its example indices) for each step of an undisturbed run.

    `replaced` maps "<epoch>/<index>" of each unreadable example to the one taken instead.
    """
    chain = ""
    per_epoch = num_examples // global_batch
    for first in range(0, num_steps, per_epoch):
        epoch = first // per_epoch
        steps = min(per_epoch, num_steps - first)
        taken = torch.arange(num_examples)
        for place, other in (replaced or {}).items():
            of, index = map(int, place.split("/"))
            if of == epoch:
                taken[index] = other
        positions = torch.arange(steps * global_batch)
        indices = taken[Order(seed, epoch, num_examples)(positions)].view(steps, -1)
        for number, digest in enumerate(digests(indices).tolist()):
            chain = extend(chain, first + number, digest)
            yield first + number + 1, chain, indices[number]


def _read_chains(directory: Path) -> dict[int, str]:
    """The chain at each save, from metrics.jsonl."""
    return {
        entry["step"]: entry["ledger"]
        for _, entry in rundir.read_entries(directory / rundir.METRICS)
        if "ledger" in entry
    }


def _compare(manifest: dict[str, Any], chains: dict[int, str]) -> Comparison:
    """Recompute the order up to the newest checkpoint; `chains` are those of the saves."""
    config = manifest["config"]
    length = manifest["data"]["train"]["length"]
    try:
        taken = torch.zeros(length, dtype=torch.int64)
    except RuntimeError:
        why = "counting them takes more memory than there is"
        raise ConfigError(f"{length:,} examples: {why}") from None
    run = (config["run.seed"], length, config["data.global_batch"])
    last_equal = 0
    num_equal = 0
    for step, chain, indices in expected(*run, manifest["step"], manifest["replaced"]):
        taken[indices] += 1
        if step not in chains:
            continue
        if chains[step] != chain:
            return Comparison(taken, num_equal, f"{last_equal + 1:,} to {step:,}")
        last_equal = step
        num_equal += 1
    return Comparison(taken, num_equal)


def _print_sessions(manifest: dict[str, Any]) -> None:
    batch = manifest["config"]["data.global_batch"]
    step = manifest["step"]
    epochs, rest = divmod(step, manifest["data"]["train"]["length"] // batch)
    length = f"{step:,} steps of {batch:,} examples, so {epochs} epochs and {rest:,} steps"
    print(f"run {visible(manifest['run'])}: {length}")
    sessions = [
        f"from step {first:,} on {counted(ranks, 'rank')}" for first, ranks in manifest["sessions"]
    ]
    print(f"{counted(len(sessions), 'session')}: {', '.join(sessions)}")


def _print_examples(manifest: dict[str, Any], comparison: Comparison, num_later: int) -> None:
    taken = comparison.taken
    times = f"{int(taken.min())} to {int(taken.max())} times"
    print(f"each of the {len(taken):,} examples was taken {times}")
    replaced = manifest["replaced"]
    for place, other in replaced.items():
        epoch, index = place.split("/")
        why = f"could not be read in epoch {epoch}"
        print(f"example {index} {why}: example {other} was taken (data.on_error=skip)")
    but = ", but for these" if replaced else ""
    saves = counted(comparison.num_equal, "save")
    print(f"{saves} agree with the order recomputed: nothing was repeated or skipped{but}")
    if num_later:
        later = f"{counted(num_later, 'save')} after step {manifest['step']:,}"
        print(f"{later} not compared: no checkpoint is left of them")


if __name__ == "__main__":
    run(main, HELP)
