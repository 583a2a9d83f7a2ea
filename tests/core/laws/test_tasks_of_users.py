"""Tasks as people write them: each learns the same in every layout that it allows."""

import pytest
from harness import CONF

TASKS = ("bert", "contrastive", "gan", "nanogpt", "segmentation", "translation", "vae")


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_proved_in_all_default_layouts(task, command):
    if task == "bert":
        pytest.importorskip("transformers")
    words = [f"task={task}", f"--config-dir={CONF}"]
    done = command(*words, verb="trainer.prove", limit_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "proved: all runs learned the same" in done.stdout
    for layout in ("ranks-2", "ranks-3", "workers", "fsdp-2", "fsdp-4", "hsdp-2-2"):
        assert f" {layout} " in done.stdout
