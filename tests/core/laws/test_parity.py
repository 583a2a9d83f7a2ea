"""One run, any layout: fifty steps agree with those of one process, and a planted error fails."""

import time

import pytest
import torch
from harness import PARITY, Beside, check_parity, fit_on

from trainer.core.engine.objective import Objective
from trainer.tasks import cifar
from trainer.tasks.data import cifar10

TEXT = [
    *("task=text", "task.options.context=32", "task.options.width=32", "task.options.layers=2"),
    *(
        "task.options.heads=2",
        "task.options.files=10",
        "data.global_batch=22",
        "optim.lr=0.003",
        *PARITY,
    ),
]
PLAIN_TEXT = [*TEXT, "task.options.dropout=0.0"]
DROPOUT_TEXT = [*TEXT, "task.options.dropout=0.1", "data.global_batch=20"]
CIFAR = [
    *(
        "task=cifar",
        "task.options.data=bundled",
        "task.options.norm=none",
        "task.options.widths=[8,16,16]",
        "run.norm_rows=null",
    ),
    *(
        "task.options.label_smoothing=0",
        "optim=adamw",
        "optim.lr=0.003",
        "schedule=constant",
        "data.global_batch=22",
    ),
    "experiment=parity",  # 50 steps: in 24 the loss falls too little
]
TINY = ["task=tiny", "task.options.weights=true", "optim.lr=0.3", *PARITY]

LAYOUTS = {
    "ddp x 2": (2, []),
    "ddp x 3": (3, []),
    "ddp x 2, accumulation 2": (2, ["data.micro_batch=6"]),
    "accumulation 4": (1, ["data.micro_batch=6"]),
    "single": (1, ["strategy=single", "strategy.precision=fp64"]),
    "streamed, no workers": (2, ["data.path=streamed"]),
    "streamed, 3 workers": (2, ["data.path=streamed", "data.workers=3"]),
}


@pytest.fixture(scope="module", autouse=True)
def few_images():
    """Read 1,200 of the bundled images once before the forks; else each rank would read all."""
    found = {}
    for split, count in (("train", 1100), ("eval", 100)):
        images, labels, source = cifar10.load(split, "bundled", "")
        found[split] = (images[:count], labels[:count], source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cifar, "load", lambda split, data, root: found[split])
        yield


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Return a function that gives the run of one process for a recipe; each run is made once."""
    made: dict[tuple, dict] = {}

    def get(recipe):
        key = tuple(recipe)
        if key not in made:
            made[key] = fit_on(1, tmp_path_factory.mktemp("one"), *recipe)
        return made[key]

    return get


RECIPES = {"text": PLAIN_TEXT, "cifar": CIFAR, "tiny": TINY}
# The default tests have one recipe in the layouts that no other one contains.
CONTAINED = ("ddp x 2", "streamed, no workers")
CELLS = [
    pytest.param(
        RECIPES[recipe],
        layout,
        id=f"{recipe}-{layout}",
        marks=[] if recipe == "tiny" and layout not in CONTAINED else pytest.mark.slow,
    )
    for recipe in RECIPES
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("recipe", "layout"), CELLS)
def test_run_does_not_depend_on_layout(recipe, layout, references, tmp_path):
    ranks, overrides = LAYOUTS[layout]
    check_parity(references(recipe), fit_on(ranks, tmp_path, *recipe, *overrides))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["accumulation 4", "ddp x 3", "streamed, 3 workers"])
def test_dropout_does_not_depend_on_layout(layout, references, tmp_path):
    """Attention and MLP draw by example, for any size of the micro-batch."""
    ranks, overrides = LAYOUTS[layout]
    check_parity(references(DROPOUT_TEXT), fit_on(ranks, tmp_path, *DROPOUT_TEXT, *overrides))


@pytest.mark.slow
def test_torchs_dropout_does_not_depend_on_layout_at_equal_micro_batch(references, tmp_path):
    recipe = [*DROPOUT_TEXT, "run.dropout=torch", "data.micro_batch=5"]
    check_parity(references(recipe), fit_on(4, tmp_path, *recipe))


FP32_LAYOUTS = ["ddp x 2", "ddp x 2, accumulation 2"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp x 3", *FP32_LAYOUTS])
def test_losses_in_fp32_agree_to_a_thousandth(layout, references, tmp_path):
    recipe = [*PLAIN_TEXT, "strategy.precision=fp32"]
    ranks, overrides = LAYOUTS[layout]
    check_parity(references(recipe), fit_on(ranks, tmp_path, *recipe, *overrides), 1e-3, None)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("tiny", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("tiny", 3), ("text", 2), ("text", 3), ("cifar", 2), ("cifar", 3))
        ),
    ],
)
def test_mean_of_the_ranks_means_is_found(name, ranks, references, tmp_path, monkeypatch):
    """The planted error: each rank divides by its own weight.

    Equal parts with equal weights cannot show this error.
    """

    def own_mean(self, loss, outputs, targets):
        total, carried = right(self, loss, outputs, targets)
        nominal = self._global_batch * self.elements
        return total * nominal / (carried[0] * self._ranks), carried

    recipe = RECIPES[name]
    right = Objective.add
    reference = references(recipe)
    monkeypatch.setattr(Objective, "add", own_mean)
    monkeypatch.setattr(Objective, "factor", lambda self, totals: None)
    wrong = fit_on(ranks, tmp_path, *recipe)
    if (name, ranks) == ("cifar", 2):
        check_parity(reference, wrong)  # 11 and 11 images weigh the same
        return
    with pytest.raises(AssertionError, match="loss of step"):
        check_parity(reference, wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "workers"),
    [(2, 0), (2, 1), (1, 2), (3, 2)],
)
def test_user_dataset_draws_the_same_noise_in_any_worker(ranks, workers, references, tmp_path):
    recipe = ["task=items", "optim.lr=0.3", *PARITY]
    other = fit_on(ranks, tmp_path, *recipe, f"data.workers={workers}")
    check_parity(references(recipe), other)


def test_running_statistics_are_the_ranks_mean_after_every_step(tmp_path):
    recipe = ["task=tiny", "task.options.norm=true", "run.steps=7"]
    two = fit_on(2, tmp_path, *recipe)  # fit_on compares the ranks, buffers included
    assert (
        torch.isfinite(two["weights"]["1.running_mean"]).all()
        and two["weights"]["1.num_batches_tracked"] == 7
    )


def test_data_workers_end_at_once(tmp_path):
    """DataLoader waits 5 s for each worker if the garbage collector frees its iterator."""
    beside = Beside(lambda: fit_on(1, tmp_path / "none", "task=items", "data.workers=0"))
    began = time.monotonic()
    fit_on(1, tmp_path, "task=items", "data.workers=3", "run.steps=20")
    assert time.monotonic() - began < 3 * 4.5 + beside.allowance_s
