"""Learning-rate factors as pure functions of the step: a resume needs no state of theirs.

Each builder takes the run's `num_steps`, first and by that name (targets.py knows a schedule by
it), and returns `factor(step)`, for the update made at 0-based `step`, which multiplies every
parameter group's base rate. All warm up linearly over `warmup_steps`, if there are any.
"""

import bisect
import math
from collections.abc import Callable
from typing import Annotated

from trainer.config.schema import Config
from trainer.config.typed import limit

Factor = Callable[[int], float]
Steps = Annotated[int, limit(min=0)]
MaybeSteps = Annotated[int | None, limit(min=0)]
Part = Annotated[float, limit(min=0)]  # of the base rate


def rate_scale(config: Config) -> float:
    """The factor of `run.lr_scaling`: linear (Goyal et al., arXiv:1706.02677) or its root."""
    power = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[config.run.lr_scaling]
    return (config.data.global_batch / (config.run.lr_batch or 1)) ** power


def _warm(warmup_steps: int, num_steps: int, after: Callable[[float], float]) -> Factor:
    """Linear warm-up, then `after(progress)`; progress 1 is just past the last step."""
    _check_warmup(warmup_steps)
    length = max(1, num_steps - warmup_steps)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        return after(min(1.0, (step - warmup_steps) / length))

    return factor


def _check_warmup(warmup_steps: int) -> None:
    if not isinstance(warmup_steps, int) or warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps}: must be a whole number of at least 0")


def constant(num_steps: int, warmup_steps: Steps = 0) -> Factor:
    return _warm(warmup_steps, num_steps, lambda progress: 1.0)


def linear(num_steps: int, warmup_steps: Steps = 0, final: Part = 0.0) -> Factor:
    return _warm(warmup_steps, num_steps, lambda progress: 1 + (final - 1) * progress)


def cosine(num_steps: int, warmup_steps: Steps = 0, final: Part = 0.0) -> Factor:
    """Half a cosine (Loshchilov and Hutter, arXiv:1608.03983, without restarts)."""
    return _warm(
        warmup_steps,
        num_steps,
        lambda progress: final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)),
    )


def one_cycle(
    num_steps: int, warmup_steps: MaybeSteps = None, initial: Part = 0.04, final: Part = 4e-6
) -> Factor:
    """Cosine up from `initial`, cosine down to `final` (Smith and Topin, arXiv:1708.07120)."""
    peak = int(0.3 * num_steps) if warmup_steps is None else warmup_steps
    _check_warmup(peak)
    down = cosine(max(1, num_steps - peak), 0, final)

    def factor(step: int) -> float:
        if step < peak:
            return initial + (1 - initial) * 0.5 * (1 - math.cos(math.pi * step / peak))
        return down(step - peak)

    return factor


def multistep(
    num_steps: int, warmup_steps: Steps = 0, milestones: list[Part] | None = None, gamma: Part = 0.1
) -> Factor:
    """Times `gamma` at each milestone: a part of the run (0.5) or, from 1 on, a step (20000)."""
    steps = sorted(m if m >= 1 else round(m * num_steps) for m in milestones or ())
    warm = _warm(warmup_steps, num_steps, lambda progress: 1.0)
    return lambda step: warm(step) * gamma ** bisect.bisect_right(steps, step)
