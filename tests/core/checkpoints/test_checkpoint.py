"""A checkpoint is a transaction: it exists completely or not at all, whenever the process dies or
the disk fails."""

import contextlib
import errno
import itertools
import json
import os
import random
import re
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from harness import stored
from harness.training import keep_rules

from trainer.base.durable_files import replace_file
from trainer.base.errors import CheckpointError, RunError
from trainer.base.plain_files import digest_json
from trainer.core.checkpoints import transaction as checkpoint
from trainer.core.checkpoints.tensor_files import TENSOR_KINDS
from trainer.core.strategy.tensor_shards import Shard

CPU = torch.device("cpu")
FILES = [
    *(f"{kind}-r0000{rank}.safetensors" for rank in (0, 1) for kind in ("model", "optimizer")),
    *("tensors.json", "training.pt"),
]
DIED = 9
PIECE = 600  # most bytes of one os.write, in the tests that die between two writes
CALLS = ("mkdir", "open", "write", "fsync", "close", "rename")


def content(step: int) -> dict:
    return {
        "model": {"weight": torch.arange(100.0) * step, "count": torch.tensor(step)},
        "optimizer": {"0/weight/momentum": torch.arange(100.0) - step},
        "ema": {},
        "buffer": {},
        "training": {"rows": {}, "seen": [step, None, 0.5]},
    }


def save(root: Path, step: int, metric: float | None = None, **more) -> Path:
    """Save a step as two ranks that have half of the weight each."""
    given = content(step)
    parts = []
    for rank in (0, 1):
        parts.append({kind: {} for kind in TENSOR_KINDS})
        for kind in TENSOR_KINDS:
            for name, tensor in given[kind].items():
                part = Shard.whole(tensor, rank == 0)
                if tensor.dim():
                    part = Shard(tensor[50 * rank :][:50], (100,), (50 * rank,), True)
                parts[rank][kind][name] = part
    facts = {"metrics": {"eval/loss": metric}, "config": {"run.seed": 3, "optim.lr": 0.1}}
    return stored.save(root, step, parts, given["training"], facts, **more)


def whole(loaded: checkpoint.CheckpointFiles | None) -> int:
    """Return the step of a checkpoint, after checking that its content is complete."""
    assert loaded is not None
    assert list(loaded) == FILES
    step = loaded.manifest["step"]
    stored.check_same_bits(stored.content_of(loaded), content(step))
    return step


def newest(root: Path) -> int:
    return whole(checkpoint.find_newest(root, checkpoint.load)[0])


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def flip(path: Path, position: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def edit(path: Path, **changes) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | changes))


# Death and failure --------------------------------------------------------------------------------


def lethal(call, count, at: int):
    def wrapped(*arguments, **options):
        if next(count) == at:
            os._exit(DIED)
        return call(*arguments, **options)

    return wrapped


