"""A small training script that writes in the way that its first argument names; `all`: in each."""

import atexit
import gzip
import os
import pickle
import shelve
import shutil
import socket
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import threading
import zipfile
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

HERE = Path.cwd()
HOME = Path.home()


class Rows(Dataset):
    """A data set as of PyG, which keeps its rows in processed/data.pt; a worker writes too."""

    def __init__(self, cached=False, notes=False):
        self.notes = notes
        path = HERE / "processed" / "data.pt"
        if cached and path.exists():
            self.rows = torch.load(path)
        else:
            generator = torch.Generator().manual_seed(0)
            self.rows = torch.randn(16, 4, generator=generator, dtype=torch.float32)
            self.rows = self.rows.to(torch.get_default_dtype())
            if cached:
                path.parent.mkdir(exist_ok=True)
                torch.save(self.rows, path)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if self.notes:
            (HERE / f"row-{index}.txt").write_text("read")
        return self.rows[index]


def replace_file():
    Path("new.tmp").write_text("new")
    os.replace("new.tmp", "kept.txt")


def rename_folder():
    os.rename("folder", "other")
    os.rename("other/inner.txt", "other/moved.txt")


def sqlite():
    with sqlite3.connect("kept.db") as base:
        base.execute("insert into t values (2)")
    base.close()


def mapped():
    rows = np.memmap("kept.bin", dtype=np.uint8, mode="r+")
    rows[:] = 7
    rows.flush()


def linked():
    os.link("kept.txt", "hard.txt")
    Path("hard.txt").write_text("through a hard link")
    Path("soft.txt").symlink_to("kept.txt")
    Path("link.txt").write_text("through a link that was there")


def pickled():
    with open("cache.pkl", "wb") as file:
        pickle.dump([1], file)


def in_home():
    for place in (HOME / ".cache" / "x", Path(os.environ.get("XDG_CACHE_HOME", HOME)) / "y"):
        place.mkdir(parents=True, exist_ok=True)
        (place / "file").write_text("cache")


def in_a_thread():
    thread = threading.Thread(target=Path("thread.txt").write_text, args=("x",), daemon=True)
    thread.start()
    thread.join()


def elsewhere():
    os.chdir("folder")
    Path("there.txt").write_text("x")
    os.chdir("..")


def truncated():
    with open("kept.txt", "r+") as file:
        file.truncate(1)
    os.truncate("kept.bin", 2)


def temporary():
    with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as file:
        file.write("x")
    tempfile.mkdtemp(dir=".")


def at_exit():
    atexit.register(Path("exit.txt").write_text, "x")


def logs():
    Path("wandb/offline-run-1").mkdir(parents=True)
    Path("wandb/offline-run-1/run.wandb").write_bytes(b"x")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter("logs")
    writer.add_scalar("loss", 1.0, 1)
    writer.close()


def in_python_of_its_own():
    subprocess.run([sys.executable, "-c", "open('child.txt', 'w').write('x')"], check=True)


def of_libraries():
    """Files that are opened in C++ and Rust, in a folder that is new."""
    from safetensors.torch import load_file, save_file

    os.makedirs("new/folder")
    save_file({"a": torch.ones(2)}, "new/folder/part.safetensors")
    os.replace("new/folder/part.safetensors", "new/model.safetensors")
    assert load_file("new/model.safetensors")["a"].sum() == 2
    torch.save(torch.ones(2), "new/kept.pt")
    assert torch.load("new/kept.pt", mmap=True).sum() == 2
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 1)), "new/script.pt")
    assert torch.jit.load("new/script.pt")


def in_a_new_folder():
    """A program starts in a new folder, and the script goes there too, as Hydra does."""
    os.makedirs("run/1")
    code = "import os; open('x.txt', 'w').write(os.getcwd()); open('../../kept.txt').read()"
    subprocess.run([sys.executable, "-c", code], cwd="run/1", check=True)
    os.chdir("run/1")
    assert Path("x.txt").read_text() == os.getcwd() == str(HERE / "run" / "1")
    assert Path("../../kept.txt").exists() and Path.cwd().parent == HERE / "run"
    os.chdir(HERE)


