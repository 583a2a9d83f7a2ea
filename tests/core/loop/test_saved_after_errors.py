"""An error between two steps loses no step: the state is saved, and a resume goes on as if there
had been no error."""

import json
import re

import pytest
from harness import check_equal_bits, fit, fit_on, newest, on_ranks, slow_but
from mesh_gpt import Meshed
from tiny import Items, Tiny

from trainer.core.loop.run import Run
from trainer.core.record.trackers.tensorboard import TensorBoard

WORDS = ["task=tiny", "run.steps=8", "eval.every_steps=3", "log.every_steps=2"]
WORDS += ["checkpoint.every_epochs=null", "eval.every_epochs=null"]
AT = 6  # the evaluation that fails, or the step after which something fails
SAVED = r"the state after step 6 is saved; resume with: .*-m trainer run.resume=\S+/tiny/run .*"


class Failing(Tiny):
    """Task that raises ValueError in the hook `where` on one rank, or on every rank."""

    where = ""
    rank = None

    def fail(self, where):
        is_here = self.rank is None or self.world.rank == self.rank
        if self.where == where and is_here and self.step >= AT:
            raise ValueError(f"in {where}")

    def metrics(self, outputs, targets):
        self.fail("metrics")
        return super().metrics(outputs, targets)

    def loss(self, outputs, targets):
        if not self.model.training:
            self.fail("loss")
        return super().loss(outputs, targets)

    def summarize(self, means):
        self.fail("summarize")
        return {"twice": 2 * means["loss"]}

    def build_dataset(self, split):
        return FailingItems(split, lambda: self.fail(f"the {split} data"))

    def augment(self, inputs, targets, random, train):
        return inputs, targets


class FailingItems(Items):
    def __init__(self, split, fail):
        super().__init__(split)
        self.fail = fail

    def __getitem__(self, index):
        self.fail()
        return super().__getitem__(index)


def task(place):
    return type("Task", (Failing,), {"where": place})


def ends(folder, task, *words):
    """Return the type and the message of the error that ends a run."""
    try:
        fit(folder, *words, task=task)
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("no error")


def check_resumed(resumed, straight):
    """Check that a run and its record are those of one without an error."""
    check_equal_bits(straight, resumed)
    assert resumed["record"] == straight["record"]
    assert resumed["metrics"] == straight["metrics"] and resumed["code"] == 0


PLACES = ["metrics", "summarize", "loss", "the eval data", "the train data"]


def test_an_error_between_two_steps_is_raised_when_the_state_is_saved(tmp_path):
    def body():
        straight = fit(tmp_path / "straight", *WORDS, task=task(""))
        found = []
        for place in PLACES:
            folder = tmp_path / str(PLACES.index(place))
            found.append(ends(folder, task(place), *WORDS))
            saved = newest(folder / "tiny/run").manifest
            ended = json.loads((folder / "tiny/run/exit.json").read_text())
            assert saved["step"] == ended["step"] == AT
            assert re.search(f"in {place}.*; {SAVED}$", ended["reason"]), ended
            check_resumed(fit(folder, *WORDS, "run.resume=auto", task=task("")), straight)
        return found

    (found,) = on_ranks(1, body)
    for place, (kind, text) in zip(PLACES, found, strict=True):
        assert (kind, text) == ("ValueError", f"in {place}") or re.search(SAVED + "$", text)


def test_a_mistake_in_a_training_step_publishes_no_half_state(tmp_path):
    class HalfStep(Tiny):
        def train_step(self, batch):
            outcome = super().train_step(batch)
            if self.step == AT:
                self.evaluate()
                raise ValueError("after the update")
            return outcome

    def body():
        with pytest.raises(ValueError, match="after the update"):
            fit(tmp_path, *WORDS, "checkpoint.every_steps=2", task=HalfStep)

    on_ranks(1, body)
    assert newest(tmp_path / "tiny/run").manifest["step"] == AT


