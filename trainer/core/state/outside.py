"""State outside of a task and its model: variables of modules, classes and closures, iterators.

A model may count its passes there. Those of a check must not count, or run.prove would change what
is learned.
"""

from __future__ import annotations

import builtins
import copy
import io
import itertools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

from torch import nn

COPIED: tuple[type, ...] = (
    *(type(iter([])), type(iter(())), type(iter(range(0))), type(iter(range(2**70)))),
    *(itertools.count, itertools.cycle),
)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
LIBRARY = str(Path(os.__file__).parent) + os.sep
MOST_CLOSURE_DEPTH = 3  # functions in closures of functions
Keep = Callable[[Any], Callable[[], Any] | None]  # returns what undoes changes of a value in place
Restore = Callable[[], Any]


def keep_outside(model: nn.Module, task: Any, keep: Keep) -> list[Restore]:
    """Return functions that undo later changes of what is outside of a task and its model."""
    keeper = _Keeper(keep)
    kinds = {base for each in (task, *model.modules()) for base in type(each).__mro__}
    own = [kind for kind in kinds if is_own(kind)]
    for kind in own:
        keeper.keep_class(kind)
    for name in {kind.__module__ for kind in own}:
        if (module := sys.modules.get(name)) is not None:
            keeper.keep_variables(vars(module))
    for layer in model.modules():
        for function in functions_of(layer):
            keeper.keep_function(function, MOST_CLOSURE_DEPTH)
    keeper.keep_environment()
    return keeper.restores


def is_own(kind: type) -> bool:
    """Return True for a class of the user's own code, not of an installed package."""
    module = sys.modules.get(kind.__module__)
    if module is None or kind.__module__.startswith(("trainer.", "torch.")):
        return False
    file = getattr(module, "__file__", None)
    if file is None:  # of a notebook, or built in
        return kind.__module__ == "__main__"
    return "site-packages" not in file and not file.startswith(LIBRARY)


def copy_iterator(value: Any) -> Any:
    """Return a copy of an iterator that goes on from the same place, or the value itself."""
    if isinstance(value, COPIED):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of itertools, from Python 3.12 on
            return copy.copy(value)
    return value


