"""A step: it asks nothing that was known before the first one, and gives the same bits."""

import itertools
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from harness import fit, on_ranks, slow_but
from harness.code_lines import code_lines
from harness.training import compose
from tiny import Tiny, points
from torch import nn

from trainer import ConfigError, ResidentDataset, Trainer
from trainer.core.checkpoints.transaction import steps
from trainer.core.distributed.watch.heartbeat import Heartbeat
from trainer.core.loop import Calendar

PACKAGE = Path(__file__).resolve().parents[3] / "trainer"
WITHIN = range(20, 35)  # of the second epoch, 18 to 35, and of no late proof
MOST_CALLS = 70  # of functions of trainer/ in a step
MOST_FILES = 20  # that they are in
MOST_LINES = 2_000  # of code in these
FP32 = "strategy.precision=fp32"
NEVER = ["eval.every_epochs=null", "checkpoint.every_epochs=null"]


class Plain(Trainer):
    """What most tasks are: no hook of its own beside the three that a task must have."""

    def build_model(self):
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))

    def build_dataset(self, split):
        return ResidentDataset(*points(203, split))

    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="none")


def calls_of_steps(folder):
    """Return for some steps the (file, function) of each call in trainer/.

    They are within an epoch and a segment, whose first and last steps have calls of their own.
    Segments are as long as where no step takes any time.
    """
    steps = []
    begin = Heartbeat.begin_step

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            steps[-1].append((frame.f_code.co_filename, frame.f_code.co_qualname))

    def noting(self, step):
        sys.setprofile(None)
        if step in WITHIN:
            steps.append([])
            sys.setprofile(note)
        begin(self, step)

    def look(self, _):
        self._stride = 64

    Heartbeat.begin_step, Calendar._look = noting, look
    words = ["data.global_batch=11", "run.steps=38", "log.every_steps=50", *NEVER, FP32]
    Plain(compose(folder, "task=tiny", *words)).fit()
    return steps


def test_every_step_is_few_calls_in_few_files(tmp_path):
    """It looked at the step with the fewest calls, which says nothing of every second one."""
    (steps,) = on_ranks(1, calls_of_steps, tmp_path)
    assert len(steps) == len(WITHIN)
    found = max(steps, key=len)
    assert len(found) > 30, "the step was not seen"
    files = {Path(file) for step in steps for file, _ in step}
    lines = sum(len(code_lines(file.read_text(encoding="utf-8"))) for file in files)
    assert len(found) <= MOST_CALLS, found
    assert len(files) <= MOST_FILES, sorted(file.name for file in files)
    assert lines <= MOST_LINES, lines


# The calendar -------------------------------------------------------------------------------------


def segments(calendar, first=0):
    while first < calendar.num_steps:
        yield (segment := calendar.segment(first))
        first = segment.end


@pytest.mark.parametrize("first", [0, 1, 6, 7, 41])
def test_segments_follow_each_other_and_end_where_something_is_due(first):
    periods = {"log": [7], "eval": [None, 12], "checkpoint": [5, None], "epoch": [4]}
    calendar = Calendar(periods, [3, 50], 120)
    found = list(segments(calendar, first))
    assert [each.first for each in found] == [first, *(each.end for each in found[:-1])]
    assert found[-1].end == 120
    every = range(first + 1, 121)
    due = {s for s in every if any(calendar.is_due(name, s) for name in periods)}
    due |= {3, 50} & {*every}
    assert due <= {each.end for each in found}
    assert {each.logged for each in found} - {-1} == {s for s in every if s % 7 == 0} | {120}


def test_steps_without_anything_due_make_long_segments(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr("time.monotonic", lambda: next(clock) / 1e6)  # steps take no time
    calendar = Calendar({"log": [1000]}, (), 2000)
    sizes = [each.end - each.first for each in segments(calendar)]
    assert sizes[0] == 1 and max(sizes) == 64
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))  # steps take a second
    slow = Calendar({"log": [1000]}, (), 20)
    assert {each.end - each.first for each in segments(slow)} == {1}


# What happens at, before and after the end of a segment -------------------------------------------


class Event(Tiny):
    """Something happens in step 6, once."""

    kind = ""
    has_begun = False
    happened = False

    def train_step(self, batch):
        self.has_begun = True
        outcome = super().train_step(batch)
        if self.step == 5 and self.kind == "stop":
            self.stop("the test asks for it")
        if self.step == 5 and self.kind == "save":
            self.save_checkpoint()
        if self.step == 5 and self.kind == "signal" and not Event.happened:
            Event.happened = True
            os.kill(os.getpid(), signal.SIGTERM)
        return outcome

    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        is_now = self.step == 5 and self.has_begun and self.model.training
        if is_now and self.kind in ("bad", "rollback") and not Event.happened:
            Event.happened = self.kind == "rollback"
            return values * float("nan")
        return values


WORDS = ["task=tiny", "data.global_batch=12", "run.steps=12", "checkpoint.keep_last=9"]
MORE = {
    "stop": [],
    "save": [],
    "signal": [],
    "bad": ["run.on_bad_step=skip"],
    "rollback": ["run.on_bad_step=rollback", "checkpoint.every_steps=4"],
}


