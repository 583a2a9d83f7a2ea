"""`hydra/sweeper=optuna`: Optuna chooses the jobs of a sweep (the extra `optuna`).

The study is stored in the sweep's directory, so that the same command resumes it. The sampler of a
trial is seeded by the study's seed and the trial's number. The values of a trial therefore depend
only on these and on the previous results, even if the search was interrupted.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import secrets
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from trainer import limit, load_config
from trainer.base.errors import ConfigError, one_line, visible
from trainer.base.plain_files import MOST_OF_YAML, parse_yaml, read_of_user
from trainer.core.api import Lease, build, parse
from trainer.sweep.jobs import MOST_JOBS, TOO_MANY_JOBS, Job, Sweep

SWEEPER = "hydra/sweeper=optuna"
JOURNAL = "study.journal"
_SWEEPER_PREFIX = "hydra.sweeper."
_SAMPLER = "hydra/sweeper/sampler="
NUM_TRIALS = 20  # of a search without n_trials, except of a grid
_DEFAULT_SETTINGS: dict[str, Any] = {"n_trials": None, "n_jobs": 1, "sampler": "tpe"}
_DEFAULT_SETTINGS |= {"sampler.seed": None, "direction": None, "study_name": None, "storage": None}
# Settings of Hydra that a file must not set in a search; the last two were for the old plugin.
_REFUSED = ("callbacks", "job_logging", "hydra_logging", "launcher", "sweeper")
_OLD_PLUGIN = "hydra_optuna_sweeper"
_OLD_FILE = "optimization_results.yaml"
_OLD = "Hydra's Optuna plugin, which Lockstep no longer uses"
_OLD_ADVICE = f"names {_OLD}; remove it and give {SWEEPER} on the command line"


def search(steering: Sequence[str], overrides: Sequence[str], config_dirs: Sequence[str]) -> int:
    """Run the jobs that Optuna proposes, one after another, and return the exit code.

    `steering` holds the arguments `hydra...`, `overrides` the others, with search spaces such as
    `optim.lr=interval(0.01,0.1)`. Raises ConfigError for invalid settings.
    """
    _check_files(config_dirs)
    parsed = parse(overrides, "spaces")
    config = load_config([o.input_line for o in parsed if not o.is_sweep_override()], config_dirs)
    settings = read_settings(steering, config.best_mode)
    space = read_space([override for override in parsed if override.is_sweep_override()])
    points = list_points(space) if settings.sampler == "grid" else []
    command = [word for word in steering if not word.startswith(f"{_SWEEPER_PREFIX}n_trials=")]
    digest = hashlib.sha256(json.dumps([*command, *overrides]).encode()).hexdigest()[:8]
    name = config.run.name or digest
    _check_place(Path(config.run.dir) / "sweeps" / name, settings)
    sweep = Sweep(name, config)
    study = Study(sweep.place / JOURNAL, settings, digest, space, points)
    for trial_number in range(study.num_trials):
        trial = study.open_trial(trial_number)
        swept = {key: f"{key}={value}" for key, value in trial.params.items()}
        words = [swept.get(o.get_key_element(), o.input_line) for o in parsed]
        job = _open_job(sweep, trial_number + 1, list(swept.values()), words, config_dirs)
        if trial.value is not None:
            job.end(0 if math.isfinite(trial.value) else 1)
        if job.state == "failed" and trial.value is not None:
            print(f"job {job.number} failed at an earlier start: {job.label}", flush=True)
        else:
            sweep.run([job])
        if sweep.is_stopped:
            break
        if trial.value is None:
            study.tell(trial_number, job.value)
    sweep.record()
    return sweep.end()


def _open_job(
    sweep: Sweep, job_number: int, swept: list[str], words: list[str], config_dirs: Sequence[str]
) -> Job:
    """Return the job of a trial. If its settings are invalid together, it will fail and say why."""
    try:
        config = load_config(words, config_dirs)
    except ConfigError:
        config = sweep.config
    job = Job.of(job_number, swept, words, config, config_dirs, sweep.name)
    sweep.add(job)
    return job


def read_settings(steering: Sequence[str], best_mode: str) -> Settings:
    """Parse the arguments `hydra.sweeper.*`. Raise ConfigError for any other argument."""
    values = {**_DEFAULT_SETTINGS, "direction": {"min": "minimize", "max": "maximize"}[best_mode]}
    for word in steering:
        if word == SWEEPER:
            continue
        text = word.replace(_SAMPLER, f"{_SWEEPER_PREFIX}sampler=").removeprefix(_SWEEPER_PREFIX)
        name = text.partition("=")[0]
        if _OLD_PLUGIN in word:
            raise ConfigError(f"{visible(word)}: {_OLD_ADVICE}")
        if name not in values:
            allowed = ", ".join(f"{_SWEEPER_PREFIX}{setting}" for setting in values)
            raise ConfigError(f"{visible(word)}: must be one of {allowed} in a search")
        values[name] = parse([text])[0].value()
    values["seed"] = values.pop("sampler.seed")
    return build(Settings, values, _SWEEPER_PREFIX)


def _check_files(config_dirs: Sequence[str]) -> None:
    """Raise ConfigError for Hydra settings in a file of --config-dir: Hydra runs no jobs."""
    for file in [file for folder in config_dirs for file in sorted(Path(folder).glob("*/*.yaml"))]:
        try:
            text = read_of_user(file, MOST_OF_YAML).decode()
            plain = parse_yaml(text)
        except (OSError, ValueError):
            continue  # composing reports it if the file is used
        if _OLD_PLUGIN in text or "override /hydra/sweeper" in text:
            raise ConfigError(f"{file}: {_OLD_ADVICE}")
        node = plain.get("hydra") if isinstance(plain, dict) else None
        for key in _REFUSED:
            if isinstance(node, dict) and key in node:
                raise ConfigError(f"{file}: sets hydra.{key}, which has no effect; remove it")


def _check_place(folder: Path, settings: Settings) -> None:
    """Raise ConfigError if the directory is of another kind of sweep or is in use."""
    has_sweep = (folder / "sweep.json").exists()
    is_new = (folder / JOURNAL).exists() or settings.storage is not None
    if (folder / _OLD_FILE).exists() or (has_sweep and not is_new):
        advice = "give run.name=<new>, or remove the directory, which holds no runs"
        raise ConfigError(f"{folder}: is a sweep without a study, or one of {_OLD}; {advice}")
    Lease.check_free(folder)


MOST_NUMBERS = 100_000  # of a range of floats: Hydra computes each
Space = Mapping[str, Any]  # a setting -> Optuna's distribution of its values


@dataclass(frozen=True)
class Settings:
    """Settings `hydra.sweeper.*`; `seed` is `sampler.seed`."""

    n_trials: Annotated[int | None, limit(min=1)]  # None: all points of a grid, else NUM_TRIALS
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
                low, high = _ends(value.range())
                distribution = _span(distributions, low, high, is_log, abs(value.step))
            else:
                distribution = _span(distributions, value.start, value.end, is_log)
        except (ValueError, IndexError) as error:
            raise ConfigError(f"{override.input_line}: {one_line(error)}") from None
        space[override.get_key_element()] = distribution
    return space


def _ends(numbers: Any) -> tuple[float, float]:
    """Return the smallest and the largest number of a range. Raises ValueError for a long one."""
    if not isinstance(numbers, range):  # Hydra's, of floats
        numbers = [*itertools.islice(numbers, MOST_NUMBERS + 1)]
        if len(numbers) > MOST_NUMBERS:
            raise ValueError(f"has more than {MOST_NUMBERS:,} values; give interval(<low>,<high>)")
    return min(numbers[0], numbers[-1]), max(numbers[0], numbers[-1])


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
        """Number of trials of the search; a grid has one per point if there is no `n_trials`."""
        num_points = len(self._points)
        num_trials = self._settings.n_trials or num_points or NUM_TRIALS
        return min(num_trials, num_points) if num_points else num_trials

    def open_trial(self, trial_number: int) -> StudyTrial:
        """Return the trial of this number: a finished, an interrupted, or a new one."""
        study = self._load(trial_number)
        trials = study.get_trials(deepcopy=False)
        frozen = trials[trial_number] if trial_number < len(trials) else None
        if frozen is not None and frozen.state.is_finished():
            value = self._worst if frozen.value is None else frozen.value
            return StudyTrial(dict(frozen.params), value)
        if frozen is None and self._points:
            study.enqueue_trial(self._points[trial_number])
        if frozen is None or frozen.state == self._optuna.trial.TrialState.WAITING:
            trial = study.ask()
        else:
            trial = self._optuna.trial.Trial(study, frozen._trial_id)
        return StudyTrial(
            {name: _suggest(trial, name, self._space[name]) for name in self._space}, None
        )

    def tell(self, trial_number: int, value: float | None) -> None:
        """Store a job's result; None counts as the worst value."""
        self._load(trial_number).tell(trial_number, self._worst if value is None else value)

    @property
    def _worst(self) -> float:
        return math.inf if self._settings.direction == "minimize" else -math.inf

    def _load(self, trial_number: int) -> Any:
        seed = zlib.crc32(f"{self._seed}/{trial_number}".encode())
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

    Raises ConfigError for an interval of floats, and for more points than a sweep may have.
    """
    values: list[Sequence[Any]] = []
    for name, distribution in space.items():
        if hasattr(distribution, "choices"):
            values.append(list(distribution.choices))
        elif isinstance(distribution.low, int):
            values.append(range(distribution.low, distribution.high + 1, distribution.step))
        else:
            advice = "must be values, as a,b or range(1,4), for hydra/sweeper/sampler=grid"
            raise ConfigError(f"{name}: {advice}")
        if math.prod(map(len, values)) > MOST_JOBS:
            raise ConfigError(f"{name}: {TOO_MANY_JOBS}")
    return [dict(zip(space, point, strict=True)) for point in itertools.product(*values)]
