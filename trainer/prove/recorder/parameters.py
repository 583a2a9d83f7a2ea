"""Parameters of a script by their names, and the modes in which its models run.

A module may be in eval mode, without gradients or under autocast, in one layout or on one rank.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .digests import NUM, sketch, sketch_part

WRAPPERS = (  # names under which wrappers keep the module that they wrap
    *("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"),
    *("_forward_module", "_original_module"),
)


@dataclass(frozen=True)
class Part:
    """Part of a parameter on this rank: `offset` of its first element in the whole `shape`."""

    shape: tuple[int, ...]
    local: tuple[int, ...]
    offset: tuple[int, ...]
    is_partial: bool = False  # a summand instead of a shard


def modules() -> list[nn.Module]:
    """Return all modules of the process; the type is asked, as instances may be proxies."""
    return [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]


def roots() -> list[nn.Module]:
    """Return the modules that are no other module's child."""
    every = modules()
    children = {id(child) for each in every for child in each._modules.values()}
    return [each for each in every if id(each) not in children]


def shorten(name: str) -> str:
    """Return a name in the module tree without wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def name_parameters(parameters: Sequence[torch.Tensor]) -> list[str]:
    """Return a name for each parameter; one that no module has is named by its index."""
    wanted = {id(each) for each in parameters}
    names: dict[int, str] = {}
    raw: dict[int, str] = {}
    for root in roots():
        for name, tensor in root.named_parameters(remove_duplicate=False):
            key = id(tensor)
            if key not in wanted:
                continue
            short = shorten(name)
            if key not in names or (len(short), short) < (len(names[key]), names[key]):
                names[key] = short
                raw[key] = name
    counts: dict[str, int] = {}
    for name in names.values():
        counts[name] = counts.get(name, 0) + 1
    unique_names = []
    for index, each in enumerate(parameters):
        name = names.get(id(each), "")
        if counts.get(name, 0) > 1:
            name = raw[id(each)]
        name = name or f"parameter {index}"
        unique_names.append(f"{name} ({index})" if name in unique_names else name)
    return unique_names


def find_part(tensor: torch.Tensor) -> Part | None:
    """Return the part of a DTensor that this rank has; None for a plain tensor."""
    if not hasattr(tensor, "placements"):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = tensor
    local, offset = compute_local_shape_and_global_offset(
        sharded.shape, sharded.device_mesh, sharded.placements
    )
    is_partial = any(each.is_partial() for each in sharded.placements)
    return Part(tuple(sharded.shape), tuple(local), tuple(offset), is_partial)


def sketch_of(tensor: torch.Tensor, flat: Part | None = None) -> torch.Tensor:
    """Return what this rank's part adds to the sketch of a parameter or gradient."""
    if hasattr(tensor, "placements"):
        part = find_part(tensor)
        local = tensor._local_tensor  # type: ignore[attr-defined]
        return sketch_part(local, part.shape, part.offset) if part else sketch(local)
    if flat is not None:  # FSDP's first version keeps a slice of the flattened parameter
        return sketch_part(tensor.reshape(-1), flat.shape, flat.offset)
    return sketch(tensor)


