"""A checkpoint is a transaction: its directory is published completely or not at all.

    checkpoints/step-00000100/{model-r00000.safetensors, training.pt, tensors.json, manifest.json}

Files are written and fsynced in a staging directory, last of all the manifest with their sizes and
SHA-256. Each rank may write some of the files, and rank 0 writes the manifest. One rename publishes
the directory, and an fsync of its parent makes the rename durable. Only then are older checkpoints
removed. Nothing is ever overwritten. A name whose fsync failed is not used a second time: after a
failure the kernel may report the next fsync as done.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from trainer.base.durable_files import digest_file, read_sized, sync_directory, write_file
from trainer.base.errors import CheckpointError, ConfigError, RunError
from trainer.base.plain_files import MOST_OF_JSON, digest_json, parse_json, read_file
from trainer.core.config import copies
from trainer.core.config.saved_config import MANIFEST
from trainer.core.config.schema import CheckpointSettings
from trainer.core.config.stores import NotThereError, StoreError
from trainer.core.config.typed import build, convert, limit

CHECKPOINT_FORMAT = 4
STEP_NAME = re.compile(r"step-([0-9]{8,})")
_EPOCH_AND_INDEX = re.compile(r"\d{1,18}/(\d{1,18})")  # <epoch>/<index>
_DTYPE = re.compile("bfloat16|float(16|32|64|8_e4m3fn|8_e5m2)|u?int(8|16|32|64)|bool|complex64")
MOST_COUNT = 2**53  # steps and examples
_COUNT = Annotated[int, limit(min=1, max=MOST_COUNT)]
_NUMBER = Annotated[int, limit(min=0, max=MOST_COUNT)]


@dataclass(frozen=True)
class Manifest:
    """The facts of a run in a checkpoint. `sessions` are pairs [first step, number of ranks].

    `changes` has the lines about settings, machine and code that changed, by a session's first
    step. `replaced` maps "<epoch>/<index>" of an unreadable example to the index of its
    replacement. `frozen` has dtype, shape and digest of the weights that the checkpoint leaves out.
    """

    step: _NUMBER
    run: str
    strategy: str
    world_size: Annotated[int, limit(min=1, max=2**20)]
    ledger: str | None
    sessions: list[list[_NUMBER]]
    changes: dict[str, list[str]]
    replaced: dict[str, int]
    data: dict[str, dict[str, Any]]
    config: dict[str, Any]
    metrics: dict[str, Any]
    files: dict[str, Any]
    machine: dict[str, Any]
    code: dict[str, Any]  # digests by module
    frozen: dict[str, list[Any]]

    @classmethod
    def of_run(cls, raw: Mapping[str, Any], path: Path) -> Manifest:
        """Convert a manifest. Raises CheckpointError if a fact of the run is missing or invalid."""
        try:
            facts = {each.name: raw[each.name] for each in fields(cls)}
            if facts["ledger"] == "":  # no step yet
                facts["ledger"] = None
            manifest = build(cls, facts)
            lengths = {split: _length(entry, "length") for split, entry in manifest.data.items()}
            size = _length(manifest.data["train"], "size")
            is_sound = manifest._is_sound(lengths["train"], size)
        except (ConfigError, KeyError, TypeError):
            is_sound = False
        if not is_sound:
            raise CheckpointError(f"{path}: its manifest does not describe a run")
        return manifest

    def _is_sound(self, num_examples: int, size: int) -> bool:
        batch = convert(_COUNT, self.config["data.global_batch"], "")
        convert(Annotated[int, limit(min=0, max=2**63 - 1)], self.config["run.seed"], "")
        are_pairs = bool(self.sessions) and all(len(each) == 2 for each in self.sessions)
        places = self.replaced.items()
        are_facts = all(map(_is_fact, self.frozen.values()))
        return (
            batch <= size
            and are_pairs
            and are_facts
            and all(_is_place(*p, num_examples) for p in places)
        )

    @property
    def steps_per_epoch(self) -> int:
        return int(self.data["train"]["size"]) // int(self.config["data.global_batch"])

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry["bytes"] for entry in self.files.values())


def _length(facts: Any, name: str) -> int:
    return convert(_COUNT, facts[name], "")


def _is_fact(facts: list[Any]) -> bool:
    """Return True for the facts of a weight that the checkpoint leaves out."""
    if len(facts) != 3 or not _DTYPE.fullmatch(str(facts[0])):
        return False
    shape = facts[1]
    is_shape = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    return is_shape and type(facts[2]) is int and -(2**63) <= facts[2] < 2**63


def _is_place(epoch_and_index: str, index: Any, num_examples: int) -> bool:
    match = _EPOCH_AND_INDEX.fullmatch(epoch_and_index)
    is_index = type(index) is int and 0 <= index < num_examples
    return match is not None and int(match[1]) < num_examples and is_index


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of the checkpoint at `path`; verify its form and digest, but no file.

    Raises CheckpointError if it is missing or not valid.
    """
    try:
        data = read_file(path / MANIFEST, MOST_OF_JSON)
        home = path.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
        raise CheckpointError(f"{path / MANIFEST}: {getattr(error, 'strerror', error)}") from None
    return parse_manifest(data, path, home.name)


