"""The console script `lockstep`: says what is in its way if another package or file is `trainer`.

It imports nothing of Lockstep before it knows that `trainer` is Lockstep: coqui-tts-trainer of PyPI
installs a package `trainer` too, and overwrites files of this one if it is installed later.
"""

import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

OURS = '"""Lockstep: '  # the first characters of trainer/__init__.py
REPAIR = "pip install --force-reinstall --no-deps lockstep-trainer"  # by its name or its wheel


def main() -> None:
    """Run `lockstep [verb] ...`; end with code 2 if `trainer` is not Lockstep."""
    if problem := find_problem():
        print(f"error: lockstep: {problem}", file=sys.stderr)
        sys.exit(2)
    from trainer.verbs import main as start

    start()


def find_problem() -> str:
    """Return what is in place of Lockstep's `trainer`, and what to do; empty if nothing."""
    spec = find_spec("trainer")
    if spec is None or spec.origin is None:
        return f"trainer/__init__.py is missing, as after the removal of another package: {REPAIR}"
    place = Path(spec.origin)
    if place.read_text(encoding="utf-8", errors="replace").startswith(OURS):
        return ""
    name = _find_owner(place)
    if not name:
        return f"{place} is not Lockstep's: take its folder out of PYTHONPATH, or {REPAIR}"
    remove = f"pip uninstall {name}, then {REPAIR}"
    why = f"{name} installs a package trainer too, and has overwritten files of lockstep-trainer"
    return f"{why}: give each an environment of its own; to repair this one: {remove}"


def _find_owner(place: Path) -> str:
    """Return the name of another distribution that has installed a file; empty if none has."""
    for found in distributions():
        name = found.metadata["Name"]
        files = found.files or ()
        is_it = any(file.name == place.name and file.locate() == place for file in files)
        if is_it and name != "lockstep-trainer":
            return str(name)
    return ""
