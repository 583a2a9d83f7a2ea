"""Memory of the simulated accelerator: torch's storages on sim:i over memory of the host."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import torch

NAME = "sim"
COUNT = 4
visible = COUNT  # devices that this process sees
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
aten = torch.ops.aten

# Memory. A row of `_rows` is a DLManagedTensor of 64 bytes, its shape, and padding to 128 bytes.
# Its deleter is libc's sigemptyset, which zeroes the row without Python: torch frees storages in
# any thread, without the GIL and while an exception is under way. `reap` finds zeroed rows.

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p] * 3
_tag = ctypes.create_string_buffer(b"dltensor")
_rows = np.zeros((1 << 17, 16), np.int64)
_deleter = ctypes.cast(ctypes.CDLL(None).sigemptyset, ctypes.c_void_p).value
_lock = threading.RLock()


class Memory:
    """The bytes of one device, in pieces of 512 as CUDA's allocator counts them."""

    def __init__(self) -> None:
        self.capacity, self.used, self.peak, self.count = 80 << 30, 0, 0, 0

    def take(self, index: int, nbytes: int) -> int:
        nbytes = -(-nbytes // 512) * 512
        with _lock:
            reap()
            if self.used + nbytes > self.capacity:
                size, whole, free = (
                    f"{x / 2**20:.2f} MiB"
                    for x in (nbytes, self.capacity, self.capacity - self.used)
                )
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory (simulated). Tried to allocate {size}. GPU {index} has a "
                    f"total capacity of {whole} of which {free} is free."
                )
            self.used += nbytes
            self.peak = max(self.peak, self.used)
            self.count += 1
        return nbytes


class Block:
    """A storage on the device: its host memory, and who uses it (streams, a collective)."""

    __slots__ = ("held_by", "home", "index", "key", "memory", "nbytes", "recorded", "uses")

    def __init__(self, memory: torch.UntypedStorage, index: int):
        self.memory, self.index, self.key = memory, index, 0
        self.nbytes = memories[index].take(index, memory.nbytes())
        self.held_by = ""  # "read by" or "written by" a collective that was not waited for
        self.uses: dict[int, tuple[int, bool]] = {}  # (tick, was it written) by stream
        self.home: Any = None  # the stream that allocated it, and will allocate its memory again
        self.recorded: set[int] = set()  # streams of record_stream
        allocated(self)


def ignore(block: Block) -> None:
    """Stand for what simulated_streams does with a block."""


allocated = freed = ignore
memories = [Memory() for _ in range(COUNT)]
_blocks: dict[int, Block] = {}  # by the address of torch's storage
_owners: dict[int, Block] = {}  # by row
_free: list[int] = []
_high = 0


def reap() -> None:
    """Count out the storages that torch has freed."""
    with _lock:
        for row in np.flatnonzero(_rows[:_high, 0] == 0).tolist():
            block = _owners.pop(row)
            if _blocks.get(block.key) is block:
                del _blocks[block.key]
            memories[block.index].used -= block.nbytes
            freed(block)
            _rows[row, 0] = 1
            _free.append(row)


def adopt(memory: torch.UntypedStorage, index: int) -> torch.Tensor:
    """Return a uint8 tensor on sim:index over a storage of the host, which it keeps alive."""
    global _high
    block = Block(memory, index)
    with _lock:
        if _free:
            row = _free.pop()
        else:
            row, _high = _high, _high + 1
        address, size = _rows.ctypes.data + 128 * row, memory.nbytes()
        kind = 1 | 1 << 32 | 8 << 40 | 1 << 48  # one axis of uint8
        data = memory.data_ptr() or 64
        _rows[row, :9] = (data, 12 | index << 32, kind, address + 64, 0, 0, 0, _deleter, size)
        _owners[row] = block
        flat = torch._C._from_dlpack(_new_capsule(address, ctypes.addressof(_tag), None))
        block.key = flat.untyped_storage()._cdata
        _blocks[block.key] = block
    return flat


def block_of(tensor: torch.Tensor) -> Block:
    return _blocks[tensor.untyped_storage()._cdata]


_empties: dict[Any, torch.Tensor] = {}  # of each dtype and place, to make views of any storage from


def empty_of(dtype: torch.dtype, index: int | None) -> torch.Tensor:
    found = _empties.get((dtype, index))
    if found is None:
        found = torch.empty(0, dtype=dtype)
        if index is not None:
            base = adopt(torch.UntypedStorage(0), index)
            found = aten.view.dtype.redispatch(CPU, base, dtype)
        _empties[dtype, index] = found
    return found


def view_of(empty: torch.Tensor, storage: Any, offset: int, size: Any, stride: Any) -> torch.Tensor:
    made = aten.as_strided.default.redispatch(CPU, empty, [0], [1], 0)
    return aten.set_.source_Storage_storage_offset.redispatch(
        CPU, made, storage, offset, size, stride
    )


def to_sim(cpu: torch.Tensor, index: int) -> torch.Tensor:
    """Return a tensor on sim:index over the memory of a CPU tensor."""
    storage = adopt(cpu.untyped_storage(), index).untyped_storage()
    place = (storage, cpu.storage_offset(), cpu.size(), cpu.stride())
    return view_of(empty_of(cpu.dtype, index), *place)


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias on the CPU of a tensor on the device."""
    place = (tensor.storage_offset(), tensor.size(), tensor.stride())
    alias = view_of(empty_of(tensor.dtype, None), block_of(tensor).memory, *place)
    alias = torch._neg_view(alias) if tensor.is_neg() else alias
    return torch._conj(alias) if tensor.is_conj() else alias


def resize_storage(storage: torch.UntypedStorage, size: int, full: int) -> None:
    """Free the memory of a storage (size 0), or take it again, as FSDP does."""
    block = _blocks[storage._cdata]
    if size not in (0, full):
        raise NotImplementedError(f"resize of a storage of {full} bytes on {NAME} to {size}")
    memories[block.index].used -= block.nbytes
    block.nbytes = 0
    if size:
        block.nbytes = memories[block.index].take(block.index, size)
    else:
        block.memory.fill_(255)  # NaN for whoever reads what was freed


def find_block(storage: torch.UntypedStorage) -> Block | None:
    return _blocks.get(storage._cdata) if storage.device.type == NAME else None


def patch_storages() -> None:
    """Give storages on the device what torch does in C++ for other devices."""
    base: Any = torch.UntypedStorage
    resize, clone = base.resize_, base.clone
    sizes = {name: getattr(base, name) for name in ("size", "nbytes")}

    def resize_(self: Any, size: int) -> Any:
        if find_block(self) is None:
            return resize(self, size)
        resize_storage(self, size, sizes["nbytes"](self))
        return self

    def clone_(self: Any) -> Any:
        block = find_block(self)
        if block is None:
            return clone(self)
        copy = torch.UntypedStorage(sizes["nbytes"](self))
        copy.copy_(block.memory)
        return adopt(copy, block.index).untyped_storage()

    def sized(name: str) -> Any:
        def size(self: Any) -> int:
            block = find_block(self)
            return 0 if block is not None and not block.nbytes else sizes[name](self)

        return size

    base.resize_, base.clone = resize_, clone_
    base.size, base.nbytes = sized("size"), sized("nbytes")


def restore(storage: torch.UntypedStorage, location: str) -> Any:
    """Bring a loaded storage to its device, for torch.load."""
    if not str(location).startswith(NAME):
        return None
    copy = torch.UntypedStorage(storage.nbytes())
    copy.copy_(storage)
    return adopt(copy, torch.device(location).index or 0).untyped_storage()
