"""Write docs/settings.md: every setting with its type, default and meaning.

    python scripts/generate/make_settings.py [--check]

Names, types and limits come from trainer/core/config/schema.py, defaults and meanings from the
files in conf/. With --check, write nothing, and exit with 1 if the page is outdated.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import typing
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from trainer.core.config import schema
from trainer.core.config.typed import describe

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
PAGE = ROOT / "docs" / "settings.md"
SCHEMA = "trainer/core/config/schema.py"
HEAD = f"""# Settings

Written by `python scripts/generate/make_settings.py` from `conf/` and `{SCHEMA}`.

Give a setting on the command line as `key=value`, or in the YAML file of a task or experiment.
The column "belongs to" has two values. *run*: changes the result; another value is another run.
*layout*: does not change the result and may change at every resume.
"""
# Files with the defaults of a group; those of other groups are in conf/config.yaml.
FILES = {
    "strategy": "strategy/_common.yaml",
    "dist": "dist/auto.yaml",
    "launch": "launch/inline.yaml",
}
# Meanings of settings that only the files of the options contain.
NAMES = {"name": "name of the chosen file", "trainer": "the Trainer's class: <module>.<class>"}
_LINE = re.compile(r"^(?P<indent> *)(?P<name>\w+): *(?P<value>[^#]*?) *(?:# *(?P<meaning>.*))?$")


def read_values(text: str) -> dict[str, tuple[str, str]]:
    """Return (value, meaning) by full name from YAML text; the meaning is the line's comment."""
    found = {}
    block = ""
    for line in text.splitlines():
        entry = _LINE.match(line)
        if entry is None:
            continue
        if not entry["indent"]:
            block = f"{entry['name']}." if entry["value"] == "" else ""
        prefix = block if entry["indent"] else ""
        found[f"{prefix}{entry['name']}"] = (entry["value"], entry["meaning"] or "")
    return found


def cell(text: str) -> str:
    """Return text escaped for a Markdown table."""
    return text.replace("|", "\\|")


SHORT = (  # of what an error says of a type
    (r"an? (\w+) of at least (\S+) and of at most (\S+)", r"\1 \2..\3"),
    (r"an? (\w+) of at least (\S+) and below (\S+)", r"\1 >=\2 <\3"),
    (r"an? (\w+) of at least (\S+)", r"\1 >=\2"),
    (r"an? (\w+) above (\S+)", r"\1 >\2"),
    (r"\bone of (?=\w+,)", ""),
    (r"\b9223372036854775807\b", "2^63-1"),
    (r"\ban? (?=string|list|number|integer|mapping)", ""),
)


def type_of(hint: object) -> str:
    """Return the allowed values of a setting, shorter than in an error."""
    text = describe(hint)
    for long, short in SHORT:
        text = re.sub(long, short, text)
    return cell(text)


def table_of(group: str, kind: type) -> list[str]:
    """Return the lines of a table with all settings of a group."""
    values = read_values((CONF / "config.yaml").read_text())
    if group in FILES:
        own = read_values((CONF / FILES[group]).read_text())
        values = {f"{group}.{name}": entry for name, entry in own.items()}
    head = ["| setting | type | default | belongs to | meaning |", "|---|---|---|---|---|"]
    return [*head, *rows_of(group, kind, values)]


def rows_of(group: str, kind: type, values: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return the rows of a group's settings, and of the groups in it."""
    rows = []
    hints = typing.get_type_hints(kind, include_extras=True)
    for entry in dataclasses.fields(kind):
        key = f"{group}.{entry.name}"
        if dataclasses.is_dataclass(hints[entry.name]):
            rows += rows_of(key, hints[entry.name], values)
            continue
        value, meaning = values.get(key, ("", ""))
        meaning = meaning or NAMES.get(entry.name, "")
        owner = "layout" if key.startswith(schema.LAYOUT) else "run"
        default = f"`{value}`" if value else "set by the chosen file"
        words = [f"`{key}`", type_of(hints[entry.name]), default, owner, cell(meaning)]
        rows.append(f"|{'|'.join(words)}|")
    return rows


def options_of(group: str) -> list[str]:
    """Return the lines of a table with the files of a group and the values that they set.

    A value of optim or schedule is followed by its comment; other groups have a table of settings,
    whose defaults are left out.
    """
    defaults = read_values((CONF / FILES[group]).read_text()) if group in FILES else {}
    rows = ["| choice | sets |", "|---|---|"]
    for file in sorted((CONF / group).glob("[!_]*.yaml")):
        sets = []
        for line in file.read_text().splitlines():
            value, _, comment = (part.strip() for part in line.partition("#"))
            name, _, given = (part.strip() for part in value.partition(":"))
            is_default = name != "name" and defaults.get(name, ("",))[0] == given
            if value and not value.startswith("defaults") and not is_default:
                is_shown = comment and group in ("optim", "schedule")
                sets.append(f"`{value}` ({comment})" if is_shown else f"`{value}`")
        rows.append(f"|`{group}={file.stem}`|{cell(', '.join(sets))}|")
    return rows


def make_page() -> str:
    """Return the text of docs/settings.md."""
    parts = [HEAD]
    for entry in dataclasses.fields(schema.Config):
        if entry.metadata:
            continue
        group = entry.name
        kind = getattr(schema, f"{group.capitalize()}Settings", None)
        parts.append(f"## {group}\n")
        if kind is not None:
            parts.append("\n".join(table_of(group, kind)) + "\n")
        if group in ("strategy", "optim", "schedule"):
            parts.append("\n".join(options_of(group)) + "\n")
    return "\n".join(parts)


def write_or_check(path: Path, text: str) -> int:
    """Write a generated file; with --check return 1 instead if it has another text."""
    if "--check" in sys.argv[1:]:
        return int(path.read_text(encoding="utf-8") != text)
    path.write_text(text, encoding="utf-8")
    return 0


def main() -> int:
    return write_or_check(PAGE, make_page())


if __name__ == "__main__":
    sys.exit(main())
