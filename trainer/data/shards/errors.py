"""Errors of shards: of a server, and of one shard as an example meets it."""

from __future__ import annotations

from trainer.errors import RunError


class ServerError(RunError):
    """A server that does not answer, or a cache without room: other files cannot be read either."""


class ShardError(RunError):
    """A shard that cannot be read; the example so many later is in another one."""

    def __init__(self, message: str, num_examples: int):
        super().__init__(message)
        self.num_examples = num_examples

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return ShardError, (str(self), self.num_examples)
