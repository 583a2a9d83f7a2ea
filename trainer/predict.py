"""`python -m trainer.predict DIR split=test`: write what the task predicts for a split."""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoints import manifest
from trainer.cli import answer, load_task, run, run_directory, take_words
from trainer.errors import ConfigError, RunError, counted
from trainer.evaluate import load_for_these_ranks

HELP = """usage: python -m trainer.predict DIR [split=test] [out=FILE] [key=value ...]
       [--config-dir DIR]

Writes what the task's predict(outputs) returns for each example of a split, once, in the order of
the data set. DIR is a run directory (its newest valid checkpoint is used) or one directory
step-<number> in its checkpoints. Any layout writes the same rows:
torchrun --nproc_per_node=2 -m trainer.predict DIR.

split: the split, as build_dataset names it; by default the first one of eval.splits
out:   a new file .npz (one array for each name), .jsonl (one object for each example) or .parquet
       (extra parquet); by default predictions/<split>-step-<number>.npz in the run directory"""

Tensors = Mapping[str, torch.Tensor]


def main(arguments: Sequence[str]) -> int:
    """Predict on all ranks, write on rank 0, and return the exit code."""
    own, rest = take_words(arguments, ("split", "out"))
    advice = "give one run directory: python -m trainer.predict DIR [split=test] [out=FILE]"
    place, overrides, config_dirs = run_directory(rest, advice)
    if "," in own.get("split", ""):
        raise ConfigError(f"split={own['split']}: must be one split; call predict for each")
    config = load_for_these_ranks(place, own, overrides, config_dirs)
    task = load_task(config)(config)
    home = Path(place)
    home = home.resolve().parent.parent if (home / manifest.MANIFEST).is_file() else home
    out = Path(own["out"]) if "out" in own else None
    _find_writer(out)
    _check_place(out, out or home / "predictions" / "file")
    from trainer.engine.evaluation import Evaluator
    from trainer.trainer import examine

    found = examine(task, Evaluator.predict)
    if task.world.rank:
        return 0
    split = config.eval.splits[0]
    if not found:
        raise ConfigError(f"build_dataset({split!r}) returned 0 examples; choose another split")
    out = out or home / "predictions" / f"{split}-step-{task.step:08d}.npz"
    _write(out, found)
    rows = len(next(iter(found.values())))
    facts = {"file": out, "step": task.step, "split": split, "examples": rows, "names": [*found]}
    line = f"{counted(rows, 'example')} of {split}, {', '.join(found)}: {out}"
    return answer(0, "written", facts, lambda: print(line))


def _find_writer(out: Path | None) -> Callable[[Any, Tensors], None]:
    suffix = ".npz" if out is None else out.suffix
    if suffix not in WRITERS:
        raise ConfigError(f"out={out}: must end with {', '.join(WRITERS)}")
    if suffix == ".parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise ConfigError(f"out={out}: run pip install 'lockstep-trainer[parquet]'") from None
    return WRITERS[suffix]


def _check_place(out: Path | None, path: Path) -> None:
    """Raise ConfigError if `out` exists, as a file of the run or of the data may, or `path` cannot
    be written."""
    given = f"out={path}" if out else str(path.parent)
    is_taken = False
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            is_taken = out is not None and bool(out.lstat())
        folder = next(each for each in path.absolute().parents if os.path.lexists(each))
        is_writable = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    except (OSError, ValueError) as error:  # a name that is too long, or a null character
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{given}: {why}; give another name") from None
    if is_taken:
        raise ConfigError(f"{given}: already exists; give another name")
    if not is_writable:
        why = "is not writable" if folder.is_dir() else "is not a directory"
        raise ConfigError(f"{given}: cannot be written, {folder} {why}; use out=FILE elsewhere")


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM, as torchrun sends it after Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _write(out: Path, found: Tensors) -> None:
    """Write a file as a whole, or not at all."""
    writer = _find_writer(out)
    for name, tensor in found.items():
        if out.suffix != ".npz" and (name == "index" or tensor.is_complex()):
            why = "is the number of the row here" if name == "index" else "is complex"
            raise ConfigError(f"predict(outputs) returned {name}, which {why}; use out=FILE.npz")
    plain = {name: t if _is_in_numpy(t.dtype) else t.float() for name, t in found.items()}
    part = out.with_name(f".predictions-{secrets.token_hex(4)}")
    with _interrupted_by_sigterm():
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                writer(file, plain)
                file.flush()
                os.fsync(file.fileno())
            part.replace(out)
        except OSError as error:
            why = f"cannot be written: {error.strerror or error}"
            raise RunError(f"{out}: {why}; make room, or give another out=FILE") from None
        finally:
            with suppress(OSError):
                part.unlink()


def _is_in_numpy(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point or (dtype.itemsize > 1 and dtype is not torch.bfloat16)


def _write_arrays(file: Any, found: Tensors) -> None:
    import numpy

    with zipfile.ZipFile(file, "w") as archive:  # as numpy.savez, which cannot take any name
        for name, tensor in found.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                numpy.lib.format.write_array(entry, tensor.numpy(), allow_pickle=False)


def _write_lines(file: Any, found: Tensors) -> None:
    columns = [_finite(t.tolist()) if t.is_floating_point() else t.tolist() for t in found.values()]
    for index, values in enumerate(zip(*columns, strict=True)):
        line = {"index": index, **dict(zip(found, values, strict=True))}
        file.write(json.dumps(line, allow_nan=False).encode() + b"\n")


def _finite(values: Any) -> Any:
    """Return nested lists with None for NaN and infinity, which JSON does not have."""
    if isinstance(values, list):
        return [_finite(value) for value in values]
    return values if math.isfinite(values) else None


def _write_table(file: Any, found: Tensors) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = {"index": torch.arange(len(next(iter(found.values())))), **found}
    plain = {name: t.numpy() if t.dim() == 1 else t.tolist() for name, t in columns.items()}
    parquet.write_table(pyarrow.table(plain), file)


WRITERS = {".npz": _write_arrays, ".jsonl": _write_lines, ".parquet": _write_table}


if __name__ == "__main__":
    run(main, HELP)
