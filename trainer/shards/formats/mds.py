"""MDS, the format of mosaicml-streaming (version 2): rows of typed columns.

A file: the number of rows, the offset of each row and of the end (uint32), the columns as JSON,
the rows. A row: the lengths (uint32) of its columns of variable size, then their bytes.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import torch

from trainer.base.errors import ConfigError
from trainer.shards.formats.shard_parts import FileBytes
from trainer.shards.sources import Span

SUFFIXES = (".mds",)
_SHAPE_TYPES: tuple[Any, ...] = (np.uint8, np.uint16, np.uint32, np.uint64)
_DTYPES_BY_CODE = {
    **{8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32"},
    **{33: "int32", 34: "float32", 64: "uint64", 65: "int64", 66: "float64"},
}
_LISTS = {
    **{f"list[{kind}]": kind for kind in ("jpeg", "png", "pil")},
    **dict.fromkeys(("jpeg_array", "jpegarray"), "jpeg"),
}
_SCALARS = (
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
)


class MdsShard:
    """The rows of one file. Columns named 0, 1, ... make a tuple, others a dict."""

    def __init__(self, file: FileBytes, settings: Mapping[str, Any], rows: int, span: Span | None):
        self._data = file
        path = file.path
        (count,) = struct.unpack("<I", self._data.read(0, 4))
        if count != rows:
            raise ValueError(f"{path} has {count} rows, and {rows} in its index")
        self._ends = np.frombuffer(self._data.read(4, 4 * (count + 1)), "<u4")
        if int(self._ends[-1]) != len(self._data):
            raise ValueError(
                f"{path} has {len(self._data)} bytes, and {self._ends[-1]} in its head"
            )
        names = settings["column_names"]
        codes = [decoder(each) for each in settings["column_encodings"]]
        self._columns = [*zip(names, codes, settings["column_sizes"], strict=True)]
        self._is_tuple = sorted(names) == sorted(map(str, range(len(names))))

    def __getitem__(self, row: int) -> Any:
        begin, end = int(self._ends[row]), int(self._ends[row + 1])
        data = self._data.read(begin, end - begin)
        count = sum(size is None for _, _, size in self._columns)
        lengths = iter(struct.unpack_from(f"<{count}I", data))
        offset = 4 * count
        values = {}
        for name, decode, size in self._columns:
            length = next(lengths) if size is None else size
            values[name] = decode(data[offset : offset + length])
            offset += length
        if offset != len(data):
            raise ValueError(f"row {row} has {end - begin} bytes, and its columns do not fill them")
        return tuple(values[str(n)] for n in range(len(values))) if self._is_tuple else values


def decoder(encoding: str) -> Callable[[bytes], Any]:
    """Return the function that decodes a column. Raises ConfigError for one that is not read."""
    kind, _, form = encoding.partition(":")
    plain: dict[str, Callable[[bytes], Any]] = {
        **{"bytes": bytes, "str": lambda data: data.decode(), "json": json.loads},
        **{"str_int": int, "str_float": float, "str_decimal": lambda data: Decimal(data.decode())},
        **{"jpeg": _image, "png": _image, "pil": _raw_image},
    }
    if kind in _LISTS:
        decode, begin = plain[_LISTS[kind]], 4 * kind.startswith("list")  # which has 4 bytes free
        return lambda data: [*map(decode, _elements(data[begin:]))]
    if kind == "int":
        return lambda data: struct.unpack("<q", data)[0]
    if kind in _SCALARS:
        return lambda data: np.frombuffer(data, kind)[0]
    if kind == "ndarray":
        return _Array(form).decode
    if kind in plain:
        return plain[kind]
    why = "may run code when it is read" if kind == "pkl" else "is not read"
    raise ConfigError(f"""MDS column of encoding {encoding!r}: {why};
        use bytes, str, int, ndarray, json, jpeg, png, pil, {_SCALARS[0]} to {_SCALARS[-1]}""")


def check_columns(settings: Mapping[str, Any]) -> None:
    for encoding in settings["column_encodings"]:
        decoder(encoding)


class _Array:
    """An array whose dtype and shape are those of the column, or of each value."""

    def __init__(self, form: str):
        dtype, _, shape = form.partition(":")
        if dtype and dtype not in _DTYPES_BY_CODE.values():
            raise ConfigError(f"MDS column of arrays of {dtype}: must be {', '.join(_SCALARS)}")
        self._dtype = np.dtype(dtype) if dtype else None
        self._shape = tuple(map(int, shape.split(","))) if shape else None

    def decode(self, data: bytes) -> torch.Tensor:
        offset = 0
        dtype = self._dtype
        if dtype is None:
            dtype = np.dtype(_DTYPES_BY_CODE[data[0]])
            offset = 1
        shape = self._shape
        if shape is None:
            axes, kind = data[offset] >> 2, np.dtype(_SHAPE_TYPES[data[offset] & 3])
            shape = tuple(np.frombuffer(data, kind, axes, offset + 1).tolist())
            offset += 1 + axes * kind.itemsize
        values = np.frombuffer(data, dtype, offset=offset).reshape(shape)
        return torch.from_numpy(values.copy())


def _image(data: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(data))


def _elements(data: bytes) -> Iterator[bytes]:
    """Yield the elements of a list: their number, their lengths, then their bytes."""
    (count,) = struct.unpack_from("<I", data)
    offset = 4 + 4 * count
    for size in struct.unpack_from(f"<{count}I", data, 4):
        yield data[offset : offset + size]
        offset += size


def _raw_image(data: bytes) -> Any:
    from PIL import Image

    width, height, length = struct.unpack_from("<3I", data)
    return Image.frombytes(data[12 : 12 + length].decode(), (width, height), data[12 + length :])


class MdsWriter:
    """Encodes rows of equal columns into the bytes of MDS files.

    `columns`: encoding by name, such as {"0": "ndarray:float32:3,32,32", "1": "int"}.
    """

    def __init__(self, columns: Mapping[str, str]):
        self.names = sorted(columns)
        self.encodings = [columns[name] for name in self.names]
        self.sizes = [_fixed_size(each) for each in self.encodings]
        names = ("column_names", "column_encodings", "column_sizes")
        self.settings = dict(zip(names, (self.names, self.encodings, self.sizes), strict=True))
        self._config = json.dumps(self.settings, sort_keys=True).encode()
        self._rows: list[bytes] = []
        self._num_bytes = 0

    def add(self, values: Mapping[str, Any]) -> None:
        """Raise ValueError, or an error of a converter, for values that the columns cannot hold."""
        if sorted(values) != self.names:
            raise ValueError(f"it has columns {sorted(values)}, and others {self.names}")
        pairs = zip(self.names, self.encodings, strict=True)
        parts = [_encode_alike(code, values[name]) for name, code in pairs]
        lengths = []
        for name, part, size in zip(self.names, parts, self.sizes, strict=True):
            if size is None:
                lengths.append(len(part))
            elif len(part) != size:
                raise ValueError(f"column {name} has {len(part)} bytes, and {size} in other rows")
        row = struct.pack(f"<{len(lengths)}I", *lengths) + b"".join(parts)
        self._rows.append(row)
        self._num_bytes += len(row) + 4

    def __len__(self) -> int:
        return len(self._rows)

    def is_full(self, most_bytes: int) -> bool:
        """Return True if a row like those before would exceed `most_bytes`."""
        count = len(self._rows)
        size = 8 + len(self._config) + self._num_bytes
        return bool(count) and size + self._num_bytes // count > most_bytes

    def take(self) -> bytes:
        """Return the bytes of a file with the rows added since the last call."""
        head = 4 + 4 * (len(self._rows) + 1) + len(self._config)
        ends = np.cumsum([head, *map(len, self._rows)]).astype("<u4")
        data = b"".join(
            [struct.pack("<I", len(self._rows)), ends.tobytes(), self._config, *self._rows]
        )
        self._rows = []
        self._num_bytes = 0
        return data


def encoding_of(value: Any) -> str:
    """Return the encoding for values like this one. Raises ValueError if there is none."""
    plain: dict[type, str] = {int: "int", float: "float64", str: "str", bytes: "bytes"}
    if type(value) in plain:
        return plain[type(value)]
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    if dtype in _SCALARS and value.ndim == 0:
        return dtype
    if dtype in _DTYPES_BY_CODE.values() and 0 not in value.shape:
        return f"ndarray:{dtype}"
    form = f" of {dtype} and shape {tuple(value.shape)}" if dtype else ""
    raise ValueError(f"a {type(value).__name__}{form} has no column type")


def _fixed_size(encoding: str) -> int | None:
    kind, _, form = encoding.partition(":")
    if kind == "int":
        return 8
    if kind in _SCALARS:
        return np.dtype(kind).itemsize
    dtype, _, shape = form.partition(":")
    if kind == "ndarray" and shape:
        return int(np.prod([*map(int, shape.split(","))])) * np.dtype(dtype).itemsize
    return None


def _encode_alike(encoding: str, value: Any) -> bytes:
    """Encode a value. Raises ValueError if it would be another one when it is read."""
    data = _encode(encoding, value)
    own = encoding_of(value)
    if not encoding.startswith(own) and (":" in encoding or decoder(encoding)(data) != value):
        raise ValueError(f"a value of type {own}, and of {encoding} in other examples")
    return data


def _encode(encoding: str, value: Any) -> bytes:
    kind, _, form = encoding.partition(":")
    if kind == "ndarray":
        return _encode_array(form, np.ascontiguousarray(np.asarray(value)))
    if kind == "int":
        return struct.pack("<q", value)
    if kind in _SCALARS:
        return np.dtype(kind).type(value).tobytes()
    return value.encode() if kind == "str" else bytes(value)


def _encode_array(form: str, array: np.ndarray) -> bytes:
    dtype, _, shape = form.partition(":")
    head = b""
    if not dtype:
        head = bytes([next(code for code, name in _DTYPES_BY_CODE.items() if array.dtype == name)])
    elif array.dtype != dtype:
        raise ValueError(f"an array of {array.dtype}, and of {dtype} in other rows")
    if not shape:
        longest = max(array.shape)
        code = sum(longest >= 2**bits for bits in (8, 16, 32))
        head += (
            bytes([array.ndim << 2 | code]) + np.array(array.shape, _SHAPE_TYPES[code]).tobytes()
        )
    return head + array.tobytes()
