"""Resume: compare a run that is killed at random steps and resumed with an uninterrupted run."""

from __future__ import annotations

import random
import sys
from dataclasses import replace

from trainer.errors import ConfigError, RunError
from trainer.verify.comparison import (
    AGREES,
    DIFFERENT,
    PROVES_NOTHING,
    Finding,
    compare,
    judge_bits,
    judge_reference,
)
from trainer.verify.evidence import Evidence
from trainer.verify.stage import FP64, TrialRuns

LEAST_STEPS = 5  # checkpoints follow every second step: a kill in step 4 leaves one
RANKS = 2  # of the uninterrupted run and of the killed runs
SAVES = ["checkpoint.every_steps=2", "checkpoint.every_epochs=null", "checkpoint.background=false"]
LOST = "state kept outside of model, optimizer and step, or unseeded random numbers"


def prove_resume(stage: TrialRuns, kills: int, seed: int) -> list[Finding]:
    """Kill a run at random steps, resume it, and compare it with an uninterrupted run.

    Bits must be equal on the same number of ranks, results up to rounding on 1 and 3 ranks.
    """
    if stage.steps < LEAST_STEPS:
        must = f"must be at least {LEAST_STEPS} with --resume, to kill after a save"
        raise ConfigError(f"steps={stage.steps}: {must}")
    chance = random.Random(seed)  # noqa: S311  # not for security
    findings = []
    for precision in stage.precisions:
        whole = stage.train("undisturbed", RANKS, SAVES, [precision])[precision]
        findings.append(judge_reference(f"uninterrupted, {RANKS} ranks", precision, whole))
        sizes = [RANKS] * kills + ([1, 3] if precision == FP64 else [])
        for number, ranks in enumerate(sizes):
            of_all = f"in {precision}, {number + 1} of {len(sizes)}"
            step = chance.randrange(LEAST_STEPS - 2, stage.steps)
            killed = chance.randrange(RANKS)
            layout = f"rank {killed} killed in step {step + 1}, resumed on {ranks}"
            print(f"{layout} ({of_all}) ...", file=sys.stderr, flush=True)
            name = f"killed-{number}"
            if not stage.train_and_kill(name, RANKS, SAVES, precision, step, killed):
                raise RunError(f"{layout}: the run ended before it was killed")
            overrides = [*SAVES, "run.resume=auto"]
            resumed = stage.train(name, ranks, overrides, [precision], is_apart=ranks == 1)
            same = ranks == RANKS
            findings.append(_compare(layout, precision, whole, resumed[precision], same))
    return findings


def _compare(
    layout: str, precision: str, whole: Evidence, resumed: Evidence, is_exact: bool
) -> Finding:
    """Compare the steps after the resume, and the state at the end."""
    steps = resumed.steps
    if len(steps) == len(whole.steps):
        why = "it started from step 0: there was no checkpoint"
        return Finding(layout, precision, PROVES_NOTHING, reason=why)
    reference = whole.of_steps(steps)
    finding = compare(layout, precision, reference, resumed.of_steps(steps))
    if finding.result == DIFFERENT:  # its probe used other weights, so it explains nothing
        return replace(finding, reason=LOST)
    if not is_exact or finding.result != AGREES:
        return finding
    return judge_bits(finding, reference, resumed, LOST)
