"""What a step costs the host: waits for the GPU, and kernel launches."""

from __future__ import annotations

import re
import subprocess
import sys

from trainer.tasks.cifar import Cifar
from trainer.tasks.text import Text

from .probe import Placed, Strict
from .runs import SCRIPTS, Here, at_most, distance, last_error
from .steps import CountsLaunches, CountsWaits

STEADY = {
    "cifar": ["task.options.data=bundled", "run.norm_rows=null", "eval.every_epochs=null"],
    "text": ["eval.every_steps=null", "task.options.layers=2"],
}
LIMIT_S = 90


class WaitsOfCifar(CountsWaits, Cifar):
    pass


class WaitsOfText(CountsWaits, Text):
    pass


class WaitsOfStreamed(CountsWaits, Placed):
    pass


class LaunchesOfCifar(CountsLaunches, Cifar):
    pass


class LaunchesOfText(CountsLaunches, Text):
    pass


def resident(here: Here) -> str:
    """Check that the data are on the device and that a step of fused SGD never makes the host
    wait."""
    words = ["strategy.precision=fp32", "run.clip_norm=1", "run.ema_decay=0.9", "run.prove=false"]
    trainer, _ = here.fit("resident", *words, task=Strict)
    assert trainer.seen == {here.device.type}, f"micro-batches were on {trainer.seen}"
    return f"micro-batches on {here.device.type}; the host waits 0 times a step"


def waits(here: Here) -> str:
    """Check that a step of CIFAR-10 with Muon, or of a GPT, makes the host wait for the outcome of
    the step before only."""
    for name, task in (("cifar", WaitsOfCifar), ("text", WaitsOfText)):
        trainer, _ = here.fit("waits", *STEADY[name], "run.steps=6", task=task, recipe=name)
        places = ", ".join(trainer.waits)
        assert not trainer.waits, (
            f"task={name}: the host waits {len(trainer.waits)} times: {places}"
        )
    return "in steps of cifar and text the host waits for the outcome only"


def streamed(here: Here) -> str:
    """Check data read by workers: on the device, without a wait, and the same run as with resident
    data."""
    words = ["strategy.precision=fp64", "data.micro_batch=6", "log.every_steps=10"]
    _, resident = here.fit("resident", *words)
    workers = ["data.path=streamed", "data.workers=2"]
    trainer, run = here.fit("streamed", *words, *workers, task=WaitsOfStreamed)
    assert trainer.seen == {here.device.type}, f"micro-batches were on {trainer.seen}"
    assert not trainer.waits, f"the host waits: {', '.join(trainer.waits)}"
    what = "2 workers and resident data differ"
    return at_most(distance(resident.directory, run.directory), 1e-12, what)


def launches(here: Here) -> str:
    """Count the kernel launches of a step, beside the simulated device's count of operations."""
    notes = []
    for name, task in (("cifar", LaunchesOfCifar), ("text", LaunchesOfText)):
        words = [*STEADY[name], "strategy.precision=amp_bf16"]
        trainer, _ = here.fit("launches", *words, "run.steps=8", task=task, recipe=name)
        found = f"{trainer.launches} launches and {trainer.copies} copies"
        assert trainer.launches or here.device.type == "cpu", "the profiler shows no launches"
        notes.append(f"task={name}: {found}, simulated {simulated_launches(here, name, words)}")
    return "; ".join(notes)


def simulated_launches(here: Here, name: str, words: list[str]) -> str:
    """Return the launches of a step on the simulated device, or why it cannot be used.

    It needs a process that sees no accelerator.
    """
    script = str(SCRIPTS / "bench/bench_launches.py")
    command = [sys.executable, script, "--places", "0", f"task={name}", *words]
    environment = here.environment("cpu")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"not counted in {LIMIT_S} s"
    count = re.search(r": (\d+) launches, \d+ waits", done.stdout)
    return count[1] if count else f"not counted ({last_error(done.stderr)[:150]})"
