"""Writing a map-style data set as shards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from trainer.data.shards.addresses import create_source
from trainer.data.shards.formats.mds import MdsWriter, encoding_of
from trainer.data.shards.index import NAME, OF_MDS, ShardIndex
from trainer.data.shards.sources import Source
from trainer.errors import ConfigError
from trainer.rng.philox import key_of, seed_example


def write_shards(dataset: Any, url: str, most_bytes: int, seed: int) -> ShardIndex:
    """Write all examples in MDS, in their order, and their index; return the index.

    `dataset` is map-style or iterable.

    A shard has at most `most_bytes`, or one example. Random transforms are drawn once, and then
    belong to the data. Raises ConfigError for a place that has files, or for examples that are no
    tensors, arrays, numbers, texts or bytes, or tuples or dicts of them.
    """
    source = create_source(url)
    _check_empty(source)
    writer: MdsWriter | None = None
    written: list[tuple[str, int, int, bytes]] = []
    for index, example in enumerate(_examples(dataset, key_of(seed, "shards"))):
        columns = dict(_columns(example))
        if writer is not None and writer.is_full(most_bytes):
            written.append(_put(source, writer, len(written)))
        try:
            if writer is None:
                writer = MdsWriter({name: encoding_of(value) for name, value in columns.items()})
            writer.add(columns)
        except Exception as error:  # each converter has its own kinds
            advice = "return tensors, arrays, numbers, texts or bytes, alike in all examples"
            raise ConfigError(f"example {index} cannot be written: {error}; {advice}") from None
    if writer is None:
        raise ConfigError("the data has no examples: must have at least 1")
    written.append(_put(source, writer, len(written)))
    return _put_index(source, writer, written)


def _examples(dataset: Any, seed: int) -> Iterator[Any]:
    """Yield the examples of a data set, map-style or iterable, with seeded generators."""
    if not hasattr(dataset, "__getitem__") or isinstance(dataset, IterableDataset):
        seed_example(seed, 0, 0)
        yield from dataset
        return
    for index in range(len(dataset)):
        seed_example(seed, 0, index)
        yield dataset[index]


def _check_empty(source: Source) -> None:
    if found := source.list():
        what = f"{source.url}: must be empty, and has {found[0]}"
        raise ConfigError(f"{what}; give another place")


def _columns(example: Any) -> Iterator[tuple[str, Any]]:
    """Yield (column, value) of an example; a single value is the tuple of one."""
    if isinstance(example, Mapping):
        yield from ((str(name), value) for name, value in example.items())
    elif isinstance(example, (tuple, list)):
        yield from ((str(number), value) for number, value in enumerate(example))
    else:
        yield "0", example


def _put(source: Source, writer: MdsWriter, number: int) -> tuple[str, int, int, bytes]:
    """Write a shard; return its name, rows, bytes and SHA-256."""
    rows = len(writer)
    data = writer.take()
    name = f"shard.{number:05d}.mds"
    source.write(name, data)
    return name, rows, len(data), hashlib.sha256(data).digest()


def _put_index(
    source: Source, writer: MdsWriter, written: list[tuple[str, int, int, bytes]]
) -> ShardIndex:
    """Write Lockstep's index, and MDS's for other readers."""
    shards = []
    for name, rows, size, digest in written:
        raw = {"basename": name, "bytes": size, "hashes": {"sha256": digest.hex()}}
        facts = {"version": 2, "format": "mds", "compression": None, "hashes": ["sha256"]}
        own = {"raw_data": raw, "zip_data": None, "samples": rows, "size_limit": None}
        shards.append({**facts, **own, **writer.settings})
    source.write(OF_MDS, json.dumps({"version": 2, "shards": shards}).encode())
    names, counts, sizes, digests = zip(*written, strict=True)
    index = ShardIndex.of("mds", writer.settings, names, counts, sizes, digests)
    source.write(NAME, index.to_bytes())
    return index
