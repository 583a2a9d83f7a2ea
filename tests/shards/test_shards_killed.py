"""Runs on shards of a server whose processes are killed: a resume on other ranks ends with the same
bits, and nothing is left behind."""

import fcntl
import json
import multiprocessing
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from harness import CONF, TORCHRUN, ended, launch, newest, ranks_of, wait_for
from harness.launch import children_of, descendants_of
from harness.shard_rows import NUM, Padded, rows
from harness.shard_server import serving
from harness.stored import check_same_bits, content_of
from harness.verbs import audit

from trainer import ShardedDataset
from trainer.shards import download
from trainer.shards.__main__ import write_shards

pytestmark = pytest.mark.slow
WORDS = (
    *("task=on_shards", f"--config-dir={CONF}", "run.name=run", "run.resume=auto"),
    *("checkpoint.every_steps=4", "checkpoint.every_epochs=null", "task.options.pause_s=0.05"),
)
CACHE_BYTES = 16_000_000  # of 41 MB
THREADS = 9  # of the process that fetches ahead
TINY = 1300  # bytes: two shards of 600
PROCESSES = 8
DOWNLOADS = 8  # at once, of each
RACE_S = 20.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """203 examples in 29 shards of 1.4 MB."""
    place = tmp_path_factory.mktemp("shards") / "data"
    assert len(write_shards(Padded(200_000), str(place), 1_500_000, 0)) == 29
    return place


class Runs:
    """Commands of one run, which share a run directory and a cache."""

    def __init__(self, place: Path, url: str):
        self.place = place
        self.cache = place / "cache"
        self._url = url

    def start(self, ranks: int, *words: str):
        launcher = (*TORCHRUN[:-1], f"--nproc_per_node={ranks}") if ranks > 1 else ()
        options = [f"task.options.url={self._url}", f"task.options.cache_bytes={CACHE_BYTES}"]
        more = (*WORDS, *options, *words)
        environment = {"LOCKSTEP_CACHE": str(self.cache)}
        return launch(self.place, *more, launcher=launcher, is_session=True, **environment)

    @property
    def directory(self) -> Path:
        return self.place / "runs/on_shards/run"

    def losses(self) -> dict[int, float]:
        """Return the loss of each step; fail if the record has one twice."""
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        losses = [(line["step"], line["train/loss"]) for line in found if "train/loss" in line]
        assert len(dict(losses)) == len(losses)
        return dict(losses)

    def wait_for_step(self, process, step: int) -> None:
        def is_there() -> bool:
            assert process.poll() is None, process.communicate()
            path = self.directory / "metrics.jsonl"
            return path.exists() and f'"step": {step},' in path.read_text()

        wait_for(is_there, 120)

    def parts(self) -> list[Path]:
        return [part for part in self.cache.rglob("*.part") if part.stat().st_size]

    def check(self, whole: "Runs") -> None:
        """Check that the run equals an undisturbed one, and that the cache is usable."""
        assert self.losses() == whole.losses()
        ours, theirs = (content_of(newest(runs.directory)) for runs in (self, whole))
        check_same_bits(ours["model"], theirs["model"])
        check_same_bits(ours["optimizer"], theirs["optimizer"])
        assert audit([str(self.directory)]) == 0
        for path in self.cache.rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shards = sum(path.stat().st_size for path in self.cache.rglob("*.mds"))
        assert shards <= CACHE_BYTES


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """The run that nothing disturbs, from the folder."""
    runs = Runs(tmp_path_factory.mktemp("whole"), str(folder))
    code, _, err = ended(runs.start(1))
    assert code == 0, err
    assert [*runs.losses()] == [*range(1, 31)]
    return runs


@pytest.fixture
def server(folder):
    with serving(folder, 0.1, faults=("slow", "503", "truncate")) as server:
        yield server


@pytest.fixture
def runs(server, tmp_path):
    return Runs(tmp_path, server.url)


def fetchers_of(pid: int) -> list[int]:
    return [
        each for each in children_of(pid) if len([*Path(f"/proc/{each}/task").iterdir()]) >= THREADS
    ]


def rank_0_of(process) -> int:
    return ranks_of(process).get(0, process.pid)


