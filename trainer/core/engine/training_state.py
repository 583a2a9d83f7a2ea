"""The state that training changes, as checkpoints hold it: buffers, averages, optimizers.

Parameters that do not train are left out of a checkpoint while they have the bits that
`build_model` made: it makes them again, and the checkpoint holds their digests to compare. Those
that something else gave, such as `run.init_from` or a train_step that moves a teacher, are saved.

Buffers with `persistent=False` are no part of the model's state, so neither exported weights nor
`run.init_from` have them. A checkpoint holds those that training changed; constants, such as rotary
tables, are built anew at a resume.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainer.base.codec import DTYPES, digest, dtype_of, name_of
from trainer.base.errors import CheckpointError, ConfigError
from trainer.core.config.schema import Config
from trainer.core.distributed.group import Group
from trainer.core.engine.context import Parts
from trainer.core.engine.means import Means
from trainer.core.engine.objective import Objectives
from trainer.core.engine.optimizers import Optimizers
from trainer.core.strategy.tensor_shards import (
    Shard,
    TensorSource,
    check_model,
    gather,
    non_persistent,
    read_into,
    tensors_of,
)
from trainer.core.strategy.tensors import Tensors

OF_MODEL = "the config of the model"  # among the facts of weights that are not saved
ABSENT_DIGEST = -(2**63)  # of ranks that have no values of a tensor


BuiltFacts = dict[str, list[Any]]  # by name: dtype, shape and digest of a tensor as built


def describe_frozen(model: nn.Module | None, group: Group) -> BuiltFacts:
    """Return the facts of the parameters that do not train, on every rank. A collective.

    Without those that ranks built differently: they are not made again. Some ranks may have no
    values, or no model. Call it before the strategy converts or divides the model.

    Modules may have a string, `digest`, of what decides their outputs beside weights: it is among
    the facts, also of a model whose parameters all train.
    """
    own: BuiltFacts = {}
    facts_by_tensor: dict[torch.Tensor, list[Any]] = {}
    for name, tensor in tensors_of(model).items() if model is not None else ():
        if is_frozen(tensor) and not tensor.is_meta and tensor.dtype in DTYPES.values():
            if tensor not in facts_by_tensor:
                facts_by_tensor[tensor] = _facts_of(tensor)
            own[name] = facts_by_tensor[tensor]
    if model is not None:
        digests = [getattr(module, "digest", None) for module in model.modules()]
        text = " ".join(each for each in digests if isinstance(each, str))
        if text:
            own[OF_MODEL] = _facts_of(torch.tensor([*text.encode()], dtype=torch.uint8))
    facts: BuiltFacts = group.tell_all(own)
    if not facts:
        return {}
    numbers = [own[name][-1] if name in own else ABSENT_DIGEST for name in facts]
    unequal = group.find_unequal(torch.tensor(numbers, dtype=torch.int64), ABSENT_DIGEST).tolist()
    return {name: facts[name] for name, differs in zip(facts, unequal, strict=True) if not differs}


def is_frozen(tensor: torch.Tensor) -> bool:
    """Return True for a parameter that does not train."""
    is_parameter = isinstance(tensor, nn.Parameter) and not is_lazy(tensor)
    return is_parameter and not tensor.requires_grad


def _facts_of(tensor: torch.Tensor) -> list[Any]:
    return [name_of(tensor.dtype), list(tensor.shape), digest(tensor)]


def _read_frozen(tensors: Tensors, facts: BuiltFacts, is_built: bool = False) -> dict[str, int]:
    """Return digests of the weights that do not train, of the parts that this rank writes.

    `facts` are those of `describe_frozen`, which hold the digests of whole weights as built.
    """
    digests: dict[str, int] = {}
    cache: dict[Any, int] = {}
    shards = tensors.shards() if facts else {}
    for name, shard in shards.items():
        if name not in facts or not shard.is_written:
            continue
        part = shard.tensor
        dtype, shape, built_digest = facts[name]
        if is_built and [name_of(part.dtype), list(part.shape)] == [dtype, shape]:
            digests[name] = built_digest
            continue
        key = (part.data_ptr(), part.shape, part.stride())
        digests[name] = cache.setdefault(key, digest(part)) if key not in cache else cache[key]
    return digests


def find_other_base(
    saved: BuiltFacts, facts: BuiltFacts, tensors: Tensors, group: Group
) -> dict[str, str]:
    """Return what differs, by name, in parameters that a checkpoint leaves out. A collective.

    `saved` are their facts in the checkpoint, `facts` those of this run as built. One that trains
    here has no facts: its values are digested. Names that the model does not have are left out.
    """
    differences: dict[str, str] = {}
    structure = tensors_of(tensors.structure)
    shards = tensors.shards() if saved.keys() - facts.keys() else {}
    for name, (dtype, shape, saved_digest) in saved.items():
        is_here = name in structure and list(structure[name].shape) == shape
        if not is_here and (name != OF_MODEL or name not in facts):
            continue
        if name in facts:
            here = facts[name]
        else:
            part = {name: shards[name]} if name in shards else {}
            wholes = gather(part, group) if len(tensors.writers()) > 1 else part
            here = [dtype, shape, saved_digest]
            if group.world.rank == 0:
                whole = wholes[name].tensor
                is_exact = torch.promote_types(whole.dtype, dtype_of(dtype)) == whole.dtype
                here = _facts_of(whole.to(dtype_of(dtype)) if is_exact else whole)
        if here != [dtype, shape, saved_digest]:
            kinds = ("", "") if name == OF_MODEL else (f"{dtype} with ", f"{here[0]} with ")
            there = f"{kinds[0]}digest {_short(saved_digest)}"
            differences[name] = f"{there}, here {kinds[1]}digest {_short(here[-1])}"
    return dict(group.tell_all(differences))


def _short(digest_bits: int) -> str:
    return f"{digest_bits % 2**64:016x}"


class Buffers:
    """The buffers of a model as built: digests of those with persistent=False, shapes of others."""

    def __init__(self, tensors: Tensors):
        self._tensors = tensors
        self._shapes = self._read_shapes()
        self._built = {name: _print(shard) for name, shard in tensors.non_persistent().items()}

    def shards(self) -> dict[str, Shard]:
        """Return this rank's parts of the buffers that differ from the built model's."""
        every = self._tensors.non_persistent()
        alike = {name: shard for name, shard in every.items() if self._is_shaped(name, shard)}
        return {name: s for name, s in alike.items() if _print(s) != self._built[name]}

    def reshaped(self) -> list[str]:
        """Return the buffers of another shape than as built, which `shards` leaves out."""
        every = self._tensors.non_persistent()
        return [name for name, shard in every.items() if not self._is_shaped(name, shard)]

    def find_change(self) -> str:
        """Return a line if the model's state has other tensors than at the start, else nothing."""
        new_shapes = self._read_shapes()
        for name in {**self._shapes, **new_shapes}:
            before, after = (shapes.get(name) for shapes in (self._shapes, new_shapes))
            if before != after:
                shapes = f"shape {after} and had {before} at the start"
                how = f"has {shapes}" if before is not None else "was added after the start"
                how = how if after is not None else "was removed after the start"
                advice = "build it with its final shape, or use persistent=False"
                return f"{name} {how}, so no resume could load a checkpoint; {advice}"
        return ""

    def _read_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(t.shape) for name, t in tensors_of(self._tensors.module).items()}

    def _is_shaped(self, name: str, shard: Shard) -> bool:
        return name in self._built and self._built[name][0] == shard.tensor.shape


