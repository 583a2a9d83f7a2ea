"""Files of tensors and their index: any division of a tensor is written, checked and read in any
parts."""

import itertools
import json
import math
import os
import random

import pytest
import safetensors
import torch
import torch.distributed as dist
from harness import CONF, on_ranks, stored
from harness.training import keep_rules
from harness.verbs import use_verb
from safetensors.torch import load_file

from trainer import CheckpointError, ConfigError, RunError, load_config
from trainer.core.checkpoints import tensor_files, transaction
from trainer.core.checkpoints.disk import Disk
from trainer.core.checkpoints.reading import FileTensors, read_on_all_ranks
from trainer.core.checkpoints.saver import Mail, Publisher, Snapshot
from trainer.core.checkpoints.tensor_files import (
    DTYPES,
    check_index,
    is_covered,
    merge,
    write_shards,
)
from trainer.core.checkpoints.transaction import CheckpointFiles
from trainer.core.distributed.group import process_group
from trainer.core.distributed.world import World
from trainer.core.strategy.tensor_shards import Shard, gather, read_whole, slices

OF_RUN = {
    **{
        "run": "a",
        "strategy": "ddp",
        "world_size": 2,
        "ledger": "c",
        "sessions": [[0, 2]],
        "changes": {},
    },
    **{"machine": {}, "code": {}},
    **{"replaced": {}, "frozen": {}, "metrics": {}},
    **{"data": {"train": {"length": 200, "size": 200}}},
    "config": {"data.global_batch": 20, "run.seed": 0},
}


@pytest.fixture
def chance():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def parts_of(length, chance, most=3):
    """Return (offset, size) of a random division of an axis; parts may be empty."""
    cuts = sorted(chance.randrange(length + 1) for _ in range(chance.randrange(most)))
    return [(a, b - a) for a, b in itertools.pairwise([0, *cuts, length])]


def grid_of(shape, chance):
    """Return the boxes of a random uneven grid."""
    axes = itertools.product(*(parts_of(length, chance) for length in shape))
    return [tuple(zip(*box, strict=True)) or ((), ()) for box in axes]


def shape_of(chance, least=0):
    return tuple(chance.randrange(least, 7) for _ in range(chance.randrange(5)))


def filled(shape):
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)


def whole(tensor):
    return Shard.whole(tensor, is_written=True)


def written(folder, *parts):
    """Write the shards of each rank; return the index as it is read again."""
    folder.mkdir(parents=True, exist_ok=True)
    done = [write_shards(folder, rank, shards) for rank, shards in enumerate(parts)]
    files = {name: entry for entries, _ in done for name, entry in entries.items()}
    return check_index(json.loads(json.dumps(merge(index for _, index in done))), files)


def read_back(folder, *parts):
    """Write the shards of each rank; return the tensors of the kind model as they are read."""
    return read_whole(FileTensors(folder, written(folder, *parts)["model"]))


# Boxes --------------------------------------------------------------------------------------------


def test_boxes_of_an_uneven_grid_cover_a_tensor_once(chance):
    for _ in range(300):
        shape = shape_of(chance, least=1)
        boxes = grid_of(shape, chance)
        chance.shuffle(boxes)
        assert is_covered(shape, boxes), (shape, boxes)


def test_missing_repeated_or_moved_box_is_noticed(chance):
    for _ in range(300):
        shape = shape_of(chance, least=1)
        boxes = grid_of(shape, chance)
        chance.shuffle(boxes)
        (offset, size) = box = next(box for box in boxes if all(box[1]))
        others = [each for each in boxes if each != box]
        assert not is_covered(shape, others), (shape, box)
        assert not is_covered(shape, [*boxes, box]), (shape, box)
        for axis in range(len(shape)):
            moved = tuple(a + (n == axis) for n, a in enumerate(offset))
            larger = tuple(a + (n == axis) for n, a in enumerate(size))
            assert not is_covered(shape, [*others, (moved, size)]), (shape, box)
            assert not is_covered(shape, [*others, (offset, larger)]), (shape, box)


