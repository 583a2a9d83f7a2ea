"""Export of a trained model: the weights used for evaluation, in fp32.

The outputs of an ONNX graph are compared with PyTorch's before anything is written; beside the
model are a page about its inputs and what preprocesses them, and examples with their outputs.
"""

from __future__ import annotations

import contextlib
import io
import logging
import shlex
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch

from trainer import Config
from trainer.base.errors import CheckpointError, ConfigError, RunError, one_line
from trainer.base.new_files import check_new
from trainer.base.same import CLOSE
from trainer.base.same.distance import apart
from trainer.cli import answer, check_alone, load_task
from trainer.core.api import OF_MODEL, first_rows, open_content, write_tensors
from trainer.core.api import transaction as checkpoint
from trainer.hf.staged_folder import open_scratch, why_full
from trainer.hf.trained_model import EXPORT_ROWS, on_one_process
from trainer.use.model import (
    ExportModel,
    Flat,
    describe,
    load_trained,
    tensors_in,
)

EXPORT_NEEDS = "out=FILE.onnx: run pip install 'lockstep-trainer[export]'"
LIMIT = CLOSE  # of the largest difference to PyTorch, relative to outputs above 1
MOST_BYTES_OF_ONNX = 1.8e9  # of a file: protobuf ends at 2 GiB
Differences = dict[int, float]  # the largest one by batch size


def write_graph(trained: ExportModel, path: Path, facts: dict[str, str]) -> Flat:
    """Write a model as ONNX; weights above 1.8 GB go to a second file beside it.

    Raises ConfigError if a package is missing, or if torch cannot export the model.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError:
        raise ConfigError(EXPORT_NEEDS) from None
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
        why = f"{one_line(error)[:300]}; use out=FILE.safetensors"
        raise ConfigError(f"out=FILE.onnx: torch cannot export this model: {why}") from error
    assert program is not None
    program.save(path)
    onnx_model = onnx.load(path)
    _strip(onnx_model)
    for name, value in facts.items():
        onnx_model.metadata_props.add(key=name, value=value)
    is_large = sum(t.nbytes for t in flat.state_dict().values()) > MOST_BYTES_OF_ONNX
    onnx.save(onnx_model, path, save_as_external_data=is_large, location=f"{path.name}.data")
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        why = f"{one_line(error)[:300]}; use out=FILE.safetensors"
        raise ConfigError(f"out=FILE.onnx: torch made a wrong graph of it: {why}") from error
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


def _strip(onnx_model: Any) -> None:
    """Remove traces of this machine: stacks with the paths of source files."""
    for graph in (onnx_model.graph, *onnx_model.functions):
        graph.doc_string = ""
        for node in graph.node:
            node.doc_string = ""
            del node.metadata_props[:]
    for values in (onnx_model.graph.input, onnx_model.graph.output, onnx_model.graph.value_info):
        for value in values:
            del value.metadata_props[:]
    for weight in onnx_model.graph.initializer:
        del weight.metadata_props[:]
    del onnx_model.graph.metadata_props[:]


@torch.no_grad()
def compare(trained: ExportModel, flat: Flat, path: Path) -> Differences:
    """Return the largest difference between ONNX Runtime and PyTorch, by batch size.

    Raises RunError if one is above LIMIT.
    """
    try:
        import onnxruntime
    except ImportError:
        raise ConfigError(EXPORT_NEEDS) from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    differences = {}
    for rows in sorted({1, min(EXPORT_ROWS, trained.rows)}):
        tensors = tensors_in(first_rows(trained.inputs, rows))
        names = [each.name for each in session.get_inputs()]
        arrays = dict(zip(flat.inputs, (t.numpy() for t in tensors), strict=True))
        outputs = session.run(None, {name: arrays[name] for name in names})
        differences[rows] = 0.0
        for name, ours, theirs in zip(flat.outputs, flat(*tensors), outputs, strict=True):
            # in fp64, as integers may differ by rounding too: of a quantised output
            difference = apart(ours.double(), torch.as_tensor(theirs).double(), 1.0)
            differences[rows] = max(differences[rows], difference)
            if not difference <= LIMIT:
                what = f"{name} differs by {difference:.1e} from PyTorch at batch {rows}"
                raise RunError(f"out=FILE.onnx: {what}, more than {LIMIT:g}; nothing was written")
    return differences


def scale_of(values: torch.Tensor) -> float:
    """Return the largest absolute value of a tensor, leaving out what is not finite."""
    values = values.detach()
    finite = values[values.isfinite()] if values.is_floating_point() else values
    return float(finite.abs().max()) if finite.numel() else 0.0


ENGINE_ROWS = 64  # the most of a batch of the engine
OFTEN = EXPORT_ROWS  # the batch that it is tuned for


def check_tensorrt(directory: str) -> None:
    """Raise ConfigError, with the commands for another machine, without a GPU and the package."""
    missing = "" if torch.cuda.is_available() else "an NVIDIA GPU, and torch sees none here"
    try:
        import tensorrt  # type: ignore[import-not-found,unused-ignore] # noqa: F401
    except ImportError:
        missing = missing or "pip install tensorrt"
    if missing:
        export = f"python -m trainer.use {shlex.quote(directory)} out=model.onnx"
        shapes = " ".join(f"--{end}Shapes=<input>:<shape>" for end in ("min", "opt", "max"))
        build = f"trtexec --onnx=model.onnx --saveEngine=model.engine {shapes}"
        there = f"run here: {export}; on a machine with a GPU: {build}"
        raise ConfigError(f"out=FILE.engine: needs {missing}; {there} (docs/results.md)")


def build_engine(trained: ExportModel, flat: Flat, graph: Path, path: Path) -> list[str]:
    """Build an engine for batches of 1 to 64 rows, in fp32. Raises RunError if TensorRT cannot."""
    import tensorrt as trt  # type: ignore[import-not-found,unused-ignore]

    logger: Any = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        errors = "; ".join(str(parser.get_error(n)) for n in range(parser.num_errors))
        raise RunError(f"out=FILE.engine: the graph cannot be read: {errors[:300]}")
    profile = builder.create_optimization_profile()
    for name, tensor in zip(flat.inputs, tensors_in(trained.inputs), strict=True):
        shapes = [(rows, *tensor.shape[1:]) for rows in (1, OFTEN, ENGINE_ROWS)]
        profile.set_shape(name, *shapes)
    settings = builder.create_builder_config()
    settings.clear_flag(trt.BuilderFlag.TF32)
    settings.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, settings)
    if engine is None:
        raise RunError("out=FILE.engine: the engine cannot be built; see the lines above")
    path.write_bytes(bytes(engine))
    name = torch.cuda.get_device_name()
    return [f"engine for {name}, batches of 1 to {ENGINE_ROWS} rows; its outputs were not compared"]


FORMS = {".onnx": "onnx", ".safetensors": "safetensors", ".engine": "tensorrt"}


def export(config: Config, out: Path) -> int:
    """Write the model of a run's checkpoint, and return the exit code."""
    form = FORMS[out.suffix]
    check_alone(f"out={out}", "export with one process")
    for path in _files_of(out):
        check_new(f"out={path}", path)
    config = on_one_process(config)
    trained = load_trained(load_task(config)(config))
    try:
        with open_scratch(out) as scratch:
            lines = _write_or_explain(form, trained, scratch / out.name)
            for path in sorted(scratch.iterdir(), reverse=True):  # the model last
                path.replace(out.parent / path.name)
    except OSError as error:
        raise RunError(f"""{out}: cannot be written: {error.strerror};
            make room, or give another out=FILE""") from None
    files = [str(path) for path in _files_of(out)]
    facts = {"format": form, "step": trained.task.step, "files": files, "notes": lines}
    text = "\n".join([*lines, f"written: {', '.join(files)}"])
    return answer(0, "written", facts, lambda: print(text))


