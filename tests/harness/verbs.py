"""Verbs as functions of this process, for tests that call them often.

They are imported when they are called, so that the core's tests also run without the companions.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def audit(arguments: Sequence[str]) -> int:
    """Print the audit of a run, and return 0 if its chains agree."""
    module = importlib.import_module("trainer.show.audit")
    words = [word for word in arguments if word != module.LONG]
    code, lines, _ = module.audit(Path(*words), module.LONG in arguments)
    print(*lines, sep="\n")
    return code


def replay(arguments: Sequence[str]) -> Any:
    return importlib.import_module("trainer.show.replay").replay(arguments)


def show_verb(arguments: Sequence[str]) -> int:
    return importlib.import_module("trainer.show.__main__").main(arguments)


def use_verb(arguments: Sequence[str]) -> int:
    return importlib.import_module("trainer.use.__main__").main(arguments)


def write_shards(*arguments: Any) -> Any:
    return importlib.import_module("trainer.shards.__main__").write_shards(*arguments)
