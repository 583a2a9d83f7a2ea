"""Config groups: the folders of conf/, and those of a user's config folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.config import CONF

# Settings without a folder in conf/: a folder of that name is no group of the user's own.
_BLOCKS = ("run", "data", "checkpoint", "eval", "log", "hydra")


def find_options(config_dirs: Sequence[str] = ()) -> dict[str, dict[str, list[Path]]]:
    """Return the options of each config group with their files: `{"task": {"cifar": [...]}}`.

    A folder of the user's, such as model/, is a group too: its files begin with the line
    `# @package task.options`, or name another place for their settings.
    """
    options: dict[str, dict[str, list[Path]]] = {}
    for root in [CONF, *map(Path, config_dirs)]:
        for file in sorted(root.glob("*/[!_]*.yaml")):
            group = file.parent.name
            if group.isidentifier() and group not in _BLOCKS:
                options.setdefault(group, {}).setdefault(file.stem, []).append(file)
    return options
