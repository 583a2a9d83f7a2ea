"""Apply one-line edits to a copy of the code, one at a time, and see whether a test fails.

    python scripts/mutants [--only NAME ...] [--default] [--all] [--list] [--json FILE]

An edit is killed if a test fails under it, and passes without it. Its own files of tests run first,
up to the first failure; with --all the other files follow if none fails. --default leaves out the
slow tests. Edits whose old text is no longer in the code are listed and left out: mend them, as
tests/project/test_mutants.py demands. NAME is that of an edit or an area. Prints a table at the
end. Exit code 1 if an edit is alive or left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

from mutants.companions import COMPANIONS  # noqa: E402
from mutants.core import CORE  # noqa: E402
from mutants.edits import Edit  # noqa: E402

EDITS = (*CORE, *COMPANIONS)
LIMIT_S = 1800.0  # of one edit: some make a test wait
LEFT_OUT = (".git", ".venv", "runs", "data", "dist", "build")  # of the checkout's own folder
FAILED = 1  # pytest's exit code if a test fails


@dataclass(frozen=True)
class Result:
    name: str
    area: str
    is_killed: bool
    seconds: float
    seen_by: str  # the test that failed first; empty if none did


def copy_code(root: Path) -> None:
    """Copy the code to `root`, without what was built or run in the checkout."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        own = {*LEFT_OUT} if Path(folder) == REPOSITORY else set()
        return {n for n in names if n in own or n == "__pycache__" or n.endswith("_cache")}

    shutil.copytree(REPOSITORY, root, ignore=left_out, symlinks=True)


def run_tests(root: Path, words: Sequence[str]) -> tuple[int, str]:
    """Run pytest in a copy of the code; return its exit code and its output."""
    paths = [str(root), str(root / "tests"), str(root / "scripts")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *words]
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return FAILED, "FAILED nothing in particular: the tests took too long"
    return done.returncode, done.stdout + done.stderr


def find_failed(output: str) -> str:
    """Return the name of the first test that failed, or the last line of the output."""
    lines = output.strip().splitlines() or [""]
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return failed[0].split(" ", 1)[1].partition(" - ")[0] if failed else lines[-1]


def try_edit(edit: Edit, root: Path, words: Sequence[str], runs_all: bool) -> Result:
    """Apply an edit to the copy in `root`, run tests, and take the edit back."""
    begun = time.monotonic()
    path = root / edit.file
    before = path.read_bytes()
    edit.apply(root)
    try:
        code, output = run_tests(root, [*words, *(f"tests/{name}" for name in edit.tests)])
        if code == 0 and runs_all:
            code, output = run_tests(root, words)
    finally:
        path.write_bytes(before)
    if code not in (0, FAILED):
        raise SystemExit(f"{edit.name}: pytest ended with {code}: {output[-2000:]}")
    seconds = time.monotonic() - begun
    seen_by = find_failed(output) if code else ""
    if seen_by.startswith("tests/") and run_tests(root, [*words, seen_by])[0]:
        raise SystemExit(f"{edit.name}: {seen_by} fails without the edit, too")
    return Result(edit.name, edit.area, code != 0, seconds, seen_by)


def choose(edits: Sequence[Edit], names: Sequence[str]) -> list[Edit]:
    known = {edit.name for edit in edits} | {edit.area for edit in edits}
    if unknown := sorted({*names} - known):
        raise SystemExit(f"--only {unknown[0]}: must be an edit or an area; see --list")
    return [edit for edit in edits if not names or {edit.name, edit.area} & {*names}]


def print_table(results: Sequence[Result]) -> None:
    print("\n|area|edits|killed|alive|\n|-|-|-|-|")
    for area in dict.fromkeys(each.area for each in results):
        own = [each for each in results if each.area == area]
        alive = [each.name for each in own if not each.is_killed]
        print(f"|{area}|{len(own)}|{len(own) - len(alive)}|{', '.join(alive)}|")
    print(f"|all|{len(results)}|{sum(each.is_killed for each in results)}||")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--default", action="store_true", help="without the slow tests")
    parser.add_argument("--all", action="store_true", help="run the other tests, too")
    parser.add_argument("--list", action="store_true", help="print the edits, and run nothing")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    edits = choose(EDITS, options.only)
    problems = list(filter(None, (edit.problem(REPOSITORY) for edit in edits)))
    for problem in problems:
        print(problem, file=sys.stderr)
    edits = [edit for edit in edits if not edit.problem(REPOSITORY)]
    if options.list:
        for edit in edits:
            print(f"{edit.name}: {edit.file}: {edit.harm}")
        return 0
    words = [] if options.default else ["-m", ""]
    results = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = Path(folder, "copy")
        copy_code(root)
        for edit in edits:
            result = try_edit(edit, root, words, options.all)
            results.append(result)
            how = f"killed by {result.seen_by}" if result.is_killed else "ALIVE"
            print(f"{result.name}: {how} ({result.seconds:.0f} s)", flush=True)
    print_table(results)
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(each) for each in results], indent=1))
    return int(bool(problems) or not all(each.is_killed for each in results))


if __name__ == "__main__":
    sys.exit(main())
