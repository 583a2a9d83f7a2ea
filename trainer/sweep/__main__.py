"""`python -m trainer.sweep`: names the command that runs a sweep."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.cli import run
from trainer.errors import ConfigError

HELP = """A sweep is training with -m and several values for a setting:
    python -m trainer -m task=<name> optim.lr=0.1,0.2 run.seed=range(3)
docs/results.md says more."""


def main(arguments: Sequence[str]) -> int:
    given = " ".join(arguments) or "task=<name> optim.lr=0.1,0.2"
    raise ConfigError(f"trainer.sweep: is no command; use python -m trainer -m {given}")


if __name__ == "__main__":
    run(main, HELP, has_json=False)
