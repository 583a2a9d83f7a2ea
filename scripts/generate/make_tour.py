"""Write the line numbers of docs/tour.md: `[name](../file.py#L1)` leads to what `name` defines.

    python scripts/generate/make_tour.py [--check]

With --check, write nothing, and exit with 1 if the page is outdated.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from make_settings import write_or_check

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tour.md"
LINK = re.compile(r"\[([^\]]+)\]\(\.\./([\w/]+\.py)#L\d+\)")


@cache
def find_lines(name: str) -> dict[str, int]:
    """Return the line of each definition in a file: by name, and as Class.method."""
    lines: dict[str, int] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                lines[f"{prefix}{node.name}"] = node.lineno
                lines.setdefault(node.name, node.lineno)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{node.name}.")
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                lines.setdefault(node.targets[0].id, node.lineno)

    visit(ast.parse((ROOT / name).read_text(encoding="utf-8")).body, "")
    return lines


def make_page() -> str:
    """Return the page with today's line numbers. Raises KeyError for a name that is gone."""

    def number(link: re.Match[str]) -> str:
        name, file = link[1], link[2]
        return f"[{name}](../{file}#L{find_lines(file)[name.replace(chr(92), '')]})"

    return LINK.sub(number, PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, make_page()))
