"""Reading a checkpoint: the parts of tensors that a rank needs, and the state of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch

from trainer.base.codec import DTYPES, dtype_of, name_of
from trainer.base.errors import CheckpointError, ConfigError, one_line
from trainer.base.plain_files import parse_json
from trainer.core.checkpoints import tensor_files
from trainer.core.checkpoints.tensor_files import INDEX, TENSOR_KINDS, box_name, check_index
from trainer.core.checkpoints.transaction import (
    LISTING_TRIES,
    CheckpointFiles,
    Manifest,
    cannot_fetch,
    is_gone,
)
from trainer.core.config import copies
from trainer.core.config.stores import NotThereError, StoreError
from trainer.core.config.typed import show
from trainer.core.distributed.group import Group
from trainer.core.engine.context import Parts
from trainer.core.engine.training_state import OF_MODEL, Ema, find_other_base, load_buffers
from trainer.core.strategy.tensor_shards import TensorSource, slices

TRAINING = "training.pt"
CPU = torch.device("cpu")
OF_BASE = ("task.options.", "run.seed", "run.freeze")  # settings that may change frozen weights
FETCH_LIMIT = timedelta(days=1)  # for ranks that wait for one which fetches more from a store
MOST_HELD = 64  # files of a kind: each rank would open them
Shape = tuple[int, ...]


class MemoryTensors:
    """Tensors in memory, such as those of a file of weights."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._tensors = tensors

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        return self._tensors[name][slices(offset, size)]

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def hold(self) -> None: ...

    def skip(self, name: str) -> None: ...


class FileTensors:
    """Tensors in the safetensors files of a checkpoint."""

    def __init__(
        self,
        folder: Path,
        entries: Mapping[str, Mapping[str, Any]],
        path_of: Callable[[str], Path] | None = None,
    ):
        """`path_of` returns the path of a file, which it may have to fetch."""
        self._folder = folder
        self._place = path_of or folder.joinpath
        self._entries = entries
        self._opened: dict[str, Any] = {}  # opening parses the names of all tensors

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(entry["shape"]) for name, entry in self._entries.items()}

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._entries[name]["dtype"]]

    def read(self, name: str, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """Read a box of a tensor. Raises CheckpointError if a file does not hold its part."""
        entry = self._entries[name]
        name = entry.get("same_as", name)
        whole = torch.empty(list(size), dtype=DTYPES[entry["dtype"]])
        seen: Counter[str] = Counter()
        for file, first, length in entry["parts"]:
            box_index = seen[file]
            seen[file] += 1
            begins = [max(a, b) for a, b in zip(offset, first, strict=True)]
            pairs = zip(offset, size, first, length, strict=True)
            ends = [min(a + n, b + m) for a, n, b, m in pairs]
            box = [end - begin for begin, end in zip(begins, ends, strict=True)]
            if any(extent <= 0 for extent in box):
                continue
            inside = [begin - a for begin, a in zip(begins, offset, strict=True)]
            within = [begin - b for begin, b in zip(begins, first, strict=True)]
            form = [entry["dtype"], length]
            part = self._read_part(file, box_name(name, box_index), form, slices(within, box))
            whole[slices(inside, box)] = part
        return whole

    def _read_part(
        self, file: str, name: str, form: Sequence[Any], box: tuple[slice, ...]
    ) -> torch.Tensor:
        """Read a box of a tensor in a file, where it must have this dtype and shape."""
        from safetensors import SafetensorError

        try:
            tensors = self._open(file)
            part = tensors.get_slice(name)
            if [part.get_dtype(), part.get_shape()] == form:
                return part[box] if box else tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._folder / file}: {error}") from None
        raise CheckpointError(f"""{self._folder / file}:
            {name} has another dtype or shape than in {INDEX}""")

    def _open(self, file: str) -> Any:
        from safetensors import safe_open

        if file not in self._opened:
            self._opened[file] = safe_open(self._place(file), "pt")
        return self._opened[file]

    def hold(self) -> None:
        """Open the files, if they are few: they can then be read after the run has removed them.

        Raises CheckpointError.
        """
        files = {file for entry in self._entries.values() for file, _, _ in entry["parts"]}
        try:
            for file in files if len(files) <= MOST_HELD else ():
                self._open(file)
        except Exception as error:  # SafetensorError or OSError
            raise CheckpointError(f"{self._folder}: {one_line(error)}") from None

    def skip(self, name: str) -> None: ...


