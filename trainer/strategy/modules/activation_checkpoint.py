"""Activation checkpointing (Chen et al., arXiv:1604.06174): run a module's forward pass again in
backward, instead of keeping its activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.errors import ConfigError, one_line
from trainer.strategy.modules.dry_run import FlopCounter


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
        made = checkpoint(
            self.inner, *args, use_reentrant=False, context_fn=self._contexts, **kwargs
        )
        return made

    def _contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), self._again()

    @contextmanager
    def _again(self) -> Iterator[None]:
        kept = [buffer.clone() for buffer in self._module.buffers()]
        try:
            with FlopCounter.paused():
                yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            name = type(self._module).__name__
            why = f"{name} cannot run twice with what it is given: {one_line(error)}"
            advice = "it must not change that; in transformers set use_cache=False in the config"
            raise ConfigError(f"strategy.recompute: {why}; {advice}") from error
        finally:
            with torch.no_grad():
                for buffer, value in zip(self._module.buffers(), kept, strict=True):
                    buffer.data.copy_(value)


def recompute(model: nn.Module, what: str | Sequence[str], blocks: Sequence[nn.Module]) -> None:
    """Recompute the blocks of the task, or the modules whose names match one of some patterns.

    Raises ConfigError if there is no such module.
    """
    if what == "none":
        return
    modules = list(blocks)
    if what == "blocks" and not blocks:
        advice = "define blocks(model) in the task, or give names of modules"
        raise ConfigError(f"strategy.recompute=blocks: the task has no blocks; {advice}")
    if what != "blocks":
        modules = []
        for pattern in what:
            named = model.named_modules()
            found = [module for name, module in named if name and fnmatchcase(name, pattern)]
            if not found:
                some = ", ".join(name for name, _ in list(model.named_children())[:5])
                why = f"no module has this name; give one of the model, such as {some}"
                raise ConfigError(f"strategy.recompute={pattern}: {why}")
            modules += found
    for module in dict.fromkeys(modules):
        module.forward = ActivationCheckpoint(module)
