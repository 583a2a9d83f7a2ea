"""What the verbs share: words of the command line, the task class, and how a command ends."""

from __future__ import annotations

import gc
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

# torchrun kills all ranks at the first exit, and with it the line that rank 0 is about to print
WAIT_S, SOON_S = 3.0, 0.9
# Python's collector looks through torch again and again while it is imported: 0.1 s of 1.4 s
_COLLECTIONS, _FEW_COLLECTIONS = gc.get_threshold(), 100_000


def collect_less() -> None:
    """Until the task is loaded."""
    gc.set_threshold(_FEW_COLLECTIONS)


def check_alone(what: str, advice: str) -> None:
    """Raises ConfigError within a launch; one task of srun or mpirun is as good as none."""
    found = find_launcher()
    is_one = found.name in ("srun", "mpirun") and found.variables.get("WORLD_SIZE") == "1"
    if found.name != "python" and not is_one:
        raise ConfigError(f"{what}: the ranks were started already, by {found.name}; {advice}")


def split_arguments(
    arguments: Sequence[str], others: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """(overrides, config dirs). Raises ConfigError for a flag that does not exist; `others` are passed over."""
    overrides, folders, rest = [], [], list(arguments)
    while rest:
        word = rest.pop(0)
        if word in ("--config-dir", "-cd"):
            if not rest:
                raise ConfigError("--config-dir: needs a directory")
            folders.append(rest.pop(0))
        elif word.startswith("--config-dir="):
            folders.append(word.split("=", 1)[1])
        elif word.startswith(("--local-rank=", "--local_rank=")):
            continue  # torch.distributed.launch gives it beside LOCAL_RANK
        elif word.startswith("-") and word.split("=")[0] not in others:
            raise ConfigError(
                f"{word.split('=')[0]} is not a flag: there are --config-dir, --help, -m, --cfg, --info and key=value"
            )
        else:
            overrides.append(word)
    return overrides, folders


def run_directory(arguments: Sequence[str], advice: str) -> tuple[str, list[str], list[str]]:
    """(the one run directory among the words, overrides, config dirs). Raises ConfigError with `advice`."""
    words, config_dirs = split_arguments(arguments)
    places = [word for word in words if "=" not in word]
    if len(places) != 1:
        raise ConfigError(advice)
    return places[0], [word for word in words if "=" in word], config_dirs


def load_task(config: Config) -> Any:
    """The Trainer that `task.trainer` names. Raises ConfigError for anything else."""
    name = config.task.trainer
    if "." not in name:
        raise ConfigError(f"task.trainer={name}: must be <module>.<class>")
    found = resolve(name, "task.trainer", config.packages)
    from trainer.trainer import Trainer

    gc.freeze()  # what was imported stays
    gc.set_threshold(*_COLLECTIONS)
    if not (isinstance(found, type) and issubclass(found, Trainer)) or found is Trainer:
        raise ConfigError(f"task.trainer={name}: must be a subclass of trainer.Trainer")
    return found


def _patience() -> float:
    """Seconds: by hand each rank has a terminal of its own, and ranks that were about to meet fail together."""
    if find_launcher().name == "hand":
        return 0.0
    return (
        SOON_S
        if getattr(sys.modules.get("trainer.distributed.rendezvous"), "num_meetings", 0)
        else WAIT_S
    )


def run(verb: Callable[[Sequence[str]], int]) -> None:
    """Run a verb on the command line and exit. What one line can tell is one line, by rank 0; settings give code 2."""
    rank, is_first = "", True
    leave_pid_1()
    try:
        given = find_launcher().variables
        rank, size = given.get("RANK", ""), given.get("WORLD_SIZE", "")
        is_first = not (rank.isdecimal() and size.isdecimal() and 0 < int(rank) < int(size))
        code = verb(sys.argv[1:])
    except (ConfigError, RunError) as error:
        is_ending = let_go()
        if is_first:
            print(visible(f"error: {error}"), file=sys.stderr, flush=True)
        elif not is_ending:
            time.sleep(_patience())  # still here: rank 0 has not failed, so it is ours to say
            print(visible(f"error: rank {rank}: {error}"), file=sys.stderr, flush=True)
        code = 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        if is_first:
            print("interrupted; nothing was saved", file=sys.stderr, flush=True)
        code = 1
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if path := os.environ.get(CODES):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{code}\n")
    if code == 0:
        sys.exit(0)
    for child in multiprocessing.active_children():
        child.kill()  # data workers hold our sockets open: peers would not notice the end
    # Peers may sit in a collective: an orderly end would wait for them. It also takes torch half a second.
    os._exit(code)
