"""Predictions of a task for each example of a split, once, in the order of the data set."""

from __future__ import annotations

import json
import math
import os
import secrets
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from trainer import Config
from trainer.base.errors import ConfigError, RunError, counted
from trainer.base.new_files import check_new
from trainer.base.process.child import interrupted_by_sigterm
from trainer.cli import answer, load_task

Tensors = Mapping[str, torch.Tensor]


def predict(config: Config, out: Path) -> int:
    """Predict on all ranks, write on rank 0, and return the exit code."""
    split = config.eval.splits[0] if config.eval.splits else ""
    task = load_task(config)(config)
    _find_writer(out)
    check_new(f"out={out}", out)
    from trainer.core.api import Evaluator, examine

    predictions = examine(task, Evaluator.predict)
    if task.world.rank:
        return 0
    if not predictions:
        raise ConfigError(f"build_dataset({split!r}) returned 0 examples; choose another split")
    _write(out, predictions)
    rows = len(next(iter(predictions.values())))
    facts = {
        "file": out,
        "step": task.step,
        "split": split,
        "examples": rows,
        "names": [*predictions],
    }
    line = f"{counted(rows, 'example')} of {split}, {', '.join(predictions)}: {out}"
    return answer(0, "written", facts, lambda: print(line))


def _find_writer(out: Path) -> Callable[[Any, Tensors], None]:
    if out.suffix == ".parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise ConfigError(f"out={out}: run pip install 'lockstep-trainer[parquet]'") from None
    return WRITERS[out.suffix]


def _write(out: Path, predictions: Tensors) -> None:
    """Write a file as a whole, or not at all."""
    writer = _find_writer(out)
    for name, tensor in predictions.items():
        if out.suffix != ".npz" and (name == "index" or tensor.is_complex()):
            why = "is the number of the row here" if name == "index" else "is complex"
            raise ConfigError(f"predict(outputs) returned {name}, which {why}; use out=FILE.npz")
    plain = {name: t if _is_in_numpy(t.dtype) else t.float() for name, t in predictions.items()}
    part = out.with_name(f".predictions-{secrets.token_hex(4)}")
    with interrupted_by_sigterm():
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                writer(file, plain)
                file.flush()
                os.fsync(file.fileno())
            part.replace(out)
        except OSError as error:
            raise RunError(f"""{out}: cannot be written: {error.strerror or error};
                make room, or give another out=FILE""") from None
        finally:
            with suppress(OSError):
                part.unlink()


def _is_in_numpy(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point or (dtype.itemsize > 1 and dtype is not torch.bfloat16)


def _write_arrays(file: Any, predictions: Tensors) -> None:
    import numpy

    with zipfile.ZipFile(file, "w") as archive:  # as numpy.savez, which cannot take any name
        for name, tensor in predictions.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                numpy.lib.format.write_array(entry, tensor.numpy(), allow_pickle=False)


def _write_lines(file: Any, predictions: Tensors) -> None:
    columns = [
        _finite(t.tolist()) if t.is_floating_point() else t.tolist() for t in predictions.values()
    ]
    for index, values in enumerate(zip(*columns, strict=True)):
        line = {"index": index, **dict(zip(predictions, values, strict=True))}
        file.write(json.dumps(line, allow_nan=False).encode() + b"\n")


def _finite(values: Any) -> Any:
    """Return nested lists with None for NaN and infinity, which JSON does not have."""
    if isinstance(values, list):
        return [_finite(value) for value in values]
    return values if math.isfinite(values) else None


def _write_table(file: Any, predictions: Tensors) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = {"index": torch.arange(len(next(iter(predictions.values())))), **predictions}
    plain = {name: t.numpy() if t.dim() == 1 else t.tolist() for name, t in columns.items()}
    parquet.write_table(pyarrow.table(plain), file)


WRITERS = {".npz": _write_arrays, ".jsonl": _write_lines, ".parquet": _write_table}
