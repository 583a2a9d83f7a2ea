"""Shared code of the verbs (subcommands): help, arguments, the task class and exit codes."""

from __future__ import annotations

import atexit
import errno
import inspect
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import trainer
from trainer.base.errors import ConfigError, RunError, message_of, place_of, shortened, visible
from trainer.base.process import invocation, uncollected
from trainer.base.process.streams import SoleDocument, outlive_terminal
from trainer.base.process.tracebacks import describe_cause, find_failure, format_traceback, show
from trainer.core.config.copies import copy_of, remove_copies, with_addresses
from trainer.core.config.rules import check_path
from trainer.core.config.schema import Config
from trainer.core.config.stores import address_problem, is_address
from trainer.core.config.targets import masked, resolve
from trainer.core.config.typed import suggest
from trainer.core.config.working_folder import find_options, read_settings
from trainer.core.distributed.launchers import CODES, ERROR_FILE, find_launcher, record_failure
from trainer.core.distributed.signals import (
    CODE_OF_INTERRUPT,
    INTERRUPTED,
    leave_pid_1,
    let_go,
)
from trainer.core.distributed.watch.watcher import LOST

Verb = Callable[[Sequence[str]], int]  # arguments -> exit code
HELP_FLAGS = ("-h", "--help")
JSON = "--json"
JSON_HELP = f"""

{JSON} prints one JSON object: exit code, result in one word and details, or exit code and error.
Everything else then goes to standard error."""
SWEEP_FLAGS = ("-m", "--multirun")
QUESTION_FLAGS = ("-c", "--cfg", "-i", "--info")
HYDRA_FLAGS = (*SWEEP_FLAGS, *QUESTION_FLAGS, "--resolve", "-p", "--package")

# Seconds that a rank other than 0 waits before it prints an error and exits: torchrun kills all
# ranks at the first exit, so rank 0 might not print its line.
WAIT_S = 3.0
MOST_OF_A_NAME = 200  # characters of a path in an error
SOON_S = 0.9  # after the rendezvous began: ranks then fail together
_documents: list[SoleDocument] = []  # of this process, with --json


def run(
    verb: Verb, usage: str | Callable[[Sequence[str]], str] = "", has_json: bool = True
) -> None:
    """Run a verb with the arguments in sys.argv and exit. `-h` and `--help` print `usage`.

    Only rank 0 prints a one-line error. The exit code is 2 for an invalid setting, 1 for other
    errors. A verb that `has_json` gives its result to `answer`; it does not see the flag.
    """
    leave_pid_1()
    outlive_terminal()
    _print_safely()
    arguments = sys.argv[1:]
    words = [word for word in arguments if word not in HELP_FLAGS]
    try:
        if "--version" in arguments:
            print(f"Lockstep {trainer.__version__}")
            code = 0
        elif usage and len(words) < len(arguments):
            text = usage if isinstance(usage, str) else usage(words)
            print(invocation.as_started(text + JSON_HELP * has_json))
            code = 0
        elif has_json and JSON in arguments:
            _documents.append(SoleDocument())
            code = verb([word for word in arguments if word != JSON])
        else:
            code = verb(arguments)
    except BaseException as failure:
        error = _of_a_path(failure) or failure
        outlive_terminal()  # again: the task may have replaced the streams
        line = _summarize(error)
        record_failure(visible(line), line.startswith(LOST))
        code = _report(error)
        _write_document({"code": code, "error": line})
    _exit(code)


def answer(code: int, result: str, facts: Mapping[str, Any], show: Callable[[], object]) -> int:
    """Print what a verb found and return its exit code. `show` prints it for a reader.

    With --json it is one object on standard output instead: `code`, `result`, which says in a word
    why, and `facts`.
    """
    if _documents:
        _write_document({"code": code, "result": result, **facts})
    else:
        show()
    return code


def tell(show: Callable[[], object]) -> None:
    """Print part of an answer for a reader, as `answer` does."""
    if not _documents:
        show()


def _write_document(content: Mapping[str, Any]) -> None:
    """Print an object on rank 0 with --json, with null for numbers that JSON does not have."""
    if _documents and _find_rank() == 0:
        text = json.dumps(content, default=str)
        plain = json.loads(text, parse_constant=lambda _: None)
        _documents[-1].write(json.dumps(plain) + "\n")


