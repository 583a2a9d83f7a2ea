"""Run the same body on several real ranks (forked, over gloo) in one test, and return the results
by rank."""

import faulthandler
import gc
import io
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import hydra  # noqa: F401  # before the forks, so that no child imports it again
import rich.progress  # noqa: F401
import torch
import torch.distributed as dist
import torch.utils.tensorboard

LIMIT_S = 240


def environment_of_torchrun(rank: int, size: int) -> dict[str, str]:
    """Return torchrun's variables without MASTER_PORT, which is known once the ranks are forked."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def on_ranks(size: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `body(*arguments)` on `size` ranks in the environment that torchrun would set; return
    their results by rank.

    Raises AssertionError with the tracebacks of the ranks that failed.
    """
    children = [_fork(rank, size, body, arguments) for rank in range(size)]
    server = open_store([gate for _, _, gate in children])
    outcomes = []
    for pid, pipe, _ in children:
        with os.fdopen(pipe, "rb") as stream:
            data = stream.read()
        os.waitpid(pid, 0)
        outcomes.append(
            torch.load(io.BytesIO(data), weights_only=False)
            if data
            else (False, f"process {pid} died")
        )
    # A traceback would keep the store alive; a later child that collects it would wait for a thread
    # that it does not have.
    del server
    failed = [
        f"rank {n} of {size}:\n{value}" for n, (good, value) in enumerate(outcomes) if not good
    ]
    assert not failed, "\n".join(failed)
    return [value for _, value in outcomes]


def open_store(gates: list[int]) -> dist.TCPStore:
    """Open torchrun's store. Call it after the forks, which wait at their gates for its port.

    A lock of libc that the store's thread holds at a fork stays locked in the child without limit.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for gate in gates:
        os.write(gate, str(server.port).encode())
        os.close(gate)
    return server


def begin_child(limit_s: float = LIMIT_S) -> None:
    """Prepare a forked child; call it first."""
    torch.set_num_threads(1)  # a new pool: torch's threads would race to replace the parent's
    gc.freeze()  # skip inherited objects at collections: saves 0.25 s per run
    gc.set_threshold(50_000, 20, 20)  # collections took 8 % of the time of the tests
    faulthandler.dump_traceback_later(limit_s, exit=True)  # print the stacks of a hang


def _fork(rank: int, size: int, body: Callable[..., Any], arguments: tuple) -> tuple[int, int, int]:
    """Fork a rank; return (process id, pipe with its outcome, gate for the port of its store)."""
    reader, writer = os.pipe()
    entrance, gate = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(writer)
        os.close(entrance)
        return pid, reader, gate
    try:
        os.close(reader)
        os.close(gate)
        _be_rank(rank, size, entrance, writer, body, arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # whatever failed: a fork must not go on as pytest


def _be_rank(
    rank: int, size: int, entrance: int, writer: int, body: Callable[..., Any], arguments: tuple
) -> None:
    """Run the body and send its outcome; end the process."""
    begin_child()
    os.environ |= environment_of_torchrun(rank, size)
    os.environ["MASTER_PORT"] = os.read(entrance, 16).decode()
    os.close(entrance)
    try:
        outcome = (True, body(*arguments))
    except BaseException:
        outcome = (False, traceback.format_exc())
    buffer = io.BytesIO()
    torch.save(outcome, buffer)
    with os.fdopen(writer, "wb") as stream:
        stream.write(buffer.getvalue())
    os._exit(0)
