"""`trainer.verify` finds and explains each dependence of a run on its layout, and proves correct
tasks."""

import inspect
import multiprocessing.connection
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import wrong_tasks
from harness import CONF, ended, join, launch, on_ranks, slow_but, wait_for
from harness.launch import descendants_of
from test_proof import NAMED
from tiny import Tiny
from torch import nn

from trainer.base.errors import ConfigError
from trainer.base.process.child import last_words
from trainer.base.process.table import usable_cores
from trainer.core.distributed.launch import fork_ranks
from trainer.core.trainer import Trainer
from trainer.verify import recorded_run
from trainer.verify.command import verify
from trainer.verify.evidence import describe_difference, rows_of
from trainer.verify.layout_runs import TrialRuns
from trainer.verify.layouts import LAYOUTS


@pytest.fixture
def prove(monkeypatch, capfd, tmp_path_factory):
    """Run the verb with forked ranks instead of launched ones; return exit code and output."""

    def launch(self, spec, ranks, is_apart=False, threads=None):
        on_ranks(ranks, recorded_run.main, [str(spec)])
        return 0, ""

    def run(task, *words):
        monkeypatch.setattr(TrialRuns, "launch", launch)
        trainer = f"task.trainer={task.__module__}.{task.__name__}"
        arguments = ["--config-dir", CONF, "task=tiny", trainer, "optim.lr=0.3", *words]
        code = verify(arguments, tmp_path_factory.mktemp("runs"))
        return code, capfd.readouterr().out

    return run


SOME = ["ranks-2", "accumulation", "fsdp-2"]


@pytest.mark.parametrize("chosen", [SOME, pytest.param([], marks=pytest.mark.slow)])
def test_task_that_is_right_is_proved_in_every_layout(chosen, prove):
    words = [f"layouts={','.join(chosen)}", "steps=5"] if chosen else []
    code, said = prove(Tiny, "task.options.weights=true", "strategy.precision=fp32", *words)
    assert code == 0 and "proved: all runs learned the same" in said
    every = [name for name, each in LAYOUTS.items() if {*each.axes} <= {"shard"}]
    for layout in chosen or every:
        rows = [line.split() for line in said.splitlines() if line.split()[:1] == [layout]]
        assert [(row[1], row[2], row[-1]) for row in rows] == [
            ("fp64", "same", "agrees"),
            ("fp32", "same", "agrees"),
        ]


OF_THE_RANK = "differs on rank 1: the same rows have another loss or gradient there"
DATA = "the data set, or augment, depends on the rank or draws unseeded random numbers"
READING = "it depends on {} of the data set, which reading changes"
METRICS = "training agrees and evaluation does not: metrics, summarize or the eval data depend on"
RATE = "here; build_optimizer, schedule or train_step depend on rank or clock"
WEIGHTS = "rank 1 has other weights than rank 0 after 1 step: optimizer, schedule or train_step"

PLAIN_NORM = (
    "plain BatchNorm (1) normalises over the rows of a micro-batch, whose number the layout "
    "changes; give run.norm_rows=<rows>, strategy.sync_batchnorm=true or strategy=exact"
)
# Each mistake that the start of a run names has the reason of the start (test_proof.py); the others
# mostly have a second one of their kind. The first of a kind is a default test.
WRONG = {
    **NAMED,
    "OwnData": f"differs on rank 1: {DATA}",
    "DataOfProcess": DATA,
    "DataOfTheSystem": DATA,
    "OwnAugmentation": "has other values when it is read again",
    "ReplaysHardest": "rank 1 has other values of self.hardest",
    "RatioOfLosses": "rank 1 has other values of self.ratio",
    "DataOfReads": READING.format("reads"),
    "DataInPlace": READING.format("inputs"),
    "LossOfTheRank": f"the loss {OF_THE_RANK}",
    "ModelOfTheRank": f"the model (Sequential) {OF_THE_RANK}",
    "Norm": PLAIN_NORM,
    "NormOfItsOwn": PLAIN_NORM,
    "LateQueue": "rank 1 has other values of self.queue",
    "GradNorm": "rank 1 has other values of self.scale",
    "MetricsOfTheRank": METRICS,
    "MetricsOfTheBatch": METRICS,
    "RateOfTheLayout": RATE,
    "ScheduleOfTheClock": WEIGHTS,
    "ScheduleOfTheRank": RATE,
    "StepOfTheClock": WEIGHTS,
    "OptimizerOfTheRank": WEIGHTS,
    "OptimizerUnseeded": WEIGHTS,
    "DropsByFunction": "run.dropout=torch draws per micro-batch, whose size the layout changes",
}
FIRST = ("OwnData", "LossOfTheBatch", "Norm")
LATER = ("ThresholdInAttribute", "ThresholdInLoss")  # than the steps of a verification
OF_MICRO_BATCHES = (
    *("SpectralNorm", "OldSpectralNorm", "CountedCalls", "StateOfCalls"),
    *("UpdatesEachMicroBatch", "UpdatesFirstMicroBatch", "AugmentCoin", "AugmentNumpyCoin"),
    *[name for name in WRONG if name.startswith("Threshold")],
)