def parse_manifest(data: bytes, path: Path, name: str = "") -> dict[str, Any]:
    """Parse the manifest of the checkpoint at `path`, as `read_manifest` does.

    `name` is that of its folder, if that is another one than the last of `path`.
    """
    manifest_path = path / MANIFEST
    try:
        manifest = parse_json(data)
        is_well_formed = _is_well_formed(manifest)
        match = STEP_NAME.fullmatch(name or path.name)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CheckpointError(f"{manifest_path}: cannot be read as a manifest") from None
    if manifest.get("format") != CHECKPOINT_FORMAT:
        raise CheckpointError(f"""{path}:
            has format {manifest.get("format")}, this version reads format {CHECKPOINT_FORMAT}""")
    if not is_well_formed or not match or manifest.get("step") != int(match[1]):
        raise CheckpointError(f"{manifest_path}: does not belong to this checkpoint")
    if manifest.pop("sha256", None) != digest_json(manifest):
        raise CheckpointError(f"""{manifest_path}:
            its SHA-256 differs from the one stored in it, so it has changed""")
    return manifest


def _is_well_formed(manifest: Any) -> bool:
    for name, entry in manifest["files"].items():
        is_name = Path(name).name == name != ".." and name.isprintable()
        is_entry = type(entry["bytes"]) is type(entry.get("rank", 0)) is int
        is_entry = is_entry and type(entry["sha256"]) is str
        if not is_name or not is_entry:
            return False
    values = manifest.get("metrics", {}).values()
    are_numbers = all(type(value) in (int, float, type(None)) for value in values)
    return are_numbers and all(isinstance(manifest.get(k, {}), dict) for k in ("config", "data"))


LISTING_TRIES = 100  # to list checkpoints, while a run removes all that were listed
Found = TypeVar("Found")


@dataclass(frozen=True)
class CheckpointFiles(Mapping[str, bytes]):
    """A checkpoint with a valid manifest: its files by name, each read when it is asked for."""

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> CheckpointFiles:
        """Read and verify the manifest only. Raises CheckpointError."""
        return cls(path, read_manifest(path))

    @property
    def _entries(self) -> Mapping[str, Any]:
        entries: dict[str, Any] = self.manifest["files"]
        return entries

    def __getitem__(self, name: str) -> bytes:
        """Read a file. Raises CheckpointError if a byte differs from what was written."""
        entry = self._entries[name]
        path = self.place(name)
        with _errors_named(path):
            size, data = read_sized(path, entry["bytes"])
        _check(entry, path, size, hashlib.sha256(data).hexdigest())
        return data

    def place(self, name: str) -> Path:
        """Return the path of a file, which is fetched if the checkpoint is in a store.

        Raises CheckpointError if it is not there or differs, RunError if it cannot be fetched now:
        an older checkpoint would lose steps.
        """
        entry = self._entries[name]
        try:
            return copies.fetch(self.path, name, entry["bytes"], partial(_check, entry))
        except NotThereError as error:
            raise CheckpointError(str(error)) from None
        except (StoreError, OSError) as error:
            raise cannot_fetch(error) from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # Mapping's own would read the file

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def verify(self, names: Iterable[str]) -> None:
        """Read files block by block. Raises CheckpointError if a byte has changed."""
        for name in names:
            entry = self._entries[name]
            path = self.place(name)
            with _errors_named(path):
                size_and_digest = digest_file(path, entry["bytes"])
            _check(entry, path, *size_and_digest)


@contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, MemoryError) as error:
        raise CheckpointError(f"{path!s}: {getattr(error, 'strerror', error)}") from None


def cannot_fetch(error: Exception) -> RunError:
    return RunError(f"{error}; check the network and the disk, and start again")


def _check(entry: Mapping[str, Any], path: object, size: int, sha256: str) -> None:
    if size != entry["bytes"]:
        raise CheckpointError(f"{path}: {size} bytes, {entry['bytes']} were written")
    if sha256 != entry["sha256"]:
        raise CheckpointError(f"""{path}:
            its SHA-256 differs from the manifest's, so bits have changed""")


