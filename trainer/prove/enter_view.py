"""Program that becomes a command whose writes stay private: python -I -S enter_view.py SPEC WORDS.

In a mount namespace of its own it puts an overlay over each file system, so that the command reads
what is there, and what it writes, renames or removes goes to a folder of the view. Devices, /proc,
/sys, /run, sockets of other processes and the folders of `through` stay as they are outside.

It imports only the standard library: Python starts in 15 ms like that. SPEC is a JSON file in the
folder of the view: {"view": folder, "through": [folders], "own": [folders where it may write]}.
If there can be no such view, it writes the reason to PROBLEM in that folder and exits with CODE.
"""

from __future__ import annotations

import ctypes
import json
import os
import stat
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CODE = 249
PROBLEM, LAYERS = "problem", "layers.json"  # files in the folder of a view
NAMESPACE = "LOCKSTEP_PROVE_NAMESPACE"  # variable: the namespace of the command
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000  # sched.h
MS_BIND, MS_REC, MS_SLAVE = 1 << 12, 1 << 14, 1 << 19  # sys/mount.h
MNT_DETACH = 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "ppc64le": 203, "riscv64": 41, "s390x": 217}
# /dev/shm has the memory of ranks
MOUNTED_AS_OUTSIDE = ("/proc", "/sys", "/dev", "/run", "/var/run")
PSEUDO = (
    *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts"),
    *("devtmpfs", "efivarfs", "fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore"),
    *("ramfs", "rpc_pipefs", "securityfs", "selinuxfs", "squashfs", "sysfs", "tracefs"),
)
MOST_SOCKETS = 256  # outside of /run
MOST_OVERLAYS = 400
OPTIONS = (("redirect_dir=on,index=off", "index=off", ""), ("userxattr", ""))  # as root, as a user

LIBC = ctypes.CDLL(None, use_errno=True)


class NoViewError(Exception):
    """Why there can be no private view."""


def call(name: str, *arguments: object) -> None:
    """Call a function of libc. Raises OSError."""
    if getattr(LIBC, name)(*arguments) != 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number), name)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    texts = [each.encode(errors="surrogateescape") for each in (source, target, kind, options)]
    call("mount", *texts[:3], ctypes.c_ulong(flags), texts[3])


@dataclass(frozen=True)
class Mount:
    number: str
    parent: str
    path: str
    kind: str
    is_writable: bool


