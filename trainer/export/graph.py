"""ONNX: the graph of a model with a dynamic batch axis, compared with PyTorch by ONNX Runtime."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import torch

from trainer.errors import ConfigError, RunError, one_line
from trainer.export.model import ROWS, ExportModel, Flat, rows_of, tensors_in

NEEDS = "format=onnx: run pip install 'lockstep-trainer[export]'"
LIMIT = 1e-5  # of the largest difference to PyTorch, relative to outputs above 1
MOST_BYTES = 1.8e9  # of a file: protobuf ends at 2 GiB
Differences = dict[int, float]  # the largest one by batch size


def write_graph(trained: ExportModel, path: Path, facts: dict[str, str]) -> Flat:
    """Write a model as ONNX; weights above 1.8 GB go to a second file beside it.

    Raises ConfigError if a package is missing, or if torch cannot export the model.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError:
        raise ConfigError(NEEDS) from None
    flat = trained.flat.eval()
    tensors = tuple(tensors_in(trained.inputs))
    batch = torch.export.Dim("batch", min=1)
    axes = tuple({0: batch} if t.dim() and len(t) == trained.rows else None for t in tensors)
    try:
        with _quietly():
            program = torch.onnx.export(
                flat,
                tensors,
                dynamo=True,
                dynamic_shapes={"tensors": axes},
                input_names=flat.inputs,
                output_names=flat.outputs,
                verbose=False,
            )
    except Exception as error:
        why = f"{one_line(error)[:300]}; use format=safetensors"
        raise ConfigError(f"format=onnx: torch cannot export this model: {why}") from error
    assert program is not None
    program.save(path)
    made = onnx.load(path)
    _strip(made)
    for name, value in facts.items():
        made.metadata_props.add(key=name, value=value)
    is_large = sum(t.nbytes for t in flat.state_dict().values()) > MOST_BYTES
    onnx.save(made, path, save_as_external_data=is_large, location=f"{path.name}.data")
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        why = f"{one_line(error)[:300]}; use format=safetensors"
        raise ConfigError(f"format=onnx: torch made a wrong graph of this model: {why}") from error
    return flat


@contextlib.contextmanager
def _quietly() -> Any:
    """Drop what torch's exporter prints, and the warnings of its own code."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:  # they name packages and foldings that the graph does not need
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.ExitStack() as streams:
            warnings.simplefilter("ignore")
            streams.enter_context(contextlib.redirect_stdout(io.StringIO()))
            streams.enter_context(contextlib.redirect_stderr(io.StringIO()))
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _strip(made: Any) -> None:
    """Remove traces of this machine: stacks with the paths of source files."""
    for graph in (made.graph, *made.functions):
        graph.doc_string = ""
        for node in graph.node:
            node.doc_string = ""
            del node.metadata_props[:]
    for values in (made.graph.input, made.graph.output, made.graph.value_info):
        for value in values:
            del value.metadata_props[:]
    for weight in made.graph.initializer:
        del weight.metadata_props[:]
    del made.graph.metadata_props[:]


@torch.no_grad()
def compare(trained: ExportModel, flat: Flat, path: Path) -> Differences:
    """Return the largest difference between ONNX Runtime and PyTorch, by batch size.

    Raises RunError if one is above LIMIT.
    """
    try:
        import onnxruntime
    except ImportError:
        raise ConfigError(NEEDS) from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    found = {}
    for rows in sorted({1, min(ROWS, trained.rows)}):
        tensors = tensors_in(rows_of(trained.inputs, rows))
        names = [each.name for each in session.get_inputs()]
        given = dict(zip(flat.inputs, (t.numpy() for t in tensors), strict=True))
        outputs = session.run(None, {name: given[name] for name in names})
        found[rows] = 0.0
        for name, ours, theirs in zip(flat.outputs, flat(*tensors), outputs, strict=True):
            difference = _largest(ours, torch.as_tensor(theirs))
            found[rows] = max(found[rows], difference)
            if not difference <= LIMIT:
                what = f"{name} differs by {difference:.1e} from PyTorch at batch {rows}"
                raise RunError(f"format=onnx: {what}, more than {LIMIT:g}; nothing was written")
    return found


def _largest(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference, divided by the largest output if that is above 1."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not ours.numel():
        return 0.0
    ours, theirs = ours.double(), theirs.double()
    is_same = (ours == theirs) | (ours.isnan() & theirs.isnan())  # also where both are infinite
    differences = torch.where(is_same, 0.0, (ours - theirs).abs())
    return float(differences.max()) / max(1.0, scale_of(ours))


def scale_of(values: torch.Tensor) -> float:
    """Return the largest absolute value of a tensor, leaving out what is not finite."""
    values = values.detach()
    finite = values[values.isfinite()] if values.is_floating_point() else values
    return float(finite.abs().max()) if finite.numel() else 0.0
