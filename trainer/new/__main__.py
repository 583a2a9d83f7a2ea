"""`python -m trainer.new NAME`: create a project: a starter or a recipe."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import trainer
from trainer.base.errors import ConfigError, did_you_mean
from trainer.base.folders import HOME, PACKAGE
from trainer.base.process import invocation
from trainer.cli import answer, run, single
from trainer.core.api import find_options
from trainer.new import CLUSTERS, RECIPES, Recipe

HELP = """usage: python -m trainer.new NAME [--recipe RECIPE] [--cluster CLUSTER]

  python -m trainer.new my-task                     a starter project, to replace data and model
  python -m trainer.new my-gpt --recipe gpt         a project that trains something real at once
  python -m trainer.new my-task --cluster ray       the file that Ray needs too

Writes a project into the new folder NAME, which may be a path: a task, its settings, a test that
proves the task with trainer.prove, and README.md. Without a flag it also has a config group of its
own, AGENTS.md for coding agents, Dockerfile and train.sbatch.

recipes (python -m trainer.list recipes says what each reaches):
{recipes}

--cluster adds the file that starts the run elsewhere, with comments that say what to change:
{clusters}

A training script becomes a task by hand: docs/migrate.md.

Exit codes: 0 written, 2 invalid arguments."""


NEW_FLAGS = ("--recipe", "--cluster")
DEPLOY = HOME / "deploy" if HOME == PACKAGE else HOME / "scripts" / "deploy"
TEMPLATE_FOLDER = Path(__file__).with_name("template")
OF_RECIPES = Path(__file__).with_name("recipes")
SHARED_FILES = ("requirements.txt", "gitignore")  # files of the template that every project has
# Files whose place in the project is not their name without .txt.
PLACES = {
    "task.py.txt": "{module}.py",
    "task.yaml": "conf/task/{name}.yaml",
    "small.yaml": "conf/model/small.yaml",
    "large.yaml": "conf/model/large.yaml",
    "check.py.txt": "tests/test_{module}.py",
    "data_first.py.txt": "tests/conftest.py",
    "notebook.json": "{name}.ipynb",
    "readme.md": "README.md",
    "agents.md": "AGENTS.md",
    "gitignore": ".gitignore",
    "dockerignore": ".dockerignore",
    "dockerfile": "Dockerfile",
}
NOTES = "notes.md"  # of a recipe; part of its README.md
VALID = re.compile(r"[A-Za-z][A-Za-z0-9]*([_-][A-Za-z0-9]+)*")
NO_NAMES = ("y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf")  # values
IMPORTED = ("ResidentDataset", "ShardedDataset", "Trainer", "Options")  # by the templates
MOST_OF_A_PROJECT_NAME = 40
OF_LOCKSTEP = re.compile(
    r"^#.*(?:tests/|docs/|Use it as it is)"
)  # lines on files of its repository
SKYIGNORE = ".venv/\ndata/\nruns/\n__pycache__/\n"  # .gitignore would leave out wheels/, too
NEW_ADVICE = "give one name: python -m trainer.new NAME [--recipe RECIPE] [--cluster CLUSTER]"


def main(arguments: Sequence[str]) -> int:
    words, flags = _divide(arguments)
    recipe = _find("--recipe", RECIPES, flags)
    cluster = _find("--cluster", CLUSTERS, flags)
    if recipe == "notebook" and cluster:
        raise ConfigError("--recipe notebook: starts no ranks on a cluster; leave out --cluster")
    folder = _folder_of(single(words or ([f"my-{recipe}"] if recipe else []), NEW_ADVICE))
    name = folder.name
    module = name.replace("-", "_")
    _check(name, module, folder)
    values = _values(name, module, recipe, cluster)
    texts = _fill(_find_files(recipe), values)
    if not recipe:
        texts |= _file_of("slurm", values)
    texts = _with_cluster(texts, cluster, values)
    _write(folder, texts)
    written = f"written: {folder}/, {len(texts)} files; its README.md says what each is for"
    enter = f"cd {shlex.quote(str(folder))}"
    command = invocation.as_started(" && ".join([enter, *_first_commands(name, recipe)]))
    facts = {"folder": folder, "num_files": len(texts), "command": command}
    lines = [written, f"begin with: {command}", *_on_cluster(cluster)]
    return answer(0, "written", facts, lambda: print(*lines, sep="\n"))


def _divide(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return (other words, value by flag). Raises ConfigError for wrong flags."""
    words: list[str] = []
    flags: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in NEW_FLAGS and (word.startswith("-") or f"--{flag}" in NEW_FLAGS):
            near = did_you_mean(flag.lstrip("-"), [each[2:] for each in NEW_FLAGS], prefix="--")
            raise ConfigError(f"{word} is not a flag: allowed are {', '.join(NEW_FLAGS)}{near}")
        if flag not in NEW_FLAGS:
            words.append(word)
            continue
        flags[flag] = value if equals else "".join(rest[:1])
        del rest[: not equals]
        if not flags[flag]:
            raise ConfigError(f"{flag}: its value is missing; {NEW_ADVICE}")
    return words, flags


