"""Nothing is imported from a run directory, even if a command is started in it.

`python -m` puts the working directory before all packages in sys.path. `trainer` imports this
module first, and this one only what every process has loaded.
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
        place = os.path.realpath(word.removeprefix("run.resume="))
        if os.path.isfile(f"{place}/manifest.json"):  # noqa: PTH113
            place = os.path.dirname(os.path.dirname(place))  # noqa: PTH120
        is_run = os.path.isfile(f"{place}/config.yaml")  # noqa: PTH113
        if is_run and flag not in ("-cd", "--config-dir") and f"{here}/".startswith(f"{place}/"):
            return True
    return False


if is_run_directory(sys.argv[1:]):
    sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]  # noqa: PTH109