def compiled():
    """A cache as of Triton, whose files the system's loader opens."""
    folder = HOME / ".triton" / "cache"
    folder.mkdir(parents=True)
    (folder / "x.so").write_bytes(b"x")
    subprocess.run(["ls", str(folder / "x.so")], check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(HOME / ".triton")


def archives():
    with zipfile.ZipFile("kept.zip", "w") as file:
        file.write("kept.txt")
    with tarfile.open("kept.tar.gz", "w:gz") as file:
        file.add("folder")
    with tarfile.open("kept.tar.gz") as file:
        file.extractall("unpacked")
    with gzip.open("kept.txt", "at") as file:
        file.write("x")


def no_plain_files():
    os.mkfifo("pipe")
    os.unlink("pipe")
    for path in ("socket", str(HERE / "another socket")):
        with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
            server.bind(path)
            server.listen()
            client.connect(path)
            assert os.path.exists(path)
    os.unlink("socket")
    assert not os.path.exists("socket")


def by_descriptors():
    """Names below an open folder, and bytes that the kernel copies by itself."""
    folder = os.open("folder", os.O_RDONLY)
    own = os.open("below.txt", os.O_CREAT | os.O_RDWR, dir_fd=folder)
    with open("kept.bin", "rb") as kept:
        os.sendfile(own, kept.fileno(), 0, 64)
    os.close(own)
    os.rename("below.txt", "renamed.txt", src_dir_fd=folder, dst_dir_fd=folder)
    os.mkdir("deep", dir_fd=folder)
    os.close(folder)


def attributes():
    os.setxattr("kept.txt", "user.step", b"1")
    os.chown("kept.txt", os.getuid(), os.getgid())
    os.chmod("folder", 0o755)


def names():
    for name in (b"\xff\xfe", b"\n", b"-rf", ("x" * 255).encode(), b" "):
        with open(name, "wb") as file:
            file.write(b"x")


def sparse():
    with open("large.bin", "wb") as file:
        file.truncate(2**36)
        os.posix_fallocate(file.fileno(), 0, 2**20)


def of_a_pool():
    with get_context("spawn").Pool(2) as pool:
        pool.map(str, [1])
    with get_context("fork").Pool(2) as pool:
        pool.map(write_as_a_worker, range(4))


def write_as_a_worker(number):
    (HERE / f"worker-{number}.txt").write_text("x")


def with_git():
    """Experiments that note their own commit, as some do."""
    name = ["-c", "user.name=x", "-c", "user.email=x@x"]
    Path("kept.txt").write_text("committed")
    subprocess.run(["git", *name, "commit", "-qam", "a run"], check=True)
    subprocess.run(["git", "tag", "run-1"], check=True)


def later():
    """A process that goes on when the script has ended."""
    code = "import time; time.sleep(1); open('late.txt', 'w').write('x')"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)


def in_parts():
    import torch.distributed.checkpoint as dcp

    dcp.save({"a": torch.ones(2)}, checkpoint_id="parts")


def looked_up():
    with shelve.open("kept.shelf") as shelf:
        shelf["a"] = 1
    Path("kept.json").write_text("{}")
    Path("kept.json").unlink()


KINDS = {
    "archives": archives,
    "no plain files": no_plain_files,
    "descriptors": by_descriptors,
    "attributes": attributes,
    "names": names,
    "sparse": sparse,
    "pool": of_a_pool,
    "git": with_git,
    "later": later,
    "parts": in_parts,
    "shelf": looked_up,
    "sed": lambda: subprocess.run("sed -i s/e/a/ kept.txt; cp -a folder two", shell=True),
    "torch.save": lambda: torch.save(torch.ones(2), "kept.pt"),
    "np.save": lambda: np.save("kept.npy", np.ones(2)),
    "append": lambda: Path("kept.txt").open("a").write("more"),
    "replace": replace_file,
    "sqlite": sqlite,
    "mapped": mapped,
    "chmod": lambda: os.chmod("kept.txt", 0o600),
    "mtime": lambda: os.utime("kept.txt", (1, 1)),
    "unlink": lambda: os.unlink("kept.npy"),
    "folders": lambda: (os.mkdir("made"), os.rmdir("empty")),
    "truncate": truncated,
    "pickle": pickled,
    "home": in_home,
    "thread": in_a_thread,
    "chdir": elsewhere,
    "libraries": of_libraries,
    "new folder": in_a_new_folder,
    "compiled": compiled,
    "absolute": lambda: (HERE / "folder" / "absolute.txt").write_text("x"),
    "copied": lambda: shutil.copytree("folder", "copy"),
    "tempfile": temporary,
    "links": linked,
    "exit": at_exit,
    "python": in_python_of_its_own,
    "os.open": lambda: os.close(os.open("low.txt", os.O_CREAT | os.O_WRONLY)),
    "rename": rename_folder,
    "moved": lambda: shutil.move("kept.pt", "moved.pt"),
    "dataset": lambda: None,
    "workers": lambda: None,
    "pycache": lambda: __import__("helper"),
    "tensorboard": logs,
    "shell": lambda: subprocess.run("echo x > shell.txt; rm -f kept.db", shell=True, check=True),
    "rmtree": lambda: shutil.rmtree("folder" if os.path.isdir("folder") else "other"),
    "own folder": lambda: shutil.rmtree(HERE),
}


def main():
    kinds = list(KINDS) if sys.argv[1] == "all" else sys.argv[1].split(",")
    sys.path.insert(0, str(HERE))
    torch.manual_seed(0)
    rows = Rows("dataset" in kinds, "workers" in kinds)
    loader = DataLoader(rows, 4, num_workers=2 if "workers" in kinds else 0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    for kind in kinds:
        KINDS[kind]()
        print(kind, flush=True)


if __name__ == "__main__":
    main()
