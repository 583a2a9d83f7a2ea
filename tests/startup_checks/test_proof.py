"""The start of a run names what would depend on its layout, and says nothing of what does not."""

import contextlib
import inspect
import io
import re
from types import ModuleType, SimpleNamespace

import pytest
import right_tasks
import torch
import torch.distributed as dist
import wrong_tasks
from harness import CONF, on_ranks, slow_but
from harness.training import PARITY, check_parity, compose, fit, fit_on
from tiny import Tiny
from torch import nn

from trainer import ConfigError
from trainer.core.state.sandbox import keep_attributes
from trainer.core.strategy.modules import dry_run
from trainer.core.strategy.modules.dry_run import WEIGHT_NOISE, perturb
from trainer.startup_checks import passes, row_independence
from trainer.startup_checks.explanations import ADVICE_ON_MIXED_ROWS

NOTE = " this run would differ: "
OTHERS = "its output for an example depends on the other examples"
MIXED = "{} mixes the rows of a micro-batch: " + OTHERS
MIXED_LOSS = (
    "the loss mixes the rows of a micro-batch: its value for an example depends on the other "
    "examples; return a value per example from its own row, or use gather_rows"
)
STATE = (
    "{} depends on {}, which it changes and no buffer holds; make it a buffer, or a function of "
    "self.step"
)
CHANCE = "{} gives different results each time for the same rows: it draws unseeded numbers, or"
OF_STATE = (
    "depends on the other rows of a micro-batch, or on {}, which it changes; compute each row"
)
SET = "model or loss depend on {}, which a pass changes and no buffer holds; make it a buffer"
ITSELF = "{} draws from torch's generator itself ({})"
KERNEL = "{}: {} draws inside its kernel, per micro-batch and not per example"
PASSES = "changed in each forward pass, of which a step has one for each micro-batch"
OF_ROWS = "changed by the rows of a micro-batch, not by those of the global batch"
BACKWARD = (
    "the gradient of {} is not the sum over the rows: a hook on it, or a backward pass behind it, "
    "depends on the other rows"
)
# Each mistake, and the line about it at the start of a run on one rank.
KEEPS = "train_step keeps {} of its rank's rows, on which the next step depends"
GLOBAL_RNGS = "{} draws from numpy's or Python's generator, per micro-batch and not per example"
PREPARED = "a row is prepared otherwise with other rows beside it, by __getitems__, collate, split"
USES = "train_step computes something of its rank's rows on which its own update depends"
COUNTED = (
    "model or loss depend on {}, which each pass changes and no buffer holds; make it a buffer"
)
REREAD = (
    "has other values when it is read again: the data set changes, or collate or augment counts"
)
NAMED = {
    "ThresholdInAttribute": COUNTED.format("1.number"),
    "ThresholdInModule": COUNTED.format("PASSES"),
    "ThresholdInClass": COUNTED.format("CountsInClass.passes"),
    "ThresholdInLoss": COUNTED.format("self.calls"),
    "ThresholdInClosure": COUNTED.format("number of counting_hook.hook"),
    "ThresholdInIterator": COUNTED.format("NUMBERS"),
    "ThresholdInEnvironment": COUNTED.format("os.environ['PASSES']"),
    "ThresholdInAugment": "when it is read again: it depends on self.calls, which reading changes",
    "QueueInLoss": STATE.format("the loss", "self.queue"),
    "SpreadOfLosses": KEEPS.format("spread"),
    "ReplaysHardest": USES,
    "RatioOfLosses": USES,
    "ExpertsThatChoose": MIXED.format("1 (ChoosesRows)"),
    "QuantisedModel": MIXED.format("1 (Observes)"),
    "MixupOfSome": PREPARED,
    "HardestRows": MIXED_LOSS,
    "CentresGradient": BACKWARD.format("0.weight"),
    "UpdatesEachMicroBatch": "train_step makes other updates if its rank has other rows; decide in",
    "UpdatesFirstMicroBatch": USES,
    "AugmentMixup": PREPARED,
    "AugmentCoin": REREAD,
    "AugmentNumpyCoin": REREAD,
    "OwnAugmentation": REREAD,
    "DataInPlace": "it depends on inputs of the data set, which reading changes; draw from",
    "DataOfTheSystem": REREAD,
    "CollatedMean": PREPARED,
    "MeanOverPadding": "the loss of a row depends on its padding, which is as long as the longest",
    "CountedCalls": f"buffer 1.seen: {PASSES}; set run.buffers=per_step",
    "CountedRows": f"buffer 1.seen: {OF_ROWS}; take strategy=exact",
    "ClampsGradients": "the parameter 0.weight has a hook on its accumulated gradient",
    "CarriesState": STATE.format("the model (Stateful)", "state"),
    "ModelOfFirstBatch": "1.shift is written in the forward pass of the first micro-batch",
    "StateOfCalls": STATE.format("1 (Counts)", "1.calls"),
    "StateOfRows": OF_STATE.format("1.mean"),
    "StateOfModule": STATE.format("the loss", "SEEN"),
    "ModelInPlace": OF_STATE.format("1.shift"),
    "LossInPlace": STATE.format("the loss", "LossInPlace.table"),
    "ModelOfOwnGenerator": SET.format("1.generator"),
    "ModelOfSeededGenerator": SET.format("1.generator"),
    "ModelUnseeded": CHANCE.format("1 (NumpyNoise)"),
    "LossOfTheBatch": MIXED_LOSS,
    "LossOfOrder": MIXED_LOSS,
    "Contrastive": MIXED_LOSS,
    "SumsTheBatch": MIXED_LOSS,
    "DividesByTheBatch": MIXED_LOSS,
    "LossOfMixup": KERNEL.format("the loss", "randperm"),
    "LossOfBalance": MIXED_LOSS,
    "LossOfMaskedMean": MIXED_LOSS,
    "ModelOfTheBatch": MIXED.format("1 (Centred)"),
    "ModelAttendsRows": MIXED.format("1 (Attends)"),
    "ModelOfBatchNormOfFunction": MIXED.format("1 (BatchNormOfFunction)"),
    "ModelBehindZeros": MIXED.format("1 (BehindZeros)"),
    "KernelOfLstm": KERNEL.format("l (LSTM)", "lstm"),
    "KernelOfGru": KERNEL.format("l (GRU)", "gru"),
    "ModelOfPermutations": KERNEL.format("1 (Permutes)", "randperm"),
    "ModelOfMixup": KERNEL.format("1 (MixesDrawn)", "randperm"),
    "Scripted": ITSELF.format("the model (Sequential)", "1 is TorchScript"),
    "ModelOfDefaultGenerator": ITSELF.format(
        "1 (OfDefaultGenerator)", "generator=..., a kernel or a thread"
    ),
    "ModelOfNumpyRows": GLOBAL_RNGS.format("1 (NumpyRows)"),
    "ModelOfPythonRows": GLOBAL_RNGS.format("1 (PythonRows)"),
    "ModelOfDrawsForEachRow": "1 (DrawsForEachRow) draws as often as a micro-batch has rows",
    "ModelOfPackedTokens": "1 (Packed) draws dropout of shape (",
    "OldSpectralNorm": f"buffers 1.weight_u, 1.weight_v: {PASSES}; set run.buffers=per_step",
    "SpectralNorm": "buffers 1.parametrizations.weight.0._u, 1.parametrizations.weight.0._v: "
    f"{PASSES}; set run.buffers=per_step",
    "Codebook": f"buffers 1.codes, 1.counts, 1.sums: {OF_ROWS}; take strategy=exact",
    "RunningMaximum": f"buffer 1.most: {OF_ROWS}; take strategy=exact",
    "AverageInForward": "the parameter average.weight is written in the forward pass",
    "ModelOfItsPasses": f"buffer 1.number: {PASSES}; set run.buffers=per_step",
    "EmbeddingOfMaxNorm": "the parameter table.weight is written in the forward pass",
    "HookClamps": BACKWARD.format("0.weight"),
    "OwnBackward": BACKWARD.format("0.bias"),
    "Curriculum": MIXED_LOSS,
    "QueueOfKeys": KEEPS.format("self.queue"),
    "QueueInBuffer": KEEPS.format("queue"),
    "MeanOfLosses": KEEPS.format("self.mean"),
    "ReplayMemory": KEEPS.format("self.memory"),
    "PastInModule": KEEPS.format("PAST"),
    "LateQueue": KEEPS.format("self.queue"),
    "GradNorm": USES,
    "LossOfFirstRows": MIXED_LOSS,
    "RollsRows": MIXED_LOSS,
    "LossGuard": MIXED_LOSS,
    "ExpertsOfCapacity": MIXED.format("1 (Routed)"),
    "ScaledByFrequency": BACKWARD.format("table.weight"),
    "ModelOfDrawsForSubset": "1 (DrawsForSubset) either draws for rows in another order",
    "ModelOfChunks": "1 (DropsInChunks) draws as often as a micro-batch has rows",
    "RecordsDraws": "what self.record('noise') gets depends on the micro-batch: on its other rows, "
    "or on draws without a key by example; record a value of each row",
    "LateWithGradients": MIXED_LOSS,
}
# They depend on the rank, the data, the clock or the optimizer, which one rank cannot show.
ELSEWHERE = {
    *(
        "OwnData",
        "LossOfTheRank",
        "ModelOfTheRank",
        "DropsByFunction",
        "Norm",
        "NormOfItsOwn",
    ),
    *("MetricsOfTheRank", "MetricsOfTheBatch", "RateOfTheLayout", "DataOfProcess"),
    *("OptimizerOfTheRank", "OptimizerUnseeded", "ScheduleOfTheClock"),
    *("ScheduleOfTheRank", "StepOfTheClock", "DataOfReads"),
}


