"""Hooks and datasets that return something wrong: one line that names it, whatever it is."""

import multiprocessing
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import fit, fit_on, on_ranks
from harness.training import compose
from tiny import Items, Tiny, TinyItems, points
from torch import nn

from trainer import ConfigError, ResidentDataset, RunError
from trainer.cli import load_task
from trainer.core.blame import find_rows
from trainer.core.config.targets import resolve
from trainer.core.hook_calls import call, call_hook
from trainer.core.micro_batch import Rows
from trainer.core.setup.early_checks import check_hooks, find_unused_hooks

WORDS = ["task=tiny", "run.steps=12", "log.trackers=[]", "eval.every_steps=6"]
BAD = 57  # an example
SAVED = r"; the state after step \d+ is saved; resume with: python -m trainer run.resume=\S+ .*"


def ends(folder, cases, words):
    """Return the error of each case, (kind, line), from runs one after another in one process."""
    found = {}
    for number, (name, task) in enumerate(cases.items()):
        try:
            fit(folder / str(number), *WORDS, *words, task=task)
            found[name] = ("", "")
        except Exception as error:
            found[name] = (type(error).__name__, str(error))
    for child in multiprocessing.active_children():
        child.kill()  # as the command line does
    return found


def check(folder: Path, expected: dict, *words: str, ranks: int = 1) -> None:
    """Check the error of each case: `expected` is {name: (task, kind, pattern of the line)}.

    One fork runs all of them; of several ranks it can run one case, as gloo opens once.
    """
    assert ranks == 1 or len(expected) == 1
    compose(folder, *WORDS, *words)
    cases = {name: task for name, (task, _, _) in expected.items()}
    for found in on_ranks(ranks, ends, folder, cases, words):
        for name, (_, kind, pattern) in expected.items():
            assert found[name][0] == kind.__name__, (name, found[name])
            assert re.fullmatch(pattern, found[name][1]), (name, found[name])


def task_with(base=Tiny, **members):
    """Return a task with these hooks."""
    return type("Wrong", (base,), members)


# Lengths ------------------------------------------------------------------------------------------


def of_length(value):
    class Data(Items):
        def __len__(self):
            if isinstance(value, Exception):
                raise value
            return value

    return task_with(TinyItems, build_dataset=lambda self, split: Data(split))


def test_length_that_is_none_is_one_line(tmp_path):
    returned = r"build_dataset\('train'\) returned Data, whose length"
    must = r"; __len__ must return an integer from 1 to 2\*\*63 - 1"
    expected = {
        str(value): (of_length(value), ConfigError, f"{returned} is {re.escape(repr(value))}{must}")
        for value in (-1, 2**63, 1000.0, "5", None)
    }
    why = r"cannot be read: ValueError: unknown \(\S+test_wrong_hooks.py:\d+\)"
    expected["raises"] = (of_length(ValueError("unknown")), ConfigError, f"{returned} {why}{must}")
    check(tmp_path, expected)


# Examples -----------------------------------------------------------------------------------------


class Mute(Exception):
    def __str__(self):
        raise ValueError("no message")


def raises(error):
    def change(inputs, target):
        raise error

    return change


def of_examples(change):
    class Data(Items):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            return change(row[0], int(row[1])) if index == BAD else (row[0], int(row[1]))

    def build_dataset(self, split):
        return Data(split) if split == "train" else Items(split)

    return task_with(TinyItems, build_dataset=build_dataset)


UNREADABLE = f"train example {BAD} cannot be read: "
EXAMPLES = {
    "sparse": (
        lambda x, y: (x.to_sparse(), y),
        r"it is a sparse tensor \(sparse_coo\); return tensor.to_dense\(\)",
    ),
    "complex": (
        lambda x, y: (x.to(torch.complex64), y),
        r"it is \('\(4,\) of complex64', 'int'\) and the others are \(\(4,\), 'int'\); repair .*",
    ),
    "meta": (
        lambda x, y: (x.to("meta"), y),
        r"it is a tensor without values \(on the meta device\); build it on the CPU",
    ),
    "huge": (
        lambda x, y: (x, 2**64),
        "18446744073709551616 does not fit into 64 bits; map it to a smaller number",
    ),
    "mute": (
        raises(Mute()),
        r"Mute: its message cannot be shown, __str__ raised ValueError \(.*\); repair it, or .*",
    ),
    "exits": (raises(GeneratorExit()), r"GeneratorExit \(.*\); repair it, or set .*"),
}


