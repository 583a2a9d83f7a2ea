"""docs/evidence.md has what scripts/compare_peers.py found; Lockstep still passes its column."""

import re
from pathlib import Path

import compare_peers
import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/evidence.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## Peers\n")[2].partition("\n## ")[0]


def rows():
    lines = [line for line in SECTION.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_document_has_the_checks_of_the_script_for_every_contestant():
    header, *checks = rows()
    contestants = [each.title for each in compare_peers.CONTESTANTS.values()]
    assert header == ["", "check", *contestants]
    titles = [compare_peers.title(check) for check in compare_peers.CHECKS]
    assert [row[:2] for row in checks] == [[str(n), t] for n, t in enumerate(titles, 1)]
    for row in checks:
        assert all(cell.startswith(("**yes**: ", "no: ")) for cell in row[2:]), row


def test_every_no_of_the_document_has_an_explanation():
    (_, _, *names), *checks = rows()
    misses = {
        number: [name for name, cell in zip(names, cells, strict=True) if cell.startswith("no: ")]
        for number, _, *cells in checks
    }
    seen = re.findall(r"^- (\d+) \((.*?)\): \S", SECTION, re.MULTILINE)
    assert seen == [(number, ", ".join(those)) for number, those in misses.items() if those]


def test_readme_says_yes_and_no_where_the_document_does():
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Compared with")[2]
    lines = re.findall(r"^\| (\d+) \| .*?((?: \| (?:\*\*yes\*\*|no))+) \|$", table, re.MULTILINE)
    document = {number: [cell.split(":")[0] for cell in cells] for number, _, *cells in rows()[1:]}
    assert len(lines) >= 6
    for number, cells in lines:
        assert cells.strip(" |").split(" | ") == document[number], number


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return compare_peers.Bench("lockstep", tmp_path_factory.mktemp("peers"))


@pytest.mark.slow
@pytest.mark.parametrize("check", compare_peers.CHECKS, ids=lambda check: check.__name__)
def test_lockstep_passes(bench, check):
    result = check(bench)
    assert result.passed, result
