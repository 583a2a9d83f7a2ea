"""The process of a run: import path, imports without collection, standard streams and children.

Importing this keeps a run directory off the import path, even if a command starts there.
`python -m` puts the working directory before all packages in sys.path. `trainer` imports this
package first, and it imports only what every process has loaded.
"""

import os
import sys


def is_run_directory(arguments: list[str]) -> bool:
    """Return True if the working directory is in a run directory that an argument names."""
    try:
        here = os.getcwd()  # noqa: PTH109  # pathlib is not loaded yet
    except OSError:  # it was removed
        return False
    for flag, word in zip(["", *arguments], arguments, strict=False):
        folder = os.path.realpath(word.removeprefix("run.resume="))
        if os.path.isfile(f"{folder}/manifest.json"):  # noqa: PTH113
            folder = os.path.dirname(os.path.dirname(folder))  # noqa: PTH120
        is_run = os.path.isfile(f"{folder}/config.json")  # noqa: PTH113
        if is_run and flag not in ("-cd", "--config-dir") and f"{here}/".startswith(f"{folder}/"):
            return True
    return False


if is_run_directory(sys.argv[1:]):
    sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]  # noqa: PTH109

import gc  # noqa: E402  # from here on no module of a run directory is found
from collections.abc import Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402

MANY = 300  # modules: torch has 900, its compiler 600, and both stay loaded


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable Python's cyclic garbage collector while importing. Also usable as a decorator.

    The collector would traverse all of torch many times: 0.5 to 0.9 s of a start of 3.4 s.
    """
    was_enabled = gc.isenabled()
    before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) - before > MANY:
            gc.freeze()  # later collections skip these objects
        if was_enabled:
            gc.enable()