def code_of_child_dying(root: Path, at: int) -> int:
    """Save step 2 in a child that dies before its `at`-th system call; return its exit code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    write, count = os.write, itertools.count(1)
    os.write = lambda descriptor, data: write(descriptor, data[:PIECE])
    for name in CALLS:
        setattr(os, name, lethal(getattr(os, name), count, at))
    try:
        save(root, 2)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def test_death_at_any_call_of_the_first_save_leaves_all_or_nothing(tmp_path):
    """`scripts/faults --only kill` kills later saves, which prune too, at calls of the kernel."""
    for at in itertools.count(1):
        root = tmp_path / str(at)
        code = code_of_child_dying(root, at)
        loaded, skipped = checkpoint.find_newest(root, checkpoint.load)
        assert not skipped and (loaded is None or whole(loaded) == 2)
        if code == 0:
            break
        assert code == DIED
    assert at > 20 and loaded is not None


@pytest.mark.parametrize("call", CALLS)
def test_failure_at_any_call_leaves_a_whole_checkpoint_and_no_staging(call, tmp_path):
    real = getattr(os, call)
    for at in itertools.count(1):
        root, calls = tmp_path / str(at), []
        save(root, 1)

        def failing(*arguments, calls=calls, at=at, **options):
            calls.append(arguments)
            if len(calls) == at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **options)

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(RunError):
            patch.setattr(os, call, failing)
            save(root, 2)
        assert names(root) in (["step-00000001"], ["step-00000001", "step-00000002"])
        assert newest(root) == len(names(root))
        if len(calls) < at:
            break
    assert at > 1 and newest(root) == 2


def test_full_disk_is_reported_and_the_next_save_succeeds(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    told = r"No space left on device while saving step 2; .* make room and resume"
    with monkeypatch.context() as patch, pytest.raises(RunError, match=told):
        patch.setattr(os, "write", full)
        save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001"] and newest(tmp_path) == 1
    save(tmp_path, 2)
    assert newest(tmp_path) == 2


def test_interrupt_within_a_save_leaves_no_staging(tmp_path, monkeypatch):
    real = os.fsync
    for at in range(3, 9):  # rank 0's calls; rank 1 makes the first two
        calls = itertools.count(1)

        def interrupted(descriptor, calls=calls, at=at):
            if next(calls) == at:
                raise KeyboardInterrupt
            real(descriptor)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "fsync", interrupted)
            save(tmp_path, 1)
        assert names(tmp_path) == []
    save(tmp_path, 1)
    assert newest(tmp_path) == 1


def test_short_write_is_continued(tmp_path, monkeypatch):
    real, sizes = os.write, []
    with monkeypatch.context() as patch:
        patch.setattr(
            os,
            "write",
            lambda descriptor, data: sizes.append(real(descriptor, data[:7])) or sizes[-1],
        )
        save(tmp_path, 1)
    assert len(sizes) > 100 and newest(tmp_path) == 1


def test_everything_is_on_the_disk_before_the_rename_and_the_rename_before_anything_goes(
    tmp_path, monkeypatch
):
    save(tmp_path, 1)
    done: list[tuple[str, str]] = []
    opened: dict[int, str] = {}

    def note(call, name, subject):
        def noted(*arguments, **options):
            result = call(*arguments, **options)
            done.append((name, subject(arguments, result)))
            return result

        return noted

    def name_of(arguments, result):
        opened[result] = Path(arguments[0]).name
        return opened[result]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", note(os.open, "open", name_of))
        patch.setattr(
            os, "fsync", note(os.fsync, "fsync", lambda arguments, _: opened[arguments[0]])
        )
        patch.setattr(
            os, "rename", note(os.rename, "rename", lambda arguments, _: Path(arguments[0]).name)
        )
        save(tmp_path, 2, keep_last=1)
    kept = [
        (name, "staging" if what.startswith(".staging") else what)
        for name, what in done
        if name != "open"
    ]
    files = ["manifest.json", "staging"]
    assert kept[: len(FILES)] == [("fsync", name) for name in (*FILES[2:4], *FILES[:2], *FILES[4:])]
    assert kept[len(FILES) :][:2] == [("fsync", name) for name in files]
    assert kept[len(FILES) + 2 :] == [
        ("rename", "staging"),
        ("fsync", tmp_path.name),
        ("rename", "step-00000001"),
    ]


def test_a_file_is_replaced_as_a_whole_and_the_old_one_keeps_its_content(tmp_path):
    path, old = tmp_path / "exit.json", tmp_path / "old"
    path.write_text("the whole old content")
    os.link(path, old)  # as for a reader that has it open
    replace_file(path, "new")
    assert (path.read_text(), old.read_text()) == ("new", "the whole old content")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["exit.json", "old"]


def test_existing_step_is_not_overwritten(tmp_path):
    path = save(tmp_path, 1)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(
        CheckpointError, match=r"step-00000001 already exists: a checkpoint is never overwritten$"
    ):
        checkpoint.stage(tmp_path, 1)
    assert stored.save(tmp_path, 1, [{}], content(5)["training"], {}) == path
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert names(tmp_path) == ["step-00000001"]


# Damage -------------------------------------------------------------------------------------------


def test_bit_flipped_anywhere_in_the_files_is_noticed_and_the_older_checkpoint_is_used(tmp_path):
    save(tmp_path, 1)
    path, seed = save(tmp_path, 2), random.randrange(10**6)
    chance = random.Random(seed)
    for _ in range(40):
        file = path / chance.choice(FILES)
        place = chance.randrange(file.stat().st_size), chance.randrange(8)
        flip(file, *place)
        loaded, skipped = checkpoint.find_newest(tmp_path, checkpoint.load)
        assert whole(loaded) == 1, f"seed {seed}: {file.name} at {place}"
        reason = f"{file}: its SHA-256 differs from the manifest's, so bits have changed"
        assert skipped == [f"skipped step-00000002: {reason}"]
        flip(file, *place)
    assert newest(tmp_path) == 2


@pytest.mark.slow
def test_bit_flipped_anywhere_in_the_manifest_is_noticed(tmp_path):
    path = save(tmp_path, 1, metric=0.25)
    manifest = path / "manifest.json"
    text, unnoticed = manifest.read_bytes(), []
    for position, bit in itertools.product(range(len(text)), range(8)):
        flip(manifest, position, bit)
        try:
            checkpoint.load(path)
            unnoticed.append(manifest.read_bytes()[max(0, position - 12) : position + 4])
        except CheckpointError:
            continue
        finally:
            manifest.write_bytes(text)
    assert not unnoticed, (
        f"{len(unnoticed)} of {8 * len(text)} bits, such as in {unnoticed[len(unnoticed) // 2]!r}"
    )


def exchange(path: Path) -> None:
    one, other = (path / name for name in FILES[1:4:2])
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def blank(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-200] + bytes(200))


def refit(path: Path, change: Callable[[dict], object]) -> None:
    """Change the files in a manifest, whose own digest fits."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest["files"])
    del manifest["sha256"]
    edit(path, **manifest, sha256=digest_json(manifest))


