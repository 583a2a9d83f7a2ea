"""Memory of a model: dense tensors, blocks over several devices, and recomputed activations.

Where the blocks of a rank are on several devices, one computes while the others wait: this buys
memory and no speed. A pipeline over as many ranks keeps them all at work. Recomputed activations:
Chen et al., arXiv:1604.06174.

torch's fused CPU optimizers walk the memory of a parameter as if it were dense: after 20 steps of
AdamW a slice was 0.22 off, and an expanded parameter corrupted the heap (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from trainer.base.errors import ConfigError, one_line
from trainer.core.strategy.modules.dry_run import uncounted


def divide(blocks: Sequence[nn.Module], devices: Sequence[torch.device]) -> list[torch.device]:
    """Return the device of each block: runs of equally many, the first device first."""
    return [devices[index * len(devices) // len(blocks)] for index in range(len(blocks))]


def place_blocks(
    model: nn.Module, blocks: Sequence[nn.Module], devices: Sequence[torch.device]
) -> list[torch.device]:
    """Move a model to several devices: its blocks in runs, the rest to the first device.

    Hooks move the inputs of each block to its device, and the outputs of the last block back.
    Returns the device of each block.
    """
    places = divide(blocks, devices)
    model.to(devices[0])
    for block, device in zip(blocks, places, strict=True):
        block.to(device)
        block.register_forward_pre_hook(_enter(device), with_kwargs=True)
    blocks[-1].register_forward_hook(lambda _, args, output: _moved(devices[0], output))
    return places


def _enter(device: torch.device) -> Callable[[nn.Module, Any, Any], Any]:
    return lambda module, args, kwargs: _moved(device, (args, kwargs))


def _moved(device: torch.device, tree: Any) -> Any:
    return tree_map_only(torch.Tensor, partial(_move, device), tree)


def _move(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device, non_blocking=True)


COPY_ADVICE = "pass a copy of the tensor to nn.Parameter (.clone())"


@torch.no_grad()
def make_dense(model: nn.Module) -> None:
    """Copy each parameter and buffer whose memory has gaps, as a change of dtype would.

    Raises ConfigError for a trainable parameter that is complex, whose elements share memory, or
    that shares memory with another parameter or buffer. Tied weights are one parameter.
    """
    named = {n: t for n, t in _own_tensors(model) if t.layout is torch.strided}
    plain = {n: t for n, t in named.items() if type(t) in (torch.Tensor, nn.Parameter)}
    for name, tensor in plain.items():
        if tensor.requires_grad:
            _check_elements(name, tensor)
    spaces: dict[Any, list[str]] = {}
    for name, tensor in named.items():
        spaces.setdefault(_space(tensor), []).append(name)
    for names in spaces.values():
        _check_shared(named, names)
    for tensor in plain.values():
        if not is_dense(tensor):
            copied: Any = tensor.clone(memory_format=torch.contiguous_format)
            tensor.set_(copied)


CONVERTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # by autocast: their weights too


def find_narrow(model: nn.Module, autocast: torch.dtype | None) -> set[torch.Tensor]:
    """Return the frozen parameters that keep the dtype of `autocast`, in which they were built.

    They are those of linear layers and convolutions. autocast would convert them at each use, to
    the same bits, so a run that stores them in 16 bits computes what it does with 32.
    """
    used: dict[torch.Tensor, bool] = {}
    for module in model.modules() if autocast is not None else ():
        is_converted = type(module) in CONVERTED or type(module).__name__ == "Conv1D"  # of GPT-2
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            used[parameter] = is_converted and used.get(parameter, True)
    return {p for p, fits in used.items() if fits and p.dtype == autocast and not p.requires_grad}


def convert_dtype(
    model: nn.Module, dtype: torch.dtype, excluded: Collection[torch.Tensor] = ()
) -> None:
    """Convert the floating-point tensors of a model but those `excluded`.

    Complex ones keep their dtype: Module.to would drop their imaginary parts, such as those of
    rotary positions.
    """

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor not in excluded else tensor

    model._apply(convert)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if a tensor fills its memory without gaps, in any order of its axes."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _own_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that have memory themselves, unlike DTensors and quantized wrappers."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        kinds = type(tensor).__mro__
        if not is_lazy(tensor) and (kinds[0] is torch.Tensor or nn.Parameter in kinds):
            yield name, tensor


def _check_elements(name: str, tensor: torch.Tensor) -> None:
    subject = f"build_model: the parameter {name}"
    if tensor.is_complex():
        raise ConfigError(f"""{subject} is complex, which no strategy trains;
            store torch.view_as_real of it, and use torch.view_as_complex in forward""")
    if not is_dense(tensor):
        places = _places(tensor)
        if len(places.unique()) < len(places):
            raise ConfigError(f"{subject} has elements that share memory; {COPY_ADVICE}")


def _check_shared(named: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
    """Raise ConfigError if a trainable parameter overlaps another tensor of the same space."""
    ranges = sorted((*_range(named[name]), name) for name in names if named[name].numel())
    for index, (_, end, one) in enumerate(ranges):
        for later in range(index + 1, len(ranges)):  # no slices: a model has thousands of tensors
            begin, _, other = ranges[later]
            if begin >= end:
                break
            is_trained = named[one].requires_grad or named[other].requires_grad
            if is_trained and _overlap(named[one], named[other]):
                raise ConfigError(f"""build_model: {one} and {other} share memory,
                    and are two tensors; tie them as one nn.Parameter, or {COPY_ADVICE}""")


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.isin(_bytes(one), _bytes(other)).any())


def _space(tensor: torch.Tensor) -> Any:
    """Return what the places of tensors that could overlap are counted in.

    It is a device, whose storages may be over the same memory, as those of two views of one array
    of NumPy are; on the meta device, which has no addresses, a storage.
    """
    return tensor.untyped_storage()._cdata if tensor.is_meta else tensor.device


def _begin(tensor: torch.Tensor) -> int:
    """Return where a tensor begins in its space, in bytes."""
    base = 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
    return base + int(tensor.storage_offset()) * tensor.itemsize


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor begins and ends in its space, in bytes."""
    begin = _begin(tensor)
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return begin, begin + (sum((size - 1) * step for size, step in axes) + 1) * tensor.itemsize


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the places of a tensor's bytes in its space."""
    first = _places(tensor) * tensor.itemsize + _begin(tensor)
    return (first[:, None] + torch.arange(tensor.itemsize)).flatten()


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """Return the place of each element in memory, from the first one, in elements."""
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = (places[:, None] + torch.arange(size) * stride).flatten()
    return places


