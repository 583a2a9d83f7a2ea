"""Checkpoints and archives from an untrusted source: each is refused in one line, none of its code
is executed, and none makes the process wait."""

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
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import within
from harness.download import FILES, KEY, SHA256, content, names, serving
from harness.internals import checkpoint, resume, rundir
from harness.stored import content_of
from harness.verbs import audit, show_verb, use_verb
from safetensors.torch import save as save_tensors
from torch import nn

from trainer import CheckpointError, ConfigError
from trainer.base import plain_files
from trainer.core.checkpoints import tensor_files
from trainer.core.checkpoints.reading import read_on_all_ranks
from trainer.core.checkpoints.transaction import Manifest
from trainer.core.distributed.group import Group
from trainer.core.distributed.world import World
from trainer.tasks.data import download

CPU = torch.device("cpu")
STEP = "step-00000001"
SHARDS = "model-r00000.safetensors"
ALONE = Group(World(), dist.HashStore())


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def tensor_file(**tensors):
    return save_tensors(tensors or {"weight": torch.zeros(2)})


def index_of(entry=None, **more):
    """Return an index of one tensor; `more` are other kinds, or other values of its entry."""
    kinds = {kind: more.pop(kind, {}) for kind in ("optimizer", "ema")}
    weight = {"dtype": "F32", "shape": [2], "parts": [[SHARDS, [0], [2]]], **more}
    return json.dumps({"model": {"weight": weight if entry is None else entry}, **kinds}).encode()


def publish(root, training=None, model=None, index=None, raw=None, **facts):
    """Write a checkpoint with correct digests and any content; `raw` is the manifest as a
    string."""
    files = {
        SHARDS: model or tensor_file(),
        "training.pt": training or saved({}),
        "tensors.json": index or index_of(),
    }
    return write(root, files, raw, **facts)


