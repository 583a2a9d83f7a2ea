"""The built-in tasks, importable as `trainer.tasks.<name>` from a checkout and from a wheel alike.

A folder called `tasks` where the command runs would shadow a top-level package of that name, so ours has none.
"""

from trainer.config import HOME

__path__ = [str(HOME / "tasks")]
