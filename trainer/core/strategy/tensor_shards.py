"""Shards: a rank's part of a tensor, and the tensors of a model under the names of its state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainer.base.codec import dtype_of, name_of
from trainer.base.errors import CheckpointError
from trainer.core.distributed.group import Group

Move = Callable[[torch.Tensor, int], "torch.Tensor | None"]
Band = tuple[int, int]  # of rows: the first one in the whole tensor, and their number


class Shard(NamedTuple):
    """A rank's part of a tensor, `tensor`, which begins at `offset` in the whole of `shape`.

    If `bands` are given, its rows lie in several places of the whole, and `offset` tells the other
    axes. `is_written` is True on the one rank that writes this part into a checkpoint. Ranks along
    `axes` of the mesh may have other parts; the others have copies of this one.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    is_written: bool
    bands: tuple[Band, ...] = ()
    axes: tuple[str, ...] = ()

    @classmethod
    def whole(cls, tensor: torch.Tensor, is_written: bool, axes: tuple[str, ...] = ()) -> Shard:
        """Return the shard of a tensor that this rank has as a whole."""
        offset = (0,) * tensor.dim()
        return cls(tensor, tuple(tensor.shape), offset, is_written, axes=axes)

    @property
    def is_divided(self) -> bool:
        return self.shape != tuple(self.tensor.shape)

    def holding(self, tensor: torch.Tensor) -> Shard:
        """Return the shard of another tensor, divided like this one if it has the same shape."""
        if tensor.dim() and tensor.shape == self.tensor.shape:
            return self._replace(tensor=tensor)
        is_first = not any(self.offset) and (not self.bands or self.bands[0][0] == 0)
        return Shard.whole(tensor, self.is_written and is_first, self.axes)

    def boxes(self) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
        """Yield the parts that are boxes of the whole tensor, and their offsets in it."""
        if not self.bands:
            yield self.tensor, self.offset
            return
        begin = 0
        for first, count in self.bands:
            yield self.tensor[begin : begin + count], (first, *self.offset[1:])
            begin += count

    def rows(self, first: int, count: int) -> tuple[Band, ...]:
        """Return the bands of `count` of this part's rows, from its row `first`."""
        bands = []
        begin = 0
        for start, length in self.bands or ((self.offset[0], len(self.tensor)),):
            low = max(first, begin)
            high = min(first + count, begin + length)
            if high > low:
                bands.append((start + low - begin, high - low))
            begin += length
        return tuple(bands)

    def read(self, source: TensorSource, name: str) -> torch.Tensor:
        """Return this part of a source's tensor."""
        parts = [source.read(name, offset, box.shape) for box, offset in self.boxes()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def slices(offset: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a box in the whole tensor."""
    return tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))


def find_owners(sizes: Iterable[int], num_ranks: int) -> list[int]:
    """Return an owner for each tensor, so that the ranks own about equally many elements."""
    loads = [0] * num_ranks
    owners = []
    for size in sizes:
        owners.append(loads.index(min(loads)))
        loads[owners[-1]] += size
    return owners


def list_boxes(shards: Mapping[str, Shard]) -> list[list[Any]]:
    """Return what `join_boxes` must know of this rank's parts: an entry for each box of those that
    it writes, with name, index, dtype, shape of the whole, offset and size."""
    return [
        [name, box_index, name_of(box.dtype), list(shard.shape), list(offset), list(box.shape)]
        for name, shard in shards.items()
        if shard.is_written
        for box_index, (box, offset) in enumerate(shard.boxes())
    ]


@torch.no_grad()
def join_boxes(
    every: Sequence[list[list[Any]]], shards: Mapping[str, Shard], rank: int, move: Move
) -> dict[str, torch.Tensor]:
    """Return the whole tensors of all ranks' parts; `every` are the lists of the ranks.

    `move(box, source)` gets the box on rank `source`, elsewhere a tensor of its form. It returns
    its values, or None on a rank that does not join them. A collective, as `move` is.
    """
    wholes: dict[str, torch.Tensor] = {}
    for source, entries in enumerate(every):
        for name, box_index, dtype, shape, offset, size in entries:
            if source == rank:
                box = list(shards[name].boxes())[box_index][0]
            else:
                box = torch.empty(size, dtype=dtype_of(dtype))
            if (part := move(box, source)) is not None:
                whole = wholes.setdefault(name, part.new_empty(shape))
                whole[slices(offset, size)] = part
    return wholes


def gather(shards: Mapping[str, Shard], group: Group) -> dict[str, Shard]:
    """Return whole tensors in host memory on rank 0, and nothing on other ranks. A collective."""
    rank = group.world.rank

    def move(box: torch.Tensor, source: int) -> torch.Tensor | None:
        part = group.send_to_rank_0(box, source)
        return None if rank else part.cpu()

    wholes = join_boxes(group.gather(list_boxes(shards)), shards, rank, move)
    return {name: Shard.whole(tensor, True) for name, tensor in wholes.items()}


class TensorSource(Protocol):
    """Tensors of a checkpoint by name, read in parts.

    Reading may be a collective for each name: every rank reads or skips all, in their order.
    """

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def read(self, name: str, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor: ...
    def skip(self, name: str) -> None: ...


def read_whole(source: TensorSource) -> dict[str, torch.Tensor]:
    """Return every tensor of a source."""
    shapes = source.shapes()
    return {name: source.read(name, (0,) * len(shape), shape) for name, shape in shapes.items()}


@torch.no_grad()
def read_into(shards: Mapping[str, Shard], source: TensorSource) -> None:
    """Overwrite shards with their parts of a source, one tensor at a time."""
    for name in source.shapes():
        if name in shards:
            shards[name].tensor.copy_(shards[name].read(source, name))
        else:
            source.skip(name)


def check_model(
    built: Mapping[str, torch.Tensor],
    saved: Mapping[str, tuple[int, ...]],
    left_out: Collection[str] = (),
) -> None:
    """Raise CheckpointError, naming the first difference, if a state is of another model.

    A tensor need not be saved that was `left_out`, or shares its memory with one that was saved.
    """
    wrong = "the checkpoint is of another model"
    advice = "resume with the task and model it was trained with"
    ids = {id(tensor) for name, tensor in built.items() if name in saved}
    for name, tensor in built.items():
        if name not in saved and name not in left_out and id(tensor) not in ids:
            raise CheckpointError(f"{wrong}: it has no {name}; {advice}")
        if name in saved and not is_lazy(tensor) and tuple(tensor.shape) != saved[name]:
            raise CheckpointError(f"""{wrong}:
                {name} is {saved[name]} in it and {tuple(tensor.shape)} here; {advice}""")
    for name in saved:
        if name not in built:
            raise CheckpointError(f"{wrong}: {name} is not in the model built here; {advice}")


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a module's state by name; tied ones are the same object."""
    state = module.state_dict(keep_vars=True).items()
    return {name: value for name, value in state if not is_extra(name, value)}


def replace_tensors(model: nn.Module, make: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Replace each parameter and buffer of a model by what `make(name, tensor)` returns.

    Tied ones are replaced by one tensor.
    """
    replacements: dict[torch.Tensor, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in list(tensors.items()):
                if tensor is None:
                    continue
                if tensor not in replacements:
                    replacements[tensor] = make(f"{prefix}.{key}" if prefix else key, tensor)
                if replacements[tensor] is not tensor:
                    setattr(module, key, replacements[tensor])


def is_extra(name: str, value: Any) -> bool:
    """Return True for a value of `get_extra_state`, which may be a tensor, in a model's state."""
    return name.rpartition(".")[2] == "_extra_state" or not isinstance(value, torch.Tensor)


def non_persistent(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers with persistent=False by name."""
    buffers = {}
    for prefix, module in model.named_modules():
        for key in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(key)
            if buffer is not None and not is_lazy(buffer):
                buffers[f"{prefix}.{key}" if prefix else key] = buffer
    return buffers