def write(root, contents, raw=None, **facts):
    path = root / STEP
    path.mkdir(parents=True)
    entries = {
        n: {"rank": 0, "bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()}
        for n, d in contents.items()
    }
    for name, data in contents.items():
        (path / name).write_bytes(data)
    manifest = {"format": checkpoint.CHECKPOINT_FORMAT, "step": 1, "files": entries, **facts}
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    text = raw(manifest) if raw else json.dumps(manifest)
    (path / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    return path


def refused(path, within_s=20):
    """Load a checkpoint as a run does and return the error line that refuses it."""
    with within(within_s), pytest.raises(CheckpointError) as raised:
        content_of(checkpoint.load(path))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_the_checkpoints_of_these_tests_load_when_nothing_is_wrong_with_them(tmp_path):
    metrics = {"eval/loss": None, "eval/a": 1.5}
    path = publish(tmp_path / "3", metrics=metrics, config={}, data={})
    weight = content_of(checkpoint.load(path))["model"]["weight"]
    assert torch.equal(weight, torch.zeros(2))


# Content of the files -----------------------------------------------------------------------------


class Call:
    """Object whose pickle calls a function when it is loaded."""

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


def inflated(name, data):
    return data + bytes(2**26) if name.endswith("/data.pkl") else data


def declaring(numel):
    """Return the storage of four numbers, declared to hold `numel`."""
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
    """Build an archive around a pickle that Python's own pickler would not write."""
    return rezipped(lambda name, data: pickled if name.endswith("data.pkl") else data)


PLANTED = "planted"  # relative: each test runs in its own folder
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
    "bomb": lambda: rezipped(inflated, zipfile.ZIP_DEFLATED),
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
@pytest.mark.parametrize("make", CONTENTS.values(), ids=CONTENTS)
def test_file_with_more_than_tensors_and_plain_values_is_refused(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refused(publish(tmp_path / "root", training=make()))
    assert line.startswith("the checkpoint holds more than tensors and plain values: ")
    assert names(tmp_path) == ["root"]


def test_checkpoint_of_a_run_is_never_refused_as_hostile(tmp_path):
    weight = nn.Parameter(torch.zeros(3, 4))
    tree = {
        "deep": nested(300),
        "w": weight,
        "part": weight[1:, 1],
        "empty": torch.zeros(0),
        "n": [None, True, 1, 0.5],
    }
    found = tensor_files.unpack(saved(tree), CPU)
    assert found["n"] == tree["n"] and found["part"].shape == (2,) and found["deep"] == tree["deep"]


def headed(header, data=bytes(8)):
    """Build a safetensors file with a header that safetensors itself would not write."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def weight_at(begin, end, dtype="F32", shape=(2,), **more):
    return {"weight": {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}, **more}


FILES_OF_TENSORS = {
    "zeros": lambda: bytes(20),
    "too small": lambda: headed(weight_at(0, 8))[:-1],
    "pickle": lambda: saved({"weight": torch.zeros(2)}),
    "header longer than the file": lambda: (2**40).to_bytes(8, "little") + bytes(40),
    "header that is no JSON": lambda: headed(b"{'weight"),
    "header that is a list": lambda: headed([1]),
    "header deeper than the stack": lambda: headed(b"[" * 100_000),
    "data beyond the end": lambda: headed(weight_at(0, 8), bytes(4)),
    "data before the begin": lambda: headed(weight_at(-8, 0)),
    "data of another length": lambda: headed(weight_at(0, 4), bytes(4)),
    "shape of 10^18": lambda: headed(weight_at(0, 8, shape=[10**18])),
    "negative shape": lambda: headed(weight_at(0, 8, shape=[-2])),
    "shape that overflows": lambda: headed(weight_at(0, 8, shape=[2**62, 2, 2**62])),
    "unknown dtype": lambda: headed(weight_at(0, 8, dtype="OBJECT")),
    "other dtype": lambda: tensor_file(weight=torch.zeros(2, dtype=torch.int32)),
    "other shape": lambda: tensor_file(weight=torch.zeros(1, 2)),
    "other tensors": lambda: tensor_file(bias=torch.zeros(2)),
    "gap": lambda: headed(weight_at(4, 12), bytes(12)),
    "bytes at the end": lambda: headed(weight_at(0, 8), bytes(40)),
    "two tensors in one place": lambda: headed(
        weight_at(0, 8, bias={"dtype": "F32", "shape": [2], "data_offsets": [0, 8]})
    ),
}


@pytest.mark.parametrize("make", FILES_OF_TENSORS.values(), ids=FILES_OF_TENSORS)
def test_file_of_tensors_that_is_not_what_the_index_says_is_refused(make, tmp_path):
    line = refused(publish(tmp_path, model=make()))
    assert line.startswith(f"{tmp_path / STEP / SHARDS}: ")


INDICES = {
    "no JSON": b"{'model'",
    "bytes that are no text": b"\xff\xfe",
    "deeper than the stack": b"[" * 100_000,
    "list": b"[]",
    "number": b"7",
    "no kinds": b"{}",
    "kind in a list": b'{"model": [1], "optimizer": {}, "ema": {}}',
    "entry in a list": index_of([1]),
    "entry without parts": index_of({"dtype": "F32", "shape": [2]}),
    "unknown dtype": index_of(dtype="OBJECT"),
    "dtype in a list": index_of(dtype=[]),
    "shape in a number": index_of(shape=2),
    "negative shape": index_of(shape=[-2], parts=[[0, [0], [-2]]]),
    "shape of a fraction": index_of(shape=[2.0]),
    "shape of true": index_of(shape=[True], parts=[[0, [0], [True]]]),
    "shape of 10^18": index_of(shape=[10**18], parts=[[SHARDS, [0], [10**18]]]),
    "2,000 dimensions": index_of(shape=[1] * 2000, parts=[[SHARDS, [0] * 2000, [1] * 2000]]),
    "part in a text": index_of(parts=["weight"]),
    "part of two values": index_of(parts=[[SHARDS, [0]]]),
    "part of other dimensions": index_of(parts=[[SHARDS, [0, 0], [2, 1]]]),
    "parts that overlap": index_of(parts=[[SHARDS, [0], [2]]] * 2),
    "parts with a gap": index_of(parts=[[SHARDS, [1], [1]]]),
    "parts beyond the end": index_of(parts=[[SHARDS, [0], [3]]]),
    "no part": index_of(parts=[]),
    **{
        f"file {name!r}": index_of(parts=[[name, [0], [2]]])
        for name in ("/etc/passwd", "../../x", "manifest.json", "", "model-r00001.safetensors", 1)
    },
    "no element, and 10^18 in a row": index_of(shape=[0, 10**18], parts=[]),
    "65 dimensions": index_of(shape=[1] * 65, parts=[[SHARDS, [0] * 65, [1] * 65]]),
    "same as nothing": index_of(same_as="bias"),
    "same as itself": index_of(same_as="weight"),
    "same as a list": index_of(same_as=["weight"]),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_index_that_is_not_of_these_files_is_refused(index, tmp_path):
    line = refused(publish(tmp_path, index=index))
    assert line.startswith(f"{tmp_path / STEP}/tensors.json: is not an index: ")


SAME = {"dtype": "F32", "shape": [2], "parts": [[SHARDS, [0], [2]]]}


@pytest.mark.parametrize(
    "other",
    [{"shape": [1], "parts": [[SHARDS, [0], [1]]]}, {"dtype": "I32"}],
    ids=["shape", "dtype"],
)
def test_tied_tensor_with_another_form_is_refused(other, tmp_path):
    for more in ({}, other):
        tied = {"weight": SAME, "tied": {**SAME, "same_as": "weight", **more}}
        index = json.dumps({"model": tied, "optimizer": {}, "ema": {}}).encode()
        path = publish(tmp_path / str(len(more)), index=index)
        if more:
            assert refused(path).endswith("is not an index: model tied is not the same as weight")
        else:
            assert torch.equal(content_of(checkpoint.load(path))["model"]["tied"], torch.zeros(2))


@pytest.mark.parametrize("num_tied", [100, 101])
def test_tied_tensors_that_would_be_exported_as_terabytes_are_refused(num_tied, tmp_path):
    tied = {f"tied{n}": {**SAME, "same_as": "weight"} for n in range(num_tied)}
    index = json.dumps({"model": {"weight": SAME, **tied}, "optimizer": {}, "ema": {}}).encode()
    path = publish(tmp_path / "run/checkpoints", index=index, **OF_RUN)
    target = tmp_path / "all.safetensors"
    if num_tied == 100:
        assert use_verb([str(path), "--stored", f"out={target}"]) == 0
    else:
        why = "is not an index: tied tensors have 808 bytes, over 100 times the others'"
        assert refused(path) == f"{path}/tensors.json: {why}"
        with pytest.raises(CheckpointError, match=why):
            use_verb([str(path), "--stored", f"out={target}"])
    assert target.exists() == (num_tied == 100)


@pytest.mark.parametrize("length", [10**15, 10**12])
def test_audit_of_more_than_can_be_computed_soon_asks_for_a_flag(length, tmp_path):
    facts = {**OF_RUN, "data": {"train": {"length": length, "size": length}}}
    publish(tmp_path / "run/checkpoints", **facts)
    line = f"1 steps of 20 of {length:,} examples take long to compute; give --long: "
    with within(20), pytest.raises(ConfigError, match=line):
        audit([str(tmp_path / "run")])


def test_lines_that_no_run_writes_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = '{"step": 3, "train/loss": 0.5}'
    steps = ("true", "-1", "1.0", "9" * 5000, str(2**53), "null", "[]", '"3"')
    bad = [f'{{"step": {step}}}' for step in steps]
    bad += ["[" * 10**5, '{"step": 3, "a": ' + "[" * 70 + "]" * 70 + "}", '{"step": 1, "step": 2}']
    bad += [r'{"step": 3, "a": "\ud800"}', "\0", '{"step": 3', '{"step": 3, "a": "' + "x" * 2**21]
    path.write_text("\n".join([good, *bad, good]) + "\n")
    assert [line for line, _ in rundir.read_entries(path)] == [good, good]
    os.truncate(path, 2**40)
    with pytest.raises(ConfigError, match=r"l: has 1,099,511,627,776 bytes, at most 536,870,912 "):
        list(rundir.read_entries(path))


def test_facts_of_the_end_have_their_types_or_are_left_out(tmp_path):
    facts = {"code": True, "reason": ["x"], "step": 5, "best": "1", "metrics": {"a": "x", "b": 1.5}}
    (tmp_path / "exit.json").write_text(json.dumps(facts))
    assert rundir.read_exit(tmp_path) == {"step": 5, "metrics": {"b": 1.5}}
    for text in ("[", "[]", "9" * 5000, " " * 2**21 + "{}"):
        (tmp_path / "exit.json").write_text(text)
        assert rundir.read_exit(tmp_path) == {}


def test_file_that_is_no_file_of_tensors_is_not_read_as_one(tmp_path):
    line = refused(publish(tmp_path, index=index_of(parts=[["training.pt", [0], [2]]])))
    assert line.startswith(f"{tmp_path / STEP / 'training.pt'}: ")


@pytest.mark.parametrize("missing", ["tensors.json", "training.pt"])
def test_checkpoint_without_a_file_that_every_run_writes_is_refused(missing, tmp_path):
    files = {SHARDS: tensor_file(), "training.pt": saved({}), "tensors.json": index_of()}
    del files[missing]
    line = refused(write(tmp_path, files))
    assert line == f"{STEP}: has no {missing}, so it is not a run's checkpoint"


# The manifest and the folder ----------------------------------------------------------------------


def with_file(name, **entry):
    full = {"rank": 0, "bytes": 2, "sha256": hashlib.sha256(b"ok").hexdigest(), **entry}
    return {"files": {name: full}}


MANIFESTS = {
    **{
        f"name {n!r}": with_file(n)
        for n in ["../x", "/etc/passwd", "..", ".", "", "a/b", "a\0b", "a\nb", "\x1b[31m", "\ud800"]
    },
    **{
        f"{n} bytes": with_file(SHARDS, bytes=n)
        for n in [-1, 2.0, True, None, "2", 10**18, 10**300]
    },
    "NaN bytes": with_file(SHARDS, bytes=float("nan")),
    "infinitely many bytes": with_file(SHARDS, bytes=float("inf")),
    "digest that is a number": with_file(SHARDS, sha256=5),
    "files in a list": {"files": [1]},
    "entry that is a list": {"files": {SHARDS: [2]}},
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
}


OF_RUN = {
    **{
        "run": "a",
        "strategy": "ddp",
        "world_size": 2,
        "ledger": "c",
        "machine": {},
        "code": {},
        "sessions": [[0, 2]],
        "changes": {},
        "metrics": {"a": None},
        "frozen": {"a": ["float32", [2, 3], 5]},
    },
    **{
        "replaced": {"0/3": 4},
        "config": {"data.global_batch": 20, "run.seed": 0},
        "data": {"train": {"length": 200, "size": 200}},
    },
}
NOT_OF_RUN = [
    *({name: None} for name in OF_RUN),
    *({"world_size": value} for value in (0, -1, [1], True)),
    *(
        {"replaced": value}
        for value in ([1], {"x": 1}, {"0/200": 1}, {"0/3": 200}, {"0/3": -1}, {"0/3": "4"})
    ),
    *(
        {"frozen": {"a": value}}
        for value in (
            *(5, [], ["float32", [2]], ["os", [2], 5], ["float32", 2, 5], ["float32", [-1], 5]),
            *(["float32", ["2"], 5], ["float32", [2], "5"], ["float32", [2], 2**63]),
        )
    ),
    *({"sessions": value} for value in ([], [1, 2], [[1]], [[0, "2"]], "ab")),
    *(
        {"data": value}
        for value in (
            *({}, {"train": 5}, {"train": {"length": 0}}, {"train": {"length": "a"}}),
            *({"train": {"length": 200}}, {"train": {"length": 200, "size": 0}}),
        )
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
    for origin in (resume.Origin(checkpoint=path), resume.Origin(source=path.parents[1])):
        with pytest.raises(CheckpointError, match=r": its manifest does not describe a run$"):
            read_on_all_ranks(ALONE, partial(resume.find_checkpoints, origin))
    assert show_verb([str(path)]) == 1


def test_names_in_a_manifest_reach_no_terminal_and_are_no_markup(tmp_path, capfd):
    named = {"\x1b[31mRED": 1.0, "[/b]": None}
    assert (
        show_verb([str(publish(tmp_path, **{**OF_RUN, "metrics": named, "strategy": "[/foo]"}))])
        == 0
    )
    said = capfd.readouterr().out
    assert "\x1b" not in said and "[/foo]" in said and "[/b]" in said


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
def test_manifest_that_is_not_the_expected_json_is_refused(raw, tmp_path):

    assert refused(publish(tmp_path, raw=raw)).endswith(
        "manifest.json: cannot be read as a manifest"
    )


def test_manifest_that_is_too_long_is_not_read(tmp_path):
    path = publish(tmp_path)
    os.truncate(path / "manifest.json", plain_files.MOST_OF_JSON + 1)
    why = "has 67,108,865 bytes, at most 67,108,864 are read"
    assert refused(path) == f"{path}/manifest.json: {why}"


@pytest.mark.parametrize("name", ["manifest.json", SHARDS, "tensors.json", "training.pt"])
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
    assert checkpoint.find_newest(root, checkpoint.load) == (None, [])


def test_file_larger_than_declared_is_refused_unread(tmp_path):
    path = publish(tmp_path)
    os.truncate(path / SHARDS, 2**42)  # sparse: reading it would exhaust the memory
    assert re.search(rf"{SHARDS}: 4398046511104 bytes, \d+ were written$", refused(path))


# Archives -----------------------------------------------------------------------------------------


def archive(*members):
    """Build a tar.gz of members (name, type, data or link target)."""
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


def test_expected_name_under_an_escaping_path_is_written_inside_the_folder(tmp_path):
    with serving(archive(*[(f"../../{name}", kind, data) for name, kind, data in GOOD])) as (
        url,
        _,
    ):
        download.fetch(url, str(tmp_path / "a/b/root"), SHA256, KEY)
    assert content(tmp_path / "a/b/root") == FILES and names(tmp_path) == ["a"]


def sparse():
    """Build a sparse member: eight bytes in the stream, declared as a file of 2^40 bytes."""
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
        "its two.bin has SHA-256",
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
