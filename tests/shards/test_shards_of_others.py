"""Shards that other tools wrote: each example is read as it was written, or refused by name."""

import bz2
import gzip
import io
import json
import os
import struct
import subprocess
import tarfile
from decimal import Decimal
from types import SimpleNamespace

import numpy
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from trainer import ConfigError, ShardedDataset
from trainer.shards.__main__ import main as shards
from trainer.shards.index import ShardIndex
from trainer.shards.sources import FsspecSource, TemporaryError


def indexed(place, *words):
    assert shards(["index", str(place), *words]) == 0
    found = ShardedDataset(place)
    return [found[index] for index in range(len(found))]


# Tar ----------------------------------------------------------------------------------------------


def add(archive, name, content=b"", **options):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for option, value in options.items():
        setattr(info, option, value)
    archive.addfile(info, io.BytesIO(content))


def test_a_hard_link_in_a_tar_has_the_content_of_its_file(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add(archive, "1.txt", b"one")
        add(archive, "2.txt", type=tarfile.LNKTYPE, linkname="1.txt")
        add(archive, "2.cls", b"5")
        add(archive, "3.txt", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(archive, "4.txt", type=tarfile.LNKTYPE, linkname="/etc/passwd")
    first, second = indexed(tmp_path)
    assert first == {"__key__": "1", "txt": "one"}
    assert second == {"__key__": "2", "txt": "one", "cls": 5}


@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_a_sparse_file_in_a_tar_is_refused(form, tmp_path):
    with open(tmp_path / "0.raw", "wb") as file:
        file.seek(10**6)
        file.write(b"end")
    words = ["tar", "--sparse", f"--format={form}", "-cf", "a.tar", "0.raw"]
    subprocess.run(words, cwd=tmp_path, check=True)
    with pytest.raises(ConfigError, match=r"a\.tar: .*0\.raw is a sparse file: pack it without"):
        shards(["index", str(tmp_path)])


@pytest.mark.parametrize("harm", ["truncated", "flipped"])
def test_a_tar_that_ends_early_or_is_damaged_is_refused(harm, tmp_path):
    place = tmp_path / "a.tar"
    with tarfile.open(place, "w") as archive:
        for number in range(5):
            add(archive, f"{number}.cls", b"%d" % number)
    data = bytearray(place.read_bytes())
    data[4 * 512 + 3] ^= 1  # in the header of the third file
    place.write_bytes(data if harm == "flipped" else data[: 4 * 512 + 100])
    with pytest.raises(ConfigError, match=r"a\.tar: .*ends or is damaged at byte 2,048"):
        shards(["index", str(tmp_path)])


# Flat tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "header"), [("uint16", 3), ("uint32", 256), ("uint8", 0)])
def test_tokens_may_be_followed_by_a_part_of_one(kind, header, tmp_path):
    tokens = numpy.arange(41, dtype=kind)
    (tmp_path / "train.bin").write_bytes(bytes(header) + tokens.tobytes() + b"\1")
    found = indexed(tmp_path, "tokens=8", f"dtype={kind}", f"header={header}")
    assert len(found) == 5
    assert found[4][1].tolist() == [*range(33, 41)]


def test_tokens_of_an_unknown_type_are_refused_with_the_words_to_give(tmp_path):
    numpy.arange(41.0).tofile(tmp_path / "train.bin")
    allowed = r"dtype=float32 header=0: must be .* one of uint8, .* give tokens=1024 dtype=uint16"
    with pytest.raises(ConfigError, match=allowed):
        shards(["index", str(tmp_path), "tokens=8", "dtype=float32"])


# MDS ----------------------------------------------------------------------------------------------


def mds(place, encoding, parts, compression=None, pack=lambda data: data, **changes):
    """Write MDS's files of one column by hand: `parts` are the bytes of its rows."""
    settings = {"column_names": ["x"], "column_encodings": [encoding], "column_sizes": [None]}
    rows = [struct.pack("<I", len(part)) + part for part in parts]
    ends = numpy.cumsum([4 + 4 * (len(rows) + 1), *map(len, rows)]).astype("<u4")
    data = pack(struct.pack("<I", len(rows)) + ends.tobytes() + b"".join(rows))
    (place / "0.mds").write_bytes(data)
    file = {"basename": "0.mds", "bytes": len(data), "hashes": {}}
    files = {"raw_data": file, "zip_data": file if compression else None}
    form = {"format": "mds", "version": 2, "compression": compression, "samples": len(rows)}
    shard = {**settings, **files, **form, **changes}
    (place / "index.json").write_text(json.dumps({"shards": [shard]}))
    return ShardedDataset(place, cache=place / "cache")


def image(kind, size):
    stream = io.BytesIO()
    Image.new("L", size, size[0]).save(stream, kind)
    return stream.getvalue()


def listed(elements):
    lengths = [len(elements), *map(len, elements)]
    return struct.pack(f"<{len(lengths)}I", *lengths) + b"".join(elements)


def test_lists_of_images_and_decimals_are_read(tmp_path):
    sizes = [(3, 4), (5, 2)]
    for encoding, kind, head in [
        ("list[png]", "png", bytes(4)),
        ("list[jpeg]", "jpeg", bytes(4)),
        ("jpeg_array", "jpeg", b""),
        ("jpegarray", "jpeg", b""),
    ]:
        part = head + listed([image(kind, size) for size in sizes])
        found = mds(tmp_path, encoding, [part, head + listed([])])
        assert [each.size for each in found[0]["x"]] == sizes
        assert found[1]["x"] == []
    raw = struct.pack("<3I", 3, 4, 1) + b"L" + bytes(range(12))
    (found,) = mds(tmp_path, "list[pil]", [bytes(4) + listed([raw])])[0]["x"]
    assert numpy.asarray(found).flatten().tolist() == [*range(12)]
    assert mds(tmp_path, "str_decimal", [b"1.10"])[0]["x"] == Decimal("1.10")


def test_a_list_of_pickles_and_another_format_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"'list\[pkl\]': is not read; use bytes"):
        mds(tmp_path, "list[pkl]", [b""])
    with pytest.raises(ConfigError, match="its format is json 2, and mds 2 is read"):
        mds(tmp_path, "str", [b""], format="json")
    (tmp_path / "index.json").write_text('{"shards": []}')
    with pytest.raises(ConfigError, match="it has no shards"):
        ShardedDataset(tmp_path)
    (tmp_path / "index.json").write_text('{"shards": [{}], "shards": []}')
    with pytest.raises(ConfigError, match="a name is given twice; restore it"):
        ShardedDataset(tmp_path)


@pytest.mark.parametrize(("name", "pack"), [("gz", gzip.compress), ("bz2:3", bz2.compress)])
def test_compressed_shards_of_mds_are_read(name, pack, tmp_path):
    found = mds(tmp_path, "str", [b"one", b""], name, pack)
    assert [found[0], found[1]] == [{"x": "one"}, {"x": ""}]


def test_the_start_says_which_shards_cannot_be_verified(tmp_path):
    assert "1 without a SHA-256 in the index" in mds(tmp_path, "str", [b"one"]).source
    assert shards(["index", str(tmp_path)]) == 0
    assert "SHA-256" not in ShardedDataset(tmp_path).source


def test_an_unknown_compression_is_refused_with_those_that_are_read(tmp_path):
    with pytest.raises(ConfigError, match="compression br: must be gz, bz2 or zstd; write"):
        mds(tmp_path, "str", [b"one"], "br:4")


# Indices of somebody who means harm ---------------------------------------------------------------

COLUMN = {"column_names": ["x"], "column_sizes": [None]}


@pytest.mark.parametrize(
    ("form", "settings", "why"),
    [
        ("bin", {"tokens": 5, "dtype": "O", "header": 0}, "dtype=O header=0: must be integers"),
        ("bin", {"tokens": 5, "dtype": "uint16", "header": -2}, "header=-2: must be integers"),
        ("bin", {"tokens": 10**18, "dtype": "uint16", "header": 0}, "must be integers"),
        ("bin", {}, "tokens=None"),
        ("mds", {}, "'mds' that are not read: KeyError: 'column_encodings'; write its index"),
        ("mds", COLUMN | {"column_encodings": ["ndarray:O"]}, "arrays of O: must be uint8"),
        ("mds", COLUMN | {"column_encodings": ["ndarray:int8:a"]}, "not read: ValueError"),
        ("mds", COLUMN | {"column_encodings": [5]}, "not read: AttributeError"),
        ("pickles", {}, "shards of form 'pickles' that are not read"),
    ],
)
def test_an_index_with_settings_that_cannot_be_is_refused(form, settings, why, tmp_path):
    (tmp_path / "0.bin").write_bytes(b"x" * 1000)
    made = ShardIndex.of(form, settings, ["0.bin"], [3], [1000], [bytes(32)])
    (tmp_path / "lockstep.index").write_bytes(made.to_bytes())
    with pytest.raises(ConfigError, match=why):
        ShardedDataset(tmp_path)


# Which files --------------------------------------------------------------------------------------


def test_hidden_files_are_no_shards(tmp_path):
    for name in ("a.safetensors", "._a.safetensors", ".ipynb_checkpoints/a.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save_file({"x": torch.arange(4)}, tmp_path / name)
    assert len(indexed(tmp_path)) == 4


def test_compressed_files_of_other_formats_than_mds_are_refused_by_name(tmp_path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        add(archive, "1.txt", b"one")
    with pytest.raises(ConfigError, match=r"a\.tar\.gz is compressed: must be tar files as they"):
        shards(["index", str(tmp_path)])


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, FileNotFoundError),
        (403, PermissionError),
        (429, TemporaryError),
        (502, TemporaryError),
    ],
)
def test_an_answer_of_a_store_with_a_status_is_told_by_it(status, kind):
    class Refused(Exception):  # as those of httpx, which hf:// raises
        response = SimpleNamespace(status_code=status)

    def cat_file(name, start, end):
        raise Refused(f"Client error {status}")

    source = FsspecSource("hf://datasets/org/name")
    source._opened = (os.getpid(), (SimpleNamespace(cat_file=cat_file), "org/name"))
    with pytest.raises(kind, match=f"Client error {status}"):
        list(source.stream("index.json"))
