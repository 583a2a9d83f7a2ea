"""Runs on data in shards whose server, shards, index or cache fails. A run ends like an undisturbed
one, or in one line that names the shard, the reason and the next step. tests/shards/ attacks a
data set without a run: files planted in its cache, answers that are no shards, locks, users."""

from __future__ import annotations

import functools
import json
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.command import Command, Done, Process
from harness.disks import small_disk
from harness.shard_rows import NUM, rows
from harness.shard_server import serving
from harness.training import CONF

from faults.common import Row, folder, random_of, state_of, wait_for
from faults.runs import _judge
from trainer import ConfigError, ShardedDataset
from trainer.base.errors import describe_with_place
from trainer.core.distributed.watch.watcher import LOST
from trainer.shards import download
from trainer.shards.__main__ import write_shards
from trainer.shards.index import INDEX_NAME, OF_MDS, ShardIndex

LIMIT_S = 120.0
AGENT = 1  # exit code of the agent of two ranks, whatever theirs is
WORDS = (
    *("task=on_shards", f"--config-dir={CONF}", "run.name=run", "run.resume=auto"),
    *("checkpoint.every_steps=4", "checkpoint.every_epochs=null"),
)
SHARD = "shard.00007.mds"
Case = Callable[["Attack"], "str | None"]


@functools.cache
def _kept() -> Path:
    """Return a folder with 203 examples in 29 shards; it is deleted at the end."""
    kept = tempfile.TemporaryDirectory(prefix="faults-shards-")
    _KEPT.append(kept)
    write_shards(rows(), f"{kept.name}/data", 600, 0)
    return Path(kept.name)


_KEPT: list[Any] = []


@functools.cache
def _undisturbed(ranks: int) -> Any:
    """Return the end of a run on the folder."""
    place = _kept() / str(ranks)
    place.mkdir()
    done = Command(place)(*WORDS, f"task.options.url={_kept() / 'data'}", ranks=ranks)
    assert done.returncode == 0, done.stderr
    return state_of(place / "runs/on_shards/run")


