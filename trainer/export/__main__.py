"""`python -m trainer.export DIR format=onnx`: write a trained model for other programs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch

from trainer.checkpoints import manifest
from trainer.cli import answer, check_alone, load_task, run, run_directory, take_words
from trainer.config.compose import load_run_config
from trainer.errors import ConfigError, RunError
from trainer.export.model import ExportModel, load_trained, on_one_process, tensors_in
from trainer.export.notes import describe
from trainer.export.tensorrt import build_engine, check_tensorrt

HELP = """usage: python -m trainer.export DIR format=onnx|safetensors|tensorrt [out=FILE]
       [split=eval] [key=value ...] [--config-dir DIR]

Writes a trained model for other programs: the weights used for evaluation, in fp32, with a dynamic
batch axis. The outputs of the ONNX graph are compared with PyTorch's on real examples, in batches
of 1 and 7, before anything is written; those of a TensorRT engine are not. Beside the model are a
page about its inputs and the preprocessing before them, and the examples with their outputs. DIR is
a run directory (its newest valid checkpoint is used) or one directory step-<number> in its
checkpoints, of a run in any layout.

format: onnx (extra export); safetensors: the weights alone; tensorrt: an engine for this machine's
        GPU, built from ONNX by the package tensorrt
out:    the file; by default export/step-<number>.<suffix> in the run directory
split:  the split that the examples are from; by default the first one of eval.splits"""

SUFFIXES = {"onnx": ".onnx", "safetensors": ".safetensors", "tensorrt": ".engine"}
USAGE = "python -m trainer.export DIR format=onnx"


def main(arguments: Sequence[str]) -> int:
    own, rest = take_words(arguments, ("format", "out", "split"))
    form = own.get("format", "")
    if form not in SUFFIXES:
        given = f"format={form}" if form else "format: is missing"
        raise ConfigError(f"{given}: must be one of {', '.join(SUFFIXES)}: {USAGE}")
    place, overrides, config_dirs = run_directory(rest, f"give one run directory: {USAGE}")
    if "out" in own and Path(own["out"]).suffix != SUFFIXES[form]:
        raise ConfigError(f"out={own['out']}: must end with {SUFFIXES[form]}")
    check_alone("trainer.export", "start it as one process")
    if form == "tensorrt":
        check_tensorrt(place)
    if "split" in own:
        overrides.append(f"eval.splits=[{own['split']}]")
    config = on_one_process(load_run_config(place, overrides, config_dirs))
    trained = load_trained(load_task(config)(config))
    out = Path(own["out"]) if "out" in own else _default(place, trained, SUFFIXES[form])
    for path in _files_of(out):
        if path.exists():
            raise ConfigError(f"out={path}: already exists; give another name")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as scratch:
            lines = _write(form, trained, Path(scratch) / out.name)
            for path in sorted(Path(scratch).iterdir()):
                path.replace(out.parent / path.name)
    except OSError as error:
        raise RunError(f"{out}: cannot be written: {error.strerror}") from None
    finally:
        with suppress(OSError):  # it is not empty
            out.parent.rmdir()
    files = [str(path) for path in _files_of(out)]
    facts = {"format": form, "step": trained.task.step, "files": files, "notes": lines}
    text = "\n".join([*lines, f"written: {', '.join(files)}"])
    return answer(0, "written", facts, lambda: print(text))


def _default(place: str, trained: ExportModel, suffix: str) -> Path:
    home = Path(place)
    home = home.resolve().parent.parent if (home / manifest.MANIFEST).is_file() else home
    return home / "export" / f"step-{trained.task.step:08d}{suffix}"


def _files_of(out: Path) -> list[Path]:
    return [out, Path(f"{out}.md"), Path(f"{out}.npz")]


def _write(form: str, trained: ExportModel, path: Path) -> list[str]:
    """Write the files of an export and return lines about it, after it was compared."""
    task = trained.task
    facts = {"task": task.config.task.name, "step": str(task.step)}
    flat = trained.flat
    if form == "safetensors":
        from trainer.export.weights import write_weights

        lines = write_weights(trained, path, facts)
    else:
        from trainer.export.graph import compare, scale_of, write_graph

        graph = path.with_suffix(".onnx")
        flat = write_graph(trained, graph, facts)
        found = compare(trained, flat, graph)
        each = ", ".join(f"{value:.1e} at batch {rows}" for rows, value in found.items())
        scale = max(map(scale_of, flat(*tensors_in(trained.inputs))))
        relative = f" (relative to the largest output, {scale:.3g})" if scale > 1 else ""
        lines = [f"largest difference to PyTorch on examples of the data: {each}{relative}"]
        if form == "tensorrt":
            lines += build_engine(trained, flat, graph, path)
            graph.unlink()
    tensors = tensors_in(trained.inputs)
    arrays = dict(zip(flat.inputs, tensors, strict=True))
    outputs = dict(zip(flat.outputs, flat(*tensors), strict=True))
    plain: dict[str, Any] = {f"inputs.{name}": t.numpy() for name, t in arrays.items()}
    plain |= {f"outputs.{name}": t.detach().numpy() for name, t in outputs.items()}
    batched = trained.names_with_batch(flat)
    if trained.rows > 1 and all(
        name not in batched or torch.equal(t, t[:1].expand_as(t)) for name, t in outputs.items()
    ):
        lines.append("warning: the outputs are equal for all examples, so this shows little")
    numpy.savez(f"{path}.npz", **plain)
    Path(f"{path}.md").write_text(describe(trained, path.name, arrays, outputs, batched, lines))
    return lines


if __name__ == "__main__":
    run(main, HELP)
