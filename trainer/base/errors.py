"""Exceptions with one-line messages: mistakes that the user can fix, and failures of a run."""

import difflib
import re
from collections.abc import Iterable

from trainer.base.python_code import place_in

INDENT = re.compile(r"\n {8,}")  # of a text in a statement; a value has its own line breaks


class _OneLine(Exception):
    """Error whose message says all, in one line; a notebook shows it without a traceback.

    The code may write it over several lines: a line break and the indent after it are a space.
    """

    def __init__(self, message: object = ""):
        super().__init__(INDENT.sub(" ", str(message)))

    def _render_traceback_(self) -> list[str]:
        return [f"error: {self}"]


class ConfigError(_OneLine, ValueError):
    """Invalid setting, or invalid object that it names. Commands print the line and exit with 2."""


class CheckpointError(ConfigError):
    """Checkpoint that cannot be read or does not belong to this run."""


class RunError(_OneLine, RuntimeError):
    """Failure that ends a run: a full disk, a step that is not finite. Commands exit with 1."""


STOPPED = 75  # EX_TEMPFAIL: stopped after a checkpoint was published, to be resumed
MOST_CHARACTERS = 2000  # of a message that are shown: the first and the last half of them


class ServerError(RunError):
    """A server that does not answer, or a cache without room: other files cannot be read either."""


class ShardError(RunError):
    """A shard that cannot be read; the example so many later is in another one."""

    def __init__(self, message: str, num_examples: int):
        super().__init__(message)
        self.num_examples = num_examples

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return ShardError, (str(self), self.num_examples)


def visible(text: str) -> str:
    """Return `text` with control and bidirectional characters escaped, safe for a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return `text` without its middle if it has more than `most` characters."""
    left_out = len(text) - most
    if left_out <= 0:
        return text
    half = most // 2
    return f"{text[:half]} [... {left_out:,} more characters ...] {text[-half:]}"


def message_of(error: BaseException) -> str:
    """Return the message of an exception, even if it has none."""
    try:
        return str(error)
    except BaseException as problem:
        return f"its message cannot be shown, __str__ raised {type(problem).__name__}"


def one_line(error: BaseException) -> str:
    """Return the message of an exception without line breaks, and of each one in a group."""
    text = message_of(error)
    parts = getattr(error, "exceptions", ())
    if isinstance(parts, tuple):  # of an ExceptionGroup, which Python 3.10 does not have
        text = ": ".join([text, *(["; ".join(map(describe, parts))] if parts else [])])
    return shortened(" ".join(text.split()))


def describe(error: BaseException) -> str:
    """Return `ValueError: message`, in one line."""
    return f"{type(error).__name__}: {one_line(error)}".removesuffix(": ")


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends with this error: 2 for a wrong setting."""
    return 2 if isinstance(error, ConfigError) else 1


def describe_with_place(error: BaseException) -> str:
    """Return `ValueError: message (file.py:12)`, in one line."""
    return f"{describe(error)} ({place_of(error)})"


def place_of(error: BaseException) -> str:
    """Return `file.py:12`, where an exception was raised: the last frame outside the stdlib."""
    step = error.__traceback__
    line = place_in(step, "user", "installed", "torch", "lockstep") or place_in(step, "python")
    return line or "an unknown place"


def closest(name: str, known: Iterable[str], least: float = 0.7) -> str:
    """Return the known name that is most similar, with a likeness of at least `least`, or ""."""
    return next(iter(difflib.get_close_matches(name, [*known], n=1, cutoff=least)), "")


def did_you_mean(name: str, known: Iterable[str], least: float = 0.7, prefix: str = "") -> str:
    """Return advice for a name with a typo, such as `; did you mean resnet18?`, or "".

    `prefix` is written before the known name.
    """
    near = closest(name, known, least)
    return f"; did you mean {prefix}{near}?" if near else ""


def counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"
