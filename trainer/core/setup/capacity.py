"""Capacity: the largest micro-batch that fits into memory, for data.micro_batch=auto.

A trial makes the first steps of the run on all ranks, each in a process of its own: one rank may
run out of memory while the others wait for it in a collective, and only the end of a process frees
its memory, its groups and its random state without a trace.
"""

from __future__ import annotations

import copy
import os
import shutil
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from trainer.base.errors import ConfigError, RunError, counted, one_line, visible
from trainer.core.blame import is_out_of_memory
from trainer.core.config.schema import Config
from trainer.core.data.order import check_batch
from trainer.core.distributed.ranks import Ranks
from trainer.core.distributed.rendezvous import GUEST, part
from trainer.core.distributed.watch.heartbeat import Phase
from trainer.core.distributed.world import World
from trainer.core.engine.evaluation import Evaluator
from trainer.core.strategy import find_strategy
from trainer.core.strategy.mesh_sizes import Mesh
from trainer.core.task import Task

Steps = Callable[[Any], None]  # makes the first steps of a task's run
MEMORY = "out of memory"  # a trial's answer
ENDED_WITH_CODE = "ended with exit code"  # a process without an answer
EVALUATION = Evaluator.__module__
TRIAL_POLL_S = 0.1
ANSWER_GRACE_S = 0.5  # for a trial's answer after another rank's, which may be its consequence


@contextmanager
def memory_named(config: Config, world: World) -> Iterator[None]:
    """Raise RunError, one line that names the setting, where memory is not enough."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        why = one_line(error).split(". GPU")[0][:200]
        if rows := _rows_of_evaluation(config, error):
            line = f"eval.micro_batch={rows}: out of memory ({why})"
            raise RunError(f"{line}; set a smaller one, or null") from error
        sizes = list_sizes(config, world)
        rows = min(config.data.most_rows or sizes[0], sizes[0])
        smaller = [size for size in sizes if size < rows]
        advice = "use strategy.recompute=blocks, or divide the model (docs/parallelism.md)"
        if find_strategy(config.strategy).batch_split(config).is_fixed:
            advice = "start a new run with a smaller data.micro_batch"
        elif smaller:
            half = next((size for size in smaller if size <= rows / 2), smaller[-1])
            advice = f"set data.micro_batch={half}, or auto in a new run"
        line = f"data.micro_batch={rows}: out of memory ({why})"
        raise RunError(f"{line}; {advice}") from error


def _rows_of_evaluation(config: Config, error: BaseException) -> int | None:
    """Return `eval.micro_batch` if the error was raised by an evaluation, else None."""
    frames = traceback.walk_tb(error.__traceback__)
    is_inside = any(frame.f_globals.get("__name__") == EVALUATION for frame, _ in frames)
    return config.eval.micro_batch if is_inside else None


def list_sizes(config: Config, world: World) -> list[int]:
    """Return the sizes of micro-batches that differ in their number per rank, largest first."""
    batch_split = find_strategy(config.strategy).batch_split(config)
    ranks = Mesh.of(config.strategy.mesh, world).data_size
    whole = config.data.global_batch
    units = -(-(whole // batch_split.unit) // ranks)
    sizes = []
    counts = range(1, units + 1)
    for rows in dict.fromkeys(-(-units // count) * batch_split.unit for count in counts):
        with suppress(ConfigError):  # a rank would have an empty one
            check_batch(whole, replace(batch_split, micro_batch=rows), ranks)
            sizes.append(rows)
    return sizes


def resolve_micro_batch(
    task: Task, ranks: Ranks, inherited: Mapping[str, Any], steps: Steps
) -> tuple[Config, list[str]]:
    """Return the config with data.micro_batch=auto as a number, and a line with the reason.

    A resume keeps the number of its run, in `inherited`. `steps` makes the first steps of a
    task's run. Raises ConfigError if the smallest micro-batch does not fit, or if the task cannot
    be started in another process. A collective.
    """
    config = task.config
    if config.data.micro_batch != "auto":
        return config, []
    ranks.heartbeat.enter(Phase.BUILD)
    sizes = list_sizes(config, task.world)
    if (most := inherited["data.micro_batch"]) is not None:
        rows = next((size for size in sizes if size <= most), sizes[-1])
        why = f"the run to resume has {most}"
    else:
        trials = Trials(task, ranks, steps)
        rows = find_largest(sizes, trials.fits)
        why = trials.explain()
    line = f"data.micro_batch=auto: {rows}, because {why}"
    return replace(config, data=replace(config.data, micro_batch=rows)), [line]


def find_largest(sizes: Sequence[int], fits: Callable[[int], bool]) -> int:
    """Return the largest size that fits, of sizes from the largest to the smallest.

    It halves the size until one fits, and then searches between that one and the last that did
    not. Raises ConfigError if none fits.
    """
    if fits(sizes[0]):
        return sizes[0]
    too_large, index = 0, 0
    while True:
        if index == len(sizes) - 1:
            least = f"data.micro_batch=auto: a micro-batch of {counted(sizes[-1], 'row')}"
            advice = "use strategy.recompute=blocks, or divide the model (docs/parallelism.md)"
            raise ConfigError(f"{least} does not fit into memory; {advice}")
        half = [i for i, size in enumerate(sizes) if i > index and size <= sizes[index] / 2]
        index = half[0] if half else len(sizes) - 1
        if fits(sizes[index]):
            break
        too_large = index
    while index - too_large > 1:
        middle = (index + too_large) // 2
        if fits(sizes[middle]):
            index = middle
        else:
            too_large = middle
    return sizes[index]


class Trials:
    """Trials of a task's first steps, by all ranks together."""

    def __init__(self, task: Task, ranks: Ranks, steps: Steps):
        self._task = task
        self._ranks = ranks
        self._steps = steps
        self._tried: list[str] = []
        self._failure = ""

    def explain(self) -> str:
        """Return the reason why the size that was found is the one."""
        if self._failure:
            return f"a trial failed for another reason ({self._failure})"
        if len(self._tried) == 1:
            return "all rows of a rank fit at once"
        return f"no larger one fits; tried {', '.join(self._tried)}"

    def fits(self, rows: int) -> bool:
        """Return True if all ranks can train with micro-batches of so many rows. A collective.

        So it is if a trial fails for another reason than memory, which the run will show.
        """
        group = self._ranks.group
        answer = ""
        with ExitStack() as opened:
            with group.agreed("starting a trial of data.micro_batch=auto"):
                answers, process = self._start(rows, opened)
            answer = self._wait(answers, process)
        is_full, is_stopped = group.max(answer == MEMORY, bool(self._ranks.stop))
        if is_stopped:
            name = self._ranks.stop.name or "another rank"
            raise RunError(f"data.micro_batch=auto: asked to stop ({name}); nothing was started")
        if not is_full:
            self._failure = next(filter(None, group.gather(answer)), "")
        if self._failure.startswith(ENDED_WITH_CODE):
            advice = "call fit below if __name__ == '__main__', or give a number"
            why = f"a trial {self._failure} before its first step"
            raise ConfigError(f"data.micro_batch=auto: {why}; {advice}")
        self._tried.append(f"{rows} ({'does not fit' if is_full else 'fits'})")
        return not is_full

    def _start(self, rows: int, opened: ExitStack) -> tuple[Connection, Any]:
        scratch = opened.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-trial-"))
        name = f"trial-{len(self._tried)}"
        task = copy.copy(self._task)
        config = _for_trial(task.config, rows, scratch, name)
        vars(task).update(config=config, world=task.world.with_groups({}))
        opened.callback(part, config.dist, task.world)
        context = get_context("spawn")
        answers, sender = context.Pipe(duplex=False)
        process = context.Process(target=_try, args=(task, self._steps, name, sender))
        try:
            process.start()
        except Exception as error:  # what pickle raises has no common type
            why = f"the task cannot be started in another process ({one_line(error)})"
            advice = "define it at the top of a module, or give a number"
            raise ConfigError(f"data.micro_batch=auto: {why}; {advice}") from None
        sender.close()
        opened.callback(process.join)
        opened.callback(process.kill)
        return answers, process

    def _wait(self, answers: Connection, process: Any) -> str:
        """Return the answer of this rank's trial; "" if another rank's failed before."""
        store = self._ranks.group.store
        over = f"trial-{len(self._tried)}-over"
        while not wait([answers], TRIAL_POLL_S):
            if self._ranks.stop:
                store.set(over, "1")
                return ""
            if store.check([over]) and not wait([answers], ANSWER_GRACE_S):
                return ""
        try:
            answer = answers.recv()
        except EOFError:  # it was killed: by the kernel, if memory ran out
            process.join()
            is_killed = process.exitcode == -signal.SIGKILL
            answer = MEMORY if is_killed else f"{ENDED_WITH_CODE} {process.exitcode}"
        if answer:
            store.set(over, "1")
        return answer