def happen(folder, kind, every):
    Event.kind, Event.happened = kind, False
    words = [*WORDS, *NEVER, f"log.every_steps={every}", *MORE[kind]]
    found = fit(folder / f"{kind}-{every}", *words, task=Event)
    weights = {name: tensor.tolist() for name, tensor in found["weights"].items()}
    saved = sorted(steps(found["directory"] / "checkpoints"))
    return found["step"], found["code"], saved, weights


@pytest.mark.parametrize("kind", slow_but(MORE, "stop", "rollback"))
def test_an_event_is_the_same_wherever_segments_end(kind, tmp_path):
    every, *others = (on_ranks(1, happen, tmp_path, kind, n)[0] for n in (1, 5, 6, 7, 12))
    assert all(other == every for other in others), (every, others)
    ends = {"stop": 8, "signal": 8}  # it goes with the next step, whose outcome is read in one more
    assert every[0] == ends.get(kind, 12)
    saved = {"save": [6, 12], "rollback": [4, 8, 12]}
    assert every[2] == saved.get(kind, [every[0]])


@pytest.mark.parametrize("end", slow_but([5, 6, 7], 6))
def test_a_resume_where_a_segment_ends_is_as_without_it(end, tmp_path):
    def body(folder, *words):
        found = fit(folder, *WORDS, *NEVER, "log.every_steps=6", *words, task=Tiny)
        return found["directory"], {n: t.tolist() for n, t in found["weights"].items()}

    ((_, whole),) = on_ranks(1, body, tmp_path / "whole")
    ((first, _),) = on_ranks(1, body, tmp_path / "part", f"run.steps={end}")
    more = [f"run.resume={first}", "run.name=more"]
    ((_, resumed),) = on_ranks(1, body, tmp_path / "part", *more)
    assert resumed == whole


# A guess about the first step that later ones do not keep -----------------------------------------


class Changes(Tiny):
    """From step 4 on, the loss returns something else than before."""

    kind = ""

    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        if self.step < 4:
            return values
        if self.kind == "weights":
            return values, torch.ones_like(values)
        if self.kind == "positions":
            return values.unsqueeze(1).expand(-1, 3)
        if self.kind == "scalar":
            return values.mean()
        if self.kind == "detached":
            return values.detach()
        if self.kind == "rows":
            return values[:-1]
        return values.float().double() if self.kind == "dtype" else values


LINES_OF = {
    "weights": "loss returned weights in one step and none in another: always return",
    "positions": "loss returned 3 values per example after 1: return (values, weights)",
    "scalar": "loss returned a scalar: must be a value per example",
    "detached": "loss returned float64 values without a gradient: must be computed from",
    "rows": "the first axis must be the 12 examples of the batch",
}


def change(folder, kind, *words):
    Changes.kind = kind
    try:
        found = fit(
            folder, *WORDS, *NEVER, "run.steps=6", "log.every_steps=1", *words, task=Changes
        )
    except ConfigError as error:
        return str(error)
    return found["losses"]


@pytest.mark.parametrize("kind", LINES_OF)
def test_a_loss_that_changes_in_mid_run_is_one_line(kind, tmp_path):
    (line,) = on_ranks(1, change, tmp_path, kind)
    assert LINES_OF[kind] in line, line


def test_a_loss_of_another_dtype_in_mid_run_has_the_same_mean(tmp_path):
    fp32 = "strategy.precision=fp32"
    (one,) = on_ranks(1, change, tmp_path / "one", "", fp32)
    (other,) = on_ranks(1, change, tmp_path / "other", "dtype", fp32)
    assert one == pytest.approx(other, rel=1e-6) and len(one) == 6


class Longer(Plain):
    """Inputs of another dtype, shape or class from step 4 on."""

    kind = ""

    def augment(self, inputs, targets, random, train):
        if not train or self.step < 4 or not self.kind:
            return inputs, targets
        if self.kind == "double":
            return inputs.double(), targets
        return (inputs, inputs.new_zeros(len(inputs), 2)), targets

    def build_model(self):
        return TakesMore(super().build_model())


class TakesMore(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, inputs, more=None):
        return self.inner(inputs)


@pytest.mark.parametrize("kind", ["double", "more"])
def test_inputs_of_another_form_in_mid_run_are_converted_as_the_first(kind, tmp_path):
    def body(folder, kind):
        Longer.kind = kind
        return fit(folder, *WORDS, *NEVER, FP32, "log.every_steps=1", task=Longer)["losses"]

    (one,) = on_ranks(1, body, tmp_path / "one", "")
    assert on_ranks(1, body, tmp_path / "other", kind) == [one]


# Two runs in one process --------------------------------------------------------------------------


def test_a_second_run_inherits_no_flag_of_torch(tmp_path):
    def body(folder, *every):
        torch.set_num_threads(2)
        found = []
        for number, words in enumerate(every):
            found.append(fit(folder / str(number), *WORDS, *NEVER, *words)["losses"])
            assert torch.get_num_threads() == 2
            assert not torch.are_deterministic_algorithms_enabled()
        return found[-1]

    plain, exact = ["strategy=single", FP32], ["strategy=exact", "strategy.precision=fp64"]
    (alone,) = on_ranks(1, body, tmp_path / "alone", plain)
    assert on_ranks(1, body, tmp_path / "after", exact, plain) == [alone]