@pytest.mark.parametrize(
    "name",
    slow_but([name for name in WRONG if name not in LATER], *FIRST),
)
def test_dependence_of_a_run_on_its_layout_is_found_and_explained(name, prove):
    words = ["run.dropout=torch"] if name == "DropsByFunction" else []
    layout = "accumulation" if name in OF_MICRO_BATCHES else "ranks-2"
    code, said = prove(getattr(wrong_tasks, name), f"layouts={layout}", *words)
    assert code == 1 and "NOT proved: 1 of 2" in said
    lines = [
        line for line in said.splitlines() if line.startswith(f"{layout}, fp64: DIFFERENT: first: ")
    ]
    assert len(lines) == 1 and WRONG[name] in lines[0], said
    if name == "OwnData":
        values = r"; inputs\[\d\] is \S+ there and \S+ on one rank, 1e-01 apart"
        assert re.search(values, lines[0]), said


def test_the_values_that_differ_most_are_shown_and_nan_is_equal_to_nan():
    nan = float("nan")
    inputs = {"a": torch.tensor([[1.0, nan, 2.0], [3.0, nan, nan]])}
    one = rows_of(inputs, torch.tensor([0, 1]), 3)
    other = rows_of({"a": inputs["a"] + 0.25}, torch.tensor([0, 3]), 3)
    assert describe_difference(one[0], one[0], "A") == ""
    line = "inputs['a'][0] is 1.25 there and 1 on A, 2e-01 apart"
    assert describe_difference(one[0], other[0], "A") == line
    line = "targets[0] is 3 there and 1 on A, 2e+00 apart"
    assert describe_difference(one[1], other[1], "A") == line
    assert describe_difference({"x": [0.0]}, {"x": [nan]}, "A").endswith(", inf apart")
    line = "x has 2 elements there and 1 on A"
    assert describe_difference({"x": [0.0]}, {"x": [0.0, 1.0]}, "A") == line


@pytest.mark.parametrize("name", slow_but(["DropsByFunction", "Norm"], "Norm"))
def test_dropout_and_groups_of_rows_are_proved(name, prove):
    words = ["run.norm_rows=4", "data.global_batch=24"] if name == "Norm" else []
    code, said = prove(getattr(wrong_tasks, name), "layouts=ranks-3,accumulation", *words)
    assert code == 0, said


FAILED = """
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/home/me/tasks/mine.py", line 12, in loss
    raise ValueError("a " + "b")
    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/env/lib/site-packages/torch/functional.py", line 3, in f
ValueError: a b

During handling of the above exception, another exception occurred:
RuntimeError: other
"""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (FAILED, "ValueError: a b (/home/me/tasks/mine.py:12, in loss)"),
        (
            f"error: another rank has ended\n{FAILED}",
            "ValueError: a b (/home/me/tasks/mine.py:12, in loss)",
        ),
        (f"{FAILED}error: loss returned a scalar", "loss returned a scalar"),
        ("error: another rank has ended", "another rank has ended"),
        ("Killed", "Killed"),
        ("", "failed"),
    ],
)
def test_failed_ranks_are_reported_with_the_error_and_its_location(said, told):
    assert last_words(said) == told


