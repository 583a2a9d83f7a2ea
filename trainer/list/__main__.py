"""`python -m trainer.list`: list tasks, recipes, strategies and runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer import load_config
from trainer.base.errors import ConfigError, RunError, did_you_mean, visible
from trainer.base.plain_files import MOST_OF_YAML, read_of_user
from trainer.base.process.streams import print_table
from trainer.cli import answer, run, split_arguments
from trainer.core.api import (
    CONFIG,
    StoreError,
    Task,
    address_problem,
    check_path,
    copy_of,
    find_options,
    is_address,
    open_store,
    with_addresses,
)
from trainer.verbs import STRATEGY_TEXTS

HELP = """usage: python -m trainer.list [tasks|recipes|strategies|runs] [run.dir=DIR]
       python -m trainer.list s3://BUCKET/PREFIX

  python -m trainer.list                   all of them
  python -m trainer.list recipes           projects that new can write
  python -m trainer.list runs run.dir=out  the runs below a folder, the newest first
  python -m trainer.list s3://bucket       the runs that checkpoint.mirror put there

Exit codes: 0 listed, 2 invalid arguments."""
MOST_RUNS = 40
RUN_DEPTH = 2  # folders between an address and its runs: <task>/<name>
DIR = "run.dir="
Rows = list[list[str]]


def main(arguments: Sequence[str]) -> int:
    words, config_dirs = split_arguments(arguments)
    far = [word for word in words if is_address(word) and "=" not in word.partition("://")[0]]
    words = [word for word in words if word not in far]
    overrides = [word for word in words if "=" in word] + [f"{DIR}{word}" for word in far]
    kinds = [word for word in words if "=" not in word] or (["runs"] if far else [*LISTED_KINDS])
    for kind in kinds:
        if kind not in LISTED_KINDS:
            near = did_you_mean(kind, LISTED_KINDS, 0.6)
            raise ConfigError(f"{kind}: must be one of {', '.join(LISTED_KINDS)}{near}")
    facts: dict[str, Any] = {}
    tables = []
    for kind in kinds:
        columns, find = LISTED_KINDS[kind]
        rows = find(overrides, config_dirs)
        facts[kind] = [dict(zip(columns, row, strict=True)) for row in rows]
        tables.append((kind, columns, rows))

    def show() -> None:
        for table_index, (kind, columns, rows) in enumerate(tables):
            print(("\n" if table_index > 0 else ""), end="")
            if rows:
                print_table((kind, *columns[1:]), rows)
            else:
                print(f"{kind}: none")
            if kind == "strategies":
                print("meshes of tensor, context and pipeline parallel: docs/parallelism.md")

    return answer(0, "listed", facts, show)


def _list_tasks(_: Sequence[str], config_dirs: Sequence[str]) -> Rows:
    """Return each task with the first sentence of the comment at the top of its file."""
    rows = []
    for name, files in sorted(find_options(config_dirs)["task"].items()):
        rows.append([name, _about(files[-1])])
    return rows


def _about(path: Path) -> str:
    comment = []
    lines: list[str] = []
    with suppress(OSError):  # a folder of that name, or a file that is too large
        lines = read_of_user(path, MOST_OF_YAML).decode(errors="replace").splitlines()
    for line in lines:
        if line.startswith("# @") or not line.strip():
            continue
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# ").strip())
    return re.split(r"(?<=[a-z)])\.( |$)", " ".join(comment))[0]


def _list_recipes(_: Sequence[str], config_dirs: Sequence[str]) -> Rows:
    from trainer.new import RECIPES

    return [[name, recipe.about, recipe.reaches] for name, recipe in RECIPES.items()]


def _list_strategies(_: Sequence[str], config_dirs: Sequence[str]) -> Rows:
    return [[name, about] for name, about in STRATEGY_TEXTS.items()]


def _list_runs(overrides: Sequence[str], config_dirs: Sequence[str]) -> Rows:
    """Return the newest runs below run.dir, the newest first."""
    from trainer.pages.charts import shown
    from trainer.show.run_reading import RunFiles

    others = [word for word in overrides if not word.startswith(DIR)]
    if others:
        raise ConfigError(f"{others[0]}: must be {DIR}<folder>, the only setting of list")
    folders = [word.removeprefix(DIR) for word in overrides]
    folder = folders[-1] if folders else load_config(task=Task).run.dir
    rows = []
    for name in _find_runs(folder)[:MOST_RUNS]:
        try:
            is_far = is_address(name)
            one = RunFiles.read(str(copy_of(name, has_checkpoints=False)) if is_far else name)
        except (ConfigError, RunError) as error:
            rows.append([name, "", "", visible(with_addresses(str(error)))])
            continue
        best = shown(one.metric_name, one.best[1]) if one.best else ""
        rows.append(
            [one.name, f"{one.step:,}", (f"{one.metric_name} {best}" if best else ""), one.end]
        )
    return rows


def _find_runs(folder: str) -> list[str]:
    """Return the runs below a folder or an address, the newest first. Raises ConfigError."""
    if not is_address(folder):
        check_path("run.dir", folder)
        if Path(folder).exists() and not Path(folder).is_dir():
            raise ConfigError(f"{DIR}{folder}: is not a directory; give the folder of the runs")
        configs = sorted(Path(folder).glob(f"*/*/{CONFIG}"), key=lambda path: -path.stat().st_mtime)
        return [str(path.parent) for path in configs]
    if problem := address_problem(f"{folder}/run"):
        raise ConfigError(f"{folder}: {problem}; give another place")
    try:
        return [
            address for _, address in sorted(open_store(folder).find_runs(RUN_DEPTH), reverse=True)
        ]
    except StoreError as error:
        raise ConfigError(f"{error}; check the address and the login") from None


LISTED_KINDS: dict[str, tuple[tuple[str, ...], Callable[[Sequence[str], Sequence[str]], Rows]]] = {
    "tasks": (("name", "about"), _list_tasks),
    "recipes": (("name", "about", "reaches"), _list_recipes),
    "strategies": (("name", "about"), _list_strategies),
    "runs": (("name", "steps", "best", "end"), _list_runs),
}


if __name__ == "__main__":
    run(main, HELP)
