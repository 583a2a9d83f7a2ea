"""Large files get to a bucket over a slow line, and from there, however long it takes.

No test saw it before: the store of each test was on the same machine, and its files were small.
"""

import os
import time
from pathlib import Path

import obstore
import pytest
from harness import fit_on, on_ranks
from harness.s3 import proxied
from harness.throttle import DOWN, UP, slow_line

from trainer.core.checkpoints.transaction import CheckpointFiles
from trainer.core.config.copies import copy_of
from trainer.core.config.stores import Held, StoreError
from trainer.places import bucket
from trainer.places.bucket import PACES, Bucket, Pace

MIB = 2**20
RECIPE = [
    *("task=tiny", "run.steps=6", "checkpoint.every_steps=2", "checkpoint.every_epochs=null"),
    *("checkpoint.keep_best=0", "eval.every_epochs=null", "strategy.precision=fp32"),
]
QUICK = (Pace(8 * MIB, 1, 1.5), Pace(5 * MIB, 1, 10.0))


@pytest.fixture
def line(s3, monkeypatch):
    with slow_line(s3.environment["AWS_ENDPOINT_URL"]) as line:
        for name, value in (s3.environment | {"AWS_ENDPOINT_URL": line.url}).items():
            monkeypatch.setenv(name, value)
        yield line


