"""Program that removes the folders of a proof when it ends, also by SIGKILL: end_view.py FOLDERS.

It waits for the end of its standard input, which `prove` holds open, ends every process that is
left in a view or was given one of the folders, and removes the folders. It imports only the
standard library: Python starts in 15 ms like that.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Collection

VIEW = "lockstep-view-"  # begins the name of a folder with views
GRACE_S = 5.0  # for killed processes to be gone


def find_processes(views: Collection[str], marks: Collection[bytes]) -> list[int]:
    """Return the processes with an overlay of one of these folders of views, or with a mark in
    their environment.

    The number of a mount namespace would not do: the kernel gives that of one that is gone to the
    next, which may be another proof's.
    """
    processes = []
    own = {os.getpid(), os.getppid()}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not name.isdigit() or int(name) in own:
            continue
        try:
            is_left = False
            if views:
                with open(f"/proc/{name}/mountinfo", "rb") as file:
                    text = file.read()
                is_left = any(f"/{view}/".encode() in text for view in views)
            if not is_left and marks:
                with open(f"/proc/{name}/environ", "rb") as file:
                    text = file.read()
                is_left = any(mark in text for mark in marks)
        except OSError:  # it has ended, or is somebody else's
            continue
        processes += [int(name)] if is_left else []
    return processes


def kill_left(views: Collection[str], marks: Collection[bytes] = ()) -> None:
    """Kill such processes until there are none."""
    kill_all(lambda: find_processes(views, marks))


def kill_all(find: Callable[[], Collection[int]]) -> None:
    """Kill what `find` returns until it returns nothing, for GRACE_S at most."""
    end = time.monotonic() + GRACE_S
    while (left := find()) and time.monotonic() < end:
        for each in left:
            try:
                os.kill(each, signal.SIGKILL)
            except OSError:
                continue
        time.sleep(0.01)


def remove(folder: str) -> None:
    """Remove a folder; the kernel's folder of an overlay has no permissions."""

    def retry(function: Callable[..., object], path: str, _: object) -> None:
        try:
            for directory in (os.path.dirname(path), path):
                if not os.path.islink(directory) and os.path.isdir(directory):
                    os.chmod(directory, stat.S_IRWXU)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                function(path)
        except OSError:
            pass

    shutil.rmtree(folder, onerror=retry)


def main() -> None:
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)
    while os.read(0, 1 << 16):
        pass
    folders = sys.argv[1:]
    views = [name for name in map(os.path.basename, folders) if name.startswith(VIEW)]
    kill_left(views, [json.dumps(each).encode()[1:-1] + b"/" for each in folders])
    for folder in folders:
        remove(folder)


if __name__ == "__main__":
    main()
