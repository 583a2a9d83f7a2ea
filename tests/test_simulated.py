"""The code for accelerators, on the simulated one of harness/simulated_accelerator.py."""

import pytest
from harness import simccl
from harness import simulated_accelerator as simulated
from harness.ranks import on_ranks
from harness.training import check_parity, compose, fit, together
from torch.distributed.device_mesh import init_device_mesh  # noqa: F401  # before the forks

pytestmark = pytest.mark.skipif(
    bool(simulated.reason_to_skip()), reason=simulated.reason_to_skip() or "can be used"
)


def fit_simulated(ranks, folder, *overrides, task=None, devices=4):
    """Run `fit` on ranks that see the simulated devices; nothing may race or break an order."""
    compose(folder, *overrides)

    def body():
        simulated.register(devices)
        simccl.register()
        result = fit(folder, *overrides, task=task)
        assert not simulated.races, simulated.races[:3]
        assert not simccl.violations, simccl.violations[:3]
        return result

    return together(on_ranks(ranks, body))


PARITY = ("experiment=parity", "run.steps=24")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "exact", "zero1"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_strategies_learn_the_same_as_on_the_cpu(tmp_path, strategy, ranks):
    words = ("task=tiny", *PARITY, f"strategy={strategy}")
    one = together(on_ranks(1, lambda: fit(tmp_path / "cpu", *words)))
    check_parity(one, fit_simulated(ranks, tmp_path / "sim", *words))