def of_outside(model: nn.Module, task: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is outside of a task and its model by name, to find what a pass changes."""
    kinds = {base for each in (task, *model.modules()) for base in type(each).__mro__}
    own = [kind for kind in kinds if is_own(kind)]
    functions = [each for layer in model.modules() for each in functions_of(layer)]
    modules = {kind.__module__ for kind in own} | {each.__module__ for each in functions}
    for variables in [vars(sys.modules[name]) for name in modules if name in sys.modules]:
        yield from ((key, value) for key, value in variables.items() if _is_value(key, value))
        functions += [each for each in variables.values() if isinstance(each, FunctionType)]
    for kind in own:
        yield from ((f"{kind.__name__}.{k}", v) for k, v in vars(kind).items() if _is_value(k, v))
        functions += [each for each in vars(kind).values() if isinstance(each, FunctionType)]
    for function in functions:
        yield from _held_by(function)
    yield "os.environ", dict(os.environ)


def _held_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a function and the variables of its closure by name."""
    name = function.__name__
    yield from ((f"{name}.{key}", value) for key, value in function.__dict__.items())
    pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for key, cell in pairs:
        with suppress(ValueError):  # empty
            if _is_value(key, cell.cell_contents):
                yield f"{key} of {name}", cell.cell_contents


class _Keeper:
    """Collects functions that undo changes."""

    def __init__(self, keep: Keep):
        self.restores: list[Restore] = []
        self._keep = keep
        self._seen: set[int] = set()

    def keep_variables(self, variables: MutableMapping[str, Any]) -> None:
        """Keep the values of a module's variables, except functions, classes and modules."""
        before = {k: copy_iterator(v) for k, v in variables.items() if _is_value(k, v)}

        def restore() -> None:
            for key, value in before.items():
                if variables.get(key) is not value:
                    variables[key] = value

        self.restores.append(restore)
        self._keep_each(before.values())
        for value in list(variables.values()):
            if isinstance(value, FunctionType) and value.__globals__ is variables:
                self.keep_function(value, MOST_CLOSURE_DEPTH)

    def keep_class(self, kind: type) -> None:
        """Keep the values of a class, and what its functions hold."""
        before = {k: copy_iterator(v) for k, v in vars(kind).items() if _is_value(k, v)}

        def restore() -> None:
            for key, value in before.items():
                if vars(kind).get(key) is not value:
                    setattr(kind, key, value)

        self.restores.append(restore)
        self._keep_each(before.values())
        for value in list(vars(kind).values()):
            if isinstance(value, FunctionType):
                self.keep_function(value, MOST_CLOSURE_DEPTH)

    def keep_function(self, function: FunctionType, depth: int) -> None:
        """Keep the cells, defaults and attributes of a function."""
        if id(function) in self._seen or not depth:
            return
        self._seen.add(id(function))
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # empty
                continue
            if isinstance(value, FunctionType):
                self.keep_function(value, depth - 1)
            elif _is_value("", value):
                self._keep_cell(cell, copy_iterator(value))
        self._keep_each([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()])
        if function.__dict__:
            self.keep_variables(function.__dict__)

    def _keep_cell(self, cell: Any, value: Any) -> None:
        def restore() -> None:
            if cell.cell_contents is not value:
                cell.cell_contents = value

        self.restores.append(restore)
        self._keep_each([value])

    def keep_environment(self) -> None:
        before = dict(os.environ)

        def restore() -> None:
            if os.environ != before:
                os.environ.clear()
                os.environ.update(before)

        self.restores.append(restore)

    def _keep_each(self, values: Any) -> None:
        for value in values:
            with suppress(Exception):  # of an object that cannot be copied, which stays as it is
                if (restore := self._keep(value)) is not None:
                    self.restores.append(restore)


def _is_value(key: str, value: Any) -> bool:
    if key.startswith("__"):
        return False
    code = (FunctionType, MethodType, ModuleType, type, staticmethod, classmethod, property)
    return not isinstance(value, (*code, nn.Module)) and not hasattr(value, "__get__")


def functions_of(module: nn.Module) -> Iterator[FunctionType]:
    """Yield functions that a module of a model calls besides those of its class."""
    hooks = [hook for name in HOOKS for hook in getattr(module, name).values()]
    for value in (*vars(module).values(), *hooks):
        function = value.__func__ if isinstance(value, MethodType) else value
        if isinstance(function, FunctionType):
            yield function


class Traces:
    """Effects of a block that nothing undoes: files that it writes, generators that it advances."""

    def __init__(self) -> None:
        self._found: dict[str, bool] = {}  # True if it was taken

    def take(self) -> list[str]:
        """Return what was not taken before."""
        new = [what for what, is_taken in self._found.items() if not is_taken]
        self._found.update(dict.fromkeys(new, True))
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
        self._found.setdefault(what, False)


def _generators(model: nn.Module, task: Any) -> Iterator[GeneratorType]:
    """Yield the generators that a task, a model, their classes and modules hold."""
    kinds = {base for each in (task, *model.modules()) for base in type(each).__mro__}
    own = [kind for kind in kinds if is_own(kind)]
    modules = [vars(sys.modules[name]) for name in {kind.__module__ for kind in own}]
    for variables in (*map(vars, (task, *model.modules())), *map(vars, own), *modules):
        yield from (value for value in variables.values() if type(value) is GeneratorType)


def place_of(generator: GeneratorType) -> Any:
    frame = generator.gi_frame
    if frame is None:
        return None
    return frame.f_lasti, {k: v for k, v in frame.f_locals.items() if isinstance(v, (int, str))}
