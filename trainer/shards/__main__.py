"""`python -m trainer.shards write|index|check`: data in shards, for `ShardedDataset`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.cli import (
    answer,
    check_alone,
    load_task,
    run,
    split_arguments,
    take_words,
)
from trainer.config.compose import load_config
from trainer.errors import ConfigError, counted

HELP = """usage: python -m trainer.shards write task=<name> to=URL [split=train] [shard_mb=16]
                                   [key=value ...] [--config-dir DIR]
       python -m trainer.shards index URL [shard_mb=16] [tokens=1024] [dtype=uint16] [header=0]
                                   [to=URL]
       python -m trainer.shards check URL

write: the examples of a task's data set, which may be iterable, as shards in the format MDS, with
       their index. Examples are tensors, arrays, numbers, texts or bytes, or tuples or dicts of
       them.
index: an index of shards that exist: .mds, .tar (WebDataset), .parquet, .safetensors or .bin, flat
       tokens in sequences of `tokens`. It has the rows, the bytes and the SHA-256 of each file. A
       larger file of Parquet, tar or tokens becomes several shards, which are read on their own.
check: reads every file, and names those that differ from the index.

URL is a folder, or s3://, gs://, hf:// with fsspec (extra shards); check also takes https://.

Exit codes: 0 done, 1 a shard differs, 2 invalid arguments."""

SHARD_MB = 16  # an epoch begins with a window of them for each lane
WORDS = ("to", "split", "shard_mb", "tokens", "dtype", "header")


def main(arguments: Sequence[str]) -> int:
    check_alone("trainer.shards", "run it with python, in one process")
    action = arguments[0] if arguments else ""
    if action not in ACTIONS:
        advice = "must be write, index or check; python -m trainer.shards --help shows how"
        raise ConfigError(f"{action or 'nothing given'}: {advice}")
    return ACTIONS[action](arguments[1:])


def _write(arguments: Sequence[str]) -> int:
    words, config_dirs = split_arguments(arguments)
    own, overrides = take_words(words, WORDS, config_dirs)
    if "to" not in own:
        raise ConfigError("to is missing: give to=<folder or bucket> for the shards")
    most_bytes = _number(own, "shard_mb", SHARD_MB) * 2**20
    if most_bytes >= 2**32:
        must = "must be less than 4096, since MDS has 32 bits"
        raise ConfigError(f"shard_mb={own['shard_mb']}: {must}")
    config = load_config(overrides, config_dirs)
    task = load_task(config)(config)
    from trainer.shards.writing import write_shards

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
    own, rest = take_words(arguments, WORDS)
    url = _address(rest, "index")
    from trainer.shards.indexing import write_index

    names = ("tokens", "header")
    settings: dict[str, Any] = {name: _number(own, name, 0) for name in names if name in own}
    if "dtype" in own:
        settings["dtype"] = own["dtype"]
    most_bytes = _number(own, "shard_mb", SHARD_MB) * 2**20
    index, place = write_index(url, own.get("to", url), settings, most_bytes)
    rows = int(index.rows.sum())
    line = f"{counted(rows, 'example')} in {counted(len(index), 'shard')} ({index.format}): {place}"
    facts = {"index": place, "examples": rows, "shards": len(index), "format": index.format}
    return answer(0, "written", facts, lambda: print(line))


def _check(arguments: Sequence[str]) -> int:
    url = _address(arguments, "check")
    from trainer.shards.indexing import check_shards

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
