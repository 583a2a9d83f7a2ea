"""Power loss: record the disk operations of a save, and materialise each state that a crash may
leave.

The model: the data of a file survives up to its last fsync; later data is there, missing, cut off
or zeros. A name (create, rename, unlink) survives up to the fsync of its directory; of the later
operations a first part survives, in their order, for each directory independently.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.internals import checkpoint
from harness.training import keep_rules

from faults.common import Row, Shape, folder, random_of

Tree = dict[str, Any]  # name -> bytes, or the Tree of a directory


@dataclass(eq=False)
class File:
    data: bytes = b""
    synced: bytes = b""

    def sync(self) -> None:
        self.synced = self.data


@dataclass(eq=False)
class Folder:
    """A directory: `entries` as processes read them, and `changes` to them, of which the first
    `synced` are durable."""

    entries: dict[str, File | Folder] = field(default_factory=dict)
    changes: list[list[tuple[str, File | Folder | None]]] = field(default_factory=list)
    synced: int = 0

    def change(self, *pairs: tuple[str, File | Folder | None]) -> None:
        """Record one operation: names and their new entries (None: removed)."""
        self.changes.append(list(pairs))
        for name, target in pairs:
            if target is None:
                self.entries.pop(name, None)
            else:
                self.entries[name] = target

    def sync(self) -> None:
        self.synced = len(self.changes)

    def after(self, count: int) -> dict[str, File | Folder]:
        entries: dict[str, File | Folder] = {}
        for name, target in itertools.chain.from_iterable(self.changes[:count]):
            entries.pop(name, None)
            if target is not None:
                entries[name] = target
        return entries


class Disk:
    """Model of the files below `base`, updated at every operation; `announced` is the step that
    the writer has reported as saved."""

    def __init__(self, base: Path, at_each: Callable[[Disk], None]):
        self.base, self.root, self.at_each = str(base), Folder(), at_each
        self.open: dict[int, tuple[str, File | Folder]] = {}
        self.announced = 0

    def find(self, path: str) -> Any:
        found: Any = self.root
        for name in path.removeprefix(self.base).strip("/").split("/"):
            found = found.entries[name] if name else found
        return found

    def parent(self, path: str) -> tuple[Folder, str]:
        return self.find(os.path.dirname(path)), os.path.basename(path)  # noqa: PTH119, PTH120

    def announce(self, step: int) -> None:
        self.announced = step
        self.at_each(self)

    def write(self, descriptor: int, data: bytes) -> None:
        self.open[descriptor][1].data += data  # type: ignore[union-attr]
        self.at_each(self)

    def fsync(self, descriptor: int) -> None:
        self.open[descriptor][1].sync()
        self.at_each(self)

    def named(self, call: str, path: str, other: Any, result: Any) -> None:
        """Record an operation on a name."""
        (folder, name) = self.parent(path) if path != self.base else (Folder({"": self.root}), "")
        if call == "open":
            if name not in folder.entries:
                folder.change((name, File()))
            elif other & os.O_TRUNC:
                folder.entries[name].data = b""  # type: ignore[union-attr]
            self.open[result] = (path, folder.entries[name])
        elif call == "mkdir":
            folder.change((name, Folder()))
        elif call == "rename":
            folder.change((name, None), (os.path.basename(other), folder.entries[name]))  # noqa: PTH119
        else:
            folder.change((name, None))
        self.at_each(self)


@contextmanager
def recorded(disk: Disk) -> Iterator[None]:
    """Pass the calls of `os` that change a disk through, and record them in `disk`."""
    names = ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir")
    real = {name: getattr(os, name) for name in names}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(first: Any, *others: Any, **options: Any) -> Any:
            result = real[name](first, *others, **options)
            if name == "close":
                disk.open.pop(first, None)
            elif name in ("write", "fsync"):
                if first in disk.open:
                    disk.fsync(first) if name == "fsync" else disk.write(
                        first, bytes(others[0])[:result]
                    )
            else:
                at = options.get("dir_fd")
                above = (
                    ""
                    if at is None
                    else disk.open[at][0] + "/"
                    if at in disk.open
                    else "elsewhere/"
                )
                path = above + os.fspath(first)
                if path.startswith(disk.base):
                    disk.named(
                        name,
                        path,
                        os.fspath(others[0]) if name == "rename" else (*others, 0)[0],
                        result,
                    )
            return result

        return call

    # pathlib of Python 3.10 has its own references, under the same names
    own = getattr(pathlib, "_NormalAccessor", None)
    places = [(os, name) for name in names]
    places += [(own, name) for name in ("mkdir", "rename", "unlink", "rmdir") if own is not None]
    before = [place.__dict__[name] for place, name in places]
    try:
        for place, name in places:
            setattr(place, name, wrapped(name) if place is os else staticmethod(wrapped(name)))
        yield
    finally:
        for (place, name), value in zip(places, before, strict=True):
            setattr(place, name, value)


# The states ---------------------------------------------------------------------------------------


def states(disk: Disk) -> Iterator[Tree]:
    """Yield every state of the disk that a crash at this moment may leave."""
    folders: list[Folder] = []
    files: list[File] = []
    _collect(disk.root, folders, files)
    counts = [range(f.synced, len(f.changes) + 1) for f in folders]
    contents = [_contents(f) for f in files]
    for chosen in itertools.product(*counts):
        for data in itertools.product(*contents):
            kept = {id(f): n for f, n in zip(folders, chosen, strict=True)}
            kept_data = {id(f): d for f, d in zip(files, data, strict=True)}
            yield _tree(disk.root, kept, kept_data)


def _collect(folder: Folder, folders: list[Folder], files: list[File]) -> None:
    """Collect the folders that some state contains, and the files that have more than one
    outcome."""
    folders.append(folder)
    for count in range(folder.synced, len(folder.changes) + 1):
        for target in folder.after(count).values():
            if isinstance(target, Folder):
                if target not in folders:
                    _collect(target, folders, files)
            elif target.synced != target.data and target not in files:
                files.append(target)


def _contents(file: File) -> list[bytes]:
    half = len(file.data) // 2
    zeroed = file.data[:half] + bytes(len(file.data) - half)
    return list(
        dict.fromkeys([file.synced, file.data, file.data[:half], zeroed, bytes(len(file.data))])
    )


def _tree(folder: Folder, kept: dict[int, int], data: dict[int, bytes]) -> Tree:
    return {
        name: _tree(target, kept, data)
        if isinstance(target, Folder)
        else data.get(id(target), target.data)
        for name, target in folder.after(kept[id(folder)]).items()
    }


def _write(tree: Tree, place: Path) -> None:
    place.mkdir()
    for name, content in tree.items():
        if isinstance(content, dict):
            _write(content, place / name)
        else:
            (place / name).write_bytes(content)


def _key(tree: Tree) -> Any:
    return tuple(
        sorted((name, _key(c) if isinstance(c, dict) else hash(c)) for name, c in tree.items())
    )


# Writers ------------------------------------------------------------------------------------------

MOST_PER_MOMENT = 300  # states of one moment; a writer without fsync has thousands
Writer = Callable[[Disk, Path, Shape, int], None]


def ours(disk: Disk, root: Path, shape: Shape, step: int) -> None:
    shape.save(root, step)
    disk.announce(step)
    checkpoint.prune(root, keep_rules(shape.num_older, 0), set())


def in_place(disk: Disk, root: Path, shape: Shape, step: int) -> None:
    """Weak writer: overwrite the old files, then rename."""
    final = root / f"step-{step:08d}"
    old = next(iter(checkpoint.steps(root).values()), final)
    if old == final:
        os.mkdir(final)
    _put(old, shape, step, True)
    if old != final:
        os.rename(old, final)
    _sync(root)
    disk.announce(step)


def no_fsync(disk: Disk, root: Path, shape: Shape, step: int) -> None:
    """Weak writer: stage and rename, but never fsync."""
    _stage(root, shape, step, False)
    disk.announce(step)
    _remove_older(root, step)


def unlink_first(disk: Disk, root: Path, shape: Shape, step: int) -> None:
    """Weak writer: remove the older checkpoint first, then write correctly."""
    _remove_older(root, step)
    _stage(root, shape, step, True)
    _sync(root)
    disk.announce(step)


def prune_before_fsync(disk: Disk, root: Path, shape: Shape, step: int) -> None:
    """Weak writer: make all needed calls, but prune before the fsync."""
    final = _stage(root, shape, step, False)
    _remove_older(root, step)
    for path in (*final.iterdir(), final, root):
        _sync(path)
    disk.announce(step)


WEAK = (in_place, no_fsync, unlink_first, prune_before_fsync)


def _stage(root: Path, shape: Shape, step: int, is_synced: bool) -> Path:
    staging, final = root / f".staging-{step}", root / f"step-{step:08d}"
    os.mkdir(staging)
    _put(staging, shape, step, is_synced)
    os.rename(staging, final)
    return final


def _put(place: Path, shape: Shape, step: int, is_synced: bool) -> None:
    """Write the files of a save of this step."""
    with folder() as elsewhere:
        files = {path.name: path.read_bytes() for path in shape.save(elsewhere, step).iterdir()}
    for name, data in sorted(files.items(), key=lambda item: item[0] == checkpoint.MANIFEST):
        descriptor = os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(descriptor, data)
        if is_synced:
            os.fsync(descriptor)
        os.close(descriptor)
    if is_synced:
        _sync(place)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _remove_older(root: Path, step: int) -> None:
    for other, path in checkpoint.steps(root).items():
        if other < step:
            shutil.rmtree(path)


# The rows -----------------------------------------------------------------------------------------


def crash_states(writer: Writer, shape: Shape, num_saves: int) -> list[tuple[int, Tree]]:
    """Return (announced step, disk) for every distinct state that a crash may leave while
    `writer` saves."""
    found: dict[Any, tuple[int, Tree]] = {}

    def note(disk: Disk) -> None:
        for tree in itertools.islice(states(disk), MOST_PER_MOMENT):
            found.setdefault((disk.announced, _key(tree)), (disk.announced, tree))

    with folder() as base:
        disk = Disk(base, note)
        root = base / "checkpoints"
        with recorded(disk):
            if writer is not ours:  # ours creates its root itself
                os.mkdir(root)
                _sync(base)
            for step in range(1, num_saves + 1):
                writer(disk, root, shape, step)
    return list(found.values())


def loss_in(announced: int, tree: Tree, shape: Shape) -> str | None:
    """Materialise the state and load from it; return what is lost, or None."""
    with folder() as base:
        _write(tree, base / "disk")
        loaded, _ = checkpoint.find_newest(base / "disk/checkpoints", checkpoint.load)
        try:
            step = shape.step_of(loaded)
        except Exception as error:
            return str(error)
    if announced and (step is None or step < announced):
        return f"step {announced} was announced, step {step} is the newest that is left"
    return None


def power(amount: int, seed: int) -> Row:
    """Load from disk states that a crash in a save or prune may leave, drawn from all such
    states."""
    row = Row("disk state that a power loss may leave", amount)
    shapes = [
        Shape(parts, size, keep)
        for parts, size in ((1, 20_000), (2, 50), (3, 2000), (5, 1))
        for keep in (1, 2)
    ]
    found = [(shape, *state) for shape in shapes for state in crash_states(ours, shape, 4)]
    chance = random_of(seed)
    for number, (shape, announced, tree) in enumerate(
        chance.sample(found, min(amount, len(found)))
    ):
        row.note(
            f"state {number} of {shape}, announced {announced}", loss_in(announced, tree, shape)
        )
    row.detail = f"drawn from {len(found)} distinct states of {4 * len(shapes)} saves and prunes"
    return row


def weak(amount: int, seed: int) -> Row:
    """Check that the power test detects a loss with each weak writer."""
    row, told, shape, chance = (
        Row("weak writer, detected by the power test", amount),
        [],
        Shape(2, 50, 1),
        random_of(seed),
    )
    for writer in WEAK:
        found = crash_states(writer, shape, 3)
        drawn = chance.sample(found, min(100, len(found)))
        losses = sum(loss_in(announced, tree, shape) is not None for announced, tree in drawn)
        row.note(writer.__name__, None if losses else f"no loss in {len(drawn)} states")
        told.append(f"{writer.__name__} loses data in {losses} of {len(drawn)}")
    row.detail = ", ".join(told)
    return row
