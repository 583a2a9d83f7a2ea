"""log.observers: rank 0 tells them about a run, and they cannot change or end it."""

import json
import re
import sys
import time
import types
from pathlib import Path

import pytest
from harness import fit_on
from harness.training import compose

from trainer import ConfigError
from trainer.core.record import trackers

WORDS = ["task=tiny", "run.steps=6", "log.every_steps=2", "eval.every_steps=3", "run.name=a"]
WORDS += ["checkpoint.every_steps=3", "checkpoint.keep_best=0"]
TASKS = Path(__file__).resolve().parents[3] / "docs/tasks.md"
PACKAGES = "task.packages=[observers_for_tests]"


def test_an_observer_hears_of_logs_evaluations_checkpoints_and_the_end(tmp_path):
    run = fit_on(2, tmp_path, *WORDS, PACKAGES, "log.observers=[observers_for_tests.Diary]")
    told = [
        json.loads(line) for line in (run["directory"] / "diary.jsonl").read_text().splitlines()
    ]
    assert told[0] == ["start", 0, "tiny"] and told[-1] == ["end", 0, "done"]
    assert [fact[1] for fact in told if fact[0] == "scalars" and "train/loss" in fact[2]] == [
        2,
        4,
        6,
    ]
    assert [fact[1:] for fact in told if fact[0] == "evaluation"] == [
        [3, ["eval/accuracy", "eval/loss"]],
        [6, ["eval/accuracy", "eval/loss"]],
    ]
    saved = [fact[1:] for fact in told if fact[0] == "checkpoint"]
    assert saved == [[3, "step-00000003"], [6, "step-00000006"]]
    rows = [
        json.loads(line) for line in (run["directory"] / "metrics.jsonl").read_text().splitlines()
    ]
    assert sum("train/loss" in row for row in rows) == 3  # it cleared its own copies only


@pytest.mark.parametrize(
    ("name", "why"), [("Broken", "no connection"), ("Stuck", "has not returned within 0 s")]
)
def test_an_observer_that_fails_is_named_and_the_run_goes_on(
    name, why, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(trackers, "OBSERVER_PATIENCE_S", 0.2)
    plain = fit_on(1, tmp_path / "plain", *WORDS)
    begun = time.monotonic()
    run = fit_on(
        1, tmp_path / "own", *WORDS, PACKAGES, f"log.observers=[observers_for_tests.{name}]"
    )
    assert time.monotonic() - begun < 30
    said = capfd.readouterr().out
    assert said.count("warning: log.observers: ") == 1
    assert (
        f"warning: log.observers: observers_for_tests.{name}: {why}; the run continues" in said
        or (f"warning: log.observers: observers_for_tests.{name}: has not taken everything" in said)
    )
    assert run["losses"] == plain["losses"]


def test_the_observer_for_trackio_in_the_documentation_calls_it_as_it_is_called(tmp_path):
    """trackio itself cannot be installed beside the tested versions; it was tried by hand."""
    calls = []

    def init(project, name=None, config=None, resume="never"):  # as in trackio 0.43.0
        calls.append((project, name, config["log.every_steps"], resume))
        return types.SimpleNamespace(log=log, finish=lambda: calls.append("finished"))

    def log(metrics, step=None):
        calls.append((step, sorted(metrics)))

    (block,) = re.findall(r"```python\n(import trackio\n.*?)```", TASKS.read_text(), re.DOTALL)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "trackio", types.SimpleNamespace(init=init))
        exec(block, found)
    watch = found["Trackio"](compose(tmp_path, *WORDS), tmp_path / "a")
    watch.start(0)
    watch.scalars(2, types.MappingProxyType({"train/loss": 1.0}))
    watch.end(0, "done")
    assert calls == [("tiny", "a", 2, "allow"), (2, ["train/loss"]), "finished"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "observers_for_tests.NoObserver",
            "log.observers=observers_for_tests.NoObserver: must be a subclass of",
        ),
        (
            "observers_for_tests.Nobody",
            "log.observers=observers_for_tests.Nobody: observers_for_tests has no Nobody",
        ),
        ("os.system", "log.observers=os.system: must"),
    ],
)
def test_a_wrong_name_is_one_line(name, line, tmp_path):
    with pytest.raises((ConfigError, AssertionError), match=line):
        fit_on(1, tmp_path, *WORDS, PACKAGES, f"log.observers=[{name}]")
