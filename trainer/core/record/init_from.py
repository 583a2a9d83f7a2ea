"""Initial weights of a run, from another run, a checkpoint or a file."""

from __future__ import annotations

import zipfile
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer.base.errors import ConfigError, counted, one_line
from trainer.core.checkpoints import resume
from trainer.core.checkpoints.reading import (
    Content,
    MemoryTensors,
    Restoration,
    read_on_all_ranks,
    tell_content,
)
from trainer.core.checkpoints.tensor_files import check_stored
from trainer.core.config.schema import Config
from trainer.core.config.stores import is_address
from trainer.core.distributed.group import Group
from trainer.core.engine.context import Parts
from trainer.core.engine.engine import Engine
from trainer.core.engine.training_state import OF_MODEL, BuiltFacts, find_other_base
from trainer.core.strategy.tensor_shards import TensorSource, tensors_of

KEY = "run.init_from"
TENSOR_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
WITHIN = ("model", "state_dict", "model_state_dict", "module")  # of files of other trainers
# of DDP, of torch.compile, of both, of Lightning
PREFIXES = ("module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "model.")
ONLY = "it holds more than tensors and plain values; save model.state_dict() alone"
MOST_NAMED = 4


def check(config: Config) -> None:
    """Raise ConfigError unless there is a run, a checkpoint or a file of weights."""
    if is_address(config.run.init_from):
        resume.check_has_run(KEY, config.run.init_from or "")
        return
    path = Path(config.folder, config.run.init_from or "")
    if not path.is_dir() and (path.suffix not in TENSOR_SUFFIXES or not path.exists()):
        what = "is no file of tensors" if path.exists() else "is not there"
        raise ConfigError(f"""{KEY}={config.run.init_from}: {what};
            give a run, a checkpoint or a file {", ".join(TENSOR_SUFFIXES)}""")
    if not path.is_file():
        resume.find_checkpoint(config, config.run.init_from, KEY)


@dataclass
class MatchingTensors:
    """Those tensors of a source that have the name and shape of one of the model.

    It is a Source. `shapes_here` are those of the model's tensors. `left_out` has the facts of
    tensors that a checkpoint does not hold, and `frozen` those that the model has too.
    """

    sources: Sequence[TensorSource]
    left_out: BuiltFacts
    shapes_here: Mapping[str, tuple[int, ...]]
    prefix: str = ""
    frozen: BuiltFacts = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)  # the number of their source
    reshaped: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for source_index, source in enumerate(self.sources):
            for name, shape in source.shapes().items():
                own = name.removeprefix(self.prefix)
                if self._fits(name, own, shape):
                    self.loaded[own] = source_index
        for name, facts in self.left_out.items():
            own = name.removeprefix(self.prefix)
            if name != OF_MODEL and self._fits(name, own, facts[1]):
                self.frozen[own] = facts

    def _fits(self, name: str, own: str, shape: Sequence[int]) -> bool:
        if own not in self.shapes_here:
            self.unexpected.append(name)
            return False
        if tuple(shape) != self.shapes_here[own]:
            self.reshaped.append(f"{own} {tuple(shape)}, here {self.shapes_here[own]}")
            return False
        return True

    def _place(self, name: str) -> tuple[TensorSource, str]:
        source = self.sources[self.loaded[name]]
        return source, name if name in source.shapes() else self.prefix + name

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.shapes_here[name] for name in self.loaded}

    def read(self, name: str, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        source, there = self._place(name)
        return source.read(there, offset, size)

    def skip(self, name: str) -> None:
        source, there = self._place(name)
        source.skip(there)


def start_from(config: Config, engine: Engine, parts: Parts) -> list[str]:
    """Start from the weights of `run.init_from`, if there are any; return a report.

    What does not fit the model is left as it is. A collective. Raises ConfigError if nothing fits,
    or if a checkpoint leaves out weights that are different here.
    """
    if config.run.init_from is None:
        return []
    group = parts.ranks.group
    model = tensors_of(engine.strategy.tensors.structure)
    sources, left_out, restored = _open(config, model, group)
    source, report = _match(config, model, sources, left_out)
    others = find_other_base(source.frozen, parts.frozen, engine.strategy.tensors, group)
    for name, how in others.items():
        raise ConfigError(f"""{KEY}={config.run.init_from}: its checkpoint does not hold {name},
            which did not train: it was {how}; give its base to build_model,
            or a file of all its weights: python -m trainer.use RUN out=FILE.safetensors""")
    engine.state.initialise(source)
    if restored is not None:
        restored.close(group)
    with group.agreed("checking the weights"):
        _check_finite(config, engine, source.loaded)
    return [report]


def _check_finite(config: Config, engine: Engine, loaded: Container[str]) -> None:
    """Raise ConfigError for a loaded parameter with a value that is not finite."""
    tensors = engine.strategy.tensors
    own = {name: p for name, p in tensors.parameters.items() if name in loaded}
    parts = {name: tensors.shard_of(parameter).tensor for name, parameter in own.items()}
    bad = [name for name, part in parts.items() if not torch.isfinite(part).all()]
    if bad:
        raise ConfigError(f"""{KEY}={config.run.init_from}: {_shorten(bad)} has values
            that are not finite: NaN, infinite, or too large for {own[bad[0]].dtype}; fix them""")


def _match(
    config: Config,
    model: Mapping[str, torch.Tensor],
    sources: Sequence[Any],
    left_out: BuiltFacts,
) -> tuple[MatchingTensors, str]:
    """Return the tensors that fit the model's, and a report."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.items()}
    prefixes = ("", *PREFIXES)
    match = max((MatchingTensors(sources, left_out, shapes, p) for p in prefixes), key=_fit)
    subject = f"{KEY}={config.run.init_from}"
    if not _fit(match):
        names = [name for source in sources for name in source.shapes()]
        theirs = ", ".join([*names, *left_out][:MOST_NAMED])
        raise ConfigError(f"""{subject}: none of its tensors fits the model:
            it has {theirs}, the model {", ".join(list(shapes)[:MOST_NAMED])}; give others""")
    there: dict[Any, int] = {}
    for name, source_index in match.loaded.items():
        tensor_id = id(model[name])
        there[tensor_id] = max(source_index, there.get(tensor_id, 0))
    for name, source_index in list(match.loaded.items()):
        if source_index < there[id(model[name])]:  # tied to a name that a later source has
            del match.loaded[name]
    alike = {id(model[name]) for name in match.frozen} - there.keys()
    missing = [name for name, t in model.items() if id(t) not in there.keys() | alike]
    lost = [name for name in missing if not any(r.startswith(f"{name} ") for r in match.reshaped)]
    frozen_names = [name for name, tensor in model.items() if id(tensor) in alike]
    loaded = len(model) - len(missing) - len(frozen_names)
    parts = [f"loaded {loaded} of {counted(len(model), 'tensor')}"]
    parts += _list("frozen there and equal as built", frozen_names)
    parts += _list("missing", lost) + _list("unexpected", match.unexpected)
    parts += _list("with a different shape", match.reshaped)
    return match, f"{subject}: {'; '.join(parts)}"


def _fit(match: MatchingTensors) -> int:
    return len(match.loaded) + len(match.frozen)


def _list(kind: str, names: Sequence[str]) -> list[str]:
    return [f"{len(names)} {kind}: {_shorten(names)}"] if names else []


def _shorten(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


def _open(
    config: Config, model: Mapping[str, torch.Tensor], group: Group
) -> tuple[list[Any], BuiltFacts, Restoration | None]:
    """Return sources, of which a later one replaces tensors of an earlier one, the facts of those
    that a checkpoint leaves out, and the checkpoint. A collective."""
    path = Path(config.folder, config.run.init_from or "")
    (is_file,) = group.max(float(group.world.rank == 0 and path.is_file()))
    if is_file:
        content: Content | None = None
        with group.agreed("reading the weights"):
            if group.world.rank == 0:
                tensors = _read(path, config.run.init_from)
                plain = _take_plain(tensors, model, f"{KEY}={config.run.init_from}")
                content = Content({"model": MemoryTensors(plain)}, {})
        return [tell_content(group, content).sources["model"]], {}, None

    def checkpoint() -> tuple[list[Path], bool]:
        return resume.find_checkpoints(resume.find_checkpoint(config, config.run.init_from, KEY))

    restored, _ = read_on_all_ranks(group, checkpoint, has_optimizer=False)
    assert restored is not None
    sources = restored.content.sources
    # evaluation used the averages
    return [sources["model"], sources["ema"]], restored.manifest.frozen, restored


def _take_plain(
    tensors: Mapping[str, torch.Tensor], model: Mapping[str, torch.Tensor], subject: str
) -> dict[str, torch.Tensor]:
    """Return the plain tensors. Raise ConfigError if one that the model has is of another kind."""
    for name, tensor in tensors.items():
        names = [name.removeprefix(prefix) for prefix in ("", *PREFIXES)]
        for own in [model[each] for each in names if each in model][:1]:
            kind = _kind_of(tensor) or _misfit(tensor, own.dtype)
            if kind:
                raise ConfigError(f"""{subject}: {name} is {kind}:
                    must be a plain tensor for the model's {own.dtype}; convert it""")
    plain = {name: tensor for name, tensor in tensors.items() if not _kind_of(tensor)}
    if not plain:
        raise ConfigError(f"""{subject}:
            must be tensors by name, such as torch.save(model.state_dict(), path) writes""")
    return plain


def _misfit(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    """Return why a tensor cannot become one of this dtype; too large floats are found later."""
    if tensor.is_complex() and not dtype.is_complex:
        return "complex"
    if dtype.is_complex or dtype.is_floating_point:
        return ""
    is_equal = torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)
    return "" if is_equal else f"{tensor.dtype} with values that {dtype} does not have"


def _kind_of(tensor: torch.Tensor) -> str:
    """Return what makes a tensor other than plain values; empty if nothing does."""
    if tensor.is_quantized:
        return "quantised"
    if tensor.is_meta:
        return "without values (device meta)"
    return "" if tensor.layout is torch.strided and not tensor.is_nested else "sparse or nested"


def _read(path: Path, init_from: str | None) -> dict[str, torch.Tensor]:
    """Read a file of tensors by name. Raises ConfigError for any other content."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        if zipfile.is_zipfile(path):
            with path.open("rb") as file:
                check_stored(file, path.stat().st_size)
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of an untrusted file
        why = one_line(error)[:200] or f"{type(error).__name__}, as of an empty or damaged file"
        # torch's text advises to load it all
        why = ONLY if "weights_only" in str(error) else f"{why}; give another file"
        raise ConfigError(f"{KEY}={init_from}: cannot be read: {why}") from None
    for name in WITHIN:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(name), Mapping):
            loaded = loaded[name]
            break
    tensors = loaded if isinstance(loaded, Mapping) else {}
    return {str(name): t for name, t in tensors.items() if isinstance(t, torch.Tensor)}
