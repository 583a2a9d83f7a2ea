"""`python -m trainer.shards`: write, index and check data in shards."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from torch.utils.data import IterableDataset

from trainer import load_config
from trainer.base.errors import ConfigError, RunError, ServerError, counted
from trainer.cli import (
    answer,
    check_alone,
    load_task,
    run,
    split_arguments,
    take_words,
)
from trainer.core.api import key_of, seed_example
from trainer.shards.download import digest_file, download, read_whole
from trainer.shards.formats import FORMATS
from trainer.shards.formats.mds import MdsWriter, encoding_of
from trainer.shards.formats.shard_parts import FileBytes
from trainer.shards.http_source import create_source, open_source
from trainer.shards.index import (
    INDEX_NAME,
    MOST_INDEX_BYTES,
    OF_MDS,
    ShardIndex,
    load_index,
    of_mds,
)
from trainer.shards.long_work import watched
from trainer.shards.sources import LocalSource, Source, Span, open_file


def write_index(
    url: str, to: str, settings: Mapping[str, Any], most_bytes: int
) -> tuple[ShardIndex, str]:
    """Read all shards at `url`; write their index and return it with its address.

    A file of more than `most_bytes` becomes several shards, in formats whose files can be divided.
    Raises ConfigError if there are none, or of several formats, or one cannot be read.
    """
    source = open_source(url)
    listed = source.list()
    format, names = _find_shards(source.url, listed)
    settings = dict(settings)
    if format == "mds" and OF_MDS in listed:
        mds_index = of_mds(read_whole(source, OF_MDS, MOST_INDEX_BYTES), f"{source.url}/{OF_MDS}")
        names = [mds_index.name(shard) for shard in range(len(mds_index))]
        settings = dict(mds_index.settings)
    elif format == "mds":
        raise ConfigError(f"{source.url}: has no {OF_MDS}, which names the columns; copy it there")
    if format == "bin":
        settings = {"header": 0, "dtype": "uint16", **settings}
    shards: list[tuple[str, int, int, bytes, Span | None]] = []
    for file_number, name in enumerate(watched(names, f"reading {source.url}", "files")):
        with _local(source, name) as path:
            parts = _divide(format, path, settings, most_bytes)
            for rows, span in parts or [(int(mds_index.rows[file_number]), None)]:
                size = span.size if span else path.stat().st_size
                with open_file(path) as file:
                    digest = bytes.fromhex(digest_file(file, span))
                shards.append((name, rows, size, digest, span))
    index = ShardIndex.of(format, settings, *zip(*shards, strict=True))
    target = create_source(to)
    target.write(INDEX_NAME, index.to_bytes())
    return index, f"{target.url}/{INDEX_NAME}"


def _find_shards(url: str, listed: list[str]) -> tuple[str, list[str]]:
    """Return the format and the names of the shards."""
    names = [name for name in listed if not f"/{name}".count("/.")]  # copies of editors
    by_format = {
        format: shards
        for format, kind in FORMATS.items()
        if (shards := [n for n in names if _without_compression(n).endswith(kind.suffixes)])
    }
    if len(by_format) != 1:
        kinds = ", ".join(suffix for kind in FORMATS.values() for suffix in kind.suffixes)
        has = f"files of several formats ({', '.join(by_format)})" if by_format else "no shards"
        raise ConfigError(f"{url}: has {has}; must have files of one of {kinds}")
    ((format, shards),) = by_format.items()
    packed = [name for name in shards if name != _without_compression(name)]
    if packed and format != "mds":
        raise ConfigError(f"{url}: {packed[0]} is compressed: must be {format} files as they are")
    return format, shards


def _without_compression(name: str) -> str:
    return name.removesuffix(".zstd").removesuffix(".gz")


def _divide(
    format: str, path: Path, settings: Mapping[str, Any], most: int
) -> list[tuple[int, Span | None]]:
    """Return rows and span of each shard of a file; none for MDS, whose index has them."""
    divide = FORMATS[format].divide
    try:
        return [] if divide is None else divide(path, settings, most)
    except (ConfigError, RunError):
        raise
    except Exception as error:  # each reader has its own kinds
        raise ConfigError(f"{path.name}: cannot be read as {format}: {error}") from None


def check_shards(url: str) -> tuple[ShardIndex, dict[str, str]]:
    """Read every shard; return the index, and why by the name of each file that differs.

    Raises RunError if the server does not answer.
    """
    source = open_source(url)
    index = load_index(source)
    wrong = {}
    for shard in watched(range(len(index)), f"reading {source.url}", "shards"):
        name = index.name(shard)
        try:
            span = index.span(shard)
            with _local(source, name, index.size(shard), index.sha256(shard), span) as path:
                if not index.settings.get("compression"):
                    rows = int(index.rows[shard])
                    FORMATS[index.format].open(FileBytes(path), index.settings, rows, span)
        except ServerError:
            raise
        except (OSError, RunError, ConfigError) as error:
            wrong[name] = str(error)
        except Exception as error:  # each reader has its own kinds
            wrong[name] = f"cannot be read as {index.format}: {error}"
    return index, wrong


@contextmanager
def _local(
    source: Source, name: str, size: int | None = None, sha256: str = "", span: Span | None = None
) -> Iterator[Path]:
    """Yield a file's place on this machine; compare its bytes and SHA-256, where they are given.

    Raises RunError if they differ, or if it cannot be read.
    """
    if isinstance(source, LocalSource):
        path = source.folder / name
        with open_file(path) as opened:
            actual_size = path.stat().st_size
            if size is not None and span is None and actual_size != size:
                raise RunError(f"has {actual_size:,} bytes, and {size:,} in the index")
            digest = digest_file(opened, span) if sha256 else ""
        if digest != sha256:
            raise RunError(f"has SHA-256 {digest[:12]}, and {sha256[:12]} in the index")
        yield path
        return
    with tempfile.NamedTemporaryFile(suffix=Path(name).suffix) as file:
        stream: BinaryIO = file.file  # type: ignore[assignment]
        most = shutil.disk_usage(file.name).free // 2

        def check_bytes(num_bytes: int) -> None:
            if num_bytes > most:
                raise RunError(f"has more than {most:,} bytes, half of what is free for it")

        download(source, name, stream, size, sha256, span, check_bytes)
        yield Path(file.name)


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
    examples = watched(_examples(dataset, key_of(seed, "shards")), f"writing {url}", "examples")
    for index, example in enumerate(examples):
        columns = dict(_columns(example))
        if writer is not None and writer.is_full(most_bytes):
            written.append(_put(source, writer, len(written)))
        try:
            if writer is None:
                writer = MdsWriter({name: encoding_of(value) for name, value in columns.items()})
            writer.add(columns)
        except Exception as error:  # each converter has its own kinds
            raise ConfigError(f"""example {index} cannot be written: {error};
                return tensors, arrays, numbers, texts or bytes, alike in all examples""") from None
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
    if names := source.list():
        raise ConfigError(f"{source.url}: must be empty, and has {names[0]}; give another place")


def _columns(example: Any) -> Iterator[tuple[str, Any]]:
    """Yield (column, value) of an example; a single value is the tuple of one."""
    if isinstance(example, Mapping):
        yield from ((str(name), value) for name, value in example.items())
    elif isinstance(example, (tuple, list)):
        yield from ((str(column), value) for column, value in enumerate(example))
    else:
        yield "0", example


def _put(source: Source, writer: MdsWriter, shard: int) -> tuple[str, int, int, bytes]:
    """Write a shard; return its name, rows, bytes and SHA-256."""
    rows = len(writer)
    data = writer.take()
    name = f"shard.{shard:05d}.mds"
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
    source.write(INDEX_NAME, index.to_bytes())
    return index


HELP = """usage: python -m trainer.shards write task=<name> to=URL [split=train] [shard_mb=16]
                                   [key=value ...] [--config-dir DIR]
       python -m trainer.shards index URL [shard_mb=16] [tokens=1024] [dtype=uint16] [header=0]
                                   [to=URL]
       python -m trainer.shards check URL