def test_an_error_between_a_step_and_its_log_loses_no_line_of_the_record(tmp_path):
    """As torch raises one at any moment, once a worker of a data loader was killed."""

    def body():
        straight = fit(tmp_path / "straight", *WORDS, task=Tiny)
        end = Run.at_end_of_segment

        def killed(run, evaluate):
            if run.step == AT:
                raise RuntimeError("DataLoader worker is killed")
            end(run, evaluate)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Run, "at_end_of_segment", killed)
            assert "worker is killed" in ends(tmp_path, Tiny, *WORDS)[1]
        check_resumed(fit(tmp_path, *WORDS, "run.resume=auto", task=Tiny), straight)

    on_ranks(1, body)


class FailingMesh(Meshed):
    where = ""
    rank = None
    fail = Failing.fail

    def metrics(self, outputs, targets):
        self.fail("metrics")
        return super().metrics(outputs, targets)

    def build_model(self):
        model = super().build_model()
        model.blocks[0].register_forward_pre_hook(
            lambda *_: None if model.training else self.fail("the model")
        )
        return model


LAYOUTS = {
    "ddp": (2, ["strategy=ddp"]),
    "fsdp": (2, ["strategy=fsdp"]),
    "exact": (2, ["strategy=exact", "data.micro_batch=11"]),
    "tp": (2, ["strategy=tp"]),
    "cp": (2, ["strategy=cp"]),
    "pp": (2, ["strategy=pp"]),
    "pp x ddp": (4, ["strategy=pp"]),
}
CASES = [(layout, where) for layout in LAYOUTS for where in ("metrics", "the model")]


@pytest.mark.parametrize("layout, where", slow_but(CASES, ("ddp", "metrics")))
def test_an_evaluation_that_fails_on_one_rank_ends_all_of_them_with_the_state_saved(
    layout, where, tmp_path
):
    """A forward pass that communicates has to fail on all ranks: the others would wait for it."""
    ranks, words = LAYOUTS[layout]
    words = ["task=meshed", *WORDS[1:], *words]
    rank = None if where == "the model" and layout not in ("ddp", "exact") else ranks - 1
    task = type("Task", (FailingMesh,), {"where": where, "rank": rank})
    if layout.startswith("pp") and where == "the model":
        pytest.skip("only the first stage has the block")
    ends_of = on_ranks(ranks, ends, tmp_path, task, *words)
    for number, (kind, text) in enumerate(ends_of):
        if rank in (None, number):
            assert (kind, text) == ("ValueError", f"in {where}")
        else:
            failed = f"rank {rank} failed evaluating eval: ValueError: in {where}"
            assert (kind, text) == ("RuntimeError", failed)
    assert newest(tmp_path / "meshed/run").manifest["step"] == AT
    resumed = fit_on(ranks, tmp_path, *words, "run.resume=auto", task=Meshed)
    assert [e["step"] for e in resumed["record"] if "eval/loss" in e] == [3, 6, 8]


def test_a_sink_that_fails_on_rank_0_stops_all_ranks_with_the_state_saved(tmp_path, monkeypatch):
    def refuse(sink, step, name, values):
        raise ValueError("no histogram")

    monkeypatch.setattr(TensorBoard, "histogram", refuse)
    words = [*WORDS, "log.histograms_every_steps=4"]
    ends_of = on_ranks(2, ends, tmp_path, task(""), *words)
    saved = newest(tmp_path / "tiny/run").manifest["step"]
    assert saved == 6  # the others hear of it with step 5, and read that one step later
    kinds = [kind for kind, _ in ends_of]
    assert kinds == ["ValueError", "RuntimeError"], ends_of
    assert ends_of[1][1] == "rank 0 failed recording: ValueError: no histogram"
    resumed = fit_on(2, tmp_path, *WORDS, "run.resume=auto", task=task(""))
    straight = fit_on(2, tmp_path / "straight", *WORDS, task=task(""))
    check_resumed(resumed, straight)
