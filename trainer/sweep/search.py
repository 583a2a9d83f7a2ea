"""`-m ... hydra/sweeper=optuna`: Optuna chooses the jobs of a sweep (the extra `optuna`).

The study is stored in the sweep's directory, so that the same command resumes it. The sampler of a
trial is seeded by the study's seed and the trial's number. The values of a trial therefore depend
only on these and on the previous results, even if the search was interrupted.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.config.compose import SEARCHED, load_config, parse
from trainer.config.typed import build
from trainer.errors import ConfigError, visible
from trainer.record.lease import check_free
from trainer.sweep.jobs import Job, Sweep
from trainer.sweep.study import Settings, Study, list_points, read_space

SWEEPER = "hydra/sweeper=optuna"
JOURNAL = "study.journal"
_KEY = "hydra.sweeper."
_SAMPLER = "hydra/sweeper/sampler="
_DEFAULTS: dict[str, Any] = {"n_trials": 20, "n_jobs": 1, "sampler": "tpe", "sampler.seed": None}
_DEFAULTS |= {"direction": None, "study_name": None, "storage": None}
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
    parsed = parse(overrides, SEARCHED)
    config = load_config([o.input_line for o in parsed if not o.is_sweep_override()], config_dirs)
    settings = read_settings(steering, config.best_mode)
    space = read_space([override for override in parsed if override.is_sweep_override()])
    points = list_points(space) if settings.sampler == "grid" else []
    command = [word for word in steering if not word.startswith(f"{_KEY}n_trials=")]
    digest = hashlib.sha256(json.dumps([*command, *overrides]).encode()).hexdigest()[:8]
    name = config.run.name or digest
    _check_place(Path(config.run.dir) / "sweeps" / name, settings)
    sweep = Sweep(name, config)
    study = Study(sweep.place / JOURNAL, settings, digest, space, points)
    for number in range(study.num_trials):
        trial = study.open_trial(number)
        swept = {key: f"{key}={value}" for key, value in trial.params.items()}
        words = [swept.get(o.get_key_element(), o.input_line) for o in parsed]
        job = _open_job(sweep, number + 1, list(swept.values()), words, config_dirs)
        if trial.value is not None:
            job.settle(0 if math.isfinite(trial.value) else 1)
        if job.state == "failed" and trial.value is not None:
            print(f"job {job.number} failed at an earlier start: {job.label}", flush=True)
        else:
            sweep.run(job, f"job {job.number}")
        if sweep.is_stopped:
            break
        if trial.value is None:
            study.tell(number, job.value)
    sweep.record()
    return sweep.end()


def _open_job(
    sweep: Sweep, number: int, swept: list[str], words: list[str], config_dirs: Sequence[str]
) -> Job:
    """Return the job of a trial. If its settings are invalid together, it will fail and say why."""
    try:
        config = load_config(words, config_dirs)
    except ConfigError:
        config = sweep.config
    job = Job.of(number, swept, words, config, config_dirs, sweep.name)
    sweep.add(job)
    return job


def read_settings(steering: Sequence[str], best_mode: str) -> Settings:
    """Parse the arguments `hydra.sweeper.*`. Raise ConfigError for any other argument."""
    values = {**_DEFAULTS, "direction": {"min": "minimize", "max": "maximize"}[best_mode]}
    for word in steering:
        if word == SWEEPER:
            continue
        text = word.replace(_SAMPLER, f"{_KEY}sampler=").removeprefix(_KEY)
        name = text.partition("=")[0]
        if _OLD_PLUGIN in word:
            raise ConfigError(f"{visible(word)}: {_OLD_ADVICE}")
        if name not in values:
            allowed = ", ".join(f"{_KEY}{known}" for known in values)
            raise ConfigError(f"{visible(word)}: must be one of {allowed} in a search")
        values[name] = parse([text])[0].value()
    values["seed"] = values.pop("sampler.seed")
    return build(Settings, values, _KEY)


def _check_files(config_dirs: Sequence[str]) -> None:
    """Raise ConfigError for Hydra settings in a file of --config-dir: Hydra runs no jobs."""
    for file in [file for folder in config_dirs for file in sorted(Path(folder).glob("*/*.yaml"))]:
        try:
            text = file.read_text(encoding="utf-8")
            plain = yaml.safe_load(text)
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            continue  # composing reports it if the file is used
        if _OLD_PLUGIN in text or "override /hydra/sweeper" in text:
            raise ConfigError(f"{file}: {_OLD_ADVICE}")
        node = plain.get("hydra") if isinstance(plain, dict) else None
        for key in _REFUSED:
            if isinstance(node, dict) and key in node:
                raise ConfigError(f"{file}: sets hydra.{key}, which has no effect; remove it")


def _check_place(place: Path, settings: Settings) -> None:
    """Raise ConfigError if the directory is of another kind of sweep or is in use."""
    has_sweep = (place / "sweep.json").exists()
    is_new = (place / JOURNAL).exists() or settings.storage is not None
    if (place / _OLD_FILE).exists() or (has_sweep and not is_new):
        advice = "give run.name=<new>, or remove the directory, which holds no runs"
        raise ConfigError(f"{place}: is a sweep without a study, or one of {_OLD}; {advice}")
    check_free(place)