def tasks_of(module):
    found = inspect.getmembers(module, inspect.isclass)
    return {n: c for n, c in found if issubclass(c, Tiny) and c.__module__ == module.__name__}


def said_at_start(task, folder, capfd, *words, ranks=1):
    """Return the lines of the proof of a run that makes 11 steps, or its error."""

    error = on_ranks(ranks, error_of, task, folder, *words)[0]
    return [error] if error else lines_of_the_proof(capfd.readouterr().out)


def error_of(task, folder, *words):
    try:
        task(compose(folder, "task=tiny", "run.steps=11", *words)).fit()
    except ConfigError as error:
        return str(error)
    return ""


def lines_of_the_proof(said):
    return [line for line in said.splitlines() if NOTE in line or line.startswith("proof")]


@pytest.fixture(scope="module")
def said_of_wrong_tasks(tmp_path_factory):
    """Return the lines of a wrong task's proof. Runs of 25 tasks follow each other in a process."""
    known = {}

    def body(folder, names):
        found = {}
        for name in names:
            with contextlib.redirect_stdout(io.StringIO()) as said:
                assert error_of(getattr(wrong_tasks, name), folder / name) == "", name
            found[name] = lines_of_the_proof(said.getvalue())
        return found

    def find(name):
        if name not in known:
            every = [*NAMED]
            first = every.index(name) // 25 * 25
            folder = tmp_path_factory.mktemp("wrong")
            known.update(on_ranks(1, body, folder, every[first : first + 25])[0])
        return known[name]

    return find


