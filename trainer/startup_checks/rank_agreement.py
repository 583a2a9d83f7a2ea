"""The rows of the checks, the same in every layout, and what ranks make of the same rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from trainer.base.errors import counted
from trainer.base.same import CLOSE, FP64, ROWS, SMALL, find_odd_rank, gap, relative
from trainer.base.same.distance import apart, digest_rows, weigh
from trainer.core.data.batches import Batches
from trainer.core.distributed.group import Group
from trainer.core.micro_batch import MicroBatch, copied
from trainer.core.rng import seed_step
from trainer.core.state.sandbox import keep_generators, sandbox

CallDigest = tuple[str, list[float], list[float]]  # of a module's name, what it got and made
DIGESTS = 4  # numbers of a pass


@dataclass(frozen=True)
class CheckResult:
    """The result of a check: a line about the first dependence on the layout, else an empty one.

    `among` tells where it shows: among "ranks", among the "micro-batches" of a rank, or both.
    `unproved` says why nothing could be found out. `digests` are of a pass (none if ranks ran
    halves), and agree on all ranks up to `limit`. `rows` were tried.
    """

    line: str = ""
    among: str = ""
    unproved: str = ""
    digests: Sequence[float] = ()
    limit: float = 0.0
    rows: int = 0


def gather_if_ranks_differ(
    group: Group,
    result: CheckResult,
    details: Callable[[], Any],
    facts: Sequence[float] = (),
    count: int = 0,
) -> list[tuple[CheckResult, Any]]:
    """Return the results and details of all ranks; none if all found nothing, and agree.

    The first `count` facts are compared, too. A collective: first a reduction, which fails soon
    where a rank has ended.
    """
    numbers = [*_padded(facts, count), *_padded(result.digests, DIGESTS)]
    is_found = bool(result.line or result.unproved)
    most = group.max(is_found, *numbers, *(-number for number in numbers))
    pairs = zip(most[1 : len(numbers) + 1], most[len(numbers) + 1 :], strict=True)
    if not most[0] and all(relative(one, -other, SMALL) <= FP64 for one, other in pairs):
        return []
    every = group.gather([asdict(result), details()])
    return [(CheckResult(**fields), more) for fields, more in every]


def _padded(values: Sequence[float], count: int) -> list[float]:
    """Return `count` finite numbers that begin with these."""
    finite = [value if math.isfinite(value) else 0.0 for value in values]
    return (finite + [0.0] * count)[:count]


def find_first(results: Sequence[CheckResult]) -> CheckResult | None:
    """Return the first result with a line, else the first one that says what is unproved."""
    has_line = (each for each in results if each.line)
    return next(chain(has_line, (each for each in results if each.unproved)), None)


def explain_rows(rank: int, index: int) -> str:
    why = "the data set, or augment, depends on the rank or draws unseeded random numbers"
    return f"example {index} differs on rank {rank}: {why}; draw from augment's Random argument"


def explain_changed(index: int, changed: Sequence[str]) -> str:
    """Return the line about an example; `changed` are names of what reading changes."""
    what = f"example {index} has other values when it is read again"
    if changed:
        why = f"it depends on {', '.join(changed[:3])}, which reading changes"
        return f"{what}: {why}; draw from augment's Random argument, and change copies only"
    why = "the data set changes, or collate or augment counts its calls or draws without a key"
    return f"{what}: {why}; draw from augment's Random argument, and change copies only"


def explain_kept(rank: int, names: Sequence[str]) -> str:
    has = f"rank {rank} has other values of {', '.join(names[:3])}"
    why = "on which its updates depend: they are made of its own rows, or of the rank"
    advice = "make them of the rows of all ranks, in loss with gather_rows or by torch.distributed"
    return f"{has}, {why}; {advice}"


def explain_results(rank: int, name: str) -> str:
    why = "the same rows have another loss or gradient there: it depends on the rank"
    advice = "leave self.world, unseeded numbers and the order of sets out of it"
    return f"{name} differs on rank {rank}: {why}; {advice}"


def explain_weights(rank: int, steps: int) -> str:
    what = f"rank {rank} has other weights than rank 0 after {counted(steps, 'step')}"
    why = "optimizer, schedule or train_step depend on the rank, the clock or unseeded draws"
    return f"{what}: {why}; make them functions of self.step, the same on all ranks"


def digest(tensors: Iterable[torch.Tensor]) -> list[float]:
    """Return a number that changes with tensors, and their size."""
    numbers = [0.0, SMALL]
    for tensor in tensors:
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
        numbers[0] += float(weigh(flat[None]))
        numbers[1] += float(flat.double().abs().sum())
    return numbers


def find_place(one: Sequence[CallDigest], other: Sequence[CallDigest]) -> str:
    """Return the innermost module that got the same on two ranks and returned something else.

    It may be the loss, or a gradient. Empty if all is the same.
    """
    for (name, inputs, outputs), (name_there, inputs_there, outputs_there) in zip(
        one, other, strict=False
    ):
        if name != name_there:
            break
        if _is_near(inputs, inputs_there) and not _is_near(outputs, outputs_there):
            return name
    return ""


def _is_near(one: Sequence[float], other: Sequence[float]) -> bool:
    """Compare digests relative to their sizes; what has NaN in the first is not compared."""
    if not one or not other or math.isnan(one[0]):
        return True
    return gap(one[0], other[0]) <= CLOSE * max(one[1], other[1])


Cuts = tuple[int, ...]  # row numbers, of which neighbours bound a micro-batch

LEAST = 8  # rows, times run.norm_rows
MOST_GATHERED = 256  # of a data set on the device
MOST_READ = 32  # of one whose examples are read one by one
CUTS_OF_FEW_ROWS = ((0, 2, 4), (0, 1, 2))
COSTLY_FLOPS = 2e10  # more of them are computed in fewer bits, on fewer rows
CHEAP_FLOPS = 2e9  # a part of a second in fp64 on a core: as many rows as cost that are tried
CHEAP_BYTES = 2**26  # of inputs and targets


@dataclass(frozen=True)
class Costs:
    """Costs of a row, which is one of the run's or `run.norm_rows` of them, on any rank."""

    flops: float  # of a forward pass, divided by how much faster an accelerator is
    size: int  # bytes of inputs and targets
    is_resident: bool