def _print(shard: Shard) -> tuple[torch.Size, int]:
    return shard.tensor.shape, digest(shard.tensor)


def load_buffers(tensors: Tensors, source: TensorSource) -> None:
    """Load what `Buffers.shards` returned. Raises CheckpointError for another model's buffers."""
    saved = source.shapes()
    built = non_persistent(tensors.structure)
    check_model({name: built[name] for name in saved if name in built}, saved)
    read_into(tensors.non_persistent(), source)


class Ema:
    """Moving average of the weights: decay x average + (1 - decay) x weight after each step.

    It starts from the initial weights. Trained parameters are averaged, in 32 bits or more: in 16
    an average with a decay of 0.999 never moves. Others, and buffers, are those of the model. Every
    rank computes the same average from the same weights.
    """

    def __init__(self, tensors: Tensors, decay: float):
        self.decay = decay
        self._refresh = tensors.refresh
        trained = {name: p for name, p in tensors.parameters.items() if p.requires_grad}
        shards = {name: tensors.shard_of(p) for name, p in trained.items()}
        weights: list[torch.Tensor] = [*trained.values()]
        structure = tensors_of(tensors.structure).items()
        self._frozen = {name for name, tensor in structure if is_frozen(tensor)}
        self._weights = weights  # not detached: a task may replace their .data
        self._has_weights = bool(weights)  # a stage of a pipeline may train nothing
        self._averages = [w.detach().to(widened(w.dtype), copy=True) for w in weights]
        self._is_wide = any(widened(w.dtype) != w.dtype for w in weights)
        averages = zip(shards.items(), self._averages, strict=True)
        self._shards = {name: shard._replace(tensor=mean) for (name, shard), mean in averages}

    @torch.no_grad()
    def update(self) -> None:
        weights = self._weights
        if not self._has_weights:
            return
        if self._is_wide:
            weights = [weight.to(widened(weight.dtype)) for weight in weights]
        torch._foreach_lerp_(self._averages, weights, 1 - self.decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Use the averages as the model's weights during the block, then restore the weights."""
        weights = [weight.detach().clone() for weight in self._weights]
        self._write(self._averages)
        try:
            yield
        finally:
            self._write(weights)

    @torch.no_grad()
    def _write(self, weights: list[torch.Tensor]) -> None:
        if self._has_weights:
            torch._foreach_copy_(self._weights, weights)
        self._refresh()

    def shards(self) -> dict[str, Shard]:
        """Return this rank's parts of the averages."""
        return self._shards

    @torch.no_grad()
    def load(self, source: TensorSource) -> None:
        """Load the averages; without any in the checkpoint, start from its weights.

        Raises CheckpointError if the averages are of another model.
        """
        saved = source.shapes()
        advice = "give run.freeze of the run"
        if missing := [name for name in self._shards if saved and name not in saved]:
            raise CheckpointError(f"""the checkpoint has no average of {missing[0]},
                which trains here: {advice}, or the model of the run""")
        if unused := [name for name in saved if name in self._frozen]:
            raise CheckpointError(f"""the checkpoint has an average of {unused[0]},
                which does not train here: {advice}""")
        if saved:
            read_into(self._shards, source)
        else:
            self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Start from the current weights."""
        if self._has_weights:
            torch._foreach_copy_(self._averages, self._weights)


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the average of weights of `dtype`."""
    is_narrow = dtype.is_floating_point and dtype.itemsize < 4
    return torch.float32 if is_narrow else dtype


def size_of_averages(weights: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the averages of weights."""
    return sum(weight.numel() * widened(weight.dtype).itemsize for weight in weights)


Shards = dict[str, dict[str, Shard]]


class TrainingState:
    """The model, its moving average `ema`, the optimizers, loss scale, and means not yet logged."""

    def __init__(
        self, parts: Parts, objectives: Objectives, means: Means, optimizers: Optimizers
    ) -> None:
        self._tensors = parts.strategy.tensors
        self._is_divided = parts.strategy.mesh.is_divided
        self._group = parts.ranks.group
        self._precision = parts.precision
        self._objectives = objectives
        self._means = means
        self._optimizers = optimizers
        self.ema = open_ema(parts.config, self._tensors)
        self.buffers = Buffers(self._tensors)
        self._frozen = parts.frozen
        self._frozen_digests = _read_frozen(self._tensors, self._frozen, is_built=True)

    def check(self) -> None:
        """Raise ConfigError for a model that was changed, or state that no resume could load."""
        if line := self._tensors.find_change() or self.buffers.find_change():
            raise ConfigError(line)
        self._optimizers.check(self._is_divided)

    def plain(self) -> dict[str, Any]:
        """Return the training state without the tensors of `shards`.

        Collective: every rank must call it.
        """
        return {
            "optimizers": self._tensors.collect_plain(self._optimizers.state(), self._group),
            "rows": self._means.reduced(self._group),
            "elements": self._objectives.elements(),
            "precision": self._precision.state_dict(),
            "extra": self._tensors.extra_state(),
        }

    def shards(self) -> Shards:
        """Return this rank's parts of the model, the optimizers' state and the moving average."""
        return {
            "model": self._tensors.shards(),
            "optimizer": self._optimizers.shards(),
            "ema": self.ema.shards() if self.ema else {},
            "buffer": self.buffers.shards(),
        }

    def saved_shards(self) -> tuple[Shards, BuiltFacts]:
        """Return what a checkpoint holds of `shards`, and the facts of weights that it leaves out.

        Collective: every rank must call it.
        """
        shards = self.shards()
        left_out = self._list_left_out()
        model = shards["model"].items()
        shards["model"] = {name: shard for name, shard in model if name not in left_out}
        return shards, left_out

    def _list_left_out(self) -> BuiltFacts:
        """Return the facts of frozen weights that still have the bits of their start.

        A collective: ranks may have parts of them.
        """
        facts, built = self._frozen, self._frozen_digests
        digests = _read_frozen(self._tensors, facts) if facts else {}
        flags = [digests.get(name) != built.get(name) for name in facts]
        changed = self._group.max(*flags) if flags else []
        pairs = zip(facts.items(), changed, strict=True)
        return {name: each for (name, each), is_changed in pairs if not is_changed}

    def load(
        self,
        sources: Mapping[str, TensorSource],
        training: Mapping[str, Any],
        left_out: Collection[str],
    ) -> None:
        """Load the tensors by kind as `shards` names them, and what `plain` returned.

        Weights that were `left_out` keep their values. Raises CheckpointError if the tensors are of
        another model or optimizer.
        """
        self._means.load(training["rows"])
        self._objectives.load(training["elements"])
        self._precision.load_state_dict(training["precision"])
        self._tensors.load(sources["model"], training.get("extra", {}), left_out)
        load_buffers(self._tensors, sources["buffer"])
        self._optimizers.load(sources["optimizer"], training["optimizers"])
        if self.ema:
            self.ema.load(sources["ema"])

    def initialise(self, source: TensorSource) -> None:
        """Start from the weights of a source, which may have some of the model's tensors only."""
        read_into(self._tensors.shards(), source)
        self._tensors.refresh()
        if self.ema:
            self.ema.restart()


def open_ema(config: Config, tensors: Tensors) -> Ema | None:
    decay = config.run.ema_decay
    return None if decay is None else Ema(tensors, decay)
