"""Runs on the simulated accelerator, in processes that no test has used before.

torch starts autograd's threads for devices with the first backward pass of a process, or of the
process that it was forked from. So ranks are forked from a server that has made none.
"""

import contextlib
import io
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import torch

from harness import simccl, simulated_streams
from harness import simulated_accelerator as accelerator
from harness.internals import load_task
from harness.ranks import on_ranks
from harness.training import fit
from trainer import load_config
from trainer.core.engine.evaluation import Evaluator
from trainer.core.loop.decisions import DeferredOutcomes

LIMIT_S = 240


@contextlib.contextmanager
def server() -> Iterator[None]:
    """Keep the server, from which ranks are forked, during the block."""
    forkserver.set_forkserver_preload(["harness.simulated", "harness.warmed"])
    here = Path.cwd()
    os.chdir(Path(__file__).parents[1])  # where the server looks for these
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(here)
    try:
        yield
    finally:
        forkserver._forkserver._stop()
        resource_tracker._resource_tracker._stop()


def on_simulated(ranks: int, body: Callable[..., Any], *arguments: Any, devices: int = 4) -> list:
    """Run `body(*arguments)`, a function of a module, on ranks that see simulated devices.

    With `devices=0` each rank sees one of its own. Returns their results by rank, and raises
    AssertionError for errors, races between streams and collectives in another order.
    """
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_enter, args=(there, ranks, body, arguments, devices))
    process.start()
    there.close()
    try:
        is_good, results = torch.load(io.BytesIO(here.recv_bytes()), weights_only=False)
    except EOFError:
        is_good, results = False, "the process died"
    process.join(LIMIT_S)
    assert is_good, results
    return results


def _enter(pipe: Any, ranks: int, body: Callable[..., Any], arguments: tuple, devices: int) -> None:
    try:
        outcome = (True, on_ranks(ranks, _be_simulated, body, arguments, devices))
    except BaseException as error:
        is_failed = isinstance(error, AssertionError)
        outcome = (False, str(error) if is_failed else traceback.format_exc())
    buffer = io.BytesIO()
    torch.save(outcome, buffer)
    pipe.send_bytes(buffer.getvalue())


def _be_simulated(body: Callable[..., Any], arguments: tuple, devices: int) -> Any:
    accelerator.register(devices or 1, 0 if devices else int(os.environ["RANK"]))
    simccl.register()
    result = body(*arguments)
    assert not accelerator.races, accelerator.races[:3]
    assert not simccl.violations, simccl.violations[:3]
    return result


def fit_simulated(ranks: int, *arguments: Any, devices: int = 4) -> list[dict[str, Any]]:
    """Run `fit` of harness.training on simulated devices; return its results by rank."""
    return on_simulated(ranks, fit, *arguments, devices=devices)


Step = tuple[int, dict[str, int], dict[str, int], list[tuple[str, str]]]


def count_steps(
    words: list[str], config_dirs: list[str], task: Any = None, evaluates: bool = False
) -> list[Step]:
    """Train, and return (launches, by operation, by place, waits) of each steady step.

    These are the steps but the first two, which build state, and the last one. Unless `evaluates`,
    there is no evaluation: it takes minutes in bf16 on a machine without its arithmetic.
    """
    records: list[simulated_streams.Record] = []
    push = DeferredOutcomes.push

    def push_and_begin(self: DeferredOutcomes, outcome: Any) -> Any:
        report = push(self, outcome)
        simulated_streams.record = simulated_streams.Record()
        records.append(simulated_streams.record)
        return report

    DeferredOutcomes.push = push_and_begin  # type: ignore[method-assign]
    if not evaluates:
        Evaluator.evaluate = lambda self: {}  # type: ignore[method-assign]
    config = load_config(words, config_dirs)
    (task or load_task(config))(config).fit()
    return [
        (record.count, dict(record.launches), dict(record.places), record.waits)
        for record in records[1:-1]
    ]
