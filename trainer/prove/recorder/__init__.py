"""Recorder: runs inside a user's training process and writes what each optimizer step did.

It is loaded as `_lockstep_recorder` and imports only the standard library until the script has
imported torch. It draws no random numbers, holds no collective and keeps no tensor alive.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import Any

VARIABLE = "LOCKSTEP_PROVE"
NAMESPACE = "LOCKSTEP_PROVE_NAMESPACE"  # as in enter_view.py
# Read before the script runs, which may clear its environment.
SETTINGS: dict[str, Any] = json.loads(os.environ.get(VARIABLE, "{}"))
LAUNCHED = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
HOOKS_BY_MODULE = {  # module: our module and function
    "torch": ("hooks", "install"),
    "accelerate.accelerator": ("hooks", "watch_accelerator"),
    "safetensors": ("private_files", "watch_library"),
}


class ImportWatcher(importlib.abc.MetaPathFinder):
    """Runs a function of `hooks` after a module of HOOKS_BY_MODULE has been imported."""

    def __init__(self) -> None:
        self._busy: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in HOOKS_BY_MODULE or fullname in self._busy:
            return None
        self._busy.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = HookedLoader(spec.loader, HOOKS_BY_MODULE[fullname])
        return spec


class HookedLoader(importlib.abc.Loader):
    """Loads a module as its own loader does, and runs our function afterwards."""

    def __init__(self, loader: Any, hook: tuple[str, str]) -> None:
        self._loader = loader
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if module.__name__ == "torch":  # before the script computes on several threads
            importlib.import_module(f"{__name__}.torch_flags").resolve_vector_functions()
        own, function = self._hook
        getattr(importlib.import_module(f"{__name__}.{own}"), function)(module)


def watch_imports() -> None:
    """Run our hooks when the script imports torch, and never before."""
    sys.meta_path.insert(0, ImportWatcher())


def watch_errors() -> None:
    """Write the traceback of an error that ends this process: outputs of ranks are mixed."""
    original = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        rank = os.environ.get("RANK", LAUNCHED["RANK"])
        who = "launcher" if rank is None else f"rank{rank}"
        path = os.path.join(SETTINGS["folder"], f"error-{time.time_ns()}-{who}.txt")  # noqa: PTH118
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            file.write("".join(traceback.format_exception(kind, error, trace)))
        original(kind, error, trace)

    sys.excepthook = note


def write_privately() -> None:
    """Make private copies of what this process writes if it is not in the view of the command."""
    own = ""
    with contextlib.suppress(OSError):
        own = os.readlink("/proc/self/ns/mnt")  # noqa: PTH115
    if not SETTINGS.get("copies"):
        return
    is_in_view = own == os.environ.get(NAMESPACE, "none")
    if not is_in_view:
        files = importlib.import_module(f"{__name__}.private_files")
        records = os.path.dirname(SETTINGS["folder"])  # noqa: PTH120
        files.make_private(SETTINGS["copies"], (records,), SETTINGS["started_in"])
    elif os.geteuid() != 0:
        importlib.import_module(f"{__name__}.private_files").move_folders()


def note_start() -> None:
    """Note that a process of the command has loaded the recorder."""
    path = os.path.join(SETTINGS["folder"], "loaded")  # noqa: PTH118
    with contextlib.suppress(OSError), open(path, "ab"):
        pass
