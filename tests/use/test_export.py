"""trainer.use: a trained model for other programs, which is compared with PyTorch first."""

import hashlib
import json
import re
import sys
from pathlib import Path

import numpy
import pytest
import torch
from harness import CONF, fit_on, newest
from harness.stored import tensors_of
from safetensors.torch import load_file
from tiny import Tiny
from torch import nn

import trainer.tasks.cifar
from trainer import load_config
from trainer.base.errors import ConfigError, RunError
from trainer.base.same.distance import apart
from trainer.use import export as export_room
from trainer.use import model
from trainer.use.model import Flat

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

QUICK = ["run.steps=6", "eval.every_epochs=null", "eval.every_steps=null"]
QUICK += ["checkpoint.every_epochs=null", "checkpoint.every_steps=null"]
SMALL_TEXT = [
    *("task.options.files=24", "task.options.context=16", "task.options.width=16"),
    *("task.options.layers=2", "task.options.heads=2"),
]
BUILT_IN = {
    "airbench": ["task=cifar", "task.options.widths=[16,32,32]", "optim=sgd", "optim.lr=0.001"],
    "resnet18": [
        *("task=cifar", "task.options.model=resnet18", "optim=sgd", "schedule=cosine"),
        *("data.global_batch=20", "run.steps=2"),
    ],
    "text": ["task=text", *SMALL_TEXT],
    "finetune": ["task=finetune", "task.options.texts=12", "task.options.width=16"],
}


def differences(text):
    """Return the differences that the command printed, by batch size."""
    line = next(line for line in text.splitlines() if line.startswith("largest difference"))
    words = line.partition(": ")[2].partition(" (")[0].split(", ")
    return {int(word.split()[-1]): float(word.split()[0]) for word in words}


