"""Two paths from a dataset to the device, with one face: iterate (batch, indices), a micro-batch at a time.

*Resident*: the dataset is tensors; they stay on the device and batches are gathered there. *Streamed*: any map-style
dataset, through DataLoader and its workers.
"""

from __future__ import annotations

import copy
import multiprocessing
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, cast

import torch
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    default_collate,
)

from trainer.config.schema import Data
from trainer.data.randomness import key_of, seed_example
from trainer.errors import ConfigError, RunError

AHEAD_BYTES = 2**18  # gathered at once, at most, unless one micro-batch is larger
MOST_IN_A_ROW = 10  # examples that are tried in place of one that cannot be read


class ResidentDataset(TensorDataset):
    """Tensors with equal first axes, which may live on the device, and where they come from.

    `source` is printed at the start. `digest`, where given, is kept in the checkpoint: a resume refuses another.
    """

    def __init__(self, *tensors: torch.Tensor, source: str = "", digest: str = ""):
        super().__init__(*tensors)
        self.source, self.digest = source, digest


class IndexSampler(Protocol):
    """What both paths read: index tensors, and the epoch that they belong to."""

    epoch: int

    def __iter__(self) -> Iterator[torch.Tensor]: ...
    def __len__(self) -> int: ...


def check_dataset(dataset: Any, split: str, path: str) -> int:
    """The number of examples. Raises ConfigError for what cannot be read by index."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise ConfigError(
            f"build_dataset({split!r}) returned {kind}: must be map-style, with __len__ and __getitem__"
        )
    if path == "resident" and not isinstance(dataset, TensorDataset):
        advice = "use data.path=auto or streamed"
        raise ConfigError(
            f"data.path=resident: the {split} data is a {kind}, not a TensorDataset; {advice}"
        )
    if len(dataset) == 0:
        raise ConfigError(f"build_dataset({split!r}) returned 0 examples: there must be at least 1")
    return len(dataset)


def index_device(dataset: Dataset, path: str, device: torch.device) -> torch.device:
    """Where the sampler's indices are wanted: beside resident tensors, else on the CPU."""
    return (
        device if isinstance(dataset, TensorDataset) and path != "streamed" else torch.device("cpu")
    )


def open_loader(
    dataset: Dataset,
    sampler: IndexSampler,
    config: Data,
    seed: int,
    split: str,
    device: torch.device,
) -> Iterable[tuple[Any, torch.Tensor]]:
    """The loader for `data.path`; `auto` is resident only where the dataset is tensors already."""
    if isinstance(dataset, TensorDataset) and config.path != "streamed":
        return ResidentLoader(dataset, sampler, device)
    return StreamedLoader(dataset, sampler, config, seed, split, device)


class ResidentLoader:
    """Small micro-batches are gathered several at once: around a small model each gather costs as much as a layer."""

    def __init__(self, dataset: TensorDataset, sampler: IndexSampler, device: torch.device):
        self.tensors = [tensor.to(device) for tensor in dataset.tensors]
        self.sampler = sampler

    def over(self, sampler: IndexSampler) -> ResidentLoader:
        """Other batches of the same tensors."""
        other = copy.copy(self)
        other.sampler = sampler
        return other

    def __iter__(self) -> Iterator[tuple[Any, torch.Tensor]]:
        row_bytes = max(1, sum(tensor[:1].nbytes for tensor in self.tensors))
        batches = iter(self.sampler)
        for first in batches:
            count = max(1, AHEAD_BYTES // (row_bytes * max(1, len(first))))
            some = [first, *islice(batches, count - 1)]
            if len(some) == 1:
                yield tuple(tensor.index_select(0, first) for tensor in self.tensors), first
                continue
            indices, sizes = torch.cat(some), [len(each) for each in some]
            parts = (tensor.index_select(0, indices).split(sizes) for tensor in self.tensors)
            yield from zip(zip(*parts, strict=True), some, strict=True)


class StreamedLoader:
    """`replaced` are this rank's examples that could not be read so far, "<epoch>/<index>", and what was taken."""

    def __init__(
        self,
        dataset: Dataset,
        sampler: IndexSampler,
        config: Data,
        seed: int,
        split: str,
        device: torch.device,
    ):
        self.device, self._split, self._timeout_s = device, split, config.timeout_s
        self.replaced: dict[str, int] = {}
        may_skip = (
            config.on_error == "skip" and split == "train"
        )  # in evaluation each example counts exactly once
        self.loader = DataLoader(
            _Seeded(dataset, key_of(seed, split, "example"), may_skip),
            batch_sampler=cast(Any, _Pairs(sampler)),
            num_workers=config.workers,
            timeout=config.timeout_s if config.workers else 0,
            persistent_workers=config.workers > 0 and split == "train",
            pin_memory=device.type == "cuda",
            worker_init_fn=_settle_in,
            multiprocessing_context=_context() if config.workers else None,
            collate_fn=_collate,
        )

    def __iter__(self) -> Iterator[tuple[Any, torch.Tensor]]:
        for found in self._read():
            if isinstance(found, _Unreadable):
                raise RunError(
                    f"{self._split} example {found.index} cannot be read: {found.reason}; {found.advice}"
                )
            epoch, wanted, indices, batch = found
            if not torch.equal(wanted, indices):
                pairs = zip(wanted.tolist(), indices.tolist(), strict=True)
                self.replaced |= {f"{int(epoch[0])}/{w}": i for w, i in pairs if w != i}
            yield tree_map_only(torch.Tensor, self._move, batch), self._move(indices)

    def _read(self) -> Iterator[Any]:
        which = f"a worker of the {self._split} data"
        with workers_named(which, self._timeout_s):
            try:
                yield from self.loader
            except (
                ConnectionError,
                FileNotFoundError,
                EOFError,
            ):  # the memory of a batch is handed over by a socket
                what = "it ended while a batch was on its way"
                raise RunError(f"{which} does not answer: {what}; look at its dataset") from None

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)


