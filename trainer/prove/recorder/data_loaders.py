"""Data loaders of a script, and their passes.

The digest of an example is taken before `collate_fn`, in the worker, so that padding to the longest
row of a batch does not change it. The iterator in the main process notes it with its batch.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data._utils import fetch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .digests import digest, marks, split, weigh
from .exchanges import MOST_ELEMENTS_OF_A_METRIC
from .wrapping import LOG, SETTINGS, Given, quietly, replace, watch

COLLECTIVE_FUNCTIONS = (
    *("all_reduce", "reduce", "all_gather", "gather"),
    *("all_gather_into_tensor", "all_gather_single"),  # its name from torch 2.13 on
)
READS: deque[float] = deque(maxlen=64)  # since the last step


def watch_reads() -> None:
    """Note each number from now on, and each collective of small tensors or objects."""
    for name in ("item", "__float__"):
        watch(torch.Tensor, name, after=_note_number)
    for name in (*COLLECTIVE_FUNCTIONS, "all_gather_object", "gather_object"):
        if hasattr(dist, name):
            watch(dist, name, after=_note_collective)


def _note_number(_: Given, result: Any) -> None:
    if isinstance(result, float):
        READS.append(result)


def _note_collective(arguments: Given, _: Any) -> None:
    if all(
        each.numel() <= MOST_ELEMENTS_OF_A_METRIC
        for each in arguments.values()
        if isinstance(each, torch.Tensor)
    ):
        LOG.add("averaged")


class TaggedBatch:
    """A batch with the digests of its examples, on the way from the fetcher to the iterator."""

    def __init__(self, batch: Any, tag: dict[str, Any] | None) -> None:
        self.batch = batch
        self.tag = tag

    def pin_memory(self) -> TaggedBatch:
        from torch.utils.data._utils.pin_memory import pin_memory

        return TaggedBatch(pin_memory(self.batch), self.tag)


class Collate:
    """`collate_fn` of a fetcher, which also digests the examples that it is given."""

    def __init__(self, function: Any, is_list: bool) -> None:
        self.function = function
        self.is_list = is_list

    def __call__(self, data: Any) -> TaggedBatch:
        tag = self.describe(data)
        batch = self.function(data)
        if tag is not None:
            tag["weights"] = quietly(weigh)(data if self.is_list else None, batch)
        return TaggedBatch(batch, tag)

    @quietly
    def describe(self, data: Any) -> dict[str, Any]:
        is_list = self.is_list and isinstance(data, (list, tuple))
        return {"rows": [digest(item) for item in data] if is_list else split(data)}


def _watch_fetchers() -> None:
    def start(arguments: Given, _: Any) -> None:
        fetcher = arguments["self"]
        fetcher.collate_fn = Collate(fetcher.collate_fn, fetcher.auto_collation)

    def note(arguments: Given, batch: Any) -> None:
        if isinstance(batch, TaggedBatch) and batch.tag is not None:
            index = _list(arguments["possibly_batched_index"])
            batch.tag["index"] = [int(i) if isinstance(i, int) else str(i) for i in index]

    watch(fetch._BaseDatasetFetcher, "__init__", after=start)
    watch(fetch._MapDatasetFetcher, "fetch", after=note)


def _list(index: Any) -> list[Any]:
    return list(index) if isinstance(index, (list, tuple)) else [index]


class LoaderPasses:
    """Numbers of the passes over loaders."""

    def __init__(self) -> None:
        self._num_passes = 0
        self.is_fresh = False  # a batch was handed out since the last step

    @quietly
    def begin(self, iterator: Any) -> None:
        """Note the first batch of a pass, with what its loader is."""
        self._num_passes += 1
        iterator._lockstep_pass = self._num_passes
        LOG.add("pass", number=self._num_passes, **(iterator._lockstep_about or {}))

    @quietly
    def hand_out(self, iterator: Any, tag: dict[str, Any] | None, batch: Any) -> None:
        """Note a batch that the script takes."""
        self.is_fresh = True
        rows = tag or {"rows": split(batch), "weights": weigh(None, batch)}
        LOG.add("batch", number=iterator._lockstep_pass, marks=marks(batch), **rows)

    @quietly
    def end(self, iterator: Any) -> None:
        LOG.add("end", number=iterator._lockstep_pass)


PASSES = LoaderPasses()


@quietly
def describe_loader(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what a loader is; it may be gone before its iterator is."""
    batches: Any = getattr(loader, "batch_sampler", None)
    while hasattr(batches, "batch_sampler"):  # of Accelerate and Lightning, around the script's own
        batches = batches.batch_sampler
    sampler = getattr(batches, "sampler", getattr(loader, "sampler", None))
    is_iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    is_sized = not is_iterable and hasattr(loader.dataset, "__len__")
    is_counted = not is_iterable and hasattr(loader._index_sampler, "__len__")
    return {
        "size": len(loader.dataset) if is_sized else None,  # type: ignore[arg-type]
        "batches": len(loader) if is_counted else None,
        "sampler": type(loader.dataset if is_iterable else sampler).__name__,
        "epoch": getattr(sampler, "epoch", None),
        "shuffle": bool(getattr(sampler, "shuffle", False)),
        "seed": seed if isinstance(seed := getattr(sampler, "seed", None), int) else None,
    }


def _watch_iterators() -> None:
    def begin(arguments: Given) -> None:
        iterator = arguments["self"]
        iterator._lockstep_pass = 0
        iterator._lockstep_about = describe_loader(arguments["loader"])
        _watch_next(type(iterator))

    watch(_BaseDataLoaderIter, "__init__", begin)
    watch(_BaseDataLoaderIter, "_reset", begin)


def _watch_next(kind: type[Any]) -> None:
    original = kind.__next__
    if hasattr(original, "of_lockstep"):
        return

    def take(self: Any) -> Any:
        try:
            data = original(self)
        except StopIteration:
            if self._lockstep_pass:
                PASSES.end(self)
                self._lockstep_pass = 0
            raise
        tag = None
        if isinstance(data, TaggedBatch):
            data, tag = data.batch, data.tag
        if SETTINGS["dtype"] == "fp64":
            data = widen_if_able(data)
        if not self._lockstep_pass:
            PASSES.begin(self)
        PASSES.hand_out(self, tag, data)
        return data

    replace(kind, "__next__", take)
    kind.__next__.of_lockstep = True


def widen(value: Any) -> Any:
    """Return a tree with its fp32 and half tensors in fp64; other objects stay as they are."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if type(value) in (list, tuple):
        return type(value)(widen(each) for each in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(widen, value))
    if isinstance(value, dict) or isinstance(getattr(value, "data", None), dict):
        for key in list(value):
            value[key] = widen(value[key])
    return value


def widen_if_able(value: Any) -> Any:
    """Return a tree in fp64; one whose classes do not take other tensors stays as it is."""
    widened = quietly(lambda: (widen(value),))()
    return widened[0] if widened else value


def watch_loaders() -> None:
    """Note the examples of every DataLoader from now on."""
    _watch_fetchers()
    _watch_iterators()
