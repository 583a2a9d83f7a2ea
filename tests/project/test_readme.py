"""README followed literally: in a fresh checkout, and in a new folder with the package installed.

Its files are written as it prints them, its commands run in their order, and what they print is
compared with the blocks below them.
"""

import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from harness.launch import environment_of_a_command

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OWN_TASK = README.partition("## A task of your own\n")[2].partition("\n## ")[0]
FILE = re.compile(r"`([\w./]+)`:\n\n```\w+\n(.*?)```", re.DOTALL)
BLOCK = re.compile(r"^```sh\n(.*?)^```\n(?:\n```\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
INSTALL = "git clone"
# For a download, or a training of minutes: what is run in its place.
INSTEAD = {
    "make train": "make train ARGS=run.steps=4",
    "torchrun --nproc_per_node=2 -m trainer task=lm": "python -m trainer --cfg job task=lm",
}
# Lines that a short training, another time or another machine prints differently.
OF_A_LONG_RUN = re.compile(r"cifar   |layout  |proof   |step 120/120|done: 120 steps")
EXPONENT = re.compile(r"\d+e[-+]\d+")  # sizes of differences


class Block(NamedTuple):
    commands: str
    output: str

    def wanted(self):
        """Return the lines that its commands must print."""
        lines = [line for line in self.output.splitlines() if not OF_A_LONG_RUN.match(line)]
        return [comparable(line) for line in lines]


BLOCKS = [Block(*found) for found in BLOCK.findall(README)]


def comparable(line):
    return " ".join(EXPONENT.sub("1e-00", line).split())


@pytest.fixture
def checkout(tmp_path):
    """Return a folder with the files of the repository as `git clone` would make it."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("the tests do not lie in a clone")
    folder = tmp_path / "lockstep"
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():  # not removed meanwhile
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def write_files(folder):
    """Write the files of README's task; return their names."""
    files = FILE.findall(OWN_TASK)
    for name, text in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return [name for name, _ in files]


def test_all_blocks_of_readme_are_found():
    assert len(BLOCKS) == README.count("```sh\n") == 5
    assert [bool(block.output) for block in BLOCKS] == [True, False, True, True, True]
    assert BLOCKS[0].wanted() == ["batch 240 examples = 2 ranks x 1 micro-batch of 120"]
    for line in INSTEAD:
        assert sum(block.commands.count(f"{line} ") for block in BLOCKS) == 1, line


def test_own_task_runs_in_the_checkout(checkout, command):
    """Its `--config-dir conf` names the folder that is searched anyway.

    `task=spiral is defined twice` went unseen: the task was tried in new folders only.
    """
    assert write_files(checkout) == ["tasks/spiral.py", "conf/task/spiral.yaml"]
    block = next(block for block in BLOCKS if block.commands in OWN_TASK)
    for line in block.commands.splitlines():
        program, *words = shlex.split(line)
        at = words.index("-m")
        ranks = int(words[0].partition("=")[2]) if program == "torchrun" else 0
        verb, *rest = words[at + 1 :]
        paths = {"PYTHONPATH": str(checkout)}
        rest += ["run.epochs=1"] if verb == "trainer" else []
        done = command(
            *rest, ranks=ranks, verb=verb, environment=paths, folder=checkout, is_fresh=True
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert comparable(done.stdout.splitlines()[0]) == block.wanted()[0]


def follow(blocks, folder, **environment):
    """Run blocks of README in their order, in one folder."""
    write_files(folder)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    own = environment_of_a_command(PATH=path, **environment)
    del own["OMP_NUM_THREADS"]
    for block in blocks:
        script = block.commands.replace("torchrun --nproc", "torchrun --standalone --nproc")
        for line, other in INSTEAD.items():
            script = script.replace(line.replace("torchrun --", "torchrun --standalone --"), other)
        script = re.sub(r"^git clone .*\n", "", script)
        where = ROOT / "examples" if "python train.py" in script else folder
        words = ["bash", "-e", "-o", "pipefail", "-c", script]
        done = subprocess.run(words, cwd=where, env=own, capture_output=True, text=True)
        code = int("differs from" in block.output)
        assert done.returncode == code, f"{block.commands}{done.stdout}{done.stderr}"
        rest = "\n".join(map(comparable, done.stdout.splitlines()))
        for line in block.wanted():
            _, is_there, rest = rest.partition(line)
            assert is_there, f"{line}\n{block.commands}{done.stdout}"


@pytest.mark.slow
def test_readme_followed_in_a_fresh_clone(checkout):
    """What `make train` installs is the environment of the tests, without its other checkout."""
    venv = checkout / ".venv"
    venv.mkdir()
    for path in Path(sys.prefix).iterdir():
        if not path.name.startswith(".installed"):
            (venv / path.name).symlink_to(path)
    (venv / ".installed").touch()
    follow(BLOCKS, checkout, PYTHONPATH=str(checkout))


@pytest.mark.slow
def test_readme_followed_in_a_new_folder_with_the_package_installed(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    (tmp_path / "new").mkdir()
    blocks = [block for block in BLOCKS if not block.commands.startswith(INSTALL)]
    assert len(blocks) == len(BLOCKS) - 1
    follow(blocks, tmp_path / "new", PYTHONPATH=str(tmp_path / "site"))