def flat_parts() -> dict[int, Part]:
    """Return the slices that FSDP (version 1, with use_orig_params) has, by parameter."""
    if "torch.distributed.fsdp" not in sys.modules:
        return {}
    parts = {}
    for each in modules():
        handle = getattr(each, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        infos = getattr(flat, "_shard_param_infos", None)
        if flat is None or not infos or not getattr(flat, "_params", None):
            continue
        for parameter, info, shape in zip(flat._params, infos, flat._shapes, strict=False):
            whole = (torch.Size(shape).numel(),)
            first = (info.intra_param_start_idx or 0,)
            size = (info.numel_in_shard or 0,)
            parts[id(parameter)] = Part(whole, size, first)
    return parts


def _state_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what changes with a tensor: changes through `.data` leave its version as it is."""
    few = tensor.detach().ravel()[:: max(1, tensor.numel() // 8)]
    return tensor._version, few.tolist()


class Rest:
    """Tensors of modules that no optimizer has: frozen models, moving averages, buffers."""

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self._known: dict[int, tuple[Any, torch.Tensor]] = {}  # state and sketch, by index
        self.num_elements = 0

    def watch(self, modules: Sequence[nn.Module], trained: Sequence[torch.Tensor]) -> None:
        """Find the tensors; those of a sharded model are left out."""
        every = {id(t): t for root in modules for t in (*root.parameters(), *root.buffers())}
        for each in trained:
            every.pop(id(each), None)
        plain = (t for t in every.values() if t.is_floating_point() and not t.is_inference())
        self._tensors = [weakref.ref(t) for t in plain if not hasattr(t, "placements")]
        self._known.clear()
        self.num_elements = sum(t.numel() for each in self._tensors if (t := each()) is not None)

    def sketch(self) -> torch.Tensor:
        """Return the sum of their sketches; a tensor is read whole only if it was changed."""
        total = torch.zeros(NUM, dtype=torch.float64)
        for index, tensor in enumerate(reference() for reference in self._tensors):
            if tensor is not None:
                state = _state_of(tensor)
                if self._known.get(index, (-1,))[0] != state:
                    self._known[index] = (state, sketch(tensor).cpu())
            total = total + self._known[index][1]
        return total


Mode = tuple[bool, bool, str]  # training, gradients, autocast
TYPES_OF_MODULE_SETTINGS = (float, bool, str)
OF_MODE = ("Dropout", "BatchNorm", "InstanceNorm", "RNN", "LSTM", "GRU", "Attention", "Transformer")
SETTINGS_OF_MODULES = ("ignore_index", "padding_idx")  # numbers that are no size


def autocast() -> str:
    """Return the dtype of autocast; "" where it is off."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return ""


def depends_on_mode(kind: type) -> bool:
    """Return True for a class of modules that may compute otherwise in eval mode."""
    is_own = not kind.__module__.startswith("torch.")
    return is_own or any(word in kind.__name__ for word in OF_MODE)


class Modes:
    """Modes of the modules whose calls a backward pass follows."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._latest: dict[tuple[int, type], Mode] = {}  # by id and class, since the last backward
        self._of_step: dict[tuple[int, type], set[Mode]] = {}
        self._written: dict[str, Any] | None = None

    def note(self, module: nn.Module) -> None:
        """Note a call; it is kept if a backward pass follows."""
        self._latest[id(module), type(module)] = (
            module.training,
            torch.is_grad_enabled(),
            autocast(),
        )

    def keep(self) -> None:
        """Keep the modes of a forward pass, at its backward pass."""
        for key, mode in self._latest.items():
            self._of_step.setdefault(key, set()).add(mode)
        self._latest.clear()

    def name(self, roots: Sequence[nn.Module]) -> None:
        """Learn the names of all modules."""
        self._names = {
            id(each): shorten(name) for root in roots for name, each in root.named_modules()
        }

    def end_step(self) -> dict[str, Any] | None:
        """Return the modes of a step: [name, kind] by mode; None if they are those before."""
        by_mode: dict[str, Any] = {"eval": [], "no grad": [], "autocast": {}}
        for (module_id, kind), modes in self._of_step.items():
            who = [self._names.get(module_id, ""), kind.__name__]
            if depends_on_mode(kind) and any(not is_training for is_training, _, _ in modes):
                by_mode["eval"].append(who)
            if any(not has_gradients for _, has_gradients, _ in modes):
                by_mode["no grad"].append(who)
            for dtype in sorted({dtype for _, _, dtype in modes if dtype}):
                by_mode["autocast"].setdefault(dtype, []).append(who)
        self._of_step.clear()
        for each in (by_mode["eval"], by_mode["no grad"], *by_mode["autocast"].values()):
            each.sort()
        if by_mode == self._written:
            return None
        self._written = by_mode
        return by_mode


MODES = Modes()


def settings_of(roots: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the settings of torch's own modules by name, as `drop.p`."""
    settings = {}
    for root in roots:
        for name, each in root.named_modules():
            if not type(each).__module__.startswith("torch.nn"):
                continue
            module_name = shorten(name) or type(each).__name__
            for key, value in vars(each).items():
                is_setting = type(value) in TYPES_OF_MODULE_SETTINGS or key in SETTINGS_OF_MODULES
                if is_setting and key[0] != "_" and key not in ("training", "inplace"):
                    settings[f"{module_name}.{key}"] = value
    return settings


def describe_models(roots: list[nn.Module], mine: list[torch.Tensor]) -> dict[str, Any]:
    """Return normalisation, dropout, wrappers, class weights, and settings of modules."""
    own = set(map(id, mine))
    norms = set()
    dropout = set()
    wrappers = set()
    weighted = set()
    for each in (m for root in roots for m in root.modules()):
        kind = type(each).__name__
        if isinstance(each, nn.modules.batchnorm._BatchNorm) and each.training:
            norms.add(kind)
        rate = getattr(each, "p", getattr(each, "dropout", 0))
        if "Dropout" in kind or isinstance(each, nn.RNNBase):
            dropout |= {kind} if each.training and isinstance(rate, float) and rate > 0 else set()
        if isinstance(each, nn.modules.loss._WeightedLoss) and each.weight is not None:
            weighted.add(kind)
        is_wrapper = isinstance(each, DistributedDataParallel) or _is_fsdp(each)
        if is_wrapper and not own.isdisjoint(map(id, each.parameters())):
            wrappers.add("FSDP" if _is_fsdp(each) else kind)
    kinds = {"norms": norms, "dropout": dropout, "wrappers": wrappers, "weighted": weighted}
    lists = {key: sorted(each) for key, each in kinds.items()}
    return {**lists, "modules": settings_of(roots)}


def _is_fsdp(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = [getattr(fsdp, name, None) for name in ("FSDPModule", "FullyShardedDataParallel")]
    return any(kind is not None and isinstance(module, kind) for kind in kinds)