@pytest.mark.parametrize("name", NAMED)
def test_what_would_differ_in_another_layout_is_named_with_its_reason(name, said_of_wrong_tasks):
    (line,) = [line for line in said_of_wrong_tasks(name) if NOTE in line]
    assert NAMED[name] in line and line.count(";") >= 1


@pytest.mark.parametrize("name", ["AverageInForward", "EmbeddingOfMaxNorm"])
def test_a_fixed_tree_refuses_micro_batches_that_depend_on_those_before(name, tmp_path, capfd):
    words = ["strategy=exact", "data.micro_batch=11"]
    (line,) = said_at_start(getattr(wrong_tasks, name), tmp_path, capfd, *words)
    assert NAMED[name] in line


def test_each_wrong_task_is_named_somewhere():
    assert set(tasks_of(wrong_tasks)) == {*NAMED, *ELSEWHERE}
    assert not {*NAMED} & ELSEWHERE


AGREES = "proof   data, random numbers and buffers do not depend on the layout ("
OUTSIDE = AGREES.replace("data", "apart from plain BatchNorm, data")


EVERY = [(name, 1) for name in ("fp32", "fp64", "amp_bf16")]


def has_lstm_in_bf16():
    """oneDNN has none on a CPU without AVX-512: it "could not create a primitive descriptor"."""
    with contextlib.suppress(RuntimeError), torch.autocast("cpu", torch.bfloat16):
        return nn.LSTM(2, 3)(torch.zeros(2, 2, 2)) is not None
    return False


