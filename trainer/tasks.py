"""The built-in tasks, importable as `trainer.tasks.<name>` from a checkout and from a wheel alike.

A folder called `tasks` in the working directory would shadow a top-level package of that name.
"""

from trainer.config import HOME

__path__ = [str(HOME / "tasks")]
