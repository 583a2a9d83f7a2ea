"""Private copies of the files that Python code writes, where the system allows no overlay.

A file that is opened for writing is copied to the folder of copies, below its own path, and opened
there; later uses of its path find the copy. What is removed leaves a link with the target REMOVED.
Programs that are not Python, and libraries that open files by themselves, pass this by, but for
those of LIBRARIES. Temporary files and caches of compilers are not copied: other programs may wait
for them, and the system's loader opens what is compiled.
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import os.path as paths
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

REMOVED = "lockstep:removed"
AS_OUTSIDE = ("/proc", "/sys", "/dev", "/run")
# Caches of compiled code, and variables that move them.
COMPILED = ("/.triton/", "/.nv/", "/torchinductor_", "/torch_extensions/", "/transformers_modules/")
COMPILED_IN = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
LONGEST = 107  # bytes of the path of a socket
MOST_LINKS = 40  # that lead from one to the next
NOWHERE = "/proc/lockstep-removed"  # a path at which nothing is
READING = ("stat", "lstat", "access", "readlink", "statvfs", "getxattr", "listxattr", "chdir")
CHANGING = ("chmod", "chown", "lchown", "utime", "truncate", "setxattr")  # of a file that is there
OF_LINKS = ("lstat", "readlink")
MAKING = ("mkdir", "mkfifo", "mknod")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class PrivateFiles:
    """Paths of copies. `folder` has a copy of /a/b at a/b; folders of `through` have none.

    The proof was `started_in` a folder: its files are no temporary ones, wherever they are.
    """

    def __init__(self, folder: str, through: tuple[str, ...], started_in: str):
        self.folder = folder = paths.realpath(folder)
        self._own = (paths.realpath(started_in), paths.realpath(paths.expanduser("~")))
        self._temporary = paths.realpath(tempfile.gettempdir())
        caches = [paths.realpath(os.environ[each]) for each in COMPILED_IN if os.environ.get(each)]
        self._through = (*AS_OUTSIDE, *through, *caches, folder)
        self.thread = threading.local()

    def find(self, path: Any, dir_fd: int | None = None) -> str:
        """Return the absolute path of a file that may have a copy; "" for one that has none."""
        name = os.fsdecode(path)
        if dir_fd is not None and not paths.isabs(name):
            name = paths.join(self.own_path(os.readlink(f"/proc/self/fd/{dir_fd}")), name)
        folder, own = paths.split(paths.abspath(name))
        real = paths.join(self._resolve(folder), own)
        is_scratch = is_within(real, self._temporary) and not self._is_own(real)
        is_scratch |= any(each in f"{real}/" for each in COMPILED)
        return "" if is_scratch or any(is_within(real, each) for each in self._through) else real

    def _resolve(self, folder: str, depth: int = 0) -> str:
        """Return the path of a folder without links, on the disk and among the copies."""
        real = paths.realpath(folder)
        copy = self.folder + real
        target = paths.realpath(copy)
        if target in (copy, real) or REMOVED in target or depth > MOST_LINKS:
            return real
        return self._resolve(self.own_path(target), depth + 1)

    def own_path(self, path: str) -> str:
        """Return the path of the file whose copy this is; other paths as they are."""
        if not is_within(path, self.folder):
            return path
        return path.removeprefix(self.folder) or "/"

    def _is_own(self, path: str) -> bool:
        return any(is_within(path, each) for each in self._own)

    def find_or_none(self, path: Any, options: dict[str, Any], kind: str = "") -> str:
        """Return such a path, and "" for a wrong one, whose error the original raises."""
        try:
            fd = options.get(f"{kind}dir_fd", options.get("src_dir_fd"))
            return self.find(path, fd)
        except (OSError, TypeError, ValueError):
            return ""

    def seen(self, path: str) -> str:
        """Return where a file is: its copy, itself, or nowhere."""
        copy = self.folder + path
        if self.is_removed(path):
            return NOWHERE
        is_both = paths.isdir(copy) and paths.isdir(path) and not paths.islink(copy)
        return copy if paths.lexists(copy) and not is_both else path

    def followed(self, path: str) -> str:
        """Return where the content of a file is: links that are not copies lead to copies too."""
        there = self.seen(path)
        if not paths.islink(there):
            return there
        target = paths.realpath(there)
        inner = target.removeprefix(self.folder) if is_within(target, self.folder) else target
        return there if inner == path else self.seen(inner)

    def is_removed(self, path: str) -> bool:
        """Return True if a file, or a folder above it, was removed, and is not there anew."""
        while len(path) > 1:
            copy = self.folder + path
            if paths.lexists(copy):
                return is_mark(copy)
            path = paths.dirname(path)
        return False

    def prepare(self, path: str, is_kept: bool) -> str:
        """Return the copy of a file that is to be written, with its content if it `is_kept`.

        Returns a path at which the original function fails where the user may not write.
        """
        there = self.seen(path)
        target = paths.realpath(there) if paths.islink(there) else there
        if target != there and target != NOWHERE:  # written through a link
            inner = target.removeprefix(self.folder) if is_within(target, self.folder) else target
            return self.prepare(inner, is_kept)
        copy = self.folder + path
        parent = self.seen(paths.dirname(path))
        is_real = there == path and paths.lexists(path)
        if not paths.isdir(parent) or not os.access(path if is_real else parent, os.W_OK):
            return there if is_real else paths.join(parent, paths.basename(path))
        os.makedirs(paths.dirname(copy), exist_ok=True)
        if is_mark(copy):
            os.unlink(copy)
        if is_real and is_kept and not paths.isdir(path):
            shutil.copy2(path, copy, follow_symlinks=False)
        elif is_real and paths.isdir(path):
            os.makedirs(copy, exist_ok=True)
        return copy

    def remove(self, path: str) -> None:
        """Remove a copy, and note that the file itself is removed, if there is one."""
        copy = self.folder + path
        if is_folder(copy):
            shutil.rmtree(copy)
        elif paths.lexists(copy):
            os.unlink(copy)
        if paths.lexists(path):
            os.makedirs(paths.dirname(copy), exist_ok=True)
            os.symlink(REMOVED, copy)

    def hide(self, path: str) -> None:
        """Note that the files of a folder are removed, which was removed and is made anew."""
        for name in os.listdir(path) if paths.isdir(path) else ():
            os.symlink(REMOVED, paths.join(self.folder + path, name))

    def names(self, path: str) -> list[str]:
        """Return the names in a folder: of its files and of copies."""
        copy = self.folder + path
        there = set(os.listdir(path)) if self.seen(path) == path else set()
        for name in os.listdir(copy) if paths.isdir(copy) else ():
            there.discard(name)
            if not is_mark(paths.join(copy, name)):
                there.add(name)
        return sorted(there)

    def rename(self, source: str, target: str) -> None:
        """Give a file or a folder another path."""
        there = self.seen(source)
        if is_folder(there):
            was_removed = is_mark(self.folder + target)
            os.makedirs(self.prepare(target, is_kept=False), exist_ok=True)
            if was_removed:
                self.hide(target)
            for name in self.names(source):
                self.rename(paths.join(source, name), paths.join(target, name))
        elif there == self.folder + source:
            os.replace(there, self.prepare_entry(target))
        else:
            shutil.copy2(there, self.prepare_entry(target), follow_symlinks=False)
        self.remove(source)

    def prepare_entry(self, path: str) -> str:
        """Return the copy of an entry of a folder, which is replaced even if it is a link."""
        copy = self.folder + path
        os.makedirs(paths.dirname(copy), exist_ok=True)
        if paths.islink(copy):
            os.unlink(copy)
        return copy


def is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def is_folder(path: str) -> bool:
    return paths.isdir(path) and not paths.islink(path)


def is_mark(path: str) -> bool:
    return paths.islink(path) and os.readlink(path) == REMOVED


class Entry:
    """An entry of a folder that has copies, as `os.DirEntry`."""

    def __init__(self, folder: Any, name: str):
        self.name = name
        self.path = paths.join(os.fsdecode(folder), name)

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return paths.isdir(self.path) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return paths.isfile(self.path) and (follow_symlinks or not self.is_symlink())

    def is_symlink(self) -> bool:
        return paths.islink(self.path)

    def is_junction(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino


class Entries:
    """The entries of such a folder, as `os.scandir` gives them."""

    def __init__(self, entries: list[Entry]):
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Entry]:
        return self._entries

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


Redirect = Callable[[PrivateFiles, Callable[..., Any], str, tuple[Any, ...], dict[str, Any]], Any]
CAPABILITIES = ("dir_fd", "effective_ids", "fd", "follow_symlinks")


def patch(files: PrivateFiles, owner: Any, name: str, redirect: Redirect) -> None:
    """Have calls of a function with a path go through `redirect(files, original, path, ...)`.

    The functions that it calls itself are the originals, as within any other such call.
    """
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        is_path = arguments and isinstance(arguments[0], (str, bytes, os.PathLike))
        if not is_path or options.get("opener") or getattr(files.thread, "is_busy", False):
            return original(*arguments, **options)
        files.thread.is_busy = True
        try:
            path = files.find_or_none(arguments[0], options)
            if not path and redirect not in OF_TWO_PATHS:
                return original(*arguments, **options)
            if redirect is _link_softly:  # its target is relative to the link
                path = ""
            return redirect(files, original, path or arguments[0], arguments[1:], options)
        finally:
            files.thread.is_busy = False

    setattr(owner, name, call)
    for each in CAPABILITIES:
        able: set[Any] = getattr(os, f"supports_{each}")
        if original in able:
            able.add(call)


def plain(options: dict[str, Any]) -> dict[str, Any]:
    """Return options without descriptors of folders: paths are absolute."""
    return {key: value for key, value in options.items() if not key.endswith("dir_fd")}


def _read(files: PrivateFiles, original: Any, path: str, more: Any, options: Any) -> Any:
    name = getattr(original, "__name__", "")
    is_link = name in OF_LINKS or not options.get("follow_symlinks", True)
    there = files.seen(path) if is_link else files.followed(path)
    return original(there, *more, **plain(options))


def _change(files: PrivateFiles, original: Any, path: str, more: Any, options: Any) -> Any:
    there = files.seen(path)
    is_here = paths.lexists(there) and there != NOWHERE
    target = files.prepare(path, is_kept=True) if is_here else there
    return original(target, *more, **plain(options))


def _make(files: PrivateFiles, original: Any, path: str, more: Any, options: Any) -> Any:
    there = files.seen(path)
    if paths.lexists(there):
        return original(there, *more, **plain(options))
    was_removed = is_mark(files.folder + path)
    original(files.prepare(path, is_kept=False), *more, **plain(options))
    if was_removed and paths.isdir(files.folder + path):
        files.hide(path)


def _open(files: PrivateFiles, original: Any, path: str, more: Any, options: Any) -> Any:
    mode = options.get("mode", more[0] if more else "r")
    if not any(letter in mode for letter in "wax+") or "opener" in options:
        return original(files.followed(path), *more, **options)
    there = files.seen(path)
    if "x" in mode and paths.lexists(there):
        return original(there, *more, **options)
    return original(files.prepare(path, is_kept="w" not in mode), *more, **options)


def _open_low(files: PrivateFiles, original: Any, path: str, more: Any, options: Any) -> Any:
    flags = options.get("flags", more[0] if more else 0)
    there = files.followed(path)
    is_taken = flags & os.O_EXCL and paths.lexists(there)
    if not flags & WRITING or is_taken or (not flags & os.O_CREAT and not paths.lexists(there)):
        return original(there, *more, **plain(options))
    target = files.prepare(path, is_kept=not flags & os.O_TRUNC)
    return original(target, *more, **plain(options))


def _remove(files: PrivateFiles, original: Any, path: str, more: Any, options: Any) -> None:
    there = files.seen(path)
    if not paths.lexists(there) or is_folder(there) or not os.access(paths.dirname(there), os.W_OK):
        original(there)  # raises the error
    else:
        files.remove(path)


def _remove_folder(files: PrivateFiles, original: Any, path: str, more: Any, options: Any) -> None:
    there = files.seen(path)
    if not is_folder(there):
        original(there)  # raises the error
    if files.names(path):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
    files.remove(path)


def _rename(files: PrivateFiles, original: Any, path: str, more: Any, options: Any) -> None:
    target = files.find_or_none(more[0], options, "dst_")
    source = files.find_or_none(path, {})
    there = files.seen(source) if source else path
    to = files.seen(target) if target else more[0]
    parent = files.seen(paths.dirname(target)) if target else paths.dirname(to) or "."
    is_wrong = not paths.lexists(there) or not paths.isdir(parent)
    if there == NOWHERE:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if target and is_folder(there) and is_folder(to) and files.names(target):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
    if is_wrong or not (source or target) or (is_folder(to) and not is_folder(there)):
        original(there, to, **plain(options))
    elif source and target:
        files.rename(source, target)
    elif target:
        shutil.move(there, files.prepare_entry(target))
    else:
        shutil.copy2(there, to, follow_symlinks=False)
        files.remove(source)


def _link(files: PrivateFiles, original: Any, path: str, more: Any, options: Any) -> None:
    """Make a copy instead of a hard link; `os.symlink` is the other one."""
    target = files.find_or_none(more[0], options, "dst_")
    source = files.find_or_none(path, {})
    there = files.seen(source) if source else path
    if not target or not paths.lexists(there) or paths.lexists(files.seen(target)):
        original(there, files.seen(target) if target else more[0])
    else:
        shutil.copy2(there, files.prepare(target, is_kept=False), follow_symlinks=False)


def _link_softly(files: PrivateFiles, original: Any, path: str, more: Any, options: Any) -> None:
    """Make a private link, with its target as it was given."""
    link = files.find_or_none(more[0], options)
    if not link or paths.lexists(files.seen(link)):
        original(path, files.seen(link) if link else more[0], *more[1:])
        return
    original(os.fsdecode(path), files.prepare(link, is_kept=False))


OF_TWO_PATHS = (_rename, _link, _link_softly)


def _list(files: PrivateFiles, original: Any, path: str, more: Any, options: Any) -> Any:
    there = files.seen(path)
    return files.names(path) if paths.isdir(files.folder + path) else original(there)


def _scan(files: PrivateFiles, original: Any, path: str, more: Any, options: Any) -> Any:
    there = files.seen(path)
    if not paths.isdir(files.folder + path):
        return original(there)
    return Entries([Entry(path, name) for name in files.names(path)])


def _connect(files: PrivateFiles, original: Any, path: str, more: Any, options: Any) -> Any:
    for suffix in ("-wal", "-shm", "-journal"):
        if paths.lexists(files.seen(path + suffix)):
            files.prepare(path + suffix, is_kept=True)
    return original(files.prepare(path, is_kept=True), *more, **options)


PATCHES: tuple[tuple[Any, tuple[str, ...], Redirect], ...] = (
    (os, READING, _read),
    (os, CHANGING, _change),
    (os, MAKING, _make),
    (os, ("remove", "unlink"), _remove),
    (os, ("rmdir",), _remove_folder),
    (os, ("rename", "replace"), _rename),
    (os, ("link",), _link),
    (os, ("symlink",), _link_softly),
    (os, ("listdir",), _list),
    (os, ("scandir",), _scan),
    (os, ("open",), _open_low),
    (builtins, ("open",), _open),
    (io, ("open",), _open),
    (sqlite3, ("connect",), _connect),
    (sqlite3.dbapi2, ("connect",), _connect),
)
LOW_OPEN = os.open
FILES: list[PrivateFiles] = []  # those of this process, if it makes private copies
# Functions of libraries that open files by themselves: name, position and name of the path, and
# whether the file is written anew.
LIBRARIES = {
    "safetensors": (("serialize_file", 1, "filename", True), ("safe_open", 0, "filename", False)),
}


def make_private(folder: str, through: tuple[str, ...], started_in: str) -> None:
    """Give this process private copies of what it writes, in a folder that others share."""
    files = PrivateFiles(folder, through, started_in)
    for owner, names, redirect in PATCHES:
        for name in names:
            patch(files, owner, name, redirect)
    _patch_working_folder(files)
    for name, redirect in (("bind", _make), ("connect", _read)):
        _patch_socket(files, name, redirect)
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # its paths are those of folders
    sys.dont_write_bytecode = True  # which importlib writes by functions of its own
    FILES.append(files)


def _patch_working_folder(files: PrivateFiles) -> None:
    """Let `os.getcwd` return the path of a folder that is only a copy, and programs start in it."""
    getcwd = os.getcwd
    start: Any = subprocess.Popen.__init__

    @functools.wraps(start)
    def begin(self: Any, *arguments: Any, **options: Any) -> None:
        if options.get("cwd") is not None:
            options["cwd"] = private_path(options["cwd"], is_written=False)
        start(self, *arguments, **options)

    os.getcwd = lambda: files.own_path(getcwd())
    os.getcwdb = lambda: os.fsencode(os.getcwd())
    subprocess.Popen.__init__ = begin  # type: ignore[method-assign]


def _patch_socket(files: PrivateFiles, name: str, redirect: Redirect) -> None:
    """Have a method of sockets whose address is a path go through `redirect`, as `patch` does."""
    original = getattr(socket.socket, name)

    @functools.wraps(original)
    def call(self: Any, address: Any) -> None:
        is_path = isinstance(address, (str, bytes)) and os.fsencode(address)[:1] not in (b"", b"\0")
        path = files.find_or_none(address, {}) if self.family == socket.AF_UNIX and is_path else ""
        if not path:
            original(self, address)
        else:
            redirect(files, functools.partial(_at_place, original, self), path, (), {})

    setattr(socket.socket, name, call)


def _at_place(original: Any, own: Any, path: str) -> None:
    """Bind or connect a socket to a path, also a long one."""
    if len(os.fsencode(path)) <= LONGEST:
        original(own, path)
        return
    folder = LOW_OPEN(paths.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        original(own, f"/proc/self/fd/{folder}/{paths.basename(path)}")
    finally:
        os.close(folder)


def private_path(path: Any, is_written: bool = True) -> Any:
    """Return where a library that opens a file by itself shall write or read it."""
    if not FILES or not isinstance(path, (str, bytes, os.PathLike)):
        return path
    files = FILES[0]
    files.thread.is_busy = True
    try:
        real = files.find_or_none(path, {})
        if not real:
            return path
        return files.prepare(real, is_kept=False) if is_written else files.followed(real)
    finally:
        files.thread.is_busy = False


def watch_library(module: Any) -> None:
    """Give the functions of a library in LIBRARIES the paths of copies."""
    for name, position, key, is_written in LIBRARIES[module.__name__]:
        redirect_argument(module, name, position, key, is_written)


def redirect_argument(owner: Any, name: str, position: int, key: str, is_written: bool) -> None:
    """Give a function the path of a copy for its argument of this position or name."""
    original = getattr(owner, name, None)
    if original is None or not FILES:
        return

    @functools.wraps(original, updated=())
    def call(*arguments: Any, **options: Any) -> Any:
        words = list(arguments)
        if len(words) > position:
            words[position] = private_path(words[position], is_written)
        elif key in options:
            options[key] = private_path(options[key], is_written)
        return original(*words, **options)

    setattr(owner, name, staticmethod(call) if isinstance(owner, type) else call)


def move_folders() -> None:
    """Let `os.rename` copy a folder that an overlay of a user's own namespace cannot rename."""
    for name in ("rename", "replace"):
        patch_folder_rename(name)


def patch_folder_rename(name: str) -> None:
    original = getattr(os, name)

    @functools.wraps(original)
    def call(src: Any, dst: Any, **options: Any) -> None:
        try:
            original(src, dst, **options)
        except OSError as error:
            if error.errno != errno.EXDEV or options or not paths.isdir(src):
                raise
            if os.stat(src).st_dev != os.stat(paths.dirname(paths.abspath(dst))).st_dev:
                raise
            shutil.copytree(src, dst, symlinks=True, dirs_exist_ok=paths.isdir(dst))
            shutil.rmtree(src)

    setattr(os, name, call)
