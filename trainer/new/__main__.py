"""`python -m trainer.new NAME`: write a starter project."""

from __future__ import annotations

import importlib.util
import keyword
import re
from collections.abc import Sequence
from pathlib import Path

import trainer
from trainer.cli import answer, run, single
from trainer.config.options import find_options
from trainer.distributed import entry
from trainer.errors import ConfigError

HELP = """usage: python -m trainer.new NAME

Writes a project into the new folder NAME, which may be a path: a task, its settings with a config
group of its own, a test that proves the task with trainer.verify, README.md, AGENTS.md for coding
agents, Dockerfile and train.sbatch. It trains and its test passes as written; replace the data,
model and loss with your own."""

TEMPLATE = Path(__file__).with_name("template")
# Files of the template, and their places in the project.
FILES = {
    "task.py.txt": "{module}.py",
    "task.yaml": "conf/task/{name}.yaml",
    "small.yaml": "conf/model/small.yaml",
    "large.yaml": "conf/model/large.yaml",
    "lockstep.yaml": "lockstep.yaml",
    "check.py.txt": "tests/test_{module}.py",
    "readme.md": "README.md",
    "agents.md": "AGENTS.md",
    "requirements.txt": "requirements.txt",
    "gitignore": ".gitignore",
    "dockerignore": ".dockerignore",
    "dockerfile": "Dockerfile",
    "train.sbatch": "train.sbatch",
}
VALID = re.compile(r"[A-Za-z][A-Za-z0-9]*([_-][A-Za-z0-9]+)*")
NO_NAMES = ("y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf")  # values
IMPORTED = ("ResidentDataset", "Trainer", "Options")  # by the template
MOST = 40


def main(arguments: Sequence[str]) -> int:
    folder = Path(single(arguments, "give one name: python -m trainer.new NAME"))
    name = folder.name
    module = name.replace("-", "_")
    _check(name, module, folder)
    words = {
        "__NAME__": name,
        "__MODULE__": module,
        "__CLASS__": _class_of(module),
        "__VERSION__": trainer.__version__,
    }
    try:
        for source, place in FILES.items():
            path = folder / place.format(name=name, module=module)
            path.parent.mkdir(parents=True, exist_ok=True)
            text = (TEMPLATE / source).read_text(encoding="utf-8")
            for word, value in words.items():
                text = text.replace(word, value)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; start in another directory") from None
    written = f"written: {folder}/, {len(FILES)} files; its README.md says what each is for"
    command = entry.as_started(f"cd {folder} && python -m trainer task={name}")
    facts = {"folder": folder, "num_files": len(FILES), "command": command}
    lines = (written, f"begin with: {command}")
    return answer(0, "written", facts, lambda: print(*lines, sep="\n"))


def _class_of(module: str) -> str:
    name = "".join(part[:1].upper() + part[1:] for part in module.split("_"))
    return f"{name}Task" if name in IMPORTED else name


def _check(name: str, module: str, folder: Path) -> None:
    """Raise ConfigError for a name that cannot be a folder, a task and a module."""
    if not VALID.fullmatch(name) or len(name) > MOST:
        must = f"must be letters, digits, - and _, at most {MOST}, as in my-task"
        raise ConfigError(f"{str(folder)!r}: {must}")
    if folder.exists():
        raise ConfigError(f"{folder}: already exists; choose another name")
    if keyword.iskeyword(module) or name.lower() in NO_NAMES:
        raise ConfigError(f"{name}: means something else to Python or YAML; choose another name")
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.origin is not None:  # else a folder of this name nearby
        raise ConfigError(f"{name}: Python has a module {module} already; choose another name")
    if name in find_options()["task"]:
        raise ConfigError(f"{name}: is a built-in task; choose another name")


if __name__ == "__main__":
    run(main, HELP)
