"""Python's and numpy's generators are seeded in each step of a task that can draw from them."""

import random
import sys

import pytest
from harness import on_ranks
from harness.training import compose, fit
from tiny import Tiny

from trainer.core.rng.draw_traces import uses_global_rngs

SOURCES = {
    "plain": ("import torch\nfrom torch import nn\nimport math, os\nmodel.eval()\n", False),
    "safe": ("from trainer import Trainer\nfrom . import plain\n", False),
    "python": ("import random\n", True),
    "python late": ("def forward(x):\n    import random\n", True),
    "numpy": ("import torch, numpy as np\n", True),
    "numpy part": ("from numpy.random import rand\n", True),
    "one line": ("import os; import random\n", True),
    "in a branch": ("if True: import random\n", True),
    "by a module": ("from coins_package import python\n", True),
    "by a relative one": ("from . import python\n", True),
    "by a library": ("from transformers import AutoModel\n", True),
    "dynamic": ("import importlib\nimportlib.import_module('random')\n", True),
    "executed": ("exec('import random')\n", True),
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with these modules; libraries are not imported, so their names are enough."""
    folder = tmp_path / "coins_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    for name in ("plain", "python"):
        (folder / f"{name}.py").write_text(SOURCES[name][0].replace("model.eval()\n", ""))
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.startswith("coins_package")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", SOURCES)
def test_what_a_module_can_draw_is_read_from_its_imports(name, package):
    source, can_draw = SOURCES[name]
    import coins_package.plain
    import coins_package.python

    path = package / "tried.py"
    path.write_text(source)
    module = type(sys)("coins_package.tried")
    module.__file__, module.__package__ = str(path), "coins_package"
    sys.modules["coins_package.tried"] = module
    del coins_package.plain, coins_package.python
    if "python" not in name and "relative" not in name and "by a" not in name:
        del sys.modules["coins_package.python"]
    assert uses_global_rngs(["coins_package.tried"]) is can_draw


def test_code_without_a_file_is_assumed_to_draw():
    assert uses_global_rngs(["a_cell_of_a_notebook"])
    assert not uses_global_rngs(["torch.nn.modules.linear", "tiny", "dataclasses"])


class LateCoin(Tiny):
    """From step 6 on the loss of a whole batch depends on a coin."""

    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        return values * (1 + random.random()) if self.step >= 6 else values


WORDS = ["task=tiny", "data.global_batch=12", "run.steps=9"]


@pytest.mark.parametrize(("ranks", "word"), [(2, ""), (1, "data.micro_batch=4"), (1, "seeds")])
def test_a_model_that_begins_to_draw_late_is_seeded_as_from_the_start(ranks, word, tmp_path):
    words = [*WORDS, *filter(lambda each: "=" in each, [word])]

    def body(folder, words):
        if word == "seeds":  # other numbers before the run change nothing
            random.seed(str(folder))
        return fit(folder, *words, task=LateCoin)["losses"]

    (one,) = on_ranks(1, body, tmp_path / "one", WORDS)
    other = on_ranks(ranks, body, tmp_path / "other", words)[0]
    assert one == pytest.approx(other, rel=1e-12) and len(one) == 2


class WithoutCoins(Tiny):
    """Notes the states of a generator which no module of a task named here draws from."""

    def __init__(self, config, read):
        super().__init__(config)
        self.states = []
        self.read = read

    def loss(self, outputs, targets):
        self.states += [self.read()] if self.step > 0 else []
        return super().loss(outputs, targets)


@pytest.mark.parametrize("can_draw", [True, False])
def test_a_task_that_cannot_draw_leaves_the_generators_alone(can_draw, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "trainer.core.engine.engine.uses_global_rngs",
        lambda modules: uses_global_rngs(modules) and can_draw,
    )

    def body(folder):
        task = WithoutCoins(compose(folder, *WORDS, "eval.every_epochs=null"), random.getstate)
        task.fit()
        return [state == task.states[0] for state in task.states[-4:]]

    assert on_ranks(1, body, tmp_path) == [[not can_draw] * 4]
