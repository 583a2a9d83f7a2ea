"""`ShardedDataset`: data larger than a disk, read from shards, in the order of any other data."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from trainer import World
from trainer.base.errors import ConfigError, RunError, ServerError, ShardError, counted, one_line
from trainer.core.api import EpochSampler, ShardShuffle
from trainer.shards.cache import ShardCache, default_folder
from trainer.shards.download import DOWNLOADS
from trainer.shards.fetcher import Fetcher, open_fetcher
from trainer.shards.formats import OpenShard, find_format
from trainer.shards.formats.shard_parts import FileBytes
from trainer.shards.http_source import open_source
from trainer.shards.index import load_index

CACHE_BYTES = 2**36  # 64 GiB
MOST_OPEN = 256  # files of one process
MOST_CHANGES = 10  # of a shard while one of its rows is read


class ShardedDataset(Dataset):
    """Map-style dataset of the examples in a folder, on an HTTP server or in a store such as S3.

    Training reads a few shards at a time (`ShardShuffle`), fetches them before they are needed,
    and keeps them in a cache that all processes of a node share. The order depends on none of this.

        def build_dataset(self, split):
            return ShardedDataset(f"s3://bucket/pets/{split}", decode=to_tensors)

    `url`: a folder, https://, or s3://, gs://, hf:// through fsspec (extra `shards`). Formats: MDS
    (mosaicml-streaming), tar (WebDataset), Parquet, safetensors, and flat tokens (.bin). Except
    for MDS, `python -m trainer.shards index` writes the index beside the files.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        decode: Callable[[Any], Any] | None = None,
        shards: slice | None = None,
        index: str | os.PathLike[str] | None = None,
        lanes: int = ShardShuffle.LANES,
        window: int = ShardShuffle.WINDOW,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | str = CACHE_BYTES,
        ahead_bytes: int | str = 2**31,
    ):
        """Read the index. Raises ConfigError without a valid one, and for invalid arguments.

        `decode(example)` makes the task's example from what a format gives. `shards`: a part of
        them, such as slice(0, -4), to split a data set. `index`: its address, if it is not beside
        the files. `lanes`, `window`: see `ShardShuffle`. `cache`: a folder on the node's disk, by
        default LOCKSTEP_CACHE or ~/.cache/lockstep, that other users cannot write to.
        `cache_bytes`: most bytes in it, or "5GB". `ahead_bytes`: fetched before they are needed,
        at most half of the cache.
        """
        most_bytes = check_bytes("cache_bytes", cache_bytes)
        ahead = check_bytes("ahead_bytes", ahead_bytes)
        if decode is not None and not callable(decode):
            raise ConfigError(f"""decode={decode!r:.60}:
                must be a function of an example, such as decode=to_tensors""")
        ShardShuffle.check_sizes(lanes, window)
        folder = default_folder() if cache is None else Path(_address("cache", cache))
        self._source = open_source(_address("url", url))
        of_index = self._source if index is None else open_source(_address("index", index))
        self.index = load_index(of_index)
        if shards is not None:
            self.index = self.index.select(shards)
        if not len(self.index) or not int(self.index.rows.sum()):
            raise ConfigError(f"{url}: has no examples; must have at least 1")
        self._decode = decode
        self.sampling = ShardShuffle(self.index.rows, lanes, window)
        # a copy: a process that is spawned moves the tensor to shared memory
        self._first = self.sampling.first.numpy().copy()
        self.cache = ShardCache(self._source, self.index, folder, most_bytes)
        self.ahead_bytes = min(ahead, most_bytes // 2)
        form = (self.index.format, self.index.settings)
        self._format = find_format(*form, self._source.url)
        self._open: dict[int, tuple[FileBytes, OpenShard]] = {}
        self._flaws: dict[int, str] = {}

    @property
    def source(self) -> str:
        """Words for the start of a run."""
        size = _shown(int(self.index.sizes.clamp(min=0).sum()))
        count = counted(len(self.index), f"{self.index.format} shard")
        shards = f"{self._source.url}, {count}, {size}"
        if unknown := int((self.index.digests == 0).all(1).sum()):
            shards += f", {unknown:,} without a SHA-256 in the index, so not verified"
        if self.cache.is_in_place:
            return shards
        ahead = f"up to {_shown(self.ahead_bytes)} fetched ahead"
        return f"{shards}, {ahead} into {self.cache.folder} ({_shown(self.cache.most_bytes)})"

    @property
    def digest(self) -> str:
        """The digest of the index: a resume refuses other data."""
        return self.index.digest

    def __len__(self) -> int:
        return self.sampling.num_examples

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        self._close_changed([int(self._first.searchsorted(index % len(self), side="right")) - 1])
        return self._read(index % len(self))

    def _read(self, index: int) -> Any:
        shard = int(self._first.searchsorted(index, side="right")) - 1
        try:
            if shard in self._flaws:  # it is not read again for each of its examples
                raise RunError(self._flaws[shard])
            example = self._take(shard, index - int(self._first[shard]))
        except ServerError:
            raise
        except RunError as error:
            self._flaws[shard] = str(error)
            raise ShardError(str(error), int(self.index.rows[shard])) from None
        return example if self._decode is None else self._decode(example)

    def _take(self, shard: int, row: int) -> Any:
        """Return a row; a file that was changed under it is verified, or fetched, once more."""
        for _ in range(MOST_CHANGES):
            if shard not in self._open:
                self._add(shard, self.cache.open(shard))
            file, opened = self._open[shard]
            try:
                return opened[row]
            except Exception as error:
                if not self.cache.is_stale(shard, file):
                    raise
                problem = one_line(error)
                del self._open[shard]
        raise ServerError(problem)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several examples; the shards they are in are fetched at the same time."""
        self.fetch_examples(indices)
        return [self._read(index) for index in indices]

    def fetch_examples(self, indices: Sequence[int]) -> None:
        """Open the shards of these examples.

        One that cannot be read is named when it is read.
        """
        shard_numbers = self._first.searchsorted(indices, side="right") - 1
        shards = dict.fromkeys(shard_numbers.tolist())
        self._close_changed(shards)
        closed = [shard for shard in shards if shard not in {*self._open, *self._flaws}]
        wanted = [shard for shard in closed if not self.cache.is_ready(shard)]
        if len(wanted) > 1:
            with ThreadPoolExecutor(DOWNLOADS) as pool:
                for shard, file_or_flaw in zip(wanted, pool.map(self._fetch, wanted), strict=True):
                    if isinstance(file_or_flaw, FileBytes):
                        with suppress(RunError):  # which reading it meets again
                            self._add(shard, file_or_flaw)
                    else:
                        self._flaws[shard] = file_or_flaw

    def open_fetcher(self, sampler: EpochSampler, world: World) -> Fetcher | None:
        """Return this node's fetcher of shards before ranks need them, on one of its ranks."""
        return open_fetcher(self.cache, self.ahead_bytes, sampler, world)

    def _fetch(self, shard: int) -> FileBytes | str:
        """Return the open file of a shard, or why it cannot be read."""
        try:
            return self.cache.open(shard)
        except ServerError:
            raise
        except RunError as error:
            return str(error)

    def _close_changed(self, shards: Iterable[int]) -> None:
        """Close files that were written to since they were opened: opening verifies them."""
        for shard in shards:
            if shard in self._open and self.cache.is_stale(shard, self._open[shard][0]):
                del self._open[shard]

    def _add(self, shard: int, file: FileBytes) -> None:
        """Read the head of an open file; the oldest of too many is closed, as are deleted ones."""
        for deleted_shard in [n for n, (other, _) in self._open.items() if other.is_deleted]:
            del self._open[deleted_shard]
        while len(self._open) >= MOST_OPEN:
            self._open.pop(next(iter(self._open)))
        try:
            rows, span = int(self.index.rows[shard]), self.index.span(shard)
            opened = self._format.open(file, self.index.settings, rows, span)
        except (ConfigError, RunError):
            raise
        except Exception as error:  # each reader has its own kinds
            raise RunError(f"""shard {file.path}: cannot be read as {self.index.format}:
                {one_line(error)}; python -m trainer.shards check {self._source.url}""") from None
        self._open[shard] = (file, opened)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}


def _address(name: str, argument: Any) -> str:
    """Return a path or an address. Raises ConfigError, which names the argument, for others."""
    text = os.fspath(argument) if isinstance(argument, (str, os.PathLike)) else ""
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ConfigError(f"""{name}={argument!r:.60}:
            must be a folder or an address such as https://host/folder""")
    return text


def _shown(num_bytes: int) -> str:
    power = min(4, (len(str(num_bytes)) - 1) // 3)
    return f"{num_bytes / 1000**power:.1f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def check_bytes(name: str, size: Any) -> int:
    """Return a number of bytes, given as one or in words such as "5GB" or "512 MiB"."""
    if isinstance(size, str) and (
        match := re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?) ?(?:([kMGT])(i?))?B?", size)
    ):
        amount, prefix, is_binary = match.groups()
        power = " kMGT".index(prefix) if prefix else 0
        size = int(float(amount) * (1024 if is_binary else 1000) ** power)
    if isinstance(size, float) and size.is_integer():
        size = int(size)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        must = 'must be a number of bytes above 0, or words such as "5GB"'
        raise ConfigError(f"{name}={size!r:.60}: {must}")
    return size
