"""The edits of scripts/mutants, whose runner is slow and run by hand: it says which do not fit."""

from collections import Counter

from mutants.companions import COMPANIONS
from mutants.core import CORE
from mutants.edits import in_area

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


def test_each_edit_has_a_name_of_its_own_and_each_area_some_edits():
    assert [name for name, count in Counter(edit.name for edit in EDITS).items() if count > 1] == []
    areas = Counter(edit.area for edit in EDITS)
    assert {*AREAS.split()} <= {*areas}
    assert min(areas.values()) >= 3 and len(EDITS) >= 60
