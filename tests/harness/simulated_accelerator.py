"""A simulated accelerator for tests: devices sim:0, sim:1, ... with CUDA's rules, over CPU memory.

A tensor on sim:i is a plain torch.Tensor whose storage is host memory, brought in by a DLPack
capsule of device type "extension". Each operation with a CPU kernel gets a kernel here, which
checks the devices, counts a launch, notes a wait of the host, and runs the CPU kernel on aliases.
It shows mixed devices, waits, launches, copies that were not waited for, races between streams and
memory that runs out. It says nothing about speed, or about the results of a GPU's kernels.

`register` changes this process for good: call it in a fork. It uses private names of torch and is
for the version TORCH on x86-64; elsewhere `reason_to_skip` says why it cannot be used.
"""

from __future__ import annotations

import platform
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from harness import (
    simulated_attention,
    simulated_autocast,
    simulated_guard,
    simulated_memory,
    simulated_streams,
)
from harness.simulated_memory import (
    COUNT,
    CPU,
    NAME,
    adopt,
    aten,
    block_of,
    empty_of,
    memories,
    to_cpu,
    to_sim,
    view_of,
)
from harness.simulated_streams import (
    current,
    current_stream,
    index_of,
    note_launch,
    note_wait,
    observe,
    races,
    use,
)

TORCH = "2.13.0"
__all__ = ["COUNT", "NAME", "observe", "races", "reason_to_skip", "register", "set_capacity"]


def reason_to_skip() -> str:
    """Return why the simulation cannot be used here; empty if it can."""
    if torch.__version__.split("+")[0] != TORCH or platform.machine() != "x86_64":
        return f"the simulated accelerator is written for torch {TORCH} on x86-64"
    return "torch sees a real accelerator" if torch.accelerator.is_available() else ""


# Kernels.

_WAITING = {
    *("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "_unique", "unique_dim"),
    *("unique_consecutive", "unique_dim_consecutive", "equal", "bincount", "histc", "is_nonzero"),
    *("_linalg_check_errors", "linalg_eigh", "_linalg_eigh"),
}
_INDEXING = {
    *("index", "index_put", "index_put_", "_index_put_impl_"),
    *("_unsafe_index", "_unsafe_index_put", "_unsafe_masked_index"),
}
_VIEWS = (
    *("view", "view.dtype", "as_strided", "_reshape_alias", "unfold", "is_set_to"),
    *("set_.source_Storage_storage_offset", "set_.source_Tensor"),
)
_OWN = {
    *(name.partition(".")[0] for name in _VIEWS),
    *("set_", "resize_", "empty", "empty_strided", "copy_", "_copy_from", "_copy_from_and_resize"),
    *("is_pinned", "_pin_memory", "_fused_sdp_choice", "resize_as_", "native_dropout", "alias"),
    *("_has_compatible_shallow_copy_type", "detach", "record_stream", "_to_dense", "to_dense"),
    *("lift", "_lazy_clone", "_conj_physical"),
}
_FOREIGN = ("sparse", "quantize", "mkldnn", "nested", "cudnn", "xnnpack", "_test_")


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (torch.Tensor, torch.device)):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(change, each) for each in value)
    return value


class _Kernel:
    """The kernel of one operation: it runs the CPU's on aliases of the tensors."""

    def __init__(self, op: Any):
        arguments = op._schema.arguments
        self.op = op
        self.name = op._schema.name.split("::")[1]
        self.written = [
            i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write
        ]
        self.written_names = {arguments[i].name for i in self.written}
        returns = op._schema.returns
        self.is_view = any(r.alias_info and not r.alias_info.is_write for r in returns)
        named = [i for i, a in enumerate(arguments) if a.name == "generator"]
        self.generator_at = named[0] if named else None
        self.tensors_at = [i for i, a in enumerate(arguments) if str(a.type) == "Tensor"]
        self.is_foreach = self.name.startswith("_foreach_")
        self.is_indexing = self.name in _INDEXING

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
            call = _Call(self)
            inside: Any = [_mapped(call.enter, x) for x in args]
            first = next((x for x in inside if isinstance(x, torch.Tensor)), None)
            for i in self.tensors_at:  # torch hands a wrapped number over as a number
                if i < len(inside) and isinstance(inside[i], (int, float, complex)):
                    x = inside[i]
                    dtype = None if first is None else torch.result_type(first, x)
                    inside[i] = torch.tensor(x, dtype=dtype)
            named = {key: _mapped(call.enter, x) for key, x in kwargs.items()}
            call.check(args)
            if self.generator_at is not None:
                if self.generator_at < len(inside):
                    inside[self.generator_at] = call.generator(inside[self.generator_at])
                else:
                    named["generator"] = call.generator(named.get("generator"))
            if named.get("pin_memory"):
                named["pin_memory"] = False
            if not self.is_view:
                note_launch(self.name)
                for x in call.aliases.values():
                    use(x[1], call.is_written(x[1], args, kwargs), self.name)
            if self.name in _WAITING:
                note_wait(self.name)
                current_stream(call.index).finish()
            out = self.op(*inside, **named)
            if self.written:
                for alias, x in call.aliases.values():
                    if alias.size() != x.size() or alias.stride() != x.stride():
                        _become(x, alias)
            return _mapped(call.leave, out)