def count_rows_to_try(costs: Costs, global_batch: int) -> int:
    """Return how many rows are tried: up to the global batch, as many as cost little.

    It depends on the run alone, so the same rows are tried in every layout.
    """
    most = min(MOST_GATHERED if costs.is_resident else MOST_READ, global_batch)
    most = min(most, int(CHEAP_FLOPS / max(costs.flops, 1)), CHEAP_BYTES // max(costs.size, 1))
    return max(LEAST, most)


def list_cuts(count: int, flops: float) -> list[Cuts]:
    """Return the cuts to try in turn, from the most rows to the fewest that are needed.

    Two parts are of one size: a model may keep state as long as that stays. `flops` are a row's.
    """
    if 2 * LEAST * flops >= COSTLY_FLOPS:
        return [(0, 1, 3), (0, 2, 4)] if 6 * flops <= COSTLY_FLOPS else [(0, 1, 2), (0, 2, 4)]
    large = 3 * count // 8
    small = (2 * large + 2,) if count >= 2 * LEAST else ()
    return [(0, large, 2 * large, *small, count), *CUTS_OF_FEW_ROWS[:1]]


@dataclass(frozen=True)
class TrialRows:
    """Rows of the run, prepared together.

    `prepared` has the rows between neighbouring `cuts`, prepared alone, if they have other sizes or
    values then: it is the values if `is_mixed`. Without `has_rows` some tensor has no axis of
    rows, such as the nodes of graphs. The example `changed` had other values when it was read once
    more, and `reading` tells why.
    """

    batch: MicroBatch
    indices: torch.Tensor
    cuts: Sequence[Cuts]
    prepared: Mapping[tuple[int, int], MicroBatch]
    is_mixed: bool
    has_rows: bool
    changed: int | None
    reading: str = ""

    def take(self, first: int, last: int) -> MicroBatch:
        """Return a copy of some rows, which a model may change in place."""
        if (first, last) in self.prepared:
            return copied(self.prepared[first, last])

        def take(tensor: torch.Tensor) -> torch.Tensor:
            return (tensor[first:last] if tensor.dim() else tensor).clone()

        return tree_map_only(torch.Tensor, take, self.batch)


class RowReader:
    """Reads rows of the run, the same on every rank."""

    def __init__(
        self,
        batches: Batches,
        devices: Sequence[torch.device],
        unit: int,
        repeat: Callable[[Callable[[], MicroBatch]], Iterator[MicroBatch]],
    ):
        """`repeat` yields the results of calls that follow each other, also of late ones."""
        self._batches = batches
        self._repeat = repeat
        self._devices = devices
        self._unit = unit

    def read(self, first: int, cuts: Sequence[Cuts]) -> TrialRows:
        """Read the rows of the largest of these cuts, from the `first` one of the run."""
        scaled: list[Cuts] = [tuple(self._unit * row for row in each) for each in cuts]
        most = max(scaled, key=max)
        indices = self._batches.first_examples(first, most[-1])
        whole = self.prepare(indices)
        bounds = list(pairwise(most))
        parts = [self.prepare(indices[slice(*each)]) for each in bounds]
        is_mixed = not is_prepared_alike(whole, parts)
        every = self._repeat(partial(self.prepare, indices, is_seeded=True))
        changed_examples = (find_changed(whole, again, indices) for again in every)
        changed = next((index for index in changed_examples if index is not None), None)
        has_rows = _has_rows(whole, len(indices))
        prepared: dict[tuple[int, int], MicroBatch] = {}
        if is_mixed or has_other_sizes(whole, parts) or not has_rows:
            prepared = dict(zip(bounds, parts, strict=True))
            wanted = {each for cut in scaled for each in (*pairwise(cut), (0, cut[-1]))}
            for each in wanted - prepared.keys():
                prepared[each] = self.prepare(indices[slice(*each)])
        return TrialRows(whole, indices, scaled, prepared, is_mixed, has_rows, changed)

    def prepare(self, indices: torch.Tensor, is_seeded: bool = False) -> MicroBatch:
        """Prepare these examples as a micro-batch, with the generators as they were.

        Or with generators in other states if `is_seeded`, as after other micro-batches.
        """
        with sandbox(keep_generators(self._devices)):
            for device in self._devices if is_seeded else ():
                seed_step(1, 1, device)
            return next(iter(self._batches.of_examples(indices)))


def is_prepared_alike(whole: Any, parts: Sequence[Any]) -> bool:
    """Return False if rows of a micro-batch differ from the same rows prepared in parts.

    Rows of other sizes, as those that are padded to the longest, are not compared.
    """
    every = zip(*map(tree_leaves, (whole, *parts)), strict=False)
    for one, *others in every:
        if not isinstance(one, torch.Tensor) or not one.dim():
            continue
        if all(other.dim() and other.shape[1:] == one.shape[1:] for other in others):
            joined = torch.cat(others)
            limit = ROWS.of(one.dtype) if one.is_floating_point() else 0.0
            if joined.shape == one.shape and not apart(joined, one) <= limit:
                return False
    return True


def find_changed(whole: Any, again: Any, indices: torch.Tensor) -> int | None:
    """Return an example that has other values when the same rows are prepared again, else None."""
    is_alike = is_prepared_alike(whole, [again])
    if is_alike and not has_other_sizes(whole, [again]):
        return None
    found = find_odd_rank([digest_rows(whole), digest_rows(again)], CLOSE)
    if is_alike and found is None:  # padded otherwise
        return None
    return int(indices[found[1] if found is not None and found[1] < len(indices) else 0])


def has_other_sizes(whole: Any, parts: Sequence[Any]) -> bool:
    """Return True if rows are of other sizes in parts, such as padded to the longest one."""
    sizes = [
        [leaf.shape[1:] for leaf in tree_leaves(each) if isinstance(leaf, torch.Tensor)]
        for each in (whole, *parts)
    ]
    return any(each != sizes[0] for each in sizes[1:])


def _has_rows(batch: Any, rows: int) -> bool:
    """Return True if each tensor with an axis has one of the rows, unlike nodes of graphs."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return all(len(leaf) == rows for leaf in leaves if leaf.dim())
