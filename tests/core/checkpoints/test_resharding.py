"""A checkpoint of any layout, loaded in any other: the same bits of weights, averages and state."""

import json

import pytest
import torch
from harness import check_equal_bits, fit_on, newest, slow_but
from harness.stored import check_same_bits, content_of

from trainer import ConfigError
from trainer.core.checkpoints.tensor_files import INDEX

LAYOUTS = {
    "single": (1, ["strategy=single"]),
    "ddp x 2": (2, ["strategy=ddp"]),
    "exact x 2": (2, ["strategy=exact"]),
    "zero1 x 2": (2, ["strategy=zero1"]),
    "fsdp x 2": (2, ["strategy=fsdp"]),
    "fsdp x 3": (3, ["strategy=fsdp"]),
    "fsdp x 4": (4, ["strategy=fsdp"]),
    "hsdp 2 x 2": (4, ["strategy=hsdp"]),
}
TASK = [
    *("task=sharded", "task.options.muon=true", "strategy.precision=fp32", "run.ema_decay=0.9"),
    *("task.options.norm=true", "run.norm_rows=null", "data.micro_batch=11", "run.steps=3"),
]
MESHES = {
    "single": (1, ["strategy=single"]),
    "ddp x 2": (2, ["strategy=ddp"]),
    "fsdp x 3": (3, ["strategy=fsdp"]),
    "tp 2": (2, ["strategy=tp"]),
    "cp 2": (2, ["strategy=cp"]),
    "pp 2": (2, ["strategy=pp"]),
    "pp 3": (3, ["strategy.mesh.pipeline=3"]),
    "fsdp 2 x tp 2": (4, ["strategy=fsdp_tp"]),
    "fsdp 2 x cp 2": (4, ["strategy.mesh.shard=2", "strategy.mesh.context=2"]),
    "pp 2 x tp 2": (4, ["strategy.mesh.pipeline=2", "strategy.mesh.tensor=2"]),
    "pp 2 x fsdp 2": (4, ["strategy=pp_fsdp"]),
}
OF_MESHES = [
    *("task=meshed", "task.options.muon=true", "strategy.precision=fp32", "run.ema_decay=0.9"),
    *("data.micro_batch=11", "run.steps=3"),
]


def ring_of(names):
    return list(zip(names, names[1:] + names[:1], strict=True))