def test_slabs_may_be_divided_differently():
    boxes = [((0, 0), (2, 1)), ((0, 1), (2, 3)), ((2, 0), (3, 2)), ((2, 2), (3, 2))]
    assert is_covered((5, 4), boxes)
    assert not is_covered((5, 4), [*boxes[:3], ((2, 1), (3, 3))])


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)])
def test_tensor_without_elements_is_covered_by_any_boxes(shape):
    assert is_covered(shape, []) and is_covered(shape, [((0,) * len(shape), shape)] * 2)


def test_number_is_one_box():
    assert is_covered((), [((), ())])
    assert not is_covered((), []) and not is_covered((), [((), ())] * 2)


@pytest.mark.parametrize(
    ("first", "last"), [((0, 2), (3, 2)), ((0, 3), (2, 3)), ((0, 2), (2, 2)), ((1, 2), (3, 2))]
)
def test_ranks_whose_parts_have_a_gap_or_overlap_publish_nothing(first, last, tmp_path):
    parts = []
    for offset, size in (first, last):
        shard = Shard(filled((5, 3))[offset : offset + size], (5, 3), (offset, 0), True)
        parts.append({"model": {"weight": shard}})
    with pytest.raises(CheckpointError, match=r"^weight: its parts do not cover it exactly once$"):
        stored.save(tmp_path, 1, parts, {}, {})
    assert list(tmp_path.iterdir()) == []


# What is written is read --------------------------------------------------------------------------


