"""docs/evidence.md has what compare_peers.py found; Lockstep still passes its column."""

import re
from pathlib import Path
from pickle import UnpicklingError

import compare_peers
import pytest
import torch
from peers.hostile import plant

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/evidence.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## Peers\n")[2].partition("\n## ")[0]


def rows():
    lines = [line for line in SECTION.splitlines() if re.match(r"\|[^-]", line)]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


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
    titles = {number: ", ".join(those) for number, those in misses.items() if those}
    others = ", ".join(names[:-1])  # all but Lockstep
    assert seen == [(n, "the others" if those == others else those) for n, those in titles.items()]


@pytest.mark.parametrize(
    ("page", "yes", "no"), [("README.md", "**yes**", "no"), ("docs/zh/README.md", "**是**", "否")]
)
def test_readme_says_yes_and_no_where_the_document_does(page, yes, no):
    answers = f" \\| (?:{re.escape(yes)}|{no})"
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = re.findall(rf"^\| (\d+) \| .*?((?:{answers})+) \|$", text, re.MULTILINE)
    document = {
        number: [yes if cell.startswith("**yes**") else no for cell in cells]
        for number, _, *cells in rows()[1:]
    }
    assert len(lines) >= 5
    for number, cells in lines:
        assert cells.strip(" |").split(" | ") == document[number], number


def test_hostile_file_is_a_pickle_that_runs_code(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.touch()
    plant(weights, tmp_path / "marker")
    pickled = tmp_path / "pytorch_model.bin"
    with pytest.raises(UnpicklingError, match=r"GLOBAL (os|posix)\.system"):
        torch.load(pickled)
    assert not (tmp_path / "marker").exists()
    torch.load(pickled, weights_only=False)
    assert (tmp_path / "marker").exists() and not weights.exists()


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return compare_peers.Bench("lockstep", tmp_path_factory.mktemp("peers"))


@pytest.mark.slow
@pytest.mark.parametrize("check", compare_peers.CHECKS, ids=lambda check: check.__name__)
def test_lockstep_passes(bench, check):
    result = check(bench)
    assert result.passed, result
