"""Buckets with other runs and other data in them, emptied, damaged, or without some rights."""

import json
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from faults.common import Shape
from harness import CONF, fit_on, on_ranks, wait_for
from harness.fences import open_fence

from trainer.core.config import copies
from trainer.core.config.compose import load_config
from trainer.core.config.stores import Events, NotThereError, StoreError, address_problem
from trainer.places.bucket import Bucket, DeniedError, _translated
from trainer.places.listing import read_listing
from trainer.places.mirror import BucketMirror

SHAPE = Shape(1, 1000)
WORDS = ["task=tiny", "run.steps=4", "checkpoint.every_steps=2", "checkpoint.keep_last=1"]
FOREIGN = (
    *("hf/checkpoints/model.bin", "checkpoints/old.pt", "0/data.bin", "000000/x", "5/y"),
    *("20261128/metrics.csv", "20261128/checkpoints/step-00000009/manifest.json", "config.json"),
    *("inner/config.json", "notes.txt", "000001/notes.txt", "000001/checkpoints/mine.bin"),
)


def files(folder):
    """Return the content of each file below a folder, by name."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_mirror_touches_nothing_that_its_run_has_not_written(tmp_path, command):
    """Neither another run below its prefix nor data; and they do not disturb it."""
    place = tmp_path / "bucket"
    for name in FOREIGN:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(b"{}")
    fit_on(1, tmp_path / "inner", *WORDS, f"checkpoint.mirror=file://{place}/inner/run")
    before = files(place)
    words = [*WORDS, f"checkpoint.mirror=file://{place}", "run.resume=auto"]
    for steps in (4, 8):  # the second one removes what the first has left
        assert fit_on(1, tmp_path / "outer", *words, f"run.steps={steps}")["step"] == steps
    after = files(place)
    assert {name: after.get(name) for name in before} == before
    assert [*after].count("000002/checkpoints/step-00000008/manifest.json") == 1
    assert not [name for name in after if "/step-00000004/" in name and name not in before]
    listed = json.loads(command(f"file://{place}/inner", "--json", verb="trainer.list").stdout)
    assert [(run["name"], run["steps"]) for run in listed["runs"]] == [
        (f"file://{place}/inner/run", "4")
    ]
    shown = command(f"file://{place}", verb="trainer.show")
    assert shown.returncode == 0, shown.stderr


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def watched_mirror(place, folder, told, step=0, **others):
    """Return a mirror of a folder in another one."""
    address = f"file://{place}"
    config = load_config(["task=tiny", "checkpoint.keep_best=0"], [CONF]).checkpoint
    for name, value in {"mirror": address, "mirror_timeout_s": 1.0, **others}.items():
        setattr(config, name, value)
    lost = []
    own = open_fence(address, step, step)
    return BucketMirror(config, own, folder, Events(told.append, lose=lost.append)), lost


@pytest.mark.parametrize("has_folder", [False, True], ids=["removed", "not mounted"])
def test_emptied_bucket_is_told_and_the_run_goes_on(has_folder, folder, tmp_path):
    place = tmp_path / "bucket"
    SHAPE.save(folder / "checkpoints", 1)

    def body():
        told = []
        copied, lost = watched_mirror(place, folder, told)
        assert copied.wait(60)
        shutil.rmtree(place)
        if has_folder:
            place.mkdir()
        SHAPE.save(folder / "checkpoints", 2)
        copied.look()
        wait_for(lambda: told)
        copied.close()
        return told, lost, [*place.rglob("*")] if has_folder else []

    ((told, lost, there),) = on_ranks(1, body)
    assert (lost, there) == ([], []), told
    assert told[0].startswith(f"warning: checkpoint.mirror=file://{place}: file://{place}")
    assert "the run goes on" in told[0] and "resume with run.resume from" in told[-1]
    if has_folder:
        assert "the lease of this run is gone" in told[0]


def test_checkpoint_that_vanished_is_there_again_at_the_end(folder, tmp_path):
    place = tmp_path / "bucket"
    SHAPE.save(folder / "checkpoints", 1)
    (folder / "config.json").write_text("{}")

    def body():
        told = []
        copied, _ = watched_mirror(place, folder, told)
        assert copied.wait(60)
        shutil.rmtree(place / "000001/checkpoints")
        (place / "000001/config.json").unlink()
        copied.close()
        return told, [*read_listing(Bucket(f"file://{place}")).checkpoints()]

    ((told, there),) = on_ranks(1, body)
    assert told == [f"mirrored: file://{place} has step 1"] and there == [1]
    assert (place / "000001/config.json").exists()


def test_damaged_manifest_in_a_bucket_is_named_and_later_steps_come_over(folder, tmp_path):
    place = tmp_path / "bucket"
    for step in (1, 2):
        SHAPE.save(folder / "checkpoints", step)

    def body():
        told = []
        copied, _ = watched_mirror(place, folder, told)
        copied.close()
        (manifest,) = place.glob("*/checkpoints/step-00000001/manifest.json")
        manifest.write_text("[]")
        SHAPE.save(folder / "checkpoints", 3)
        copied, lost = watched_mirror(place, folder, told, step=2)
        copied.close()
        return told, lost

    ((told, lost),) = on_ranks(1, body)
    name = f"file://{place}/000001/checkpoints/step-00000001/manifest.json"
    assert told[1] == f"warning: {name}: cannot be read as a manifest"
    assert (told[2:], lost) == ([f"mirrored: file://{place} has step 3"], [])


def test_login_that_may_not_remove_leaves_what_is_there(folder, tmp_path, monkeypatch):
    place = tmp_path / "bucket"

    def refuse(self, names):
        if names:
            raise DeniedError("refused")

    monkeypatch.setattr(Bucket, "remove", refuse)

    def body():
        told = []
        copied, lost = watched_mirror(place, folder, told, keep_last=1, mirror_timeout_s=60.0)
        for step in (1, 2, 3):
            SHAPE.save(folder / "checkpoints", step)
            copied.look()
            assert copied.wait(60)
        begun = time.monotonic()
        copied.close()
        return told, lost, time.monotonic() - begun

    ((told, lost, seconds),) = on_ranks(1, body)
    assert told[0] == "warning: refused; so old checkpoints stay there" and lost == []
    assert told[1:] == [f"mirrored: file://{place} has step 3"] and seconds < 30


def test_leases_and_addresses_of_others_are_one_line(tmp_path):
    for content in ('{"writers": []}', '{"writers": [[7, 0]]}', "[]"):
        (tmp_path / "000001").mkdir(exist_ok=True)
        (tmp_path / "000001/lease.json").write_text(content)
        with pytest.raises(StoreError, match=r"lease\.json: was not written by a run"):
            on_this_rank(lambda: read_listing(Bucket(f"file://{tmp_path}")))
    assert address_problem("s3://[::1/x").startswith("is no address (Invalid IPv6 URL)")
    for text, kind in {"<Code>NoSuchBucket</Code>": StoreError, "no key": NotThereError}.items():
        with pytest.raises(kind) as raised, _translated("s3://none/x"):
            raise FileNotFoundError(text)
        assert type(raised.value) is kind


def on_this_rank(body):
    """Raise in this process what a body raises in another one, where obstore may be used."""
    kinds = {kind.__name__: kind for kind in (StoreError, NotThereError)}

    def caught():
        try:
            body()
        except StoreError as error:
            return type(error).__name__, str(error)

    ((name, text),) = on_ranks(1, caught)
    raise kinds[name](text)


def test_copy_of_a_killed_command_in_the_temporary_folder_is_removed_by_the_next(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"{copies.COPY_PREFIX}{copies.socket.gethostname()}-x"
    own.mkdir()
    (own / copies.HELD).touch()
    (tmp_path / ".copy-of-a-user").mkdir()
    with pytest.raises(Exception, match="cannot be read"):
        copies.copy_of(f"file://{tmp_path}/none")
    assert not own.exists() and (tmp_path / ".copy-of-a-user").exists()


def test_errors_name_the_address_of_a_run_and_not_its_copy(monkeypatch):
    monkeypatch.setattr(copies, "_copies", {Path("/tmp/copy/first"): "s3://data/first"})
    line = "error: /tmp/copy/first/config.json: cannot be read"
    assert copies.with_addresses(line) == "error: s3://data/first/config.json: cannot be read"
