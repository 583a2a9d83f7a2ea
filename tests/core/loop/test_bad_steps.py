"""Bad steps: the step, the rank and the example are named, and the configured policy is applied."""

import multiprocessing
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from harness import CONF, check_equal_bits, fit, fit_on, newest, on_ranks, slow_but
from harness.verbs import audit, replay
from tiny import Begun, Items, Tiny, TinyItems

from trainer import RunError

RECIPE = ["task=tiny", "run.steps=12", "log.every_steps=1", "optim.lr=0.3"]
BAD = 57  # an example that makes every step that takes it non-finite
EVERY_2 = ["checkpoint.every_steps=2", "checkpoint.every_epochs=null", "checkpoint.keep_last=20"]


class BadExample(Tiny):
    """Task in which the loss of one example is NaN from step `since` on."""

    since = 0

    def augment(self, inputs, targets, random, train):
        inputs, targets = super().augment(inputs, targets, random, train)
        is_bad = (random.indices == BAD) & train & (self.step >= self.since)
        return torch.where(is_bad.unsqueeze(1), float("nan"), inputs), targets


class BadGradient(Tiny):
    """Task in which the loss of one example is finite and its gradient is not: the root of 0."""

    def augment(self, inputs, targets, random, train):
        inputs, targets = super().augment(inputs, targets, random, train)
        return inputs, torch.where((random.indices == BAD) & train, targets - 10, targets)

    def loss(self, outputs, targets):
        is_bad, right = (
            targets < 0,
            targets.clamp(0) * (targets >= 0) + (targets + 10) * (targets < 0),
        )
        return super().loss(outputs, right) + (outputs.sum(1) * 0 + ~is_bad).sqrt()


class Once(Begun):
    """Task with one transient fault, as from a flipped bit: on the last rank, when step 8 is made
    for the first time."""

    has_been = False

    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        is_last = self.world.rank == self.world.world_size - 1
        if (
            self.step == 7
            and is_last
            and self.model.training
            and self.has_begun
            and not Once.has_been
        ):
            Once.has_been = True
            return values * float("inf")
        return values


class BadGradientBesideAScalar(BadGradient):
    """Its targets contain a tensor that has no rows."""

    def augment(self, inputs, targets, random, train):
        inputs, targets = super().augment(inputs, targets, random, train)
        return inputs, (targets, torch.tensor(1.0))

    def loss(self, outputs, targets):
        return super().loss(outputs, targets[0]) * targets[1]

    def metrics(self, outputs, targets):
        return super().metrics(outputs, targets[0])


def place_of_the_bad(ranks):
    """Return the (1-based step, rank) that takes the bad example."""
    from trainer.core.data.order import BatchPlan, EpochSampler
    from trainer.core.data.sampling import Shuffle

    plan = BatchPlan(203, 22, 22, ranks)
    for rank in range(ranks):
        sampler = EpochSampler(plan, Shuffle(203), 0, rank, torch.device("cpu"))
        for step, indices in enumerate(sampler, 1):
            if BAD in indices.tolist():
                return step, rank
    raise AssertionError("not in the first epoch")


TASKS = [
    (BadExample, "loss"),
    (BadGradient, "gradient"),
    (BadGradientBesideAScalar, "gradient"),
]


@pytest.mark.parametrize("ranks", slow_but([1, 2, 3], 3))
@pytest.mark.parametrize(("task", "what"), TASKS)
def test_rank_and_example_that_make_a_step_bad_are_named(task, what, ranks, tmp_path, capfd):
    run = fit_on(ranks, tmp_path, *RECIPE, "run.steps=9", task=task)
    step, rank = place_of_the_bad(ranks)
    said = [
        line for line in capfd.readouterr().out.splitlines() if line.startswith("warning: step")
    ]
    nan = " (nan)" if what == "loss" else ""
    named = f"the {what} of example {BAD} is not finite{nan}, on rank {rank}"
    assert said == [f"warning: step {step}: {named}; the update was skipped"]
    assert all(torch.isfinite(tensor).all() for tensor in run["weights"].values())


class BadWeight(Tiny):
    """Task in which the weight of an example of step 1 is not finite."""

    def augment(self, inputs, targets, random, train):
        inputs, targets = super().augment(inputs, targets, random, train)
        return inputs, torch.where((random.indices == 184) & train, targets - 10, targets)

    def loss(self, outputs, targets):
        values = super().loss(outputs, targets % 10)
        return values, torch.where(targets < 0, float("nan"), torch.ones_like(values))


