"""Private views of the disk: commands change nothing of the user's, and what they wrote is listed.

A view is a folder that takes what commands write. Where the system lets us mount an overlay
(enter_view.py) that holds for every program. Elsewhere, and in processes that a daemon starts
outside of the view, the recorder gives Python code private copies (recorder/private_files.py).
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.base.errors import shortened, visible
from trainer.prove.end_view import VIEW, kill_left, remove
from trainer.prove.enter_view import CODE, LAYERS, PROBLEM, is_within

HERE = Path(__file__).parent
PYTHON = (sys.executable, "-I", "-S")
GOOD = ("bcachefs", "btrfs", "ext3", "ext4", "f2fs", "jfs", "xfs", "zfs")  # for what is written
LEAST_BYTES = 32 << 20  # a disk with less is full
MOST_LISTED = 100
MOST_WALKED = 20_000  # files of a layer
REMOVED = "lockstep:removed"  # as in recorder/private_files.py
NOISE = ("__pycache__", ".pyc", "/.cache/torch/", "torchinductor_", "/.triton/", "/.nv/")


@dataclass(frozen=True)
class WrittenFile:
    """A file that a command wrote, changed or removed in its view."""

    path: str
    what: str  # "new", "changed" or "removed"


@dataclass
class View:
    """A view of one command, or of a command and the one that resumes it.

    `folder` has the layers of overlays, `copies` the copies that the recorder makes. Without
    overlays `is_mounted` is False, and `problem` says why.
    """

    folder: Path
    copies: Path
    is_mounted: bool = True
    problem: str = ""
    unprotected: list[str] = field(default_factory=list)

    def words(self, records: Path, environment: Mapping[str, str]) -> list[str]:
        """Return the words that start a program in the view; its records stay outside of it."""
        if not self.is_mounted:
            return []
        for name in ("root", "empty"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        spec = {
            "view": os.path.realpath(self.folder),
            "through": [os.path.realpath(records)],
            "own": _own_folders(environment),
        }
        path = self.folder / "spec.json"
        path.write_text(json.dumps(spec), encoding="utf-8")
        return [*PYTHON, str(HERE / "enter_view.py"), str(path)]

    def read_problem(self, code: int) -> str:
        """Return why a command could not enter the view; "" if it did."""
        path = self.folder / PROBLEM
        if not self.is_mounted or code != CODE or not path.exists():
            return ""
        return shortened(visible(path.read_text(encoding="utf-8", errors="replace"))) or "unknown"

    def give_up(self, problem: str) -> None:
        """Go on without overlays."""
        self.is_mounted = False
        self.problem = problem

    def end(self) -> None:
        """Kill the processes that are left in the view, such as daemons."""
        self.unprotected = self._read_layers().get("unprotected", [])
        if self.is_mounted:
            kill_left([f"{self.folder.parent.name}/{self.folder.name}"])

    def _read_layers(self) -> dict[str, Any]:
        try:
            about: dict[str, Any] = json.loads((self.folder / LAYERS).read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return about

    def list_written(self) -> list[WrittenFile]:
        """Return what was written, changed or removed, at most MOST_LISTED files."""
        layers = self._read_layers().get("layers", {})
        places = [(path, self.folder / "layers" / str(n)) for path, n in layers.items()]
        written: list[WrittenFile] = []
        for path, layer in [*places, ("/", self.copies)]:
            for each in _walk(layer, path):
                if len(written) == MOST_LISTED:
                    return written
                written.append(each)
        return written

    def is_full(self) -> bool:
        """Return True if the disk on which the view is has no space left."""
        about = os.statvfs(self.folder if self.is_mounted else self.copies.parent)
        return about.f_bavail * about.f_frsize < LEAST_BYTES


def _own_folders(environment: Mapping[str, str]) -> list[str]:
    """Return the folders in which commands may write: of work, home, and those of variables."""
    every = [str(Path.cwd()), str(Path("~").expanduser()), tempfile.gettempdir()]
    every += [each for each in environment.values() if each.startswith("/")]
    return sorted({os.path.realpath(each) for each in every if Path(each).is_dir()})


def _walk(layer: Path, path: str) -> Iterator[WrittenFile]:
    """Yield the files of a layer over `path`, but no caches of programs."""
    temporary = os.path.realpath(tempfile.gettempdir())
    work = os.path.realpath(Path.cwd())
    walked = 0
    for folder, folders, names in os.walk(layer):
        folders.sort()
        for name in sorted(names):
            walked += 1
            if walked > MOST_WALKED:
                return
            own = Path(folder, name)
            real = os.path.join(path, own.relative_to(layer))  # noqa: PTH118  # path may be "/"
            is_scratch = is_within(real, temporary) and not is_within(real, work)
            if is_scratch or any(each in real for each in NOISE):
                continue
            about = own.lstat()
            is_removed = stat.S_ISCHR(about.st_mode) and about.st_rdev == 0
            is_removed |= own.is_symlink() and os.readlink(own) == REMOVED  # noqa: PTH115
            there = os.path.lexists(real)  # a link to nowhere is there
            what = "removed" if is_removed else "changed" if there else "new"
            yield WrittenFile(real, what)


class Views:
    """The views of a proof, and a process that removes them when the proof ends or is killed."""

    def __init__(self, records: Path, is_temporary: bool):
        self._records = records
        self._root = Path(tempfile.mkdtemp(prefix=VIEW, dir=_find_disk()))
        self._views: list[View] = []
        self.problem = ""  # why there are no overlays
        if sys.platform != "linux":
            self.problem = f"{sys.platform} has no overlays"
        elif _find_kind(self._root) not in (*GOOD, "tmpfs"):
            self.problem = f"{self._root.parent} is on {_find_kind(self._root)}"
        folders = [self._root, *([records] if is_temporary else [])]
        words = [*PYTHON, str(HERE / "end_view.py"), *(os.path.realpath(f) for f in folders)]
        self._keeper = subprocess.Popen(  # noqa: S603  # no shell
            words, stdin=subprocess.PIPE, start_new_session=True
        )

    def make(self) -> View:
        """Return a new view, which begins with the state of the disk."""
        name = str(len(self._views))
        copies = (self._records / f"copies-{name}").absolute()
        view = View(self._root / name, copies, not self.problem, self.problem)
        view.folder.mkdir()
        self._views.append(view)
        return view

    @property
    def is_whole(self) -> bool:
        """Return True if commands could change nothing on the user's disk."""
        return not (self.problem or any(each.unprotected for each in self._views))

    def find_notes(self) -> list[str]:
        """Return what the views do not protect."""
        notes = []
        if self.problem:
            what = "Python code wrote to private copies; other programs wrote to your disk"
            notes.append(f"this system allows no private view of the disk ({self.problem}): {what}")
        if paths := sorted({path for each in self._views for path in each.unprotected}):
            notes.append(f"no overlay was possible over {', '.join(paths[:3])}: not protected")
        return notes

    def close(self) -> None:
        """Remove all views, and the records if they are temporary."""
        self._keeper.communicate()
        for each in self._views:
            remove(str(each.copies))


@contextmanager
def private_views(records: Path, is_temporary: bool) -> Iterator[Views]:
    """Yield the views of a proof, which are removed after the block."""
    views = Views(records, is_temporary)
    try:
        yield views
    finally:
        views.close()


def _find_disk() -> str:
    """Return a folder for temporary files on a disk that can take the writes of an overlay."""
    folders = [tempfile.gettempdir(), "/var/tmp", "/dev/shm"]  # noqa: S108  # mkdtemp makes its own
    able = [each for each in folders if os.access(each, os.W_OK)]
    on_disk = [each for each in able if _find_kind(Path(each)) in GOOD]
    in_memory = [each for each in able if _find_kind(Path(each)) == "tmpfs"]
    return [*on_disk, *in_memory, *folders][0]


def _find_kind(folder: Path) -> str:
    """Return the kind of the file system of a folder, "" if it is not known."""
    path = os.path.realpath(folder)
    kinds = {}
    try:
        lines = Path("/proc/self/mounts").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return ""
    for words in (line.split() for line in lines):
        if is_within(path, words[1].replace("\\040", " ")):
            kinds[words[1]] = words[2]
    return kinds[max(kinds, key=len)] if kinds else ""
