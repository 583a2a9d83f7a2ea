"""`python -m trainer.audit DIR`: was any example repeated or skipped, over all restarts of a run?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoints import transaction as checkpoint
from trainer.cli import run
from trainer.data.ledger import digests, extend
from trainer.data.order import Order, counted
from trainer.errors import ConfigError, visible
from trainer.record import directory as rundir

HELP = """usage: python -m trainer.audit DIR

DIR is a run directory. Each step's examples entered a hash chain as they were taken; it stands in every checkpoint and
in metrics.jsonl. This recomputes it from the seed and the size of the data, and names the first save that differs.
Exit codes: 0 every example was taken as it should be, 1 one was not, 2 nothing to audit."""


def main(arguments: Sequence[str]) -> int:
    if "-h" in arguments or "--help" in arguments:
        print(HELP)
        return 0
    if len(arguments) != 1:
        raise ConfigError("give one run directory: python -m trainer.audit DIR")
    directory = Path(arguments[0])
    manifest = checkpoint.newest_manifest(directory / "checkpoints")
    if manifest is None:
        raise ConfigError(f"{directory}: has no checkpoint to audit; give a run directory")
    checkpoint.check_run(manifest, directory)
    kept = {**_recorded(directory), manifest["step"]: manifest["ledger"]}
    return _compare(manifest, kept)


def _compare(manifest: dict[str, Any], kept: dict[int, str]) -> int:
    config, num_examples, replaced = (
        manifest["config"],
        manifest["data"]["train"]["length"],
        manifest["replaced"],
    )
    batch, last = config["data.global_batch"], manifest["step"]
    try:
        seen, right, checked = torch.zeros(num_examples, dtype=torch.int64), 0, 0
    except RuntimeError:
        raise ConfigError(
            f"{num_examples:,} examples: counting them takes more memory than there is"
        ) from None
    for step, chain, indices in expected(config["run.seed"], num_examples, batch, last, replaced):
        seen[indices] += 1
        if step not in kept:
            continue
        if kept[step] != chain:
            steps = f"{right + 1:,} to {step:,}"
            print(
                f"DIFFERENT: of the steps {steps} one did not take the examples of its place in the order"
            )
            return 1
        right, checked = step, checked + 1
    epochs, steps = divmod(last, num_examples // batch)
    sessions = ", ".join(
        f"from step {first:,} on {counted(ranks, 'rank')}" for first, ranks in manifest["sessions"]
    )
    print(
        f"run {visible(manifest['run'])}: {last:,} steps of {batch:,} examples, so {epochs} epochs and {steps:,} steps"
    )
    print(f"{counted(len(manifest['sessions']), 'session')}: {sessions}")
    print(
        f"each of the {num_examples:,} examples was taken {int(seen.min())} to {int(seen.max())} times"
    )
    for place, other in replaced.items():
        epoch, index = place.split("/")
        print(
            f"example {index} could not be read in epoch {epoch}: example {other} was taken (data.on_error=skip)"
        )
    but = ", but for these" if replaced else ""
    print(
        f"{counted(checked, 'save')} agree with the order recomputed: nothing was repeated or skipped{but}"
    )
    if later := len(kept) - checked:
        print(
            f"{counted(later, 'save')} after step {last:,} not compared: no checkpoint is left of them"
        )
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


def _recorded(directory: Path) -> dict[int, str]:
    """The chain at each save, as metrics.jsonl has it."""
    return {
        e["step"]: e["ledger"]
        for _, e in rundir.entries(directory / rundir.METRICS)
        if "ledger" in e
    }


if __name__ == "__main__":
    run(main)
