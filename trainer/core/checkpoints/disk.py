"""The disk of a run directory: what its errors mean, and whether they end the run."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainer.base.errors import RunError
from trainer.core.config.schema import CheckpointSettings

# Process limits whose errors look like disk errors: the limit, its shell command, its unit.
LIMITS = {
    errno.EFBIG: (resource.RLIMIT_FSIZE, "ulimit -f", "bytes a file"),
    errno.EMFILE: (resource.RLIMIT_NOFILE, "ulimit -n", "open files"),
}

FEW_INODES = 8  # a checkpoint has fewer files; those of one that failed are removed again


class Disk:
    """The disk of a run directory. `failure`, if set, ends the run at the next step."""

    def __init__(self, directory: Path, config: CheckpointSettings, say: Callable[[str], None]):
        self.failure: Exception | None = None
        self._directory = directory
        self._stops = config.on_error == "stop"
        self._say = say
        self._warned: set[tuple[str, int | None]] = set()

    def report(self, error: OSError, doing: str, need: int = 0) -> None:
        """End the run, or warn once for each kind of error. `need` is a number of bytes."""
        path = error.filename or self._directory
        fact, cure = self._explain(error, need)
        line = f"{path}: {error.strerror or error} while {doing}; {fact}"
        kind = (doing.split(" step ")[0], error.errno)
        if self._stops:
            self.failure = RunError(f"""{line};
                {cure} and resume with run.resume, or give checkpoint.on_error=continue""")
        else:
            self._warn(kind, f"{line}; the run continues (checkpoint.on_error=continue)")

    def fail(self, error: Exception) -> None:
        """End the run at the next step with this error."""
        self.failure = self.failure or error

    def _explain(self, error: OSError, need: int) -> tuple[str, str]:
        """Return (the limit that was reached, the remedy)."""
        if error.errno in LIMITS:
            limit, command, unit = LIMITS[error.errno]
            most = resource.getrlimit(limit)[0]
            if most != resource.RLIM_INFINITY:  # else the limit is the file system's
                return f"{command} allows {most:,} {unit}", f"raise {command}"
        if error.errno == errno.EDQUOT:
            return "the quota of this user or project is used up", "free some of it (quota -s)"
        if error.errno == errno.ENOSPC and self._lacks_inodes():
            return "the file system has no inode for another file (df -i)", "remove files"
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return "somebody removed or replaced it", "put it back"
        sizes = f"{need / 1e6:,.1f} MB are needed"
        with suppress(OSError):  # also if the directory was removed
            sizes += f", {shutil.disk_usage(self._directory).free / 1e6:,.1f} MB free"
        return sizes, "make room"

    def _lacks_inodes(self) -> bool:
        with suppress(OSError):
            status = os.statvfs(self._directory)
            return status.f_files > 0 and status.f_favail < FEW_INODES
        return False

    def bear(self, error: OSError, doing: str) -> None:
        """Warn, once for each kind of error, about a part that the run can do without."""
        path = error.filename or self._directory
        line = f"{path}: {error.strerror or error} while {doing}; the run continues without it"
        self._warn((doing, error.errno), line)

    def tell(self, line: str) -> None:
        """Warn about something that is repaired."""
        self._say(f"warning: {line}")

    def _warn(self, kind: tuple[str, int | None], line: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._say(f"warning: {line}")

    def recover(self, doing: str) -> None:
        """Note that `doing` succeeded, so that its next failure is reported as a new one."""
        self._warned = {kind for kind in self._warned if kind[0] != doing}