class Attack:
    """One case: its own copy of the shards, a cache, and the commands of a run on 1 or 2 ranks."""

    def __init__(self, place: Path, chance: random.Random):
        self.place = place
        self.chance = chance
        self.data = place / "data"
        self.cache = place / "cache"
        self.ranks = chance.choice((0, 2))
        shutil.copytree(_kept() / "data", self.data)

    def start(self, url: str | Path, *words: str, most: int = 10**6, **options: Any) -> Process:
        settings = [f"task.options.url='{url}'", f"task.options.cache_bytes={most}"]
        environment = {"LOCKSTEP_CACHE": str(self.cache)}
        options = {"ranks": self.ranks, "environment": environment, **options}
        return Command(self.place).start(*WORDS, *settings, *words, **options)

    def run(self, url: str | Path, *words: str, **options: Any) -> Done:
        return end(self.start(url, *words, **options))

    def slowly(self, url: str | Path, **options: Any) -> Process:
        """Start a run and wait until it is in its first epoch."""
        process = self.start(url, "task.options.pause_s=0.1", **options)
        path = self.place / "runs/on_shards/run/metrics.jsonl"
        is_there = lambda: path.exists() and '"step": 3,' in path.read_text()  # noqa: E731
        wait_for(lambda: is_there() or process.poll() is not None, LIMIT_S)
        return process

    def judge(self, done: Done) -> str | None:
        """Return a problem unless the run ended like an undisturbed one."""
        if done.returncode or "Traceback" in done.stderr:
            return f"exit code {done.returncode}: {done.stderr[-500:]}"
        return _judge(self.place / "runs/on_shards/run", _undisturbed(self.ranks))

    def flip(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
        path.write_bytes(data)


def end(process: Process) -> Done:
    try:
        out, err = process.communicate(LIMIT_S)
    finally:
        process.kill()
    return Done(process.returncode or 0, out, err)


def refused(done: Done, code: int, *wanted: str) -> str | None:
    """Return a problem unless it ended in one line of error that has these words.

    On a busy machine the other rank may say before it that this one has exited.
    """
    every = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    lines = [line for line in every if LOST not in line]
    is_named = len(lines) == 1 and all(re.search(word, lines[0]) for word in wanted)
    if done.returncode in (code, AGENT) and is_named and "Traceback" not in done.stderr:
        return None
    return f"exit code {done.returncode}: {done.stderr[-700:]}"


@contextmanager
def quick() -> Iterator[None]:
    """Wait little between two tries, in forks of this process."""
    before = download.FIRST_DELAY_S, download.MOST_DELAY_S
    download.FIRST_DELAY_S, download.MOST_DELAY_S = 0.01, 0.05
    try:
        yield
    finally:
        download.FIRST_DELAY_S, download.MOST_DELAY_S = before


# Servers ------------------------------------------------------------------------------------------

GONE = ("cannot be read after 8 tries", "Connection refused", "check the server")


def gone_for_5_s(attack: Attack) -> str | None:
    attack.ranks = 0  # one process, which closes the server's socket that it inherits
    with serving(attack.data) as server:
        process = attack.slowly(server.url, most=2000, before=server.socket.close)
    time.sleep(5)
    with serving(attack.data, port=server.server_port):
        return attack.judge(end(process))


def gone_for_good(attack: Attack) -> str | None:
    attack.ranks = 0
    with quick():
        with serving(attack.data) as server:
            process = attack.slowly(server.url, most=2000, before=server.socket.close)
        problem = refused(end(process), 1, *GONE, r"shard\.\d+\.mds")
    with serving(attack.data, port=server.server_port):
        return problem or attack.judge(attack.run(server.url))


# Shards and indices -------------------------------------------------------------------------------


def _from(attack: Attack, code: int, *wanted: str) -> str | None:
    """Return a problem unless the run is refused from the folder and from a server."""
    with serving(attack.data) as server:
        url = attack.chance.choice([server.url, attack.data])
        return refused(attack.run(url), code, *wanted)


def changed_during(attack: Attack) -> str | None:
    with serving(attack.data) as server:
        url = attack.chance.choice([server.url, attack.data])
        process = attack.slowly(url, most=2000)
        for shard in attack.data.glob("*.mds"):
            attack.flip(shard)
        return refused(end(process), 1, r"shard\.\d+\.mds", "SHA-256", "trainer.shards check")


def damaged_index(attack: Attack) -> str | None:
    data = (attack.data / INDEX_NAME).read_bytes()
    for _ in range(200):
        changed = bytearray(data)
        changed[attack.chance.randrange(len(data))] ^= 1 << attack.chance.randrange(8)
        with suppress(ConfigError):
            if ShardIndex.from_bytes(bytes(changed), "").digest != _digest():
                return "a damaged index was read"
    attack.flip(attack.data / INDEX_NAME)
    return _from(attack, 2, INDEX_NAME, "is damaged|cannot be read|version", "trainer.shards index")


@functools.cache
def _digest() -> str:
    return str(ShardedDataset(_kept() / "data").digest)


def other_version(attack: Attack) -> str | None:
    data = (attack.data / INDEX_NAME).read_bytes()
    (attack.data / INDEX_NAME).write_bytes(data.replace(b'\\"format\\": 1', b'\\"format\\": 2'))
    return _from(attack, 2, "is an index of version 2, and 1 is read", "trainer.shards index")


def wrong_rows(attack: Attack) -> str | None:
    index = ShardIndex.from_bytes((attack.data / INDEX_NAME).read_bytes(), "")
    counts = index.rows.clone()
    counts[7] += attack.chance.choice((-1, 1))
    (attack.data / INDEX_NAME).write_bytes(replace(index, rows=counts).to_bytes())
    return _from(attack, 1, SHARD, "has 7 rows, and [68] in its index", "trainer.shards check")


def _rename(attack: Attack, name: str) -> None:
    """Give a shard another name, in the index too."""
    index = ShardIndex.from_bytes((attack.data / INDEX_NAME).read_bytes(), "")
    names = [index.name(shard) for shard in range(len(index))]
    names[7] = name
    digests = [bytes(each) for each in index.digests.tolist()]
    parts = (names, index.rows.tolist(), index.sizes.tolist(), digests)
    made = ShardIndex.of(index.format, index.settings, *parts)
    (attack.data / INDEX_NAME).write_bytes(made.to_bytes())


def odd_name(attack: Attack) -> str | None:
    name = attack.chance.choice(
        ["a b/ä 名?#%41&.mds", "x" * 240 + ".mds", "..a/..mds", "'\"\n.mds"]
    )
    (attack.data / name).parent.mkdir(exist_ok=True)
    (attack.data / SHARD).rename(attack.data / name)
    _rename(attack, name)
    with serving(attack.data) as server:
        process = attack.run(attack.chance.choice([server.url, attack.data]))
    if process.returncode:
        return process.stderr[-500:]
    record = (attack.place / "runs/on_shards/run/metrics.jsonl").read_text()
    losses = [json.loads(line).get("train/loss") for line in record.splitlines()]
    wanted = [line.get("train/loss") for line in _undisturbed(attack.ranks)["record"]]
    return None if [x for x in losses if x] == [x for x in wanted if x] else "other losses"


def hostile_name(attack: Attack) -> str | None:
    outside = attack.place / "outside.mds"
    shutil.copy(attack.data / SHARD, outside)
    names = ("../outside.mds", "a/../../outside.mds", str(outside), "..", "a\0b")
    _rename(attack, attack.chance.choice(names))
    before = {path for path in attack.place.rglob("*") if attack.cache not in path.parents}
    problem = _from(attack, 2, "outside of the folder", "trainer.shards index")
    new = {path for path in attack.place.rglob("*") if attack.cache not in path.parents} - before
    return problem or (f"{new} was written" if new - {attack.cache} else None)


def pickled_column(attack: Attack) -> str | None:
    index = json.loads((attack.data / OF_MDS).read_text())
    for shard in index["shards"]:
        shard["column_encodings"][0] = "pkl"
    (attack.data / OF_MDS).write_text(json.dumps(index))
    (attack.data / INDEX_NAME).unlink()
    return _from(attack, 2, "encoding 'pkl': may run code when it is read", "use bytes, str, int")


def compressed(attack: Attack) -> str | None:
    """Read shards as mosaicml-streaming's MDSWriter compresses them, from a failing server."""
    writer = pytest.importorskip("streaming").MDSWriter
    pytest.importorskip("zstandard")
    kind = attack.chance.choice(["gz", "gz:9", "zstd", "zstd:3"])
    shutil.rmtree(attack.data)
    options = {"compression": kind, "hashes": ["sha256"], "size_limit": 600}
    columns = {"0": "ndarray:float32:3,4", "1": "int"}
    data = rows()
    with writer(out=str(attack.data), columns=columns, **options) as written:
        for inputs, label in data:
            written.write({"0": inputs.numpy(), "1": int(label)})
    with serving(attack.data, 0.3, attack.chance.random()) as server, quick():
        url = attack.chance.choice([server.url, attack.data])
        found = ShardedDataset(url, cache=attack.cache)
        for index in range(NUM):
            inputs, label = found[index]
            if not (inputs.equal(data[index][0]) and label == data[index][1]):
                return f"example {index} differs"
    return None


# Caches -------------------------------------------------------------------------------------------


def read_only_cache(attack: Attack) -> str | None:
    with small_disk(attack.cache, 200), serving(attack.data) as server:
        subprocess.run(["mount", "-o", "remount,ro", str(attack.cache)], check=True)  # noqa: S607
        return refused(attack.run(server.url), 2, "Read-only file system", "give another folder")


def deleted_cache(attack: Attack) -> str | None:
    with serving(attack.data) as server:
        process = attack.slowly(server.url, most=attack.chance.choice((2000, 10**6)))
        while process.poll() is None:
            shutil.rmtree(attack.cache, ignore_errors=True)
            time.sleep(attack.chance.random() * 0.3)
        return attack.judge(end(process))


CASES: dict[str, tuple[str, Case]] = {
    "server_for_5_s": ("server gone for 5 s", gone_for_5_s),
    "server_for_good": ("server gone for good", gone_for_good),
    "shard_changing": ("shards changed during the run", changed_during),
    "index_damaged": ("index damaged", damaged_index),
    "index_version": ("index of another version", other_version),
    "index_rows": ("index with other numbers of rows", wrong_rows),
    "index_odd": ("shard with an odd name", odd_name),
    "index_hostile": ("index that names other folders", hostile_name),
    "shard_pickled": ("column with pickles", pickled_column),
    "shard_compressed": ("shards that mosaicml-streaming compressed", compressed),
    "cache_read_only": ("cache that cannot be written", read_only_cache),
    "cache_deleted": ("cache deleted during the run", deleted_cache),
}
LONG = ("server_for_5_s", "server_for_good")  # with --quick left out


def measure_case(title: str, case: Case, amount: int, seed: int) -> Row:
    """Run cases of one fault on data in shards."""
    row, chance = Row(title, amount), random_of(seed)
    for number in range(amount):
        with folder() as place:
            try:
                problem = case(Attack(place, chance))
            except pytest.skip.Exception as reason:
                row.skipped = str(reason)
                return row
            except Exception as error:  # of what the case did not expect
                problem = describe_with_place(error)
        row.note(f"case {number}", problem)
    return row


ROWS = {
    f"shards_{name}": (functools.partial(measure_case, *fault), 3, int(name not in LONG))
    for name, fault in CASES.items()
}