def test_example_that_fits_into_no_batch_is_named(tmp_path):
    expected = {
        name: (of_examples(change), RunError, UNREADABLE + line + SAVED)
        for name, (change, line) in EXAMPLES.items()
    }
    check(tmp_path / "0", expected)
    line = "these files need a package; install it"  # which no other example would mend
    expected["lacking"] = (of_examples(raises(ConfigError(line))), ConfigError, line + SAVED)
    check(tmp_path / "skip", {"lacking": expected["lacking"]}, "data.on_error=skip")
    for name in (
        "sparse",
        "huge",
        "lacking",
    ):  # a worker that ends disturbs the next run of its process
        check(tmp_path / name, {name: expected[name]}, "data.workers=1")


def resident(make):
    def build_dataset(self, split):
        return ResidentDataset(*make(*points(203, split)))

    return task_with(build_dataset=build_dataset)


def test_tensors_that_are_no_rows_are_refused(tmp_path):
    returned = r"build_dataset\('train'\) returned a"
    argument = r"ResidentDataset: argument {} must be a tensor with a row for each example, and "
    lines = {
        "sparse": (
            lambda x, y: (x.to_sparse(), y),
            rf"{returned} sparse tensor \(sparse_coo\); .*",
        ),
        "meta": (lambda x, y: (x.to("meta"), y), rf"{returned} tensor without values .*"),
        "list": (lambda x, y: (x.tolist(), y), argument.format(1) + "is a list"),
        "scalar": (lambda x, y: (x, y[0]), argument.format(2) + "is a scalar"),
        "rows": (lambda x, y: (x, y[1:]), argument.format(2) + "arguments 1 and 2 have .* rows"),
        "none": (lambda x, y: (), "ResidentDataset: must have at least one tensor"),
    }
    check(tmp_path, {name: (resident(make), ConfigError, t) for name, (make, t) in lines.items()})


# Hooks of a batch ---------------------------------------------------------------------------------


def augmenting(change):
    return task_with(augment=lambda self, inputs, targets, random, train: change(inputs, targets))


def drawing(*sizes):
    def augment(self, inputs, targets, random, train):
        return inputs + random.normal("noise", *sizes), targets

    return task_with(augment=augment)


def test_hook_that_returns_no_pair_is_named(tmp_path):
    must = r": must return \(inputs, targets\)"
    size = "random: 'noise' was drawn with the size {}: must be an integer of at least 0"
    splitting = task_with(split_batch=lambda self, batch: batch[0])
    expected = {
        "none": (augmenting(lambda x, y: None), ConfigError, f"augment returned a NoneType{must}"),
        "three": (
            augmenting(lambda x, y: (x, y, y)),
            ConfigError,
            f"augment returned a tuple of 3{must}",
        ),
        "generator": (
            augmenting(lambda x, y: (each for each in (x, y))),
            ConfigError,
            f"augment returned a generator{must}",
        ),
        "one": (splitting, ConfigError, f"split_batch returned a Tensor{must}"),
        "sparse": (
            augmenting(lambda x, y: (x.to_sparse(), y)),
            ConfigError,
            r"the train batches contain a sparse tensor \(sparse_coo\); return tensor.to_dense\(\)",
        ),
        "negative": (drawing(-4), ConfigError, size.format(-4)),
        "text": (drawing("4"), ConfigError, size.format("'4'")),
    }
    check(tmp_path, expected)


# Losses, metrics and outputs ----------------------------------------------------------------------


