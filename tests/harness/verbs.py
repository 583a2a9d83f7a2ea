"""Verbs as functions of this process, for tests that call them often."""

from pathlib import Path

from trainer.show import audit as auditing


def audit(arguments):
    """Print the audit of a run, and return 0 if its chains agree."""
    words = [word for word in arguments if word != auditing.LONG]
    code, lines, _ = auditing.audit(Path(*words), auditing.LONG in arguments)
    print(*lines, sep="\n")
    return code