FIRST = FILES[0]
BITS = "its SHA-256 differs from the manifest's, so bits have changed"
HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "zeros": (lambda path: blank(path / FIRST), BITS),
    "longer": (lambda path: os.truncate(path / FIRST, 10_000), r"\d+ bytes, \d+ were written"),
    "exchanged": (exchange, BITS),
    "of another step": (
        lambda path: shutil.copy(path.with_name("step-00000001") / FIRST, path / FIRST),
        BITS,
    ),
    "size": (
        lambda path: refit(path, lambda files: files[FIRST].update(bytes=1)),
        r"\d+ bytes, 1 were written",
    ),
    "digest": (lambda path: refit(path, lambda files: files[FIRST].update(sha256="0" * 64)), BITS),
    "one more": (
        lambda path: refit(path, lambda files: files.update({"x.pt": dict(files[FIRST])})),
        "No such file or directory",
    ),
}


@pytest.mark.parametrize("harm", HARMS)
def test_files_that_a_manifest_does_not_describe_are_refused(harm, tmp_path):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    change, why = HARMS[harm]
    change(path)
    with pytest.raises(CheckpointError, match=f"{why}$"):
        checkpoint.load(path)
    assert newest(tmp_path) == 1


def test_a_fact_changed_in_the_manifest_is_noticed(tmp_path):
    manifest = save(tmp_path, 1, metric=0.25) / "manifest.json"
    text = manifest.read_text()
    assert text.count("0.25") == 1
    manifest.write_text(text.replace("0.25", "0.75"))
    why = "its SHA-256 differs from the one stored in it, so it has changed"
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(manifest))}: {why}$"):
        checkpoint.load(manifest.parent)


