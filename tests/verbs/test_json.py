"""--json of the verbs: standard output is one JSON document, whatever else is printed."""

import json
import sys

import pytest
from harness import CONF, Command

from trainer.verbs import VERBS

DIRS = ["--config-dir", CONF]
NOISY = """
import os
from tiny import Tiny

class Noisy(Tiny):
    def build_model(self):
        print("a line of the task")
        os.system("echo a line of a child process")
        return super().build_model()
"""
NOISE = ("a line of the task", "a line of a child process")


@pytest.fixture(scope="module")
def at_home(tmp_path_factory):
    """Return a command in a folder with the ended run `runs/tiny/a` and its task, which prints."""
    command = Command(tmp_path_factory.mktemp("json"))
    (command.folder / "noisy.py").write_text(NOISY)
    (command.folder / "lockstep.yaml").write_text("packages: [noisy, broken_task]\n")
    done = command(*DIRS, "task=tiny", "task.trainer=noisy.Noisy", "run.name=a", "log.trackers=[]")
    assert done.returncode == 0, done.stderr
    assert all(line in done.stdout for line in NOISE)
    return command


RUN = "runs/tiny/a"
DOCUMENTS = {  # arguments; exit code, result and the other keys
    "show one": ([RUN, *DIRS], 0, "done", {"state", "best", "audit", "checkpoints", "command"}),
    "show a checkpoint": ([f"{RUN}/checkpoints/step-00000020"], 0, "valid", {"checkpoints"}),
    "show two": ([RUN, RUN], 0, "same bits", {"runs", "verdicts", "settings", "facts"}),
    "show a page": ([RUN, *DIRS, "out=page.html"], 0, "done", {"files"}),
    "show a step": (
        [RUN, "step=12", *DIRS],
        *(0, "finite", {"step", "from_step", "mean_loss", "not_finite", "largest"}),
    ),
    "check": ([], 0, "ok", {"checks"}),
    "check the plan": (
        ["task=tiny", "ranks=1", *DIRS],
        *(0, "planned", {"memory", "messages", "checkpoint", "fits"}),
    ),
    "check all": (["task=tiny", *DIRS], 0, "ready", {"checks", "plan"}),
    "use": ([RUN, *DIRS], 0, "evaluated", {"step", "eval/loss", "eval/accuracy"}),
    "use to predict": (
        [RUN, *DIRS, "out=predictions.npz"],
        *(0, "written", {"file", "step", "split", "examples", "names"}),
    ),
    "new": (["my-task"], 0, "written", {"folder", "num_files", "command"}),
    "list": ([], 0, "listed", {"tasks", "recipes", "strategies", "runs"}),
    "shards": (
        ["write", "task=tiny", *DIRS, "to=shards"],
        *(0, "written", {"url", "examples", "shards"}),
    ),
}
NO_DOCUMENT = {"sweep", "train"}
LOOP = f"""{sys.executable} -c '
import torch
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], 0.1)
for _ in range(3):
    (weight * weight).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
'"""
SLOW = {
    "prove two": ([LOOP, LOOP, "steps=3"], 0, "same", {"is_same", "differences", "notes"}),
    "use to export": (
        [RUN, "out=model.safetensors", *DIRS],
        *(0, "written", {"format", "step", "files", "notes"}),
    ),
    "prove": (
        ["task=tiny", *DIRS, "layouts=ranks-2", "steps=3"],
        *(0, "proved", {"steps", "findings", "left_out"}),
    ),
}
NEEDED = {"show a page": "jinja2"}
QUICK = ("show one", "show two", "use", "new", "list")
CASES = [
    verb if verb in QUICK else pytest.param(verb, marks=pytest.mark.slow)
    for verb in (*DOCUMENTS, *SLOW)
]


def test_every_verb_has_a_case():
    assert {case.split()[0] for case in (*DOCUMENTS, *SLOW, *NO_DOCUMENT)} == set(VERBS)


