"""trainer.show of several runs: how runs differ, and the first step that does."""

import csv
import json
import re
import shutil
from html.parser import HTMLParser
from statistics import fmean, stdev

import pytest
import torch
from harness import CONF, fit_on, within
from harness.stored import tensors_of
from safetensors.torch import save_file
from tiny import Tiny

from trainer.base.errors import ConfigError
from trainer.base.plain_files import digest_json
from trainer.core.checkpoints import transaction
from trainer.pages.charts import overlay
from trainer.show.__main__ import main as compare
from trainer.show.compare import expand
from trainer.show.differences import _pairs, find_first, list_changes
from trainer.show.run_reading import RunFiles, read_runs
from trainer.show.several_runs import Comparison, Swept

WORDS = ["task=tiny", "run.steps=20", "log.every_steps=2", "checkpoint.every_steps=5"]
WORDS += ["checkpoint.keep_last=9", "eval.every_steps=10", "checkpoint.every_epochs=null"]


class OtherLine(Tiny):
    def augment(self, inputs, targets, random, train):
        return inputs * (1.0 + 1e-3 * train), targets


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return fit_on(1, tmp_path_factory.mktemp("first"), *WORDS)["directory"]


def copy_until(run, place, step):
    """Copy a run without its checkpoints after a step."""
    shutil.copytree(run, place)
    for number, path in transaction.steps(place / "checkpoints").items():
        if number > step:
            shutil.rmtree(path)
    return place


def differences(one, other):
    runs = read_runs([str(one), str(other)])
    names = {c.name for kind in ("settings", "facts") for c in list_changes(runs, kind)}
    return names, find_first(*runs)


def test_names_of_runs_with_brackets_are_shown_as_they_are(first, tmp_path, capfd):
    one, other = (shutil.copytree(first, tmp_path / name) for name in ("[red]a", "[/]b"))
    path = other / "config.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    compare([str(one), str(other)])
    shown = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown if line.startswith(" [")] == ["[red]a"], shown
    assert any(line.startswith(" ]b ") for line in shown)  # the name of its folder


def test_a_run_and_its_repetition_are_equal(first, tmp_path, capfd):
    again = fit_on(1, tmp_path, *WORDS, "run.name=again")["directory"]
    assert differences(first, again) == (set(), [])
    assert compare([str(first), str(again)]) == 0
    shown = capfd.readouterr().out
    assert "\nthe same bits: curves, examples and weights are equal\n" in shown
    assert "setting: no difference\ndata, code, versions: no difference\n" in shown


def test_another_setting_shows_in_the_first_log(first, tmp_path):
    other = fit_on(1, tmp_path, *WORDS, "optim.lr=0.02")["directory"]
    names, found = differences(first, other)
    assert names == {"optim.lr"}
    assert found[0].name == "optim/lr" or found[0].name == "train/loss"
    assert (found[0].first_step, found[0].step) == (1, 2)
    weights = next(each for each in found if each.name.startswith("the weights"))
    assert (weights.first_step, weights.step) == (1, 5)
    assert not any(each.name == "the examples" for each in found)


def test_another_seed_shows_in_the_examples_too(first, tmp_path):
    other = fit_on(1, tmp_path, *WORDS, "run.seed=4")["directory"]
    names, found = differences(first, other)
    assert names == {"run.seed"}
    assert found[0].name == "train/loss" and found[0].step == 2
    examples = next(each for each in found if each.name == "the examples")
    assert (examples.first_step, examples.step) == (1, 5)


def test_one_line_of_the_task_is_a_change_of_code(first, tmp_path):
    other = fit_on(1, tmp_path, *WORDS, task=OtherLine)["directory"]
    names, found = differences(first, other)
    assert names == {"the code of test_compare"}
    assert found[0].step == 2


def test_a_later_change_is_found_at_its_step(first, tmp_path):
    """The learning rate is another one from step 10 on."""
    place = copy_until(first, tmp_path / "later", 10)
    words = [f"run.resume={place}", "optim.lr=0.0123"]
    other = fit_on(1, tmp_path, *WORDS, *words)["directory"]
    _, found = differences(first, other)
    assert (found[0].first_step, found[0].step) == (11, 12)
    weights = next(each for each in found if each.name.startswith("the weights"))
    assert (weights.first_step, weights.step) == (11, 15)


