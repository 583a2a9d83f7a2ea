"""Data in shards: the same run from a folder or a server, with any cache, ranks and workers."""

import errno
import os
import re
import shutil
import threading

import numpy
import pytest
import torch
import torch.nn.functional as F
from harness import fit_on, on_ranks, slow_but
from harness.shard_server import serving
from harness.verbs import audit
from torch import nn
from torch.utils.data import TensorDataset

from trainer import ConfigError, RunError, ShardedDataset, Trainer
from trainer.check.planning import measure_fetching
from trainer.check.rank_checks import check_shards
from trainer.core.data.sampling.shard_order import ShardShuffle
from trainer.shards import cache, download
from trainer.shards.__main__ import main as shards
from trainer.shards.__main__ import write_shards

NUM = 203
WORDS = [
    *("task=tiny", "run.steps=30", "strategy=exact", "data.global_batch=20", "data.micro_batch=5"),
    *("log.every_steps=1", "eval.every_epochs=null"),
]


def rows(count=NUM):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 3, 4, generator=generator)
    return TensorDataset(inputs, inputs.flatten(1)[:, :5].argmax(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """203 examples in 29 shards."""
    place = tmp_path_factory.mktemp("shards") / "data"
    index = write_shards(rows(), str(place), 600, 0)
    assert len(index) == 29
    return place


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(download, "FIRST_DELAY_S", 0.01)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))


def task_on(url, **options):
    """Return a task whose training data are the shards at `url`."""

    class OnShards(Trainer):
        def build_model(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Dropout(0.1), nn.Linear(8, 5))

        def build_dataset(self, split):
            if split != "train":
                return None
            return ShardedDataset(url, **{"lanes": 4, "window": 2, **options})

        def loss(self, outputs, targets):
            return F.cross_entropy(outputs, targets, reduction="none")

    return OnShards


def same(one, other):
    assert one["seen"] == other["seen"]
    assert one["losses"] == other["losses"]
    assert all(torch.equal(one["weights"][name], w) for name, w in other["weights"].items())


@pytest.fixture(scope="module")
def local(folder, tmp_path_factory):
    """The run on one rank from the folder."""
    return fit_on(1, tmp_path_factory.mktemp("local"), *WORDS, task=task_on(str(folder)))


# The order ----------------------------------------------------------------------------------------

CASES = [(10, 7, 16, 4), (50, 32, 16, 2), (100, 20, 3, 1), (7, 64, 16, 4), (1, 5, 4, 4)]


def sampled(num_shards, lanes, window):
    generator = torch.Generator().manual_seed(num_shards)
    counts = torch.randint(0, 40, (num_shards,), generator=generator) + 10 * (num_shards == 1)
    return ShardShuffle(counts, lanes, window)


@pytest.mark.parametrize(("num_shards", "batch", "lanes", "window"), CASES)
def test_an_epoch_takes_each_example_once_and_the_order_has_an_inverse(
    num_shards, batch, lanes, window
):
    sampling = sampled(num_shards, lanes, window)
    positions = torch.arange(sampling.size)
    orders = [sampling.order(5, epoch, batch) for epoch in range(3)]
    for order in orders:
        indices = order(positions)
        assert indices.sort().values.equal(positions)
        assert order.invert(indices).equal(positions)
        assert order(positions[3:9]).equal(indices[3:9])
    if num_shards > 1:
        assert not orders[0](positions).equal(orders[1](positions))


