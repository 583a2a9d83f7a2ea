"""The YAML files of a user's config folders, checked when Hydra reads one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult

from trainer.config.plain_files import check_yaml


class CheckedSource(FileConfigSource):
    """A folder whose files are checked as they are read: one that a run does not use may be bad."""

    @staticmethod
    def scheme() -> str:
        return "checked"

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        if path.is_file():
            check_yaml(path)
        return super().load_config(config_path)


def search_path(folders: Sequence[str]) -> str:
    """Return Hydra's setting of the folders."""
    Plugins.instance().register(CheckedSource)
    places = ",".join(repr(f"checked://{Path(folder).resolve()}") for folder in folders)
    return f"hydra.searchpath=[{places}]"
