"""Learning-rate schedules as pure functions of the step, so that a resume needs no saved state.

Each builder takes the run's `num_steps` as its first argument, by that name (targets.py recognises
a schedule by it), and returns `factor(step)`. The factor multiplies every parameter group's base
rate for the update at 0-based `step`. All but `one_cycle` warm up linearly over `warmup_steps`.
"""

import bisect
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

from trainer.base.errors import ConfigError, describe_with_place
from trainer.core.config.schema import Config
from trainer.core.config.typed import limit

Factor = Callable[[int], float]
MOST_TRIED = 1000  # steps, in about a millisecond
Steps = Annotated[int, limit(min=0)]
MaybeSteps = Annotated[int | None, limit(min=0)]
Part = Annotated[float, limit(min=0)]  # relative to the base rate


class Schedule:
    """A schedule whose factors are checked, because a late one can be wrong too."""

    def __init__(self, factor: Factor, name: str):
        """`name` is shown in errors."""
        self.factor = factor
        self._name = name

    def check(self, num_steps: int) -> None:
        """Raise ConfigError if the factor of a step is wrong; try some of very many."""
        if not callable(self.factor):
            raise ConfigError(f"""{self._name} returned a {type(self.factor).__name__}:
                must return one factor(step), a number, for all optimizers;
                for one alone, multiply its param_groups' lr in train_step""")
        for step in {*range(0, num_steps, max(1, num_steps // MOST_TRIED)), num_steps - 1}:
            self(step)

    def __call__(self, step: int) -> float:
        """Return the factor of a 0-based step. Raises ConfigError unless it is at least 0."""
        try:
            factor = self.factor(step)
        except Exception as error:
            raise self._refuse(f"raised {describe_with_place(error)}", step) from None
        try:
            number = math.nan if isinstance(factor, str) else float(factor)
        except Exception:  # of a number type, or a tensor
            number = math.nan
        if not 0 <= number < math.inf:
            raise self._refuse(f"returned {factor!r:.80}", step)
        return number

    def _refuse(self, what: str, step: int) -> ConfigError:
        return ConfigError(f"""{self._name}: {what} for step {step} (the first is 0):
            must return factor(step), a finite number of at least 0""")


def describe_longer_run(schedule_of: Callable[[int], Factor], num_steps: int) -> list[str]:
    """Return a line if a run twice as long goes on with another rate than this one ends with."""
    with suppress(ConfigError):  # of a schedule of the user's that knows one length
        ends, goes_on = (schedule_of(n * num_steps)(num_steps - 1) for n in (1, 2))
        if abs(goes_on - ends) > 0.01 * max(goes_on, ends):
            rise = f"the schedule is computed for the new length, so the rate goes from {ends:.3g}"
            return [f"a longer run: {rise} to {goes_on:.3g} of its peak"]
    return []


def rate_scale(config: Config) -> float:
    """Return the factor of `run.lr_scaling` for global_batch / lr_batch.

    It is 1, linear (Goyal et al., arXiv:1706.02677), or the square root.
    """
    power = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[config.run.lr_scaling]
    return (config.data.global_batch / (config.run.lr_batch or 1)) ** power


def _warm(warmup_steps: int, num_steps: int, after: Callable[[float], float]) -> Factor:
    """Return a linear warm-up, then `after(progress)`; progress 1 is just past the last step."""
    _check_warmup(warmup_steps)
    length = max(1, num_steps - warmup_steps)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        return after(min(1.0, (step - warmup_steps) / length))

    return factor


def _check_warmup(warmup_steps: int) -> None:
    if not isinstance(warmup_steps, int) or warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps}: must be an integer of at least 0")


def constant(num_steps: int, warmup_steps: Steps = 0) -> Factor:
    """Constant rate, factor 1."""
    return _warm(warmup_steps, num_steps, lambda progress: 1.0)


def linear(num_steps: int, warmup_steps: Steps = 0, final: Part = 0.0) -> Factor:
    """Linear decay from 1 to `final`."""
    return _warm(warmup_steps, num_steps, lambda progress: 1 + (final - 1) * progress)


def cosine(num_steps: int, warmup_steps: Steps = 0, final: Part = 0.0) -> Factor:
    """Cosine decay from 1 to `final` (Loshchilov and Hutter, arXiv:1608.03983, no restarts)."""
    return _warm(
        warmup_steps,
        num_steps,
        lambda progress: final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)),
    )


def one_cycle(
    num_steps: int, warmup_steps: MaybeSteps = None, initial: Part = 0.04, final: Part = 4e-6
) -> Factor:
    """One cycle (Smith and Topin, arXiv:1708.07120): cosine from `initial` to 1, then to `final`.

    The warm-up takes 30 % of the run unless `warmup_steps` is given. It ends one step later than
    torch's OneCycleLR, and the decay ends after the last step, as in the other schedules.
    """
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
    """Step decay: multiply by `gamma` at each milestone.

    A milestone below 1 is a fraction of the run (0.5); from 1 on it is a step (20000).
    """
    steps = sorted(m if m >= 1 else round(m * num_steps) for m in milestones or ())
    warm = _warm(warmup_steps, num_steps, lambda progress: 1.0)
    return lambda step: warm(step) * gamma ** bisect.bisect_right(steps, step)
