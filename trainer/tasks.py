"""The built-in tasks, importable as `trainer.tasks.<name>` from a checkout and from a wheel.

They are not a top-level package `tasks`: a user's folder of that name would shadow it.
"""

from trainer.base.folders import HOME

__path__ = [str(HOME / "tasks")]