@pytest.mark.parametrize(("precision", "nth"), slow_but([*EVERY, ("fp32", 5)], ("fp32", 5)))
def test_right_tasks_have_no_note(precision, nth, tmp_path, capfd):
    tasks = tasks_of(right_tasks)
    assert len(tasks) >= 17
    if precision == "amp_bf16" and not has_lstm_in_bf16():
        del tasks["Lstm"]
    for name, task in [*tasks.items()][::nth]:
        words = [f"strategy.precision={precision}", f"run.name={name}"]
        lines = said_at_start(task, tmp_path, capfd, *words)
        start = OUTSIDE if name == "PlainNorm" else AGREES
        lines = [line for line in lines if not line.startswith("proof   of other: data, random")]
        assert len(lines) == 1 and lines[0].startswith(start), (name, lines)


def test_a_layer_that_the_cpu_has_not_in_16_bits_is_named(tmp_path, capfd):
    if has_lstm_in_bf16():
        pytest.skip("this CPU has an LSTM in bf16")
    (line,) = said_at_start(right_tasks.Lstm, tmp_path, capfd, "strategy.precision=amp_bf16")
    assert line.endswith("cannot compute it in 16 bits; set strategy.precision=fp32"), line


LIKE_WRONG = ["ModelOfDropConnect", "CoinInTrainStep", "ModelOfRareCoin", "TargetsInPlace"]


@pytest.mark.parametrize(
    ("layout", "words"),
    [(1, ["data.micro_batch=11"]), (2, []), (2, ["strategy=fsdp"]), (2, ["strategy=zero1"])],
)
def test_what_differs_in_this_layout_ends_the_run(layout, words, tmp_path, capfd):
    (line,) = said_at_start(wrong_tasks.ModelOfTheBatch, tmp_path, capfd, *words, ranks=layout)
    mixed = MIXED.format("1 (Centred)")
    advice = f"{ADVICE_ON_MIXED_ROWS}; set run.prove=warn to go on all the same"
    assert line == f"run.prove=true: {mixed}; {advice}"


def test_what_only_ranks_would_differ_in_is_a_note_with_micro_batches(tmp_path, capfd):
    (line, *_) = said_at_start(wrong_tasks.RunningMaximum, tmp_path, capfd, "data.micro_batch=11")
    assert NOTE in line and "buffer 1.most" in line


def test_what_only_micro_batches_would_differ_in_is_a_note_with_ranks(tmp_path, capfd):
    (line, *_) = said_at_start(wrong_tasks.SpectralNorm, tmp_path, capfd, ranks=2)
    assert NOTE in line and "set run.buffers=per_step" in line
    words = ["data.micro_batch=6", "run.name=b"]
    (line,) = said_at_start(wrong_tasks.SpectralNorm, tmp_path, capfd, *words, ranks=2)
    assert line.startswith("run.prove=true: buffers 1.param")


