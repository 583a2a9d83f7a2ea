"""Checkpoints and archives of somebody else: refused in one line, nothing of theirs is run,
none makes us wait."""

import gzip
import hashlib
import io
import json
import os
import re
import tarfile
import warnings
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from harness import within
from harness.download import FILES, KEY, SHA256, content, names, serving
from harness.internals import checkpoint, manifest, packing, resume
from torch import nn

from trainer import CheckpointError, ConfigError
from trainer.checkpoints.__main__ import main as list_checkpoints
from trainer.checkpoints.manifest import Manifest
from trainer.tasks import download

CPU = torch.device("cpu")
STEP = "step-00000001"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def publish(root, training=None, model=None, raw=None, **facts):
    """A checkpoint whose digests are all right, whatever is in it; `raw` is the manifest as
    text."""
    path = root / STEP
    path.mkdir(parents=True)
    files = {
        "model.pt": model or saved({"weight": torch.zeros(2)}),
        "training.pt": training or saved({}),
    }
    entries = {
        n: {"rank": 0, "bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()}
        for n, d in files.items()
    }
    for name, data in files.items():
        (path / name).write_bytes(data)
    manifest = {"format": checkpoint.FORMAT, "step": 1, "files": entries, **facts}
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    text = raw(manifest) if raw else json.dumps(manifest)
    (path / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    return path


def refused(path, within_s=20):
    """The line with which the checkpoint is refused, loaded as a run does it."""
    with within(within_s), pytest.raises(CheckpointError) as raised:
        for data in checkpoint.load(path).files.values():
            packing.unpack(data, CPU)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_the_checkpoints_of_these_tests_load_when_nothing_is_wrong_with_them(tmp_path):
    loaded = checkpoint.load(
        publish(tmp_path, metrics={"eval/loss": None, "eval/a": 1.5}, config={}, data={})
    )
    assert torch.equal(packing.unpack(loaded.files["model.pt"], CPU)["weight"], torch.zeros(2))


# What is in the files -----------------------------------------------------------------------------


class Call:
    """A pickle that calls."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


class Subclass(torch.Tensor):
    pass


def rezipped(change=lambda name, data: data, compression=zipfile.ZIP_STORED):
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved({"w": torch.zeros(4)}))) as old,
        zipfile.ZipFile(stream, "w") as new,
    ):
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)), compression)
    return stream.getvalue()


def declaring(numel):
    """The storage of four numbers, declared as so many."""
    big = b"J" + numel.to_bytes(4, "little")
    swap = {b"K\x04t": big + b"t", b"K\x04\x85": big + b"\x85"}

    def change(name, data):
        for old, new in swap.items() if name.endswith("data.pkl") else ():
            assert data.count(old) == 1
            data = data.replace(old, new)
        return data

    return rezipped(change)


def scripted():
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Linear(1, 1)), stream)
    return stream.getvalue()


def cyclic():
    value: list = []
    value.append(value)
    return value


def doubling(times=60):
    value: list = [0]
    for _ in range(times):
        value = [value, value]
    return value


def nested(depth):
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


def by_hand(pickled):
    """An archive around a pickle that Python's own pickler would not write."""
    return rezipped(lambda name, data: pickled if name.endswith("data.pkl") else data)


PLANTED = "planted"  # relative: the tests run in a folder of their own
CONTENTS = {
    "os.system": lambda: saved({"w": Call(os.system, f"touch {PLANTED}")}),
    "os.mkdir": lambda: saved(Call(os.mkdir, PLANTED)),
    "eval": lambda: saved([Call(eval, f"__import__('os').mkdir('{PLANTED}')")]),
    "in the optimizer's state": lambda: saved(
        {"optimizers": [{"state": {0: {"m": Call(os.mkdir, PLANTED)}}}]}
    ),
    "as a key": lambda: saved({Call(os.mkdir, PLANTED): 1}),
    "getattr": lambda: by_hand(
        b"\x80\x02c__builtin__\ngetattr\ncposix\nsystem\nX\x01\x00\x00\x00x\x86R."
    ),
    "without an archive around": lambda: b"\x80\x02cposix\nmkdir\nX\x07\x00\x00\x00planted\x85R.",
    "in an archive by hand": lambda: by_hand(
        b"\x80\x02cposix\nmkdir\nX\x07\x00\x00\x00planted\x85R."
    ),
    "another torch function": lambda: by_hand(
        b"\x80\x02ctorch.hub\nload\nX\x07\x00\x00\x00planted\x85R."
    ),
    "tensor subclass": lambda: saved({"w": torch.zeros(2).as_subclass(Subclass)}),
    "module": lambda: saved(nn.Linear(2, 2)),
    "TorchScript": scripted,
    "old format": lambda: old_format({"w": torch.zeros(2)}),
    "sparse tensor": lambda: saved({"w": torch.eye(2).to_sparse()}),
    "meta tensor": lambda: saved({"w": torch.zeros(10**6, device="meta")}),
    "one number as a tensor of 10^15": lambda: saved({"w": torch.zeros(1).expand(10**15)}),
    "quantized tensor": lambda: saved(
        {"w": torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)}
    ),
    "set": lambda: saved({"w": {1, 2}}),
    "complex number": lambda: saved({"w": 1j}),
    "counter of bytes": lambda: saved(Counter([b"a"])),
    "storage declared as 2^30 numbers": lambda: declaring(2**30),
    "storage declared as 5 numbers": lambda: declaring(5),
    "compressed": lambda: rezipped(compression=zipfile.ZIP_DEFLATED),
    "bomb": lambda: rezipped(lambda name, data: data + bytes(2**26), zipfile.ZIP_DEFLATED),
    "list that holds itself": lambda: saved({"w": cyclic()}),
    "list of 2^60 through sixty": lambda: saved({"w": doubling()}),
    "truncated": lambda: saved({"w": torch.zeros(4)})[:-40],
    "no pickle": lambda: by_hand(b""),
    "not even an archive": lambda: b"PK\x03\x04" + bytes(200),
    "empty": lambda: b"\n",
}


def old_format(value):
    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("part", ["model", "training"])
@pytest.mark.parametrize("make", CONTENTS.values(), ids=CONTENTS)
def test_file_with_more_than_tensors_and_plain_values_is_refused(make, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refused(publish(tmp_path / "root", **{part: make()}))
    assert line.startswith("the checkpoint holds more than tensors and plain values: ")
    assert names(tmp_path) == ["root"]


def test_what_a_run_saves_is_never_taken_for_hostile(tmp_path):
    weight = nn.Parameter(torch.zeros(3, 4))
    tree = {
        "deep": nested(300),
        "w": weight,
        "part": weight[1:, 1],
        "empty": torch.zeros(0),
        "n": [None, True, 1, 0.5],
    }
    found = packing.unpack(saved(tree), CPU)
    assert found["n"] == tree["n"] and found["part"].shape == (2,) and found["deep"] == tree["deep"]


# The manifest and the folder ----------------------------------------------------------------------


def with_file(name, **entry):
    full = {"rank": 0, "bytes": 2, "sha256": hashlib.sha256(b"ok").hexdigest(), **entry}
    return {"files": {name: full}}


MANIFESTS = {
    **{
        f"name {n!r}": with_file(n)
        for n in ["../x", "/etc/passwd", "..", ".", "", "a/b", "a\0b", "a\nb", "\x1b[31m"]
    },
    **{
        f"{n} bytes": with_file("model.pt", bytes=n)
        for n in [-1, 2.0, True, None, "2", 10**18, 10**300]
    },
    "NaN bytes": with_file("model.pt", bytes=float("nan")),
    "infinitely many bytes": with_file("model.pt", bytes=float("inf")),
    "digest that is a number": with_file("model.pt", sha256=5),
    "files in a list": {"files": [1]},
    "entry that is a list": {"files": {"model.pt": [2]}},
    "metrics in a list": {"metrics": [1]},
    "metric that is a text": {"metrics": {"eval/loss": "0.5"}},
    "metric that is a mapping": {"metrics": {"eval/loss": {}}},
    "config in a list": {"config": [1]},
    "data in a text": {"data": "all"},
    "step that is a text": {"step": "1"},
    "negative step": {"step": -1},
}


@pytest.mark.parametrize("facts", MANIFESTS.values(), ids=MANIFESTS)
def test_manifest_of_wrong_types_is_refused(facts, tmp_path):
    assert str(tmp_path) in refused(publish(tmp_path, **facts))


RAW = {
    "deeper than the stack": lambda manifest: "[" * 100_000 + "]" * 100_000,
    "deep value": lambda manifest: (
        json.dumps(manifest)[:-1] + ', "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    ),
    "a name twice": lambda manifest: json.dumps(manifest).replace(
        '"step": 1', '"step": 1, "step": 1'
    ),
    "number of 5,000 digits": lambda manifest: json.dumps(manifest).replace(
        '"step": 1', '"step": ' + "1" * 5000
    ),
    "bytes that are no text": lambda manifest: "\udcff",
    "too long": lambda facts: " " * manifest.MOST_BYTES + json.dumps(facts),
}


OF_RUN = {
    **{
        "run": "a",
        "strategy": "ddp",
        "world_size": 2,
        "ledger": "c",
        "sessions": [[0, 2]],
        "metrics": {"a": None},
    },
    **{
        "replaced": {"0/3": 4},
        "config": {"data.global_batch": 20, "run.seed": 0},
        "data": {"train": {"length": 200}},
    },
}
NOT_OF_RUN = [
    *({name: None} for name in OF_RUN),
    *({"world_size": value} for value in (0, -1, [1], True)),
    *(
        {"replaced": value}
        for value in ([1], {"x": 1}, {"0/200": 1}, {"0/3": 200}, {"0/3": -1}, {"0/3": "4"})
    ),
    *({"sessions": value} for value in ([1, 2], [[1]], [[0, "2"]], "ab")),
    *(
        {"data": value}
        for value in ({}, {"train": 5}, {"train": {"length": 0}}, {"train": {"length": "a"}})
    ),
    *(
        {"config": {**OF_RUN["config"], "data.global_batch": value}}
        for value in (0, -5, 201, "20", None)
    ),
    *({"config": {**OF_RUN["config"], "run.seed": value}} for value in (-1, "x", None)),
]


@pytest.mark.parametrize("facts", NOT_OF_RUN, ids=str)
def test_manifest_that_is_not_of_a_run_is_refused_before_anything_is_read_of_it(facts, tmp_path):
    Manifest.of_run({**OF_RUN, "step": 1, "files": {}}, tmp_path)
    path = publish(
        tmp_path / "run/checkpoints",
        **{k: v for k, v in {**OF_RUN, **facts}.items() if v is not None},
    )
    with pytest.raises(CheckpointError, match=r": its manifest is not that of a run$"):
        resume.read(resume.Origin(checkpoint=path))
    assert list_checkpoints([str(path)]) == 1


def test_names_in_a_manifest_reach_no_terminal_and_are_no_markup(tmp_path, capfd):
    named = {"\x1b[31mRED": 1.0, "[/b]": None}
    assert (
        list_checkpoints(
            [str(publish(tmp_path, **{**OF_RUN, "metrics": named, "strategy": "[/foo]"}))]
        )
        == 0
    )
    said = capfd.readouterr().out
    assert "\x1b" not in said and "[/foo]" in said and "[/b]" in said


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
def test_manifest_that_is_no_json_of_ours_is_refused(raw, tmp_path):
    assert refused(publish(tmp_path, raw=raw)).endswith(
        "manifest.json: cannot be read as a manifest"
    )


@pytest.mark.parametrize("name", ["manifest.json", "model.pt", "training.pt"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "device"])
def test_what_is_no_plain_file_is_neither_followed_nor_waited_for(name, kind, tmp_path):
    path = publish(tmp_path)
    real = (path / name).rename(tmp_path / name)
    make = {"link": lambda p: p.symlink_to(real), "pipe": os.mkfifo, "folder": Path.mkdir}
    make["device"] = lambda p: p.symlink_to("/dev/zero")
    make[kind](path / name)
    assert refused(path).startswith(f"{path / name}: ")


@pytest.mark.parametrize("target", ["folder", "nothing"])
def test_link_in_place_of_a_checkpoint_is_none(target, tmp_path):
    other = publish(tmp_path / "other")
    root = tmp_path / "root"
    root.mkdir()
    (root / STEP).symlink_to(other if target == "folder" else tmp_path / "absent")
    assert checkpoint.load_newest(root) == (None, [])


def test_file_larger_than_declared_is_refused_unread(tmp_path):
    path = publish(tmp_path)
    os.truncate(path / "model.pt", 2**42)  # sparse: to read it would end us
    assert re.search(r"model\.pt: 4398046511104 bytes, \d+ were written$", refused(path))


# Archives -----------------------------------------------------------------------------------------


def archive(*members):
    """A tar.gz of (name, type, data or link target)."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as made:
        for name, kind, data in members:
            member = tarfile.TarInfo(name)
            member.type, member.mode = kind, 0o6777
            if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                member.linkname = data
            else:
                member.size = len(data)
            made.addfile(member, io.BytesIO(data) if member.size else None)
    return stream.getvalue()


REG, SYM, HARD, CHAR, PIPE = (
    tarfile.REGTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.CHRTYPE,
    tarfile.FIFOTYPE,
)
GOOD = [(name, REG, data) for name, data in FILES.items()]
IGNORED = {
    "path that leads out": [("../../outside", REG, b"x"), ("a/../../outside", REG, b"x")],
    "absolute path": [("/tmp/outside-of-lockstep", REG, b"x")],
    "link out, and a file through it": [
        ("dir", SYM, "/tmp"),
        ("dir/outside-of-lockstep", REG, b"x"),
    ],
    "hard link": [("hard", HARD, "/etc/passwd")],
    "device": [("null", CHAR, b""), ("pipe", PIPE, b"")],
    "link of our name, then the file": [
        ("one.bin", SYM, "/tmp/outside-of-lockstep"),
        ("one.bin", HARD, "/etc/passwd"),
    ],
    "file of our name twice": [GOOD[0], GOOD[0]],
}


@pytest.mark.parametrize("extra", IGNORED.values(), ids=IGNORED)
def test_members_that_are_not_ours_are_never_written(extra, tmp_path):
    with serving(archive(*extra, *GOOD, *extra)) as (url, _):
        download.fetch(url, str(tmp_path / "a/b/root"), SHA256, KEY)
    root = tmp_path / "a/b/root"
    assert (
        content(root) == FILES
        and names(tmp_path) == ["a"]
        and names(root.parent) == [".root.lock", "root"]
    )
    assert not any(
        path.is_symlink() or path.stat().st_mode & 0o6111 or path.stat().st_nlink > 1
        for path in root.iterdir()
    )
    assert not Path("/tmp/outside-of-lockstep").exists()


def test_our_name_under_a_path_that_leads_out_is_written_at_home(tmp_path):
    with serving(archive(*[(f"../../{name}", kind, data) for name, kind, data in GOOD])) as (
        url,
        _,
    ):
        download.fetch(url, str(tmp_path / "a/b/root"), SHA256, KEY)
    assert content(tmp_path / "a/b/root") == FILES and names(tmp_path) == ["a"]


def sparse():
    """Eight bytes in the stream that say they are a file of 2^40."""
    member = tarfile.TarInfo("one.bin")
    member.type, member.size = b"S", 512
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    block[386:410] = b"00000000000\0" + b"00000001000\0"
    block[483:495] = b"\x80" + (2**40).to_bytes(11, "big")
    block[148:156] = b"        "
    block[148:156] = b"%06o\0 " % sum(block)
    return gzip.compress(bytes(block) + bytes(512) + bytes(1024))


REFUSED = {
    "another content under our name": (
        lambda: archive(GOOD[0], ("two.bin", REG, b"other")),
        "two.bin in it has SHA-256",
    ),
    "link only": (lambda: archive(GOOD[0], ("two.bin", SYM, "/etc/passwd")), "it has no two.bin"),
    "hard link only": (lambda: archive(GOOD[0], ("two.bin", HARD, "one.bin")), "it has no two.bin"),
    "giant member of our name": (
        lambda: archive(("one.bin", REG, bytes(2**22))),
        "it unpacks to more than",
    ),
    "giant member of another name": (
        lambda: archive(("x", REG, bytes(2**22)), *GOOD),
        "it unpacks to more than",
    ),
    "giant name": (lambda: archive(("x" * 2**22, REG, b""), *GOOD), "it unpacks to more than"),
    "many members": (lambda: archive(*[("x", REG, b"")] * 5000, *GOOD), "it unpacks to more than"),
    "sparse member of 2^40 bytes": (sparse, "it has no one.bin"),
}


@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED)
def test_hostile_archive_is_one_line_and_leaves_nothing(make, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "MOST_BYTES", 2**21)
    with serving(make()) as (url, _), within(20), pytest.raises(ConfigError) as raised:
        download.fetch(url, str(tmp_path / "root"), SHA256, KEY)
    assert reason in str(raised.value) and "\n" not in str(raised.value)
    assert names(tmp_path) == [".root.lock"]


def test_the_limit_leaves_room_for_the_archive_it_is_for():
    assert 184_380_000 + 10_240 < download.MOST_BYTES <= 2**30
