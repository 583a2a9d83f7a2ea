"""The page for users of other frameworks: its files are written and all its commands are run."""

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

from trainer.core.config.schema import Config

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "migrate.md").read_text(encoding="utf-8")
HEADINGS = ["", *re.findall(r"^## (.*)$", PAGE, re.M)]  # "": the top of the page
SECTIONS = dict(zip(HEADINGS, re.split(r"^## ", PAGE, flags=re.M), strict=True))
DDP = "From a DDP script"
LIGHTNING = "From Lightning"
ACCELERATE = "From Accelerate"
TEMPLATE = "From lightning-hydra-template"
HUGGING_FACE = "From Hugging Face's Trainer"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.S | re.M)
PATH = re.compile(r"^# ([\w./-]+\.(?:py|yaml))$", re.M)
SETTING = re.compile(r"`((?:run|data|strategy|dist|launch|checkpoint|eval|log|task)\.\w+)[=`]")
CHOICE = re.compile(r"`(task|strategy|dist|launch|optim|schedule|experiment)=(\w+)`")
NOT_SETTINGS = {"task.options"}  # a group whose names are the task's


def files_of_page():
    """Return path to text of the files of the page. A block has one file, and begins with a comment
    with its path, which may follow `# @package _global_`."""
    blocks = [block for kind, block in FENCE.findall(PAGE) if kind != "sh"]
    return {PATH.search(block)[1]: block for block in blocks}


def commands_of(heading):
    """Return the command lines in the sh blocks of a section."""
    blocks = [block for kind, block in FENCE.findall(SECTIONS[heading]) if kind == "sh"]
    return [line for block in blocks for line in block.splitlines()]


@pytest.fixture
def page(tmp_path):
    """Write the files of the page."""
    for path, text in files_of_page().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)


@pytest.fixture
def run(command):
    """Run a command line of the page that starts Lockstep; return its output."""

    def run_line(line):
        program, *words = shlex.split(line, comments=True)
        at = words.index("-m")
        launcher, verb, rest = words[:at], words[at + 1], words[at + 2 :]
        ranks = int(launcher[-1].split("=")[1]) if program == "torchrun" else 0
        done = command(*rest, ranks=ranks, verb=verb)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run_line


def run_script(folder, line):
    """Run a command line of the page that starts another program, in a real process; return its
    output."""
    program, *rest = shlex.split(line, comments=True)
    assert program == "torchrun"
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *rest],
        cwd=folder,
        env=environment_of_a_command(),
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


def losses(directory):
    """Return step to loss from metrics.jsonl."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def printed(text):
    """Return step to loss from the output of a script."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", text)}


def test_first_command_of_the_page_writes_a_project(run):
    (line,) = commands_of("")
    assert "written: my-task/" in run(line)


# From a DDP script --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ddp_script_learns_other_things_on_other_ranks_and_repeats_data(
    is_real, page, command, tmp_path
):
    lines = commands_of(DDP)[:3]
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
def test_ddp_task_learns_the_same_on_another_number_of_ranks(page, run, tmp_path):
    one, two, evaluate, resume, audit, verify = commands_of(DDP)[3:]
    assert "drops 43 examples per epoch" in run(one)
    run(two)
    found = {name: losses(tmp_path / "runs/rings" / name) for name in ("one", "two")}
    assert len(found["one"]) == 12 and found["one"] == pytest.approx(found["two"], rel=1e-3)
    hits = json.loads(run(evaluate))["eval/accuracy"] * 203
    assert hits == pytest.approx(round(hits), abs=1e-9)
    run(resume)
    assert max(losses(tmp_path / "runs/rings/two")) == 90
    assert "nothing was repeated or skipped" in run(audit)
    assert "proved: all runs learned the same" in run(verify)


@pytest.mark.slow
def test_losses_agree_to_ten_digits_in_fp64(page, run, tmp_path):
    for line in commands_of(DDP)[3:5]:
        run(f"{line} strategy.precision=fp64")
    one, two = (losses(path) for path in sorted((tmp_path / "runs").glob("*/*")))
    assert one == pytest.approx(two, rel=1e-10)


# From Lightning -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_task_with_parameter_groups_starts_its_ranks_itself(page, run, tmp_path):
    (line,) = commands_of(LIGHTNING)
    run(line)
    (directory,) = (tmp_path / "runs/rings").iterdir()
    assert "tasks.decay.Decay" in (directory / "config.json").read_text()


# From Accelerate ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("word", "limit"), [("", 1e-5), ("strategy=exact", 0)])
def test_checkpoint_is_resumed_on_another_number_of_ranks(word, limit, page, run, tmp_path):
    accumulated, branch = commands_of(ACCELERATE)
    run(f"{accumulated} {word}")
    run(branch)
    place = tmp_path / "runs/rings"
    rest = {step: loss for step, loss in losses(place / "accumulated").items() if step > 40}
    found = losses(place / "branch")
    assert len(rest) == 4 and found == pytest.approx(rest, rel=limit, abs=0)


# From lightning-hydra-template --------------------------------------------------------------------


@pytest.mark.slow
def test_experiment_chooses_the_task_and_a_sweep_runs_two_jobs(page, run, tmp_path):
    short, sweep = commands_of(TEMPLATE)
    run(short)
    assert max(losses(tmp_path / "runs/rings/short")) == 30
    run(sweep)
    assert len(list((tmp_path / "runs/rings").glob("rates-*"))) == 2


# From Hugging Face's Trainer ----------------------------------------------------------------------


@pytest.mark.slow
def test_finetune_trains_a_model_of_transformers(run, tmp_path):
    need("transformers")
    need("datasets")
    (line,) = commands_of(HUGGING_FACE)
    run(line)
    (directory,) = (tmp_path / "runs/finetune").iterdir()
    assert "eval/accuracy" in (directory / "metrics.jsonl").read_text()


# The whole page -----------------------------------------------------------------------------------


def test_all_sections_have_tests():
    assert HEADINGS == ["", DDP, LIGHTNING, ACCELERATE, TEMPLATE, HUGGING_FACE]


def test_python_of_the_page_compiles():
    files = files_of_page()
    assert {"rings.py", "train.py", "tasks/rings.py", "conf/task/rings.yaml"} <= {*files}
    for path, text in files.items():
        if path.endswith(".py"):
            ast.parse(text, path)


@pytest.mark.parametrize("heading", HEADINGS[1:])
def test_settings_and_options_that_a_section_names_exist(heading):
    known = settings()
    found = set(SETTING.findall(SECTIONS[heading])) - NOT_SETTINGS
    assert len(found) > 5 and found <= known, found - known
    for group, option in CHOICE.findall(SECTIONS[heading]):
        own = f"conf/{group}/{option}.yaml"
        assert (DOCS.parent / own).is_file() or own in files_of_page(), own


def settings():
    """Return the full names of all settings that have a type."""
    hints = get_type_hints(Config)
    blocks = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    return {f"{name}.{f.name}" for name, block in blocks.items() for f in dataclasses.fields(block)}


def test_links_of_the_page_lead_somewhere():
    for target in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", PAGE):
        assert (DOCS / target).is_file(), target
