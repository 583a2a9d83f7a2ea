"""The pages for users of other frameworks: their files are written and their commands are run."""

import ast
import dataclasses
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
from harness import ended
from harness.launch import environment_of_a_command

from trainer.config.schema import Config

DOCS = Path(__file__).resolve().parent.parent / "docs"
NAMES = ("ddp-script", "lightning", "accelerate", "lightning-hydra-template")
PAGES = {name: (DOCS / f"from-{name}.md").read_text(encoding="utf-8") for name in NAMES}
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.S | re.M)
PATH = re.compile(r"^# ([\w./-]+\.(?:py|yaml))$", re.M)
MARKS = ("needs two GPUs", "needs a cluster", "error: ")
SETTING = re.compile(r"`((?:run|data|strategy|dist|launch|checkpoint|eval|log|task)\.\w+)[=`]")
CHOICE = re.compile(r"`(task|strategy|dist|launch|optim|schedule|experiment)=(\w+)`")
NOT_SETTINGS = {"task.options"}  # a group whose names are the task's


def files_of(page):
    """Return path to text of the files of a page. A block has one file or several; each begins with
    a comment with its path, which may follow `# @package _global_`."""
    found = {}
    for kind, block in FENCE.findall(page):
        if kind == "sh" or not PATH.search(block):
            continue
        starts = [match.start() for match in PATH.finditer(block)]
        starts[0] = 0
        for start, end in zip(starts, [*starts[1:], len(block)], strict=True):
            found[PATH.search(block, start)[1]] = block[start:end]
    return found


def commands_of(page):
    """Return the command lines of all sh blocks."""
    blocks = [block for kind, block in FENCE.findall(page) if kind == "sh"]
    return [line for block in blocks for line in block.splitlines()]


@pytest.fixture
def write(tmp_path):
    def write_files(name):
        for path, text in files_of(PAGES[name]).items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)

    return write_files


@pytest.fixture
def run(command):
    """Run a command line of a page that starts Lockstep; return its output."""

    def run_line(line, code=0):
        program, *words = shlex.split(line, comments=True)
        at = words.index("-m")
        launcher, verb, rest = words[:at], words[at + 1], words[at + 2 :]
        ranks = int(launcher[-1].split("=")[1]) if program == "torchrun" else 0
        done = command(*rest, ranks=ranks, verb=verb)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run_line


