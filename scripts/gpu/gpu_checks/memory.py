"""data.micro_batch=auto at the end of a GPU's memory."""

from __future__ import annotations

import re

from .runs import Here, Skip, at_most, distance


def auto_batch(here: Here) -> str:
    """Check that data.micro_batch=auto finds a size although larger ones run out of memory."""
    if here.device.type != "cuda":
        raise Skip("it fills the memory of a GPU")
    return fill(here, "gpu_checks.probe.Large")


def fill(here: Here, task: str) -> str:
    """Train a task whose global batch of 64 rows does not fit, with the size found and the same
    size given."""
    words = [f"task.trainer={task}", "data.global_batch=64", "run.steps=3"]
    words += ["strategy.precision=fp64", "eval.every_epochs=null"]
    done = here.run([*here.words("auto"), *words, "data.micro_batch=auto"])
    line = re.search(r"data\.micro_batch=auto: (\d+), because no larger one fits; .*", done.stdout)
    assert done.returncode == 0 and line, (done.stderr.strip() or done.stdout)[-600:]
    rows = int(line[1])
    assert 1 <= rows < 32, f"{rows} rows cannot fit: {line[0]}"
    given = here.launch("given", *words, f"data.micro_batch={rows}")
    auto = here.folder / "probe" / "auto"
    note = at_most(distance(auto, given), 1e-12, f"auto and data.micro_batch={rows} differ")
    return f"{line[0]}; {note}"