def _for_trial(config: Config, rows: int, scratch: str, name: str) -> Config:
    """Return the settings of a trial: those of the run, without what leaves a trace."""
    backend = "auto" if config.dist.backend == "mpi" else config.dist.backend
    path = config.dist.path and f"{config.dist.path}.{name}"
    return replace(
        config,
        run=replace(config.run, dir=scratch, name="trial", resume=None, init_from=None),
        data=replace(config.data, micro_batch=rows, workers=0),
        dist=replace(config.dist, backend=backend, path=path, hang_timeout_s=None),
        checkpoint=replace(config.checkpoint, sharded=False, mirror=None),
        log=replace(config.log, trackers=[]),
    )


def _try(task: Task, steps: Steps, name: str, answers: Connection) -> None:
    """Make the first steps, in a process of their own, and send "" or why that failed."""
    with suppress(OSError):  # the kernel then ends this process, and not the run's
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run ends this process
    threading.Thread(target=_end_with_parent, args=(task.config.runs,), daemon=True).start()
    os.environ[GUEST] = name
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        steps(task)
        answers.send("")
    except BaseException as error:
        kind = type(error).__name__
        is_full = is_out_of_memory(error) and not _rows_of_evaluation(task.config, error)
        answers.send(MEMORY if is_full else visible(f"{kind}: {one_line(error)}"))
    os._exit(0)


def _end_with_parent(scratch: Path) -> None:
    """Remove what a trial wrote, and end it, if the run ends before it."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(scratch, ignore_errors=True)
        os._exit(1)
