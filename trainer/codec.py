"""The form in which ranks and files tell what is no tensor: JSON as bytes, and names of dtypes."""

from __future__ import annotations

import json
from typing import Any

import torch


def encode(value: Any) -> torch.Tensor:
    """Return a uint8 tensor of JSON on the CPU."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def decode(data: torch.Tensor) -> Any:
    return json.loads(data.cpu().numpy().tobytes())


def name_of(dtype: torch.dtype) -> str:
    """Return the name that `torch` has for a dtype, such as float32."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
