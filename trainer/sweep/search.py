"""`-m ... hydra/sweeper=optuna`: Optuna chooses the jobs of a sweep, through Hydra's plugin (the extra `optuna`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainer.config import CONF
from trainer.config.compose import load_config
from trainer.errors import ConfigError, one_line

SWEEPER = "hydra/sweeper=optuna"
_TARGETS = (
    "hydra_plugins.hydra_optuna_sweeper.",
    "hydra._internal.core_plugins.",
    "optuna.samplers.",
)
_QUIET = ("hydra/job_logging=disabled", "hydra/hydra_logging=disabled")


def search(
    steering: Sequence[str],
    overrides: Sequence[str],
    config_dirs: Sequence[str],
    name: str,
    run_job: Callable[[int, str, list[str]], float],
) -> int:
    """Ask Optuna for the overrides of job after job; `run_job(number, sweep, overrides)` gives the value to minimise.

    `steering` are the `hydra...` words, `overrides` the others, swept ones as `optim.lr=interval(0.01,0.1)`.
    Raises ConfigError for a fixed setting that cannot be, and for a file that would have Hydra build something else.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    fixed = _fixed(overrides)
    config = load_config(fixed, config_dirs)
    name = config.run.name or name
    place = Path(config.run.dir) / "sweeps" / name
    if config.checkpoint.best_mode == "max":
        steering = ["hydra.sweeper.direction=maximize", *steering]
    folders = ",".join(repr(f"file://{Path(folder).resolve()}") for folder in config_dirs)
    paths = [f"hydra.searchpath=[{folders}]"] if config_dirs else []
    _check_built([*steering, *fixed, *paths, *_QUIET])

    def job(config: Any) -> float:
        told = HydraConfig.get()
        return run_job(int(told.job.num) + 1, name, list(told.overrides.task))

    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = [
        sys.argv[0],
        "-m",
        *overrides,
        *steering,
        *paths,
        *_QUIET,
        f"hydra.sweep.dir='{place}'",
    ]
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{SWEEPER}: {one_line(error)[:300]}") from None
    return 0


def _fixed(overrides: Sequence[str]) -> list[str]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(f"{one_line(error)[:200]}") from None
    return [str(override.input_line) for override in parsed if not override.is_sweep_override()]


def _check_built(words: Sequence[str]) -> None:
    """Hydra builds what its own node names; a file of --config-dir may have written there."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3", job_name="trainer"):
            node: Any = OmegaConf.to_container(
                compose("config", list(words), return_hydra_config=True).hydra
            )
    except HydraException as error:
        advice = (
            "; is it installed? pip install 'lockstep-trainer[optuna]'"
            if "optuna" in str(error)
            else ""
        )
        raise ConfigError(f"{SWEEPER}: {one_line(error)[:200]}{advice}") from None
    finally:
        GlobalHydra.instance().clear()
    built = [*_targets(node["sweeper"]), *_targets(node["launcher"])]
    if bad := [name for name in built if not name.startswith(_TARGETS)]:
        raise ConfigError(
            f"hydra: a configuration has {bad[0]} built: must lie under {', '.join(_TARGETS)}"
        )
    logs = [node[name] for name in ("job_logging", "hydra_logging")]
    if node["callbacks"] or any(
        set(log) - {"version", "root", "disable_existing_loggers"} for log in logs
    ):
        raise ConfigError(
            "hydra: a configuration sets hydra.callbacks or hydra's logging; take it out"
        )


def _targets(node: Any) -> list[str]:
    if isinstance(node, dict):
        return [str(v) for k, v in node.items() if k == "_target_"] + [
            t for v in node.values() for t in _targets(v)
        ]
    return [t for v in node for t in _targets(v)] if isinstance(node, list) else []