@pytest.mark.parametrize("verb", CASES)
def test_standard_output_is_one_document(verb, at_home):
    pytest.importorskip(NEEDED.get(verb, "json"))
    words, code, result, keys = {**DOCUMENTS, **SLOW}[verb]
    done = at_home(*words, "--json", verb=f"trainer.{verb.split()[0]}")
    assert done.returncode == code, done.stderr
    document = json.loads(done.stdout)
    assert [*document][:2] == ["code", "result"] and document["code"] == code
    assert document["result"] == result or verb == "check"  # a busy machine warns
    assert keys <= set(document)


def test_what_a_task_prints_goes_to_standard_error(at_home):
    done = at_home(RUN, *DIRS, "--json", verb="trainer.use")
    assert json.loads(done.stdout)["step"] == 20
    assert all(line in done.stderr for line in NOISE)
    done = at_home(RUN, *DIRS, verb="trainer.use")
    assert all(line in done.stdout for line in NOISE)


def test_ranks_print_one_document_together(at_home):
    done = at_home(RUN, *DIRS, "--json", ranks=2, verb="trainer.use")
    assert done.returncode == 0 and json.loads(done.stdout)["step"] == 20, done.stderr


def test_exported_weights_are_one_document(at_home, tmp_path):
    target = str(tmp_path / "weights.safetensors")
    done = at_home(RUN, f"out={target}", "--stored", "--json", verb="trainer.use")
    document = json.loads(done.stdout)
    known = {"code": 0, "result": "written", "file": target}
    assert document == {**known, "tensors": 4, "step": 20, "left_out": 0}


def test_failed_check_has_its_code_and_result(command, at_home):
    broken = command.folder / "broken"
    step = at_home.folder / RUN / "checkpoints/step-00000020"
    for path in step.iterdir():
        copy = broken / "checkpoints" / step.name / path.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes()[:-1])
    done = command("broken", "--json", verb="trainer.show")
    document = json.loads(done.stdout)
    assert (done.returncode, document["code"], document["result"]) == (1, 1, "1 invalid")
    assert document["checkpoints"][0]["error"]


ERRORS = {
    "show nowhere": "nowhere: has no config.json and no checkpoints; give one or more run "
    "directories: python -m trainer.show RUN",
    "show runs --jsn": "--jsn is not a flag: allowed are --config-dir, --help, --json, --long and "
    "key=value; did you mean --json?",
    "check task=tiny --jsn": "--jsn is not a flag: allowed are --config-dir, --help, --json and "
    "key=value; did you mean --json?",
    "use runs/tiny/a splt=test": "splt is not a setting; did you mean split?",
}


@pytest.mark.parametrize("line", ERRORS)
def test_error_is_a_document_and_a_line(line, command):
    verb, *words = line.split()
    done = command(*words, "--json", verb=f"trainer.{verb}")
    assert done.returncode == 2
    assert done.stderr == f"error: {ERRORS[line]}\n"
    assert json.loads(done.stdout) == {"code": 2, "error": ERRORS[line]}


def test_error_of_a_task_is_a_document_and_a_traceback(at_home):
    broken = NOISY.replace("return super().build_model()", "return 1 / 0")
    (at_home.folder / "broken_task.py").write_text(broken)
    words = [RUN, *DIRS, "task.trainer=broken_task.Noisy", "--json"]
    done = at_home(*words, verb="trainer.use")
    document = json.loads(done.stdout)
    assert document["code"] == done.returncode != 0
    assert "division by zero" in document["error"] and "\n" not in document["error"]


def test_training_names_the_files_that_it_writes(command):
    done = command("task=tiny", *DIRS, "--json")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "error: --json: is a flag of the other verbs; read metrics.jsonl and exit.json of the "
        "run, or sweep.json of a sweep\n"
    )


def test_help_has_the_flag(command):
    assert "--json prints one JSON object" in command("--help", verb="trainer.show").stdout
    assert "--json" not in command("--help").stdout
