"""Shards that other tools wrote: each example is read as it was written, or refused by name."""

import io
import subprocess
import tarfile

import numpy
import pytest

from trainer import ConfigError, ShardedDataset
from trainer.shards.__main__ import main as shards


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
    allowed = r"tokens=8 dtype=float32: must be .* one of uint8, .* give tokens=1024 dtype=uint16"
    with pytest.raises(ConfigError, match=allowed):
        shards(["index", str(tmp_path), "tokens=8", "dtype=float32"])