def test_weight_that_is_not_finite_makes_a_bad_step(tmp_path, capfd):
    fit_on(1, tmp_path, *RECIPE, "run.steps=3", task=BadWeight)
    named = "step 1: the loss of example 184 is not finite (nan), on rank 0; the update was skipped"
    assert named in capfd.readouterr().out


def ends(task, folder, *overrides):
    with pytest.raises(RunError) as told:
        fit(folder, *RECIPE, *overrides, task=task)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises for each that is killed
    for child in multiprocessing.active_children():
        child.kill()  # as the command line does; DataLoader waits 5 s for an abandoned worker
    return str(told.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_stop_ends_the_run_on_every_rank_with_the_example_and_how_to_look_at_it(ranks, tmp_path):
    said = on_ranks(ranks, ends, BadExample, tmp_path, "run.on_bad_step=stop")
    step, rank = place_of_the_bad(ranks)
    assert len(set(said)) == 1 and re.fullmatch(
        rf"step {step}: the loss of example {BAD} is not finite \(nan\), on rank {rank}; "
        rf"inspect it with python -m trainer.show \S+/tiny/run step={step} "
        "task.trainer=tiny.Tiny",
        said[0],
    )


@pytest.mark.parametrize("ranks", slow_but([1, 2], 2))
def test_rollback_undoes_what_happened_once(ranks, tmp_path, capfd):
    straight = fit_on(ranks, tmp_path / "straight", *RECIPE, *EVERY_2)
    rolled = fit_on(
        ranks, tmp_path / "rolled", *RECIPE, *EVERY_2, "run.on_bad_step=rollback", task=Once
    )
    assert (
        "warning: step 8: " in (said := capfd.readouterr().out)
        and "rolling back to the newest checkpoint" in said
    )
    assert "resumed at step 6 of 12" in said
    check_equal_bits(straight, rolled)
    assert rolled["record"] == straight["record"]


def test_rollback_to_the_start_where_nothing_was_saved(tmp_path):
    straight = fit_on(1, tmp_path / "straight", *RECIPE)
    rolled = fit_on(1, tmp_path / "rolled", *RECIPE, "run.on_bad_step=rollback", task=Once)
    check_equal_bits(straight, rolled)


def test_step_that_is_bad_again_after_a_rollback_ends_the_run(tmp_path):
    said = on_ranks(1, ends, BadExample, tmp_path, "run.on_bad_step=rollback", *EVERY_2)[0]
    assert "it failed again after a rollback; inspect it with python -m trainer.show" in said


@pytest.mark.parametrize("weights", slow_but(["false", "true"], "true"))
def test_replay_shows_the_example_on_one_process(weights, tmp_path, capfd, monkeypatch):
    words = [f"task.trainer={__name__}.BadExample", f"task.options.weights={weights}"]
    run = fit_on(2, tmp_path, *RECIPE, *words, *EVERY_2)
    step, _ = place_of_the_bad(2)
    capfd.readouterr()

    def body(step):
        monkeypatch.delenv("RANK")
        monkeypatch.delenv("WORLD_SIZE")
        named = [words[0], "--config-dir", CONF]
        return replay([str(run["directory"]), f"step={step}", *named])

    assert on_ranks(1, body, step) == [1]
    said = capfd.readouterr().out
    assert (
        f"example {BAD}: loss nan, it is not finite" in said and f"step {step}: 22 examples" in said
    )
    assert on_ranks(1, body, step + 1) == [0]
    said = capfd.readouterr().out
    mean, logged = re.search(r"mean loss (\S+); metrics.jsonl has (\S+)\n", said).groups()
    assert mean == logged


# Drift --------------------------------------------------------------------------------------------


class Drifting(Tiny):
    def train_step(self, batch):
        outcome = super().train_step(batch)
        if self.step == 6 and self.world.rank == 1:
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[3] += 1e-12
        return outcome


@pytest.mark.parametrize(("ranks", "optimizer"), [(2, "sgd"), (3, "adamw")])
def test_rank_whose_weights_drift_is_named(ranks, optimizer, tmp_path):
    said = on_ranks(
        ranks, ends, Drifting, tmp_path, "dist.drift_every_steps=4", f"optim={optimizer}"
    )
    line = (
        "step 8: model.0.weight on rank 1 differs from the other ranks; a rank changed only its"
        " own copy, or memory failed; resume from an earlier checkpoint with run.resume"
    )
    assert said == [line] * ranks, "and nothing is saved"


def test_ranks_that_agree_raise_no_error(tmp_path):
    wanted = ["dist.drift_every_steps=1", "task.options.norm=true", "optim=adamw"]
    assert fit_on(3, tmp_path, *RECIPE, *wanted)["step"] == 12


# Data ---------------------------------------------------------------------------------------------


class Corrupt(Items):
    bad = (BAD,)

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError(f"image {index} is truncated\nbytes: 17")
        return super().__getitem__(index)


class CorruptItems(TinyItems):
    def build_dataset(self, split):
        return Corrupt(split) if split == "train" else Items(split)


class ManyCorrupt(CorruptItems):
    def build_dataset(self, split):
        data = super().build_dataset(split)
        data.bad = tuple(range(0, 203, 10))
        return data


SAVED = r"the state after step \d is saved; resume with: python -m trainer run.resume=\S+ .*"


@pytest.mark.parametrize("workers", [0, 2])
def test_example_that_cannot_be_read_is_one_line(workers, tmp_path):
    said = on_ranks(1, ends, CorruptItems, tmp_path, f"data.workers={workers}")[0]
    where = r"\(.*test_bad_steps.py:\d+\)"
    expected = (
        rf"train example {BAD} cannot be read: OSError: image {BAD} is truncated bytes: 17 {where}"
    )
    advice = "repair it, or set data.on_error=skip for training data"
    assert re.fullmatch(f"{expected}; {advice}; {SAVED}", said)


def test_skipped_example_has_one_replacement_in_any_layout_and_resume(tmp_path, capfd):
    wanted = ["task=items", "data.on_error=skip", "run.steps=18"]
    one = fit_on(1, tmp_path / "one", *wanted, task=CorruptItems)
    two = fit_on(
        2,
        tmp_path / "two",
        *wanted,
        "data.workers=2",
        "task.options.signal_at=8",
        task=CorruptItems,
    )
    assert two["code"] == 75
    two = fit_on(3, tmp_path / "two", *wanted, "run.resume=auto", task=CorruptItems)
    assert (
        newest(one["directory"]).manifest["ledger"] == newest(two["directory"]).manifest["ledger"]
    )
    assert newest(two["directory"]).manifest["replaced"] == {
        f"{epoch}/{BAD}": BAD + 1 for epoch in range(2)
    }
    said = capfd.readouterr().out
    assert (
        said.count(
            f"warning: train example {BAD} cannot be read: the next readable one is used instead"
        )
        == 2
    )
    assert audit([str(two["directory"])]) == 0
    said = capfd.readouterr().out
    assert f"example {BAD} could not be read in epoch 1: example {BAD + 1} was used" in said
    assert said.endswith("nothing was repeated or skipped, except for these\n")


def reading(items):
    """Return a task whose dataset is `items`."""

    class DeferredRead(TinyItems):
        def build_dataset(self, split):
            return items(split)

    return DeferredRead


class OddItems(Items):
    def __getitem__(self, index):
        return (torch.zeros(2), torch.tensor(0)) if index == BAD else super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_example_of_another_form_is_named(workers, tmp_path):
    said = on_ranks(1, ends, reading(OddItems), tmp_path, f"data.workers={workers}")[0]
    assert said.startswith(
        f"train example {BAD} cannot be read: it is ((2,), ()) and the others are ((4,), ()); "
        f"repair it"
    )


class Pictures(Items):
    """Dataset of equal objects that cannot be collated."""

    def __getitem__(self, index):
        return Path("picture.png"), super().__getitem__(index)[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_examples_of_a_kind_that_makes_no_batch_are_one_line(workers, tmp_path):
    said = on_ranks(1, ends, reading(Pictures), tmp_path, f"data.workers={workers}")[0]
    assert "cannot be read: no batch can be collated from ('PosixPath', ())" in said
    assert said.endswith("return tensors, arrays, numbers, or tuples and dicts of them")


def test_too_many_examples_that_cannot_be_read_end_the_run(tmp_path):
    said = on_ranks(2, ends, ManyCorrupt, tmp_path, "data.on_error=skip")
    assert said[0] == said[1]
    assert re.fullmatch(
        r"data.on_error=skip: (1\d|20) train examples cannot be read; must be at most 10; "
        r"repair the data",
        said[0],
    )


class Killed(Items):
    def __getitem__(self, index):
        if index == BAD:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Exiting(Items):
    def __getitem__(self, index):
        if index == BAD:
            os._exit(0)
        return super().__getitem__(index)


class Hung(Items):
    def __getitem__(self, index):
        if index == BAD:
            time.sleep(30)
        return super().__getitem__(index)


class KilledWorker(TinyItems):
    def build_dataset(self, split):
        return Killed(split) if split == "train" else Items(split)


class ExitingWorker(TinyItems):
    def build_dataset(self, split):
        return Exiting(split) if split == "train" else Items(split)


class HungWorker(TinyItems):
    def build_dataset(self, split):
        return Hung(split) if split == "train" else Items(split)


def test_data_worker_that_dies_is_one_line(tmp_path):
    said = on_ranks(1, ends, KilledWorker, tmp_path, "data.workers=1")[0]
    # mostly detected while waiting for a batch; earlier, or while a batch is transferred, the
    # error is another one
    told = (
        r"a (worker of the train data|data worker) does not respond: (DataLoader worker "
        r"\(pid|it exited while)"
    )
    assert re.match(told, said), said


def test_data_worker_that_exits_with_code_0_is_noticed_at_once_with_its_example(tmp_path):
    def body():
        began = time.monotonic()
        said = ends(ExitingWorker, tmp_path, "data.workers=2")
        seconds = time.monotonic() - began
        for child in multiprocessing.active_children():
            child.kill()  # as the command line does
        return said, seconds

    ((said, seconds),) = on_ranks(1, body)
    lost = rf"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly while it read example {BAD}"
    line = f"a worker of the train data does not respond: {lost}; check its dataset"
    assert re.match(line, said) and seconds < 60, said


def test_data_worker_that_hangs_is_one_line(tmp_path):
    def body():
        began = time.monotonic()
        said = ends(HungWorker, tmp_path, "data.workers=1", "data.timeout_s=1")
        for child in multiprocessing.active_children():
            child.kill()  # as the command line does; else it keeps the pipe of the test open
        return said, time.monotonic() - began

    said, seconds = on_ranks(1, body)[0]
    why = "data.timeout_s=1 is exceeded"
    line = f"a worker of the train data does not respond: {why}; check its dataset"
    assert re.fullmatch(f"{line}; {SAVED}", said)
    assert seconds < 20


def test_bad_step_is_detected_before_it_is_published(tmp_path):
    """Otherwise it would replace the last good checkpoint, and a rollback would start at step 0."""
    every = ["checkpoint.every_steps=1", "checkpoint.every_epochs=null", "checkpoint.keep_last=1"]
    every += ["checkpoint.keep_best=0"]
    straight = fit_on(1, tmp_path / "straight", *RECIPE, *every)
    rolled = fit_on(1, tmp_path / "rolled", *RECIPE, *every, "run.on_bad_step=rollback", task=Once)
    check_equal_bits(straight, rolled)
    assert rolled["record"] == straight["record"]


def test_rollback_on_a_branch_returns_to_the_checkpoint_that_it_started_from(tmp_path):
    fit_on(1, tmp_path, "task=tiny", "run.steps=4")
    begun = [*RECIPE, f"run.resume={tmp_path}/tiny/run", "checkpoint.every_epochs=null"]
    straight = fit_on(1, tmp_path, *begun, "run.name=straight")
    rolled = fit_on(1, tmp_path, *begun, "run.name=rolled", "run.on_bad_step=rollback", task=Once)
    check_equal_bits(straight, rolled)


@pytest.mark.parametrize("ranks", [1, 2])
def test_skipped_step_leaves_running_statistics_as_they_were(ranks, tmp_path, capfd):
    run = fit_on(ranks, tmp_path, *RECIPE, "run.steps=9", "task.options.norm=true", task=BadExample)
    assert all(torch.isfinite(tensor).all() for tensor in run["weights"].values())
    assert all(value == value for value in run["metrics"].values())
    step, rank = place_of_the_bad(ranks)
    said = [
        line for line in capfd.readouterr().out.splitlines() if line.startswith("warning: step")
    ]
    named = f"the loss of example {BAD} is not finite (nan), on rank {rank}"
    assert said == [f"warning: step {step}: {named}; the update was skipped"]


def test_signal_in_the_step_of_a_rollback_is_not_lost(tmp_path):
    """The stop request is kept in every session."""
    every = ["checkpoint.every_steps=2", "checkpoint.every_epochs=null"]
    wanted = ["run.on_bad_step=rollback", "task.options.signal_at=8", "run.steps=40"]
    assert fit_on(1, tmp_path, *RECIPE, *every, *wanted, task=Once)["code"] == 75


class LateWord(TinyItems):
    """Task that raises within a step, as torch's SIGCHLD handler does when a data worker dies."""

    def train_step(self, micro_batches):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")


def test_error_of_a_dead_worker_is_one_line_wherever_it_is_raised(tmp_path):
    (said,) = on_ranks(1, ends, LateWord, tmp_path, "data.workers=1")
    worker = "DataLoader worker (pid 7) is killed by signal: Killed"
    assert said == f"a data worker does not respond: {worker}; check its dataset"
