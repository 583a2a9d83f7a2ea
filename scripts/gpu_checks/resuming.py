"""Resuming: on the same device with equal bits, and on another one."""

from __future__ import annotations

from .runs import Here, at_most, check_equal_bits, distance


def map_location(here: Here) -> str:
    """Check that a checkpoint written on the CPU resumes on the GPU, and the reverse."""
    adam = ["optim=adam", "optim.lr=0.01", "strategy.precision=fp64"]
    whole = here.launch("whole", *adam, device="cpu")
    for steps, device in ((10, "cpu"), (20, None), (30, "cpu")):
        parts = here.launch("parts", *adam, f"run.steps={steps}", "run.resume=auto", device=device)
    return at_most(
        distance(whole, parts), 1e-9, f"cpu, {here.device.type}, cpu and cpu only differ"
    )


def resume(here: Here) -> str:
    """Check that a run stopped and resumed on the device has the same bits, with dropout."""
    recipe = ["strategy.precision=fp32", "task.options.dropout=0.2", "run.ema_decay=0.9"]
    _, whole = here.fit("whole", *recipe)
    here.fit("parts", *recipe, "run.steps=13")
    _, parts = here.fit("parts", *recipe, "run.resume=auto")
    check_equal_bits(whole.directory, parts.directory, "after the resume")
    assert whole.metrics == parts.metrics, "different metrics"
    return "30 steps and 13 + 17 end with equal bits"
