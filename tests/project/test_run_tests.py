"""Facts of the choice of slow tests in CI: a part of all, and those of touched packages."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import run_tests

ROOT = Path(__file__).parents[2]


def commit(folder, files, age_s):
    stamp = f"{int(time.time() - age_s)} +0000"
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(stamp)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    environment = {**os.environ, "GIT_AUTHOR_DATE": stamp, "GIT_COMMITTER_DATE": stamp}
    for words in (["add", "-A"], ["commit", "-q", "-m", "more"]):
        subprocess.run(["git", *who, *words], cwd=folder, check=True, env=environment)


def test_commits_of_the_last_day_choose_the_folders_of_tests(tmp_path, monkeypatch):
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for name in ("tests/use", "tests/show", "tests/core/data", "tests/core/loop"):
        (tmp_path / name).mkdir(parents=True)
    commit(tmp_path, ["trainer/show/page.py", "tests/core/loop/test_a.py"], 30 * 3600)
    assert run_tests.touched_folders() == ["tests/core/loop", "tests/show"]
    commit(tmp_path, ["trainer/use/model.py", "trainer/core/api.py", "docs/a.md"], 3600)
    commit(tmp_path, ["trainer/core/data/order.py"], 0)
    assert run_tests.touched_folders() == ["tests/core/data", "tests/use"]


TESTS = """
import pytest
@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_it(number):
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_touched", "is_late", "words"),
    [
        (False, False, "2 passed, 10 deselected"),
        (True, False, "12 passed"),
        (True, True, "2 passed, 10 skipped"),
    ],
)
def test_touched_packages_run_while_there_is_time_and_the_part_always(
    is_touched, is_late, words, tmp_path
):
    (tmp_path / "touched").mkdir()
    (tmp_path / "touched/test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    until = time.time() + (-1 if is_late else 600)
    own = [f"--touched={'touched' * is_touched}", f"--until={until}", "--part=4/12"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "slow", *own, "touched"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
    )
    assert words in done.stdout, done.stdout + done.stderr
