"""torch's C++ device guard for the simulated accelerator, which torch answers with "device 0 of 1".

The registered guard gets a copy of its virtual table, in which five entries call back to Python;
their places are those in the header that torch ships. Autograd then has a thread for each device,
as on CUDA. An entry that returns a stream (16 bytes) cannot be replaced by ctypes, so streams are
Python's own.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from harness.simulated_memory import COUNT
from harness.simulated_streams import current

_PRIVATE_USE_1 = 20  # c10::DeviceType
_HEADER = "include/c10/core/impl/DeviceGuardImplInterface.h"
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_kept: list[Any] = []  # what C++ calls must stay alive


def _names() -> list[str]:
    """Return the virtual methods of the guard in their order, without its destructor."""
    text = (Path(torch.__file__).parent / _HEADER).read_text()
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    text = text[max(0, text.find("struct C10_API DeviceGuardImplInterface {")) :]
    names = re.findall(r"virtual\s+[^;{(]*?(~?\w+)\s*\(", text)
    return names[: names.index("~DeviceGuardImplInterface")]


def _packed(index: int) -> int:
    return _PRIVATE_USE_1 | (index & 0xFF) << 8


def _set(_: int, device: int) -> None:
    index = ctypes.c_int8(device >> 8 & 0xFF).value
    if current.is_kept or index < 0:
        return
    current.index = index
    # autograd's thread of a device keeps to it: torch's guard has every stream on device 0
    current.is_kept = isinstance(threading.current_thread(), threading._DummyThread)


def _exchange(_: int, device: int) -> int:
    kept = current.index
    _set(_, device)
    return _packed(kept)


def patch() -> None:
    """Answer the guard's questions about devices from `current`."""
    names = _names()
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    registry = (ctypes.c_void_p * 64).in_dll(library, _REGISTRY)
    this = ctypes.cast(registry[_PRIVATE_USE_1], ctypes.POINTER(ctypes.c_void_p))
    old = ctypes.cast(this[0], ctypes.POINTER(ctypes.c_void_p))
    size = len(names) + 4  # two destructors after them; offset and type before them
    table = (ctypes.c_void_p * size)(*[old[i - 2] for i in range(size)])

    def put(name: str, result: Any, arguments: list[Any], answer: Callable[..., Any]) -> None:
        callback = ctypes.CFUNCTYPE(result, ctypes.c_void_p, *arguments)(answer)
        _kept.append(callback)
        table[2 + names.index(name)] = ctypes.cast(callback, ctypes.c_void_p).value

    put("getDevice", ctypes.c_uint16, [], lambda _: _packed(current.index))
    put("exchangeDevice", ctypes.c_uint16, [ctypes.c_uint16], _exchange)
    put("setDevice", None, [ctypes.c_uint16], _set)
    put("uncheckedSetDevice", None, [ctypes.c_uint16], _set)
    put("deviceCount", ctypes.c_int8, [], lambda _: COUNT)
    _kept.append(table)
    this[0] = ctypes.addressof(table) + 16
