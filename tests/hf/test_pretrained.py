"""A folder of Hugging Face out of a run: what is written, loaded again, and refused."""

import json
import re
import resource
from pathlib import Path

import pytest
import torch
from harness import slow_but
from harness.ranks import on_ranks
from harness.training import compose, fit
from pretrained import FAMILIES, Pretrained, WithTokenizer, build, fork_reloads
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
tqdm = pytest.importorskip("tqdm")
tqdm.tqdm.monitor_interval = 0  # it is a thread

from trainer.base.errors import ConfigError, RunError  # noqa: E402
from trainer.core.checkpoints.transaction import steps  # noqa: E402
from trainer.hf import folder_export, pretrained  # noqa: E402
from trainer.hf.folder_export import FolderExport, write_pretrained  # noqa: E402
from trainer.places.bucket import Bucket  # noqa: E402
from trainer.places.listing import read_listing  # noqa: E402

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


MOST_ROUNDING = 1e-4  # of fp32, relative to the largest output; at most 1.5e-5 was seen (qwen)


def rounding_of(line):
    """Return the number in a line about a merge."""
    start = "merging only rounded: the merged model has "
    words = re.fullmatch(rf"{start}(equal \w+|\w+ that differ by (\S+) of the largest)", line)
    assert words, line
    return float(words[2] or 0)


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
        assert rounding_of(merged) < MOST_ROUNDING, family
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


@pytest.mark.parametrize("odd", slow_but(["head", "wrapped", "shared"], "wrapped", "head"))
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
        assert rounding_of(lines[1]) < MOST_ROUNDING
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
    (out / "zz").touch()
    with pytest.raises(ConfigError, match=r"was changed since its export: zz; move it away"):
        FolderExport(out, "out=x").check_place()
    (out / "zz").unlink()
    (out / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match=r"was changed since its export: README\.md; move it"):
        FolderExport(out, "out=x").check_place()
    (tmp_path / "other").mkdir()
    FolderExport(tmp_path / "other", "out=x").check_place()
    (tmp_path / "other/notes").touch()
    with pytest.raises(ConfigError, match="already exists, and no export wrote it; move it away"):
        FolderExport(tmp_path / "other", "out=x").check_place()


class Untied(Pretrained):
    """A head of its own, where the config of the model says that it shares the embeddings."""

    def build_model(self):
        model = super().build_model()
        model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight.detach())
        return model


def test_a_head_that_was_untied_is_told_in_the_config(tmp_path):
    """Readers other than transformers would tie it again."""
    run = train(tmp_path, "task.options.family=qwen", task=Untied)
    assert json.loads((run / "export/config.json").read_text())["tie_word_embeddings"] is False
    run = train(tmp_path / "tied", "task.options.family=qwen")
    assert json.loads((run / "export/config.json").read_text())["tie_word_embeddings"] is True


class Worse(Pretrained):
    """Its metric is best at the first step."""

    def metrics(self, outputs, tokens):
        return {"steps": torch.full((len(tokens),), float(self.step))}


def test_an_export_has_the_weights_of_the_best_checkpoint_if_a_metric_is_set(tmp_path, capfd):
    words = ["checkpoint.every_steps=1", "eval.every_steps=1", "run.steps=2"]
    best = ["checkpoint.best_metric=eval/steps", "checkpoint.best_mode=min"]
    runs = [
        train(tmp_path / name, *words, *more, task=Worse)
        for name, more in (("last", []), ("best", best))
    ]
    assert "exported: step 1, with the best eval/steps\n" in capfd.readouterr().out
    exported = [load_file(run / "export/model.safetensors") for run in runs]
    last, saved = (
        load_file(next((runs[1] / f"checkpoints/step-0000000{step}").glob("model*")))
        for step in (2, 1)
    )
    name = next(iter(exported[0]))
    assert torch.equal(exported[0][name], last[name])
    assert torch.equal(exported[1][name], saved[name]) and not torch.equal(saved[name], last[name])


def test_the_card_of_an_export_has_the_settings_and_no_place_of_this_machine(tmp_path):
    run = train(tmp_path, "run.name=mine")
    card = (run / "export/README.md").read_text()
    assert "optim.lr=0.1" in card and "run.steps=3" in card
    assert str(tmp_path) not in card and "run.name" not in card


