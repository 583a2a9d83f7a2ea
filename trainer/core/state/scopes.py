"""Where a task and its model keep state: attributes, and the variables of the code around them.

A model may count its passes in a variable of its module, its class or a closure. Those of a check
must not count, or run.prove would change what is learned.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from trainer.base.python_code import owner_of
from trainer.core.state.walk import OF_A_MODULE

OF_A_TASK = {"config", "world", "options", "_run"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MOST_CLOSURE_DEPTH = 3  # functions in closures of functions
_CODE = (FunctionType, MethodType, ModuleType, type, staticmethod, classmethod, property, nn.Module)


@dataclass(frozen=True)
class Scope:
    """Variables that belong together, such as the attributes of an object.

    `naming` makes a variable's name in a message. Those around task and model have code in them,
    too, which is no state.
    """

    naming: str
    variables: MutableMapping[str, Any]
    left_out: Container[str] = ()
    is_around: bool = False  # outside of the task and the model

    def items(self) -> list[tuple[str, Any]]:
        """Return the variables that hold values, by their keys."""
        pairs = [(k, v) for k, v in self.variables.items() if k not in self.left_out]
        return [pair for pair in pairs if _is_value(*pair)] if self.is_around else pairs

    def named(self) -> Iterator[tuple[str, Any]]:
        """Yield the variables that hold values, by their names in a message."""
        yield from ((self.naming.format(key), value) for key, value in self.items())


def _escaped(name: str) -> str:
    return name.replace("{", "{{").replace("}", "}}")


def is_own(definition: Any) -> bool:
    """Return True for a class or a function of the user's own code, not of an installed package."""
    return owner_of(definition) == "user"


def scope_of_task(task: Any, name: str = "self", left_out: Container[str] = OF_A_TASK) -> Scope:
    return Scope(f"{_escaped(name)}.{{}}", vars(task), left_out)


def scopes_of_model(model: nn.Module) -> list[Scope]:
    """Return the attributes of all modules, except parameters, buffers and submodules."""
    return [
        Scope(f"{_escaped(name)}.{{}}".lstrip("."), vars(module), OF_A_MODULE)
        for name, module in model.named_modules()
    ]


def list_surroundings(model: nn.Module, task: Any) -> list[Scope]:
    """Return what is around a task and a model: classes, modules of Python, functions, os.environ.

    Only of the user's own code.
    """
    kinds = [base for each in (task, *model.modules()) for base in type(each).__mro__]
    own = [kind for kind in dict.fromkeys(kinds) if is_own(kind)]
    functions = [each for layer in model.modules() for each in functions_of(layer)]
    names = {each.__module__ for each in (*own, *functions) if is_own(each)}
    modules = [vars(sys.modules[name]) for name in sorted(names) if name in sys.modules]
    scopes = [Scope("{}", variables, is_around=True) for variables in modules]
    scopes += [
        Scope(f"{kind.__name__}.{{}}", _ClassVariables(kind), is_around=True) for kind in own
    ]
    for variables in (*modules, *map(vars, own)):
        functions += [each for each in variables.values() if isinstance(each, FunctionType)]
    seen: set[FunctionType] = set()
    for function in functions:
        if is_own(function):
            scopes += _scopes_of_function(function, MOST_CLOSURE_DEPTH, seen)
    return [*scopes, Scope("os.environ[{!r}]", os.environ)]


def _scopes_of_function(
    function: FunctionType, depth: int, seen: set[FunctionType]
) -> Iterator[Scope]:
    """Yield the attributes, closure and defaults of a function, and of those in its closure."""
    if function in seen or not depth:
        return
    seen.add(function)
    name = _escaped(function.__qualname__).replace("<locals>.", "")
    code = function.__code__
    if function.__dict__:
        yield Scope(f"{name}.{{}}", function.__dict__, is_around=True)
    if function.__closure__:
        cells = _ClosureVariables(function)
        yield Scope(f"{{}} of {name}", cells, is_around=True)
        for value in cells.values():
            if isinstance(value, FunctionType):
                yield from _scopes_of_function(value, depth - 1, seen)
    if function.__defaults__ or function.__kwdefaults__:
        defaults = function.__defaults__ or ()
        arguments = code.co_varnames[: code.co_argcount][-len(defaults) :] if defaults else ()
        held = dict(zip(arguments, defaults, strict=False)) | (function.__kwdefaults__ or {})
        yield Scope(f"{{}} of {name}", held, is_around=True)


class _ClassVariables(MutableMapping[str, Any]):
    """The variables of a class, whose `vars` cannot be written."""

    def __init__(self, kind: type):
        self._kind = kind

    def __getitem__(self, key: str) -> Any:
        return vars(self._kind)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self._kind, key, value)

    def __delitem__(self, key: str) -> None:
        delattr(self._kind, key)

    def __iter__(self) -> Iterator[str]:
        return iter(list(vars(self._kind)))

    def __len__(self) -> int:
        return len(vars(self._kind))


class _ClosureVariables(MutableMapping[str, Any]):
    """The variables of a function's closure, without empty ones."""

    def __init__(self, function: FunctionType):
        names = function.__code__.co_freevars
        self._cells = dict(zip(names, function.__closure__ or (), strict=True))

    def __getitem__(self, key: str) -> Any:
        return self._cells[key].cell_contents

    def __setitem__(self, key: str, value: Any) -> None:
        self._cells[key].cell_contents = value

    def __delitem__(self, key: str) -> None:
        del self._cells[key].cell_contents

    def __iter__(self) -> Iterator[str]:
        for key, cell in self._cells.items():
            with suppress(ValueError):  # empty
                cell.cell_contents  # noqa: B018
                yield key

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _is_value(key: str, value: Any) -> bool:
    return not (key.startswith("__") or isinstance(value, _CODE) or hasattr(value, "__get__"))


def functions_of(module: nn.Module) -> Iterator[FunctionType]:
    """Yield functions that a module of a model calls besides those of its class."""
    hooks = [hook for name in HOOKS for hook in getattr(module, name).values()]
    for value in (*vars(module).values(), *hooks):
        function = value.__func__ if isinstance(value, MethodType) else value
        if isinstance(function, FunctionType):
            yield function