def entropy(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def with_loss(change):
    return task_with(loss=lambda self, outputs, targets: change(entropy(outputs, targets)))


def after(calls, late):
    """Return a loss that is `late(values)` after so many calls."""
    count = [0]

    def change(values):
        count[0] += 1
        return late(values) if count[0] > calls else values

    return with_loss(change)


def weighed(make):
    return with_loss(lambda values: (values, make(torch.ones(len(values)))))


def test_loss_that_has_no_real_sum_is_one_line(tmp_path):
    real = "must be real; return tensor.abs() or .real"
    gradient = (
        "loss returned {} values without a gradient: must be computed from the parameters; "
        "leave out .detach(), .item() and argmax, in the model too"
    )
    negative = "loss returned a weight of -2: must be at least 0; multiply the values instead"
    dense = "a sparse tensor (sparse_coo); return tensor.to_dense()"
    lines = {
        "sparse": (with_loss(lambda v: v.to_sparse()), f"loss returned values in {dense}"),
        "complex": (
            with_loss(lambda v: v.to(torch.complex64)),
            f"loss returned values of dtype complex64: {real}",
        ),
        "late": (
            after(4, lambda v: v.to(torch.complex64)),
            f"loss returned values of dtype complex64: {real}",
        ),
        "detached": (with_loss(torch.Tensor.detach), gradient.format("float64")),
        "late detached": (after(4, torch.Tensor.detach), gradient.format("float64")),
        "integer": (with_loss(torch.Tensor.long), gradient.format("int64")),
        "boolean": (with_loss(lambda v: v > 1), gradient.format("bool")),
        "negative weights": (weighed(lambda w: w - 3), negative),
        "complex weights": (
            weighed(lambda w: w.to(torch.complex64)),
            f"loss returned weights of dtype complex64: {real}",
        ),
        "sparse weights": (weighed(lambda w: w.to_sparse()), f"loss returned weights in {dense}"),
    }
    cases = {name: (task, ConfigError, re.escape(line)) for name, (task, line) in lines.items()}
    check(tmp_path, cases, "strategy.precision=fp64")


def with_metrics(change):
    return task_with(metrics=lambda self, outputs, targets: change(outputs.argmax(1) == targets))


def alternating():
    count = [0]

    def change(hits):
        count[0] += 1
        return {f"hits{count[0] % 2}": hits}

    return with_metrics(change)


class Score:
    """Metric with the methods of torchmetrics."""

    def __init__(self, score):
        self.score = score

    def to(self, device):
        return self

    def update(self, outputs, targets):
        pass

    def compute(self):
        return self.score

    def reset(self):
        pass


def scored(score):
    return task_with(build_metrics=lambda self, split: {"score": score})


def summed(returned):
    return task_with(summarize=lambda self, means: returned)


def test_metric_that_is_none_is_one_line(tmp_path):
    name = "metrics returned the name {}: must be a string of printable characters"
    lines = {
        "none": (with_metrics(lambda hits: None), "metrics returned a NoneType: must be a dict .*"),
        "tensor": (with_metrics(lambda hits: hits), "metrics returned a Tensor: must be a dict .*"),
        "nameless": (with_metrics(lambda hits: {None: hits}), name.format("None")),
        "newline": (with_metrics(lambda hits: {"a\nb": hits}), name.format(r"'a\\nb'")),
        "sparse": (
            with_metrics(lambda hits: {"hits": hits.to_sparse()}),
            r"metrics: hits returned values in a sparse tensor .*",
        ),
        "alternating": (
            alternating(),
            "metrics returned hits., loss after hits., loss: must return the same names for every "
            "batch, if need be with weights 0" + SAVED,
        ),
        "summary": (
            summed(None),
            "summarize returned a NoneType: must be a dict of .*",
        ),
        "text": (summed({"a": "1"}), "summarize returned a, a str: must be a number"),
        "vector": (
            summed({"a": torch.ones(2)}),
            r"summarize returned a, a tensor of shape \(2,\): must be a number",
        ),
        "mean": (
            summed({"loss": 0.0}),
            "summarize returned loss, which is a mean of the evaluation already; .*",
        ),
        "no metrics": (
            task_with(build_metrics=lambda self, split: None),
            "build_metrics returned a NoneType: must be a dict of values by name",
        ),
        "number": (
            scored(1.0),
            "build_metrics returned a float as score: must be a torchmetrics.Metric",
        ),
        "class": (
            scored(Score),
            "build_metrics returned the class Score as score: must be a torchmetrics.Metric",
        ),
        "no score": (
            scored(Score(None)),
            r"build_metrics: score.compute\(\) returned a NoneType: must .*",
        ),
    }
    check(tmp_path, {name: (task, ConfigError, line) for name, (task, line) in lines.items()})


def test_example_with_which_the_loss_or_the_model_fails_is_named(tmp_path):
    """Its values may be of the right type, such as a label that is no class."""
    fails = rf"failed for train example {BAD}: IndexError: .*; repair it"
    label = re.escape("loss(outputs, targets) ") + fails
    words = task_with(
        TinyItems,
        build_dataset=of_examples(lambda x, y: (x, 7)).build_dataset,
        split_batch=lambda self, batch: (batch[1], batch[1].clamp(max=2)),
        build_model=lambda self: torch.nn.Embedding(3, 3),
    )
    expected = {
        "label": (of_examples(lambda x, y: (x, 7)), RunError, label),
        "word": (words, RunError, f"the model {fails}"),
    }
    check(tmp_path, expected)
    check(
        tmp_path / "2",
        expected,
        "data.micro_batch=7",
        "strategy=exact",
        "data.global_batch=21",
    )


class Silent(torch.nn.Linear):
    def forward(self, inputs):
        super().forward(inputs)


def test_type_that_fits_no_loss_or_model_is_named(tmp_path):
    place = r" \(\S+test_wrong_hooks.py:\d+\); "
    loss = r"loss\(outputs, targets\) failed: "
    floats = augmenting(lambda x, y: (x, y.float()))
    expected = {
        "targets": (
            floats,
            ConfigError,
            rf"{loss}RuntimeError: .* but got \w+ \(\S+py:\d+\); "
            r"outputs: float64 \(22, 3\), targets: float64 \(22,\); make them fit",
        ),
        "outputs": (
            task_with(build_model=lambda self: Silent(4, 3), loss=lambda self, *a: entropy(*a)),
            ConfigError,
            rf"{loss}TypeError: .* must be Tensor, not NoneType{place}"
            r"outputs: NoneType, targets: int64 \(22,\); make them fit",
        ),
        "inputs": (
            augmenting(lambda x, y: (x.long(), y)),
            ConfigError,
            r"the model's module 0 failed: RuntimeError: .* dtype, but got Long and Double; "
            r"inputs: int64 \(22, 4\); make them fit",
        ),
        "synchronized BatchNorm": (
            task_with(build_model=lambda self: nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3))),
            ConfigError,
            r"the model's module 1 failed: ValueError: .* on GPU.*; inputs: .*; "
            r"leave it nn.BatchNorm, and set strategy.sync_batchnorm=true, which CPUs can too",
        ),
        "list": (
            augmenting(lambda x, y: ([x, x], y)),
            ConfigError,
            r"the model failed: TypeError: .* takes 2 positional arguments but 3 were given; "
            r"inputs: \[float64 \(22, 4\), float64 \(22, 4\)\], each an argument of the model .*",
        ),
    }
    check(tmp_path, expected)


