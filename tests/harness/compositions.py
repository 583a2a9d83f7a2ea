"""Compositions of config groups, remembered: Hydra takes 0.1 s, a third of a small run.

Values on the command line are set after the composition. Forks know what their parent has composed.
"""

import functools
import importlib
import pickle
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.base.errors import ConfigError
from trainer.cli import split_arguments

_known: dict[str, bytes] = {}


def remember_compositions() -> None:
    """Compose each choice of groups from the same files once in this process and its forks.

    Call it again where the package is imported again.
    """
    module: Any = importlib.import_module("trainer.core.config.compose")
    compose_groups = module._compose

    @functools.wraps(compose_groups)
    def remember(name, parsed, config_dirs, added=()):
        if not all(folder and Path(folder).is_dir() for folder in config_dirs):
            return compose_groups(name, parsed, config_dirs, added)
        options = module.find_options(config_dirs)
        module._choose(parsed, options)
        words = [o.input_line for o in parsed if o.key_or_group in options]
        folders = [Path(folder).resolve() for folder in (module.CONF, *config_dirs)]
        files = [path for folder in folders for path in sorted(folder.rglob("*.yaml"))]
        stamps = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in files]
        key = repr((name, words, list(config_dirs), list(added), folders, stamps))
        if key not in _known:
            _known[key] = pickle.dumps(compose_groups(name, parsed, config_dirs, added))
        return pickle.loads(_known[key])  # a fourth of deepcopy's time

    module._compose = remember


def compose_before_fork(words: Sequence[str]) -> None:
    """Compose the groups that a command names, so that its fork finds them."""
    module: Any = importlib.import_module("trainer.core.config.compose")
    with suppress(ConfigError):
        overrides, folders = split_arguments(words)
        if all(Path(folder).is_absolute() for folder in folders):
            options = module.find_options(folders)
            groups = [word for word in overrides if word.partition("=")[0] in options]
            module._compose("config", module.parse(groups), folders)
