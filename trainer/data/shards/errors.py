"""Errors of shards: of a server, and of one shard as an example meets it."""

from __future__ import annotations

from trainer.errors import RunError


class ServerError(RunError):
    """A server that does not answer: other files cannot be read either."""


class ShardError(RunError):
    """A shard that cannot be read; `next_index` is an example of the shard after it."""

    def __init__(self, message: str, next_index: int):
        super().__init__(message)
        self.next_index = next_index

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return ShardError, (str(self), self.next_index)