@pytest.mark.parametrize(
    "word", ["layouts=", "layouts=[]", "kills=2", "--resume layouts=ranks-2", "steps"]
)
def test_settings_that_would_prove_nothing_are_refused(word, tmp_path):
    with pytest.raises(ConfigError, match=rf"^'?{re.escape(word.split()[-1])}'?.*"):
        verify(["--config-dir", CONF, "task=tiny", *word.split()], tmp_path)


@pytest.mark.slow
def test_batchnorm_is_proved_once_it_is_synchronised(prove):
    assert (
        prove(wrong_tasks.Norm, "layouts=ranks-2,ranks-3", "strategy.sync_batchnorm=true")[0] == 0
    )


class Cubed(Tiny):
    """Task with a large rounding difference in fp32, which is not the fault of the task."""

    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        kick = (values.detach() * 1e6).frac() if values.dtype == torch.float32 else 0.0
        return values + kick * outputs.sum(1)


@pytest.mark.slow
def test_difference_only_in_the_precision_of_the_task_is_rounding(prove):
    words = ["layouts=ranks-3", "strategy.precision=fp32", "optim=adamw", "optim.lr=0.1"]
    code, said = prove(Cubed, *words)
    assert code == 0, said
    expected = "fp64 agrees, so this is rounding, amplified by AdamW (near zero gradients)"
    assert any(
        line.startswith("ranks-3, fp32: rounding") and line.endswith(expected)
        for line in said.splitlines()
    )


