"""Start of the ranks of one machine, by torchrun's agent (elastic) or multiprocessing (spawn)."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.elastic.multiprocessing.api import (
    DefaultLogsSpecs,
    PContext,
    SignalException,
)
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import trainer
from trainer.base.errors import STOPPED, RunError
from trainer.base.process import invocation
from trainer.base.process.child import signals_passed_on
from trainer.core.config.schema import LaunchSettings
from trainer.core.distributed.launchers import CODES, MARK, MASTER, RANKS
from trainer.core.distributed.signals import SIGNALS, check_start
from trainer.core.distributed.world import count_ranks

END_S = 30.0  # for ranks that are to end, as in torch's own launchers
_ERRORS = (ChildFailedError, SignalException, mp.ProcessExitedException, mp.ProcessRaisedException)


def launch(
    config: LaunchSettings,
    words: Sequence[str],
    copy_s: float | None = None,
    verb: str = "train",
) -> int:
    """Run a verb, `python -m trainer <words>`, as several ranks, and wait for them to exit.

    Ranks that are asked to end, or have lost another one, are killed after 30 s, or `copy_s` later
    if rank 0 may have to copy a checkpoint to a mirror.
    Returns 0 if all ranks succeed, else the first of 2, 1 and 75 that is an exit code of a rank in
    the last attempt, else 1. Raises ConfigError for an invalid number of ranks.
    """
    size = count_ranks(config.nproc_per_node or "auto")
    patience_s = END_S if copy_s is None else END_S + copy_s
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # else up to 40 lines after rank 0's
    with tempfile.TemporaryDirectory(prefix="lockstep-") as scratch:
        path = Path(scratch) / "codes"
        has_failed = True
        with _environment({MARK: config.name, CODES: str(path)}), suppress(*_ERRORS):
            if config.name == "elastic":
                with _patient_agent(patience_s):
                    _elastic(config.max_restarts, size, [*invocation.words(verb), *words])
            else:
                _spawn(size, words, patience_s)
            has_failed = False
        codes = [int(line) for line in path.read_text().split()] if path.exists() else []
    last = codes[-size:]
    if len(last) == size and not any(last):  # then a signal came after all ranks exited
        return 0
    if not has_failed:
        lost = f"{size - len(last)} of {size} ranks"
        raise RunError(f"{lost} ended before the end of the run with code 0, as C's _exit does")
    return next((code for code in (2, 1, STOPPED) if code in last), 1)


def _end(signal_number: int, frame: object) -> None:
    """Handle a signal before the agent is running."""
    raise SignalException("before the ranks were started", signal.Signals(signal_number))


@contextmanager
def _patient_agent(patience_s: float) -> Iterator[None]:
    """Let torchrun's agent wait so long for ranks that it ends.

    Its own `shutdown_timeout` counts after a signal, and not after the failure of a rank: there
    PContext.wait of torch 2.13 calls `close` with 30 s.
    """
    close = PContext.close

    def close_patiently(
        context: PContext, death_sig: signal.Signals | None = None, timeout: float = END_S
    ) -> None:
        close(context, death_sig, max(timeout, patience_s))  # type: ignore[arg-type]

    PContext.close = close_patiently  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        PContext.close = close  # type: ignore[method-assign]


def _elastic(max_restarts: int, size: int, words: Sequence[str]) -> None:
    """Run `python <words>` under torchrun's agent, which restarts all ranks after a failure."""
    engine = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(),
        signals_to_handle=",".join(s.name for s in SIGNALS),
    )
    for signal_number in SIGNALS:
        signal.signal(signal_number, _end)  # until torchrun's agent installs its own handlers
    check_start(0.0)
    elastic_launch(engine, sys.executable)(*words)


def _spawn(size: int, words: Sequence[str], patience_s: float) -> None:
    """Run the ranks with torch.multiprocessing, and forward signals to them."""
    with _store_of(size, {"TORCHELASTIC_RUN_ID": uuid.uuid4().hex}):
        # Each rank unblocks the signals when it can handle them. Python's resource tracker must run
        # before: its start, with the first rank, would unblock SIGTERM for all later ranks.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        check_start(0.0)
        ranks = mp.start_processes(_enter, (list(words),), size, join=False, start_method="spawn")

        def send(signal_number: int) -> None:
            for pid in ranks.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal_number)

        with signals_passed_on(SIGNALS, send):
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            # without a grace period, ranks that lost one get SIGTERM, and SIGKILL after 30 s
            while not ranks.join(grace_period=patience_s if patience_s > END_S else None):
                pass


def fork_ranks(
    size: int, enter: Callable[..., None], arguments: Sequence[Any], more: Mapping[str, str]
) -> int:
    """Run `enter(rank, environment, *arguments)` as several ranks; return the exit code.

    The environment is this process's, with `more`. The ranks are forked from a process that has
    imported the module of `enter` and does nothing else, one for all calls: an import of torch
    takes longer than a short run. The exit code is that of the first rank that failed, negative for
    a signal; the other ranks are then ended.
    """
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.CRITICAL)
    start_server(enter.__module__, more)
    with _store_of(size, more):
        own = {**os.environ}
        temporary = tempfile.tempdir
        tempfile.tempdir = util.get_temp_dir()  # for torch's files with errors, which it leaves
        try:
            ranks = mp.start_processes(
                enter, (own, *arguments), size, join=False, start_method="forkserver"
            )
            while not ranks.join():
                pass
        except mp.ProcessExitedException as error:
            # ranks that lose a killed one end soon after it: all may have when torch looks
            killed = [code for r in ranks.processes if (code := r.exitcode or 0) < 0]
            return next((code for code in killed if code != -signal.SIGTERM), error.exit_code)
        except mp.ProcessRaisedException:
            return 1
        finally:
            tempfile.tempdir = temporary
    return 0


def start_server(module: str, more: Mapping[str, str]) -> None:
    """Start the process that imports `module` and forks the ranks, unless it is running.

    Returns before it has imported. No library may start threads in it. It would look for packages
    in the working directory first, which may hold a `trainer.py`.
    """
    forkserver.set_forkserver_preload([module])
    here = Path.cwd()
    os.chdir(Path(trainer.__file__).parents[1])
    try:
        with _environment({**more, "OMP_NUM_THREADS": "1"}):
            forkserver.ensure_running()
    finally:
        os.chdir(here)


@contextmanager
def _store_of(size: int, more: Mapping[str, str]) -> Iterator[None]:
    """Serve a store during the block, in which the environment is that of ranks that meet there."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **more,
    }
    with _environment(variables):
        yield


def _enter(rank: int, words: list[str]) -> None:
    """Run one rank of `launch=spawn`, in its process."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    mp.set_start_method(None, force=True)  # data workers start as under any other launcher
    sys.argv = ["trainer", *words]
    invocation.run_module()


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set the environment of the ranks: add `variables`, remove those of an outer launcher."""
    before = dict(os.environ)
    for name in before:
        if name in (*RANKS, *MASTER) or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    os.environ |= variables
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
