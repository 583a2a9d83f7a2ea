"""Mixtures and weights: groups of examples by proportion, and examples taken more often."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.base.errors import CheckpointError, ConfigError
from trainer.base.plain_files import parse_json, parse_safetensors, read_file
from trainer.core.data.order import POSITIONS_AT_ONCE
from trainer.core.data.sampling import IndexOrder, Sampling, Shuffle, State, as_vector, check_size
from trainer.core.data.sampling.shard_order import ShardShuffle
from trainer.core.rng.philox import Permutation, key_of


class Weighted(Sampling):
    """Take `size` examples per epoch, each as often as its weight says, rounded up or down.

    Systematic sampling (Madow, 1949): independent draws, as of torch's WeightedRandomSampler,
    would leave out a third of equally weighted examples.

        def sampling(self, split):
            return Weighted(self.counts.reciprocal()[self.labels])
    """

    kind = "weights"

    def __init__(self, weights: Any, size: int | None = None):
        """`weights` (examples,): not negative, in any unit; `size`: by default their number.

        Raises ConfigError for other weights.
        """
        self.weights = as_vector(weights, "weights", torch.float64)
        # the sum of finite ones may be infinite
        is_valid = self.weights.sum().isfinite() and bool((self.weights >= 0).all())
        if not is_valid or not self.weights.any():
            raise ConfigError("""weights:
                must be finite, not negative, one at least above 0, and their sum finite""")
        self.num_examples = len(self.weights)
        self.size = self.num_examples if size is None else size
        check_size("size", self.size)

    def order(self, seed: int, epoch: int, global_batch: int) -> WeightedOrder:
        return _make_order(self, seed, epoch)

    def state(self) -> State:
        return {"size": self.size}, {"weights": self.weights}

    @classmethod
    def restore(cls, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Weighted:
        return cls(tensors["weights"], settings["size"])

    def describe(self) -> str:
        fewest, most = self.expect(1)
        return f"by weight, {self.size:,} an epoch, each {fewest:.3g} to {most:.3g} times"

    def replacement(self, index: int, count: int) -> int:
        """Return the next example with a weight above 0: the others may be held out."""
        turned = self.weights.roll(-(index + count))
        return (index + count + int((turned > 0).int().argmax())) % self.num_examples

    def expect(self, epochs: float) -> tuple[float, float]:
        expected = self.weights / self.weights.sum() * self.size * epochs
        return float(expected.min()), float(expected.max())


# A run asks for the order of an epoch several times at its start: 2 s for 10**7 examples.
@lru_cache(maxsize=2)
def _make_order(sampling: Weighted, seed: int, epoch: int) -> WeightedOrder:
    return WeightedOrder(sampling, seed, epoch)


@lru_cache(maxsize=1)
def _make_shares(sampling: Weighted, seed: int, era: int) -> tuple[Permutation, torch.Tensor]:
    """Return a permutation of the examples, and the sums of their weights in this order, to 1."""
    examples = Permutation(sampling.num_examples, seed, "weights", era, "examples")
    places = torch.arange(sampling.num_examples)
    weights = [sampling.weights[examples(some)] for some in places.split(POSITIONS_AT_ONCE)]
    # numpy adds one by one, so the sums are equal on every machine
    sums = torch.from_numpy(np.cumsum(torch.cat(weights).numpy()))
    return examples, sums / sums[-1]


class WeightedOrder:
    """The order of one epoch.

    An era has as many epochs as take some `num_examples` rows, so that a permutation of all
    examples costs as much as the rows do. Their starts are equally far apart: of equal weights, the
    epochs of an era take each example about once.
    """

    def __init__(self, sampling: Weighted, seed: int, epoch: int):
        epochs = max(1, sampling.num_examples // sampling.size)
        era, epoch_in_era = divmod(epoch, epochs)
        self._examples, self._shares = _make_shares(sampling, seed, era)
        turn = int(Permutation(epochs, seed, "weights", era, "turns")(torch.tensor([epoch_in_era])))
        self._start = (turn + key_of(seed, "weights", era, "start") / 2**64) / epochs
        self._shuffle = Permutation(sampling.size, seed, "weights", epoch)
        self._last = int(torch.searchsorted(self._shares, 1.0))  # the others weigh nothing

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the example indices at int64 `positions` of the epoch, of the same shape."""
        points = (self._shuffle(positions).double() + self._start) / self._shuffle.size
        places = torch.searchsorted(self._shares, points, right=True).clamp(max=self._last)
        return self._examples(places)