class InBf16(nn.Module):
    """Computes a layer in bfloat16 by hand, in a model of any dtype."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        weight, bias = self.layer.weight.bfloat16(), self.layer.bias.bfloat16()
        return nn.functional.linear(x.bfloat16(), weight, bias).to(x.dtype)


class PartlyNarrow(Tiny):
    def build_model(self):
        return nn.Sequential(nn.Linear(4, 16), InBf16(), nn.GELU(), nn.Linear(16, 3))


def test_limits_are_those_of_the_narrowest_dtype_inside_a_model(prove):
    code, said = prove(PartlyNarrow, "layouts=ranks-2", "steps=5")
    assert code == 0, said
    line = "fp64: a part of the model computes in bf16, so limits are its rounding"
    assert line in said.splitlines()


def test_run_that_learned_nothing_proves_nothing(prove):
    code, said = prove(Tiny, "layouts=ranks-2", "optim.lr=0")
    assert code == 1
    assert "one rank, fp64: PROVES NOTHING: nothing was learned; raise steps or optim.lr" in said


class TwoLosses(Tiny):
    """Task with two updates per step: the second loss depends on the rank, the first is correct."""

    def other(self, outputs, targets):
        return outputs.square().mean(1) * self.world.world_size

    def train_step(self, batch):
        first = self.update(batch, name="first")
        return join(first, self.update(batch, self.other, name="second"))


def test_losses_of_a_custom_train_step_are_compared_too(prove):
    code, said = prove(TwoLosses, "layouts=ranks-2")
    assert (
        code == 1 and "one rank, fp64: reference: " in said and "ranks-2, fp64: DIFFERENT" in said
    )


class OwnNames(Tiny):
    """Task with names that a recorder might use, and with its own `update`."""

    notes = 2.0

    def update(self, batch, *arguments, **named):
        self._is_stepping = self._kill = "the task's"
        return super().update(batch, self.doubled, *arguments, **named)

    def doubled(self, outputs, targets):
        return self.loss(outputs, targets) * self.notes


def test_names_of_the_task_stay_its_own(prove):
    assert prove(OwnNames, "layouts=ranks-2")[0] == 0


class OneInput(Tiny):
    """Task without targets, with an output that has no rows."""

    def split_batch(self, batch):
        return batch[0], None

    def augment(self, inputs, targets, random, train):
        return inputs, targets

    def build_model(self):
        return WithNorm(super().build_model())

    def loss(self, outputs, targets):
        return outputs[0].square().mean(1)

    def metrics(self, outputs, targets):
        return {}


class WithNorm(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x), self.net[0].weight.norm()


def test_task_without_targets_is_proved(prove):
    assert prove(OneInput, "layouts=ranks-2")[0] == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--resume", "steps=3"],
            r"^steps=3: must be at least 5 with --resume, to kill after a save$",
        ),
        (
            ["layouts=rank-2"],
            r"^layouts=rank-2: must be one of ranks-2, ranks-3, accumulation, .* or ranks-<n>$",
        ),
        (["steps=0"], r"^steps=0: must be an integer of at least 1$"),
        (["optim.lrr=1"], r"^optim.lrr is not a setting; did you mean optim.lr\?$"),
    ],
)
def test_bad_arguments_are_one_line(words, line, prove):
    with pytest.raises(ConfigError, match=line):
        prove(Tiny, *words)


WORDS = ["--config-dir", CONF, "task=tiny"]


@pytest.mark.slow
def test_run_that_is_killed_and_resumed_has_the_same_bits_by_the_command_line(command):
    words = [
        "data.global_batch=24",
        "data.micro_batch=4",
        "task.options.dropout=0.2",
        "optim=adamw",
    ]
    done = command(*WORDS, "--resume", "kills=1", "seed=5", *words, verb="trainer.prove")
    rows = [line.split()[-2:] for line in done.stdout.splitlines() if " killed in step " in line]
    assert done.returncode == 0, done
    assert rows[0] == ["same", "bits"] and [row[1] for row in rows[1:]] == ["agrees", "agrees"]


@pytest.mark.slow
def test_layouts_are_compared_by_the_command_line(command):
    done = command(*WORDS, "layouts=ranks-2", "steps=5", verb="trainer.prove")
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0 and last == "proved: all runs learned the same", done


def has_torch(pid):
    with suppress(OSError):
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["imports", "fork", "training"])
def test_ctrl_c_ends_all_processes_and_leaves_one_line_and_no_files(moment, tmp_path):
    """The signal goes to the process group, as from a terminal; the fixture of all tests looks for
    processes that are left."""
    words = [*WORDS, "layouts=ranks-2", "steps=4000"]
    started = launch(tmp_path, *words, verb="trainer.prove", is_session=True, TMPDIR=str(tmp_path))
    if moment == "imports":
        wait_for(lambda: any(map(has_torch, descendants_of(started.pid))))
    else:
        name = "ranks-2.json" if moment == "fork" else "runs/tiny/ranks-2-fp64/metrics.jsonl"
        wait_for(lambda: [*tmp_path.glob(f"lockstep-verify-*/{name}")], 150)
    os.killpg(started.pid, signal.SIGINT)
    code, out, err = ended(started, limit_s=60)  # of a busy machine
    assert (code, err.splitlines()[-1]) == (130, "interrupted; nothing was saved"), out + err
    assert "Traceback" not in out + err and not [*tmp_path.iterdir()]


def end_after_a_killed_rank(rank, environment):
    os.kill(os.getpid(), signal.SIGKILL) if rank else sys.exit(1)


@pytest.mark.slow
def test_a_killed_rank_is_told_from_those_that_lost_it_also_when_all_have_ended(monkeypatch):
    def wait(sentinels, timeout=None):
        return [sentinel for sentinel in sentinels if real([sentinel])]  # the survivor's first

    real = multiprocessing.connection.wait
    monkeypatch.setattr(multiprocessing.connection, "wait", wait)
    try:
        assert fork_ranks(2, end_after_a_killed_rank, [], {}) == -signal.SIGKILL
    finally:
        server = multiprocessing.forkserver._forkserver
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()  # a fork of this process would take it for its own child
        multiprocessing.util._run_finalizers()  # removes the folder of its socket


def started_in(folder):
    """Return the processes whose temporary files are in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            found += (
                [path.parent.name] if f"TMPDIR={folder}\0".encode() in path.read_bytes() else []
            )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("layout", ["one-rank", "ranks-2"])
