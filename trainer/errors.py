"""Exceptions with one-line messages: mistakes that the user can fix, and failures of a run."""

import traceback
from pathlib import Path


class ConfigError(ValueError):
    """Invalid setting, or invalid object that it names. Commands print the line and exit with 2."""


class CheckpointError(ConfigError):
    """Checkpoint that cannot be read or does not belong to this run."""


class RunError(RuntimeError):
    """Failure that ends a run: a full disk, a step that is not finite. Commands exit with 1."""


def visible(text: str) -> str:
    """Return `text` with control and bidirectional characters escaped, safe for a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(error: BaseException) -> str:
    """Return the message of an exception without line breaks."""
    try:
        return " ".join(str(error).split())
    except Exception as other:  # of its own __str__
        return f"its message raises {type(other).__name__}"


def described(error: BaseException) -> str:
    """Return `ValueError: message (file.py:12)`."""
    message = one_line(error)
    return f"{type(error).__name__}{f': {message}' * bool(message)} ({place_of(error)})"


def place_of(error: BaseException) -> str:
    """Return `file.py:12`, where an exception was raised: the last frame outside the stdlib."""
    library = str(Path(traceback.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if "site-packages" in frame.filename or not frame.filename.startswith((library, "<"))
    ]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
