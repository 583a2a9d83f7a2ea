"""Loads the recorder of `trainer.prove` in each Python process of a recorded command.

The interpreter imports this module at its start. It loads the recorder under a private name, so
that neither `trainer` nor its modules are visible to the script, and then the next sitecustomize.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

INJECTED = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
RECORDER = "_lockstep_recorder"


def load_recorder() -> None:
    """Import the package `recorder` beside this folder, which watches imports of torch."""
    prove = os.path.dirname(INJECTED)  # noqa: PTH120
    folder = os.path.join(prove, "recorder")  # noqa: PTH118
    process = os.path.join(os.path.dirname(prove), "base", "process")  # noqa: PTH118, PTH120
    path = os.path.join(folder, "__init__.py")  # noqa: PTH118
    spec = importlib.util.spec_from_file_location(
        RECORDER, path, submodule_search_locations=[folder, process]
    )
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[RECORDER] = module
    spec.loader.exec_module(module)
    module.watch_imports()
    module.watch_errors()
    module.note_start()
    module.write_privately()


def load_next() -> None:
    """Run the sitecustomize that this one hides."""
    entries = [entry for entry in sys.path if os.path.abspath(entry) != INJECTED]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", entries)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("LOCKSTEP_PROVE"):
    load_recorder()
    load_next()
