"""TensorRT: an engine for one kind of GPU, built from ONNX. Never run (docs/gpu.md)."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import torch

from trainer.errors import ConfigError, RunError
from trainer.export.model import ROWS, ExportModel, Flat, tensors_in

MOST_ROWS = 64  # of a batch of the engine
OFTEN = ROWS  # the batch that it is tuned for


def check_tensorrt(place: str) -> None:
    """Raise ConfigError, with the commands for another machine, without a GPU and the package."""
    missing = "" if torch.cuda.is_available() else "an NVIDIA GPU, and torch sees none here"
    try:
        import tensorrt  # type: ignore[import-not-found,unused-ignore] # noqa: F401
    except ImportError:
        missing = missing or "pip install tensorrt"
    if missing:
        export = f"python -m trainer.export {shlex.quote(place)} format=onnx out=model.onnx"
        shapes = " ".join(f"--{end}Shapes=<input>:<shape>" for end in ("min", "opt", "max"))
        build = f"trtexec --onnx=model.onnx --saveEngine=model.engine {shapes}"
        there = f"run here: {export}; on a machine with a GPU: {build}"
        raise ConfigError(f"format=tensorrt: needs {missing}; {there} (docs/results.md)")


def build_engine(trained: ExportModel, flat: Flat, graph: Path, path: Path) -> list[str]:
    """Build an engine for batches of 1 to 64 rows, in fp32. Raises RunError if TensorRT cannot."""
    import tensorrt as trt  # type: ignore[import-not-found,unused-ignore]

    logger: Any = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        errors = "; ".join(str(parser.get_error(n)) for n in range(parser.num_errors))
        raise RunError(f"format=tensorrt: the graph cannot be read: {errors[:300]}")
    profile = builder.create_optimization_profile()
    for name, tensor in zip(flat.inputs, tensors_in(trained.inputs), strict=True):
        shapes = [(rows, *tensor.shape[1:]) for rows in (1, OFTEN, MOST_ROWS)]
        profile.set_shape(name, *shapes)
    settings = builder.create_builder_config()
    settings.clear_flag(trt.BuilderFlag.TF32)
    settings.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, settings)
    if engine is None:
        raise RunError("format=tensorrt: the engine cannot be built; see the lines above")
    path.write_bytes(bytes(engine))
    name = torch.cuda.get_device_name()
    return [f"engine for {name}, batches of 1 to {MOST_ROWS} rows; its outputs were not compared"]
