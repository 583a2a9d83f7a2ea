"""The verbs' common part: help, words of the command line, the task class, and exit codes."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from trainer.config.schema import Config
from trainer.config.targets import resolve
from trainer.distributed.launchers import CODES, find_launcher
from trainer.distributed.signals import leave_pid_1, let_go
from trainer.errors import ConfigError, RunError, visible
from trainer.loading import uncollected
from trainer.terminal import outlive_terminal

Verb = Callable[[Sequence[str]], int]  # arguments -> exit code
HELP_FLAGS = ("-h", "--help")
SWEEP_FLAGS = ("-m", "--multirun")
QUESTIONS = ("-c", "--cfg", "-i", "--info", "--hydra-help")
HYDRA_FLAGS = (*SWEEP_FLAGS, *QUESTIONS, "--resolve", "-p", "--package")

# torchrun kills all ranks at the first exit, and with it the line that rank 0 is about to print
WAIT_S = 3.0
SOON_S = 0.9


def run(verb: Verb, usage: str | Callable[[Sequence[str]], str] = "") -> None:
    """Run a verb on the command line and exit; `-h` and `--help` print `usage`.

    An error of one line is printed by rank 0 alone; a bad setting ends with code 2.
    """
    leave_pid_1()
    outlive_terminal()
    arguments = sys.argv[1:]
    words = [word for word in arguments if word not in HELP_FLAGS]
    try:
        if usage and len(words) < len(arguments):
            print(usage if isinstance(usage, str) else usage(words))
            code = 0
        else:
            code = verb(arguments)
    except (ConfigError, RunError) as error:
        _print_error(error)
        code = 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        if _find_rank() == 0:
            print("interrupted; nothing was saved", file=sys.stderr, flush=True)
        code = 1
    except Exception:
        traceback.print_exc()
        code = 1
    _exit(code)


def _find_rank() -> int:
    """This process's rank; 0 where the environment cannot be right."""
    try:
        given = find_launcher().variables
    except ConfigError:
        return 0
    rank = given.get("RANK", "")
    size = given.get("WORLD_SIZE", "")
    is_rank = rank.isdecimal() and size.isdecimal() and int(rank) < int(size)
    return int(rank) if is_rank else 0


def _print_error(error: Exception) -> None:
    """Print it on rank 0; on another rank only if rank 0 has not ended this process soon after."""
    is_ending = let_go()
    rank = _find_rank()
    if rank and is_ending:
        return
    if rank:
        time.sleep(_patience())
    who = f"rank {rank}: " if rank else ""
    print(visible(f"error: {who}{error}"), file=sys.stderr, flush=True)


def _patience() -> float:
    """Seconds to wait for rank 0's line.

    By hand each rank has a terminal of its own; ranks that were about to meet fail together.
    """
    if find_launcher().name == "hand":
        return 0.0
    rendezvous = sys.modules.get("trainer.distributed.rendezvous")
    return SOON_S if getattr(rendezvous, "num_meetings", 0) else WAIT_S


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if path := os.environ.get(CODES):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{code}\n")
    if code == 0:
        sys.exit(0)
    for child in multiprocessing.active_children():
        child.kill()  # data workers hold our sockets open: peers would not notice the end
    # An orderly end would wait for peers in a collective. It also takes torch half a second.
    os._exit(code)


def split_arguments(
    arguments: Sequence[str], others: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """(overrides, config dirs). Raises ConfigError for a flag that is not one of `others`."""
    overrides = []
    folders = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        flag, _, value = word.partition("=")
        if word in ("--config-dir", "-cd"):
            if not rest:
                raise ConfigError("--config-dir: needs a directory")
            folders.append(rest.pop(0))
        elif word.startswith("--config-dir="):
            folders.append(value)
        elif word.startswith(("--local-rank=", "--local_rank=")):
            continue  # torch.distributed.launch gives it beside LOCAL_RANK
        elif word.startswith("-") and flag not in others:
            known = "--config-dir, --help, -m, --cfg, --info and key=value"
            raise ConfigError(f"{flag} is not a flag: there are {known}")
        else:
            overrides.append(word)
    return overrides, folders


def single(words: Sequence[str], advice: str) -> str:
    """The only word. Raises ConfigError with `advice` for none, several or a flag."""
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError(advice)
    return words[0]


def run_directory(arguments: Sequence[str], advice: str) -> tuple[str, list[str], list[str]]:
    """(run directory, overrides, config dirs). Raises ConfigError unless there is one directory."""
    words, config_dirs = split_arguments(arguments)
    place = single([word for word in words if "=" not in word], advice)
    return place, [word for word in words if "=" in word], config_dirs


def check_alone(what: str, advice: str) -> None:
    """Raises ConfigError within a launch; one task of srun or mpirun counts as alone."""
    launcher = find_launcher()
    is_one = launcher.name in ("srun", "mpirun") and launcher.variables.get("WORLD_SIZE") == "1"
    if launcher.name != "python" and not is_one:
        started = f"the ranks were started already, by {launcher.name}"
        raise ConfigError(f"{what}: {started}; {advice}")


@uncollected()
def load_task(config: Config) -> Any:
    """The Trainer that `task.trainer` names. Raises ConfigError for anything else."""
    name = config.task.trainer
    if "." not in name:
        raise ConfigError(f"task.trainer={name}: must be <module>.<class>")
    task = resolve(name, "task.trainer", config.packages)
    from trainer.trainer import Trainer

    if not (isinstance(task, type) and issubclass(task, Trainer)) or task is Trainer:
        raise ConfigError(f"task.trainer={name}: must be a subclass of trainer.Trainer")
    return task