PLACES = [
    ("/", " cannot be replaced; give a new folder in it"),
    (".", " cannot be replaced; give a new folder in it"),
    ("{home}", " cannot be replaced; give a new folder in it"),
    ("{home}/more/..", " cannot be replaced; give a new folder in it"),
    ("/proc", " cannot be replaced; give a new folder in it"),
    ("/dev/zero", " is not a folder; give another name"),
    ("/dev/zero/x", ": cannot be written, /dev/zero is not a directory; give another name"),
    ("x" * 256, ": File name too long; give another name"),
    ("x/" * 3000, ": File name too long; give another name"),
    ("a\0b", ": embedded null byte; give another name"),
    ("full", " already exists, and no export wrote it; move it away, or give another name"),
]


@pytest.mark.parametrize(("place", "why"), PLACES, ids=range(len(PLACES)))
def test_a_place_where_no_folder_can_be_put_is_refused_at_once(place, why, tmp_path, monkeypatch):
    """The root of a disk was walked, and the working folder failed after the whole export."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more").mkdir()
    deep = tmp_path / "full"
    for _ in range(50):
        deep /= "deeper"
    deep.mkdir(parents=True)
    monkeypatch.setattr(Path, "rglob", None)  # nothing is walked
    out = Path(place.format(home=tmp_path))
    with pytest.raises(ConfigError) as caught:
        FolderExport(out, "out=x").check_place()
    assert str(caught.value) == f"out=x: {out}{why}"


def test_a_folder_that_is_filled_while_an_export_is_made_is_kept(tmp_path, monkeypatch):
    run = train(tmp_path)
    (tmp_path / "out").mkdir()
    loads = folder_export._reload

    def fill(*arguments):
        (tmp_path / "out" / "mine").touch()
        return loads(*arguments)

    monkeypatch.setattr(folder_export, "_reload", fill)
    with pytest.raises(AssertionError, match="already exists, and no export wrote it; move it"):
        merge(tmp_path, run, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("part", "size"), [("_write", 300), ("_write", 20_000), ("_save_given", 4_000)]
)
def test_a_full_disk_is_told_as_such_and_nothing_is_left(part, size, tmp_path):
    """By a limit of a file's size: of the config, of the weights, and of what is compared."""
    run = train(tmp_path)

    def use():
        fork_reloads()
        config = compose(tmp_path, *WORDS, f"run.resume={run}")
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        write = getattr(folder_export, part)

        def write_less(*arguments):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
            try:
                return write(*arguments)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

        setattr(folder_export, part, write_less)
        line = f"out: {tmp_path}/out: File too large; make room, or give another place"
        with pytest.raises(RunError, match=f"^{line}$"):
            write_pretrained(Pretrained(config), config, FolderExport(tmp_path / "out", "out"))

    on_ranks(1, use)
    assert not [*tmp_path.glob("*out*"), *tmp_path.glob(".export*")]


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


def scale_one(state, factor):
    """Return the tensors of a model, one of which is `factor` times as large."""
    return {
        n: t * (factor if n.endswith("layers.0.mlp.up_proj.weight") else 1)
        for n, t in state.items()
    }


def break_weights(monkeypatch):
    own = pretrained._own_memory
    monkeypatch.setattr(pretrained, "_own_memory", lambda model: scale_one(own(model), 1.001))


def break_a_merge(monkeypatch):
    """Merge 98 % of the adapter of one layer."""

    def merge_less(self, *arguments, **named):
        own = self.model.model.layers[0].mlp.up_proj
        own.scaling = {name: 0.98 * value for name, value in own.scaling.items()}
        return merge(self, *arguments, **named)

    merge = peft.LoraModel.merge_and_unload
    monkeypatch.setattr(peft.LoraModel, "merge_and_unload", merge_less)


def add_code(monkeypatch):
    edit_saved(monkeypatch, lambda folder: (folder / "modeling_own.py").touch())


def add_pickle(monkeypatch):
    edit_saved(monkeypatch, lambda folder: torch.save({}, folder / "training_args.bin"))


