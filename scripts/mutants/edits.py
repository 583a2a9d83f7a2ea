"""An edit of one line, and how it is applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Edit:
    """Replace `old` by `new` in a file; a user would get `harm`, so one of `tests` must fail.

    `old` is in the file exactly once. `tests` are the files to run first.
    """

    name: str
    area: str
    file: str
    old: str
    new: str
    harm: str
    tests: tuple[str, ...]

    def problem(self, root: Path) -> str:
        """Return why the edit does not fit the code; empty if it fits."""
        path = root / self.file
        if not path.is_file():
            return f"{self.name}: {self.file} is not there"
        count = path.read_text(encoding="utf-8").count(self.old)
        if count != 1:
            return f"{self.name}: {self.file} has the old text {count} times"
        missing = [name for name in self.tests if not (root / "tests" / name).is_file()]
        return f"{self.name}: no file tests/{missing[0]}" if missing else ""

    def apply(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


def in_area(area: str, file: str, *tests: str) -> Callable[..., Edit]:
    """Return a function that makes edits of one file, which these tests look at first."""

    def edit(name: str, old: str, new: str, harm: str, *more: str) -> Edit:
        return Edit(f"{area}-{name}", area, file, old, new, harm, (*more, *tests))

    return edit
