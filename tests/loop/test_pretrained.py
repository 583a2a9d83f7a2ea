"""A folder of Hugging Face out of a run: what is written, loaded again, and refused."""

import json
from pathlib import Path

import pytest
import torch
from harness import slow_but
from harness.ranks import on_ranks
from harness.training import compose, fit
from pretrained import FAMILIES, Pretrained, WithTokenizer, build, fork_reloads

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
tqdm = pytest.importorskip("tqdm")
tqdm.tqdm.monitor_interval = 0  # it is a thread

from trainer.errors import ConfigError, RunError  # noqa: E402
from trainer.loop.folder_export import FolderExport, write_pretrained  # noqa: E402

WORDS = ["task=pretrained", "checkpoint.export=hf", "log.trackers=[]"]
EXPORT = "trainer.use"


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def base_of(family: str, folder: Path) -> str:
    torch.manual_seed(1)
    build(family).save_pretrained(folder)
    return str(folder)


def train(folder, *words, task=Pretrained):
    """Train with an export at the end, in a fork; return the run and the printed lines."""

    def use():
        fork_reloads()
        return fit(folder, *WORDS, *words, task=task)["directory"]

    (found,) = on_ranks(1, use)
    return found


def merge(folder, run, out, *words, **options):
    """Write a folder of a finished run, in a fork; return the lines about it."""

    def use():
        fork_reloads()
        config = compose(folder, *WORDS, *words, f"run.resume={run}")
        task = options.pop("task", Pretrained)(config)
        export = FolderExport(out, f"out={out}", **options)
        return write_pretrained(task, config, export)[0]

    (found,) = on_ranks(1, use)
    return found


@pytest.mark.slow
def test_ten_families_are_loaded_with_equal_outputs(tmp_path):
    """Plain, with adapters, and merged: 33 folders."""

    def use():
        fork_reloads()
        lines = {}
        for family in FAMILIES:
            home = tmp_path / family
            words = [*WORDS, f"task.options.family={family}"]
            fit(home / "plain", *words, task=Pretrained)
            words += [f"task.options.base={base_of(family, home / 'base')}", "task.options.lora=2"]
            run = fit(home / "lora", *words, task=Pretrained)["directory"]
            config = compose(home / "lora", *words, f"run.resume={run}")
            export = FolderExport(home / "merged", "out", is_merged=True)
            lines[family] = write_pretrained(Pretrained(config), config, export)[0]
        return lines

    (lines,) = on_ranks(1, use)
    assert {*lines} == {*FAMILIES}
    for family, (first, merged, *_) in lines.items():
        assert "transformers loads it with equal logits" in first, family
        assert merged.startswith("merging only rounded: the merged model has "), family
        for name in ("plain/pretrained/run/export", "lora/pretrained/run/export", "merged"):
            folder = tmp_path / family / name
            facts = json.loads((folder / "lockstep.json").read_text())
            assert facts["is_adapter"] == (name[:4] == "lora")
            assert "README.md" in facts["files"]


def test_bars_of_a_tasks_own_load_are_hidden_on_each_rank(tmp_path, capfd):
    """The load in build_model, on two ranks and for the export; they are given back."""
    base = base_of("llama", tmp_path / "base")
    capfd.readouterr()

    def use():
        fork_reloads()
        words = ["task.options.family=llama", f"task.options.base={base}"]
        fit(tmp_path / "run", *WORDS, *words, task=Pretrained)
        assert transformers.utils.logging.is_progress_bar_enabled()

    on_ranks(2, use)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("odd", slow_but(["head", "wrapped", "shared"], "wrapped"))
def test_tied_shared_and_wrapped_weights(odd, tmp_path):
    """A head with an adapter over tied embeddings is untied by a merge (transformers#45127)."""
    if odd == "head":
        words = ["task.options.family=qwen", "task.options.lora=2"]
        words += [
            f"task.options.base={base_of('qwen', tmp_path / 'base')}",
            "task.options.odd=head",
        ]
        run = train(tmp_path, *words)
        lines = merge(tmp_path, run, tmp_path / "merged", *words, is_merged=True)
        assert lines[1].startswith("merging only rounded: the merged model has ")
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
        return
    run = train(tmp_path, f"task.options.odd={odd}", "run.ema_decay=0.5")
    assert json.loads((run / "exit.json").read_text())["code"] == 0
    card = (run / "export/README.md").read_text()
    assert "averaged (run.ema_decay)" in card and 'library_name: "transformers"' in card


def test_an_export_replaces_its_own_folder_only(tmp_path):
    run = train(tmp_path)
    out = run / "export"
    before = json.loads((out / "lockstep.json").read_text())
    merge(tmp_path, run, out)
    assert json.loads((out / "lockstep.json").read_text()) == before
    (out / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match=r"was changed since its export: README\.md; move it"):
        FolderExport(out, "out=x").check_place()
    (tmp_path / "other").mkdir()
    FolderExport(tmp_path / "other", "out=x").check_place()
    (tmp_path / "other/notes").touch()
    with pytest.raises(ConfigError, match="already exists, and no export wrote it; move it away"):
        FolderExport(tmp_path / "other", "out=x").check_place()


REFUSED = [
    (["task=tiny"], r"checkpoint\.export=hf: the model \(Sequential\) has no save_pretrained"),
    (["task.options.lora=2"], r"the base of the adapter has no name that loads it; build it by"),
]


@pytest.mark.parametrize("words, line", REFUSED)
def test_what_cannot_be_exported_is_refused_at_the_start(words, line, tmp_path):
    def use():
        fork_reloads()
        task = None if "task=tiny" in words else Pretrained
        with pytest.raises(ConfigError, match=line):
            fit(tmp_path, *WORDS[1 if task is None else 0 :], *words, task=task)

    on_ranks(1, use)
    assert not [*tmp_path.rglob("checkpoints")]


def test_a_tokenizer_that_cannot_be_saved_fails_the_export_only(tmp_path):
    def use():
        fork_reloads()
        line = r"checkpoint\.export=hf: cannot be saved: NotImplementedError: a custom PreTokenizer"
        with pytest.raises(
            RunError, match=line + ".*nothing was written; the checkpoints of the run"
        ):
            fit(tmp_path, *WORDS, "task.options.odd=unsaved", task=WithTokenizer)

    on_ranks(1, use)
    run = tmp_path / "pretrained/run"
    assert json.loads((run / "exit.json").read_text())["code"] == 1
    assert [*(run / "checkpoints").iterdir()]
    assert not [*run.glob("*export*")]