def _files_of(out: Path) -> list[Path]:
    return [out, Path(f"{out}.md"), Path(f"{out}.npz")]


def _write_or_explain(form: str, trained: ExportModel, path: Path) -> list[str]:
    """Write the files of an export. Raises OSError for a full disk, whatever a library raises."""
    try:
        return _write(form, trained, path)
    except Exception as error:
        if full := why_full(error, path.parent):
            raise OSError(0, full) from error
        raise


def _write(form: str, trained: ExportModel, path: Path) -> list[str]:
    """Write the files of an export and return lines about it, after it was compared."""
    task = trained.task
    facts = {"task": task.config.task.name, "step": str(task.step)}
    flat = trained.flat
    if form == "safetensors":
        from trainer.use.model import write_weights

        lines = write_weights(trained, path, facts)
    else:
        graph = path.with_suffix(".onnx")
        flat = write_graph(trained, graph, facts)
        differences = compare(trained, flat, graph)
        each = ", ".join(f"{value:.1e} at batch {rows}" for rows, value in differences.items())
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


def write_stored(directory: Path, target: Path) -> int:
    """Write the newest valid checkpoint's weights to a safetensors file; return the exit code.

    Averaged weights (run.ema_decay) are written too, as ema.<name>. One tensor is read and written
    at a time, and the task is not built.
    """
    check_new(f"out={target}", target)
    is_one = (directory / checkpoint.MANIFEST).is_file()

    def read(path: Path) -> tuple[Any, Any]:
        loaded = checkpoint.load(path)
        content = open_content(loaded)
        content.hold()
        return loaded.manifest, content.sources

    root = directory / "checkpoints"
    if not is_one and not checkpoint.steps(root):
        raise ConfigError(f"{directory}: has no checkpoints; give a run directory")
    newest, skipped = (read(directory), []) if is_one else checkpoint.find_newest(root, read)
    for line in skipped:
        print(line)
    if newest is None:
        raise CheckpointError(f"{root}: no checkpoint is valid")
    manifest, sources = newest
    step = manifest["step"]
    facts = {"step": str(step), "run": str(manifest["run"])}
    num_tensors = _write_tensors(sources, facts, target)
    left_out = len({*manifest.get("frozen", ())} - {OF_MODEL})
    exported = {"file": target, "tensors": num_tensors, "step": step, "left_out": left_out}
    line = f"{target}: {num_tensors} tensors of step {step:,}"
    if left_out:
        line += f"; {left_out} more did not train, so the checkpoint has their digests only"
    return answer(0, "written", exported, lambda: print(line))


def _write_tensors(sources: Mapping[str, Any], facts: Mapping[str, str], target: Path) -> int:
    """Write the weights and their averages to a new safetensors file; return their number."""
    places = {
        f"{prefix}{name}": (sources[kind], name, shape)
        for kind, prefix in (("model", ""), ("ema", "ema."))
        for name, shape in sources[kind].shapes().items()
    }
    forms = {key: (source.dtype(name), shape) for key, (source, name, shape) in places.items()}

    def read(key: str) -> Any:
        source, name, shape = places[key]
        return source.read(name, (0,) * len(shape), shape)

    try:
        write_tensors(target, forms, read, facts, 0o666)
    except BaseException as error:
        if not isinstance(error, FileExistsError):  # of another process
            with suppress(OSError):
                target.unlink()
        if isinstance(error, OSError):
            raise ConfigError(f"out={target}: {error.strerror}; give another path") from None
        raise
    return len(forms)