def test_a_run_that_is_to_warn_goes_on(tmp_path, capfd):
    def body(*words):
        return error_of(wrong_tasks.ModelOfTheBatch, tmp_path, "data.micro_batch=11", *words)

    assert on_ranks(1, body, "run.prove=warn") == [""]
    line = "warning: this run differs from one with a single micro-batch: 1 (Centred) "
    said = capfd.readouterr().out
    assert said.count(line) == said.count("run differs") == 1
    assert on_ranks(1, body, "run.prove=false", "run.name=b") == [""]
    said = capfd.readouterr().out
    assert "differs" not in said and "\nproof " not in said and "\nstep 11/11 " in said


@pytest.mark.parametrize(
    "layout", [pytest.param((1, ["data.micro_batch=11"]), marks=pytest.mark.slow), (2, [])]
)
@pytest.mark.parametrize("name", slow_but(LIKE_WRONG, "CoinInTrainStep", "ModelOfDropConnect"))
def test_right_tasks_learn_the_same_in_another_layout(name, layout, tmp_path):
    ranks, words = layout
    words = [*words, "task=tiny", *PARITY]
    task = getattr(right_tasks, name)
    one = fit_on(1, tmp_path / "one", "task=tiny", *PARITY, task=task)
    check_parity(one, fit_on(ranks, tmp_path / "other", *words, task=task), falls=False)


def test_a_proof_leaves_no_trace_in_a_teacher(tmp_path):
    words = ["task=tiny", *PARITY]
    runs = [
        fit_on(1, tmp_path / str(prove), *words, f"run.prove={prove}", task=right_tasks.HeldTeacher)
        for prove in ("true", "false")
    ]
    assert runs[0]["losses"] == runs[1]["losses"]


class WithoutStatistics(Tiny):
    def build_model(self):
        return wrong_tasks.net(nn.BatchNorm1d(16, track_running_stats=False))


@pytest.mark.parametrize("ranks", [1, 2])
def test_batchnorm_without_statistics_hides_the_rest(ranks, tmp_path, capfd):
    words = ["strategy.sync_batchnorm=true"]
    (line,) = said_at_start(WithoutStatistics, tmp_path, capfd, *words, ranks=ranks)
    assert line.startswith("proof   left out for BatchNorm without running statistics, which norm")


OF_RANKS = {
    "LossOfTheRank": "the loss differs on rank 1: the same rows have another loss",
    "ModelOfTheRank": "the model (Sequential) differs on rank 1: the same rows have another loss",
    "OwnData": "differs on rank 1: the data set, or augment, depends on the rank or draws",
    "DataOfProcess": "differs on rank 1: the data set, or augment, depends on the rank or draws",
    "OptimizerOfTheRank": "rank 1 has other weights than rank 0 after 1 step: optimizer, schedule",
}


@pytest.mark.parametrize("name", OF_RANKS)
def test_what_depends_on_the_rank_ends_the_run(name, tmp_path, capfd):
    (line,) = said_at_start(getattr(wrong_tasks, name), tmp_path, capfd, ranks=2)
    assert line.startswith("run.prove=true: ") and OF_RANKS[name] in line


def test_the_exit_code_is_that_of_a_mistake(command):
    words = ["task=tiny", "task.trainer=wrong_tasks.LossOfTheBatch", "data.micro_batch=11"]
    code, _, err = command("--config-dir", CONF, *words)
    assert code == 2 and err.count("error: run.prove=true: the loss mixes the rows") == 1


# Nothing is left behind ---


