"""Errors of one line each: what the user can mend, and what ended a run through no fault of its settings."""


class ConfigError(ValueError):
    """A setting, or what it points at, cannot work. `python -m trainer` prints the line and exits with code 2."""


class CheckpointError(ConfigError):
    """A checkpoint cannot be read, or does not belong to this run."""


class RunError(RuntimeError):
    """The run cannot go on: a full disk, a step that is not finite. `python -m trainer` prints it and exits with 1."""


def visible(text: str) -> str:
    """What a name brought along that a terminal would obey, or that turns its neighbours around, escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
