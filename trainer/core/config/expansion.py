"""A limit of what interpolations `${key}` become: thirty that double each other fill the memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from omegaconf.base import Container

from trainer.base.errors import ConfigError
from trainer.base.plain_files import MOST_CONFIG_VALUES

COST = 5  # of an interpolation, in values: OmegaConf takes 0.3 ms for it
CHARACTERS = 16  # of a string that count as a value
TOO_MANY_VALUES = f"""the interpolations ${{...}} become more than {MOST_CONFIG_VALUES:,} values;
        use fewer of them, or read long values from a file in the task"""


class _Expansion:
    """The size, in values, that interpolations have become so far."""

    def __init__(self) -> None:
        self.size = 0
        self._sizes: dict[int, tuple[Any, int]] = {}  # of containers, which stay alive here

    def take(self, size: int) -> None:
        self.size += size
        if self.size > MOST_CONFIG_VALUES:
            raise ConfigError(TOO_MANY_VALUES)

    def size_of(self, node: Any) -> int:
        content = node._value() if node is not None else None
        if isinstance(content, str):
            return len(content) // CHARACTERS
        if not isinstance(content, (dict, list)):
            return 1
        if id(node) not in self._sizes:
            parts = content.values() if isinstance(content, dict) else content
            self._sizes[id(node)] = node, 1 + sum(map(self.size_of, parts))
        return self._sizes[id(node)][1]


_counting: ContextVar[_Expansion | None] = ContextVar("_counting", default=None)
_resolve = Container._resolve_interpolation_from_parse_tree


def _resolve_and_count(self: Container, *arguments: Any, **options: Any) -> Any:
    """Resolve an interpolation as OmegaConf does, and count what it becomes in `limited`."""
    expansion = _counting.get()
    if expansion is None:
        return _resolve(self, *arguments, **options)
    expansion.take(COST)
    node = _resolve(self, *arguments, **options)
    expansion.take(expansion.size_of(node))
    return node


# once, not by each block: two threads that load settings would take away each other's
Container._resolve_interpolation_from_parse_tree = _resolve_and_count  # type: ignore[method-assign]


@contextmanager
def limited() -> Iterator[None]:
    """Within the block, raise ConfigError for interpolations that become too many values.

    OmegaConf may wrap or drop an exception on the way, so the size is looked at afterwards.
    """
    expansion = _Expansion()
    token = _counting.set(expansion)
    try:
        yield
    finally:
        _counting.reset(token)
        if expansion.size > MOST_CONFIG_VALUES:
            raise ConfigError(TOO_MANY_VALUES) from None