@contextmanager
def workers_named(which: str = "a data worker", timeout_s: float = 0.0) -> Iterator[None]:
    """Raises RunError, one line, where torch says that a worker is gone; it may do so in the middle of anything."""
    try:
        yield
    except RuntimeError as error:
        said = " ".join(str(error).split())
        is_ours = any(word in said for word in ("timed out", "exited unexpect", "is killed by"))
        if isinstance(error, RunError) or not ("DataLoader" in said and is_ours):
            raise
        why = (
            f"data.timeout_s={timeout_s:g} is over"
            if "timed out" in said
            else said.split(". ")[0].rstrip(".")
        )
        raise RunError(f"{which} does not answer: {why}; look at its dataset") from None


class _Pairs(Sampler):
    """Index tensors as lists of (epoch, index): a worker keeps its copy of the dataset, so the epoch travels along."""

    def __init__(self, sampler: IndexSampler):
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for indices in self.sampler:
            yield [(self.sampler.epoch, index) for index in indices.tolist()]


@dataclass
class _Unreadable:
    """Sent in place of a batch: an exception would come through a worker as forty lines."""

    index: int
    reason: str
    advice: str


class _Seeded(Dataset):
    """A user's dataset with the generators seeded per example: the same transforms in any worker, rank or restart.

    Gives (epoch, wanted index, index taken, example). An example that cannot be read is replaced, where that may be, by
    the next one that can: the same one in every epoch, in any layout.
    """

    def __init__(self, dataset: Dataset, seed: int, may_skip: bool):
        self.dataset, self.seed, self.may_skip = dataset, seed, may_skip

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def __getitem__(self, pair: tuple[int, int]) -> tuple[int, int, int, Any] | _Unreadable:
        epoch, wanted = pair
        for index in range(wanted, wanted + MOST_IN_A_ROW):
            taken = index % len(self)
            seed_example(self.seed, epoch, taken)
            try:
                return epoch, wanted, taken, self.dataset[taken]
            except Exception as error:
                line = traceback.extract_tb(error.__traceback__)[-1]
                reason = " ".join(
                    f"{type(error).__name__}: {error} ({line.filename}:{line.lineno})".split()
                )
                if not self.may_skip:
                    return _Unreadable(
                        wanted, reason, "mend it, or give data.on_error=skip for training data"
                    )
        return _Unreadable(wanted, reason, f"nor can the {MOST_IN_A_ROW - 1} examples after it")


def _collate(rows: list[Any]) -> Any:
    if unreadable := next((row for row in rows if isinstance(row, _Unreadable)), None):
        return unreadable
    try:
        return default_collate(rows)
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError):
        forms = [str(tree_map(_form, example)) for *_, example in rows]
        usual = max(forms, key=forms.count)
        odd = next((number for number, form in enumerate(forms) if form != usual), None)
        if odd is None:
            raise
        advice = "mend it, or raise in __getitem__ and give data.on_error=skip"
        return _Unreadable(rows[odd][2], f"it is {forms[odd]}, where others are {usual}", advice)


def _form(leaf: Any) -> Any:
    return tuple(leaf.shape) if hasattr(leaf, "shape") else type(leaf).__name__


def _settle_in(worker: int) -> None:
    """In a worker. torchrun, SLURM and systemd send signals to all processes of a job; the rank decides when its
    workers end. Where it goes while it fetches a batch, because another worker died, there is nothing to tell of."""
    sys.excepthook = lambda kind, *rest: (
        None if issubclass(kind, ConnectionError) else sys.__excepthook__(kind, *rest)
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _context() -> Any:
    """Of processes that `terminate` kills: it is torch's last resort for a worker that does not end when told."""
    context: Any = copy.copy(multiprocessing.get_context())
    make = context.Process

    def process(*args: Any, **kwargs: Any) -> Any:
        worker = make(*args, **kwargs)
        worker.terminate = worker.kill
        return worker

    context.Process = process
    return context