def edit_saved(monkeypatch, edit):
    """Let `edit` change the folder that an export has written."""
    save = pretrained.Pretrained.save

    def save_and_edit(self, folder):
        save(self, folder)
        edit(folder)

    monkeypatch.setattr(pretrained.Pretrained, "save", save_and_edit)


def lose_a_weight(monkeypatch):
    def edit(folder):
        state = load_file(folder / "model.safetensors")
        del state["model.layers.0.mlp.up_proj.weight"]
        save_file(state, folder / "model.safetensors", {"format": "pt"})

    edit_saved(monkeypatch, edit)


def break_tokens(monkeypatch):
    """Save a tokenizer with other numbers for its words."""
    kind = transformers.PreTrainedTokenizerFast
    save = kind.save_pretrained

    def save_others(self, folder, **options):
        saved = save(self, folder, **options)
        path = Path(folder, "tokenizer.json")
        form = json.loads(path.read_text())
        words = form["model"]["vocab"]
        numbers = [*words.values()]
        form["model"]["vocab"] = dict(zip(words, numbers[::-1], strict=True))
        path.write_text(json.dumps(form))
        return saved

    monkeypatch.setattr(kind, "save_pretrained", save_others)


BROKEN = {
    break_weights: r"logits of a model loaded from it differ by \d\.\de-0[345] of the largest",
    break_a_merge: r"logits of the merged model differ by \d\.\de-0[12] of the largest, which is",
    lose_a_weight: r".*the folder has no model\.layers\.0\.mlp\.up_proj\.weight",
    break_tokens: r".*the tokenizer of the folder gives another row of tokens to a text",
    add_code: r"modeling_own\.py may hold code, so the folder is not written",
    add_pickle: r"training_args\.bin may hold code, so the folder is not written",
}


@pytest.mark.parametrize("breaks", BROKEN, ids=lambda breaks: breaks.__name__)
def test_an_export_that_is_not_the_model_is_refused(breaks, tmp_path, monkeypatch):
    """Weights, merges and files that are wrong: no test had an export whose check says no."""
    words = ["task.options.family=llama"]
    is_merged = breaks is break_a_merge
    if is_merged:
        words += ["task.options.lora=2", f"task.options.base={base_of('llama', tmp_path / 'base')}"]
    task = WithTokenizer if breaks is break_tokens else Pretrained
    run = train(tmp_path, *words, task=task)
    breaks(monkeypatch)
    with pytest.raises(AssertionError, match=f"RunError: out={tmp_path}/out: {BROKEN[breaks]}"):
        merge(tmp_path, run, tmp_path / "out", *words, is_merged=is_merged, task=task)
    assert not [*tmp_path.glob("*out*"), *tmp_path.glob(".export*")]


def test_a_tokenizer_that_cannot_be_saved_fails_the_export_only(tmp_path):
    """A mirror of the run has closed by then, and has that end too, not that the run is done."""
    bucket = tmp_path / "bucket"
    mirrored = ["checkpoint.every_steps=1", "checkpoint.keep_last=1"]
    mirrored.append(f"checkpoint.mirror=file://{bucket}")

    def use():
        fork_reloads()
        line = r"checkpoint\.export=hf: cannot be saved: NotImplementedError: a custom PreTokenizer"
        with pytest.raises(
            RunError, match=line + ".*nothing was written; the checkpoints of the run"
        ):
            fit(tmp_path, *WORDS, *mirrored, "task.options.odd=unsaved", task=WithTokenizer)

    on_ranks(1, use)
    run = tmp_path / "pretrained/run"
    assert json.loads((run / "exit.json").read_text())["code"] == 1
    assert [*(run / "checkpoints").iterdir()]
    assert not [*run.glob("*export*")]
    (held,) = on_ranks(1, lambda: read_listing(Bucket(f"file://{bucket}")))
    assert sorted(held.checkpoints()) == sorted(steps(run / "checkpoints"))
    for name in ("exit.json", "metrics.jsonl"):
        assert (bucket / held.home() / name).read_bytes() == (run / name).read_bytes()
    lease = json.loads((bucket / held.home() / "lease.json").read_text())
    assert lease["released"] and held.home() == "000002"
