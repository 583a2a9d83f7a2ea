"""`python -m trainer.completion bash`: print the code with which a shell completes commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

HELP = """usage: python -m trainer.completion bash|fish|zsh

Prints code that completes verbs, settings, choices and tasks, also those of the folder's own
conf/, after lockstep, python -m trainer and torchrun ... -m trainer:
    bash, zsh:  eval "$(lockstep completion bash)"       (or zsh), in this shell, or in its rc file
    fish:       lockstep completion fish | source
The command lockstep must be on the PATH: the shell asks it at each press of Tab."""

SHELLS = ("bash", "fish", "zsh")


def main(arguments: Sequence[str]) -> int:
    from trainer.cli import single
    from trainer.errors import ConfigError

    shell = single(arguments, f"give one of {', '.join(SHELLS)}: python -m trainer.completion bash")
    if shell not in SHELLS:
        raise ConfigError(f"{shell}: must be one of {', '.join(SHELLS)}")
    print(Path(__file__).with_name(f"completion.{shell}").read_text(encoding="utf-8"), end="")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--"]:  # a shell asks, at each press of Tab
        from trainer.completion.candidates import complete

        for candidate in complete(sys.argv[2:]):
            print(candidate)
    else:
        from trainer.cli import run

        run(main, HELP, has_json=False)
