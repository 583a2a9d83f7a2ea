"""Large files of Parquet, tar and tokens, whose parts are shards of their own."""

import io
import os
import shutil
import tarfile

import numpy
import pytest
import torch
import torch.nn.functional as F
from harness import fit_on
from harness.shard_server import serving
from harness.verbs import audit
from safetensors.torch import save_file
from torch import nn

from trainer import RunError, ShardedDataset, Trainer
from trainer.check.rank_checks import check_shards
from trainer.shards import download
from trainer.shards.__main__ import main as shards
from trainer.shards.__main__ import write_index
from trainer.shards.formats import FORMATS
from trainer.shards.formats.shard_parts import FileBytes

NUM = 200
MOST = {"parquet": 1500, "tar": 20_000, "bin": 1500}  # bytes of a part
TOKENS = {"tokens": 8, "header": 6, "dtype": "uint16"}


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(download, "FIRST_DELAY_S", 0.01)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))


def write_parquet(place):
    import pyarrow
    import pyarrow.parquet

    columns = {"n": [*range(NUM)], "text": [f"text {i}" * (i % 7) for i in range(NUM)]}
    pyarrow.parquet.write_table(
        pyarrow.table(columns), place / "a.parquet", row_group_size=9, store_schema=False
    )


def write_tar(place):
    with tarfile.open(place / "a.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        for index in range(NUM):
            for ending, content in (("cls", str(index)), ("txt", f"text {index}" * 80)):
                # the long name has a header of its own
                info = tarfile.TarInfo(f"{'folder' * 20}/{index:03d}.{ending}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content.encode()))


def write_tokens(place):
    tokens = numpy.arange(NUM * 8 + 3, dtype="u2").tobytes()
    (place / "a.bin").write_bytes(b"header" + tokens)


WRITERS = {"parquet": write_parquet, "tar": write_tar, "bin": write_tokens}


@pytest.fixture(scope="module", params=WRITERS)
def files(request, tmp_path_factory):
    """Return the folder of one file, indexed as one shard, and one in parts."""
    whole, divided = (tmp_path_factory.mktemp("files") / name for name in ("whole", "divided"))
    whole.mkdir()
    WRITERS[request.param](whole)
    shutil.copytree(whole, divided)
    settings = TOKENS if request.param == "bin" else {}
    write_index(str(whole), str(whole), settings, 10**9)
    write_index(str(divided), str(divided), settings, MOST[request.param])
    return whole, divided


def values(example):
    if isinstance(example, tuple):
        return [part.tolist() for part in example]
    return example


def test_parts_have_the_examples_of_the_file(files):
    whole, divided = (ShardedDataset(folder) for folder in files)
    assert len(whole.index) == 1 and len(divided.index) > 2
    assert len(whole) == len(divided) == NUM
    assert [values(divided[n]) for n in range(NUM)] == [values(whole[n]) for n in range(NUM)]
    assert shards(["check", str(files[1])]) == 0


@pytest.mark.parametrize("rate", [0, 0.1])
def test_a_part_is_downloaded_on_its_own(rate, files):
    whole = ShardedDataset(files[0])
    (file,) = (path for path in files[1].iterdir() if path.name.startswith("a."))
    with serving(files[1], rate) as server:
        dataset = ShardedDataset(server.url)
        middle = len(dataset.index) // 2
        first = int(dataset.index.rows[:middle].sum())
        assert values(dataset[first]) == values(whole[first])
        size = dataset.index.size(middle)
        assert size < file.stat().st_size
        if not rate:
            assert server.sent[file.name] == size
        path = dataset.cache.path(middle)
        assert path.stat().st_blocks * 512 < size + 3 * 4096
        assert path.stat().st_size == dataset.index.span(middle)[3]  # else it is read again
        assert [values(dataset[n]) for n in range(NUM)] == [values(whole[n]) for n in range(NUM)]
        assert [*dataset.cache.folder.glob("*.part")] == []
        if not rate:
            assert server.sent[file.name] == int(dataset.index.sizes.sum())
        assert shards(["check", server.url]) == 0


def test_the_rest_of_an_interrupted_part_is_used(files):
    (file,) = (path for path in files[1].iterdir() if path.name.startswith("a."))
    data = file.read_bytes()
    with serving(files[1]) as server:
        dataset = ShardedDataset(server.url)
        begin, end, tail, tail_end = dataset.index.span(1)
        for have in (begin + 100, end, tail + (tail_end - tail) // 2):
            path = dataset.cache.path(1)
            path.unlink(missing_ok=True)
            with open(path.with_name(path.name + ".part"), "wb") as part:
                part.seek(begin)
                part.write(data[begin : min(have, end)])
                if have > end:
                    part.seek(tail)
                    part.write(data[tail:have])
            server.sent.clear()
            dataset.cache.fetch(1)
            rest = max(0, end - have) + (tail_end - max(tail, have))
            assert server.sent.get(file.name, 0) == rest


def test_a_cache_of_parts_keeps_within_its_bytes(files):
    whole = ShardedDataset(files[0])
    with serving(files[1]) as server:
        most = 2 * int(ShardedDataset(server.url).index.sizes.max())
        dataset = ShardedDataset(server.url, cache_bytes=most)
        for index in range(NUM):
            assert values(dataset[index]) == values(whole[index])
            kept = [int(path.name[:8]) for path in dataset.cache.folder.glob("*-a.*")]
            assert sum(map(dataset.cache.size, kept)) <= most


def test_a_part_that_was_changed_is_named(files, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(files[1], data)
    (file,) = data.glob("a.*")
    begin, *_ = ShardedDataset(data).index.span(1)
    content = bytearray(file.read_bytes())
    content[begin + 20] ^= 1
    file.write_bytes(content)
    assert shards(["check", str(data)]) == 1
    with serving(data) as server:
        for url in (str(data), server.url):
            with pytest.raises(RunError, match=r"a\.\w+.* SHA-256"):
                [ShardedDataset(url)[n] for n in range(NUM)]


def test_a_server_without_ranges_is_refused_for_parts(files):
    with serving(files[1], has_ranges=False) as server:
        for index in (0, NUM - 1):
            with pytest.raises(RunError, match="sends no parts of files; index them with a larger"):
                ShardedDataset(server.url)[index]


def test_the_doctor_times_a_part(files):
    for has_ranges, result in ((True, "ok"), (False, "fail")):
        with serving(files[1], has_ranges=has_ranges) as server:
            assert check_shards(server.url).result == result
    assert check_shards(str(files[1])).result == "ok"


def test_a_run_on_parts_is_the_same_to_the_bit_from_anywhere(tmp_path):
    write_tokens(tmp_path)
    write_index(str(tmp_path), str(tmp_path), TOKENS, MOST["bin"])
    words = ["task=tiny", "run.steps=20", "strategy=exact", "data.global_batch=20"]
    words += ["data.micro_batch=5", "log.every_steps=1", "eval.every_epochs=null"]

    def task_on(url):
        class OnTokens(Trainer):
            def build_model(self):
                return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 5))

            def build_dataset(self, split):
                if split != "train":
                    return None
                return ShardedDataset(url, decode=decode, lanes=3, cache_bytes=4000)

            def loss(self, outputs, targets):
                return F.cross_entropy(outputs, targets, reduction="none")

        return OnTokens

    local = fit_on(1, tmp_path / "local", *words, task=task_on(str(tmp_path)))
    with serving(tmp_path, 0.1) as server:
        found = fit_on(3, tmp_path / "served", *words, task=task_on(server.url))
    assert found["seen"] == local["seen"] and found["losses"] == local["losses"]
    assert all(torch.equal(found["weights"][n], w) for n, w in local["weights"].items())
    assert audit([str(found["directory"])]) == 0


def decode(example):
    return example[0].float() / 1600, example[1][0] % 5


def test_a_file_that_becomes_shorter_while_it_is_open_is_named(files, tmp_path):
    path = shutil.copy(next(files[0].glob("a.*")), tmp_path)
    index = ShardedDataset(files[0]).index
    shard = FORMATS[index.format].open(FileBytes(path), index.settings, NUM, None)
    os.truncate(path, 100)
    with pytest.raises((RunError, OSError), match=r"became shorter|Parquet|read"):
        [shard[row] for row in range(NUM)]


def test_rows_of_safetensors_have_any_type_and_a_file_that_becomes_shorter_is_named(tmp_path):
    path = tmp_path / "a.safetensors"
    forms = [(torch.float32, 3, 2), (torch.bfloat16, 5), (torch.bool,), (torch.int64,)]
    forms += [(torch.uint8, 0), (torch.float64, 2, 1, 2), (torch.float8_e4m3fn, 3)]
    tensors = {
        f"t{number}": torch.randint(0, 2, (9, *shape)).to(dtype)
        for number, (dtype, *shape) in enumerate(forms)
    }
    save_file(tensors, path, {"about": "a test"})
    write_index(str(tmp_path), str(tmp_path), {}, 2**24)
    data = ShardedDataset(tmp_path)
    assert len(data) == 9 and [*data[0]] == [*tensors]
    for row in range(9):
        for name, value in data[row].items():
            want = tensors[name][row]
            assert value.dtype == want.dtype and value.shape == want.shape
            assert value.tolist() == want.tolist()
    shard = FORMATS["safetensors"].open(FileBytes(path), {}, 9, None)
    os.truncate(path, 1000)
    with pytest.raises(RunError, match="became shorter while it was read; restore it"):
        [shard[row] for row in range(9)]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_large_file_of_one_piece_and_a_small_one_beside_a_large_one_are_whole(kind, tmp_path):
    WRITERS[kind](tmp_path)
    settings = {**TOKENS, "tokens": NUM * 8} if kind == "bin" else {}
    (file,) = tmp_path.glob("a.*")
    if kind == "parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.parquet.read_table(file), file)
    most = 10**7 if kind == "tar" else 100
    index, _ = write_index(str(tmp_path), str(tmp_path), settings, most)
    assert len(index) == 1 and index.span(0) is None
    first = values(ShardedDataset(tmp_path)[0])
    if kind == "bin":  # a small file has its header too, where a large one is divided
        settings = TOKENS
        tokens = numpy.arange(9, dtype="u2").tobytes()
        (tmp_path / "b.bin").write_bytes(b"header" + tokens)
        index, _ = write_index(str(tmp_path), str(tmp_path), settings, MOST[kind])
        assert len(index) > 2 and index.span(len(index) - 1) is None
        assert values(ShardedDataset(tmp_path)[NUM]) == [[*range(8)], [*range(1, 9)]]
    assert first and shards(["check", str(tmp_path)]) == 0