def users_of(cache: Path) -> list[int]:
    """Return the living processes of this run, by their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(cache) in (entry / "environ").read_text():
                found.append(int(entry.name))
        except (OSError, UnicodeDecodeError):
            continue
    return found


def resume(runs: Runs, whole: Runs, ranks: int) -> None:
    wait_for(lambda: not users_of(runs.cache), 30)
    code, _, err = ended(runs.start(ranks))
    assert code == 0, err
    runs.check(whole)
    wait_for(lambda: not users_of(runs.cache), 30)


def test_a_killed_fetcher_changes_nothing_and_does_not_stop_the_run(runs, whole):
    process = runs.start(2, "data.workers=1")
    runs.wait_for_step(process, 3)
    (fetcher,) = fetchers_of(rank_0_of(process))
    os.kill(fetcher, signal.SIGKILL)
    code, _, err = ended(process)
    assert (code, "error" in err) == (0, False), err
    runs.check(whole)
    assert not users_of(runs.cache)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_loses_nothing_on_other_ranks(rank, runs, whole):
    process = runs.start(2, "data.workers=1")
    runs.wait_for_step(process, 6)
    os.kill(ranks_of(process)[rank], signal.SIGKILL)
    code, _, err = ended(process)
    assert code == 1, err
    resume(runs, whole, 3)


def test_a_killed_data_worker_ends_the_run_in_one_line_and_loses_nothing(runs, whole):
    process = runs.start(1, "data.workers=2")
    runs.wait_for_step(process, 6)
    fetchers = fetchers_of(process.pid)
    worker = [pid for pid in children_of(process.pid) if pid not in fetchers][-1]
    os.kill(worker, signal.SIGKILL)
    code, _, err = ended(process)
    assert (code, len(err.splitlines())) == (1, 1), err
    assert "worker" in err and " does not respond: " in err  # where it was killed decides the rest
    resume(runs, whole, 2)


def test_ctrl_c_ends_the_run_and_loses_nothing(runs, whole):
    process = runs.start(2, "data.workers=1")
    runs.wait_for_step(process, 6)
    os.killpg(process.pid, signal.SIGINT)
    _, _, err = ended(process)
    assert "Traceback" not in err.partition("torch/distributed")[0]
    resume(runs, whole, 1)


@pytest.mark.parametrize("seed", range(4))
def test_everything_killed_at_a_random_moment_loses_nothing(seed, runs, whole, server):
    chance = random.Random(seed)
    server.faults = ("slow",)
    server.rate = 1.0
    server.slow_s = 1.0
    process = runs.start(1 + seed % 2, f"data.workers={seed // 2}")
    begun = time.monotonic()
    wait_for(lambda: runs.parts(), 120)
    time.sleep(chance.random() * (time.monotonic() - begun))
    for pid in (process.pid, *descendants_of(process.pid)):
        if pid in users_of(runs.cache):
            os.kill(pid, signal.SIGKILL)
    ended(process)
    server.rate = 0.0
    resume(runs, whole, 2 - seed % 2)


def test_the_rest_of_a_killed_download_is_fetched(runs, whole, server, folder):
    server.faults = ("slow",)
    server.rate = 1.0
    process = runs.start(1)
    wait_for(lambda: runs.parts(), 120)
    os.killpg(process.pid, signal.SIGKILL)
    ended(process)
    wait_for(lambda: not users_of(runs.cache), 30)
    parts = runs.parts()
    shard = int(parts[0].name.partition("-")[0])
    name = f"shard.{shard:05d}.mds"
    rest = (folder / name).stat().st_size - parts[0].stat().st_size
    assert 0 < rest < 500_000
    server.rate = 0.0
    wait_for(lambda: not server.answering, 30)
    server.sent.clear()
    data = ShardedDataset(server.url, cache=runs.cache, cache_bytes=CACHE_BYTES, lanes=4, window=2)
    data.cache.fetch(shard)
    assert server.sent[name] == rest
    assert data.cache.path(shard).read_bytes() == (folder / name).read_bytes()


def read_without_end(url: str, cache: Path, seed: int) -> None:
    """Read random batches, and exit with 1 at the first wrong example."""
    download.FIRST_DELAY_S = 0.01
    data = ShardedDataset(url, cache=cache, cache_bytes=TINY)
    expected = rows()
    chance = random.Random(seed)
    while True:
        wanted = [chance.randrange(NUM) for _ in range(chance.choice((1, 5, 20)))]
        for index, (inputs, label) in zip(wanted, data.__getitems__(wanted), strict=True):
            if not (inputs.equal(expected[index][0]) and label == expected[index][1]):
                os._exit(1)


def test_processes_that_race_for_a_tiny_cache_read_no_wrong_example(tmp_path):
    """Eight processes are killed and started again; none waits for a dead one."""
    write_shards(rows(), str(tmp_path / "data"), 600, 0)
    cache = tmp_path / "cache"
    chance = random.Random(0)
    fork = multiprocessing.get_context("fork")
    running = []
    highest = 0
    with serving(tmp_path / "data", 0.1, faults=("truncate", "503", "delay")) as server:
        end = time.monotonic() + RACE_S
        while time.monotonic() < end:
            while len(running) < PROCESSES:
                arguments = (server.url, cache, chance.randrange(10**6))
                running.append(fork.Process(target=read_without_end, args=arguments))
                running[-1].start()
            time.sleep(chance.random() * 0.2)
            highest = max(highest, bytes_of_shards(cache))
            victim = running.pop(chance.randrange(PROCESSES))
            assert victim.is_alive(), victim.exitcode
            victim.kill()
            victim.join()
        sent = sum(server.sent.values())
        wait_for(lambda: sum(server.sent.values()) > sent, 20)
        for process in running:
            assert process.is_alive(), process.exitcode
            process.kill()
            process.join()
        data = ShardedDataset(server.url, cache=cache, cache_bytes=TINY)
        server.rate = 0.0
        assert len([data[index] for index in range(NUM)]) == NUM
    assert highest <= TINY + PROCESSES * DOWNLOADS * 600
    assert bytes_of_shards(cache) <= TINY


def bytes_of_shards(cache: Path) -> int:
    found = 0
    for path in cache.rglob("*.mds"):
        with suppress(FileNotFoundError):
            found += path.stat().st_size
    return found