class RemoteTensors:
    """Tensors that rank 0 reads and sends, one at a time, to ranks that do not see its disk.

    Every rank must read or skip the same names in the same order; boxes of one name in a row.
    """

    def __init__(
        self, group: Group, entries: Mapping[str, tuple[Shape, str]], own: TensorSource | None
    ):
        self._group = group
        self._entries = entries
        self._own = own
        self._last: tuple[str, torch.Tensor] | None = None

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(shape) for name, (shape, _) in self._entries.items()}

    def read(self, name: str, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            self._last = (name, self._receive(name))
        return self._last[1][slices(offset, size)]

    def _receive(self, name: str) -> torch.Tensor:
        shape, dtype = self._entries[name]
        if self._own is not None:
            tensor = self._own.read(name, (0,) * len(shape), shape).contiguous()
        else:
            tensor = torch.empty(shape, dtype=dtype_of(dtype))
        return self._group.share_tensor(tensor)

    def skip(self, name: str) -> None:
        self._receive(name)


@dataclass(frozen=True)
class Content:
    """The tensors of a checkpoint by kind, and its plain values."""

    sources: Mapping[str, Any]  # Source
    training: dict[str, Any]

    def hold(self) -> None:
        """Keep the tensors readable, also if the files are removed. Raises CheckpointError."""
        for source in self.sources.values():
            source.hold()


def open_content(loaded: CheckpointFiles) -> Content:
    """Open a verified checkpoint. Raises CheckpointError."""
    for file in (INDEX, TRAINING):
        if file not in loaded:
            raise CheckpointError(f"""{loaded.path.name}:
                has no {file}, so it is not a run's checkpoint""")
    training = tensor_files.unpack(loaded[TRAINING], CPU)
    try:
        index = check_index(parse_json(loaded[INDEX]), loaded.manifest["files"])
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = one_line(error) or type(error).__name__
        raise CheckpointError(f"{loaded.path}/{INDEX}: is not an index: {reason}") from None
    sources = {kind: FileTensors(loaded.path, index[kind], loaded.place) for kind in TENSOR_KINDS}
    return Content(sources, training)


def tell_content(group: Group, content: Content | None) -> Content:
    """Return rank 0's content on every rank. A collective, as is each later read of a tensor."""
    entries: dict[str, Any] = {}
    if content is not None:
        for kind, source in content.sources.items():
            entries[kind] = {
                name: [shape, name_of(source.dtype(name))]
                for name, shape in source.shapes().items()
            }
    entries = group.tell_all(entries)
    plain = {TRAINING: content.training} if content else {}
    packed = [bytes(data) for _, data in tensor_files.packed(plain)]
    training = tensor_files.unpack(group.share_bytes(packed[0] if packed else None), CPU)
    own: Mapping[str, Any] = content.sources if content else dict.fromkeys(entries)
    sources = {kind: RemoteTensors(group, entries[kind], own[kind]) for kind in entries}
    return Content(sources, training)


@dataclass(frozen=True)
class Restoration:
    """A verified checkpoint, the same on every rank."""

    manifest: Manifest
    content: Content
    path: Path

    def close(self, group: Group) -> None:
        """Remove what the nodes have fetched from a store, once all ranks have loaded it."""
        if copies.address_of(self.path):
            with group.agreed("loading the checkpoint"):
                pass
            copies.drop_fetched(self.path)

    def check_base(self, parts: Parts) -> None:
        """Raise CheckpointError unless `build_model` made the weights that the checkpoint leaves
        out. A collective."""
        tensors, group = parts.strategy.tensors, parts.ranks.group
        others = find_other_base(self.manifest.frozen, parts.frozen, tensors, group)
        if not others:
            return
        name, how = next(iter(others.items()))
        flat_config = parts.config.flat()
        settings = [
            f"{key}={show(flat_config.get(key))}, was {show(old)}"
            for key, old in self.manifest.config.items()
            if key.startswith(OF_BASE) and old != flat_config.get(key)
        ]
        changed = f" ({'; '.join(settings)})" if settings else ""
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        if {*others} == {OF_MODEL}:
            raise CheckpointError(f"""build_model{changed}: makes a model of another config than the
                run's ({how}); give the config.json that it began with""")
        raise CheckpointError(f"""build_model{changed}: makes other frozen weights than the run
            trained on, and its checkpoint holds their digests only: {name}{more} was {how};
            give the base of the run""")

    def load(self, parts: Parts, ema: Ema | None) -> None:
        """Load the parts that evaluation needs: the model and its averaged weights."""
        sources = self.content.sources
        tensors = parts.strategy.tensors
        self.check_base(parts)
        with wrong_state_named():
            extra = self.content.training["extra"]
            tensors.load(sources["model"], extra, self.manifest.frozen)
            load_buffers(tensors, sources["buffer"])
            if ema:
                ema.load(sources["ema"])


@contextmanager
def wrong_state_named() -> Iterator[None]:
    """Raise CheckpointError if plain values of a checkpoint are not those that a run saves."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise CheckpointError(f"""the checkpoint's state is not one of a run:
            {type(error).__name__}: {one_line(error)}""") from None


def read_on_all_ranks(
    group: Group, find: Callable[[], tuple[list[Path], bool]], has_optimizer: bool = True
) -> tuple[Restoration | None, list[str]]:
    """Open and verify the newest valid checkpoint of those that `find` returns on rank 0.

    `find` returns paths, the newest first, and whether they all are of a step that was asked for.
    If all ranks see a checkpoint's files, each verifies some of them and reads what it needs.
    Otherwise rank 0 reads and sends. Without `has_optimizer` its files are not fetched from a
    bucket. The second result has a line for each checkpoint that is not valid. A collective. Raises
    CheckpointError if there are checkpoints, but none is valid.
    """
    for _ in range(LISTING_TRIES):
        path_names: list[str] = []
        is_one_step = False
        with group.agreed("finding the checkpoint"):
            if group.world.rank == 0:
                paths, is_one_step = find()
                path_names = [str(path.absolute()) for path in paths]
        path_names, is_one_step = group.tell_all([path_names, is_one_step])
        skipped: list[str] = []
        first: ConfigError | None = None
        is_outdated = False
        for path in map(Path, path_names):
            try:
                return _open(group, path, has_optimizer), skipped
            except ConfigError as error:  # a CheckpointError on the rank that found it
                first = first or error
                if is_one_step and str(path) == path_names[-1]:
                    raise first from None
                copies.drop_fetched(path)
                if group.tell_all(is_gone(path)):
                    is_outdated = True  # its run is going on, and has newer ones
                else:
                    line = f"skipped {path.name}: {error}"
                    skipped.append(copies.with_addresses(line))
        if not is_outdated:
            break
    if skipped or is_outdated:
        why = skipped[0] if skipped else "all were removed before they were read; try again"
        where = copies.with_addresses(str(Path(path_names[0]).parent))
        raise CheckpointError(f"{where}: no checkpoint is valid; {why}")
    return None, []


def _open(group: Group, path: Path, has_optimizer: bool) -> Restoration:
    """Verify and open a checkpoint. Raises the same CheckpointError on every rank."""
    is_root = group.world.rank == 0
    loaded: CheckpointFiles | None = None
    address = group.tell_all(copies.address_of(path) if is_root else "")
    with group.agreed("reading the checkpoint"):
        if address:
            _copy_manifest(path, address)
        with suppress(CheckpointError) if not is_root else nullcontext():
            loaded = CheckpointFiles.read(path)
        if is_root and loaded is not None:
            Manifest.of_run(loaded.manifest, path)
    raw = group.tell_all(loaded.manifest if loaded is not None and is_root else None)
    sees_it = loaded is not None and loaded.manifest == raw
    (is_unseen,) = group.max(float(not sees_it))
    manifest = Manifest.of_run(raw, path)
    content: Content | None = None
    with group.agreed("verifying the checkpoint", FETCH_LIMIT if address else None):
        own = CheckpointFiles(path, raw)
        if not is_unseen:
            own.verify(_own_names(group, raw["files"], bool(address), has_optimizer))
        elif is_root:
            own.verify(_needed(raw["files"], bool(address), has_optimizer))
        if is_root or not is_unseen:
            content = open_content(own)
            if not address:  # its copy has no files that the run could remove
                content.hold()
    restored = tell_content(group, content) if is_unseen else cast(Content, content)
    return Restoration(manifest, restored, path)


def _own_names(
    group: Group, files: Mapping[str, Any], is_far: bool, has_optimizer: bool
) -> list[str]:
    """Return the files that this rank verifies; of a store those that it needs itself, if the
    layout is that of the run, since to verify a file there is to fetch it."""
    rank, size = group.world.rank, group.world.world_size
    if not is_far:
        return sorted(files)[rank::size]
    needed = _needed(files, is_far, has_optimizer)
    return [name for name in needed if files[name].get("rank", 0) % size == rank]


def _needed(files: Mapping[str, Any], is_far: bool, has_optimizer: bool) -> list[str]:
    is_left_out = is_far and not has_optimizer
    return [name for name in files if not (is_left_out and name.startswith("optimizer-"))]


def _copy_manifest(path: Path, address: str) -> None:
    """Make a folder of this node the copy of a checkpoint in a store, if it can be made."""
    try:
        with suppress(OSError):
            copies.copy_manifest(path, address)
    except NotThereError as error:
        raise CheckpointError(str(error)) from None
    except StoreError as error:
        raise cannot_fetch(error) from None
