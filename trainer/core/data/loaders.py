"""Loaders from a dataset to the device, which iterate over micro-batches (batch, indices).

*Streamed*: any map-style dataset, read through DataLoader and its workers. Data that is tensors
has a loader of its own, in resident.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from trainer.base.errors import (
    ConfigError,
    RunError,
    ServerError,
    ShardError,
    describe_with_place,
    one_line,
)
from trainer.core.config.schema import DataSettings
from trainer.core.data.examples import (
    fetch_together,
    find_flaw,
    find_odd,
    form_of,
    is_complex,
    length_of,
)
from trainer.core.data.order import IndexSampler
from trainer.core.data.resident import Piece, ResidentLoader
from trainer.core.data.sampling import Sampling
from trainer.core.data.workers import (
    SHARED_MEMORY_FULL,
    WORKER_POLL_S,
    check_limits,
    context_of_workers,
    no_answer,
    prepare_worker,
    wait_for_workers,
    workers_named,
)
from trainer.core.distributed import accelerator
from trainer.core.rng import random_state, seed_example
from trainer.core.rng.philox import key_of

WRITE = "python -m trainer.shards write task=<name> to=URL"
MOST_IN_A_ROW = 10  # examples tried for one row: the wanted one and those after it
Collate = Callable[[list[Any]], Any]


def check_dataset(dataset: Any, split: str, path: str) -> None:
    """Raise ConfigError if a dataset is empty, cannot be read by index or does not fit `path`.

    So are tensors that require a gradient, or that have no rows to take.
    """
    kind = type(dataset).__name__
    returned = f"build_dataset({split!r}) returned"
    if dataset is None or isinstance(dataset, DataLoader):
        wrong_type = "None" if dataset is None else "a DataLoader"
        raise ConfigError(f"""{returned} {wrong_type}: must be a dataset;
            Lockstep makes the batches, of data.global_batch rows""")
    if isinstance(dataset, Mapping):
        raise ConfigError(f"""{returned} a {kind} of {", ".join(map(str, list(dataset)[:3]))}:
            must be the data set of one split""")
    if isinstance(dataset, tuple) and all(isinstance(each, torch.Tensor) for each in dataset):
        raise ConfigError(f"""{returned} a tuple of tensors: must be a dataset;
            wrap them: ResidentDataset(inputs, targets)""")
    has_methods = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not has_methods:
        raise ConfigError(f"""{returned} {kind}: must be map-style, with __len__ and __getitem__;
            write it once: {WRITE}, and return ShardedDataset(URL)""")
    if path == "resident" and not isinstance(dataset, TensorDataset):
        raise ConfigError(f"""data.path=resident: the {split} data is a {kind}, not a TensorDataset;
            use data.path=auto or streamed""")
    if length_of(dataset, f"{returned} {kind}") == 0:
        raise ConfigError(f"{returned} 0 examples: must be at least 1")
    if isinstance(dataset, TensorDataset) and (flaw := find_flaw(dataset.tensors)):
        raise ConfigError(f"{returned} {flaw[0]}; {flaw[1]}")


@dataclass(frozen=True, eq=False)
class ExampleSource(Dataset):
    """A user's dataset, read by micro-batches: `source[epoch, indices]`.

    The random generators are seeded for each example, so its transforms are the same in any
    worker, on any rank and after a restart. With data.on_error=skip an unreadable training
    example is replaced by the next readable one of its group, the same in any layout.
    """

    dataset: Any
    split: str
    config: DataSettings
    seed: int
    device: torch.device
    collate: Collate = default_collate
    sampling: Sampling | None = None  # of training: it chooses replacements
    one_by_one: list[str] = field(default_factory=list)  # why rows are not read at once
    reading: torch.Tensor | None = None  # (workers, 2), shared: process and example being read

    @property
    def is_resident(self) -> bool:
        is_plain = self.collate is default_collate and self.config.path != "streamed"
        return isinstance(self.dataset, TensorDataset) and is_plain

    @property
    def index_device(self) -> torch.device:
        """The device of a sampler's indices: that of resident tensors, else the CPU."""
        return self.device if self.is_resident else torch.device("cpu")

    def open(self, sampler: IndexSampler) -> ResidentLoader | StreamedLoader:
        if not self.is_resident:
            return StreamedLoader(self, sampler)
        return ResidentLoader([each.to(self.device) for each in self.dataset.tensors], sampler)

    def __getitem__(self, request: tuple[int, list[int]]) -> Any:
        """Return (batch, indices read, replaced indices), or the error to raise.

        The last is {"<epoch>/<index>": the index read instead}.
        """
        epoch, wanted = request
        try:
            seed = key_of(self.seed, self.split, "example")
            if isinstance(self.dataset, (ConcatDataset, Subset)):  # which read one by one
                fetch_together(self.dataset, wanted)
            rows = self._read_at_once(seed, epoch, wanted)
            if rows is None:
                rows = [self._read(seed, epoch, index) for index in wanted]
            taken = [index for index, _ in rows]
            batch = self._collate([example for _, example in rows], taken)
        except (ConfigError, RunError) as error:  # raised in a worker, it would print forty lines
            return error
        pairs = zip(wanted, taken, strict=True)
        replaced = {f"{epoch}/{index}": other for index, other in pairs if index != other}
        return batch, torch.tensor(taken), replaced

    def _read_at_once(self, seed: int, epoch: int, wanted: list[int]) -> list[Any] | None:
        """Return (index, example) of all rows by the dataset's `__getitems__`; None if it cannot.

        It cannot if it draws random numbers: they are keyed by example, so each is then read by
        itself. So is one that cannot be read, to be named.
        """
        if self.one_by_one or not hasattr(self.dataset, "__getitems__"):
            return None
        seed_example(seed, epoch, wanted[0])
        before = random_state()
        try:
            examples = list(self.dataset.__getitems__(wanted))
        except ServerError:
            raise
        except Exception:  # of the task's code
            return None
        if len(examples) != len(wanted) or random_state() != before:
            self.one_by_one.append("__getitems__ draws random numbers")
            return None
        return list(zip(wanted, examples, strict=True))

    def _read(self, seed: int, epoch: int, wanted: int) -> tuple[int, Any]:
        """Return (index, example): the wanted one or, where allowed, the next readable one."""
        index = wanted
        for _ in range(MOST_IN_A_ROW):
            self._note(index)
            seed_example(seed, epoch, index)
            try:
                return index, self.dataset[index]
            except (KeyboardInterrupt, ConfigError, ServerError):  # which no other one would mend
                raise
            except ShardError as error:  # so are the examples after it, in the same shard
                reason, repair, count = str(error), "", error.num_examples
            except BaseException as error:  # such as SystemExit
                reason, repair, count = describe_with_place(error), "repair it, ", 1
            # Evaluation counts each example exactly once, so it replaces none.
            if self.config.on_error != "skip" or self.sampling is None:
                advice = f"{repair}or set data.on_error=skip for training data"
                raise self._unreadable(wanted, reason, advice)
            index = self.sampling.replacement(index, count)
        advice = f"nor can the {MOST_IN_A_ROW - 1} examples after it be read; repair them"
        raise self._unreadable(wanted, reason, advice)

    def _note(self, index: int) -> None:
        """Note in a worker which example it reads, to name it if the worker is lost."""
        worker = get_worker_info()
        if self.reading is not None and worker is not None:
            self.reading[worker.id] = torch.tensor([os.getpid(), index])

    def describe_worker(self, pid: int) -> str:
        """Return which example a worker was reading; empty if it is not known."""
        rows = [] if self.reading is None else self.reading.tolist()
        return next((f" while it read example {i}" for process, i in rows if process == pid), "")

    def _collate(self, examples: list[Any], indices: list[int]) -> Any:
        is_own = self.collate is not default_collate
        flaw = None
        why = ""
        try:
            batch = self.collate(examples)
            if isinstance(batch, Mapping):  # such as transformers' BatchEncoding
                batch = dict(batch)
            flaw = find_flaw(batch)  # such as a gradient, which a worker cannot send
            if flaw is None and (is_own or not is_complex(batch) or _are_alike(examples)):
                return batch
        except Exception as error:  # of the task's code, or of examples that do not fit
            if os.strerror(errno.ENOSPC) in str(error):
                raise RunError(SHARED_MEMORY_FULL) from None
            if is_own:
                raise RunError(f"""{self._named(indices)}:
                    collate(rows) failed: {describe_with_place(error)}""") from None
            if not isinstance(error, TypeError):  # which the types of the example show
                why = f": {one_line(error)}"
        if is_own and flaw:
            what, advice = flaw
            raise RunError(f"{self._named(indices)}: collate(rows) returned {what}; {advice}")
        raise self._unlike(examples, indices, why)

    def _named(self, indices: list[int]) -> str:
        more = f" and {len(indices) - 4} more" if len(indices) > 4 else ""
        return f"{self.split} examples {', '.join(map(str, indices[:4]))}{more}"

    def _unlike(self, examples: list[Any], indices: list[int], why: str) -> RunError:
        """Return the error that names the example which cannot be collated, and why."""
        if odd := find_odd(examples, indices, self.collate):
            return self._unreadable(*odd)
        reason = f"no batch can be collated from {form_of(examples[0])}{why}"
        advice = "return tensors, arrays, numbers, or tuples and dicts of them"
        return self._unreadable(indices[0], reason, advice)

    def _unreadable(self, index: int, reason: str, advice: str) -> RunError:
        return RunError(f"{self.split} example {index} cannot be read: {reason}; {advice}")


