"""The edits of scripts/mutants fit the code; their runner is slow, and run by hand."""

import ast
from collections import Counter
from pathlib import Path

from mutants.companions import COMPANIONS
from mutants.core import CORE
from mutants.edits import in_area

REPOSITORY = Path(__file__).parents[2]
EDITS = [*CORE, *COMPANIONS]
AREAS = "mirror fence resume bucket ray chat lm dpo lora hub export"


def test_the_runner_changes_one_place_and_leaves_out_what_does_not_fit(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_a.py").touch()
    code = tmp_path / "a.py"
    code.write_text("a < 1\nb < 1\n")
    edit = in_area("a", "a.py", "test_a.py")
    assert edit("one", "a < 1", "a <= 1", "harm").problem(tmp_path) == ""
    assert edit("two", "< 1", "<= 1", "harm").problem(tmp_path).endswith("the old text 2 times")
    assert edit("no", "c < 1", "", "harm", "test_b.py").problem(tmp_path).endswith("0 times")
    edit("one", "a < 1", "a <= 1", "harm").apply(tmp_path)
    assert code.read_text() == "a <= 1\nb < 1\n"


def test_each_edit_fits_the_code():
    assert [problem for edit in EDITS if (problem := edit.problem(REPOSITORY))] == []
    for edit in EDITS:
        text = (REPOSITORY / edit.file).read_text(encoding="utf-8")
        try:
            ast.parse(text.replace(edit.old, edit.new))
        except SyntaxError as error:
            raise AssertionError(f"{edit.name}: {edit.file} cannot be parsed then") from error


def test_each_edit_has_a_name_of_its_own_and_each_area_some_edits():
    assert [name for name, count in Counter(edit.name for edit in EDITS).items() if count > 1] == []
    areas = Counter(edit.area for edit in EDITS)
    assert {*AREAS.split()} <= {*areas}
    assert min(areas.values()) >= 3 and len(EDITS) >= 60
