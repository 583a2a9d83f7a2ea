"""gather_rows: a loss over the whole batch has the numbers of one rank, gradients included."""

import pytest
import torch
import torch.nn.functional as F
from harness import check_parity, fit_on, on_ranks, slow_but
from harness.training import compose, fit
from torch import nn

from trainer import ConfigError, ResidentDataset, Trainer

WORDS = [
    *("task=tiny", "run.steps=20", "log.every_steps=1", "strategy.precision=fp64"),
    *("data.global_batch=23", "eval.every_steps=null", "optim=adamw", "optim.lr=0.01"),
]
LAYOUTS = {
    "2": (2, ["strategy=ddp"]),
    "3": (3, ["strategy=ddp"]),
    "fsdp 2": (2, ["strategy=fsdp"]),
    "pp 2": (2, ["strategy.mesh.pipeline=2", "strategy.mesh.replicate=1"]),
    "pp 2 x ddp 2": (4, ["strategy.mesh.pipeline=2"]),
}


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(8, 6), nn.Tanh())

    def forward(self, both):
        one, other = both.unbind(1)
        return self.second(self.first(torch.cat([one, other], dim=1)[:, :4] + other))


class Contrastive(Trainer):
    """Pairs of noisy views: each row must find its own partner in the whole batch."""

    def build_dataset(self, split):
        if split == "eval":
            return None
        generator = torch.Generator().manual_seed(0)
        clean = torch.randn(107, 1, 4, generator=generator)
        return ResidentDataset(clean + torch.randn(107, 2, 4, generator=generator) / 5, clean)

    def build_model(self):
        return Towers()

    def blocks(self, model):
        return [model.first, model.second]

    def loss(self, outputs, targets):
        texts, images = outputs[:, :3], outputs[:, 3:]
        every, first = self.gather_rows(images)
        own = first + torch.arange(len(texts), device=texts.device)
        self.record("found", ((texts @ every.T).argmax(1) == own).double())
        return F.cross_entropy(5 * texts @ every.T, own, reduction="none")


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return fit_on(1, folder, *WORDS, "strategy=single", task=Contrastive)


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "fsdp 2"))
def test_a_loss_over_the_whole_batch_is_equal_in_every_layout(layout, single, tmp_path):
    ranks, words = LAYOUTS[layout]
    other = fit_on(ranks, tmp_path, *WORDS, *words, task=Contrastive)
    check_parity(single, other)
    found = [
        [entry["train/found"] for entry in run["record"] if "train/found" in entry]
        for run in (single, other)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-12) and len(found[0]) == 20


def refusal(folder, *words):
    compose(folder, *WORDS)
    with pytest.raises(ConfigError) as caught:
        fit(folder, *WORDS, *words, task=Contrastive)
    return str(caught.value)


def test_several_micro_batches_are_refused(tmp_path):
    for number, words in enumerate((["strategy=single"], ["strategy=exact"])):
        words = [*words, "data.micro_batch=5", "data.global_batch=20"]
        (told,) = on_ranks(1, refusal, tmp_path / str(number), *words)
        assert told.startswith(
            "gather_rows: needs the whole global batch at once, and a rank has 4"
        )