def values_of(dtype):
    """Return a tensor of 5 x 3 whose values include the extremes of its dtype."""
    if dtype == torch.bool:
        return torch.arange(15).reshape(5, 3) % 2 == 0
    if dtype.is_complex:
        return torch.randn(5, 3, dtype=dtype)
    if dtype.is_floating_point:
        special = torch.tensor([0.0, -0.0, math.nan, 1e30, -1e-30])
        return torch.cat([special, torch.randn(10)]).reshape(5, 3).to(dtype)
    limits = torch.iinfo(dtype)
    picked = [limits.min, limits.max, limits.max // 2, *range(12)]
    return torch.tensor(picked, dtype=dtype).reshape(5, 3)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_keeps_its_bits(name, tmp_path):
    value = values_of(DTYPES[name])
    given = {
        "flags": torch.ones(3, dtype=torch.bool),  # the next tensor would begin at an odd byte
        "double": torch.ones(3, dtype=torch.float64),
        **{"row": value[:1].clone(), "matrix": value, "number": value[2, 1].clone()},
        **{"empty": value[:0], "thin": value[:, :0]},
        **{"strided": value[::2, 1:], "transposed": value.T},
    }
    found = read_back(tmp_path, {"model": {key: whole(tensor) for key, tensor in given.items()}})
    assert list(found) == list(given)
    stored.check_same_bits(found, given)
    file = tmp_path / "model-r00000.safetensors"
    stored.check_same_bits(load_file(file), given)
    check_aligned(file)


def check_aligned(file):
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 8 == 0
    for name, entry in json.loads(data[8 : 8 + length]).items():
        assert entry["data_offsets"][0] % DTYPES[entry["dtype"]].itemsize == 0, name


def test_parameters_and_other_layouts_of_memory_keep_their_values(tmp_path):
    images = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    given = {
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "channels last": images,
        "expanded": torch.randn(1, 3).expand(4, 3),
        "view": torch.randn(10)[3:7],
    }
    found = read_back(tmp_path, {"model": {key: whole(t) for key, t in given.items()}})
    stored.check_same_bits(found, {key: t.detach().clone() for key, t in given.items()})


def test_dtype_that_safetensors_lacks_is_one_line_that_names_the_tensor(tmp_path):
    shards = {"model": {"angles": whole(torch.zeros(2, dtype=torch.complex128))}}
    with pytest.raises(CheckpointError) as error:
        stored.save(tmp_path, 1, [shards], {}, {})
    said = str(error.value)
    assert said.startswith("angles has dtype torch.complex128: must be one that safetensors has: ")
    assert "complex64" in said and "\n" not in said and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_copied", [False, True], ids=["direct", "from a private copy"])
def test_tied_tensors_are_written_once_and_read_under_both_names(is_copied, tmp_path):
    weight = filled((5, 3))
    parts = []
    for offset, size in ((0, 3), (3, 2)):
        part = Shard(weight[offset : offset + size], (5, 3), (offset, 0), True)
        shards = {"model": {"inner": part, "outer": part, "copy": whole(weight.clone())}}
        shards["model"]["copy"] = shards["model"]["copy"]._replace(is_written=offset == 0)
        parts.append(tensor_files.private_copy(shards) if is_copied else shards)
    index = written(tmp_path, *parts)["model"]
    assert index["outer"]["same_as"] == "inner" and "same_as" not in index["copy"]
    files = [load_file(tmp_path / f"model-r0000{rank}.safetensors") for rank in (0, 1)]
    assert [set(file) for file in files] == [{"inner", "copy"}, {"inner"}]
    source = FileTensors(tmp_path, index)
    stored.check_same_bits(read_whole(source), dict.fromkeys(("inner", "outer", "copy"), weight))
    assert torch.equal(source.read("outer", (2, 1), (2, 2)), weight[2:4, 1:3])


def test_tensor_without_elements_can_be_divided(tmp_path):
    parts = []
    for rank in (0, 1):
        thin = Shard(torch.zeros(3 - rank, 0), (5, 0), (3 * rank, 0), True)
        flat = Shard(torch.zeros(0, 2), (0, 2), (0, 0), True)
        parts.append({"model": {"thin": thin, "flat": flat}})
    found = read_back(tmp_path, *parts)
    assert (found["thin"].shape, found["flat"].shape) == ((5, 0), (0, 2))


def test_rank_without_a_part_writes_no_file(tmp_path):
    weight = Shard(filled((1, 3)), (1, 3), (0, 0), True)
    empty = Shard(filled((0, 3)), (1, 3), (1, 0), True)
    theirs = Shard(filled((1, 3)), (1, 3), (0, 0), False)  # another copy of rank 0's
    parts = [{"model": {"w": shard}} for shard in (weight, empty, theirs)]
    found = read_back(tmp_path, *parts)
    assert [path.name for path in tmp_path.iterdir()] == ["model-r00000.safetensors"]
    assert torch.equal(found["w"], weight.tensor)


def divided(given, chance):
    """Return the shards of some ranks: each tensor is divided in a random way, a box to a rank."""
    parts = []
    for name, tensor in given.items():
        boxes = grid_of(tensor.shape, chance)
        chance.shuffle(boxes)
        for rank, (offset, size) in enumerate(boxes):
            if rank == len(parts):
                parts.append({"model": {}})
            part = tensor[slices(offset, size)].clone()
            parts[rank]["model"][name] = Shard(part, tuple(tensor.shape), tuple(offset), True)
    return parts


def test_any_box_of_any_division_is_that_of_the_whole(chance, tmp_path):
    for number in range(20):
        given = {str(n): filled(shape_of(chance, least=n % 2)) for n in range(6)}
        folder = tmp_path / str(number)
        source = FileTensors(folder, written(folder, *divided(given, chance))["model"])
        assert source.shapes() == {name: tuple(tensor.shape) for name, tensor in given.items()}
        stored.check_same_bits(read_whole(source), given)
        for name, tensor in given.items():
            assert source.dtype(name) == torch.float64
            for _ in range(10):
                pairs = [parts_of(length, chance)[-1] for length in tensor.shape]
                offset, size = zip(*pairs, strict=True) if pairs else ((), ())
                found = source.read(name, offset, size)
                assert torch.equal(found, tensor[slices(offset, size)]), (name, offset, size)


# Reading ------------------------------------------------------------------------------------------


def test_each_file_is_opened_once_and_a_name_is_looked_up_without_reading(tmp_path, monkeypatch):
    given = {str(n): filled((8, 3)) for n in range(20)}
    parts = []
    for rank in (0, 1):
        own = {n: Shard(t[4 * rank :][:4], (8, 3), (4 * rank, 0), True) for n, t in given.items()}
        parts.append({"model": own})
    loaded = transaction.load(stored.save(tmp_path, 1, parts, {}, {}))
    opened, read = [], []
    real, real_read = safetensors.safe_open, transaction.read_sized
    monkeypatch.setattr(
        safetensors, "safe_open", lambda *given: opened.append(given[0].name) or real(*given)
    )
    monkeypatch.setattr(
        transaction, "read_sized", lambda *given: read.append(given[0].name) or real_read(*given)
    )
    stored.check_same_bits(stored.tensors_of(loaded), given)
    assert sorted(opened) == ["model-r00000.safetensors", "model-r00001.safetensors"]
    assert sorted(read) == ["tensors.json", "training.pt"]


def state(dtype=torch.float32):
    """Return the tensors of a small run by kind, and its plain values."""
    weight = torch.randn(6, 4).to(dtype)
    averages = {"a.weight": torch.randn(6, 4).to(dtype)}
    optimizer = {"0/a.weight/exp_avg": torch.randn(6, 4), "0/a.weight/step": torch.tensor(3.0)}
    model = {"a.weight": weight, "b.weight": weight, "count": torch.tensor(7)}
    groups = [{"names": ["a.weight"], "options": {"lr": 0.1}}]
    plain = {
        "optimizers": [{"class": "Adam", "state": {"a.weight": {"kept": 2}}, "groups": groups}],
        "rows": {"loss": torch.ones(1, 2)},
        "extra": {"a._extra_state": 5},
    }
    kinds = {"model": model, "optimizer": optimizer, "ema": averages, "buffer": {}}
    return {**kinds, "training": plain}


def halves(content, ranks=2):
    """Return the shards of some ranks that divide each matrix by rows."""
    parts = []
    places = [(kind, name) for kind in tensor_files.TENSOR_KINDS for name in content[kind]]
    for rank in range(ranks):
        parts.append({kind: {} for kind in tensor_files.TENSOR_KINDS})
        for kind, name in places:
            tensor = content[kind][name]
            shard = Shard.whole(tensor, rank == 0)
            if tensor.dim():
                size = -(-len(tensor) // ranks)
                part = tensor[size * rank :][:size]
                shard = Shard(part, tuple(tensor.shape), (min(size * rank, len(tensor)), 0), True)
            parts[rank][kind][name] = shard
    return parts


def in_group(ranks, body):
    config = load_config(["task=tiny"], [CONF]).dist

    def on_rank():
        with process_group(config, World.from_environment()) as group:
            return body(group)

    return on_ranks(ranks, on_rank)


@pytest.mark.parametrize("is_seen", [True, False], ids=["shared disk", "disk of rank 0"])
def test_every_rank_reads_the_same_tensors(is_seen, tmp_path):
    content = state(torch.bfloat16)
    root = tmp_path / "checkpoints"
    path = stored.save(root, 1, halves(content, 3), content["training"], OF_RUN)

    def body(group):
        if group.world.rank and not is_seen:
            path.with_name("elsewhere").mkdir(exist_ok=True)
            CheckpointFiles.read = classmethod(refuse)
        restored, skipped = read_on_all_ranks(group, lambda: ([path], True))
        found = restored.content
        boxes = {}
        for kind in tensor_files.TENSOR_KINDS:
            source = found.sources[kind]
            for name, shape in source.shapes().items():
                if kind == "optimizer" and (group.world.rank == 1 or name.endswith("step")):
                    source.skip(name)
                    continue
                rows = min(1, *shape) if shape else 0  # another box on each rank
                offset = (rows * group.world.rank, *(0 for _ in shape[1:]))[: len(shape)]
                size = (shape[0] - offset[0], *shape[1:]) if shape else ()
                expected = content[kind][name][slices(offset, size)]
                boxes[kind, name] = torch.equal(source.read(name, offset, size), expected)
        return boxes, found.training, skipped

    results = in_group(2, body)
    for boxes, training, skipped in results:
        assert all(boxes.values()) and skipped == []
        stored.check_same_bits(training, content["training"])
    assert [len(boxes) for boxes, _, _ in results] == [5, 4]


def refuse(kind, path):
    raise CheckpointError(f"{path}: No such file or directory")


def test_parts_of_all_ranks_are_gathered_on_rank_0(tmp_path):
    content = state()

    def body(group):
        own = halves(content, 3)[group.world.rank]
        return {kind: gather(shards, group) for kind, shards in own.items()}

    first, *others = in_group(3, body)
    for kind in tensor_files.TENSOR_KINDS:
        found = {name: shard.tensor for name, shard in first[kind].items()}
        stored.check_same_bits(dict(sorted(found.items())), dict(sorted(content[kind].items())))
        assert all(shard.is_written for shard in first[kind].values())
    assert others == [{kind: {} for kind in tensor_files.TENSOR_KINDS}] * 2


# Export -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_export_joins_the_files_of_all_ranks(ranks, tmp_path, capsys):
    content = state(torch.bfloat16)
    path = stored.save(tmp_path / "checkpoints", 4, halves(content, ranks), {}, OF_RUN)
    file = tmp_path / "all.safetensors"
    assert use_verb([str(path), "--stored", f"out={file}"]) == 0
    assert capsys.readouterr().out == f"{file}: 4 tensors of step 4\n"
    averages = {f"ema.{name}": tensor for name, tensor in content["ema"].items()}
    stored.check_same_bits(load_file(file), {**content["model"], **averages})
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata() == {"step": "4", "run": "a"}
    check_mode(file)


def check_mode(file):
    mask = os.umask(0)
    os.umask(mask)
    assert file.stat().st_mode & 0o777 == 0o666 & ~mask


def test_export_uses_the_newest_valid_checkpoint_of_a_run(tmp_path, capsys):
    content = state()
    for step in (1, 2):
        path = stored.save(tmp_path / "checkpoints", step, halves(content), {}, OF_RUN)
    (path / "optimizer-r00001.safetensors").unlink()
    file = tmp_path / "all.safetensors"
    assert use_verb([str(tmp_path), "--stored", f"out={file}"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("skipped step-00000002: ") and said[1].endswith("of step 1")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("taken", "already exists; give another name"),
        ("absent/x", "No such file or directory; give another path"),
        (
            "taken.safetensors/x",
            "cannot be written, {}/taken.safetensors is not a directory; give another name",
        ),
        ("full", "No space left on device; give another path"),
    ],
)
def test_export_that_cannot_be_written_is_one_line_and_leaves_no_file(
    name, line, tmp_path, monkeypatch
):
    path = stored.save(tmp_path / "checkpoints", 1, halves(state()), {}, OF_RUN)
    (tmp_path / "taken.safetensors").write_text("mine")
    target = tmp_path / name
    real = os.write

    def full(descriptor, data):
        if len(data) == 8:
            return real(descriptor, data)
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch, pytest.raises(ConfigError) as error:
        if name == "full":
            patch.setattr(os, "write", full)
        use_verb([str(path), "--stored", f"out={target}.safetensors"])
    assert str(error.value) == f"out={target}.safetensors: {line.format(tmp_path)}"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoints", "taken.safetensors"]
    assert (tmp_path / "taken.safetensors").read_text() == "mine"


def test_a_rank_that_is_gone_before_its_file_publishes_nothing(tmp_path):
    keep = keep_rules(9, 0)
    mail = Mail(dist.HashStore(), 0, [0, 1], limit_s=0.1)
    disk = Disk(tmp_path, keep, print)
    saver = Publisher(
        tmp_path, keep, disk, lambda: None, lambda: None, lambda step, path: None, mail
    )
    half = Shard(torch.ones(2), (4,), (0,), True)
    staging = saver.stage(1)
    with pytest.raises(RunError, match=r"^rank 1 has not written its part in 0\.1 s; raise dist"):
        saver.save(staging, Snapshot(1, {"model": {"weight": half}}, {}, {}, None), False)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    saver.close()