class ActivationCheckpoint:
    """The forward pass of a module without its activations. Random draws are the same again.

    The second run changes no buffer, so running statistics are updated once. `inner` is the
    original forward pass.
    """

    def __init__(self, module: nn.Module):
        self.inner = module.forward
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        outputs = checkpoint(
            self.inner, *args, use_reentrant=False, context_fn=self._contexts, **kwargs
        )
        return outputs

    def _contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), self._recompute()

    @contextmanager
    def _recompute(self) -> Iterator[None]:
        copies = [buffer.clone() for buffer in self._module.buffers()]
        try:
            with uncounted():
                yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(f"""strategy.recompute: {type(self._module).__name__}
                cannot run twice with what it is given: {one_line(error)}; it must not change that;
                in transformers set use_cache=False in the config""") from error
        finally:
            with torch.no_grad():
                for buffer, value in zip(self._module.buffers(), copies, strict=True):
                    buffer.data.copy_(value)


def recompute(model: nn.Module, what: str | Sequence[str], blocks: Sequence[nn.Module]) -> None:
    """Recompute the blocks of the task, or the modules whose names match one of some patterns.

    Raises ConfigError if there is no such module.
    """
    if what == "none":
        return
    modules = list(blocks)
    if what == "blocks" and not blocks:
        raise ConfigError("""strategy.recompute=blocks: the task has no blocks;
            define blocks(model) in the task, or give names of modules""")
    if what != "blocks":
        modules = []
        for pattern in what:
            named = model.named_modules()
            matching = [module for name, module in named if name and fnmatchcase(name, pattern)]
            if not matching:
                some = ", ".join(name for name, _ in list(model.named_children())[:5])
                raise ConfigError(f"""strategy.recompute={pattern}: no module has this name;
                    give one of the model, such as {some}""")
            modules += matching
    for module in dict.fromkeys(modules):
        module.forward = ActivationCheckpoint(module)