@pytest.mark.slow
@pytest.mark.parametrize("task", BUILT_IN)
def test_built_in_tasks_are_exported(task, command):
    if task == "finetune":
        pytest.importorskip("datasets")
    words = [*QUICK, *BUILT_IN[task], "strategy.precision=fp32", "run.name=run"]
    assert command(*words).returncode == 0
    (directory,) = command.folder.glob("runs/*/run")
    done = command(str(directory), f"out={command.folder}/m.onnx", verb=EXPORT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stdout and done.stderr == ""
    found = differences(done.stdout)
    assert {*found} == {1, 7} and max(found.values()) <= 1e-5
    session = onnxruntime.InferenceSession(command.folder / "m.onnx")
    stored = numpy.load(command.folder / "m.onnx.npz")
    for rows in (1, 3, 7):  # 3 rows were not compared by the command
        inputs = {each.name: stored[f"inputs.{each.name}"][:rows] for each in session.get_inputs()}
        for place, values in zip(session.get_outputs(), session.run(None, inputs), strict=True):
            ours = stored[f"outputs.{place.name}"][:rows]
            assert abs(values - ours).max() <= 1e-5 * max(1, abs(ours).max())
            assert ours.std() > 1e-4  # the model tells examples apart
    text = (command.folder / "m.onnx.md").read_text()
    assert "largest difference to PyTorch" in text and "## Before the model" in text
    assert str(Path(CONF).parents[1]).encode() not in (command.folder / "m.onnx").read_bytes()


EXPORT = "trainer.use"
TINY = ["task=tiny", "run.steps=20", "log.every_steps=9"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return fit_on(1, tmp_path_factory.mktemp("trained"), *TINY)["directory"]


def export(command, directory, *words, environment=None):
    return command(str(directory), *words, f"--config-dir={CONF}", verb=EXPORT)


@pytest.mark.slow
def test_files_of_an_export(trained, command):
    done = export(command, trained, f"out={trained}/export/m.onnx")
    assert done.returncode == 0, done.stdout + done.stderr
    place = trained / "export"
    name = "m.onnx"
    assert sorted(path.name for path in place.iterdir()) == [name, f"{name}.md", f"{name}.npz"]
    text = (place / f"{name}.md").read_text()
    assert "| `input` | float32 | (batch, 4) |" in text
    assert "def augment(self, inputs, targets, random, train):" in text
    again = export(command, trained, f"out={trained}/export/m.onnx")
    assert again.returncode == 2
    assert f"{name}: already exists; give another name" in again.stderr


@pytest.mark.slow
def test_a_checkpoint_of_any_layout_gives_equal_bits(tmp_path, command):
    """The same weights, saved by 1 rank, under fsdp and under pp, are the same files."""
    words = ["task=meshed", "strategy.precision=fp32", "run.steps=4"]
    one = fit_on(1, tmp_path / "one", *words, "strategy=single")["directory"]
    still = [*words, "optim.lr=0.0", "run.steps=1", f"run.init_from={one}"]
    digests = {}
    for layout, ranks in {"single": 1, "fsdp": 2, "pp": 2}.items():
        run = fit_on(ranks, tmp_path / layout, *still, f"strategy={layout}")["directory"]
        for form in ("onnx", "safetensors"):
            out = tmp_path / f"{layout}.{form}"
            done = export(command, run, f"out={out}")
            assert done.returncode == 0, done.stdout + done.stderr
            digests.setdefault(form, set()).add(hashlib.sha256(out.read_bytes()).hexdigest())
    assert {form: len(each) for form, each in digests.items()} == {"onnx": 1, "safetensors": 1}


@pytest.mark.slow
def test_averaged_weights_are_exported_where_evaluation_uses_them(tmp_path, command):
    run = fit_on(1, tmp_path, *TINY, "run.ema_decay=0.9")["directory"]
    out = tmp_path / "weights.safetensors"
    done = export(command, run, f"out={out}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit for bit" in done.stdout
    found, averages = load_file(out), tensors_of(newest(run), "ema")
    for name, average in averages.items():
        assert torch.equal(found[name], average.float()), name
    assert "averaged (run.ema_decay)" in (tmp_path / "weights.safetensors.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp64", "bf16", "amp_bf16"])
def test_a_run_of_another_precision_is_exported_in_fp32(precision, tmp_path, command):
    run = fit_on(1, tmp_path, *TINY, f"strategy.precision={precision}")["directory"]
    out = tmp_path / "weights.safetensors"
    done = export(command, run, f"out={out}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {t.dtype for t in load_file(out).values()} == {torch.float32}


class Wrong(nn.Linear):
    """Layer that returns other values while torch exports it."""

    def forward(self, inputs):
        return super().forward(inputs) + float(torch.compiler.is_exporting())


class WrongTask(Tiny):
    def build_model(self):
        return Wrong(4, 3)


class Values(Tiny):
    """A model that decides by a value, which no graph can hold."""

    def build_model(self):
        class Net(nn.Linear):
            def forward(self, inputs):
                return super().forward(inputs) * (2 if inputs.sum() > 0 else 1)

        return Net(4, 3)


class Odd(Tiny):
    """Outputs of an input's name, of no batch, of -inf, and a first one that is a scalar."""

    def build_model(self):
        class Net(nn.Linear):
            def forward(self, input):
                logits = super().forward(input)
                masked = logits.masked_fill(logits < 0, -float("inf"))
                whole = {"scale": logits.new_ones(()) * 2, "input": input, "weight": self.weight}
                return {**whole, "masked": masked, "logits": logits}

        return Net(4, 3)

    def loss(self, outputs, targets):
        return super().loss(outputs["logits"], targets)

    def metrics(self, outputs, targets):
        return {}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["onnx", "safetensors"])
def test_outputs_of_any_kind(form, tmp_path, command):
    run = fit_on(1, tmp_path, *TINY, task=Odd)["directory"]
    text = (run / "config.json").read_text().replace("tiny.Tiny", "test_export.Odd")
    (run / "config.json").write_text(text)
    out = tmp_path / f"model.{form}"
    named = "task.trainer=test_export.Odd"
    done = export(command, run, f"out={out}", named)
    assert done.returncode == 0, done.stderr
    page = Path(f"{out}.md").read_text()
    for line in ("`scale` | float32 | ()", "`weight` | float32 | (3, 4)"):
        assert f"| {line} |" in page
    for line in ("`outputs.input` | float32 | (batch, 4)", "`masked` | float32 | (batch, 3)"):
        assert f"| {line} |" in page


def test_page_has_what_the_preprocessing_uses():
    task = trainer.tasks.cifar.Cifar(load_config(["task=cifar"]))
    page = "\n".join([*model._used(task), model._example(task)])
    for line in (
        "def normalize(images",
        "def statistics(device",
        "MEAN = (0.4914, 0.4822, 0.4465)",
    ):
        assert line in page
    assert "- `0`: uint8 (3, 32, 32), from " in page


@pytest.mark.slow
@pytest.mark.parametrize(
    "task, line",
    [
        ("WrongTask", "out=FILE.onnx: outputs differs by .* from PyTorch at batch 1, more than"),
        ("Values", "out=FILE.onnx: torch cannot export this model: "),
    ],
)
def test_a_wrong_export_is_not_written(task, line, tmp_path, command):
    run = fit_on(1, tmp_path, *TINY, task=globals()[task])["directory"]
    text = (run / "config.json").read_text().replace("tiny.Tiny", f"test_export.{task}")
    (run / "config.json").write_text(text)
    out = tmp_path / "model.onnx"
    named = f"task.trainer=test_export.{task}"
    done = export(command, run, f"out={out}", named)
    assert done.returncode in (1, 2)
    assert len(done.stderr.splitlines()) == 1
    assert re.match(f"error: {line}", done.stderr), done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny"]


def test_inputs_have_the_names_of_forward():
    class Net(nn.Module):
        def forward(self, tokens, positions, *, mask=None):
            return {"logits": tokens + positions["a"], "more": [tokens, None, 3]}

    example = (torch.ones(2), {"a": torch.ones(2), "b": 4})
    flat = Flat(Net(), example)
    assert flat.inputs == ["tokens", "positions.a"]
    assert flat.outputs == ["logits", "more.0"]
    assert [t.tolist() for t in flat(torch.zeros(2), torch.ones(2))] == [[1, 1], [0, 0]]


TASK = "task.trainer=tiny.Tiny"
LONG = "x" * 250  # a name of 255 bytes is allowed


@pytest.mark.parametrize(
    "words, line",
    [
        (["out=m.onnx"], "give one run directory: python -m trainer.use RUN [out=FILE]"),
        (["{run}", "out=m.pt"], "out=m.pt: must end with .npz, .jsonl, .parquet, .onnx, "),
        (
            ["{run}", "out=m.onnx", "--stored"],
            "--stored: must stand beside out=FILE.safetensors, not m.onnx",
        ),
        (["/nowhere", "out=m.onnx"], "/nowhere"),
        (["{run}", "out=s3://bucket/x/"], "out=s3://bucket/x/: is an address, and exports are"),
        (["{run}", "out=file:///x.onnx"], "out=file:///x.onnx: is an address, and exports are"),
        (["{run}", "out="], "out=: names nothing; give a file, or a folder that ends with /"),
        (
            ["{run}", TASK, f"out={LONG}.onnx"],
            f"out={LONG}.onnx.md: File name too long; give another",
        ),
        (["{run}", f"out={LONG}/x/{LONG * 2}/"], f"out={LONG}/x/{LONG * 2}/: File name too long"),
        (["{run}", TASK, "out=/dev/null/m.onnx"], "out=/dev/null/m.onnx: cannot be written, /dev"),
        (
            ["{run}", "out=/dev/null/m.safetensors", "--stored"],
            "out=/dev/null/m.safetensors: cannot be written, /dev/null is not a directory; give",
        ),
        (
            ["{run}", "out=m.engine"],
            "out=FILE.engine: needs an NVIDIA GPU, and torch sees none here; run here: python -m",
        ),
    ],
)
def test_mistakes_are_one_line(words, line, trained, command):
    if torch.cuda.is_available() and "out=m.engine" in words:
        pytest.skip("there is a GPU here")
    done = command(*(word.format(run=trained) for word in words), verb=EXPORT)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {line}") and len(done.stderr.splitlines()) == 1


def test_without_onnx_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(
        ConfigError, match=r"out=FILE.onnx: run pip install 'lockstep-trainer\[export\]'"
    ):
        export_room.write_graph(None, tmp_path / "m.onnx", {})


def test_limit_is_relative_to_large_outputs():
    ours = torch.tensor([100.0, 1.0])
    assert apart(ours, ours + 1e-4, 1.0) == pytest.approx(1e-6, rel=0.1)
    assert apart(ours / 1000, ours / 1000 + 1e-6, 1.0) == pytest.approx(1e-6, rel=0.01)
    assert apart(ours, ours[:1], 1.0) == float("inf")
    masked = torch.tensor([1.0, -float("inf"), float("nan")])
    assert apart(masked, masked.clone(), 1.0) == 0.0
    assert not apart(masked, torch.tensor([1.0, float("inf"), 2.0]), 1.0) <= 1e-5
    assert issubclass(RunError, RuntimeError) and json
