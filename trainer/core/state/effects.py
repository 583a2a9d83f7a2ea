"""Effects that no sandbox undoes: files that are written, and generators that advance."""

from __future__ import annotations

import builtins
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import GeneratorType
from typing import Any

from torch import nn

from trainer.core.state.scopes import list_surroundings, scope_of_task, scopes_of_model
from trainer.core.state.walk import place_of


class Effects:
    """Effects of blocks, each as a sentence that is taken once."""

    def __init__(self) -> None:
        self._is_taken: dict[str, bool] = {}

    def take(self) -> list[str]:
        """Return what was not taken before."""
        new = [what for what, is_taken in self._is_taken.items() if not is_taken]
        self._is_taken.update(dict.fromkeys(new, True))
        return new

    @contextmanager
    def watched(self, model: nn.Module, task: Any) -> Iterator[None]:
        """Note files that are opened for writing, and generators that the task or model hold."""
        opened = builtins.open
        own = threading.get_ident()  # others write checkpoints and records

        def noting(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if threading.get_ident() == own and set(str(mode)) & set("wax+"):
                self._note(f"the file {file} was written")
            return opened(file, mode, *arguments, **options)

        before = {id(each): (each, place_of(each)) for each in _generators(model, task)}
        builtins.open = io.open = noting
        try:
            yield
        finally:
            builtins.open = io.open = opened
            for generator, position in before.values():
                if place_of(generator) != position:
                    self._note(f"the generator {generator.__name__} advanced")

    def _note(self, what: str) -> None:
        self._is_taken.setdefault(what, False)


def _generators(model: nn.Module, task: Any) -> Iterator[GeneratorType]:
    """Yield the generators that a task, a model, their classes and modules hold."""
    scopes = [scope_of_task(task), *scopes_of_model(model), *list_surroundings(model, task)]
    for scope in scopes:
        yield from (value for _, value in scope.items() if type(value) is GeneratorType)