def test_the_end_of_a_verification_by_any_signal_is_that_of_its_ranks(layout, number, tmp_path):
    """The signal goes to one process, as of `timeout`; the fixture of all tests looks for others
    that are left."""
    words = [*WORDS, "layouts=ranks-2", "steps=4000"]
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, and inherited
    try:
        started = launch(tmp_path, *words, verb="trainer.prove", TMPDIR=str(tmp_path))
    finally:
        signal.signal(signal.SIGHUP, hangup)
    name = f"lockstep-verify-*/runs/tiny/{layout}-fp64/metrics.jsonl"
    wait_for(lambda: [*tmp_path.glob(name)], 150)  # the ranks come second
    os.kill(started.pid, number)
    code, out, err = ended(started, limit_s=10)
    assert code == (-number if number == signal.SIGKILL else 130), out + err
    wait_for(lambda: not started_in(tmp_path), 5)


@pytest.mark.slow
def test_state_that_no_checkpoint_holds_is_found_by_resuming(command):
    words = ["--resume", "kills=1", "seed=1", "task.trainer=forgetful.Forgetful"]
    done = command(*WORDS, *words, verb="trainer.prove")
    assert done.returncode == 1
    assert "DIFFERENT: first: train/loss of step" in done.stdout
    assert "state kept outside of model" in done.stdout


@pytest.mark.slow
def test_equal_bits_are_proved(prove):
    words = ["strategy.precision=fp32", "task.options.dropout=0.2", "layouts=ranks-2,ranks-3"]
    code, said = prove(Tiny, "--bits", *words)
    assert code == 0
    rows = [line.split() for line in said.splitlines() if line.startswith(" ranks-")]
    assert [(row[0], row[1], row[-2:]) for row in rows] == [
        ("ranks-2", "fp32", ["same", "bits"]),
        ("ranks-3", "fp32", ["same", "bits"]),
    ]


class Jittered(Tiny):
    """Task with a kernel whose result differs by one bit on another number of ranks."""

    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        return values * (1 + 3e-16 * (self.world.world_size > 2))


@pytest.mark.slow
def test_other_bits_are_named(prove):
    code, said = prove(Jittered, "--bits", "layouts=ranks-2,ranks-3", "strategy.precision=fp64")
    assert code == 1
    assert "ranks-2, fp64" not in said
    assert (
        "ranks-3, fp64: DIFFERENT: first: train/loss of step 1; the bits differ: a kernel" in said
    )


def test_how_long_it_takes_is_told_after_two_steps_and_then_each_step_reached(
    tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr(recorded_run, "PROGRESS_POLL_S", 0.005)
    monkeypatch.setattr(recorded_run, "EVERY_S", 0.05)
    monkeypatch.setattr(recorded_run, "LONG_S", 1.0)
    with recorded_run.followed(tmp_path, 4, 2, 100.0):
        for step in (1, 2, 3, 4, 1, 2, 3, 4):
            recorded_run.note_step(tmp_path, step)
            time.sleep(0.06)
    lines = capfd.readouterr().err.splitlines()
    assert [
        line for line in lines if "this takes about " in line and ", all layouts about " in line
    ]
    reached = [int(line.split()[1]) for line in lines if line.startswith("  step ")]
    assert len(reached) > 2 and reached == sorted(reached) and reached[-1] > 4
    assert all(line.endswith(" of 8") for line in lines if line.startswith("  step "))


def test_a_layout_that_has_not_begun_is_told_too(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(recorded_run, "PROGRESS_POLL_S", 0.005)
    monkeypatch.setattr(recorded_run, "EVERY_S", 0.02)
    with recorded_run.followed(tmp_path, 4, 1, 0.0):
        time.sleep(0.1)
    assert "  before its first step, for 0 s" in capfd.readouterr().err.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(usable_cores() < 2, reason="one core has one number of threads")
def test_what_another_number_of_threads_changes_is_rounding(command):
    own = ["task=tiny", f"--config-dir={CONF}", "task.trainer=tiny.DecidesByRounding"]
    done = command(*own, "layouts=ranks-2", "steps=3", verb="trainer.prove")
    assert done.returncode == 0 and "proved: all runs learned the same" in done.stdout, done
    why = "another number of threads on one rank changes as much, so this is rounding"
    assert f"ranks-2, fp64: rounding: {why}" in done.stdout


def test_a_recorded_update_takes_the_arguments_of_the_trainers():
    kind = recorded_run.recorded(Tiny, recorded_run.StepRecorder(None))
    assert inspect.signature(kind.update) == inspect.signature(Trainer.update)