NAMES, PLACES = list(LAYOUTS), list(MESHES)
RING = ring_of(NAMES)
EVERY = [(a, b) for a in NAMES for b in NAMES if a != b and (a, b) not in RING]
EACH = [(a, b) for a in PLACES for b in PLACES if a != b]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that trains three steps in a layout, once, and returns its checkpoint."""
    known = {}

    def train(name, layouts=LAYOUTS, task=TASK):
        key = (name, task[0])
        if key not in known:
            ranks, words = layouts[name]
            folder = tmp_path_factory.mktemp("saved")
            known[key] = newest(fit_on(ranks, folder, *task, *words)["directory"])
        return known[key]

    return train


def check_loaded(saved, source, target, folder, layouts=LAYOUTS, task=TASK):
    ranks, words = layouts[target]
    before = saved(source, layouts, task)
    words = [*task, *words, f"run.resume={before.path}", "run.name=other", f"run.dir={folder}"]
    after = newest(fit_on(ranks, folder, *words)["directory"])
    old, new = content_of(before), content_of(after)
    for kind in ("model", "optimizer", "ema"):
        assert old[kind], f"{kind}: nothing was compared"
        check_same_bits(dict(sorted(old[kind].items())), dict(sorted(new[kind].items())), kind)
    check_same_bits(old["training"]["optimizers"], new["training"]["optimizers"], "optimizers")


@pytest.mark.parametrize("source, target", slow_but(RING, ("fsdp x 2", "fsdp x 3")))
def test_a_checkpoint_has_the_same_bits_in_another_layout(source, target, saved, tmp_path):
    check_loaded(saved, source, target, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("source, target", EVERY)
def test_a_checkpoint_has_the_same_bits_in_every_layout(source, target, saved, tmp_path):
    check_loaded(saved, source, target, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("source, target", EACH)
def test_a_checkpoint_has_the_same_bits_on_every_mesh(source, target, saved, tmp_path):
    check_loaded(saved, source, target, tmp_path, MESHES, OF_MESHES)


def test_each_rank_writes_its_part_and_the_index_covers_every_element(saved):
    loaded = saved("fsdp x 3")
    ranks = {entry["rank"] for entry in loaded.manifest["files"].values()}
    assert ranks == {0, 1, 2} and loaded.manifest["format"] == 4
    index = json.loads(loaded[INDEX])
    sizes = {name: len(entry["parts"]) for name, entry in index["model"].items()}
    assert sizes["embed.weight"] == 3 and sizes["few"] == 2 and sizes["temperature"] == 1
    assert index["model"]["head.weight"]["same_as"] == "embed.weight"  # written once
    whole = saved("ddp x 2")
    assert {entry["rank"] for entry in whole.manifest["files"].values()} == {0}


def check_resumed(ranks, words, folder):
    """Check that a run in two parts has the bits of one that is not interrupted."""
    straight = fit_on(ranks, folder / "straight", *words)
    fit_on(ranks, folder / "parts", *words, "run.steps=13")
    resumed = fit_on(ranks, folder / "parts", *words, "run.resume=auto")
    check_equal_bits(straight, resumed)
    assert straight["losses"][20] == resumed["losses"][20]


@pytest.mark.slow
@pytest.mark.parametrize("strategy, ranks", [("fsdp", 2), ("hsdp", 4)])
def test_a_resume_in_the_same_layout_has_the_bits_of_an_undisturbed_run(strategy, ranks, tmp_path):
    words = [
        *("task=sharded", f"strategy={strategy}", "strategy.precision=fp32", "optim=adamw"),
        *("optim.lr=0.01", "run.ema_decay=0.9", "checkpoint.every_steps=7"),
        *("task.options.dropout=0.2", "data.micro_batch=4"),
    ]
    check_resumed(ranks, words, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp 2", "pp 3", "fsdp 2 x cp 2"])
def test_a_resume_on_the_same_mesh_has_the_bits_of_an_undisturbed_run(mesh, tmp_path):
    ranks, layout = MESHES[mesh]
    words = [
        *("task=meshed", *layout, "strategy.precision=fp32", "optim=adamw", "optim.lr=0.01"),
        *("run.ema_decay=0.9", "checkpoint.every_steps=7", "task.options.dropout=0.2"),
        "data.micro_batch=4",
    ]
    check_resumed(ranks, words, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp 2 x tp 2", "pp 2 x tp 2"])
def test_rank_0_can_write_a_mesh(mesh, saved, tmp_path):
    ranks, words = MESHES[mesh]
    apart = fit_on(ranks, tmp_path, *OF_MESHES, *words, "checkpoint.sharded=false")
    loaded = newest(apart["directory"])
    assert {entry["rank"] for entry in loaded.manifest["files"].values()} == {0}
    old, new = content_of(saved(mesh, MESHES, OF_MESHES)), content_of(loaded)
    for kind in ("model", "optimizer", "ema"):
        check_same_bits(dict(sorted(old[kind].items())), dict(sorted(new[kind].items())), kind)


@pytest.mark.slow
def test_without_a_shared_disk_rank_0_writes_everything(saved, tmp_path):
    ranks, words = LAYOUTS["fsdp x 3"]
    apart = fit_on(ranks, tmp_path, *TASK, *words, "checkpoint.sharded=false")
    loaded = newest(apart["directory"])
    assert {entry["rank"] for entry in loaded.manifest["files"].values()} == {0}
    old, new = content_of(saved("fsdp x 3")), content_of(loaded)
    for kind in ("model", "optimizer", "ema"):
        check_same_bits(dict(sorted(old[kind].items())), dict(sorted(new[kind].items())), kind)


@pytest.mark.slow
def test_a_flipped_bit_in_any_shard_is_found_and_the_previous_checkpoint_loads(tmp_path):
    words = [*TASK, "strategy=fsdp", "checkpoint.every_steps=1", "run.steps=2"]
    directory = fit_on(2, tmp_path, *words)["directory"]
    last = directory / "checkpoints/step-00000002"
    files = sorted(path for path in last.iterdir() if path.suffix == ".safetensors")
    assert len(files) == 6
    for file in files:
        good = file.read_bytes()
        bad = bytearray(good)
        bad[len(bad) // 2] ^= 16
        file.write_bytes(bad)
        with pytest.raises(AssertionError, match=f"{file.name}: its SHA-256 differs") as error:
            fit_on(3, tmp_path, *words[:-1], f"run.resume={last}", "run.steps=3", "run.name=other")
        assert ConfigError.__name__ in str(error.value) or "CheckpointError" in str(error.value)
        file.write_bytes(good)
    bad = bytearray(files[-1].read_bytes())
    bad[-1] ^= 1
    files[-1].write_bytes(bad)
    resumed = fit_on(2, tmp_path, *words, "run.resume=auto")
    assert list(resumed["losses"])[-1] == 2 and resumed["step"] == 2
    assert torch.isfinite(torch.tensor(list(resumed["losses"].values()))).all()