def test_a_writer_that_was_taken_over_while_it_wrote_publishes_nothing(tmp_path):
    save(tmp_path, 1)

    def check_owner():
        if list(tmp_path.glob(".staging-*/manifest.json")):
            raise CheckpointError("another process has taken over this run")

    with pytest.raises(CheckpointError, match="another process has taken over"):
        save(tmp_path, 2, check_owner=check_owner)
    assert newest(tmp_path) == 1 and not list(tmp_path.glob(".staging-*"))


def test_truncated_file_is_refused(tmp_path):
    for step, name in enumerate(FILES, 1):
        file = save(tmp_path, step) / name
        size = file.stat().st_size
        os.truncate(file, size - 1)
        said = rf"{re.escape(name)}: {size - 1} bytes, {size} were written$"
        with pytest.raises(CheckpointError, match=said):
            checkpoint.load(file.parent)


def test_missing_file_is_refused(tmp_path):
    for step, name in enumerate(FILES, 1):
        path = save(tmp_path, step)
        (path / name).unlink()
        said = rf"{re.escape(name)}: No such file or directory$"
        with pytest.raises(CheckpointError, match=said):
            checkpoint.load(path)
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json: No such file or directory$"):
        checkpoint.load(path)


@pytest.mark.parametrize("length", [0, 1, 100])
def test_truncated_manifest_is_refused(length, tmp_path):
    path = save(tmp_path, 1)
    os.truncate(path / "manifest.json", length)
    with pytest.raises(CheckpointError, match=r"manifest\.json: cannot be read as a manifest$"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    "text", ["[]", '"files"', "null", '{"files": []}', '{"format": 2}', '{"files": {"a": null}}']
)
def test_manifest_of_another_form_is_refused(text, tmp_path):
    path = save(tmp_path, 1)
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json: cannot be read as a manifest$"):
        checkpoint.load(path)


@pytest.mark.parametrize("step", [2, "1", None])
def test_manifest_of_another_step_is_refused(step, tmp_path):
    path = save(tmp_path, 1)
    edit(path, step=step)
    with pytest.raises(
        CheckpointError, match=r"manifest\.json: does not belong to this checkpoint$"
    ):
        checkpoint.load(path)


def test_checkpoint_under_another_step_is_refused(tmp_path):
    path = save(tmp_path, 1).rename(tmp_path / "step-00000002")
    with pytest.raises(
        CheckpointError, match=r"manifest\.json: does not belong to this checkpoint$"
    ):
        checkpoint.load(path)


@pytest.mark.parametrize(
    "name", ["../step-00000001/training.pt", "/etc/hostname", "a/b", "a/", "."]
)
def test_file_name_that_leaves_the_checkpoint_is_refused(name, tmp_path):
    path = save(tmp_path, 1)
    edit(path, files={name: {"bytes": 1, "sha256": ""}})
    with pytest.raises(
        CheckpointError, match=r"manifest\.json: does not belong to this checkpoint$"
    ):
        checkpoint.load(path)


@pytest.mark.parametrize("number", [2, None])
def test_other_format_is_refused(number, tmp_path):
    path = save(tmp_path, 1)
    edit(path, format=number)
    with pytest.raises(
        CheckpointError,
        match=rf"step-00000001: has format {number}, this version reads format 4$",
    ):
        checkpoint.load(path)


def test_every_newer_checkpoint_that_is_damaged_is_named(tmp_path):
    paths = [save(tmp_path, step) for step in (1, 2, 3)]
    os.truncate(paths[1] / "model-r00001.safetensors", 0)
    shutil.rmtree(paths[2])
    paths[2].mkdir()
    loaded, skipped = checkpoint.find_newest(tmp_path, checkpoint.load)
    assert whole(loaded) == 1
    assert [line.split(":")[0] for line in skipped] == [
        "skipped step-00000003",
        "skipped step-00000002",
    ]
    assert checkpoint.newest_manifest(tmp_path)["step"] == 2