@pytest.fixture
def sent(monkeypatch):
    """The parts and the parallel requests of each large file that is sent."""
    paces = []
    put = obstore.put

    def noted(*arguments, **options):
        if "chunk_size" in options:
            paces.append((options["chunk_size"] // MIB, options["max_concurrency"]))
        return put(*arguments, **options)

    monkeypatch.setattr(obstore, "put", noted)
    return paces


def test_file_that_is_too_slow_is_sent_in_smaller_parts_until_the_line_is_fast_again(
    line, sent, tmp_path, monkeypatch
):
    monkeypatch.setattr(bucket, "PACES", QUICK)
    content = os.urandom(6 * MIB)
    (tmp_path / "file").write_bytes(content)

    def body():
        own = Bucket("s3://data/slow")
        line.rates[UP] = 3e6
        own.put("one", tmp_path / "file")
        line.rates[UP] = 1e9
        own.put("two", content)
        own.put("three", content)
        return [own.get(name) == content for name in ("one", "two", "three")], sent

    (found,) = on_ranks(1, body)
    assert found == ([True, True, True], [(8, 1), (5, 1), (5, 1), (8, 1)])


def test_file_that_even_the_slowest_pace_cannot_send_is_an_error(line, sent, monkeypatch):
    monkeypatch.setattr(bucket, "PACES", (QUICK[0], Pace(5 * MIB, 1, 0.5)))

    def body():
        own = Bucket("s3://data/slow")
        line.rates[UP] = 1e6
        with pytest.raises(StoreError, match=r"s3://data/slow/one: .*error sending request"):
            own.put("one", os.urandom(6 * MIB))
        return sent

    assert on_ranks(1, body) == [[(8, 1), (5, 1)]]


def test_store_that_refuses_is_not_taken_for_a_slow_line(sent, monkeypatch, s3):
    monkeypatch.setattr(bucket, "PACES", (Pace(8 * MIB, 4, 0.5), QUICK[1]))
    with proxied(s3.environment["AWS_ENDPOINT_URL"]) as proxy:
        for name, value in (s3.environment | {"AWS_ENDPOINT_URL": proxy.url}).items():
            monkeypatch.setenv(name, value)
        proxy.begin(lambda number, method, path: "503" if method == "PUT" else "")

        def body():
            begun = time.monotonic()
            with pytest.raises(StoreError, match="503"):
                Bucket("s3://data/refused").put("one", os.urandom(MIB))
            return sent, time.monotonic() - begun >= 0.5

        assert on_ranks(1, body) == [([(8, 4)], True)]


def test_piece_that_is_too_slow_is_read_again_with_more_time(line, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket, "REQUEST_S", 0.7)
    content = os.urandom(2 * MIB)

    def body():
        Bucket("s3://data/down").put("one", content)
        line.rates[DOWN] = 2e6
        own = Bucket("s3://data/down")
        size, _ = own.download("one", tmp_path / "copy", 10**9)
        return size == len(content) and (tmp_path / "copy").read_bytes() == content

    assert on_ranks(1, body) == [True]


def test_long_record_of_a_run_is_read_over_a_slow_line(line, tmp_path, monkeypatch):
    """It was read in one request of 30 s, so a restart on a slow line was refused."""
    monkeypatch.setattr(bucket, "REQUEST_S", 0.7)
    content = os.urandom(2 * MIB)
    record = {"000001/config.json": b"a: 1", "000001/metrics.jsonl": content}

    def body():
        own = Bucket("s3://data/record")
        for name, data in record.items():
            own.put(name, data)
        line.rates[DOWN] = 2e6
        sizes = {name: len(data) for name, data in record.items()}
        held = Held({}, {Path(name).name: (name, size) for name, size in sizes.items()}, {})
        copy = copy_of(own.address, tmp_path, held=held)
        return {f"000001/{path.name}": path.read_bytes() for path in copy.iterdir()} == record

    assert on_ranks(1, body) == [True]


def test_pieces_of_a_file_follow_the_line(line, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket, "REQUEST_S", 0.7)
    content = os.urandom(6 * MIB)
    lengths = []
    get_range = obstore.get_range

    def noted(store, name, *, start, length):
        lengths.append(length)
        return get_range(store, name, start=start, length=length)

    monkeypatch.setattr(obstore, "get_range", noted)

    def body():
        own = Bucket("s3://data/pieces")
        own.put("one", content)
        for rate in (1e9, 2e6):
            line.rates[DOWN] = rate
            own.download("one", tmp_path / "copy", 10**9)
            assert (tmp_path / "copy").read_bytes() == content
        return lengths

    (found,) = on_ranks(1, body)
    quarter = MIB // 4
    assert found[:5] == [quarter, 2 * quarter, 4 * quarter, 8 * quarter, 9 * quarter]
    assert found[5] == 16 * quarter  # for which 0.7 s are too few
    assert found[6] == 2 * quarter and max(found[6:]) < found[5]


def test_pace_is_fast_enough_if_a_line_sends_its_parts_in_half_of_the_limit():
    pace = Pace(10, 2, 4.0)
    assert not pace.is_fast_enough(10.0) and pace.is_fast_enough(10.1)


@pytest.mark.parametrize("size", [10**5, 10_000 * 16 * MIB, 10_000 * 16 * MIB + 1, 5 * 2**40])
@pytest.mark.parametrize("pace", PACES)
def test_no_file_has_more_parts_than_a_store_takes(size, pace):
    """S3 takes 10,000 parts of at least 5 MiB; 16 MiB each end at 156 GiB."""
    own = pace.for_size(size)
    assert own.part >= pace.part >= 5 * MIB
    assert size <= 10_000 * own.part and own.part * own.parallel <= 3 * 2**30
    assert own.limit_s / own.part == pytest.approx(pace.limit_s / pace.part)
    assert (own == pace) is (size <= 10_000 * pace.part)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [5e5, 1e5])
def test_file_that_takes_longer_than_a_request_gets_there(rate, line):
    content = os.urandom(2**24 if rate == 5e5 else 2**23)

    def body():
        own = Bucket(f"s3://data/{rate:g}")
        line.rates[UP] = rate
        own.put("one", content)
        return own.get("one") == content

    assert on_ranks(1, body) == [True]


def test_ranks_wait_for_one_that_fetches_for_longer_than_a_collective_may(tmp_path, monkeypatch):
    """Ranks fetch what they verify, and the one with less to do gave up after dist.timeout_s."""
    words = [*RECIPE, f"checkpoint.mirror=file://{tmp_path}/bucket/first"]
    fit_on(2, tmp_path / "one", *words, "run.steps=4")
    verify = CheckpointFiles.verify

    def verify_slowly(files, names):
        if os.environ["RANK"] == "0":
            time.sleep(3)
        verify(files, names)

    monkeypatch.setattr(CheckpointFiles, "verify", verify_slowly)
    resumed = fit_on(2, tmp_path / "two", *words, "dist.timeout_s=2", "run.resume=auto")
    assert len(resumed["seen"]) == 2