def flip_bit(checkpoint, name, bit=20):
    """Flip one bit of a weight, and sign the checkpoint anew."""
    (path,) = checkpoint.glob("model-*.safetensors")
    tensors = tensors_of(transaction.load(checkpoint))
    tensors[name].view(torch.int32).view(-1)[0] ^= 1 << bit
    keys = {f"{key}": value.contiguous() for key, value in tensors.items()}
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    for key in stored:
        if key == name or key.startswith(name):
            stored[key] = keys[name]
    save_file(stored, path, metadata)
    raw = json.loads((checkpoint / "manifest.json").read_text())
    size, digest = transaction.digest_file(path, 2**40)
    raw["files"][path.name] |= {"bytes": size, "sha256": digest}
    raw.pop("sha256")
    raw["sha256"] = digest_json(raw)
    (checkpoint / "manifest.json").write_text(json.dumps(raw))


def test_a_flipped_bit_of_a_resumed_checkpoint_is_found(first, tmp_path):
    place = copy_until(first, tmp_path / "flipped", 10)
    flip_bit(place / "checkpoints/step-00000010", "0.weight")
    other = fit_on(1, tmp_path, *WORDS, f"run.resume={place}")["directory"]
    names, found = differences(first, other)
    assert names == set()
    assert (found[0].name, found[0].step) == ("eval/loss", 10)  # the resume evaluates again
    weights = next(each for each in found if each.name.startswith("the weights"))
    assert (weights.first_step, weights.step) == (11, 15)
    _, before = differences(first, place)
    line = "step 10: the weights, 1 of 4 tensors, most 0.weight: "
    assert len(before) == 1 and str(before[0]).startswith(line)


@pytest.mark.slow
def test_other_ranks_differ_by_rounding(first, tmp_path, capfd):
    words = ["strategy.precision=fp64"]
    one = fit_on(1, tmp_path / "one", *WORDS, *words)["directory"]
    two = fit_on(2, tmp_path / "two", *WORDS, *words, "strategy=fsdp")["directory"]
    names, found = differences(one, two)
    assert "strategy.name" in names
    assert all(each.distance is not None and each.distance < 1e-9 for each in found)
    assert all("(may be rounding)" in str(each) for each in found)
    assert compare([str(one), str(two)]) == 0
    assert "\nthe same run up to rounding: at most " in capfd.readouterr().out


def test_verdicts(first, tmp_path, capfd):
    def verdict_on(name, edit):
        place = shutil.copytree(first, tmp_path / name)
        rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        text = [json.dumps(edit(row) if "train/loss" in row else row) for row in rows]
        (place / "metrics.jsonl").write_text("\n".join(text) + "\n")
        code = compare([str(first), str(place)])
        return code, capfd.readouterr().out.splitlines()[0]

    def grown(row):
        return {**row, "train/loss": row["train/loss"] * (1 + 1e-8 * 10 ** row["step"])}

    code, line = verdict_on("grown", grown)
    assert code == 1 and line.startswith(
        "starts as rounding and grows (train/loss 1e-06 at step 2, train/loss"
    )
    code, line = verdict_on("rounded", lambda row: {**row, "train/loss": row["train/loss"] + 1e-9})
    assert code == 0 and line.startswith("the same run up to rounding: at most ")
    code, line = verdict_on("other", lambda row: {**row, "train/loss": row["train/loss"] + 0.1})
    assert code == 1 and line == (
        "different: train/loss, from a step between 1 and 2. Same settings, code and data"
    )
    other = fit_on(1, tmp_path, *WORDS, "optim.lr=0.02")["directory"]
    assert compare([str(first), str(other)]) == 1
    assert "\ndifferent: optim.lr\n" in capfd.readouterr().out


def test_logs_at_other_steps_are_not_compared(first, tmp_path):
    """A mean over two steps is no mean over four."""
    other = fit_on(1, tmp_path, *WORDS, "log.every_steps=4")["directory"]
    names, found = differences(first, other)
    assert names == {"log.every_steps"}
    assert found == []


def test_table_as_a_file(first, tmp_path, capfd):
    other = fit_on(1, tmp_path, *WORDS, "run.seed=4")["directory"]
    third = fit_on(1, tmp_path, *WORDS, "run.name=third")["directory"]
    out = tmp_path / "table.csv"
    assert compare([str(first), str(other), str(third), f"out={out}"]) == 1
    with out.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["kind", "name", str(first), str(other), str(third)]
    assert ["settings", "run.seed", "0", "4", "0"] in rows
    line = next(row for row in rows if row[:2] == ["first difference", "1"])
    assert line[3].startswith("steps 1 to 2: train/loss") and line[4] == ""
    assert all(len(row) == 5 for row in rows)
    assert f"written: {out}" in capfd.readouterr().out


