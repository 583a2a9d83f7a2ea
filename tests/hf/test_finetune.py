"""task=finetune: a classifier of transformers on Arrow rows, new or of a folder, in any layout."""

import pytest
import torch
from harness import CONF, check_parity, fit_on, newest, slow_but
from harness.stored import tensors_of

transformers = pytest.importorskip("transformers")
tqdm = pytest.importorskip("tqdm")
tqdm.tqdm.monitor_interval = 0  # it is a thread
datasets = pytest.importorskip("datasets")

from trainer import load_config  # noqa: E402
from trainer.tasks.finetune import NO_LABEL, Finetune  # noqa: E402

SMALL = [
    *("task.options.texts=12", "task.options.words=300", "task.options.width=16"),
    *("task.options.layers=2", "task.options.heads=2", "task.options.context=24"),
]
WORDS = [
    *("task=finetune", *SMALL, "strategy.precision=fp64", "data.global_batch=12", "run.steps=20"),
    *(
        "eval.every_steps=9",
        "optim=sgd",
        "optim.lr=0.1",
        "checkpoint.every_epochs=null",
        "log.every_steps=1",
    ),
]
LAYOUTS = {
    "accumulated": (1, ["strategy=single", "data.micro_batch=5"]),
    "2, workers": (2, ["strategy=ddp", "data.workers=1"]),
    "3": (3, ["strategy=ddp"]),
    "fsdp 2": (2, ["strategy=fsdp"]),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def check_same(one, many):
    """Check parity, but for the bias of a key: its gradient is rounding alone."""
    for run in (one, many):
        run["weights"] = {n: w for n, w in run["weights"].items() if not n.endswith("key.bias")}
    check_parity(one, many, falls=False)


class Partly(Finetune):
    """Every third label is unknown; the rows are in files of Arrow that one rank has written."""

    @property
    def folder(self):
        return self.config.runs / "rows"

    def prepare(self):
        for split in ("train", "eval"):
            rows = super().build_dataset(split)
            labels = [NO_LABEL if i % 3 == 0 else label for i, label in enumerate(rows["labels"])]
            rows = rows.remove_columns("labels").add_column("labels", labels)
            rows.save_to_disk(str(self.folder / split))

    def build_dataset(self, split):
        return datasets.load_from_disk(str(self.folder / split))


@pytest.mark.slow
@pytest.mark.parametrize("task", [Finetune, Partly])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_numbers_are_those_of_one_process(layout, task, tmp_path):
    ranks, words = LAYOUTS[layout]
    one = fit_on(1, tmp_path / "one", *WORDS, "strategy=single", task=task)
    many = fit_on(ranks, tmp_path / "many", *WORDS, *words, task=task)
    check_same(one, many)


def test_rows_without_a_label_have_no_weight(tmp_path):
    """The mean is that of the known labels."""
    words = [*WORDS, "run.steps=1", "optim.lr=0.0", "task.options.dropout=0.0"]
    every = fit_on(1, tmp_path, *words, "data.global_batch=48", task=Partly)
    config = load_config([*words, f"run.dir={tmp_path}"], [CONF])
    task = Partly(config)
    rows = task.build_dataset("eval")
    known = [row for row in rows if row["labels"] != NO_LABEL]
    assert 0 < len(known) < len(rows)
    torch.manual_seed(config.run.seed)
    model = task.build_model().double().eval()
    inputs, labels = task.split_batch(task.collate(known))
    with torch.no_grad():
        mean = float(torch.nn.functional.cross_entropy(model(**inputs).logits, labels))
    assert every["metrics"]["eval/loss"] == pytest.approx(mean, rel=1e-9)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """Return a folder with a model of another number of classes, and its tokenizer."""
    folder = tmp_path_factory.mktemp("pretrained")
    task = Finetune(load_config(["task=finetune", *SMALL], [CONF]))
    task.tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    config = transformers.BertConfig(
        num_labels=3, vocab_size=len(task.tokenizer), max_position_embeddings=24, hidden_size=16,
        intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("layout", slow_but(["fsdp 2", "2, workers"]))
def test_a_run_starts_from_a_model_in_a_folder(layout, pretrained, tmp_path):
    ranks, words = LAYOUTS[layout]
    still = ["optim.lr=0.0", "run.steps=1", f"task.options.model={pretrained}"]
    run = fit_on(ranks, tmp_path, *WORDS, *words, *still, "strategy.precision=fp32")
    found = tensors_of(newest(run["directory"]))
    given = transformers.BertForSequenceClassification.from_pretrained(pretrained).state_dict()
    equal = [name for name in given if torch.equal(given[name], found.get(name, torch.empty(0)))]
    assert {*given} - {*equal} == {"classifier.weight", "classifier.bias"}  # 3 classes, here 8
    assert found["classifier.bias"].shape == (8,)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp 2", "3"])
def test_a_model_in_a_folder_is_trained_alike_in_any_layout(layout, pretrained, tmp_path):
    ranks, words = LAYOUTS[layout]
    words = [*words, f"task.options.model={pretrained}"]
    one = fit_on(1, tmp_path / "one", *WORDS, "strategy=single", words[-1])
    check_same(one, fit_on(ranks, tmp_path / "many", *WORDS, *words))


@pytest.mark.slow
def test_finetune_is_proved_in_all_default_layouts(command):
    words = ["task=finetune", *SMALL, "data.global_batch=24"]
    done = command(*words, verb="trainer.prove", limit_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "proved: all runs learned the same" in done.stdout


def test_a_folder_without_a_model_is_refused(command, tmp_path):
    done = command("task=finetune", f"task.options.model={tmp_path}")
    assert done.returncode == 2
    must = "must be a folder that save_pretrained of transformers has written"
    assert done.stderr == f"error: task.options.model={tmp_path}: {must}\n"


@pytest.mark.slow
def test_the_recipe_learns(command):
    done = command("task=finetune", "strategy.precision=fp32", "run.epochs=2", limit_s=400)
    assert done.returncode == 0, done.stdout + done.stderr
    words = done.stdout.rsplit("eval/accuracy", 1)[0].split()
    assert "best" in words
    best = float(done.stdout.rsplit("best eval/accuracy: ", 1)[1].split()[0])
    assert best > 0.4  # one of eight is 0.125