def read_mounts() -> dict[str, Mount]:
    """Return the mounts that can be reached, by path; a later one may hide others."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        lines = [line.split() for line in file]
    seen: dict[str, Mount] = {}
    for words in lines:
        kind = words[words.index("-") + 1]
        path = words[4].encode("latin-1", "surrogateescape").decode("unicode_escape")
        path = path.encode("latin-1").decode("utf-8", "surrogateescape")
        each = Mount(words[0], words[1], path, kind, "ro" not in words[5].split(","))
        above = [mounted_path for mounted_path in seen if is_within(path, mounted_path)]
        if not above or seen[max(above, key=len)].number == each.parent:
            for hidden in [mounted_path for mounted_path in seen if is_within(mounted_path, path)]:
                del seen[hidden]
            seen[path] = each
    return seen


def is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def is_within_any(path: str, folders: Iterable[str]) -> bool:
    return any(is_within(path, each) for each in folders)


class RootBuilder:
    """The new root folder, and the overlays in it: layer n takes what is written below a path."""

    def __init__(self, view: str, own: Sequence[str], is_root: bool):
        self.view = view
        self.root = os.path.join(view, "root")
        self.layers = read_layers(view)  # a second command in a view finds what the first wrote
        self.unprotected: list[str] = []
        self._own = own
        self._is_root = is_root
        self._mounts = read_mounts()

    def build(self, through: Sequence[str]) -> None:
        """Put everything at its place below the new root."""
        if self._is_root:
            self.build_as_root()
        else:
            mount("/", self.root, flags=MS_BIND | MS_REC)
            self.cover("/")
        for entry in self._folders_in_memory():
            self.overlay(entry)
        for path in (*through, *find_sockets()):
            mount(path, self.root + path, flags=MS_BIND | MS_REC)
        mount(os.path.join(self.view, "empty"), self.root + self.view, flags=MS_BIND)

    def build_as_root(self) -> None:
        """Cover whole file systems, so that files can be renamed within each."""
        self.overlay("/")
        whole: list[str] = []  # that are there with all mounts below
        for path in sorted(self._mounts):
            each = self._mounts[path]
            if path == "/" or is_within_any(path, whole):
                continue
            if path in MOUNTED_AS_OUTSIDE or each.kind in PSEUDO:
                whole.append(path)
                mount(path, self.root + path, flags=MS_BIND | MS_REC)
            elif not each.is_writable or not os.path.isdir(path):
                mount(path, self.root + path, flags=MS_BIND)
            else:
                self.overlay_or_bind(path)
        for path in MOUNTED_AS_OUTSIDE:  # that are plain folders, as /run in a container
            if path not in whole and os.path.isdir(path) and not os.path.islink(path):
                mount(path, self.root + path, flags=MS_BIND | MS_REC)

    def overlay_or_bind(self, path: str) -> None:
        """Cover a file system, or pass on one that no overlay takes, as one without case."""
        try:
            self.overlay(path)
        except OSError as error:
            if any(is_within(each, path) for each in self._own):
                raise NoViewError(f"no overlay over {path}: {error.strerror}") from None
            mount(path, self.root + path, flags=MS_BIND)
            self.unprotected.append(path)

    def cover(self, path: str) -> None:
        """Cover a folder if nothing is mounted below it, and otherwise the folders in it.

        Only root may put an overlay over a folder with mounts of another namespace below.
        """
        each = self._mounts.get(path)
        if path in MOUNTED_AS_OUTSIDE or os.path.islink(path):
            return
        if each and path != "/" and (each.kind in PSEUDO or not each.is_writable):
            return
        if not any(is_within(other, path) for other in self._mounts if other != path):
            self.overlay_or_bind(path)
            return
        if os.access(path, os.W_OK):
            raise NoViewError(f"{path} can be written, and other disks are mounted below it")
        try:
            entries = list(os.scandir(path))
        except PermissionError:
            entries = []
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                self.cover(entry.path)
            elif entry.is_file(follow_symlinks=False) and os.access(entry.path, os.W_OK):
                raise NoViewError(f"{entry.path} can be written, beside a mounted disk")

    def overlay(self, path: str) -> None:
        """Mount an overlay over a folder. Raises OSError."""
        layer_number = self.layers.get(path, len(self.layers))
        if layer_number >= MOST_OVERLAYS:
            raise NoViewError(f"more than {MOST_OVERLAYS} folders to cover")
        upper = os.path.join(self.view, "layers", str(layer_number))
        work = os.path.join(self.view, f"work-{os.getpid()}", str(layer_number))
        about = os.stat(path)
        os.makedirs(work, exist_ok=True)
        if not os.path.isdir(upper):
            os.makedirs(upper)
            os.chmod(upper, stat.S_IMODE(about.st_mode))
            if self._is_root:
                os.chown(upper, about.st_uid, about.st_gid)
        if not self._is_root:
            self._make_own(path, upper)
        lower, upper, work = (escape(each) for each in (path, upper, work))
        layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
        choices = OPTIONS[0] if self._is_root and is_first_namespace() else OPTIONS[1]
        for options in choices:
            try:
                mount_options = f"{layers},{options}" if options else layers
                mount("overlay", self.root + path, "overlay", 0, mount_options)
                break
            except OSError:
                if options == choices[-1]:
                    raise
        self.layers[path] = layer_number

    def _make_own(self, path: str, upper: str) -> None:
        """Make folders in which the user may write, and that are somebody else's.

        The kernel cannot copy them: their owner is unknown in the user's namespace.
        """
        for folder in self._own:
            if not is_within(folder, path):
                continue
            source, target = path, upper
            for name in os.path.relpath(folder, path).split("/"):
                source, target = os.path.join(source, name), os.path.join(target, name)
                about = os.lstat(source)
                if name == "." or not stat.S_ISDIR(about.st_mode) or os.path.lexists(target):
                    continue
                os.mkdir(target)
                os.chmod(target, stat.S_IMODE(about.st_mode) | stat.S_IRWXU)

    def _folders_in_memory(self) -> list[str]:
        """Return the folders in /dev/shm: memory that processes share lies in files beside them."""
        try:
            entries = [each for each in os.scandir("/dev/shm") if each.is_dir()]
        except OSError:
            return []
        return [
            path
            for path in (each.path for each in entries)
            if not (path in self._mounts or os.path.islink(path) or is_within(self.view, path))
            and os.access(path, os.W_OK)
        ]


def read_layers(view: str) -> dict[str, int]:
    """Return the layers of the commands before in a view."""
    try:
        with open(os.path.join(view, LAYERS), encoding="utf-8") as file:
            layers: dict[str, int] = json.load(file)["layers"]
            return layers
    except OSError:
        return {}


def escape(path: str) -> str:
    """Return a path as an option of a mount."""
    return path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")


def is_first_namespace() -> bool:
    """Return True for the machine's own users; in a namespace of users attributes differ."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        return file.read().split() == ["0", "0", str((1 << 32) - 1)]