class Outline(HTMLParser):
    """The elements of a page, and what refers to other places."""

    def __init__(self, text):
        super().__init__()
        self.found, self.ids, self.links = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.found.append((tag, given))
        if "id" in given:
            self.ids.append(given["id"])
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v]


def check_page(text, num_charts):
    """Check that a page needs no other file, and that its charts have words."""
    page = Outline(text)
    assert len(page.ids) == len(set(page.ids))
    assert page.links == []
    assert not {tag for tag, _ in page.found} & {"link", "iframe", "img", "object"}
    charts = [given for _, given in page.found if given.get("role") == "img"]
    assert len(charts) == num_charts
    assert all(chart["aria-label"] for chart in charts)
    assert "prefers-color-scheme: dark" in text
    return page


def test_page_of_a_comparison(first, tmp_path):
    other = fit_on(1, tmp_path, *WORDS, "run.seed=4", "run.name='<b>bold'")
    out = tmp_path / "page.html"
    assert compare([str(first), str(other["directory"]), f"out={out}"]) == 1
    text = out.read_text()
    page = check_page(text, len(RunFiles.read(str(first)).curves) - 1)  # without epoch
    assert not [tag for tag, _ in page.found if tag == "script"]
    assert "<b>bold" not in text and "&lt;b&gt;bold" in text
    assert '<span class="state">different</span> <span class="soft">run.seed</span>' in text
    assert '<th scope="col">run.seed</th>' in text
    assert "run.seed=0</span>" in text and "run.seed=4</span>" in text  # instead of folders' names
    assert "All runs: steps 20, strategy ddp, ranks 1, end done." in text
    assert "steps 1 to 2: train/loss" in text


def test_identical_curves_are_both_seen(first, tmp_path):
    """The first one is wide and pale below the other one."""
    again = fit_on(1, tmp_path, *WORDS, "run.name=again")["directory"]
    out = tmp_path / "page.html"
    assert compare([str(first), str(again), f"out={out}"]) == 0
    text = out.read_text()
    assert '<span class="state">the same bits</span>' in text
    num_curves = sum(not n.startswith("speed/") for n in RunFiles.read(str(first)).curves) - 1
    assert text.count("<span>identical</span>") >= num_curves
    assert text.count('<g class="c0 pale">') == text.count("<span>identical</span>")


def test_overlay_and_distances():
    falling = {1: 2.0, 2: 1.0}
    near = {1: 2.0, 2: 1.0 + 1e-9}
    rising = {1: 1.0, 2: 2.0}
    assert overlay({0: falling, 1: near}) == ({0: 6, 1: 2}, "equal up to 1e-09")
    assert overlay({0: falling, 1: rising}) == ({0: 2, 1: 2}, "")
    words = "3 runs, 2 curves"
    assert overlay({0: falling, 1: rising, 2: falling}) == ({0: 6, 1: 2, 2: 2}, words)
    nan = float("nan")
    assert overlay({0: {1: nan}, 1: {1: nan}})[1] == "identical"
    assert overlay({0: {1: nan}, 1: {1: 2.0}})[1] == ""