def test_exception_of_the_task_itself_keeps_its_traceback(tmp_path):
    expected = {
        "loss": (with_loss(lambda values: {}["wrong"]), KeyError, "'wrong'"),
        "metrics": (with_metrics(lambda hits: [][3]), IndexError, "list index out of range"),
        "raised": (task_with(loss=raising), RuntimeError, "of the task"),
    }
    check(tmp_path, expected)


class Unrolled(nn.Module):
    """Keeps its state for the next batch, with the graph that made it."""

    def __init__(self):
        super().__init__()
        self.cell, self.out, self.state = nn.GRUCell(4, 16), nn.Linear(16, 3), None

    def forward(self, x):
        is_kept = self.state is not None and len(self.state) == len(x)
        self.state = self.cell(x, self.state if is_kept else None)
        return self.out(self.state)


def test_backward_in_a_hook_or_through_an_old_graph_is_one_line(tmp_path):
    leave = "leave it out; the trainer calls it, on the mean of what loss returns"
    twice = (
        r"backward\(\) went twice through the graph of loss\(outputs, targets\): leave the call "
        r"out of hooks, since the trainer makes it; if the model keeps a tensor for the next "
        r"batch, detach\(\) it"
    )
    calls = rf"\(outputs, targets\) calls backward\(\) \(\S+\.py:\d+\): {leave}"

    def back(values, **options):
        values.mean().backward(**options)
        return values

    expected = {
        "loss": (with_loss(back), ConfigError, twice),
        "retained": (with_loss(lambda v: back(v, retain_graph=True)), ConfigError, f"loss{calls}"),
        "metrics": (
            with_metrics(lambda hits: {"hits": back(hits.double())}),
            ConfigError,
            f"metrics{calls}",
        ),
        "state": (task_with(build_model=lambda self: Unrolled()), ConfigError, twice),
    }
    check(tmp_path, expected)


