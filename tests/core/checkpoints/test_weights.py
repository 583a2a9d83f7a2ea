"""Start from weights: of a run in any layout, of a checkpoint, of a file; parameters that stay."""

import zipfile

import pytest
import torch
from harness import fit_on, newest, on_ranks, slow_but
from harness.stored import check_same_bits, tensors_of
from harness.training import compose, fit
from safetensors.torch import save_file

from trainer import ConfigError

SMALL = ["task=sharded", "strategy.precision=fp32", "run.steps=3", "optim.lr=0.05"]
TASK = ["task=meshed", "strategy.precision=fp32", "run.steps=3", "optim.lr=0.05"]
HERE = {
    "single": (1, ["strategy=single"]),
    "ddp 2": (2, ["strategy=ddp"]),
    "fsdp 3": (3, ["strategy=fsdp"]),
    "tp 2": (2, ["strategy=tp"]),
    "pp 2": (2, ["strategy=pp"]),
}
RING = list(zip(HERE, [*HERE][1:] + [*HERE][:1], strict=True))
STILL = ["optim.lr=0.0", "run.steps=1", "run.name=other", "run.seed=5", "data.global_batch=8"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains in a layout, once, and returns the run directory."""
    known = {}

    def train(layout, *words):
        if (layout, words) not in known:
            ranks, strategy = HERE[layout]
            folder = tmp_path_factory.mktemp("trained")
            known[layout, words] = fit_on(ranks, folder, *TASK, *strategy, *words)["directory"]
        return known[layout, words]

    return train


def weights_after(folder, source, layout="single", *words):
    """Return the weights of a run that starts from `source` and does not change them."""
    ranks, strategy = HERE[layout]
    run = fit_on(ranks, folder, *TASK, *strategy, *STILL, f"run.init_from={source}", *words)
    assert run["step"] == 1
    return tensors_of(newest(run["directory"]))


@pytest.mark.slow
@pytest.mark.parametrize("source, target", RING)
def test_a_run_starts_from_another_one_in_any_layout(source, target, trained, tmp_path):
    directory = trained(source)
    check_same_bits(
        dict(sorted(tensors_of(newest(directory)).items())),
        dict(sorted(weights_after(tmp_path, directory, target).items())),
    )


def test_averaged_weights_are_taken_where_there_are_any(trained, tmp_path):
    directory = trained("single", "run.ema_decay=0.5")
    averages = tensors_of(newest(directory), "ema")
    found = weights_after(tmp_path, newest(directory).path)
    for name, value in averages.items():
        assert torch.equal(found[name], value), name


WEIGHTS = [
    (at, kind) for at in ("single", "fsdp 3") for kind in ("safetensors", "pt", "ddp", "nested")
]


@pytest.mark.parametrize(
    "layout, kind",
    slow_but(WEIGHTS, ("single", "pt"), ("single", "ddp")),
)
def test_a_file_of_weights_is_read_on_rank_0_and_sent(kind, layout, trained, tmp_path):
    state = tensors_of(newest(trained("single")))
    path = tmp_path / ("weights.safetensors" if kind == "safetensors" else "weights.pt")
    if kind == "safetensors":  # tied weights have one name there
        save_file({name: t.clone() for name, t in state.items() if name != "head.weight"}, path)
    else:
        prefix = "module." if kind == "ddp" else ""
        named = {prefix + name: value for name, value in state.items()}
        torch.save({"state_dict": named, "epoch": 3} if kind == "nested" else named, path)
    found = weights_after(tmp_path / "runs", path, layout)
    check_same_bits(dict(sorted(state.items())), dict(sorted(found.items())))


def test_what_does_not_fit_is_left_as_initialised_and_told(trained, tmp_path, capfd):
    state = tensors_of(newest(trained("single")))
    state["position"] = torch.zeros(99, 16)
    del state["norm.weight"]
    state["classifier.weight"] = torch.zeros(3)
    torch.save(state, tmp_path / "weights.pt")
    found = weights_after(tmp_path / "runs", tmp_path / "weights.pt")
    told = capfd.readouterr().out
    line = next(line for line in told.splitlines() if line.startswith("run.init_from="))
    assert "1 missing: norm.weight" in line and "1 unexpected: classifier.weight" in line
    assert "1 with a different shape: position (99, 16), here (8, 16)" in line
    assert torch.equal(found["norm.weight"], torch.ones(16)) and found["position"].any()


def test_a_resume_keeps_its_own_weights(trained, tmp_path):
    source = f"run.init_from={trained('single')}"
    words = [*TASK, "strategy=single", source, "run.seed=5"]
    straight = fit_on(1, tmp_path / "straight", *words, "run.steps=5")
    fit_on(1, tmp_path / "parts", *words, "run.steps=2")
    resumed = fit_on(1, tmp_path / "parts", *words, "run.steps=5", "run.resume=auto")
    one, other = (tensors_of(newest(run["directory"])) for run in (straight, resumed))
    check_same_bits(dict(sorted(one.items())), dict(sorted(other.items())))


def test_the_average_starts_from_these_weights(trained, tmp_path):
    directory = trained("single")
    words = [*STILL, f"run.init_from={directory}", "run.ema_decay=0.9"]
    run = fit_on(1, tmp_path, *TASK, "strategy=single", *words)
    averages = tensors_of(newest(run["directory"]), "ema")
    state = tensors_of(newest(directory))
    assert averages and all(torch.equal(state[name], mean) for name, mean in averages.items())


def refusal(folder, *words, strategy="single"):
    compose(folder, *TASK)
    with pytest.raises(ConfigError) as caught:
        fit(folder, *TASK, f"strategy={strategy}", *words)
    return str(caught.value)


def refusal_on_shards(folder, *words):
    return refusal(folder, *words, strategy="fsdp")


def test_refusals_are_one_line(tmp_path):
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"other": torch.zeros(2)}, tmp_path / "other.pt")
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors")
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    torch.save({"a": torch.zeros(2, device="meta")}, tmp_path / "meta.pt")
    (tmp_path / "weights.csv").write_text("1,2")
    cases = {
        "run.init_from=nowhere": "run.init_from=nowhere: is not there; give a run, a checkpoint or",
        f"run.init_from={tmp_path}/list.pt": "must be tensors by name",
        f"run.init_from={tmp_path}/empty.pt": "cannot be read: ",
        f"run.init_from={tmp_path}/model.pt": "it holds more than tensors and plain values; save",
        f"run.init_from={tmp_path}/meta.pt": "must be tensors by name",
        f"run.init_from={tmp_path}/other.pt": "none of its tensors fits the model: it has other",
        f"run.init_from={tmp_path}/broken.safetensors": "cannot be read: ",
        f"run.init_from={tmp_path}/weights.csv": "is no file of tensors; give a run, a checkpoint",
        "run.freeze=[blokcs.*]": "run.freeze: blokcs.*: no parameter has such a name; the model",
        "run.freeze=[blocks.0]": "; write blocks.0.*",
        "run.freeze=['*']": "run.freeze=['*']: must leave a parameter to train",
    }
    for number, (word, line) in enumerate(cases.items()):
        (told,) = on_ranks(1, refusal, tmp_path / f"run{number}", word)
        assert line in told and "\n" not in told, told


def test_weights_that_are_not_plain_finite_numbers_of_the_model_are_named(trained, tmp_path):
    state = tensors_of(newest(trained("single")))
    ones = state["norm.weight"]
    cases = {
        "complex": (ones.cfloat(), "norm.weight is complex: must be a plain tensor for the model"),
        "sparse": (ones.to_sparse(), "norm.weight is sparse or nested: must be a plain tensor"),
        "meta": (ones.to("meta"), "norm.weight is without values (device meta): must be a plain"),
        "nan": (ones * torch.nan, "norm.weight has values that are not finite: NaN, infinite, or"),
        "large": (
            ones.double() * 1e300,
            "not finite: NaN, infinite, or too large for torch.float32",
        ),
    }
    for kind, (tensor, _) in cases.items():
        torch.save({**state, "norm.weight": tensor}, tmp_path / f"{kind}.pt")
    torch.save(state, tmp_path / "stored.pt")
    with (
        zipfile.ZipFile(tmp_path / "stored.pt") as stored,
        zipfile.ZipFile(tmp_path / "zipped.pt", "w", zipfile.ZIP_DEFLATED) as zipped,
    ):
        for entry in stored.namelist():
            zipped.writestr(entry, stored.read(entry))
    data = (tmp_path / "stored.pt").read_bytes()
    (tmp_path / "short.pt").write_bytes(data[: len(data) // 2])
    (tmp_path / "lying.safetensors").write_bytes((2**60).to_bytes(8, "little") + data)
    (tmp_path / "folder.pt").mkdir()
    lines = {kind: line for kind, (_, line) in cases.items()}
    lines |= {"zipped": "cannot be read: compressed or overlapping entries", "short": "cannot be"}

    def refusals():
        names = [f"{kind}.pt" for kind in lines] + ["lying.safetensors", "folder.pt"]
        return [refusal(tmp_path, f"run.init_from={tmp_path / name}") for name in names]

    (told,) = on_ranks(1, refusals)
    for line, found in zip(
        [*lines.values(), "cannot be", "or a file of weights, such as model.safetensors"],
        told,
        strict=True,
    ):
        assert found.startswith(f"run.init_from={tmp_path}/") and line in found, found
        assert "\n" not in found and len(found) < 500
    ends = on_ranks(2, refusal_on_shards, tmp_path, f"run.init_from={tmp_path}/nan.pt")
    assert ends[0] == ends[1] and "norm.weight has values that are not finite" in ends[0]


@pytest.mark.parametrize("layout", slow_but(HERE, "single"))
def test_frozen_parameters_stay_and_the_others_are_trained_alike(layout, trained, tmp_path):
    ranks, strategy = HERE[layout]
    words = ["run.freeze=[blocks.0.*,position]", "strategy.precision=fp64", "optim=adamw"]
    run = fit_on(ranks, tmp_path, *TASK[:1], *words, *strategy, "run.steps=4")
    one = fit_on(1, tmp_path / "one", *TASK[:1], *words, "strategy=single", "run.steps=4")
    start = fit_on(
        1, tmp_path / "start", *TASK[:1], *words, "strategy=single", "run.steps=1", "optim.lr=0"
    )
    after, alone, before = (tensors_of(newest(each["directory"])) for each in (run, one, start))
    for name, value in after.items():
        is_frozen = name.startswith("blocks.0.") or name == "position"
        assert torch.equal(value, before[name]) == is_frozen, name
        torch.testing.assert_close(value, alone[name], rtol=1e-10, atol=1e-10)