class _Call:
    """One call of a kernel: the device of its tensors, and their aliases on the CPU."""

    def __init__(self, kernel: _Kernel):
        self.kernel = kernel
        self.aliases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.device: torch.device | None = None
        self.stray: torch.device | None = None

    @property
    def index(self) -> int:
        return current.index if self.device is None else self.device.index

    def enter(self, x: Any) -> Any:
        if isinstance(x, torch.device):
            if x.type != NAME:
                return x
            self.device = self.device or _checked(x)
            return torch.device("cpu")
        kernel = self.kernel
        if x.device.type != NAME:
            if x.dim() and not kernel.is_indexing:
                self.stray = x.device
            elif x.dim():
                note_wait(f"{kernel.name} by an index on the CPU")
            return x
        if self.device is None:
            self.device = x.device
        elif self.device != x.device and not kernel.is_foreach:
            raise self._mixed(x.device)
        if kernel.is_indexing and self.aliases and x.dtype in (torch.bool, torch.uint8):
            note_wait(f"{kernel.name} by a mask")
        alias = to_cpu(x)
        self.aliases[id(alias)] = (alias, x)
        return alias

    def check(self, args: Any) -> None:
        """Refuse CPU tensors beside the device's, and a scalar tensor of another device."""
        if self.stray is not None and self.device is not None:
            raise self._mixed(self.stray)
        if self.kernel.is_foreach:  # lists may mix devices: CUDA then goes one by one
            for i in self.kernel.tensors_at:
                x = args[i] if i < len(args) else None
                if isinstance(x, torch.Tensor) and x.device not in (
                    self.device,
                    torch.device("cpu"),
                ):
                    raise RuntimeError(
                        f"scalar tensor expected to be on {self.device} but is on {x.device}"
                    )

    def _mixed(self, other: torch.device) -> RuntimeError:
        return RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{self.device} and {other}! (aten::{self.kernel.name})"
        )

    def is_written(self, x: torch.Tensor, args: Any, kwargs: Any) -> bool:
        kernel = self.kernel
        given = [args[i] for i in kernel.written if i < len(args)]
        given += [kwargs[name] for name in kernel.written_names if name in kwargs]
        return any(x is y for each in given for y in (each if isinstance(each, list) else [each]))

    def generator(self, given: torch.Generator | None) -> torch.Generator:
        if given is None:
            return generators[self.index]
        if not any(given is each for each in generators):
            kind = given.device.type
            raise RuntimeError(f"Expected a 'sim' device type for generator but found '{kind}'")
        return given

    def leave(self, y: Any) -> Any:
        if not isinstance(y, torch.Tensor):
            return y
        found = self.aliases.get(id(y))
        if found is not None:
            return found[1]
        if self.kernel.is_view:
            for alias, x in self.aliases.values():
                if alias.untyped_storage().data_ptr() == y.untyped_storage().data_ptr():
                    place = (x.untyped_storage(), y.storage_offset(), y.size(), y.stride())
                    return view_of(empty_of(y.dtype, x.device.index), *place)
        fresh = to_sim(y, self.index)
        use(fresh, True, self.kernel.name)
        return fresh