def raising(self, outputs, targets):
    raise RuntimeError("of the task")


def stepping(call):
    return task_with(train_step=lambda self, batch: call(self, batch))


def own_optimizer(task):
    return torch.optim.SGD(task.model.parameters(), lr=0.1)


def test_update_with_wrong_arguments_is_one_line(tmp_path):
    expected = {
        "batch": (
            stepping(lambda task, batch: task.update(next(iter(batch)))),
            ConfigError,
            "update got a tuple: must be train_step's batch",
        ),
        "optimizers": (
            stepping(lambda task, batch: task.update(batch, None, ["sgd"])),
            ConfigError,
            "update got a str: must be an optimizer, or a list of them",
        ),
        "another optimizer": (
            stepping(lambda task, batch: task.update(batch, None, [own_optimizer(task)])),
            ConfigError,
            "update got a SGD as one of its optimizers: must be of those that build_optimizer"
            " returned, which checkpoints hold",
        ),
        "name": (
            stepping(lambda task, batch: task.update(batch, None, None, 3)),
            ConfigError,
            "update got the name 3: must be a string of printable characters",
        ),
    }
    check(tmp_path, expected)


# Tensors of models --------------------------------------------------------------------------------


class Holding(nn.Module):
    """Linear layer beside another tensor or layer, which `use` adds to the outputs."""

    def __init__(self, made, use):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        if isinstance(made, (nn.Parameter, nn.Module)):
            self.made = made
        else:
            self.register_buffer("made", made)
        self.use = use

    def forward(self, inputs):
        return self.layer(inputs) + self.use(self.made, inputs)


def holding(make, use=lambda made, inputs: 0):
    return task_with(build_model=lambda self: Holding(make(), use))


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_tensor_that_cannot_be_trained_or_saved_is_named_at_the_start(strategy, tmp_path):
    lines = {
        "sparse buffer": (
            holding(lambda: torch.eye(3).to_sparse()),
            "the model's made is a sparse tensor (sparse_coo); return tensor.to_dense()",
        ),
        "meta": (
            holding(lambda: torch.ones(3, device="meta")),
            "the model's made is a tensor without values (on the meta device); build it on the CPU",
        ),
        "complex": (
            holding(lambda: nn.Parameter(torch.ones(3, dtype=torch.complex64))),
            "build_model: the parameter made is complex, which no strategy trains; store "
            "torch.view_as_real of it, and use torch.view_as_complex in forward",
        ),
        "sparse": (
            holding(lambda: nn.Embedding(5, 3, sparse=True)),
            "the model's made (Embedding): must have sparse=False, because gradients are summed as "
            "dense tensors",
        ),
    }
    cases = {name: (task, ConfigError, re.escape(line)) for name, (task, line) in lines.items()}
    check(tmp_path, cases, f"strategy={strategy}")


class Overlapping(nn.Module):
    """Two parameters over one array, with a row in common on some ranks."""

    def __init__(self, is_wrong):
        super().__init__()
        array = np.ones((4, 4), dtype=np.float32)
        self.a = nn.Parameter(torch.from_numpy(array[:3]))
        self.b = nn.Parameter(torch.from_numpy(array[2 if is_wrong else 3 :]))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", [{0, 1}, {1}], ids=str)
def test_parameters_that_share_memory_in_part_are_refused_by_all_ranks(ranks, strategy, tmp_path):
    task = task_with(build_model=lambda self: Overlapping(self.world.rank in ranks))
    line = "build_model: a and b share memory, and are two tensors; tie them as one .*"
    check(tmp_path, {"array": (task, ConfigError, line)}, f"strategy={strategy}", ranks=2)


def test_complex_buffer_keeps_its_imaginary_part(tmp_path):
    """A model's rotations are such a buffer, in the code of Llama."""
    task = holding(lambda: torch.tensor([1j, 2j, 3j]), lambda made, inputs: made.imag)
    for number, words in enumerate((["strategy=single"], ["strategy=exact"])):
        run = fit_on(1, tmp_path / str(number), *WORDS, "data.global_batch=20", *words, task=task)
        assert run["weights"]["made"].tolist() == [1j, 2j, 3j]