def _are_alike(examples: list[Any]) -> bool:
    return len(set(map(form_of, examples))) == 1


class StreamedLoader:
    """Loader that reads examples one by one, in `data.workers` processes or in this one."""

    def __init__(self, source: ExampleSource, sampler: IndexSampler):
        self._replaced: dict[str, int] = {}
        config = source.config
        is_pinned = accelerator.is_used(source.device)
        if config.workers:
            check_limits(config.workers)
            reading = torch.zeros(config.workers, 2, dtype=torch.int64).share_memory_()
            source = replace(source, reading=reading, device=torch.device("cpu"))  # of the rows
        self._source = source
        self._answers = DataLoader(
            source,
            sampler=_Requests(sampler),
            batch_size=None,  # the source returns whole micro-batches
            num_workers=config.workers,
            timeout=min(WORKER_POLL_S, config.timeout_s or WORKER_POLL_S) if config.workers else 0,
            persistent_workers=config.workers > 0 and source.split == "train",
            pin_memory=is_pinned,
            worker_init_fn=prepare_worker,
            multiprocessing_context=context_of_workers() if config.workers else None,
        )

    def __iter__(self) -> Iterator[Piece]:
        name = f"a worker of the {self._source.split} data"
        timeout_s = self._source.config.timeout_s
        with workers_named(name, timeout_s, self._source.describe_worker):
            try:
                for answer in wait_for_workers(iter(self._answers), timeout_s):
                    batch, indices, replaced = self._take(answer)
                    self._replaced |= replaced
                    yield batch, indices
            except (ConnectionError, FileNotFoundError, EOFError):
                # A worker sends the shared memory of a batch over a socket.
                raise no_answer(name, "it exited while it sent a batch") from None

    def read(self, indices: torch.Tensor, epoch: int = 0) -> Piece:
        """Return any examples as one micro-batch, read in this process."""
        batch, taken, _ = self._take(self._source[epoch, indices.tolist()])
        return batch, taken

    def take_replaced(self) -> dict[str, int]:
        """Return examples replaced since the last call: {"<epoch>/<index>": the index read}."""
        replaced = self._replaced
        self._replaced = {}
        return replaced

    def _take(self, answer: Any) -> Any:
        """Return an answer of the source, or raise it if it is a RunError."""
        if isinstance(answer, (ConfigError, RunError)):
            raise answer
        return answer


class _Requests:
    """Requests to the source, (epoch, indices), from a sampler's index tensors.

    The epoch is part of a request because each worker keeps its own copy of the dataset.
    """

    def __init__(self, sampler: IndexSampler):
        self.sampler = sampler

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        for indices in self.sampler:
            yield self.sampler.epoch, indices.tolist()