class Counted(nn.Module):
    """Counts its calls in an attribute, in its extra state and in a list."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.seen = []

    def forward(self, x):
        self.calls += 1
        self.seen.append(len(x))
        return x


class CountsCalls(Tiny):
    def build_model(self):
        return wrong_tasks.net(Counted())


def trained(task, folder, *words):
    def body():
        made = task(compose(folder, "task=tiny", "run.steps=4", *words))
        made.fit()
        counted = made.model[1]
        state = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
        return state, getattr(counted, "calls", 0), getattr(counted, "seen", [])

    return on_ranks(1, body)[0]


@pytest.mark.parametrize(
    "task", [CountsCalls, wrong_tasks.SpectralNorm, wrong_tasks.Codebook, wrong_tasks.Norm]
)
def test_a_proof_leaves_no_trace_in_a_model(task, tmp_path):
    with_proof = trained(task, tmp_path, "run.name=a")
    without = trained(task, tmp_path, "run.name=b", "run.prove=false")
    assert with_proof[1:] == without[1:]
    for name, tensor in without[0].items():
        assert torch.equal(tensor, with_proof[0][name]), name


class FreezesStem(Tiny):
    """Sets a part of the model to evaluation in each step, as docs/tasks.md shows."""

    def build_model(self):
        return wrong_tasks.net(nn.BatchNorm1d(16))

    def train_step(self, batch):
        self.model[1].eval()
        return super().train_step(batch)


def test_what_is_undone_leaves_the_variables_of_a_library_alone():
    """A notebook's shell holds those of builtins, and emptying them for a moment ends all."""
    task = SimpleNamespace(shell=SimpleNamespace(names=vars(ModuleType("library"))), steps=[1])
    restore = keep_attributes(nn.Linear(1, 1), task)
    task.shell.names["later"] = task.steps
    task.steps.append(2)
    restore()
    assert "later" in task.shell.names and task.steps == [1]


def test_a_proof_keeps_the_modes_of_layers(tmp_path):
    state, _, _ = trained(FreezesStem, tmp_path)
    assert not state["1.running_mean"].any()


class SecondUpdate(Tiny):
    """Makes an update from the third step on that mixes rows, after one that is right."""

    def other(self, outputs, targets):
        return self.loss(outputs, targets) * len(targets)

    def train_step(self, batch):
        outcome = super().train_step(batch)
        return outcome + self.update(batch, self.other, name="other") if self.step > 1 else outcome


def test_a_step_that_was_half_made_is_not_saved(tmp_path):
    words = ["task=tiny", "run.steps=6", "data.micro_batch=11", "checkpoint.every_epochs=null"]

    def body():
        with pytest.raises(ConfigError, match=r"run\.prove=true: the loss mixes the rows") as told:
            SecondUpdate(compose(tmp_path, *words)).fit()
        return str(told.value)

    assert "is saved" not in on_ranks(1, body)[0]


class ClassWeights(Tiny):
    """Targets with a tensor that has no axis of rows."""

    def split_batch(self, batch):
        inputs, targets = batch
        return inputs, (targets, torch.ones(3, dtype=torch.float64))

    def augment(self, inputs, targets, random, train):
        return inputs, targets

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, *targets, reduction="none")

    def metrics(self, outputs, targets):
        return {}


def test_a_tensor_without_rows_is_prepared_with_each_micro_batch(tmp_path, capfd):
    (line,) = said_at_start(ClassWeights, tmp_path, capfd)
    assert line.startswith(f"{AGREES}22 rows tried, ")


class Noisy(Tiny):
    def loss(self, outputs, targets):
        return super().loss(outputs + 0.1 * torch.randn_like(outputs), targets)


def test_torchs_dropout_is_as_asked_for(tmp_path, capfd):
    words = ["run.dropout=torch", "data.micro_batch=11"]
    (line,) = said_at_start(Noisy, tmp_path, capfd, *words)
    assert line.startswith("proof   left out: draws are by micro-batch with run.dropout=torch (")


# Buffers that advance once a step ---


@pytest.mark.parametrize("layout", [(1, ["data.micro_batch=6"]), (2, []), (3, [])], ids=str)
@pytest.mark.parametrize("name", slow_but(["SpectralNorm", "OldSpectralNorm"], "SpectralNorm"))
def test_buffers_per_step_are_those_of_one_micro_batch(name, layout, tmp_path):
    ranks, words = layout
    task = getattr(wrong_tasks, name)
    same = ["task=tiny", "run.steps=6", "run.buffers=per_step", "strategy.precision=fp64"]

    def body(*more):
        made = task(compose(tmp_path, *same, *more))
        made.fit()
        return {name: tensor.clone() for name, tensor in made.model.state_dict().items()}

    one = on_ranks(1, body, "run.name=one")[0]
    other = on_ranks(ranks, body, "run.name=other", *words)[0]
    for name, tensor in one.items():
        assert (tensor - other[name]).norm() <= 1e-12 * tensor.norm(), name


