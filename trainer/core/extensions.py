"""Extensions of the core: names, and the modules that answer them, which are imported when used."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from trainer.base.errors import ConfigError


@dataclass(frozen=True)
class Extension:
    """A module, and where `check` is to look for it, the package that it needs and its extra."""

    module: str
    package: str = ""
    extra: str = ""

    def check(self, given: str) -> None:
        """Raise ConfigError for a setting, as it was given, if the package is not installed."""
        if self.package and find_spec(self.package) is None:
            raise ConfigError(f"{given}: run pip install 'lockstep-trainer[{self.extra}]'")

    @property
    def is_installed(self) -> bool:
        """True if the module is there. Imports nothing of it."""
        return find_spec(self.module) is not None

    def load(self) -> Any:
        """Return the module. Raises ConfigError in an installation without it."""
        try:
            return import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name and f"{self.module}.".startswith(f"{error.name}."):
                raise ConfigError(f"""{self.module}: is not part of this installation;
                    install lockstep-trainer as a whole""") from None
            raise


# What looks at a run beside its steps: `open_checks`.
CHECKS = Extension("trainer.startup_checks")
# `Trainer.launch` in a notebook: `train_on_ranks`.
NOTEBOOK = Extension("trainer.notebook")
# `--cfg` and other flags of Hydra: `answer_questions`.
QUESTIONS = Extension("trainer.sweep.__main__")
# Values of `strategy.name` besides the files of core/strategy: `STRATEGY`.
STRATEGIES = {name: Extension(f"trainer.mesh.{name}") for name in ("fsdp", "parallel")}
_BUCKET = Extension("trainer.places.bucket_store", "obstore", "bucket")
# Schemes of the addresses of stores, in the order in which errors name them: `open_store`.
STORES = dict.fromkeys(("s3", "gs", "az", "file"), _BUCKET)
# Names of `log.trackers` besides those of the core: `TRACKER`, a subclass of Observer.
TRACKERS = {
    "wandb": Extension("trainer.places.wandb", "wandb", "wandb"),
    "mlflow": Extension("trainer.places.mlflow", "mlflow", "mlflow"),
}
# `checkpoint.export`: `check_export` at the start, `export_at_end` after training.
EXPORT = Extension("trainer.hf.folder_export", "transformers", "hf")
# Variables by which what started a process asks for its progress: `open_sink`.
STARTERS = {"KUBEFLOW_TRAINER_SERVER_URL": Extension("trainer.places.kubeflow")}
# Values of `dist.backend` that torch does not have: `register`.
BACKENDS = {"mpi": Extension("trainer.places.mpi")}
# Values of `launch.name` beyond this machine: `launch`.
LAUNCHERS = {"ray": Extension("trainer.places.ray_ranks")}
