"""Splits and predictions: each example once, in order, on any layout and mesh."""

import itertools
import json
import os
import re
import resource
import signal

import numpy
import pytest
import torch
from harness import CONF, fit_on, on_ranks, slow_but
from harness.training import compose
from mesh_gpt import Meshed
from tiny import Tiny

from trainer import ConfigError
from trainer.base.errors import RunError
from trainer.core.engine.evaluation import Evaluator
from trainer.core.loop.training import examine
from trainer.use.predict import WRITERS, _write

WORDS = ["task=meshed", "run.steps=3", "strategy.precision=fp64", "task.options.dropout=0.1"]
LAYOUTS = {
    "1": (1, ["strategy=single"]),
    "1, micro-batches": (1, ["strategy=single", "eval.micro_batch=5"]),
    "2": (2, ["strategy=ddp"]),
    "3": (3, ["strategy=ddp", "eval.micro_batch=7"]),
    "4": (4, ["strategy=ddp"]),
    "fsdp 2": (2, ["strategy=fsdp"]),
    "tp 2": (2, ["strategy=tp"]),
    "cp 2": (2, ["strategy=cp"]),
    "pp 2": (2, ["strategy=pp", "eval.micro_batch=6"]),
    "pp 2 x ddp 2": (4, ["strategy=pp"]),
}