def run_script(folder, line):
    """Run a command line of a page that starts another program, in a real process; return its
    output."""
    words = shlex.split(line, comments=True)
    given = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    program, *rest = words[len(given) :]
    start = {"torchrun": ["-m", "torch.distributed.run"], "python": []}[program]
    environment = environment_of_a_command(**given)
    process = subprocess.Popen(
        [sys.executable, *start, *rest],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    code, out, err = ended(process)
    assert code == 0 or has_aborted_at_exit(err), out + err
    return out


def has_aborted_at_exit(err):
    """Return True for a script whose torch aborted after its last line.

    Seen once in some 30 runs, on a busy machine with torch 2.13: a thread of gloo was still alive.
    """
    return "terminate called without an active exception" in err


def need(package):
    """Skip the test without the package; do not import it, which would change the environment."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")


def commands_in(name, word):
    """Return the commands of a page that contain the word, without the marked ones."""
    found = [line for line in commands_of(PAGES[name]) if word in line]
    assert found
    return [line for line in found if not any(mark in line for mark in MARKS)]


def logged(directory, key):
    """Return step to value of a key of metrics.jsonl."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def losses(directory):
    return logged(directory, "train/loss")


def printed(text):
    """Return step to loss from the output of a script."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", text)}


# From a DDP script --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ddp_script_learns_other_things_on_other_ranks_and_repeats_data(
    is_real, write, command, tmp_path
):
    write("ddp-script")
    lines = commands_in("ddp-script", "train.py")
    if is_real:
        two, one, resumed = (run_script(tmp_path, line) for line in lines)
    else:
        runs = (("2", []), ("1", ["--batch-size=64"]), ("2", ["--resume"]))
        for line, (ranks, words) in zip(lines, runs, strict=True):
            start = f"torchrun --standalone --nproc_per_node={ranks} train.py"
            assert line == " ".join([start, *words])
        done = [command(*words, ranks=int(ranks), verb="train") for ranks, words in runs]
        assert not any(d.returncode and not has_aborted_at_exit(d.stderr) for d in done), done
        two, one, resumed = (each.stdout for each in done)
    assert printed(one).keys() == printed(two).keys() and max(printed(one)) == 60
    pairs = zip(printed(one).values(), printed(two).values(), strict=True)
    assert sum(abs(a - b) > 1e-3 * a for a, b in pairs) == 12
    # 48 + 16 steps, and from step 60 on the last epoch a second time: 12 of its batches repeat
    assert max(printed(resumed)) == 75 and min(printed(resumed)) == 65
    for text, count in ((one, 203), (two, 204)):
        hits = float(re.findall(r"accuracy (\S+)", text)[-1]) * count
        assert hits == pytest.approx(round(hits), abs=2e-4), count


@pytest.mark.slow
def test_ddp_task_learns_the_same_on_another_number_of_ranks(write, run, tmp_path):
    write("ddp-script")
    one, two, evaluate, resume, audit = commands_in("ddp-script", "-m trainer")[:5]
    assert "43 examples are left out" in run(one)
    run(two)
    found = {name: losses(tmp_path / "runs/rings" / name) for name in ("one", "two")}
    assert len(found["one"]) == 12 and found["one"] == pytest.approx(found["two"], rel=1e-3)
    hits = json.loads(run(evaluate))["eval/accuracy"] * 203
    assert hits == pytest.approx(round(hits), abs=1e-9)
    run(resume)
    assert max(losses(tmp_path / "runs/rings/two")) == 90
    assert "nothing was repeated or skipped" in run(audit)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp-script", "accelerate"])
def test_losses_agree_to_ten_digits_in_fp64(name, write, run, tmp_path):
    write(name)
    for line in commands_in(name, "-m trainer")[:2]:
        run(f"{line} strategy.precision=fp64")
    one, two = (losses(path) for path in sorted((tmp_path / "runs").glob("*/*")))
    assert one == pytest.approx(two, rel=1e-10)


@pytest.mark.slow
def test_ddp_task_is_proved_by_verify(write, run):
    write("ddp-script")
    (line,) = commands_in("ddp-script", "trainer.verify")
    assert "proved: all runs learned the same" in run(line)


# From Lightning -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_lightning_module_logs_a_loss_for_each_rank_and_evaluates_204_examples(write, tmp_path):
    need("lightning")
    write("lightning")
    assert "`python lit.py`" in PAGES["lightning"]
    text = run_script(tmp_path, "python lit.py")
    found = re.findall(r"rank ([01]) loss (\S+) accuracy (\S+)", text)
    ((_, loss, accuracy), (_, other_loss, other_accuracy)) = sorted(found)
    assert loss != other_loss and accuracy == other_accuracy
    hits = float(accuracy) * 204
    assert hits == pytest.approx(round(hits), abs=1e-3)


@pytest.mark.slow
def test_lightning_task_runs_with_the_commands_of_the_page(write, run, tmp_path):
    write("lightning")
    one, two, test, resume, _ = commands_in("lightning", "-m trainer")
    run(one)
    run(two)
    place = tmp_path / "runs/waves"
    assert losses(place / "one") == pytest.approx(losses(place / "two"), rel=1e-5)
    for accuracy in logged(place / "two", "eval/accuracy").values():
        assert accuracy * 203 == pytest.approx(round(accuracy * 203), abs=1e-9)
    hits = json.loads(run(test))["eval/accuracy"] * 205
    assert hits == pytest.approx(round(hits), abs=1e-9)
    assert "resumed at step 60 of 75" in run(resume)


@pytest.mark.slow
def test_lightning_task_starts_its_ranks_itself(write, run):
    write("lightning")
    (line,) = commands_in("lightning", "launch=elastic")
    run(line)


# From Accelerate ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_accelerate_script_resumes_with_other_examples(write, tmp_path):
    need("accelerate")
    write("accelerate")
    first, resumed = (printed(run_script(tmp_path, line)) for line in trains())
    assert max(first) == 60 and min(resumed) == 45
    assert abs(first[45] - resumed[45]) > 1e-3
    alone = run_script(tmp_path, trains()[0].replace("ACCELERATE_USE_CPU=true ", ""))
    assert alone.count("step 125 ") == 2  # two trainings, each of 128 steps


def trains():
    return commands_in("accelerate", "train.py")


@pytest.mark.slow
def test_accelerate_task_resumes_a_checkpoint_on_another_number_of_ranks(write, run, tmp_path):
    write("accelerate")
    one, two, branch, _ = commands_in("accelerate", "-m trainer")
    for line in (one, two, branch):
        run(line)
    place = tmp_path / "runs/moons"
    expected = losses(place / "one")
    assert losses(place / "two") == pytest.approx(expected, rel=1e-5)
    rest = {step: loss for step, loss in expected.items() if step > 40}
    assert losses(place / "branch") == pytest.approx(rest, rel=1e-5)


@pytest.mark.slow
def test_accelerate_task_has_the_same_bits_on_any_number_of_ranks(write, run, tmp_path):
    write("accelerate")
    line = commands_in("accelerate", "strategy=exact")[0]
    run(line)
    run(line.replace("_node=2", "_node=3").replace("run.name=exact", "run.name=three"))
    place = tmp_path / "runs/moons"
    assert losses(place / "exact") == losses(place / "three")


# From lightning-hydra-template --------------------------------------------------------------------


@pytest.mark.slow
def test_project_in_the_layout_of_the_template_trains(write, tmp_path):
    need("lightning")
    write("lightning-hydra-template")
    (line,) = commands_in("lightning-hydra-template", "src/train.py")
    text = run_script(tmp_path, line)
    assert len(re.findall(r"loss 0\.\d+", text)) == 2, text


@pytest.mark.slow
def test_custom_groups_are_chosen_by_an_experiment(write, run, tmp_path):
    write("lightning-hydra-template")
    small, wide, _, large, single = commands_in("lightning-hydra-template", "-m trainer")
    run(small)
    run(wide)
    for name, width, steps in (("small", 16, 60), ("wide", 64, 30)):
        place = tmp_path / "runs/blobs" / name
        assert f"width: {width}" in (place / "config.yaml").read_text()
        assert max(losses(place)) == steps
    run(f"{wide.replace('_node=2', '_node=1')}1")
    one, two = (losses(tmp_path / "runs/blobs" / name) for name in ("wide1", "wide"))
    assert one == pytest.approx(two, rel=1e-5)
    run(large)
    run(single)


@pytest.mark.slow
def test_sweep_of_the_template_page_runs_two_jobs(write, run, tmp_path):
    write("lightning-hydra-template")
    (line,) = commands_in("lightning-hydra-template", "optim.lr=0.01,0.02")
    run(line)
    assert len(list((tmp_path / "runs/blobs").glob("rates-*"))) == 2


# All pages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_python_of_a_page_compiles(name):
    files = files_of(PAGES[name])
    assert any(path.startswith("tasks/") for path in files)
    assert any(path.startswith("conf/task/") for path in files)
    for path, text in files.items():
        if path.endswith(".py"):
            ast.parse(text, path)


@pytest.mark.parametrize("name", NAMES)
def test_error_that_a_page_promises_is_the_error(name, write, run):
    write(name)
    for line in commands_of(PAGES[name]):
        if "# error: " in line:
            assert run(line, code=2).strip() == line.split("# ")[1]


@pytest.mark.parametrize("name", NAMES)
def test_settings_and_options_that_a_page_names_exist(name):
    known = settings()
    found = set(SETTING.findall(PAGES[name])) - NOT_SETTINGS
    assert len(found) > 5 and found <= known, found - known
    files = files_of(PAGES[name])
    for group, option in CHOICE.findall(PAGES[name]):
        own = f"conf/{group}/{option}.yaml"
        assert (DOCS.parent / own).is_file() or own in files, own


def settings():
    """Return the full names of all settings that have a type."""
    hints = get_type_hints(Config)
    blocks = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    return {f"{name}.{f.name}" for name, block in blocks.items() for f in dataclasses.fields(block)}


@pytest.mark.parametrize("name", NAMES)
def test_links_of_a_page_lead_somewhere(name):
    for target in re.findall(r"\]\(([\w./-]+)\)", PAGES[name]):
        assert (DOCS / target).is_file(), target