def test_a_coin_is_the_same_in_all_micro_batches(tmp_path):
    def body(task, *more):
        made = task(compose(tmp_path, "task=tiny", "run.steps=8", "strategy.precision=fp64", *more))
        made.fit()
        return {name: tensor.clone() for name, tensor in made.model.state_dict().items()}

    for name in ("ModelOfNumpyCoin", "LossOfPythonCoin"):
        task = getattr(right_tasks, name)
        one = on_ranks(1, body, task, f"run.name={name}1")[0]
        parts = on_ranks(1, body, task, f"run.name={name}2", "data.micro_batch=5")[0]
        two = on_ranks(2, body, task, f"run.name={name}3")[0]
        for key, tensor in one.items():
            assert (tensor - parts[key]).norm() <= 1e-12 * tensor.norm(), key
            assert (tensor - two[key]).norm() <= 1e-12 * tensor.norm(), key


# State outside of the model ---

COUNTERS = ["Module", "Class", "Iterator", "Environment", "Closure"]


class WithCounter(Tiny):
    layer: type[nn.Module]

    def build_model(self):
        return wrong_tasks.net(self.layer())


@pytest.mark.parametrize("place", COUNTERS)
def test_trial_passes_do_not_advance_a_counter_outside_of_the_model(place, tmp_path):
    task = type("Counted", (WithCounter,), {"layer": getattr(wrong_tasks, f"CountsIn{place}")})
    words = ["task=tiny", "run.steps=20", "strategy.precision=fp64", "eval.every_epochs=null"]
    runs = [
        fit_on(1, tmp_path / prove, *words, f"run.prove={prove}", task=task)
        for prove in ("true", "false")
    ]
    assert runs[0]["losses"] == runs[1]["losses"]


class CountsInFile(nn.Module):
    def __init__(self, path):
        super().__init__()
        self.path = path

    def forward(self, x):
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("x")
        return x


class WritesFile(Tiny):
    def build_model(self):
        return wrong_tasks.net(CountsInFile("passes.txt"))


def numbers():
    number = 0
    while True:
        yield number
        number += 1


class CountsInGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.numbers = numbers()

    def forward(self, x):
        next(self.numbers)
        return x


class HoldsGenerator(Tiny):
    def build_model(self):
        return wrong_tasks.net(CountsInGenerator())


LEFT = "in the trial passes of the start, too: runs with another run.prove may differ"