def _find(flag: str, allowed: Mapping[str, object], flags: Mapping[str, str]) -> str:
    """Return the value of a flag, "" without it. Raises ConfigError for one that is not known."""
    name = flags.get(flag, "")
    if name and name not in allowed:
        raise ConfigError(f"""{flag} {name}:
            must be one of {", ".join(allowed)}{did_you_mean(name, allowed, 0.6)}""")
    return name


def _with_cluster(
    texts: Mapping[str, str], cluster: str, values: Mapping[str, str]
) -> dict[str, str]:
    """Return the texts of a project with those that a cluster needs."""
    if not cluster:
        return {**texts}
    own = CLUSTERS[cluster]
    more = _fill([TEMPLATE_FOLDER / file for file in own.files], values) | _file_of(cluster, values)
    line = (
        f"\nOn the cluster: `{own.command}`; comments in `{own.place}` say what to change before.\n"
    )
    return {**texts, **more, "README.md": texts["README.md"].rstrip() + f"\n{line}"}


def _file_of(cluster: str, values: Mapping[str, str]) -> dict[str, str]:
    """Return the file of scripts/deploy for a cluster, made one of this project."""
    own = CLUSTERS[cluster]
    name = values["__NAME__"]
    label = name.lower().replace("_", "-")  # as Kubernetes and registries want it
    text = (DEPLOY / own.source).read_text(encoding="utf-8")
    for word, value in {
        " Use it as it is, or copy it.": "",
        "docker build -f scripts/deploy/Dockerfile": "docker build",
        "scripts/deploy/slurm.sbatch task=cifar": own.place,
        f"scripts/deploy/{own.source}": own.place,
        "lockstep:0.1.0": f"{label}:1",
        **{f"lockstep-{part}": f"{label}-{part}" for part in ("trainjob", "jobset", "runs")},
        "job-name=lockstep": f"job-name={name}",
        "\nname: lockstep\n": f"\nname: {label}\n",
        "task=cifar": f"task={name}",
        'trainer "$@"': f'trainer task={name} "$@"',
        "pip install -c constraints.txt '.[bucket]'": "pip install -r requirements.txt",
    }.items():
        text = text.replace(word, value)
    lines = [line for line in text.splitlines(keepends=True) if not OF_LOCKSTEP.search(line)]
    ignored = {".skyignore": SKYIGNORE} if cluster == "skypilot" else {}
    return {own.place: "".join(lines), **ignored}


def _on_cluster(cluster: str) -> list[str]:
    """Return the line that says how to start on a cluster."""
    if not cluster:
        return []
    own = CLUSTERS[cluster]
    return [f"on the cluster: {own.command}; {own.place} says what to change before"]


def _find_files(recipe: str) -> list[Path]:
    """Return the files of a project; those of a recipe replace the shared ones of the same name."""
    if not recipe:
        return sorted(TEMPLATE_FOLDER.iterdir())
    own = sorted((OF_RECIPES / recipe).iterdir())
    shared = [path for path in OF_RECIPES.iterdir() if path.is_file()]
    shared += [TEMPLATE_FOLDER / name for name in SHARED_FILES]
    if recipe != "notebook":
        shared.append(TEMPLATE_FOLDER / "lockstep.yaml")
    files = {path.name: path for path in (*shared, *own) if path.name != NOTES}
    return list(files.values())


def _first_commands(name: str, recipe: str) -> list[str]:
    """Return the commands that make a recipe's data and train it."""
    if not recipe:
        return [f"python -m trainer task={name}"]
    before = RECIPES[recipe].before
    return [each.replace("__NAME__", name) for each in (*before, RECIPES[recipe].train)]


