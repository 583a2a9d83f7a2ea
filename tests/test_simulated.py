"""The code for accelerators, on the simulated one of harness/simulated_accelerator.py."""

import pytest

from harness import simulated_accelerator
from harness.ranks import on_ranks
from harness.simulated import fit_simulated, server
from harness.training import PARITY, check_parity, fit, together

REASON = simulated_accelerator.reason_to_skip()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "it can be used")


@pytest.fixture(scope="module", autouse=True)
def ranks_are_forked_from_a_server():
    with server():
        yield


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "exact", "zero1"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_strategies_learn_the_same_as_on_the_cpu(tmp_path, strategy, ranks):
    words = ("task=tiny", *PARITY, f"strategy={strategy}")
    one = together(on_ranks(1, lambda: fit(tmp_path / "cpu", *words)))
    check_parity(one, together(fit_simulated(ranks, tmp_path / "sim", *words)))
