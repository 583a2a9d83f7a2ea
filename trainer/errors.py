"""Errors of one line each: what the user can mend, and what ended a run through no fault of its settings."""


class ConfigError(ValueError):
    """A setting, or what it points at, cannot work. `python -m trainer` prints the line and exits with code 2."""


class CheckpointError(ConfigError):
    """A checkpoint cannot be read, or does not belong to this run."""


class RunError(RuntimeError):
    """The run cannot go on: a full disk, a step that is not finite. `python -m trainer` prints it and exits with 1."""