def _of_a_path(error: BaseException) -> ConfigError | None:
    """Return the error of one line for a path that no file system can have, None for others.

    Options of tasks and arguments of verbs are opened in many places, and any of them may be one.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        name = shortened(os.fsdecode(error.filename or ""), MOST_OF_A_NAME)
        return ConfigError(f"{name}: {error.strerror}; give another path")
    if type(error) is ValueError and "embedded null" in message_of(error):
        return ConfigError(f"""a path has a NUL character: {message_of(error)}
            ({place_of(error)}); give another path""")
    return None


def _summarize(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    is_line = isinstance(error, (ConfigError, RunError))
    return _own_words(message_of(error) if is_line else describe_cause(error))


def _report(error: BaseException) -> int:
    """Print an error and return the exit code."""
    if isinstance(error, (ConfigError, RunError)):
        _print_error(error)
        return 2 if isinstance(error, ConfigError) else 1
    if isinstance(error, SystemExit):  # of a task's module: code 0 would look like success
        what = f"sys.exit({error.code!r}) was called at {place_of(error)}"
        _print_error(RunError(f"{what}; raise an error instead"))
    elif not isinstance(error, KeyboardInterrupt):
        _print_frames(error)
    else:
        if _find_rank() == 0:
            print(INTERRUPTED, file=sys.stderr, flush=True)
        return CODE_OF_INTERRUPT
    return 1


def _print_frames(error: BaseException) -> None:
    """Print an exception of a task, on one of the ranks that have the same."""
    failure = find_failure(error)
    if failure and not failure.is_shown:
        time.sleep(_patience())  # the launcher ends all ranks when this one exits
        return
    size = _count_ranks()
    where = f"error on rank {_find_rank()}:\n" if size > 1 else ""
    print(where + masked(show(error), sys.argv[1:]), file=sys.stderr, flush=True)
    if failure and (alike := failure.count()) > 1:
        print(f"the same on {alike} of {size} ranks", file=sys.stderr, flush=True)


def _print_safely() -> None:
    """Escape control characters in warnings and in the errors of threads."""
    plain = warnings.formatwarning

    def format_warning(*arguments: Any, **options: Any) -> str:
        lines = plain(*arguments, **options).splitlines()
        return "".join(f"{visible(line.expandtabs(4))}\n" for line in lines)

    def print_error(failure: threading.ExceptHookArgs) -> None:
        if failure.exc_value is not None and failure.exc_type is not SystemExit:
            print(format_traceback(failure.exc_value), file=sys.stderr, flush=True)

    warnings.formatwarning = format_warning
    threading.excepthook = print_error


def _count_ranks() -> int:
    """Return the number of ranks that a launcher started; 1 if it does not say."""
    try:
        return int(find_launcher().variables.get("WORLD_SIZE", 1))
    except (ConfigError, ValueError):
        return 1


def _find_rank() -> int:
    """Return the rank of this process; 0 if the environment has no valid rank."""
    try:
        given = find_launcher().variables
    except ConfigError:
        return 0
    rank = given.get("RANK", "")
    size = given.get("WORLD_SIZE", "")
    is_rank = rank.isdecimal() and size.isdecimal() and int(rank) < int(size)
    return int(rank) if is_rank else 0


def _print_error(error: Exception) -> None:
    """Print the error on rank 0. Another rank waits, and prints it only if it is still alive."""
    rank = _find_rank()
    # torchrun ends the ranks that wait, and lists each that ends with another code than 0: rank 0
    # has the same error, and its line should not be lost among seven lines for each other rank.
    is_listed = rank > 0 and isinstance(error, ConfigError) and ERROR_FILE in os.environ
    is_ending = let_go(is_failure=not is_listed)
    if rank and is_ending:
        if is_listed:
            os._exit(0)
        return
    if rank:
        time.sleep(_patience())
    who = f"rank {rank}: " if rank else ""
    line = _own_words(f"error: {who}{message_of(error)}")
    print(visible(shortened(line)), file=sys.stderr, flush=True)


def _own_words(line: str) -> str:
    """Return a line with the command and the places that the user gave, without secrets."""
    return masked(with_addresses(invocation.as_started(line)), sys.argv[1:])


def _patience() -> float:
    """Return the seconds to wait for the line of rank 0.

    Ranks that were started by hand do not wait: each may have its own terminal. After the start
    of the rendezvous the wait is short, because the ranks fail together.
    """
    if find_launcher().name == "hand":
        return 0.0
    rendezvous = sys.modules.get("trainer.core.distributed.rendezvous")
    return SOON_S if getattr(rendezvous, "num_meetings", 0) else WAIT_S


def _exit(code: int) -> None:
    """Exit, and report the code to the parent of `launch=elastic` or `launch=spawn`."""
    outlive_terminal()
    sys.stdout.flush()
    sys.stderr.flush()
    if path := os.environ.get(CODES):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{code}\n")
    if code == 0 and _count_ranks() == 1:
        sys.exit(0)
    if code == 0:
        _finish()
    remove_copies()  # os._exit calls no atexit
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises for a killed worker
    for child in multiprocessing.active_children():
        child.kill()  # data workers inherit open sockets: peers would not notice the exit
    # A normal exit would wait for peers in a collective, and takes torch half a second.
    os._exit(code)


def _finish() -> None:
    """Do what Python does at exit, without the end of the interpreter.

    While that ends, a thread of gloo or autograd that asks for it is unwound through C++, which
    ends the process with SIGABRT: torchrun would restart a run that is done.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing ends its children
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def split_arguments(
    arguments: Sequence[str], others: Sequence[str] = (), own: Sequence[str] = (JSON,)
) -> tuple[list[str], list[str]]:
    """Return (overrides, config dirs), from `--config-dir` or the settings of the folder.

    `others` are more flags that are allowed, `own` those that the error for an unknown flag names:
    the caller has taken them. Raises ConfigError for an unknown flag.
    """
    overrides = []
    folders = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        flag, _, value = word.partition("=")
        if word in ("--config-dir", "-cd"):
            if not rest:
                raise ConfigError("--config-dir: give a directory")
            folders.append(rest.pop(0))
        elif word.startswith("--config-dir="):
            folders.append(value)
        elif word.startswith(("--local-rank=", "--local_rank=")):
            continue  # torch.distributed.launch passes it, and sets LOCAL_RANK too
        elif word.startswith("-") and flag not in others:
            known = ["--config-dir", "--help", *own]
            names = [name.lstrip("-") for name in known if name.startswith("--")]
            near = suggest(flag.lstrip("-"), names, "--")
            allowed = f"{', '.join(known)} and key=value"
            raise ConfigError(f"{flag} is not a flag: allowed are {allowed}{near}")
        else:
            overrides.append(word)
    for folder in folders:
        check_path("--config-dir", folder)
    return overrides, folders or read_settings(Path()).config_dirs