SWEEP = [(lr, seed) for lr in ("0.01", "0.1", "1.0") for seed in "01"]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Return the folder of a sweep of rates and seeds, as a sweep leaves it; the runs are real."""
    folder = tmp_path_factory.mktemp("sweep")
    words = ["task=tiny", "run.steps=10", "log.every_steps=2", "eval.every_steps=5"]
    rows = [["job", "directory"]]
    for number, (lr, seed) in enumerate(SWEEP, 1):
        own = [f"optim.lr={lr}", f"run.seed={seed}", f"run.name=s-{number}"]
        rows.append([number, fit_on(1, folder, *words, *own)["directory"]])
    rows.append([9, folder / "failed"])  # before it had a directory
    with (folder / "results.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder


def test_page_of_a_sweep(sweep, tmp_path):
    out = tmp_path / "page.html"
    assert compare([str(sweep), f"out={out}"]) == 1
    text = out.read_text()
    found = read_runs(expand([str(sweep)]))
    assert len(found) == len(SWEEP)
    check_page(text, len(found[0].curves) - 1 + 1)  # without epoch, with the best values
    assert '<span class="state">different</span> <span class="soft">optim.lr, run.seed<' in text
    order = re.findall(r'title="[^"]*">(?:<i[^>]*></i>)?(s-\d)</span></th>', text)
    best = {each.path.name: each.best[1] for each in found}
    assert order == sorted(best, key=best.get)
    means = text.split("Means over seeds")[1].split("</table>")[0]
    for lr in ("0.01", "0.1", "1.0"):
        values = [best[f"s-{n}"] for n, (own, _) in enumerate(SWEEP, 1) if own == lr]
        assert f'title="{fmean(values)!r}"' in means and f'title="{stdev(values)!r}"' in means
    assert '<span class="x"' in text and ">optim.lr</div>" in text
    assert "aria-sort" in text  # one can sort the table


def test_swept_rate_has_a_logarithmic_axis(sweep):
    found = Comparison.of(read_runs(expand([str(sweep)])))
    swept = Swept(found.runs, found.settings)
    (chart,) = swept.charts()
    assert chart.across.is_log
    assert [words for _, words in chart.x_ticks] == ["0.01", "0.1", "1.0"]
    places = [place for place, _ in chart.x_ticks]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1])
    assert len(chart.lines[0].dots) == len(SWEEP) and len(chart.lines[0].curve) == 3


@pytest.mark.parametrize(
    "words, line",
    [
        (["{first}", "a" * 6000], "the argument=aaa"),
        (
            ["{first}", "{first}", "-x"],
            "-x is not a flag: allowed are --config-dir, --help, --json, --long",
        ),
        (["{first}", "/nowhere"], "/nowhere: has no config.json; give a run directory"),
        (["{first}", "{first}", "out=page.pdf"], "out=page.pdf: must end with .html or .csv"),
        (["{first}", "{first}", "out=/nowhere/p.csv"], "out=/nowhere/p.csv: No such file or "),
    ],
)
def test_mistakes_are_one_line(words, line, first, capfd):
    with pytest.raises(ConfigError) as error:
        compare([word.format(first=first) for word in words])
    assert line in str(error.value).replace("/nowhere/p.csv: cannot", "out=/nowhere/p.csv: cannot")


def test_verb_is_listed(command):
    done = command("--help", verb="trainer.show")
    assert done.returncode == 0 and done.stdout.startswith("usage: python -m trainer.show RUN")
    assert CONF


def test_a_run_that_was_continued_equals_one_that_was_not(first, tmp_path, capfd):
    """The log at step 5, where it stopped, makes the next one a mean over other steps."""
    words = [*WORDS, "run.name=same", "log.every_steps=10"]
    whole = fit_on(1, tmp_path / "whole", *words)["directory"]
    half = fit_on(1, tmp_path / "half", *words, "run.steps=5")["directory"]
    again = fit_on(1, tmp_path / "half", *words, f"run.resume={half}")["directory"]
    assert again == half and list(RunFiles.read(str(half)).curves["train/loss"]) == [5, 10, 20]
    assert differences(whole, half) == (set(), [])
    assert compare([str(whole), str(half)]) == 0
    assert "the same bits: curves, examples and weights are equal" in capfd.readouterr().out


def test_a_save_before_the_first_log_belongs_to_the_record(first, tmp_path):
    """Without its first log, the run looks as if it continued another one."""
    words = [*WORDS, "log.every_steps=10", "checkpoint.every_steps=3", "run.seed=4"]
    place = fit_on(1, tmp_path, *words, "run.steps=6")["directory"]
    lines = (place / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if '"ledger"' in line]
    (place / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    other = fit_on(1, tmp_path, *words, f"run.resume={place}")["directory"]
    assert RunFiles.read(str(other)).begin == 0
    one = fit_on(1, tmp_path, *words, "run.seed=5", "run.name=one")["directory"]
    _, found = differences(one, other)
    examples = next(each for each in found if each.name == "the examples")
    assert (examples.first_step, examples.step) == (1, 3)


def test_runs_with_nothing_in_common_are_not_called_equal(first, tmp_path, capfd):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        shutil.copy(first / "config.json", tmp_path / name)
    assert compare([str(tmp_path / "one"), str(tmp_path / "two")]) == 1
    shown = capfd.readouterr().out
    assert shown.splitlines()[0].endswith(
        "/two has not ended, or was killed, before its first step"
    )
    assert shown.startswith("cannot tell: ")
    for kind in ("curves", "examples", "weights"):
        assert f"unknown: {kind}, as no step has them in both runs" in shown
    assert "unknown: data, code and versions, as a run has no checkpoint" in shown


def test_a_shorter_run_is_equal_as_far_as_it_goes(first, tmp_path, capfd):
    short = fit_on(1, tmp_path, *WORDS, "run.steps=10")["directory"]
    assert compare([str(first), str(short)]) == 1
    steps = f"{first} has 20 steps, {short} 10"
    shown = capfd.readouterr().out
    assert f"unknown: anything after step 10; {steps}" in shown
    line = f"\ncannot tell: nothing differs up to step 10; {short} ended after step 10\n"
    assert line in shown


class Broken(Tiny):
    """Fails in step 7, or before its first step."""

    at = 7

    def train_step(self, batch):
        if self.step + 1 == self.at:
            raise ValueError("no more")
        return super().train_step(batch)


class Unopened(Broken):
    at = 1


@pytest.mark.parametrize(
    ("task", "end"),
    [
        (Broken, "nothing differs up to step 6; {run} failed after step 6: ValueError: no more"),
        (Unopened, "{run} failed before its first step: ValueError: no more"),
    ],
)
def test_of_a_failed_run_it_is_said_that_one_cannot_tell(task, end, first, tmp_path, capfd):
    place = tmp_path / "two"
    with pytest.raises(AssertionError, match="no more"):
        fit_on(1, place, *WORDS, "run.name=two", task=task)
    (run,) = place.rglob("two")
    capfd.readouterr()
    assert compare([str(first), str(run)]) == 1
    assert capfd.readouterr().out.splitlines()[0] == f"cannot tell: {end.format(run=run)}"


@pytest.mark.parametrize(
    ("precision", "apart", "verdict"),
    [
        ("fp64", 1e-7, "the same run up to rounding: "),
        ("fp64", 4e-6, "different: "),
        ("fp32", 4e-6, "the same run up to rounding: "),
        ("fp32", 4e-5, "different: "),
        ("amp_bf16", 4e-5, "the same run up to rounding: "),
        ("amp_bf16", 2e-2, "different: "),
    ],
)
def test_the_limit_of_rounding_follows_the_precision(precision, apart, verdict, first, tmp_path):
    places = [shutil.copytree(first, tmp_path / name) for name in ("one", "two")]
    for place, factor in zip(places, (1.0, 1.0 + apart), strict=True):
        text = (place / "config.json").read_text()
        text = re.sub(r'"precision": ".*"', f'"precision": "{precision}"', text)
        (place / "config.json").write_text(text)
        rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            row |= {name: row[name] * factor for name in ("train/loss",) if name in row}
        (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = Comparison.of(read_runs([*map(str, places)]))
    assert found.verdicts[0].line.startswith(verdict)


class NearLine(Tiny):
    def loss(self, outputs, targets):
        return super().loss(outputs, targets) * 1.0001


def test_in_16_bits_a_change_of_code_is_not_called_rounding(tmp_path):
    words = [*WORDS, "strategy.precision=amp_bf16"]
    one = fit_on(1, tmp_path / "one", *words)["directory"]
    two = fit_on(1, tmp_path / "two", *words, task=NearLine)["directory"]
    found = Comparison.of(read_runs([str(one), str(two)]))
    assert not found.is_same
    end = "the code of test_compare changed; strategy.precision=fp64 shows whether it matters"
    assert found.verdicts[0].line.startswith("cannot tell: at most ")
    assert found.verdicts[0].line.endswith(end)


def test_damaged_weights_are_not_called_equal(first, tmp_path):
    place = shutil.copytree(first, tmp_path / "damaged")
    (path,) = (place / "checkpoints/step-00000015").glob("model-*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    _, found = differences(first, place)
    assert [each.step for each in found] == [15]
    assert found[0].name.startswith("a checkpoint cannot be compared: ")


def test_an_infinite_value_is_a_large_difference(first, tmp_path):
    place = shutil.copytree(first, tmp_path / "infinite")
    text = (place / "metrics.jsonl").read_text().splitlines()
    row = next(n for n, line in enumerate(text) if '"step": 8,' in line and "train/loss" in line)
    entry = json.loads(text[row])
    text[row] = json.dumps({**entry, "train/loss": float("inf")})
    (place / "metrics.jsonl").write_text("\n".join(text) + "\n")
    _, found = differences(first, place)
    assert "train/loss" in str(found[0]) and "nan" not in str(found[0]), str(found[0])


@pytest.mark.parametrize("text", ['{"defaults": ["a"], "lr": 0.1}', "[1, 2]", "{}"])
def test_a_config_of_another_program_is_one_line(text, first, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json: was not written by a run: it has no "):
        compare([str(first), str(tmp_path)])


@pytest.mark.parametrize("name", ["train/loss", "eval/loss"])
def test_curves_of_many_steps_are_compared_soon(name):
    mine = dict.fromkeys(range(1, 40_001), 1.0)
    theirs = {step: 1.0 for step in mine if step % 3}
    with within(20):
        pairs = [pair.step for pair in _pairs(name, mine, theirs, 0)]
    # a log of training is compared if the one before it was at the same step
    assert pairs == [step for step in theirs if name == "eval/loss" or step % 3 == 2 or step == 1]
