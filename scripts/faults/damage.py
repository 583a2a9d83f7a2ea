"""Damaged checkpoints: each is noticed before a tensor is built from it, and the newest valid
checkpoint is found."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.internals import checkpoint

from faults.common import Row, Shape, folder, random_of
from trainer.base.errors import CheckpointError
from trainer.base.plain_files import digest_json

SHAPE, NEWEST, PAGE = Shape(2, 6000), 3, 4096
SHARDS = ("model-r00000.safetensors", "model-r00001.safetensors")
FILES = (*SHARDS, "training.pt", "tensors.json", checkpoint.MANIFEST)


def _any(path: Path, chance: random.Random) -> Path:
    return path / chance.choice(FILES)


def _flip(path: Path, chance: random.Random) -> None:
    file = _any(path, chance)
    data = bytearray(file.read_bytes())
    for position in chance.sample(range(len(data)), chance.choice([1, 1, 1, 2, 16])):
        data[position] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def _zero_page(path: Path, chance: random.Random) -> None:
    file = _any(path, chance)
    data = bytearray(file.read_bytes())
    pages = [at for at in range(0, len(data), PAGE) if any(data[at : at + PAGE])]
    at = chance.choice(pages)
    data[at : at + PAGE] = bytes(len(data[at : at + PAGE]))
    file.write_bytes(data)


def _truncate(path: Path, chance: random.Random) -> None:
    file = _any(path, chance)
    os.truncate(
        file, chance.choice([0, 1, chance.randrange(file.stat().st_size), file.stat().st_size - 1])
    )


def _lengthen(path: Path, chance: random.Random) -> None:
    with open(_any(path, chance), "ab") as file:
        file.write(chance.choice([b"\0", b"}", bytes(PAGE)]))


def _remove(path: Path, chance: random.Random) -> None:
    for name in chance.sample(FILES, chance.randrange(1, 4)):
        (path / name).unlink()


def _swap(path: Path, chance: random.Random) -> None:
    one, other = (path / name for name in chance.sample(FILES[:-1], 2))
    between = path / "between"
    one.rename(between)
    other.rename(one)
    between.rename(other)


def _from_another_step(path: Path, chance: random.Random) -> None:
    name = chance.choice([name for name in FILES if name != "tensors.json"])  # alike in each step
    shutil.copy(path.with_name("step-00000001") / name, path / name)


def _empty(path: Path, chance: random.Random) -> None:
    shutil.rmtree(path)
    path.mkdir()


def _link(path: Path, chance: random.Random) -> None:
    file = _any(path, chance)
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def _edit(path: Path, chance: random.Random) -> None:
    """Change a value of the manifest and keep its old SHA-256."""
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    key = chance.choice(["step", "format", "metrics", "config", "files", "sha256", "more"])
    others: dict[str, Any] = {
        "step": 4,
        "format": 1,
        "metrics": {"eval/loss": 0.0},
        "config": {},
        "files": {},
    }
    manifest[key] = others.get(key, "0" * 64)
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))


def _refit(path: Path, chance: random.Random) -> None:
    """Make sizes, digests or names of files in the manifest wrong, and recompute its own
    SHA-256."""
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    del manifest["sha256"]
    files, name = manifest["files"], chance.choice(FILES[:-1])
    kind = chance.choice(["bytes", "sha256", "exchanged", "more"])
    if kind == "bytes":
        files[name]["bytes"] += chance.choice([-1, 1, PAGE])
    elif kind == "sha256":
        digest = files[name]["sha256"]
        files[name]["sha256"] = digest[1:] + ("0" if digest[0] != "0" else "1")
    elif kind == "exchanged":
        one, other = chance.sample(FILES[:-1], 2)
        files[one], files[other] = files[other], files[one]
    else:
        files["other.pt"] = dict(files[name])
    manifest["sha256"] = digest_json(manifest)
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))


KINDS: tuple[Callable[[Path, random.Random], None], ...] = (
    *(_flip, _flip, _flip, _zero_page, _zero_page, _truncate, _truncate, _lengthen, _remove, _swap),
    *(_from_another_step, _empty, _link, _edit, _refit, _refit),
)


def damage(amount: int, seed: int) -> Row:
    """Damage the newest checkpoint, or the newest two, of three."""
    row, chance, kinds = (
        Row("damaged checkpoint, noticed before the load", amount),
        random_of(seed),
        Counter[str](),
    )
    with folder() as base:
        for step in range(1, NEWEST + 1):
            SHAPE.save(base / "template", step)
        for number in range(amount):
            root = base / "root"
            shutil.copytree(base / "template", root)
            damaged, kind = (
                range(NEWEST, chance.choice([NEWEST - 1, NEWEST - 1, NEWEST - 2]), -1),
                chance.choice(KINDS),
            )
            for step in damaged:
                kind(root / f"step-{step:08d}", chance)
            kinds[kind.__name__] += 1
            row.note(f"case {number}, {kind.__name__}", _judge(root, damaged))
            shutil.rmtree(root)
    row.detail = f"{len(kinds)} kinds of damage"
    return row


def _judge(root: Path, damaged: range) -> str | None:
    for step in damaged:
        try:
            checkpoint.load(root / f"step-{step:08d}")
            return f"step {step} was loaded"
        except CheckpointError:
            continue
    loaded, skipped = checkpoint.find_newest(root, checkpoint.load)
    step = SHAPE.step_of(loaded)
    if step != damaged[-1] - 1 or len(skipped) != len(damaged):
        return f"step {step} was found, {len(skipped)} damaged checkpoints were named"
    return None
