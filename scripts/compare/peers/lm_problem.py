"""Settings of compare_trl.py and bench_lm.py, and their instrument.

Both contestants import this file, TRL's with the Python of a venv of its own, so it imports nothing
of this project. `seen-RANK.jsonl` has the loss of each micro-batch, `steps-RANK.jsonl` the time,
processor time, memory and tokens of each step.
"""

from __future__ import annotations

import json
import os
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SETTINGS = "LM_PEERS_SETTINGS"
BEGUN = "LM_PEERS_BEGUN"  # when the command began, in seconds
KILL_STEP, KILL_PAUSE_S = 7, 60.0


@dataclass
class Settings:
    """Settings of one run of a contestant.

    `rows`: a JSONL file with prompt and completion, or for TRL with `input_ids`, `labels` and
    `seq_lengths`. `in_order`: TRL takes them as they are, and does not shuffle. `eval`: a file with
    a row for Lockstep's evaluation at the end. `adapters`: a folder of LoRA weights to begin with.
    `is_watched`: losses are recorded. `prove`: Lockstep's run.prove, unless it is watched. `fault`
    is pause (the run waits in step KILL_STEP, to be killed) or None.
    """

    folder: str
    model: str
    rows: str
    eval: str
    batch: int
    micro_batch: int
    steps: int
    context: int
    packing: bool = False
    lora: int | None = None
    adapters: str | None = None
    precision: str = "fp32"
    optimizer: str = "sgd"
    rate: float = 0.1
    save_every: int | None = None
    strategy: str = "ddp"
    in_order: bool = True
    is_watched: bool = True
    prove: bool = True
    fault: str | None = None
    resume: bool = False

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @classmethod
    def from_environment(cls) -> Settings:
        return cls(**json.loads(os.environ[SETTINGS]))

    def environment(self) -> dict[str, str]:
        return {SETTINGS: json.dumps(asdict(self)), BEGUN: str(time.time())}


class Instrument:
    """Records what a contestant computes and needs, on each rank."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.rank = int(os.environ.get("RANK", "0"))
        settings.path.mkdir(parents=True, exist_ok=True)

    def see(self, step: int, loss: float, count: float) -> None:
        """Record a micro-batch of the update made at 0-based `step`: the sum of its losses, divided
        by `count` if that is the number of learned tokens of the whole batch."""
        self._write("seen", resume=self.settings.resume, step=step, loss=loss, count=count)
        if self.settings.fault == "pause" and step == KILL_STEP:
            time.sleep(KILL_PAUSE_S)

    def end_step(self, step: int, tokens: int) -> None:
        """Record that a step over so many tokens, without padding, has ended."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        self._write(
            "steps",
            resume=self.settings.resume,
            step=step,
            time=time.time() - float(os.environ[BEGUN]),
            cpu=used.ru_utime + used.ru_stime,
            peak=used.ru_maxrss * 1024,
            tokens=tokens,
        )

    def _write(self, name: str, **values: Any) -> None:
        with (self.settings.path / f"{name}-{self.rank}.jsonl").open("a") as stream:
            stream.write(json.dumps(values) + "\n")
