"""Errors of one line each: what the user can fix, and what ended a run despite correct settings."""

import traceback
from pathlib import Path


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


def place_of(error: BaseException) -> str:
    """`file.py:12`, where an exception was raised: the last line outside the standard library."""
    library = str(Path(traceback.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if "site-packages" in frame.filename or not frame.filename.startswith((library, "<"))
    ]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