write: writes a task's data set, map-style or iterable, as MDS shards with their index. Examples are
       tensors, arrays, numbers, strings or bytes, or tuples or dicts of them.
index: writes an index of existing shards: .mds, .tar (WebDataset), .parquet, .safetensors or .bin,
       which has flat tokens in sequences of `tokens`. It has rows, bytes and SHA-256 of each file.
       A larger file of Parquet, tar or tokens becomes several shards, which are read separately.
check: reads every file and names those that differ from the index.

URL is a folder, or s3://, gs://, hf:// with fsspec (extra shards); check also takes https://.

Exit codes: 0 done, 1 a shard differs, 2 invalid arguments."""

SHARD_MB = 16  # an epoch begins with a window of them for each lane
OWN_WORDS = ("to", "split", "shard_mb", "tokens", "dtype", "header")


def main(arguments: Sequence[str]) -> int:
    check_alone("trainer.shards", "run it with python, in one process")
    action = arguments[0] if arguments else ""
    if action not in ACTIONS:
        raise ConfigError(f"""{action or "nothing given"}: must be write, index or check;
            python -m trainer.shards --help shows how""")
    return ACTIONS[action](arguments[1:])


def _write(arguments: Sequence[str]) -> int:
    words, config_dirs = split_arguments(arguments)
    own, overrides = take_words(words, OWN_WORDS, config_dirs)
    if "to" not in own:
        raise ConfigError("to is missing: give to=<folder or bucket> for the shards")
    most_bytes = _number(own, "shard_mb", SHARD_MB) * 2**20
    if most_bytes >= 2**32:
        raise ConfigError(f"""shard_mb={own["shard_mb"]}:
            must be less than 4096, since MDS has 32 bits""")
    config = load_config(overrides, config_dirs)
    task = load_task(config)(config)

    split = own.get("split", "train")
    task.prepare()
    dataset = task.build_dataset(split)
    if dataset is None:
        raise ConfigError(f"split={split}: build_dataset returned no data; name another split")
    index = write_shards(dataset, own["to"], most_bytes, config.run.seed)
    line = f"{counted(int(index.rows.sum()), 'example')} in {counted(len(index), 'shard')}"
    facts = {"url": own["to"], "examples": int(index.rows.sum()), "shards": len(index)}
    return answer(0, "written", facts, lambda: print(f"{line}: {own['to']}"))


def _index(arguments: Sequence[str]) -> int:
    own, rest = take_words(arguments, OWN_WORDS)
    url = _address(rest, "index")

    names = ("tokens", "header")
    settings: dict[str, Any] = {name: _number(own, name, 0) for name in names if name in own}
    if "dtype" in own:
        settings["dtype"] = own["dtype"]
    most_bytes = _number(own, "shard_mb", SHARD_MB) * 2**20
    index, address = write_index(url, own.get("to", url), settings, most_bytes)
    rows = int(index.rows.sum())
    line = (
        f"{counted(rows, 'example')} in {counted(len(index), 'shard')} ({index.format}): {address}"
    )
    facts = {"index": address, "examples": rows, "shards": len(index), "format": index.format}
    return answer(0, "written", facts, lambda: print(line))


def _check(arguments: Sequence[str]) -> int:
    url = _address(arguments, "check")

    index, wrong = check_shards(url)
    unknown = sum(not index.sha256(shard) for shard in range(len(index)))
    lines = [f"{name}: {why}" for name, why in wrong.items()]
    total = f"{counted(len(index), 'shard')}, {len(wrong)} differ from the index"
    note = f"; {unknown} without a SHA-256 in it, so only rows and bytes were compared"
    lines.append(total + note * bool(unknown))
    facts = {"shards": len(index), "wrong": wrong, "without_digest": unknown}
    result = "different" if wrong else "equal"
    return answer(int(bool(wrong)), result, facts, lambda: print(*lines, sep="\n"))


def _address(words: Sequence[str], action: str) -> str:
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError(f"give one address: python -m trainer.shards {action} URL")
    return words[0]


def _number(words: Mapping[str, str], name: str, default: int) -> int:
    word = words.get(name, str(default))
    if not word.isdecimal() or (name != "header" and not int(word)):
        raise ConfigError(f"{name}={word}: must be an integer of at least {int(name != 'header')}")
    return int(word)


ACTIONS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "write": _write,
    "index": _index,
    "check": _check,
}

if __name__ == "__main__":
    run(main, HELP)