def _values(name: str, module: str, recipe: str, cluster: str) -> dict[str, str]:
    """Return the values of the words that files of a project have."""
    chosen_recipe = RECIPES.get(recipe)
    extras = [chosen_recipe.extras if chosen_recipe else "export,report"]
    if cluster:
        extras += filter(None, [CLUSTERS[cluster].extras])
    values = {
        "__PROOF__": chosen_recipe.proof if chosen_recipe else Recipe.proof,
        "__EXTRAS__": ",".join(extras),
        "__NEEDS__": "".join(f"{each}\n" for each in chosen_recipe.needs) if chosen_recipe else "",
    }
    if chosen_recipe:
        notes = OF_RECIPES / recipe / NOTES
        values["__ABOUT__"] = chosen_recipe.about[0].upper() + chosen_recipe.about[1:]
        values["__REACHES__"] = chosen_recipe.reaches
        values["__BEFORE__"] = "".join(f"    {each}\n" for each in chosen_recipe.before)
        values["__NOTES__"] = notes.read_text(encoding="utf-8") if notes.exists() else ""
    return values | {
        "__NAME__": name,
        "__MODULE__": module,
        "__CLASS__": _class_of(module),
        "__VERSION__": trainer.__version__,
    }


def _fill(files: Sequence[Path], values: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of a project by their places. Raises ConfigError for a name that clashes."""
    texts: dict[str, str] = {}
    for path in files:
        text = path.read_text(encoding="utf-8")
        for word, value in values.items():
            text = text.replace(word, value)
        target = PLACES.get(path.name, path.name.replace(".py.txt", ".py"))
        target = target.format(name=values["__NAME__"], module=values["__MODULE__"])
        if target in texts:
            raise ConfigError(f"""{values["__NAME__"]}:
                a file of the recipe has this name; choose another name""")
        texts[target] = text
    return texts


def _folder_of(word: str) -> Path:
    """Return the folder that a word names; it may begin with ~. Raises ConfigError."""
    try:
        return Path(word).expanduser()
    except RuntimeError:  # of no user
        raise ConfigError(f"{word}: has no home directory; give another folder") from None


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    """Write a project: all of it, or nothing. Raises ConfigError."""
    staged = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    above = [each for each in folder.parents if not each.exists()]  # the nearest first
    try:
        for relative_path, text in texts.items():
            path = staged / relative_path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        staged.rename(folder)
    except BaseException as error:
        shutil.rmtree(staged, ignore_errors=True)
        with suppress(OSError):
            for each in above:
                each.rmdir()
        if not isinstance(error, OSError):
            raise
        raise ConfigError(f"{folder}: {error.strerror}; start in another directory") from None


def _describe(_: Sequence[str]) -> str:
    width = max(map(len, RECIPES))
    rows = [f"  {name:<{width}}  {recipe.about}" for name, recipe in RECIPES.items()]
    clusters = [f"  {name:<{width}}  {own.command}" for name, own in CLUSTERS.items()]
    return HELP.format(recipes="\n".join(rows), clusters="\n".join(clusters))


def _class_of(module: str) -> str:
    name = "".join(part[:1].upper() + part[1:] for part in module.split("_"))
    return f"{name}Task" if name in IMPORTED else name


def _check(name: str, module: str, folder: Path) -> None:
    """Raise ConfigError for a name that cannot be a folder, a task and a module."""
    if not VALID.fullmatch(name) or len(name) > MOST_OF_A_PROJECT_NAME:
        must = f"must be letters, digits, - and _, at most {MOST_OF_A_PROJECT_NAME}, as in my-task"
        raise ConfigError(f"{str(folder)!r}: {must}")
    if os.path.lexists(folder):
        raise ConfigError(f"{folder}: already exists; choose another name")
    if keyword.iskeyword(module) or name.lower() in NO_NAMES:
        raise ConfigError(f"{name}: means something else to Python or YAML; choose another name")
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.origin is not None:  # else a folder of this name nearby
        raise ConfigError(f"{name}: Python has a module {module} already; choose another name")
    if name in find_options()["task"]:
        raise ConfigError(f"{name}: is a built-in task; choose another name")


if __name__ == "__main__":
    run(main, _describe)