def test_where_none_is_valid_none_is_loaded(tmp_path):
    assert checkpoint.find_newest(tmp_path / "absent", checkpoint.load) == (None, [])
    (save(tmp_path, 1) / "manifest.json").unlink()
    loaded, skipped = checkpoint.find_newest(tmp_path, checkpoint.load)
    assert loaded is None and len(skipped) == 1


def test_newest_is_the_largest_step_not_the_last_by_name(tmp_path):
    for step in (99_999_999, 100_000_000, 5):
        save(tmp_path, step)
    assert (
        list(checkpoint.steps(tmp_path)) == [5, 99_999_999, 100_000_000]
        and newest(tmp_path) == 100_000_000
    )


@pytest.mark.parametrize(
    "value", [numpy.float64(1.0), numpy.zeros(2), Path("/"), {1.5: {"a": [object()]}}]
)
def test_value_that_could_not_be_loaded_is_not_saved(value, tmp_path):
    with pytest.raises(
        CheckpointError,
        match=r"^training.pt.* is a \w+: a checkpoint holds tensors and plain values",
    ):
        stored.save(tmp_path, 1, [{}], {"value": value}, {})
    assert names(tmp_path) == []


# Keeping and clearing -----------------------------------------------------------------------------


def kept(root: Path, keep_last: int, keep_best: int, mode: str) -> list[int]:
    for step, metric in enumerate([3.0, 1.0, float("nan"), 2.0, None, 5.0, 4.0], 1):
        save(root, step, metric)
    checkpoint.prune(root, keep_rules(keep_last, keep_best, mode), set())
    assert len(names(root)) == len(checkpoint.steps(root))
    return list(checkpoint.steps(root))


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "mode", "expected"),
    [
        (2, 0, "min", [6, 7]),
        (1, 1, "min", [2, 7]),
        (1, 2, "min", [2, 4, 7]),
        (1, 1, "max", [6, 7]),
        (1, 3, "max", [1, 6, 7]),
        (1, 9, "min", [1, 2, 4, 6, 7]),
        (9, 0, "min", [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_newest_and_best_are_kept_and_nan_is_never_best(
    keep_last, keep_best, mode, expected, tmp_path
):
    assert kept(tmp_path, keep_last, keep_best, mode) == expected


def test_checkpoint_without_a_readable_manifest_replaces_none(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, metric=step)
    for damaged in (1, 4):
        (tmp_path / f"step-{damaged:08d}" / "manifest.json").write_text("{")
    checkpoint.prune(tmp_path, keep_rules(1, 1), set())
    assert list(checkpoint.steps(tmp_path)) == [1, 2, 3, 4]
    checkpoint.prune(tmp_path, keep_rules(1, 0), set())
    assert list(checkpoint.steps(tmp_path)) == [1, 3, 4]


def test_sweep_removes_leftovers_and_nothing_else(tmp_path):
    save(tmp_path, 1)
    for name in (
        ".staging-00000002-ab",
        ".trash-step-00000000-cd",
        "invalid-step-00000003-ef",
        "notes",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / FILES[0]).write_bytes(b"half")
    assert newest(tmp_path) == 1
    checkpoint.sweep(tmp_path)
    assert names(tmp_path) == ["invalid-step-00000003-ef", "notes", "step-00000001"]


def test_checkpoint_set_aside_is_kept_and_frees_its_step(tmp_path):
    aside = checkpoint.set_aside(save(tmp_path, 1))
    assert aside.name.startswith("invalid-step-00000001-") and (aside / FILES[0]).is_file()
    save(tmp_path, 1)
    assert list(checkpoint.steps(tmp_path)) == [1]


def test_manifest_that_could_not_be_read_again_is_refused_before_it_is_published(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpoint, "MOST_OF_JSON", 500)
    replaced = {f"0/{index}": index + 1 for index in range(100)}
    with pytest.raises(CheckpointError, match="repair or remove the 100 examples"):
        stored.save(tmp_path, 1, [{}], {}, {"replaced": replaced})
    assert not checkpoint.steps(tmp_path) and names(tmp_path) == []