@pytest.mark.parametrize(
    ("task", "what"),
    [(WritesFile, "the file passes.txt was written"), (HoldsGenerator, "the generator numbers")],
)
def test_what_trial_passes_cannot_undo_is_said(task, what, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    on_ranks(1, error_of, task, tmp_path)
    notes = [line for line in capfd.readouterr().out.splitlines() if LEFT in line]
    assert len(notes) == 1 and notes[0].startswith(f"note: {what}")


class StepsByHand(Tiny):
    """Calls methods of its optimizer, and keeps another one of its own."""

    def train_step(self, batch):
        (optimizer,) = self.optimizers
        optimizer.calls = getattr(optimizer, "calls", 0) + 1
        if not hasattr(self, "scale"):
            self.scale = torch.ones((), dtype=torch.float64, requires_grad=True)
            self.own = torch.optim.Adam([self.scale], lr=0.01)
        self.scale.square().backward()
        self.own.step()
        self.own.zero_grad()
        return super().train_step(batch)


def test_a_trial_of_a_step_leaves_optimizers_as_they_were(tmp_path):
    def body(*words):
        task = StepsByHand(compose(tmp_path, "task=tiny", "run.steps=12", *words))
        calls = []
        build = task.build_optimizer

        def noting(model):
            calls.append(build(model))
            return calls[-1]

        task.build_optimizer = noting
        task.fit()
        return calls[0].calls, task.scale.item(), task.own.state[task.scale]["step"].item()

    with_proof = on_ranks(1, body, "run.name=a")
    assert with_proof == on_ranks(1, body, "run.name=b", "run.prove=false")
    assert with_proof[0][0] == with_proof[0][2] == 12


class HalfFrozen(Tiny):
    def build_model(self):
        model = super().build_model()
        model[0].requires_grad_(False)
        return model


def test_the_proof_perturbs_only_weights_that_are_trained(tmp_path, monkeypatch):
    """Frozen ones are in the run as they are; those of a large model take seconds to draw for."""
    words = ["task=tiny", "run.steps=1", "strategy=single"]
    compose(tmp_path, *words)
    shapes = set()

    def note(weights, noise):
        shapes.add(tuple(weights.shape))
        perturb(weights, noise)

    def run():
        monkeypatch.setattr(passes, "perturb", note)
        fit(tmp_path, *words, task=HalfFrozen)
        return shapes

    assert on_ranks(1, run) == [{(3, 16), (3,)}]


class AddsOnAllRanks(Tiny):
    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        dist.all_reduce(values.detach().sum())  # half of the ranks would wait for ever
        return values


HALVED = ["ModelOfTheBatch", "LossOfTheRank", "Contrastive", "AverageInForward"]


def said_on_two_ranks(task, folder, has_halves):
    """Return the lines of the proof of a large model, and what each trial by halves found."""

    def body():
        found = []
        row_independence.LARGE_BYTES = dry_run.LARGE_BYTES = 0
        check = row_independence.RowIndependenceCheck
        in_halves = check._try_halves

        def try_halves(*arguments):
            found.append(in_halves(*arguments) if has_halves else None)
            return found[-1]

        check._try_halves = try_halves
        with contextlib.redirect_stdout(io.StringIO()) as said:
            error = error_of(task, folder)
        lines = [error] if error else lines_of_the_proof(said.getvalue())
        return [re.sub(r"[\d.]+ s\)", "", line) for line in lines], [each is None for each in found]

    return on_ranks(2, body)[0]


@pytest.mark.parametrize("name", slow_but(sorted(tasks_of(wrong_tasks)), *HALVED))
def test_halves_of_the_ranks_find_what_each_rank_does(name, tmp_path):
    task = getattr(wrong_tasks, name)
    one, _ = said_on_two_ranks(task, tmp_path / "a", has_halves=True)
    two, _ = said_on_two_ranks(task, tmp_path / "b", has_halves=False)
    assert one == [line.replace(str(tmp_path / "b"), str(tmp_path / "a")) for line in two]


@pytest.mark.parametrize(("task", "is_whole"), [(Tiny, False), (AddsOnAllRanks, True)])
def test_each_rank_proves_half_unless_ranks_wait_for_each_other(task, is_whole, tmp_path):
    lines, was_whole = said_on_two_ranks(task, tmp_path, has_halves=True)
    assert [line.startswith(AGREES) for line in lines] == [True]
    assert was_whole and all(each is is_whole for each in was_whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_each_weight_is_perturbed_a_little_and_in_any_order(dtype):
    weights = torch.randn(300, 500, dtype=dtype).abs() + 1
    weights[7] = 0
    rows, columns = weights.clone(), weights.t().contiguous().t()
    for each in (rows, columns):
        perturb(each, torch.Generator().manual_seed(0))
        changed = each != weights
        assert changed[7].all() and changed.float().mean() > 0.9
        sizes = weights.where(weights != 0, weights.double().mean().to(dtype))
        shares = ((each - weights).abs() / sizes).double()
        assert (
            shares.max() <= 5 * WEIGHT_NOISE
            and 0.7 * WEIGHT_NOISE < shares.mean() < 0.9 * WEIGHT_NOISE
        )
    assert not torch.equal(rows[0] / weights[0], rows[1] / weights[1])
    torch.testing.assert_close(rows, columns)