def find_sockets() -> list[str]:
    """Return the sockets that processes outside listen to: an overlay would hide their owner."""
    sockets: list[str] = []
    try:
        with open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as file:
            paths = {words[7] for line in file if len(words := line.split(maxsplit=7)) == 8}
    except OSError:
        return sockets
    for path in sorted(each.rstrip("\n") for each in paths):
        if not path.startswith("/") or is_within_any(path, MOUNTED_AS_OUTSIDE):
            continue
        try:
            path = os.path.realpath(path)
            if stat.S_ISSOCK(os.stat(path).st_mode) and len(sockets) < MOST_SOCKETS:
                sockets.append(path)
        except OSError:
            continue
    return sockets


def unshare() -> bool:
    """Enter a mount namespace; return True if that was done as root. Raises NoViewError."""
    try:
        call("unshare", CLONE_NEWNS)
        is_root = True
    except OSError as error:
        user, group = os.geteuid(), os.getegid()
        if user == 0:
            raise NoViewError(f"root may not mount here: {error.strerror}") from None
        call("unshare", CLONE_NEWNS | CLONE_NEWUSER)
        is_root = False
        pairs = (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"))
        for name, text in (*pairs, ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    mount("none", "/", flags=MS_REC | MS_SLAVE)  # what is mounted outside later is seen
    return is_root


def enter(root: str) -> None:
    """Make a folder the root of this namespace."""
    os.chdir(root)
    system_call = PIVOT_ROOT.get(os.uname().machine)
    try:
        if system_call is None:
            raise OSError
        call("syscall", ctypes.c_long(system_call), b".", b".")
        call("umount2", b".", MNT_DETACH)
        os.chdir("/")
    except OSError:  # the first root of a kernel cannot be exchanged
        os.chroot(".")


def main() -> None:
    path, *words = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        spec = json.load(file)
    folder = os.getcwd()
    try:
        view = RootBuilder(spec["view"], spec["own"], unshare())
        view.build(spec["through"])
        namespace = os.readlink("/proc/self/ns/mnt")
        about = {"layers": view.layers, "unprotected": view.unprotected}
        with open(os.path.join(spec["view"], LAYERS), "w", encoding="utf-8") as file:
            json.dump(about, file)
        enter(view.root)
        os.chdir(folder)
    except (OSError, NoViewError) as error:
        with open(os.path.join(spec["view"], PROBLEM), "w", encoding="utf-8") as file:
            file.write(str(error))
        sys.exit(CODE)
    os.environ[NAMESPACE] = namespace
    os.execv(words[0], words)


if __name__ == "__main__":
    main()
