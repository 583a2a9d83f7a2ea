"""docs/peers.md has the results of scripts/compare_peers.py; Lockstep still passes its column."""

import re
from pathlib import Path

import compare_peers
import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = (ROOT / "docs/peers.md").read_text(encoding="utf-8")


def rows():
    lines = [line for line in DOCUMENT.splitlines() if line.startswith("| ")]
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
    misses = [row[0] for row in rows()[1:] for cell in row[2:] if cell.startswith("no: ")]
    seen = DOCUMENT.partition("## What was seen")[2].partition("## How to read")[0]
    assert sorted(misses) == sorted(re.findall(r"^- (\d+): ", seen, re.MULTILINE))


def test_readme_says_yes_and_no_where_the_document_does():
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Compared with")[2]
    lines = re.findall(r"^\| .*(?:yes|no).* \|$", table.partition("\n## ")[0], re.MULTILINE)
    readme = [re.findall(r"\*\*yes\*\*|(?<=\| )no(?= \|)", line) for line in lines]
    document = [[cell.split(":")[0] for cell in row[2:]] for row in rows()[1:]]
    assert readme == document


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return compare_peers.Bench("lockstep", tmp_path_factory.mktemp("peers"))


@pytest.mark.slow
@pytest.mark.parametrize("check", compare_peers.CHECKS, ids=lambda check: check.__name__)
def test_lockstep_passes(bench, check):
    result = check(bench)
    assert result.passed, result