def single(words: Sequence[str], advice: str) -> str:
    """Return the only word. Raises ConfigError(advice) for no word, several words or a flag."""
    flags = [word for word in words if word.startswith("-")]
    if flags:
        raise ConfigError(f"{flags[0]} is not a flag here; {advice}")
    if len(words) != 1 or not words[0]:
        raise ConfigError(advice)
    check_path("the argument", words[0])
    return words[0]


def local(place: str) -> str:
    """Return a run directory, or a copy of a run in a store, which this process removes."""
    if not is_address(place):
        return place
    if problem := address_problem(place):
        raise ConfigError(f"{place}: {problem}; give another place")
    return str(copy_of(place))


def run_directory(arguments: Sequence[str], advice: str) -> tuple[str, list[str], list[str]]:
    """Return (run directory, overrides, config dirs). Raises ConfigError(advice) without one."""
    words, config_dirs = split_arguments(arguments)
    place = single([local(word) for word in words if "=" not in word], advice)
    return place, [word for word in words if "=" in word], config_dirs


def take_words(
    arguments: Sequence[str], names: Collection[str], config_dirs: Sequence[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """Return (the words of a verb's own by name, the other arguments).

    Raises ConfigError for a name that is nearly one of `names`, and no group of settings.
    """
    own = {}
    rest = []
    for word in arguments:
        name, equals, value = word.partition("=")
        if equals and name in names:
            own[name] = value
            continue
        near = equals and name.isidentifier() and suggest(name, names)
        if near and name not in find_options(config_dirs):
            raise ConfigError(f"{name} is not a setting{near}")
        rest.append(word)
    return own, rest


def starter() -> str:
    """Return the launcher that started this process, "" for none; srun and mpirun may of one."""
    launcher = find_launcher()
    is_one = launcher.name in ("srun", "mpirun") and launcher.variables.get("WORLD_SIZE") == "1"
    return "" if launcher.name == "python" or is_one else launcher.name


def check_alone(what: str, advice: str) -> None:
    """Raise ConfigError if a launcher started this process."""
    if name := starter():
        raise ConfigError(f"{what}: the ranks were already started by {name}; {advice}")


@uncollected()
def load_task(config: Config) -> Any:
    """Import the Trainer subclass that `task.trainer` names. Raises ConfigError otherwise."""
    name = config.task.trainer
    if "." not in name:
        raise ConfigError(f"task.trainer={name}: must be <module>.<class>")
    from trainer.core.trainer import Trainer  # first: it calls resolve_vector_functions

    task = resolve(name, "task.trainer", config.packages)
    if not (isinstance(task, type) and issubclass(task, Trainer)) or task is Trainer:
        raise ConfigError(f"task.trainer={name}: must be a subclass of trainer.Trainer")
    try:
        inspect.signature(task).bind(config)
    except TypeError as error:
        must = "__init__ must take the config, and pass it to super().__init__(config)"
        raise ConfigError(f"task.trainer={name}: {must}: {error}") from None
    return task
