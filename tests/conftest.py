"""Every test leaves environment, process group, threads and Hydra's state as it found them."""

import os
import threading

import pytest
import torch
import torch._dynamo  # imported once before any fork: in the children it would cost a second each
import torch.distributed as dist

torch.set_num_threads(1)  # a parent with an OpenMP pool hangs its forked children


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    environment, threads = dict(os.environ), threading.active_count()
    yield
    assert not dist.is_initialized()
    assert torch.get_num_threads() == 1, "a fit in this process: use on_ranks(1, ...)"
    environment["PYTEST_CURRENT_TEST"] = os.environ.get("PYTEST_CURRENT_TEST", "")
    assert dict(os.environ) == environment
    assert threading.active_count() <= threads