def final_path(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def stage(root: Path, step: int) -> Path:
    """Create the staging directory of a checkpoint, to write its files into.

    Raises CheckpointError if that step already exists, and OSError for disk errors.
    """
    if final_path(root, step).exists():
        raise CheckpointError(f"""{final_path(root, step)} already exists:
            a checkpoint is never overwritten""")
    if not root.exists():
        root.mkdir(mode=0o700)
        sync_directory(root.parent)
    staging = root / f".staging-{step:08d}-{secrets.token_hex(4)}"
    os.mkdir(staging, 0o700)
    return staging


@contextmanager
def removed_on_error(staging: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def write_one(staging: Path, name: str, data: bytes | memoryview) -> dict[str, Any]:
    """Write a file of rank 0, and return its entry in the manifest."""
    write_file(staging / name, data)
    return {"rank": 0, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def publish(
    staging: Path,
    root: Path,
    step: int,
    files: Mapping[str, Any],
    facts: Mapping[str, Any],
    check_owner: Callable[[], None],
) -> None:
    """Write the manifest of the files in `staging`, and rename it to the checkpoint."""
    _write_manifest(staging, {"format": CHECKPOINT_FORMAT, "step": step, **facts, "files": files})
    sync_directory(staging)
    check_owner()
    os.rename(staging, final_path(root, step))
    try:
        sync_directory(root)
    except OSError:
        _discard([final_path(root, step)])  # it may not be there after a power cut
        raise


def _write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    text = json.dumps({**manifest, "sha256": digest_json(manifest)}, indent=1)
    if len(text) > MOST_OF_JSON:
        raise CheckpointError(f"""{folder.parent}: cannot be saved, its manifest
            has {len(text):,} bytes, and at most {MOST_OF_JSON:,} can be read; repair or remove
            the {len(manifest.get("replaced", ())):,} examples that data.on_error=skip replaced""")
    write_file(folder / MANIFEST, text.encode())


def load(path: Path) -> CheckpointFiles:
    """Read the manifest of the checkpoint at `path`, and verify each file.

    Raises CheckpointError, with the reason, if any byte differs from what was written.
    """
    loaded = CheckpointFiles.read(path)
    loaded.verify(loaded)
    return loaded


def steps(root: Path) -> dict[int, Path]:
    """Return the published checkpoints by step, oldest first, valid or not."""
    paths: dict[int, Path] = {}
    for _ in range(LISTING_TRIES):
        named = [path for path in root.glob("step-*") if STEP_NAME.fullmatch(path.name)]
        paths = {int(path.name[5:]): path for path in named if _is_own_directory(path)}
        if paths or not any(is_gone(path) for path in named):
            break  # else all were removed meanwhile, by a run that has newer ones
    return dict(sorted(paths.items()))


def is_gone(path: Path) -> bool:
    """Return True if a checkpoint was removed since it was listed: its run may be going on."""
    return not os.path.lexists(path)


def _is_own_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()  # a link may lead to others' files


def find_newest(root: Path, read: Callable[[Path], Found]) -> tuple[Found | None, list[str]]:
    """Return what `read` makes of the newest checkpoint for which it raises no CheckpointError.

    The second result has a line for each newer one. A run that is going on may remove checkpoints
    before they are read, when it has newer ones: they are listed again then.
    """
    skipped: list[str] = []
    for _ in range(LISTING_TRIES):
        skipped = []
        is_outdated = False
        for path in reversed(steps(root).values()):
            try:
                return read(path), skipped
            except CheckpointError as error:
                is_outdated |= is_gone(path)
                if not is_gone(path):
                    skipped.append(f"skipped {path.name}: {error}")
        if not is_outdated:
            break
    return None, skipped


def newest_manifest(root: Path) -> dict[str, Any] | None:
    """Return the manifest of the newest checkpoint that has a readable one, or None."""
    return find_newest(root, read_manifest)[0]


def set_aside(path: Path) -> Path:
    """Rename a checkpoint, so that its step can be saved again; return the new path."""
    aside = path.with_name(f"invalid-{path.name}-{secrets.token_hex(4)}")
    os.rename(path, aside)
    return aside


def prune(
    root: Path,
    settings: CheckpointSettings,
    also: Set[int | None],
    check_owner: Callable[[], None] = lambda: None,
) -> None:
    """Remove all but those that the settings keep, and `also`.

    Only checkpoints with a readable manifest are counted and removed: a damaged one never takes
    the place of a good one.
    """
    paths: dict[int, Path] = {}
    scores: dict[int, float] = {}
    for step, path in steps(root).items():
        try:
            scores |= settings.score(step, read_manifest(path))
        except CheckpointError:
            continue
        paths[step] = path
    keep = settings.kept(paths, scores) | also
    check_owner()
    _discard([path for step, path in paths.items() if step not in keep])


def sweep(root: Path) -> None:
    """Remove the leftovers of an interrupted save or prune; only for the owner of `root`.

    A writer that was frozen during a save then finds nothing to publish when it wakes. Leftovers
    that cannot be removed do no harm.
    """
    with suppress(OSError):
        _discard([*root.glob(".staging-*"), *root.glob(".trash-*")])


def _discard(paths: Sequence[Path]) -> None:
    """Rename, then remove: a partial directory must never look like a checkpoint.

    Raises the first OSError after the others are removed.
    """
    trash = []
    problem: OSError | None = None
    for path in paths:
        renamed = path.with_name(f".trash-{path.name}-{secrets.token_hex(4)}")
        try:
            os.rename(path, renamed)
            trash.append(renamed)
        except OSError as error:
            problem = problem or error
    for renamed in trash:
        shutil.rmtree(renamed, ignore_errors=True)
    if problem is not None:
        raise problem
