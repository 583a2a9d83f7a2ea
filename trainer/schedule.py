"""Learning-rate factors as pure functions of the step: nothing to save, nothing to fast-forward at a resume.

Each builder takes the run's `num_steps`, first and by that name (targets.py knows a schedule by it), and returns
`factor(step)`, for the update made at 0-based `step`, which multiplies every parameter group's base rate. All warm up
linearly over `warmup_steps` when there are any.
"""

import bisect
import math
from collections.abc import Callable, Sequence

from trainer.config import Config
from trainer.errors import ConfigError

Factor = Callable[[int], float]


def rate_scale(config: Config) -> float:
    """What `run.lr_scaling` multiplies every rate with: linear (Goyal et al., arXiv:1706.02677) or its square root."""
    rule, batch = config.run.lr_scaling, config.run.lr_batch
    if (rule == "none") != (batch is None):
        needs = "run.lr_batch=<the global batch that optim.lr was chosen for>"
        raise ConfigError(f"run.lr_scaling={rule}: " + ("takes no run.lr_batch" if rule == "none" else f"give {needs}"))
    return (config.data.global_batch / (batch or 1)) ** {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[rule]


def _warm(warmup_steps: int, num_steps: int, after: Callable[[float], float]) -> Factor:
    """Linear warm-up, then `after(progress)` with progress from 0 to 1, 1 standing just past the last step."""
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


def constant(num_steps: int, warmup_steps: int = 0) -> Factor:
    return _warm(warmup_steps, num_steps, lambda progress: 1.0)


def linear(num_steps: int, warmup_steps: int = 0, final: float = 0.0) -> Factor:
    return _warm(warmup_steps, num_steps, lambda progress: 1 + (final - 1) * progress)


def cosine(num_steps: int, warmup_steps: int = 0, final: float = 0.0) -> Factor:
    """Half a cosine (Loshchilov and Hutter, arXiv:1608.03983, without restarts)."""
    return _warm(
        warmup_steps, num_steps, lambda progress: final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
    )


def one_cycle(num_steps: int, warmup_steps: int | None = None, initial: float = 0.04, final: float = 4e-6) -> Factor:
    """Cosine up from `initial`, cosine down to `final` (Smith and Topin, arXiv:1708.07120)."""
    peak = int(0.3 * num_steps) if warmup_steps is None else warmup_steps
    _check_warmup(peak)
    down = cosine(max(1, num_steps - peak), 0, final)

    def factor(step: int) -> float:
        if step < peak:
            return initial + (1 - initial) * 0.5 * (1 - math.cos(math.pi * step / peak))
        return down(step - peak)

    return factor


def multistep(num_steps: int, warmup_steps: int = 0, milestones: Sequence[float] = (), gamma: float = 0.1) -> Factor:
    """Times `gamma` at each milestone, given as a part of the run (0.5) or, from 1 on, as a step (20000)."""
    steps = sorted(m if m >= 1 else round(m * num_steps) for m in milestones)
    warm = _warm(warmup_steps, num_steps, lambda progress: 1.0)
    return lambda step: warm(step) * gamma ** bisect.bisect_right(steps, step)
