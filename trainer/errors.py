"""Errors of one line each: what the user can fix, and what ended a run despite correct settings."""


class ConfigError(ValueError):
    """A setting, or what it points at, cannot work. Commands print the line and exit with 2."""


class CheckpointError(ConfigError):
    """A checkpoint cannot be read, or does not belong to this run."""


class RunError(RuntimeError):
    """The run cannot continue: a full disk, a step that is not finite. Commands exit with 1."""


def visible(text: str) -> str:
    """`text` with control and bidirectional characters escaped, safe to print on a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(error: BaseException) -> str:
    """The message of an exception without line breaks."""
    return " ".join(str(error).split())
