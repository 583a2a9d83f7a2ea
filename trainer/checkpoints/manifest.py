"""The manifest of a checkpoint: its files with their digests, and the facts of its run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from trainer.config.plain_files import read_json
from trainer.config.typed import build, convert, limit
from trainer.errors import CheckpointError, ConfigError

FORMAT = 3
MANIFEST = "manifest.json"
STEP_NAME = re.compile(r"step-(\d{8,})")
_PLACE = re.compile(r"\d{1,18}/(\d{1,18})")  # <epoch>/<index>
MOST = 2**53  # steps and examples
_COUNT = Annotated[int, limit(min=1, max=MOST)]
_NUMBER = Annotated[int, limit(min=0, max=MOST)]


@dataclass(frozen=True)
class Manifest:
    """The facts of a run in a checkpoint. `sessions` are pairs [first step, number of ranks].

    `changes` has the lines about settings, machine and code that changed, by a session's first
    step. `replaced` maps "<epoch>/<index>" of an unreadable example to the index of its
    replacement.
    """

    step: _NUMBER
    run: str
    strategy: str
    world_size: Annotated[int, limit(min=1, max=2**20)]
    ledger: str | None
    sessions: list[list[_NUMBER]]
    changes: dict[str, list[str]]
    replaced: dict[str, int]
    data: dict[str, dict[str, Any]]
    config: dict[str, Any]
    metrics: dict[str, Any]
    files: dict[str, Any]
    machine: dict[str, Any]
    code: dict[str, Any]  # digests by module

    @classmethod
    def of_run(cls, raw: Mapping[str, Any], path: Path) -> Manifest:
        """Convert a manifest. Raises CheckpointError if a fact of the run is missing or invalid."""
        try:
            facts = {each.name: raw[each.name] for each in fields(cls)}
            if facts["ledger"] == "":  # no step yet
                facts["ledger"] = None
            manifest = build(cls, facts)
            lengths = {split: _length(entry, "length") for split, entry in manifest.data.items()}
            size = _length(manifest.data["train"], "size")
            is_sound = manifest._is_sound(lengths["train"], size)
        except (ConfigError, KeyError, TypeError):
            is_sound = False
        if not is_sound:
            raise CheckpointError(f"{path}: its manifest does not describe a run")
        return manifest

    def _is_sound(self, num_examples: int, size: int) -> bool:
        batch = convert(_COUNT, self.config["data.global_batch"], "")
        convert(Annotated[int, limit(min=0, max=2**63 - 1)], self.config["run.seed"], "")
        are_pairs = bool(self.sessions) and all(len(each) == 2 for each in self.sessions)
        places = self.replaced.items()
        return batch <= size and are_pairs and all(_is_place(*p, num_examples) for p in places)

    @property
    def steps_per_epoch(self) -> int:
        return int(self.data["train"]["size"]) // int(self.config["data.global_batch"])

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry["bytes"] for entry in self.files.values())


def _length(facts: Any, name: str) -> int:
    return convert(_COUNT, facts[name], "")


def _is_place(place: str, index: Any, num_examples: int) -> bool:
    match = _PLACE.fullmatch(place)
    is_index = type(index) is int and 0 <= index < num_examples
    return match is not None and int(match[1]) < num_examples and is_index


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of the checkpoint at `path`; verify its form and digest, but no file.

    Raises CheckpointError if it is missing or not valid.
    """
    place = path / MANIFEST
    try:
        manifest = read_json(place)
        is_well_formed = _is_well_formed(manifest)
        number = STEP_NAME.fullmatch(path.resolve().name)
    except OSError as error:
        raise CheckpointError(f"{place}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CheckpointError(f"{place}: cannot be read as a manifest") from None
    if manifest.get("format") != FORMAT:
        why = f"has format {manifest.get('format')}, this version reads format {FORMAT}"
        raise CheckpointError(f"{path}: {why}")
    if not is_well_formed or not number or manifest.get("step") != int(number[1]):
        raise CheckpointError(f"{place}: does not belong to this checkpoint")
    if manifest.pop("sha256", None) != digest(manifest):
        why = "its SHA-256 differs from the one stored in it, so it has changed"
        raise CheckpointError(f"{place}: {why}")
    return manifest


def _is_well_formed(manifest: Any) -> bool:
    for name, entry in manifest["files"].items():
        is_name = Path(name).name == name != ".." and name.isprintable()
        is_entry = type(entry["bytes"]) is int and type(entry["sha256"]) is str
        if not is_name or not is_entry:
            return False
    values = manifest.get("metrics", {}).values()
    are_numbers = all(type(value) in (int, float, type(None)) for value in values)
    return are_numbers and all(isinstance(manifest.get(k, {}), dict) for k in ("config", "data"))


def digest(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest that does not contain `sha256` itself."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
