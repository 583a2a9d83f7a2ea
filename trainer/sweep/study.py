"""Optuna's study of a sweep, by ask and tell: stored on disk, reproducible after a restart."""

from __future__ import annotations

import itertools
import math
import secrets
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from trainer.config.typed import limit
from trainer.errors import ConfigError, one_line

Space = Mapping[str, Any]  # a setting -> Optuna's distribution of its values


@dataclass(frozen=True)
class Settings:
    """Settings `hydra.sweeper.*`; `seed` is `sampler.seed`."""

    n_trials: Annotated[int, limit(min=1)]
    n_jobs: Annotated[int, limit(min=1, max=1)]  # jobs run one after another
    sampler: Literal["tpe", "random", "grid"]
    seed: Annotated[int | None, limit(min=0)]
    direction: Literal["minimize", "maximize"]
    study_name: str | None
    storage: str | None


@dataclass(frozen=True)
class StudyTrial:
    """Values of the swept settings, and the result `value`, None until it is known."""

    params: dict[str, Any]
    value: float | None


def load_optuna() -> Any:
    """Import Optuna. Raise ConfigError if it is not installed."""
    try:
        import optuna
    except ImportError:
        advice = "needs Optuna: pip install 'lockstep-trainer[optuna]'"
        raise ConfigError(f"hydra/sweeper=optuna: {advice}") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def read_space(sweeps: Sequence[Any]) -> Space:
    """Return Optuna's distributions for Hydra's sweep overrides, on a log scale if tagged `log`.

    They are choices, integers or floats. Raises ConfigError.
    """
    distributions = load_optuna().distributions
    space = {}
    for override in sweeps:
        value = override.value()
        is_log = "log" in value.tags
        try:
            if override.is_choice_sweep():
                words = tuple(override.sweep_string_iterator())
                distribution = distributions.CategoricalDistribution(words)
            elif override.is_range_sweep():
                numbers = sorted(value.range())
                step = abs(value.step)
                distribution = _span(distributions, numbers[0], numbers[-1], is_log, step)
            else:
                distribution = _span(distributions, value.start, value.end, is_log)
        except (ValueError, IndexError) as error:
            raise ConfigError(f"{override.input_line}: {one_line(error)}") from None
        space[override.get_key_element()] = distribution
    return space


def _span(distributions: Any, low: float, high: float, is_log: bool, step: Any = None) -> Any:
    if isinstance(low, int) and isinstance(high, int):
        return distributions.IntDistribution(low, high, log=is_log, step=step or 1)
    return distributions.FloatDistribution(low, high, log=is_log, step=step)


class Study:
    """The trials of a search, numbered from 0 in order.

    The sampler of a trial is seeded by the study's seed and the trial's number. Its values depend
    only on these and on the previous results, even if the search was interrupted.
    """

    def __init__(
        self,
        journal: Path,
        settings: Settings,
        command: str,
        space: Space,
        points: Sequence[dict[str, Any]] = (),
    ):
        """Open or create the study in `journal`.

        `command` is a digest of the command, which a resumed search must match. `points` are those
        of a grid. Raises ConfigError.
        """
        self._optuna = load_optuna()
        self._settings = settings
        self._space = space
        self._name = settings.study_name or journal.parent.name
        self._points = points
        self._storage = self._open_storage(journal)
        try:
            study = self._optuna.create_study(
                storage=self._storage,
                study_name=self._name,
                direction=settings.direction,
                load_if_exists=True,
            )
        except Exception as error:  # from Optuna or its database
            raise ConfigError(f"hydra.sweeper.storage: {one_line(error)}") from None
        if study.user_attrs.get("command", command) != command:
            advice = "was started with other settings; give run.name=<new>"
            raise ConfigError(f"{journal.parent}: its search {advice}")
        seed = secrets.randbits(32) if settings.seed is None else settings.seed
        self._seed = study.user_attrs.get("seed", seed)
        study.set_user_attr("command", command)
        study.set_user_attr("seed", self._seed)

    @property
    def num_trials(self) -> int:
        """Number of trials of the search; a grid has at most one per point."""
        num_trials = self._settings.n_trials
        return min(num_trials, len(self._points)) if self._points else num_trials

    def open_trial(self, number: int) -> StudyTrial:
        """Return the trial of this number: a finished, an interrupted, or a new one."""
        study = self._load(number)
        trials = study.get_trials(deepcopy=False)
        frozen = trials[number] if number < len(trials) else None
        if frozen is not None and frozen.state.is_finished():
            value = self._worst if frozen.value is None else frozen.value
            return StudyTrial(dict(frozen.params), value)
        if frozen is None and self._points:
            study.enqueue_trial(self._points[number])
        if frozen is None or frozen.state == self._optuna.trial.TrialState.WAITING:
            trial = study.ask()
        else:
            trial = self._optuna.trial.Trial(study, frozen._trial_id)
        return StudyTrial(
            {name: _suggest(trial, name, self._space[name]) for name in self._space}, None
        )

    def tell(self, number: int, value: float | None) -> None:
        """Store a job's result; None counts as the worst value."""
        self._load(number).tell(number, self._worst if value is None else value)

    @property
    def _worst(self) -> float:
        return math.inf if self._settings.direction == "minimize" else -math.inf

    def _load(self, number: int) -> Any:
        seed = zlib.crc32(f"{self._seed}/{number}".encode())
        samplers = self._optuna.samplers
        kind = samplers.TPESampler if self._settings.sampler == "tpe" else samplers.RandomSampler
        return self._optuna.load_study(
            study_name=self._name, storage=self._storage, sampler=kind(seed=seed)
        )

    def _open_storage(self, journal: Path) -> Any:
        if self._settings.storage is not None:
            return self._settings.storage
        # The sweep's lease admits one process at a time, so a lock was left by a killed one.
        journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
        backend = self._optuna.storages.journal.JournalFileBackend(str(journal))
        return self._optuna.storages.JournalStorage(backend)


def _suggest(trial: Any, name: str, distribution: Any) -> Any:
    if hasattr(distribution, "choices"):
        return trial.suggest_categorical(name, distribution.choices)
    is_integer = isinstance(distribution.low, int)
    suggest = trial.suggest_int if is_integer else trial.suggest_float
    low, high = distribution.low, distribution.high
    return suggest(name, low, high, step=distribution.step, log=distribution.log)


def list_points(space: Space) -> list[dict[str, Any]]:
    """Return every combination of the values; those of the last setting change fastest.

    Raises ConfigError for an interval of floats.
    """
    values = []
    for name, distribution in space.items():
        if hasattr(distribution, "choices"):
            values.append(list(distribution.choices))
        elif isinstance(distribution.low, int):
            values.append([*range(distribution.low, distribution.high + 1, distribution.step)])
        else:
            advice = "must be values, as a,b or range(1,4), for hydra/sweeper/sampler=grid"
            raise ConfigError(f"{name}: {advice}")
    return [dict(zip(space, point, strict=True)) for point in itertools.product(*values)]
