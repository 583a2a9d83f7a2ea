"""Checkpoints: resumed on the same device and on another one; predictions and export from them."""

from __future__ import annotations

import numpy as np

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


def predict(here: Here) -> str:
    """Check that predictions of a run on the device are those that a CPU makes of its checkpoint,
    and that it is exported: onnxruntime's outputs are compared with the model's by the export."""
    _, summary = here.fit("run", "strategy.precision=fp64")
    words = [str(summary.directory), "task.trainer=gpu_checks.probe.Probe"]
    found = {}
    for device in (None, "cpu"):
        out = here.folder / f"{device}.npz"
        here.call("use", *words, "split=eval", f"out={out}", device=device)
        found[device] = np.load(out)["probability"]
    off = float(np.abs(found[None] - found["cpu"]).max())
    note = at_most(off, 1e-12, "predictions on both devices differ")
    here.call("use", *words, f"out={here.folder}/model.onnx")
    return f"{note}; exported to ONNX"