@pytest.mark.parametrize(("num_shards", "batch", "lanes", "window"), CASES)
@pytest.mark.parametrize("ranks", slow_but([1, 2, 3], 3))
def test_the_shards_that_a_rank_needs_are_known_for_each_step(
    num_shards, batch, lanes, window, ranks
):
    sampling = sampled(num_shards, lanes, window)
    order = sampling.order(5, 1, batch)
    steps = sampling.size // batch
    for rank in range(ranks):
        own = (rank * batch // ranks, (rank + 1) * batch // ranks)
        for first in (0, steps // 2):
            needs = list(order.needs(own, first))
            assert [need.step for need in needs] == sorted(need.step for need in needs)
            for step in range(first, steps, max(1, steps // 20)):
                indices = order(torch.arange(step * batch + own[0], step * batch + own[1]))
                taken = torch.searchsorted(sampling.first, indices, right=True) - 1
                known = {s for n in needs if n.step <= step < n.end for s in n.shards}
                assert set(taken.tolist()) <= known
                for shard in taken.tolist():
                    assert any(a <= step < b for a, b in order.uses(shard, own))


def test_ranks_that_divide_the_lanes_read_shards_of_their_own():
    sampling = ShardShuffle([10] * 64, lanes=4, window=2)
    order = sampling.order(0, 0, 32)
    of_rank = [
        {shard for need in order.needs((rank * 8, rank * 8 + 8)) for shard in need.shards}
        for rank in range(4)
    ]
    assert all(len(own) <= 17 for own in of_rank)  # a quarter, and one at the border
    assert len(set.union(*of_rank)) == 64


def test_a_million_shards_of_a_million_examples_take_little_memory_and_time():
    sampling = ShardShuffle(torch.full((10**6,), 10**6))
    order = sampling.order(0, 3, 1024)
    positions = torch.arange(1024) + 123_456_789_012
    assert order.invert(order(positions)).equal(positions)
    assert next(order.needs((0, 1024), 10**8)).step <= 10**8


# The same run -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "workers", "rate", "cache_bytes"),
    slow_but(
        [
            (r, w, f, b)
            for r in (1, 2, 3, 4)
            for w in (0, 1, 4)
            for f in (0, 0.2)
            for b in (2000, 1e6)
        ],
        (3, 1, 0.2, 2000),
    ),
)
def test_run_is_the_same_to_the_bit_on_any_ranks_workers_network_and_cache(
    ranks, workers, rate, cache_bytes, folder, local, tmp_path
):
    with serving(folder, rate, seed=ranks + workers) as server:
        task = task_on(server.url, cache_bytes=int(cache_bytes))
        found = fit_on(ranks, tmp_path, *WORDS, f"data.workers={workers}", task=task)
    same(found, local)
    assert audit([str(found["directory"])]) == 0


def test_a_node_downloads_each_shard_once_and_a_warm_cache_none(folder, local, tmp_path):
    with serving(folder) as server:
        words = [*WORDS, "data.workers=2"]
        same(fit_on(2, tmp_path / "cold", *words, task=task_on(server.url)), local)
        sizes = {path.name: path.stat().st_size for path in folder.glob("*.mds")}
        sent = {name: size for name, size in server.sent.items() if name.endswith(".mds")}
        assert sent == sizes
        server.sent.clear()
        same(fit_on(2, tmp_path / "warm", *words, task=task_on(server.url)), local)
        assert not any(name.endswith(".mds") for name in server.sent)


def test_run_resumed_on_other_ranks_in_the_middle_of_an_epoch_repeats_nothing(
    folder, local, tmp_path
):
    with serving(folder, 0.1) as server:
        task = task_on(server.url)
        fit_on(3, tmp_path, *WORDS, "run.steps=7", task=task)
        shutil.rmtree(tmp_path / "cache")
        fit_on(1, tmp_path, *WORDS, "run.steps=17", "run.resume=auto", task=task)
        found = fit_on(2, tmp_path, *WORDS, "run.resume=auto", "data.workers=1", task=task)
    assert {s: v for s, v in local["losses"].items() if s > 17} == {
        s: v for s, v in found["losses"].items() if s > 17
    }
    assert audit([str(found["directory"])]) == 0


def test_a_sampling_may_be_sent_to_a_spawned_process(folder):
    dataset = ShardedDataset(folder)
    dataset.sampling.first.share_memory_()  # as torch does with all tensors that are sent
    others = [torch.full_like(dataset.sampling.first, -1) for _ in range(1000)]
    assert [int(dataset[index][1]) for index in range(NUM)] == rows().tensors[1].tolist()
    del others


# Failures -----------------------------------------------------------------------------------------


def flip(path, place=-20):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("is_served", [False, True])
def test_a_shard_that_was_changed_is_named_and_ends_the_run(folder, tmp_path, is_served):
    data = tmp_path / "data"
    shutil.copytree(folder, data)
    flip(data / "shard.00007.mds")
    with (
        serving(data) as server,
        pytest.raises(AssertionError, match=r"shard\.00007\.mds.*SHA-256"),
    ):
        fit_on(1, tmp_path, *WORDS, task=task_on(server.url if is_served else str(data)))


def test_a_server_that_is_gone_is_named_after_some_tries(folder, monkeypatch):
    with serving(folder) as server:
        dataset = ShardedDataset(server.url)
    monkeypatch.setattr(download, "MOST_DELAY_S", 0.01)
    with pytest.raises(RunError, match=r"cannot be read after 8 tries.*Connection refused"):
        dataset[0]


def test_a_shard_that_is_missing_is_named_at_once(folder, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(folder, data)
    (data / "shard.00003.mds").unlink()
    with serving(data) as server, pytest.raises(RunError, match=r"00003.*HTTP 404"):
        [ShardedDataset(server.url)[index] for index in range(NUM)]
    with pytest.raises(RunError, match=r"00003.*No such file"):
        [ShardedDataset(data)[index] for index in range(NUM)]


def test_a_full_disk_is_named_and_a_download_goes_on_where_it_was(folder, tmp_path):
    cache = tmp_path / "small"
    cache.mkdir()
    if os.system(f"mount -t tmpfs -o size=200k,mode=700 tmpfs {cache} 2>/dev/null"):
        pytest.skip("needs the right to mount a file system")
    try:
        (cache / "filler").write_bytes(b"x" * 190_000)
        with serving(folder) as server:
            dataset = ShardedDataset(server.url, cache=cache)
            with pytest.raises(RunError, match=r"No space left on device; make room"):
                [dataset[index] for index in range(NUM)]
            (cache / "filler").unlink()
            assert len([dataset[index] for index in range(NUM)]) == NUM
    finally:
        dataset = None
        os.system(f"umount -l {cache}")


def test_a_cache_keeps_within_its_bytes(folder, tmp_path):
    with serving(folder) as server:
        dataset = ShardedDataset(server.url, cache_bytes=3000)
        for index in range(NUM):
            assert dataset[index][1] == rows()[index][1]
            kept = sum(path.stat().st_size for path in dataset.cache.folder.glob("*.mds"))
            assert kept <= 3000
        with pytest.raises(ConfigError, match="must hold the largest shard"):
            ShardedDataset(server.url, cache_bytes=100)


def test_a_damaged_or_deleted_file_of_the_cache_is_downloaded_again(folder):
    with serving(folder) as server:
        first = ShardedDataset(server.url)[0]
        cached = ShardedDataset(server.url).cache.path(0)
        flip(cached)
        server.sent.clear()
        assert ShardedDataset(server.url)[0][0].equal(first[0])
        assert server.sent["shard.00000.mds"]
        dataset = ShardedDataset(server.url)
        shutil.rmtree(cached.parent)
        assert dataset[0][0].equal(first[0])


def test_a_file_of_the_cache_that_a_power_cut_has_emptied_is_downloaded_again(folder):
    with serving(folder) as server:
        first = ShardedDataset(server.url)[0]
        path = ShardedDataset(server.url).cache.path(0)
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        os.truncate(path, 0)
        os.utime(path, ns=times)
        assert ShardedDataset(server.url)[0][0].equal(first[0])


def test_a_download_into_a_cache_that_holds_all_does_not_look_at_all_files(folder, monkeypatch):
    with serving(folder) as server:
        [*map(ShardedDataset(server.url, cache_bytes=10**6).__getitem__, range(100))]
        monkeypatch.setattr(os, "scandir", None)
        [*map(ShardedDataset(server.url, cache_bytes=10**6).__getitem__, range(NUM))]


def test_a_folder_of_the_cache_may_be_relative_or_begin_with_a_tilde(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with serving(folder) as server:
        datasets = [ShardedDataset(server.url, cache=each) for each in ("~/one", "two")]
        monkeypatch.chdir("/")
        [dataset[0] for dataset in datasets]
    assert len([*tmp_path.glob("one/*/*.mds")]) == len([*tmp_path.glob("two/*/*.mds")]) == 1


@pytest.mark.parametrize("has_ranges", [True, False])
def test_the_rest_of_an_interrupted_download_is_used(folder, has_ranges):
    with serving(folder, has_ranges=has_ranges) as server:
        dataset = ShardedDataset(server.url)
        path = dataset.cache.path(0)
        whole = (folder / "shard.00000.mds").read_bytes()
        path.with_name(path.name + ".part").write_bytes(whole[:400])
        dataset[0]
        assert path.read_bytes() == whole
        if has_ranges:
            assert server.sent["shard.00000.mds"] == len(whole) - 400
        assert [*path.parent.glob("*.part")] == []


def test_many_threads_download_a_shard_once(folder):
    with serving(folder) as server:
        datasets = [ShardedDataset(server.url) for _ in range(8)]
        threads = [threading.Thread(target=each.__getitem__, args=(0,)) for each in datasets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert server.sent["shard.00000.mds"] == (folder / "shard.00000.mds").stat().st_size


def test_a_damaged_shard_is_left_out_with_on_error_skip(folder, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(folder, data)
    flip(data / "shard.00007.mds")
    task = task_on(str(data))
    found = fit_on(2, tmp_path, *WORDS, "run.steps=10", "data.on_error=skip", task=task)
    bad = range(*ShardedDataset(data).sampling.first[7:9].tolist())
    assert not set(bad) & {index for step in found["seen"] for index in step}
    assert audit([str(found["directory"])]) == 0


def test_a_damaged_shard_that_is_left_out_is_downloaded_twice_by_a_process(folder, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(folder, data)
    flip(data / "shard.00007.mds")
    with serving(data) as server:
        dataset = ShardedDataset(server.url)
        for index in range(*dataset.sampling.first[7:9].tolist()):
            with pytest.raises(RunError, match="SHA-256"):
                dataset[index]
        assert server.sent["shard.00007.mds"] == 2 * (data / "shard.00007.mds").stat().st_size


def test_a_full_disk_is_no_reason_to_leave_examples_out(folder, tmp_path, monkeypatch):
    def fail(source, name, *rest):
        if name == "shard.00007.mds":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        download.download(source, name, *rest)

    with serving(folder) as server:
        monkeypatch.setattr(cache, "download", fail)
        with pytest.raises(AssertionError, match="No space left on device; make room"):
            fit_on(1, tmp_path, *WORDS, "data.on_error=skip", task=task_on(server.url))


@pytest.mark.slow
def test_two_runs_share_a_cache(folder, local, tmp_path):
    with serving(folder) as server:
        task = task_on(server.url, cache_bytes=3000)

        def body():
            rank = int(os.environ.pop("RANK"))
            for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
                os.environ.pop(name, None)
            from harness.training import fit

            return fit(tmp_path / str(rank), *WORDS, task=task)

        for found in on_ranks(2, body):
            assert found["losses"] == local["losses"]


@pytest.mark.parametrize("chosen", [slice(5, 5), slice(29, None), 3])
def test_a_part_without_shards_is_refused(chosen, folder):
    with pytest.raises(ConfigError, match=r"shards=.*must be a slice with some of the 29 shards"):
        ShardedDataset(folder, shards=chosen)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"cache_bytes": "5 GBs"}, "cache_bytes='5 GBs': must be a number of bytes above 0"),
        ({"cache_bytes": -1}, "cache_bytes=-1: must be a number"),
        ({"cache_bytes": None}, "cache_bytes=None: must be a number"),
        ({"cache_bytes": float("inf")}, "cache_bytes=inf: must be a number"),
        ({"ahead_bytes": True}, "ahead_bytes=True: must be a number"),
        ({"lanes": "4"}, "lanes='4': must be an integer of at least 1"),
        ({"window": 2.5}, "window=2.5: must be an integer"),
        ({"decode": 5}, "decode=5: must be a function of an example"),
        ({"index": 5}, "index=5: must be a folder or an address"),
        ({"cache": ["a"]}, "cache=.'a'.: must be a folder"),
        ({"url": None}, "url=None: must be a folder or an address"),
        ({"url": ""}, "url='': must be a folder"),
    ],
)
def test_an_argument_that_cannot_be_is_named(arguments, why, folder):
    with pytest.raises(ConfigError, match=why):
        ShardedDataset(**{"url": folder, **arguments})


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19), ("7000", 7000), (1e9, 10**9), (10**9, 10**9)],
)
def test_bytes_may_be_given_in_words(given, num_bytes, folder):
    assert ShardedDataset(folder, cache_bytes=given).cache.most_bytes == num_bytes


def test_a_part_may_be_backwards(folder):
    found, whole = ShardedDataset(folder, shards=slice(None, None, -2)), ShardedDataset(folder)
    assert len(found.index) == 15
    assert found[0][0].equal(whole[int(whole.sampling.first[28])][0])


def test_a_run_on_other_data_is_not_resumed(folder, tmp_path):
    data = tmp_path / "other"
    write_shards(rows(NUM + 1), str(data), 600, 0)
    fit_on(1, tmp_path, *WORDS, "run.steps=5", task=task_on(str(folder)))
    with pytest.raises(AssertionError, match="the train data has length 204"):
        fit_on(1, tmp_path, *WORDS, "run.resume=auto", task=task_on(str(data)))
    with pytest.raises(AssertionError, match="the train data has sampling"):
        fit_on(1, tmp_path, *WORDS, "run.resume=auto", task=task_on(str(folder), lanes=3))


# Formats ------------------------------------------------------------------------------------------


class Mixed(torch.utils.data.Dataset):
    """Examples with each kind of value that has a column type."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return {
            "image": torch.full((2, index + 1), index, dtype=torch.uint8),
            "label": index,
            "text": "ä" * index,
            "raw": bytes([index]),
            "score": index / 7,
            "half": torch.tensor(index, dtype=torch.float16),
            "array": numpy.arange(3) + index,
        }


def test_examples_of_a_data_set_come_back_as_they_were(tmp_path):
    write_shards(Mixed(), str(tmp_path / "data"), 300, 0)
    found = ShardedDataset(tmp_path / "data")
    assert len(found) == 30
    for index in range(30):
        example, wanted = found[index], Mixed()[index]
        assert {*example} == {*wanted}
        assert all(numpy.array_equal(example[name], wanted[name]) for name in wanted)
    batch = torch.utils.data.default_collate([found[3], found[3]])
    plain = torch.utils.data.default_collate([Mixed()[3], Mixed()[3]])
    assert {k: getattr(v, "dtype", 0) for k, v in batch.items()} == {
        k: getattr(v, "dtype", 0) for k, v in plain.items()
    }


@pytest.mark.parametrize(
    ("examples", "why"),
    [
        ([(1,), (2**63,)], "example 1 cannot be written: .*; return tensors"),
        ([(1,), (2.5,)], "example 1 cannot be written: .*integer"),
        ([(numpy.int64(1),), (2.5,)], "a value of type float64, and of int64 in other examples"),
        ([(numpy.uint8(1),), (300,)], "example 1 cannot be written: .*300"),
        ([(b"a",), (5,)], "a value of type int, and of bytes in other examples"),
        ([("a",), (b"b",)], "example 1 cannot be written"),
        ([(torch.ones(3),), (torch.ones(()),)], "a value of type float32, and of ndarray:float32"),
        ([(1,), (1, 2)], r"it has columns \['0', '1'\], and others \['0'\]"),
        ([(torch.ones(3, requires_grad=True),)], "example 0 cannot be written: .*requires grad"),
    ],
)
def test_an_example_that_would_be_read_as_another_one_is_not_written(examples, why, tmp_path):
    with pytest.raises(ConfigError, match=why):
        write_shards(examples, str(tmp_path / "data"), 600, 0)


def test_numbers_of_python_numpy_and_torch_may_take_turns(tmp_path):
    examples = [(1,), (numpy.int64(2),), (torch.tensor(3),), (numpy.uint8(4),)]
    write_shards(examples, str(tmp_path / "data"), 600, 0)
    assert [*map(ShardedDataset(tmp_path / "data").__getitem__, range(4))] == [
        (1,),
        (2,),
        (3,),
        (4,),
    ]


def test_shards_of_others_are_indexed_and_read(tmp_path, capsys):
    import io
    import tarfile

    import pyarrow
    import pyarrow.parquet
    from safetensors.torch import save_file

    data = rows(10)
    for name in ("tar", "parquet", "safetensors", "bin"):
        (tmp_path / name).mkdir()
    for number in range(2):
        part = range(number * 5, number * 5 + 5)
        with tarfile.open(tmp_path / "tar" / f"{number}.tar", "w") as archive:
            for index in part:
                for ending, content in (("cls", str(int(data[index][1]))), ("txt", f"t{index}")):
                    info = tarfile.TarInfo(f"a/{index:03d}.{ending}")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content.encode()))
        table = pyarrow.table({"n": list(part), "text": [f"t{i}" for i in part]})
        pyarrow.parquet.write_table(
            table, tmp_path / "parquet" / f"{number}.parquet", row_group_size=2
        )
        inputs, labels = data[part.start : part.stop]
        save_file({"0": inputs, "1": labels}, tmp_path / "safetensors" / f"{number}.safetensors")
        numpy.arange(33, dtype="u2").tofile(tmp_path / "bin" / f"{number}.bin")
    more = {"bin": ["tokens=8"]}
    found = {}
    for name in ("tar", "parquet", "safetensors", "bin"):
        url = str(tmp_path / name)
        assert shards(["index", url, *more.get(name, [])]) == 0
        assert shards(["check", url]) == 0
        found[name] = ShardedDataset(url)
    assert [len(each) for each in found.values()] == [10, 10, 10, 8]
    (tmp_path / "tar" / "lockstep.index").unlink()
    assert shards(["index", str(tmp_path / "tar"), f"to={tmp_path}/elsewhere"]) == 0
    found["tar"] = ShardedDataset(tmp_path / "tar", index=tmp_path / "elsewhere")
    assert found["tar"][7] == {"__key__": "a/007", "cls": int(data[7][1]), "txt": "t7"}
    assert found["parquet"][7] == {"n": 7, "text": "t7"}
    assert found["safetensors"][7][0].equal(data[7][0])
    inputs, targets = found["bin"][5]
    assert inputs.tolist() == [*range(8, 16)] and targets.tolist() == [*range(9, 17)]
    flip(tmp_path / "parquet" / "1.parquet", 20)
    capsys.readouterr()
    assert shards(["check", str(tmp_path / "parquet")]) == 1
    assert "1.parquet: has SHA-256" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["index", "{tmp}/none"], "must be a folder with shards"),
        (["index", "{tmp}"], "has no shards; must have files of one of"),
        (["check", "{tmp}"], "has no lockstep.index"),
        (["write", "task=tiny"], "to is missing"),
        (["write", "task=tiny", "to={tmp}/new", "shard_mb=0"], "shard_mb=0: must be an integer"),
        (["write", "task=tiny", "to={tmp}/new", "shard_mb=4096"], "must be less than 4096"),
        (["frob"], "must be write, index or check"),
        (["index", "s4://bucket"], "s4"),
        (["index", "http://localhost:1"], "cannot list its files"),
    ],
)
def test_mistakes_are_named(words, why, tmp_path):
    with pytest.raises(ConfigError, match=why):
        shards([word.format(tmp=tmp_path) for word in words])


# Before a run -------------------------------------------------------------------------------------


def test_plan_says_what_a_node_reads_and_holds(folder):
    dataset = ShardedDataset(folder, lanes=4, window=2)
    total = sum(path.stat().st_size for path in folder.glob("*.mds"))
    alone = measure_fetching(dataset, 20, 1)
    assert alone.total_bytes == alone.epoch_bytes == total
    two = measure_fetching(dataset, 20, 2)
    assert total / 2 < two.epoch_bytes < total * 0.65
    assert two.held_bytes < alone.held_bytes < total
    assert measure_fetching(rows(), 20, 2) is None


def test_doctor_times_the_index_and_the_first_shard(folder, tmp_path):
    with serving(folder) as server:
        check = check_shards(server.url)
    assert check.result == "ok"
    assert re.search(
        r"203 examples in 29 shards; the index took .* s, the first shard", check.found
    )
    check = check_shards(str(tmp_path / "none"))
    assert check.result == "fail" and "must be a folder with shards" in check.found


def test_the_start_says_where_shards_come_from_and_how_far_ahead(folder):
    assert ShardedDataset(folder).source.startswith(f"{folder}, 29 mds shards, ")
    with serving(folder) as server:
        source = ShardedDataset(server.url, cache_bytes=10**9).source
    assert re.search(r"up to 500.0 MB fetched ahead into .* \(1.0 GB\)", source)
