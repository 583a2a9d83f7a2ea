"""The table of devices: peak speed, memory and links, from data sheets or from the user's file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainer.base.errors import ConfigError, one_line
from trainer.base.plain_files import read_yaml
from trainer.core.config.typed import suggest

TABLE = Path(__file__).with_name("devices.yaml")
NUMBERS_OF_A_DEVICE = ("memory_gb", "memory_gb_s", "node_gb_s", "network_gb_s")
SLOWER_VARIANTS = {"pcie", "nvl", "mig", "laptop", "max", "cpu"}  # slower than what the table has
ASSUMED = ("compute", "links", "memory", "latency_us")
TABLE_PARTS = ("devices", "assumed")
ARITHMETIC = {"amp_bf16": "bf16", "amp_fp16": "fp16"}  # of a precision; others have its name


@dataclass(frozen=True)
class Device:
    """A device; `assumed` holds the fractions of its peaks that a run reaches, and the latency."""

    name: str
    is_gpu: bool
    tflops: Mapping[str, float]
    memory_gb: float
    memory_gb_s: float
    node_gb_s: float
    network_gb_s: float
    assumed: Mapping[str, float]

    @property
    def room(self) -> float:
        """Bytes of memory for tensors."""
        return self.memory_gb * 1e9 * self.assumed["memory"]

    def peak(self, precision: str) -> float | None:
        """Return the peak of its data sheet in operations per second."""
        tflops = self.tflops.get(ARITHMETIC.get(precision, precision))
        return None if tflops is None else tflops * 1e12

    def flops_per_s(self, precision: str) -> float:
        """Return the assumed speed. Raises ConfigError if the device has no such arithmetic."""
        kind = ARITHMETIC.get(precision, precision)
        if kind not in self.tflops:
            raise ConfigError(f"""strategy.precision={precision}:
                device={self.name} has {", ".join(self.tflops)}; choose another precision""")
        return self.tflops[kind] * 1e12 * self.assumed["compute"]


def find_known(name: str) -> Device | None:
    """Return the device of the table that torch's name, such as "NVIDIA H100 80GB HBM3", is."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    pairs = ["".join(pair) for pair in pairwise(words)]  # RTX 4090
    device_name = next((key for key in list_devices() if key in words or key in pairs), None)
    return (
        None
        if device_name is None or SLOWER_VARIANTS.intersection(words)
        else find_device(device_name, None)
    )


def list_devices() -> list[str]:
    """Return the names of the table."""
    return list(_read(TABLE)[0])


def find_device(name: str, file: str | None) -> Device:
    """Return a device of the table, or of the user's `file`.

    Raises ConfigError for an unknown name or an invalid file.
    """
    path = Path(file) if file else TABLE
    table, assumed = _read(path)
    if name not in table:
        near = suggest(name, table)
        add = near or "; add it to a copy of the table and give devices=<file>"
        raise ConfigError(f"device={name}: must be one of {', '.join(table)}{add}")
    entry = table[name]
    where = f"devices={path}: {name}" if file else name
    if not isinstance(entry, dict) or not isinstance(entry.get("tflops"), dict):
        raise ConfigError(f"{where}.tflops: must map fp32 and others to numbers; see the example")
    kind = entry.get("kind", "gpu")
    if kind not in ("gpu", "cpu"):
        raise ConfigError(f"{where}.kind={kind}: must be gpu or cpu")
    tflops = {str(key): _number(where, f"tflops.{key}", v) for key, v in entry["tflops"].items()}
    numbers = {key: _number(where, key, entry.get(key)) for key in NUMBERS_OF_A_DEVICE}
    assumptions = {key: _number("assumed", key, assumed.get(key)) for key in ASSUMED}
    return Device(name, kind == "gpu", tflops, **numbers, assumed=assumptions)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        content = read_yaml(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise ConfigError(f"""devices={path}: cannot be read: {reason};
            copy {TABLE.name} of the package""") from None
    parts: list[Any] = [
        content.get(key) if isinstance(content, dict) else None for key in TABLE_PARTS
    ]
    if not all(isinstance(part, dict) for part in parts):
        raise ConfigError(f"""devices={path}: must have the mappings {" and ".join(TABLE_PARTS)};
            copy {TABLE.name} of the package""")
    return parts[0], parts[1]


def _number(where: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ConfigError(f"{where}.{key}={value}: must be a number above 0")
    return float(value)