def _become(x: torch.Tensor, alias: torch.Tensor) -> None:
    """Give a tensor the memory and shape that a CPU kernel gave to its alias."""
    kept = x.untyped_storage()
    own, grown = block_of(x).memory, alias.untyped_storage()
    if grown._cdata != own._cdata or grown.nbytes() > kept.nbytes():
        fresh = torch.UntypedStorage(grown.nbytes())
        fresh.copy_(grown)
        kept = adopt(fresh, x.device.index).untyped_storage()
    place = (kept, alias.storage_offset(), alias.size(), alias.stride())
    aten.set_.source_Storage_storage_offset.redispatch(CPU, x, *place)


def _checked(device: torch.device) -> torch.device:
    index = current.index if device.index is None else device.index
    if not 0 <= index < simulated_memory.visible:
        raise RuntimeError(f"invalid device ordinal: {NAME}:{index}")
    _initialize()
    return torch.device(NAME, index)


def _empty(
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> torch.Tensor:
    with torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
        made = aten.empty.memory_format(
            size, dtype=dtype, device="cpu", memory_format=memory_format
        )
        return to_sim(made, _checked(device or torch.device(NAME)).index)


def _empty_strided(
    size: Any,
    stride: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> torch.Tensor:
    with torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
        made = aten.empty_strided.default(size, stride, dtype=dtype, device="cpu")
        return to_sim(made, _checked(device or torch.device(NAME)).index)


def _resize_(self: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    with torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
        shape = torch.empty(size, dtype=self.dtype, device="meta")
        need = (self.storage_offset() + shape.numel()) * self.element_size()
        storage = self.untyped_storage()
        if need > storage.nbytes():
            fresh, old = torch.UntypedStorage(need).fill_(0), block_of(self).memory
            for i in range(min(1, old.nbytes())):
                bytes_of = [torch.empty(0, dtype=torch.uint8).set_(each) for each in (fresh, old)]
                bytes_of[i][: old.nbytes()].copy_(bytes_of[1])
            storage = adopt(fresh, self.device.index).untyped_storage()
        place = (storage, self.storage_offset(), size, shape.stride())
        return aten.set_.source_Storage_storage_offset.redispatch(CPU, self, *place)


def _copy_from(self: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy. A copy to pinned memory arrives when the host waits; until then it reads as NaN."""
    with torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
        is_from, is_to = self.device.type == NAME, dst.device.type == NAME
        source = to_cpu(self) if is_from else self
        target = to_cpu(dst) if is_to else dst
        if not source.numel():
            return dst
        note_launch("copy_")
        for tensor, is_write in ((self, False), (dst, True)):
            if tensor.device.type == NAME:
                use(tensor, is_write, "copy_")
        if is_from == is_to:
            target.copy_(source)
            return dst
        stream = current_stream((self if is_from else dst).device.index)
        host, way = (dst, "device to host") if is_from else (self, "host to device")
        if not non_blocking:
            note_wait(f"copy {way}")
            stream.finish()
        elif not host.is_pinned():
            note_wait(f"copy {way} of pageable memory")
        elif is_from:
            kept = source.clone()
            if target.is_contiguous():
                target.view(-1).view(torch.uint8).fill_(255)
            stream.copies.append(lambda: target.copy_(kept))
            return dst
        target.copy_(source)
        return dst


def _copy_from_and_resize(self: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    dst.resize_(self.size())
    return _copy_from(self, dst)


def _to_copy(
    self: torch.Tensor,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> torch.Tensor:
    with torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
        device = self.device if device is None else device
        form = memory_format or torch.preserve_format
        if device.type == NAME:
            made = torch.empty_like(self, dtype=dtype, device=device, memory_format=form)
        else:
            made = torch.empty_like(to_cpu(self), dtype=dtype, memory_format=form)
            if non_blocking:  # as CUDA does, into pinned memory
                _pinned.add(made.untyped_storage())
        return made.copy_(self, non_blocking)


def _native_dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[Any, Any]:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


# Generators, pinned memory and the module torch.sim.

generators: tuple[torch.Generator, ...] = ()
_pinned: Any = weakref.WeakSet()
module = types.ModuleType(f"torch.{NAME}")
_libraries: list[torch.library.Library] = []
_first = 0  # number of the first device that this process sees, among those of the machine


class Properties:
    """What the module says of a device."""

    major, minor, multi_processor_count, name = 9, 0, 1, "Simulated accelerator"

    def __init__(self, index: int):
        self.total_memory, self.uuid = memories[index].capacity, f"sim-{_first + index}"


def _initialize() -> None:
    global generators
    if not generators:  # as on CUDA, there are none before the first use
        generators = tuple(torch.Generator() for _ in range(COUNT))
        module.default_generators = generators
        module._initialized = True


def _set_device(device: Any) -> None:
    current.index = _checked(torch.device(NAME, index_of(device))).index


@contextmanager
def _device(device: Any) -> Iterator[None]:
    kept, current.index = current.index, index_of(device)
    try:
        yield
    finally:
        current.index = kept


def _exchange(index: int) -> int:
    kept = current.index
    current.index = index if index >= 0 else kept
    return kept


def _manual_seed_all(seed: int) -> None:
    _initialize()
    for each in generators:
        each.manual_seed(seed)


def _settled(device: Any = None) -> simulated_memory.Memory:
    simulated_memory.reap()
    return memories[index_of(device)]


def _memory_stats(device: Any = None) -> dict[str, int]:
    memory = _settled(device)
    sizes = {"current": memory.used, "peak": memory.peak}
    kinds = ("allocated_bytes", "reserved_bytes")
    by_name = {f"{kind}.all.{which}": sizes[which] for kind in kinds for which in sizes}
    return {**by_name, "num_ooms": 0, "num_alloc_retries": 0}


def _reset_peak(device: Any = None) -> None:
    memory = _settled(device)
    memory.peak = memory.used


def _memory_info(device: Any = None) -> tuple[int, int]:
    memory = _settled(device)
    return memory.capacity - memory.used, memory.capacity


def set_capacity(nbytes: int) -> None:
    """Set the bytes that each device has."""
    for memory in memories:
        memory.capacity = nbytes


def _is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    return self.untyped_storage() in _pinned


def _pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        copy = torch.empty_strided(self.size(), self.stride(), dtype=self.dtype).copy_(self)
        _pinned.add(copy.untyped_storage())
        return copy


def _fill_module() -> None:
    """Give torch.sim what torch.cuda has, and torch.accelerator the same."""
    used = {
        "memory_allocated": lambda device=None: _settled(device).used,
        "max_memory_allocated": lambda device=None: _settled(device).peak,
        "memory_reserved": lambda device=None: _settled(device).used,
        "max_memory_reserved": lambda device=None: _settled(device).peak,
        "memory_stats": _memory_stats,
        "reset_peak_memory_stats": _reset_peak,
        "empty_cache": lambda: None,
    }
    streams = simulated_streams
    made: dict[str, Any] = {
        **used,
        **{name: getattr(streams, name) for name in ("Stream", "Event", "current_stream")},
        **{name: getattr(streams, name) for name in ("default_stream", "set_stream", "stream")},
        "synchronize": streams.synchronize,
        "set_device": _set_device,
        "device": _device,
        "current_device": lambda: current.index,
        "device_count": lambda: simulated_memory.visible,
        "is_available": lambda: True,
        "is_initialized": lambda: bool(generators),
        "init": _initialize,
        "_lazy_init": _initialize,
        "_is_in_bad_fork": lambda: False,
        "default_generators": generators,
        "manual_seed": lambda seed: generators[current.index].manual_seed(seed),
        "manual_seed_all": _manual_seed_all,
        "get_rng_state": lambda device=NAME: generators[index_of(device)].get_state(),
        "set_rng_state": lambda state, device=NAME: generators[index_of(device)].set_state(state),
        "initial_seed": lambda: generators[current.index].initial_seed(),
        "mem_get_info": _memory_info,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_name": lambda device=None: Properties.name,
        "get_device_properties": lambda device=None: Properties(index_of(device)),
        "get_device_capability": lambda device=None: (9, 0),
    }
    for name in ("exchange_device", "_exchange_device", "maybe_exchange_device"):
        made[name] = _exchange
    for name, value in {**made, "_maybe_exchange_device": _exchange}.items():
        setattr(module, name, value)
    accelerator: Any = torch.accelerator
    for name, value in used.items():
        setattr(accelerator, name, value)
        setattr(accelerator.memory, name, value)
    accelerator.get_memory_info = accelerator.memory.get_memory_info = _memory_info
    accelerator.current_device_index = accelerator.current_device_idx = made["current_device"]
    accelerator.set_device_index = accelerator.set_device_idx = _set_device
    accelerator.current_stream, accelerator.set_stream = streams.current_stream, streams.set_stream
    accelerator.synchronize = streams.synchronize


# Registration.

COMPILED = 2  # launches of a fused function, the kernels that tests/core/rng/test_compile.py counts


def _compile(function: Callable[..., Any], dynamic: bool = False, **options: Any) -> Any:
    """Stand for torch.compile, which has no code for this device: run the function itself.

    With `dynamic`, as for fused functions, it counts as COMPILED launches.
    """

    def call(*args: Any) -> Any:
        with simulated_streams.counted_as(function.__name__, COMPILED):
            return function(*args)

    return call if dynamic else function


def _operations() -> Iterator[tuple[str, Any]]:
    """Yield (name, operation) of all that get a kernel here."""
    for full in torch._C._dispatch_get_all_op_names():
        space, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        if space != "aten" or name in _OWN or any(each in name for each in _FOREIGN):
            continue
        is_fused = name.startswith(("_foreach_", "_fused_", "_amp_"))
        if not (is_fused or torch._C._dispatch_has_kernel_for_dispatch_key(full, "CPU")):
            continue
        op = getattr(getattr(aten, name, None), overload or "default", None)
        if op is not None:
            yield rest, op


def register(devices: int = COUNT, first: int = 0) -> None:
    """Register the device in this process, which sees `devices` of the machine's from `first`."""
    global _first
    if _libraries:
        return
    assert not reason_to_skip(), reason_to_skip()
    from torch.utils.backend_registration import (  # here: a part of torch that may not be there
        _setup_privateuseone_for_python_backend,
    )

    _first, simulated_memory.visible = first, devices
    _fill_module()
    torch.compile = _compile  # type: ignore[assignment]
    torch.Tensor.record_stream = simulated_streams.record_stream  # type: ignore[method-assign]
    _setup_privateuseone_for_python_backend(NAME, module)
    library, rest = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    _libraries.extend([library, rest])

    def put(name: str, kernel: Any, key: str = "PrivateUse1") -> None:
        library.impl(name, kernel, key, allow_override=True)

    for name, op in _operations():
        put(name, _Kernel(op))
    for name in _VIEWS:
        base, _, overload = name.partition(".")
        put(name, _on_sizes(getattr(getattr(aten, base), overload or "default")))
    convolution, backward = _Kernel(aten.convolution.default), _convolution_backward()
    own = {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "set_.source_Storage": _set_storage,
        "resize_": _resize_,
        "_copy_from": _copy_from,
        "_copy_from_and_resize": _copy_from_and_resize,
        "_to_copy": _to_copy,
        "native_dropout": _native_dropout,
        "convolution_overrideable": lambda *args: convolution(*args),
        "convolution_backward_overrideable": backward,
        "record_stream": simulated_streams.record_stream,
        "is_pinned": lambda self, device=None: False,
    }
    for name, kernel in own.items():
        put(name, kernel)
    put("is_pinned", _is_pinned, "CPU")
    put("_pin_memory", _pin_memory, "CPU")
    simulated_attention.register(put, _Kernel)
    simulated_autocast.register(put, rest)
    simulated_guard.patch()
    simulated_memory.patch_storages()
    torch.__future__.set_swap_module_params_on_conversion(True)  # else tied weights are untied
    torch.serialization.register_package(15, _tag_of, simulated_memory.restore)


def _tag_of(storage: Any) -> str | None:
    return f"{NAME}:{storage.device.index}" if storage.device.type == NAME else None


def _on_sizes(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: op.redispatch(CPU, *args, **kwargs)


def _set_storage(self: torch.Tensor, source: Any) -> torch.Tensor:
    length = source.nbytes() // self.element_size()
    return aten.set_.source_Storage_storage_offset(self, source, 0, [length], [1])


def _convolution_backward() -> Callable[..., Any]:
    backward = _Kernel(aten.convolution_backward.default)

    def kernel(gradient: Any, inputs: Any, weight: Any, *rest: Any) -> Any:
        *shape, transposed, padding, groups, mask = rest
        channels = weight.shape[1] * groups if transposed else weight.shape[0]
        sizes = [channels] if mask[2] else None
        return backward(gradient, inputs, weight, sizes, *shape, transposed, padding, groups, mask)

    return kernel