# Schedules and optimizers -------------------------------------------------------------------------


def scheduled(late, num_calls=0):
    """Return a task whose factor is `late()` for step 7, or after so many calls."""
    calls = [0]

    def factor(step):
        calls[0] += 1
        return late() if (calls[0] > num_calls if num_calls else step == 7) else 0.5

    return task_with(build_schedule=lambda self, num_steps: factor)


def test_factor_that_is_wrong_for_a_late_step_is_refused_at_the_start(tmp_path):
    wrong = {"nan": float("nan"), "None": None, "-1.0": -1.0, "'1'": "1", "1j": 1j}
    must = "must return factor(step), a finite number of at least 0"
    expected = {
        shown: (
            scheduled(lambda value=value: value),
            ConfigError,
            re.escape(f"build_schedule: returned {shown} for step 7 (the first is 0): {must}"),
        )
        for shown, value in wrong.items()
    }
    why = r"raised ZeroDivisionError: division by zero \(\S+test_wrong_hooks.py:\d+\)"
    line = rf"build_schedule: {why} for step 7 \(the first is 0\): {re.escape(must)}"
    expected["raises"] = (scheduled(lambda: 1 / 0), ConfigError, line)
    check(tmp_path, expected)


def test_schedule_that_fails_in_mid_run_names_the_step_and_leaves_a_whole_state(tmp_path):
    """It is not a function of the step. All ranks fail alike."""
    place = re.escape(str(tmp_path / "0/tiny/run"))
    command = rf"torchrun --nproc_per_node=2 -m trainer run.resume={place} task.trainer=tiny.Tiny"
    line = r"build_schedule: returned None for step 5 \(the first is 0\): must return .*"
    line += rf"; the state after step 5 is saved; resume with: {command}"
    words = ["checkpoint.every_steps=2", "checkpoint.every_epochs=null"]
    late = scheduled(lambda: None, num_calls=12 + 5)  # the start tries each of 12 steps
    check(tmp_path, {"late": (late, ConfigError, line)}, *words, ranks=2)


def optimizing(make):
    return task_with(build_optimizer=lambda self, model: make(model.parameters()))


def test_optimizer_that_no_run_can_step_is_one_line(tmp_path):
    expected = {
        "closure": (
            optimizing(torch.optim.LBFGS),
            ConfigError,
            "build_optimizer: LBFGS.step needs a closure, and `update` has none .*; see SAM .*",
        ),
        "dense": (
            optimizing(torch.optim.SparseAdam),
            ConfigError,
            r"SparseAdam.step\(\) failed: RuntimeError: SparseAdam does not support dense .*",
        ),
        "none": (
            optimizing(lambda parameters: []),
            ConfigError,
            "build_optimizer returned an empty list: must be an optimizer, or a list of them",
        ),
    }
    check(tmp_path, expected)


@pytest.mark.parametrize(
    "message",
    [
        "[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed",  # a lost rank
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 48 bytes",
    ],
)
def test_what_is_no_mistake_of_a_hook_is_not_told_as_one(message):
    calls = []

    def fail(*arguments):
        calls.append(arguments)
        raise RuntimeError(message)

    rows = Rows()
    rows.begin("train", torch.arange(4))
    with pytest.raises(RuntimeError, match=re.escape(message)):
        call_hook("loss(outputs, targets)", fail, torch.ones(4), torch.ones(4), rows)
    layer = torch.nn.Linear(4, 4)
    layer.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        call(torch.nn.Sequential(layer), torch.ones(4, 4), rows)
    assert len(calls) == 2  # other ranks would wait in a further one


def test_rows_to_blame_are_found_in_order_by_few_calls():
    calls = []

    def fails_with(*bad):
        def fails(first, last):
            calls.append((first, last))
            return any(first <= row < last for row in bad)

        return fails

    for bad in ([], [0], [99], [3, 57, 58], [*range(7)]):
        assert list(find_rows(fails_with(*bad), 100)) == bad
    calls.clear()
    assert next(find_rows(fails_with(57, 58), 1000)) == 57
    assert len(calls) <= 2 * 10 + 1
    assert list(find_rows(lambda first, last: True, 0)) == []
    assert list(find_rows(lambda first, last: last - first > 1, 8)) == []  # only together