class Predicting(Meshed):
    def predict(self, outputs):
        return {"token": outputs.argmax(2), "score": outputs.logsumexp(2)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return fit_on(1, folder, *WORDS, "strategy=single", task=Predicting)["directory"]


def predict(folder, directory, *words):
    task = Predicting(compose(folder, *WORDS, f"run.resume={directory}", *words))
    found = examine(task, Evaluator.predict)
    return found, task.world.rank


def predicted_on(layout, folder, directory):
    ranks, words = LAYOUTS[layout]
    (found, rank), *others = on_ranks(ranks, predict, folder, directory, *words)
    assert rank == 0 and all(other == {} for other, _ in others)
    return found


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "pp 2"))
def test_predictions_are_equal_in_every_layout(layout, trained, tmp_path):
    one = predicted_on("1", tmp_path / "one", trained)
    assert one["token"].shape == (107, 8) and one["score"].dtype is torch.float64
    found = predicted_on(layout, tmp_path / "found", trained)
    assert torch.equal(found["token"], one["token"])
    torch.testing.assert_close(found["score"], one["score"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("file", ["a.npz", "a.jsonl", "a.parquet"])
@pytest.mark.parametrize("ranks", slow_but([1, 2], 2))
def test_the_command_writes_each_example_once_in_order(file, ranks, command, tmp_path):
    if file.endswith("parquet"):
        parquet = pytest.importorskip("pyarrow.parquet")
    words = ["task=tiny", f"--config-dir={CONF}", "run.name=one", "run.steps=5"]
    assert command(*words).returncode == 0
    run = command.folder / "runs/tiny/one"
    given = [str(run), f"--config-dir={CONF}", f"out={tmp_path / file}"]
    done = command(*given, verb="trainer.use", ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"203 examples of eval, prediction: {tmp_path / file}\n")
    words = [str(run), f"--config-dir={CONF}", "out=predictions/eval.npz"]
    whole = command(*words, verb="trainer.use")
    default = numpy.load(command.folder / "predictions/eval.npz")["prediction"]
    assert default.shape == (203, 3) and whole.returncode == 0
    if file.endswith("npz"):
        found = numpy.load(tmp_path / file)["prediction"]
    elif file.endswith("jsonl"):
        lines = [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
        assert [line["index"] for line in lines] == list(range(203))
        found = numpy.array([line["prediction"] for line in lines])
    else:
        table = parquet.read_table(tmp_path / file)
        assert table["index"].to_pylist() == list(range(203))
        found = numpy.array(table["prediction"].to_pylist())
    numpy.testing.assert_allclose(found, default, rtol=1e-5, atol=1e-6)


def test_wrong_arguments_are_one_line(command, tmp_path):
    words = ["task=tiny", f"--config-dir={CONF}", "run.name=one", "run.steps=2"]
    assert command(*words).returncode == 0
    given = ["runs/tiny/one", f"--config-dir={CONF}"]
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "link.npz").symlink_to("nowhere")
    before = (tmp_path / "runs/tiny/one/metrics.jsonl").read_bytes()
    for word, code, line in (
        ("out=a.csv", 2, "out=a.csv: must end with .npz, .jsonl, .parquet, .onnx, "),
        ("split=", 2, "eval.splits"),
        ("split=eval,test out=a.npz", 2, "split=eval,test: must be one split for a file; call it "),
        ("splti=test", 2, "splti"),
        (f"out={tmp_path}/file/a.npz", 2, f"out={tmp_path}/file/a.npz: cannot be written, "),
        ("out=runs/tiny/one/metrics.jsonl", 2, "out=runs/tiny/one/metrics.jsonl: already exists;"),
        ("out=folder.npz", 2, "out=folder.npz: already exists; give another name"),
        ("out=link.npz", 2, "out=link.npz: already exists; give another name"),
        (f"out={'a' * 300}.npz", 2, f"out={'a' * 300}.npz: File name too long; give another name"),
    ):
        done = command(*given, *word.split(), verb="trainer.use")
        assert done.returncode == code and done.stderr.startswith(f"error: {line}"), done.stderr
        assert done.stderr.count("\n") == 1
    assert not list(tmp_path.glob(".*"))
    assert (tmp_path / "runs/tiny/one/metrics.jsonl").read_bytes() == before


def test_predictions_that_cannot_be_written_to_the_end_leave_nothing(tmp_path, monkeypatch):
    rows = {"rows": torch.zeros(1000)}

    def body():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        for name in ("a.npz", "a.jsonl"):
            with pytest.raises(RunError, match=f"{name}: cannot be written: File too large"):
                _write(tmp_path / name, rows)
        monkeypatch.setitem(WRITERS, ".npz", lambda file, _: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(KeyboardInterrupt):
            _write(tmp_path / "b.npz", rows)
        return list(tmp_path.iterdir())

    assert on_ranks(1, body) == [[]]


class Named(Tiny):
    def build_dataset(self, split):
        return super().build_dataset({"train": "train", "eval": "eval"}[split])


def test_a_split_that_the_task_does_not_know_is_one_line(tmp_path):
    def refused():
        task = Named(compose(tmp_path, "task=tiny", "eval.splits=[eval,tset]"))
        with pytest.raises(ConfigError) as caught:
            task.evaluate()
        return str(caught.value)

    line = r"split 'tset': build_dataset raised KeyError: 'tset' \(.*test_predict.py:\d+\); "
    for said in on_ranks(2, refused):
        assert re.fullmatch(line + "name a split that it knows", said), said


class OwnNames(Tiny):
    def build_dataset(self, split):
        return super().build_dataset(["train", "val"][["train", "val"].index(split)])


def test_a_task_without_the_split_eval_is_told_to_name_its_splits(tmp_path):
    def refused():
        with pytest.raises(ConfigError) as caught:
            OwnNames(compose(tmp_path, "task=tiny")).evaluate()
        return str(caught.value)

    (said,) = on_ranks(1, refused)
    assert said.startswith("split 'eval': build_dataset raised ValueError: 'eval' is not in list (")
    assert said.endswith("; set eval.splits to the splits that it knows, such as [val]")


@pytest.mark.parametrize("task", ["text", "cifar"])
def test_built_in_tasks_refuse_an_unknown_split(task, command):
    words = [f"task={task}", "eval.splits=[tset]", "run.steps=1"]
    done = command(*words)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: split 'tset': build_dataset raised ValueError: there are")


class WithoutData(Tiny):
    def build_dataset(self, split):
        return None if split == "eval" else super().build_dataset(split)


def nothing(folder):
    return examine(WithoutData(compose(folder, "task=tiny")), Evaluator.predict)


def test_without_data_nothing_is_predicted(tmp_path):
    assert on_ranks(2, nothing, tmp_path) == [{}, {}]


class Wrong(Tiny):
    def predict(self, outputs):
        return outputs.mean()


def refusal(folder):
    task = Wrong(compose(folder, "task=tiny"))
    with pytest.raises(ConfigError) as caught:
        examine(task, Evaluator.predict)
    return str(caught.value)


def test_predictions_of_other_rows_are_refused(tmp_path):
    (told,) = on_ranks(1, refusal, tmp_path)
    assert told.startswith("predict(outputs) returned: prediction has shape (): must be a tensor")


# Splits -------------------------------------------------------------------------------------------


class Unlabelled(Tiny):
    """A test split without labels, and predictions of any names."""

    def split_batch(self, batch):
        return batch[0], batch[1] if (batch[1] >= 0).all() else None

    def build_dataset(self, split):
        data = super().build_dataset("eval")
        if split == "test":
            data.tensors[1].fill_(-1)
        return data

    def metrics(self, outputs, targets):
        return {"accuracy": (outputs.argmax(1) == targets).double()}

    def predict(self, outputs):
        return {"file": outputs.argmax(1), 0: outputs[:, 0] / (outputs[:, 1] > 0)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_split_without_labels_is_predicted(ranks, tmp_path):
    run = fit_on(1, tmp_path, "task=tiny", "run.steps=3", "strategy=single", task=Unlabelled)

    def predicted():
        words = ["task=tiny", f"run.resume={run['directory']}", "eval.splits=[test]"]
        found = examine(Unlabelled(compose(tmp_path / "p", *words)), Evaluator.predict)
        for name in ("out.npz", "out.jsonl") if found else ():
            _write(tmp_path / name, found)
        return found

    found, *_ = on_ranks(ranks, predicted)
    assert {name: len(values) for name, values in found.items()} == {"file": 203, "0": 203}
    stored = numpy.load(tmp_path / "out.npz")
    assert (stored["file"] == found["file"].numpy()).all() and stored["0"].shape == (203,)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    infinite = ~found["0"].isfinite()
    assert infinite.any() and [line["0"] is None for line in lines] == infinite.tolist()


class Ragged(Tiny):
    def predict(self, outputs):
        return torch.zeros(len(outputs), 1 + len(outputs) % 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_predictions_of_several_shapes_are_refused(ranks, tmp_path):
    def refused():
        task = Ragged(compose(tmp_path, "task=tiny", "eval.micro_batch=20"))
        with pytest.raises(ConfigError) as caught:
            found = examine(task, Evaluator.predict)
            raise AssertionError(found["prediction"].shape if found else found)
        return str(caught.value)

    if ranks == 1:
        Ragged.predict = lambda self, outputs: torch.zeros(len(outputs), 1 + (next(COUNT) > 3))
    line = "predict(outputs) returned prediction with rows of shape (1,) and (2,): must be one"
    if ranks == 2:
        Ragged.predict = lambda self, outputs: torch.zeros(len(outputs), 1 + self.world.rank)
    for said in on_ranks(ranks, refused):
        assert said.startswith(line), said


COUNT = itertools.count()


def test_a_name_that_a_table_has_is_refused(tmp_path):
    for name, values in {"index": torch.zeros(2), "z": torch.zeros(2, dtype=torch.cfloat)}.items():
        with pytest.raises(ConfigError, match=f"returned {name}, which .*; use out=FILE.npz"):
            _write(tmp_path / "a.jsonl", {name: values})
        _write(tmp_path / "a.npz", {name: values})


@pytest.mark.slow
@pytest.mark.parametrize("has_file", [False, True])
def test_a_run_of_any_layout_is_read_on_any_number_of_ranks(has_file, command, tmp_path):
    words = ["task=meshed", "run.steps=2", "run.name=run"]
    assert command(*words, f"--config-dir={CONF}", "strategy=fsdp_tp", ranks=4).returncode == 0
    given = ["runs/meshed/run", f"--config-dir={CONF}"]
    told = set()
    for ranks in (None, 2, 3):
        more = [f"out={tmp_path}/{ranks}.jsonl"] if has_file else []
        done = command(*given, *more, verb="trainer.use", **({"ranks": ranks} if ranks else {}))
        assert done.returncode == 0, done.stderr
        told.add(re.sub(r"(\d\.\d{9})\d+", r"\1", done.stdout) if not more else "")
    assert len(told) == 1, told


class Split(Meshed):
    def build_dataset(self, split):
        sizes = {"train": 107, "val": 31, "test": 19}
        if split not in sizes:
            raise ValueError(f"there is no split {split}")
        whole = super().build_dataset("train" if split == "train" else "eval")
        return torch.utils.data.Subset(whole, range(sizes[split]))


def evaluated(folder, directory, *words):
    config = compose(folder, *WORDS, "task.trainer=test_predict.Split", *words)
    if directory:
        config = compose(folder, *WORDS, f"run.resume={directory}", *words)
    return Split(config).evaluate()


@pytest.mark.parametrize("layout", slow_but(["1", "3", "pp 2", "fsdp 2"], "3"))
def test_each_split_is_evaluated_under_its_name(layout, tmp_path):
    ranks, words = LAYOUTS[layout]
    words = [*words, "eval.splits=[val,test]", "eval.every_steps=2"]
    run = fit_on(ranks, tmp_path, *WORDS, *words, task=Split)
    names = {f"{split}/{name}" for split in ("val", "test") for name in ("loss", "accuracy")}
    assert set(run["metrics"]) == names
    rows = [entry for entry in run["record"] if "val/loss" in entry]
    assert [entry["step"] for entry in rows] == [2, 3] and all(names <= set(e) for e in rows)
    (alone,) = on_ranks(1, evaluated, tmp_path, run["directory"], "eval.splits=[test]")
    assert set(alone) == {"test/loss", "test/accuracy"}
    for name, value in alone.items():
        assert run["metrics"][name] == pytest.approx(value, rel=1e-12)
    (train,) = on_ranks(1, evaluated, tmp_path, run["directory"], "eval.splits=[train]")
    assert set(train) == {"train/loss", "train/accuracy"}


def test_the_best_metric_is_of_the_first_split_or_of_the_one_it_names(tmp_path):
    words = [*WORDS, "eval.splits=[val,test]", "strategy=single", "checkpoint.keep_last=9"]
    for metric, expected in ((None, "val/loss"), ("test/accuracy", "test/accuracy")):
        more = [f"checkpoint.best_metric={metric}", "checkpoint.best_mode=min"] if metric else []
        run = fit_on(1, tmp_path / expected, *words, *more, task=Split)
        end = json.loads((run["directory"] / "exit.json").read_text())
        assert end["best"] == run["metrics"][expected]


def test_wrong_splits_are_refused_in_one_line(tmp_path):
    cases = {
        "eval.splits=[train]": "eval.splits=['train']: must not have train: its means",
        "eval.splits=[]": "eval.splits=[]: must be one or more different names",
        "eval.splits=[val,val]": "must be one or more different names",
        "checkpoint.best_metric=f1": "checkpoint.best_mode is missing: set it to min or max for",
        "checkpoint.best_metric=f1 checkpoint.best_mode=max": "=eval/f1: must be one of",
    }
    for number, (word, line) in enumerate(cases.items()):
        (told,) = on_ranks(1, wrong, tmp_path / str(number), word)
        assert line in told, told


def wrong(folder, word):
    try:
        config = compose(folder, *WORDS, *word.split())
    except ConfigError as error:
        return str(error)
    with pytest.raises(ConfigError) as caught:
        Meshed(config).fit()
    return str(caught.value)
