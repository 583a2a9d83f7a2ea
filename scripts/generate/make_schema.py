"""Write conf/schema.json: a JSON schema of the settings, for editors that check YAML.

    python scripts/generate/make_schema.py [--check]

A task's or experiment's file names it in a line `# yaml-language-server: $schema=<path>`; the files
of a group are described by `$defs/<group>`. Types and limits come from
trainer/core/config/schema.py, descriptions from the comments in conf/. With --check, write nothing,
and exit with 1 if the file is outdated.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, Union

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from make_settings import CONF, FILES, read_values, write_or_check

from trainer.core.config import schema

FILE = CONF / "schema.json"
INTERPOLATION = {"type": "string", "pattern": r"^\$\{.+\}$"}  # of any type
KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}
BOUNDS = {
    "min": "minimum",
    "max": "maximum",
    "above": "exclusiveMinimum",
    "below": "exclusiveMaximum",
}
# A class and its arguments, which the class knows.
TARGET = {"type": "object", "properties": {"_target_": {"type": "string"}}}
DEFAULTS = {"type": "array", "description": "Hydra's defaults, such as - override /optim: adamw"}


def of_type(kind: Any, limits: dict[str, float] | None = None) -> dict[str, Any]:
    """Return the schema of an annotation with its limits."""
    origin = typing.get_origin(kind)
    choices = typing.get_args(kind)
    if origin is Annotated:
        return of_type(choices[0], choices[1])
    if origin in (Union, types.UnionType):
        return {"anyOf": [of_type(c, limits if c is not type(None) else None) for c in choices]}
    if kind is type(None):
        return {"type": "null"}
    if origin is Literal:
        return {"enum": list(choices)}
    if origin is list:
        return {"type": "array", "items": of_type(choices[0])}
    if dataclasses.is_dataclass(kind):
        return of_group(kind, {}, "")
    if kind in (Any, dict) or origin is dict:
        return {"type": "object"} if kind is not Any else {}
    found: dict[str, Any] = {"type": KINDS[kind]}
    if kind is str:
        found["type"] = ["string", "number"]  # run.name: 5
    return found | {BOUNDS[name]: bound for name, bound in (limits or {}).items() if name in BOUNDS}


def of_group(kind: Any, meanings: dict[str, tuple[str, str]], prefix: str) -> dict[str, Any]:
    """Return the schema of a dataclass, whose fields may be left out."""
    hints = typing.get_type_hints(kind, include_extras=True)
    properties = {}
    for entry in dataclasses.fields(kind):
        if entry.metadata:
            continue
        found = of_type(hints[entry.name])
        if not dataclasses.is_dataclass(hints[entry.name]):
            found = {"anyOf": [found, INTERPOLATION]}
        meaning = meanings.get(f"{prefix}{entry.name}", ("", ""))[1]
        properties[entry.name] = found | ({"description": meaning} if meaning else {})
    return {"type": "object", "properties": properties, "additionalProperties": False}


def make_schema() -> dict[str, Any]:
    shared = read_values((CONF / "config.yaml").read_text())
    groups: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(schema.Config, include_extras=True).items():
        if name in ("optim", "schedule"):
            groups[name] = TARGET
        elif dataclasses.is_dataclass(hint):
            meanings = shared
            if name in FILES:
                own = read_values((CONF / FILES[name]).read_text())
                meanings = {f"{name}.{key}": value for key, value in own.items()}
            groups[name] = of_group(hint, meanings, f"{name}.")
    for group in groups.values():
        group["properties"]["defaults"] = DEFAULTS
    references = {name: {"$ref": f"#/$defs/{name}"} for name in groups}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Settings of a Lockstep run: a file of conf/task or conf/experiment",
        "type": "object",
        "properties": {**references, "defaults": DEFAULTS, "hydra": {"type": "object"}},
        "additionalProperties": False,
        "$defs": groups,
    }


def main() -> int:
    return write_or_check(FILE, json.dumps(make_schema(), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