LONGEST_PATTERN = 100_000  # places of the repeated pattern; other proportions are rounded to it
FEW_GROUPS = 16  # groups: integers near the proportions of more are hardly nearer than others


class Mixture(Sampling):
    """Examples of several groups in fixed proportions, within one example after any step.

    A group that is used up begins its next epoch, in another order. The data set has the groups one
    after another, as a `ConcatDataset` does:

        def sampling(self, split):
            return Mixture([self.code, self.prose], [0.7, 0.3])
    """

    kind = "mixture"

    def __init__(
        self,
        groups: Sequence[Any],
        proportions: Sequence[float] | None = None,
        size: int | None = None,
        members: torch.Tensor | None = None,
    ):
        """`groups`: the data set of each group, or its number of examples.

        `proportions`: in any unit, to five digits; by default equal. `size`: positions of an epoch
        of the run, by default the number of examples. `members` (examples,): indices of all
        examples, group by group; by default in order. Raises ConfigError for other arguments.
        """
        if isinstance(groups, (str, bytes, Mapping)) or not isinstance(groups, Iterable):
            raise ConfigError(f"""groups={groups!r:.60}:
                must be data sets or their numbers of examples, such as [self.code, 5000]""")
        groups = list(groups)
        sizes = [len(each) if hasattr(each, "__len__") else each for each in groups]
        self.sizes = as_vector(sizes, "groups", torch.int64)
        if int(self.sizes.min()) < 1:
            raise ConfigError("groups: each must have at least one example")
        samplings = [getattr(each, "sampling", None) for each in groups]
        self._shards = {n: s for n, s in enumerate(samplings) if isinstance(s, ShardShuffle)}
        self.num_examples = int(self.sizes.sum())
        self.size = self.num_examples if size is None else size
        check_size("size", self.size)
        shares = _shares([1] * len(self.sizes) if proportions is None else proportions)
        if len(shares) != len(self.sizes):
            raise ConfigError(f"""proportions: must be one for each group,
                not {len(shares)} proportions for {len(self.sizes)} groups""")
        self.shares = shares
        self.members = members
        self._pattern = torch.tensor(_pattern(shares))
        # how often the group of a place was taken before it
        by_group = self._pattern.argsort(stable=True)
        firsts = torch.tensor(shares).cumsum(0) - torch.tensor(shares)
        self._taken = torch.empty_like(by_group)
        self._taken[by_group] = torch.arange(len(by_group)) - firsts[self._pattern[by_group]]
        self._each = torch.tensor(shares)
        self._first = self.sizes.cumsum(0) - self.sizes

    def order(self, seed: int, epoch: int, global_batch: int) -> MixtureOrder:
        return MixtureOrder(self, seed, epoch, global_batch)

    def take(self, places: torch.Tensor, seed: int) -> torch.Tensor:
        """Return the examples at int64 `places` of the endless sequence over all epochs."""
        round_, slot = places // len(self._pattern), places % len(self._pattern)
        group = self._pattern[slot]
        ordinal = round_ * self._each[group] + self._taken[slot]  # among those of its group
        size = self.sizes[group]
        turn = ordinal // size
        numbers = turn * len(self.sizes) + group
        permutation = Permutation(size, seed, self.kind, numbers=numbers)
        within = permutation(ordinal % size)
        for one in self._shards:
            for epoch in turn[group == one].unique().tolist():
                chosen = (group == one) & (turn == epoch)
                order = _order_of(self._shards[one], seed, one, epoch)
                within[chosen] = order(ordinal[chosen] % int(self.sizes[one]))
        indices = self._first[group] + within
        return indices if self.members is None else self.members[indices]

    def state(self) -> State:
        tensors = {"sizes": self.sizes, "shares": self._each}
        if self.members is not None:
            tensors["members"] = self.members
        of_groups = {}
        for group, shards in self._shards.items():
            of_groups[str(group)], own = shards.state()
            tensors |= {f"{group}.{name}": tensor for name, tensor in own.items()}
        return {"size": self.size, "shards": of_groups}, tensors

    @classmethod
    def restore(cls, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Mixture:
        groups = tensors["sizes"].tolist()
        shares = tensors["shares"].tolist()
        mixture = Mixture(groups, shares, settings["size"], tensors.get("members"))
        for group, own in settings["shards"].items():
            parts = {name: tensors[f"{group}.{name}"] for name in ("rows", "repeats")}
            mixture._shards[int(group)] = ShardShuffle.restore(own, parts)
        return mixture

    def describe(self) -> str:
        total = sum(self.shares)
        shares = [f"{share / total:.3g}" for share in self.shares[:6]]
        more = ", ..." if len(self.shares) > 6 else ""
        return f"{len(self.shares)} groups by {', '.join(shares)}{more}, {self.size:,} an epoch"

    def replacement(self, index: int, count: int) -> int:
        members = torch.arange(self.num_examples) if self.members is None else self.members
        position = int((members == index).nonzero())
        group = int(torch.searchsorted(self.sizes.cumsum(0), position, right=True))
        own = members[self._first[group] :][: self.sizes[group]]
        later = own[own >= index + count]
        return int((later if len(later) else own).min())

    def expect(self, epochs: float) -> tuple[float, float]:
        expected = self._each / self._each.sum() * self.size * epochs / self.sizes
        return float(expected.min()), float(expected.max())


class ClassBalanced(Mixture):
    """As many examples of each class in every batch, up to one.

    A mixture whose groups are the classes:

        def sampling(self, split):
            return ClassBalanced(self.labels)
    """

    def __init__(self, labels: Any, size: int | None = None):
        """`labels` (examples,): the class of each example, any integers."""
        labels = as_vector(labels, "labels", torch.int64)
        _, counts = labels.unique(return_counts=True)
        super().__init__(counts.tolist(), None, size, labels.argsort(stable=True))


class MixtureOrder:
    """The order of one epoch of the run; rows are permuted within each global batch."""

    def __init__(self, mixture: Mixture, seed: int, epoch: int, global_batch: int):
        self._mixture = mixture
        self._seed = seed
        self._begin = epoch * (mixture.size // global_batch)
        self._batch = global_batch

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the example indices at int64 `positions` of the epoch, of the same shape."""
        step, row = positions // self._batch, positions % self._batch
        step = self._begin + step
        rows = Permutation(torch.full_like(row, self._batch), self._seed, "rows", numbers=step)
        return self._mixture.take(step * self._batch + rows(row), self._seed)


@lru_cache(maxsize=64)  # a step asks for a few epochs of each group
def _order_of(shards: ShardShuffle, seed: int, group: int, epoch: int) -> IndexOrder:
    """Return an epoch of a group in shards, whose batch is a row of each lane."""
    batch = min(shards.lanes, shards.num_examples)
    return shards.order(key_of(seed, Mixture.kind, group), epoch, batch)


def _shares(proportions: Sequence[float]) -> list[int]:
    """Return integers in these proportions, whose sum is at most 100,000.

    Decimal numbers are taken as written, so 0.7 and 0.3 are 7 and 3.
    """
    try:
        exact = [Fraction(str(float(value))) for value in proportions]
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"proportions={proportions!r:.200}: must be finite numbers") from None
    if not exact or min(exact) <= 0:
        raise ConfigError(f"proportions={proportions!r:.200}: must be above 0")
    if min(exact) == max(exact):
        return [1] * len(exact)
    if len(exact) > LONGEST_PATTERN:
        raise ConfigError(f"""proportions of {len(exact):,} groups:
            must be equal, as there are more than {LONGEST_PATTERN:,}""")
    total = sum(exact)
    parts = [value / total for value in exact]
    scale = lcm(*(part.denominator for part in parts))
    if scale <= LONGEST_PATTERN:
        return [int(part * scale) for part in parts]
    if len(parts) <= FEW_GROUPS:
        return _nearest([float(part) for part in parts])
    shares = [max(1, round(part * (LONGEST_PATTERN - len(parts)))) for part in parts]
    divisor = gcd(*shares)
    return [share // divisor for share in shares]


def _nearest(parts: Sequence[float]) -> list[int]:
    """Return the integers nearest to the parts of 1, with a sum of at most 100,000."""
    scales = np.arange(1, LONGEST_PATTERN - len(parts) + 1)
    shares = np.array([np.round(part * scales).clip(1) for part in parts])
    errors = abs(shares / shares.sum(0) - np.array(parts)[:, None]).max(0)
    return [int(share) for share in shares[:, errors.argmin()]]


def _pattern(shares: Sequence[int]) -> list[int]:
    """Return a sequence of groups, each as often as its share, spread as evenly as can be.

    After any number of slots a group was taken less than one time more or less than its
    proportion: its n-th slot lies in a window of the proportion, and the earliest end is served
    first (Baruah et al., "Proportionate progress", 1996).
    """
    total = sum(shares)
    waiting = [(0, group, 0) for group in range(len(shares))]  # by the slot where a window opens
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    pattern = []
    for slot in range(total):
        while waiting and waiting[0][0] <= slot:
            _, group, taken = heapq.heappop(waiting)
            end = -(-(taken + 1) * total // shares[group])
            heapq.heappush(ready, (end, group, taken))
        _, group, taken = heapq.heappop(ready)
        pattern.append(group)
        if taken + 1 < shares[group]:
            heapq.heappush(waiting, ((taken + 1) * total // shares[group], group, taken + 1))
    return pattern


SAMPLING_FILE = "sampling.safetensors"  # in the run directory
MOST_OF_A_SAMPLING = 2**34
SAMPLING_KINDS: dict[str, type[Sampling]] = {
    each.kind: each for each in (Shuffle, ShardShuffle, Weighted, Mixture)
}


@lru_cache(maxsize=4)  # each rank asks for it twice at a start
def digest_of(sampling: Sampling) -> str:
    """Return the SHA-256 of a sampling; empty for the plain shuffle."""
    if isinstance(sampling, Shuffle):
        return ""
    settings, tensors = sampling.state()
    total = hashlib.sha256(f"{sampling.kind} {json.dumps(settings, sort_keys=True)}".encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        total.update(tensor.numpy().tobytes())
    return total.hexdigest()[:16]


def to_bytes(sampling: Sampling) -> bytes:
    from safetensors.torch import save

    settings, tensors = sampling.state()
    return save(tensors, {"kind": sampling.kind, "settings": json.dumps(settings)})


def read_sampling(directory: Path, facts: Mapping[str, Any]) -> Sampling:
    """Return the sampling of a run, by the facts of its data in a manifest.

    Raises CheckpointError if it cannot be read, or is not the one that the facts name.
    """
    if not facts.get("sampling"):
        return Shuffle(facts["length"])
    path = directory / SAMPLING_FILE
    try:
        data = read_file(path, MOST_OF_A_SAMPLING)
    except OSError as error:
        raise CheckpointError(f"""{path}: {error.strerror}: it has the order of the examples;
            restore it""") from None
    try:
        saved, tensors = parse_safetensors(data)
        sampling = SAMPLING_KINDS[saved["kind"]].restore(parse_json(saved["settings"]), tensors)
        is_same = digest_of(sampling) == facts["sampling"]
    except Exception:  # safetensors has its own kind of error
        is_same = False
    if not is_same:
        raise CheckpointError(f"""{path}: is damaged, or is not the sampling of this run;
            without it the order cannot be recomputed""")
    return sampling
