"""Completion of command lines: candidates, and the shells that ask for them."""

import importlib
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.launch import environment_of_a_command

import trainer
from trainer.completion.candidates import FORMATS, OF_RUNS, OWN, complete
from trainer.distributed.entry import VERBS

# In terminals the finished line is run: it shows itself.
SCRIPT = f"""#!{sys.executable}
import sys
from trainer.distributed.entry import main
sys.exit(main() if sys.argv[1] == "completion" else print("is:lockstep", *sys.argv[1:]))
"""
PYTHON = """#!/bin/sh
echo is:python "$@"
"""
MINE = """# @package _global_
task:
  name: mine
  trainer: mine.Mine
  options: {width: 3}
"""


@pytest.fixture
def project(tmp_path):
    """Return a folder with a task and a config group of the user's own, named by lockstep.yaml."""
    folder = tmp_path / "project"
    files = {
        "lockstep.yaml": "config_dirs: [conf]\n",
        "conf/task/mine.yaml": MINE,
        "conf/model/large.yaml": "# @package task.options\ndepth: 9\n",
        "runs/mine/first/config.yaml": "",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


CASES = {
    "lockstep ev": ["eval.", "evaluate"],
    "lockstep run.e": ["run.ema_decay=", "run.epochs="],
    "lockstep optim=sgd optim.m": ["optim.momentum="],
    "lockstep strategy.me": ["strategy.mesh."],
    "lockstep strategy.mesh.s": ["strategy.mesh.shard="],
    "lockstep strategy=d": ["strategy=ddp", "strategy=ddp_syncbn_amp", "strategy=dp"],
    "lockstep strategy.precision=amp": [
        "strategy.precision=amp_bf16",
        "strategy.precision=amp_fp16",
    ],
    "lockstep run.dropout=": ["run.dropout=example", "run.dropout=torch"],
    "lockstep run.resume=": [],
    "lockstep task=mi": ["task=mine"],
    "lockstep -m task=cifar,mi": ["task=cifar,mine"],
    "lockstep mod": ["model="],
    "lockstep task=mine task.options.": ["task.options.depth=", "task.options.width="],
    "lockstep verify task=mi": ["task=mine"],
    "lockstep verify --b": ["--bits"],
    "lockstep audit runs/mine/first --": ["--long", "--help", "--json", "--config-dir"],
    "lockstep evaluate ru": [],
    "lockstep evaluate runs/mine/first sp": ["split="],
    "lockstep export runs/mine/first format=o": ["format=onnx"],
    "lockstep plan device=h1": ["device=h100"],
    "lockstep --config-dir c": [],
    "python -m trainer.ev": ["trainer.evaluate"],
    "python -m trainer.evaluate runs/mine/first sp": ["split="],
    "torchrun --nproc_per_node=2 -m trainer task=mi": ["task=mine"],
    "torchrun --no-python lockstep task=mi": ["task=mine"],
    "python script.py ta": [],
}


@pytest.mark.parametrize("line", CASES)
def test_candidates(line, project, monkeypatch):
    monkeypatch.chdir(project)
    assert complete(line.split(" ")) == CASES[line]


def test_an_empty_word_has_verbs_groups_and_blocks(project, monkeypatch):
    monkeypatch.chdir(project)
    assert {*VERBS, "task=", "model=", "run.", "data."} <= set(complete(["lockstep", ""]))


def test_settings_of_the_folder_that_are_wrong_do_not_stop_it(project, monkeypatch):
    monkeypatch.chdir(project)
    (project / "lockstep.yaml").write_text("config_dirs: [nowhere]\n")
    assert complete(["lockstep", "task=c"]) == ["task=cifar"]


ACTIONS = ("write", "index", "check")  # of shards


@pytest.mark.parametrize("verb", VERBS)
def test_words_and_flags_are_those_of_the_help(verb):
    package = Path(trainer.__file__).parent
    place = "" if verb == "train" else f".{verb}"
    is_file = (package / f"{verb}.py").is_file()
    text = importlib.import_module(
        f"trainer{place}" if is_file else f"trainer{place}.__main__"
    ).HELP
    usage = text.split("\n\n")[0]
    words = {f"{name}=" for name in re.findall(r"(?<![\w.])([a-z_]+)=", usage)}
    flags = set(re.findall(r"--[a-z_-]+", usage))
    own = OWN.get(verb, ())
    if verb == "completion":
        assert "|".join(sorted(own)) in usage
    else:
        shared = {"key=", "task=", "group=", "--config-dir", "--nproc_per_node"}
        assert (words | flags) - shared - {"nproc_per_node="} == set(own) - {
            "-m",
            "--cfg",
            *ACTIONS,
        }
    assert (verb in OF_RUNS) == bool(re.search(r"(?<!config-dir) (DIR|A B)\b", usage))
    assert verb != "export" or f"format={'|'.join(FORMATS)}" in usage


def test_it_imports_neither_torch_nor_hydra():
    code = "import sys, trainer.completion.candidates as c; c.complete(['lockstep', 'task=c'])"
    code += "; print({'torch', 'hydra', 'rich'} & set(sys.modules))"
    words = [sys.executable, "-c", code]
    done = subprocess.run(
        words, capture_output=True, text=True, check=True, env=environment_of_a_command()
    )
    assert done.stdout == "set()\n"


def test_only_known_shells(command):
    done = command("tcsh", verb="trainer.completion")
    assert (done.returncode, done.stderr) == (2, "error: tcsh: must be one of bash, fish, zsh\n")


# In shells ----------------------------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path):
    """Return one in which `lockstep` and `python` are found."""
    place = tmp_path / "bin"
    place.mkdir()
    for name, text in {"lockstep": SCRIPT, "python": PYTHON}.items():
        (place / name).write_text(text)
        (place / name).chmod(0o755)
    path = f"{place}:{os.environ['PATH']}"
    return environment_of_a_command(PATH=path, HOME=str(tmp_path), TERM="dumb")


ASK = """
eval "$(lockstep completion bash)"
COMP_LINE=$1 COMP_POINT=${#1} COMP_WORDS=($1) COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
$2 "${COMP_WORDS[0]}" "${COMP_WORDS[-1]}" ""
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("line", "function", "replies"),
    [
        ("lockstep ev", "_lockstep", ["eval.", "evaluate"]),
        ("lockstep task=mi", "_lockstep", ["mine"]),  # readline keeps what is before =
        ("python -m trainer task=mi", "_lockstep_module", ["mine"]),
        ("python setup.py te", "_lockstep_module", [""]),
    ],
)
def test_function_of_bash_replies(line, function, replies, project, environment):
    done = subprocess.run(
        ["bash", "-c", ASK, "bash", line, function],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split("\n")[:-1] == replies, done.stderr


INTERACTIVE = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(lockstep completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'unsetopt zle_bracketed_paste; eval "$(lockstep completion zsh)"'),
    "fish": (["fish", "--no-config", "-i"], "lockstep completion fish | source"),
}
TYPED = {  # what is typed before Tab, and what is then on the line
    "lockstep task=mi": "lockstep task=mine",
    "lockstep evalua": "lockstep evaluate",
    "lockstep optim=sgd optim.mom": "lockstep optim=sgd optim.momentum=",
    "python -m trainer task=mi": "python -m trainer task=mine",
    "lockstep run.resume=runs/mi": "lockstep run.resume=runs/mine",
}


@pytest.mark.slow
@pytest.mark.parametrize("shell", INTERACTIVE)
def test_tab_in_a_terminal(shell, project, environment):
    words, install = INTERACTIVE[shell]
    if shutil.which(words[0]) is None:
        pytest.skip(f"{shell} is not installed")
    with Terminal(words, project, environment) as terminal:
        terminal.type("PS1='> '\r" if shell != "fish" else "\r")
        terminal.type(f"{install}\recho rea''dy\r", "ready")
        for typed, line in TYPED.items():
            terminal.type(f"{typed}\t")
            terminal.settle()
            terminal.type("\r", f"is:{line}")


class Terminal:
    """A shell in a terminal of its own."""

    def __init__(self, words, folder, environment):
        self.shown = ""
        self._pid, self._file = pty.fork()
        if not self._pid:
            os.chdir(folder)
            os.execvpe(words[0], words, environment)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self._file)
        os.waitpid(self._pid, 0)

    def type(self, text: str, expected: str = "") -> None:
        """Type a text; wait until the terminal shows `expected` after it."""
        self.shown = ""
        os.write(self._file, text.encode())
        end = time.monotonic() + 20
        while expected not in self.plain and time.monotonic() < end:
            self._read(0.1)
        assert expected in self.plain, self.shown

    @property
    def plain(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.shown)

    def settle(self, quiet_s: float = 1.5) -> None:
        """Wait until nothing more is shown."""
        while self._read(quiet_s):
            pass

    def _read(self, limit_s: float) -> bool:
        if not select.select([self._file], [], [], limit_s)[0]:
            return False
        self.shown += os.read(self._file, 65536).decode(errors="replace")
        return True
