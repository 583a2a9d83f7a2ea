"""Uses private copies as a script would: argv has the folder of private_files.py, and of copies."""

import glob
import io
import os
import posix
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, sys.argv[1])
import private_files

private_files.make_private(sys.argv[2], (), os.getcwd())


def raises(kind, function, *arguments, **options):
    try:
        function(*arguments, **options)
    except kind:
        return
    raise AssertionError(f"{function} {arguments} raises no {kind.__name__}")


here = Path.cwd()
kept = Path("kept.txt")
kept.write_text("new")
assert kept.read_text() == "new" and Path("link.txt").read_text() == "new"
with open(kept, "a") as file:
    file.write(" more")
assert io.open("kept.txt").read() == "new more" and os.stat("kept.txt").st_size == 8
raises(FileExistsError, open, "kept.txt", "x")
raises(FileNotFoundError, open, "nowhere/file", "w")
raises(FileNotFoundError, open, "nothing", "r+")
raises(FileExistsError, os.mkdir, "folder")
raises(FileExistsError, os.open, "kept.txt", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
raises(OSError, os.rmdir, "folder")
raises(IsADirectoryError, os.unlink, "folder")
raises(FileNotFoundError, os.unlink, "nothing")
raises(FileNotFoundError, os.rename, "nothing", "other")
raises(FileNotFoundError, os.rename, "kept.txt", "nowhere/other")
raises(TypeError, os.stat)
os.unlink("kept.bin")
assert not os.path.exists("kept.bin") and "kept.bin" not in os.listdir(".")
raises(FileNotFoundError, open, "kept.bin")
Path("kept.bin").write_bytes(b"again")
assert "kept.bin" in [each.name for each in os.scandir(".")]
assert glob.glob("kept.*") and [each.name for each in here.glob("kept.b*")] == ["kept.bin"]
(here / "made" / "deep").mkdir(parents=True)
Path("made/deep/file.txt").write_text("x")
os.rename("folder", "moved")
assert Path("moved/inner.txt").read_text() == "inner" and not Path("folder").exists()
raises(FileNotFoundError, os.listdir, "folder")
assert [names for _, _, names in os.walk("made")] == [[], ["file.txt"]]
with tempfile.NamedTemporaryFile("w", delete=False) as scratch:
    scratch.write("from elsewhere")
os.replace(scratch.name, "kept.txt")
assert kept.read_text() == "from elsewhere" and not os.path.exists(scratch.name)
os.link("kept.txt", "hard.txt")
os.symlink("kept.txt", "soft.txt")
assert Path("hard.txt").read_text() == Path("soft.txt").read_text() == "from elsewhere"
os.chmod("kept.pt", 0o600)
assert os.stat("kept.pt").st_mode & 0o777 == 0o600
with sqlite3.connect("kept.db") as base:
    base.execute("insert into t values (1)")
base.close()
assert sqlite3.connect("kept.db").execute("select count(*) from t").fetchone() == (1,)
shutil.rmtree("made")
os.mkdir("folder")
assert os.listdir("folder") == [] and not os.path.exists("folder/inner.txt")
Path("folder/new.txt").write_text("x")
shutil.rmtree("folder")
os.rename("moved", "folder")
assert os.listdir("folder") == ["inner.txt"]
(here / "steps" / "1").mkdir(parents=True)
Path("steps/1/weights").write_text("1")
os.symlink("1", "steps/latest")
assert Path("steps/latest/weights").read_text() == "1" and os.readlink("steps/latest") == "1"
Path("steps/latest/more").write_text("through a link")
assert sorted(os.listdir("steps/1")) == ["more", "weights"]
assert os.path.realpath("steps/latest/more") == str(here / "steps" / "1" / "more")
os.mkdir("steps/2")
os.symlink("2", "steps/next")
os.replace("steps/next", "steps/latest")
assert os.readlink("steps/latest") == "2" and os.listdir("steps/1") != []
os.symlink("steps/1", "first")
os.replace("kept.pt", "first")
assert not os.path.islink("first") and os.path.isfile("first")
raises(OSError, os.rename, "steps/2", "steps/1")
raises(FileNotFoundError, os.rename, "moved", "steps/3")
os.rename("folder", "steps/2")
assert os.listdir("steps/2") == ["inner.txt"]
shutil.rmtree("steps")


def write_low(tensors, filename, metadata=None):
    descriptor = posix.open(filename, os.O_CREAT | os.O_WRONLY)
    posix.write(descriptor, tensors)
    posix.close(descriptor)


def read_low(filename, framework):
    descriptor = posix.open(filename, os.O_RDONLY)
    content = posix.read(descriptor, 100)
    posix.close(descriptor)
    return content


library = SimpleNamespace(
    __name__="safetensors", serialize_file=write_low, safe_open=read_low
)  # which opens files by itself
private_files.watch_library(library)
os.makedirs("export/1")
library.serialize_file(b"tensors", "export/1/model.tmp")
os.replace("export/1/model.tmp", "export/1/model")
assert library.safe_open(filename="export/1/model", framework="pt") == b"tensors"
os.chdir("export/1")
assert os.getcwd() == str(Path.cwd()) == str(here / "export" / "1")
assert Path("model").exists() and Path("../../kept.txt").read_text() == "from elsewhere"
os.chdir("../..")
done = subprocess.run(["/bin/cat", "model"], cwd="export/1", capture_output=True, check=True)
assert done.stdout == b"tensors"
shutil.rmtree("export")
assert not os.path.exists("made") and not os.path.exists("folder")
descriptor = os.open(".", os.O_RDONLY)
os.close(os.open("by-folder.txt", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
assert os.path.exists("by-folder.txt") and os.stat("by-folder.txt", dir_fd=descriptor)
if os.geteuid() != 0:
    raises(PermissionError, open, "/etc/hostname", "w")
print("done")