class WithoutConfig(Tiny):
    def __init__(self):
        pass


def test_a_task_whose_init_does_not_take_the_config_is_refused(tmp_path):
    config = compose(tmp_path, *WORDS, f"task.trainer={__name__}.WithoutConfig")
    with pytest.raises(
        ConfigError, match=r"WithoutConfig: __init__ must take the config, and pass"
    ):
        load_task(config)


HOOKS = {  # of other arguments: what the line says
    "loss": (lambda self, outputs: 0, r"\(outputs\): must take \(outputs, targets\)"),
    "build_model": (lambda self, config: None, r"\(config\): must take \(\)"),
    "build_dataset": (lambda self: None, r"\(\): must take \(split\)"),
    "augment": (lambda self, x, y: 0, r"\(x, y\): must take \(inputs, targets, random, train\)"),
    "train_step": (lambda self: None, r"\(\): must take \(batch\)"),
}


def test_a_hook_that_takes_other_arguments_is_refused_before_it_is_called(tmp_path):
    config = compose(tmp_path, *WORDS)
    for name, (method, line) in HOOKS.items():
        with pytest.raises(ConfigError, match=rf"^Wrong\.{name} takes {line}$"):
            check_hooks(task_with(**{name: method})(config))
    for loss in (staticmethod(entropy), lambda self, a, b, scale=1: entropy(a, b), nn.Linear(4, 3)):
        check_hooks(task_with(loss=loss)(config))
    task, line = task_with(loss=HOOKS["loss"][0]), rf"Wrong\.loss takes {HOOKS['loss'][1]}"
    check(tmp_path, {"run": (task, ConfigError, line)})


def test_attributes_of_the_trainers_names_are_refused(tmp_path):
    def set_model(self):
        self.model = nn.Linear(4, 3)

    expected = {
        "class": (task_with(step=0), ConfigError, "Wrong.step: is the trainer's; choose .*"),
        "self": (
            task_with(build_model=set_model),
            ConfigError,
            "self.model: is set by the trainer; choose another name",
        ),
    }
    check(tmp_path, expected)


def test_an_attribute_that_a_task_does_not_have_is_named_with_what_there_is(tmp_path):
    cases = {
        "log": (lambda task: task.log("a", 1), r"use self.record\(name, values\) with a value .*"),
        "optimizer": (lambda task: task.optimizer, r"use self.optimizers in train_step, or .*"),
        "wolrd": (lambda task: task.wolrd, r"did you mean self.world\?"),
        "lr": (lambda task: task.config.optim.lr, r"use \['lr'\]"),
    }
    expected = {}
    for name, (read, advice) in cases.items():
        task = task_with(loss=lambda self, *given, read=read: read(self))
        kind = "dict" if name == "lr" else "Wrong"
        line = rf"{kind} has no attribute {name} \(\S+test_wrong_hooks.py:\d+\); {advice}"
        expected[name] = (task, ConfigError, line)
    other = task_with(loss=lambda self, *given: self.criterion(*given))
    expected["own"] = (other, AttributeError, "'Wrong' object has no attribute 'criterion'")
    check(tmp_path, expected)


class Named(Items):
    """Examples are dicts, some with more words than others."""

    def __getitem__(self, index):
        _, target = super().__getitem__(index)
        return {"words": [0.5] * (4 + (index == BAD)), "label": int(target)}


def test_a_batch_by_name_says_which_names_it_has_and_how_long_lists_are(tmp_path):
    named = {"build_dataset": lambda self, split: Named(split)}

    def collate(self, rows):
        return {"labels": torch.tensor([row["label"] for row in rows])}

    expected = {
        "label": (
            task_with(
                **named, collate=collate, split_batch=lambda self, batch: (0, batch["label"])
            ),
            ConfigError,
            "split_batch reads 'label': must be one of labels",
        ),
        "lists": (
            task_with(
                **named, split_batch=lambda self, b: (torch.stack(b["words"], 1), b["label"])
            ),
            RunError,
            rf"{UNREADABLE}it is {{'words': '5 x float', 'label': 'int'}} and the others are "
            r"{'words': '4 x float', 'label': 'int'}; repair it, pad in collate\(rows\), .*",
        ),
    }
    check(tmp_path, expected)


NO_GPU = r"torch sees no GPU here; leave out .cuda\(\) and .to\(\): the trainer moves the model .*"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_task_that_asks_for_a_gpu_that_is_not_there_is_one_line(tmp_path):
    cases = {
        "model": task_with(build_model=lambda self: nn.Linear(4, 3).cuda()),
        "loss": with_loss(lambda values: values.cuda()),
        "augment": augmenting(lambda x, y: (x.to("cuda"), y)),
    }
    line = rf".*CUDA.* \(\S+test_wrong_hooks.py:\d+\): {NO_GPU}"
    check(tmp_path, {name: (task, ConfigError, line) for name, task in cases.items()})


def test_options_that_are_no_dataclass_are_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"^Score: must be a dataclass; write @dataclass above"):
        task_with(Options=Score)(compose(tmp_path, *WORDS))


def test_a_process_group_of_the_tasks_own_is_refused(tmp_path):
    def init(self, config):
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        Tiny.__init__(self, config)

    line = r"a process group is open already: leave out init_process_group; the trainer calls it"
    check(tmp_path, {"init": (task_with(__init__=init), ConfigError, line)})


class WithoutSuper(Tiny):
    def __init__(self, config):
        self.width = 3


def test_a_task_whose_init_does_not_call_the_trainers_is_one_line(tmp_path):
    line = r"^WithoutSuper\.__init__: must begin with super\(\)\.__init__\(config\)$"
    config = compose(tmp_path, *WORDS)
    for use in (Tiny.fit, Tiny.evaluate, lambda task: task.options, lambda task: task.step):
        with pytest.raises(ConfigError, match=line):
            use(WithoutSuper(config))
    with pytest.raises(AttributeError, match="'WithoutSuper' object has no attribute 'height'"):
        _ = WithoutSuper(config).height


def test_a_task_is_built_from_a_config_alone():
    line = r"^Tiny: config is a dict: must be what trainer\.load_config\(\[\.\.\.\]\) returns$"
    with pytest.raises(ConfigError, match=line):
        Tiny({"run": {"epochs": 2}})


def test_a_module_that_imports_from_its_package_must_be_named_with_it(tmp_path, monkeypatch):
    (tmp_path / "alone.py").write_text("from .model import build")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError, match=r"start in the folder above, with key=<folder>\.alone\.T$"
    ):
        resolve("alone.T", "key", ["alone"])


class Helped(Tiny):
    def loss(self, outputs, targets):
        return self.compute_loss(outputs, targets)

    def compute_loss(self, outputs, targets):
        return super().loss(outputs, targets)

    def rescale(self, outputs):
        return outputs


class Misspelled(Helped):
    def metric(self, outputs, targets):
        return {}

    def configure_optimizers(self):
        return None


def test_a_method_that_looks_like_a_hook_and_is_never_called_is_named():
    assert find_unused_hooks(Tiny) == find_unused_hooks(Helped) == []
    near, foreign = sorted(find_unused_hooks(Misspelled), reverse=True)
    never = "is never called by the trainer"
    assert near == f"warning: Misspelled.metric {never}; did you mean metrics?"
    advice = "write build_optimizer and build_schedule"
    assert foreign == f"warning: Misspelled.configure_optimizers {never}; {advice}"


def test_the_start_says_which_methods_are_never_called(tmp_path, capfd):
    fit_on(1, tmp_path, *WORDS, task=Misspelled)
    assert "Misspelled.metric is never called" in capfd.readouterr().out


def test_blocks_that_are_no_parts_of_the_model_are_named(tmp_path):
    lists = r"blocks\(model\): must return a list of modules of the model"
    twice = r"blocks\(model\): must not name a module twice, or the model itself"
    expected = {
        "twice": (task_with(blocks=lambda self, model: [model[0], model[0]]), ConfigError, twice),
        "whole": (task_with(blocks=lambda self, model: [model]), ConfigError, twice),
        "another": (task_with(blocks=lambda self, model: [nn.Linear(2, 2)]), ConfigError, lists),
        "no list": (task_with(blocks=lambda self, model: model[0]), ConfigError, lists),
    }
    check(tmp_path, expected)
