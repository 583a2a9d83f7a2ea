"""A session of ranks: they agree on their facts, and the run directory is opened.

The ranks agree before data and model are built: on the run to continue, and on settings that are
`auto`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.base.durable_files import replace_file
from trainer.base.errors import CheckpointError, ConfigError, describe, exit_code_of
from trainer.base.process import uncollected
from trainer.base.process.torch_flags import torch_flags_kept
from trainer.core.checkpoints import resume
from trainer.core.checkpoints.disk import Disk
from trainer.core.checkpoints.resume import Origin, take
from trainer.core.checkpoints.run_directory import read_evaluation, read_exit, write_exit
from trainer.core.checkpoints.saver import Mail, Publisher, Saver
from trainer.core.config.saved_config import CONFIG, format_config
from trainer.core.config.schema import Config
from trainer.core.config.stores import Events, StoreError, open_writer
from trainer.core.data.sampling import Sampling, mixture
from trainer.core.distributed import accelerator
from trainer.core.distributed.group import Group
from trainer.core.distributed.launchers import Launcher
from trainer.core.distributed.ranks import Ranks, open_ranks
from trainer.core.distributed.rendezvous import collective_limit
from trainer.core.distributed.world import World
from trainer.core.engine.context import OPEN, Parts, choose_precision, is_bf16_native, takes_bf16
from trainer.core.record import fingerprint, init_from, startup
from trainer.core.record.startup import fact
from trainer.core.record.trackers import Record, Sink
from trainer.core.record.trackers.console import Console
from trainer.core.record.trackers.jsonl import RecordFiles
from trainer.core.record.trackers.opening import open_trackers
from trainer.core.record.trackers.tensorboard import TensorBoard
from trainer.core.setup.capacity import Steps, resolve_micro_batch
from trainer.core.setup.early_checks import check_layout
from trainer.core.strategy.mesh_sizes import Mesh, open_groups
from trainer.core.task import Task


@dataclass(frozen=True)
class Session:
    """The ranks of one start, and `notes`: lines for it to show. Only rank 0 knows the `origin`."""

    ranks: Ranks
    origin: resume.Origin
    notes: list[str]


@contextmanager
def open_session(
    task: Task, origin: resume.Origin, steps: Steps | None = None
) -> Iterator[Session]:
    """Open the ranks of a task, and agree on the run to continue and on settings that are `auto`.

    During the block `task.config` and `task.world` have what was agreed on, and afterwards what
    they had before, as torch's flags of the process. `steps` makes the first steps of a training
    run; without it, nothing is trained. A collective.
    """
    config_and_world = (task.config, task.world)
    facts = fingerprint.of_start(task.config, type(task))
    with torch_flags_kept(), open_ranks(task.config.dist, task.world, facts) as ranks:
        try:
            task.world = complete_world(task.world, task.config, ranks)
            if steps is not None:
                origin = _look_again(task.config, task.world, ranks.group, origin)
            else:
                with ranks.group.agreed("finding the checkpoint"):
                    if origin.refused:
                        raise ConfigError(origin.refused)
            inherited = _read_kept(task.config, task.world, ranks.group, origin)
            task.config, notes = _resolve_precision(task.config, task.world, ranks.group, inherited)
            if steps is not None:
                task.config, more = resolve_micro_batch(task, ranks, inherited, steps)
                notes += more
            yield Session(ranks, origin, notes)
        finally:
            task.config, task.world = config_and_world


def _look_again(config: Config, world: World, group: Group, origin: resume.Origin) -> resume.Origin:
    """Look for the previous attempt again, now with the starters of all ranks. A collective."""
    with group.agreed("finding the run directory"):
        if world.rank == 0:
            origin = resume.find_previous_attempt(config, world.launcher) or origin
            is_new = origin.source is None and not origin.is_resumed
            if config.run.init_from is not None and is_new:
                init_from.check(config)
        if origin.refused:
            raise ConfigError(origin.refused)
    return origin


def _read_kept(config: Config, world: World, group: Group, origin: resume.Origin) -> dict[str, Any]:
    """Return what the run to continue has for settings that are `auto`. A collective."""
    kinds = {"strategy.precision": str, "data.micro_batch": int}
    values = config.flat()
    open_values = {"strategy.precision": OPEN, "data.micro_batch": ("auto",)}
    asked = {key: kind for key, kind in kinds.items() if values[key] in open_values[key]}
    if not asked:
        return {}
    saved: dict[str, Any] = {}
    with group.agreed("reading the run to resume"):
        if world.rank == 0:
            saved = resume.read_saved(config, origin)
        for key, kind in asked.items():
            if not isinstance(saved.get(key), kind | None):
                raise CheckpointError(f"""the {key} of the run to resume is not of type
                    {kind.__name__}""")
    return group.tell_all({key: saved.get(key) for key in asked})


def _resolve_precision(
    config: Config, world: World, group: Group, inherited: Mapping[str, Any]
) -> tuple[Config, list[str]]:
    """Return the config with its precision, if it is auto or default, and a line with the reason.

    A resume keeps the precision of its run. A new run gets amp_bf16 if the devices of all ranks
    have bf16 arithmetic, otherwise fp32; with default it gets fp32 on CPUs. A collective.
    """
    precision = config.strategy.precision
    if precision not in OPEN:
        return config, []
    is_plain = not takes_bf16(precision, accelerator.is_used(world.device))
    is_native = not is_plain and all(map(is_bf16_native, world.devices))
    without, some = group.max(0 if is_native else world.rank + 1, is_native)
    chosen: Any = inherited["strategy.precision"] or choose_precision(not without)
    why = "every rank has bf16 arithmetic in hardware"
    if inherited["strategy.precision"]:
        why = "the run to resume has it"
    elif without:
        who = f"rank {without - 1:.0f} has no" if some else "no rank has"
        why = f"{who} bf16 arithmetic in hardware"
    config = replace(config, strategy=replace(config.strategy, precision=chosen))
    with group.agreed("checking the precision"):
        check_layout(config, world)
    is_told = not is_plain or chosen != "fp32"
    line = fact("dtype", f"{chosen} (strategy.precision={precision}), because {why}")
    return config, ([line] if is_told else [])


def complete_world(world: World, config: Config, ranks: Ranks) -> World:
    """Return this rank's world with the groups of the mesh, on rank 0 with the starters of all
    ranks. A collective."""
    group = ranks.group
    mesh = Mesh.of(config.strategy.mesh, world)
    if mesh.is_divided:
        ranks.heartbeat.set_place(mesh.place(mesh.rank))
    backend = dist.get_backend() if dist.is_initialized() else "gloo"
    limit_s = collective_limit(config.dist, backend)
    world = world.with_groups(open_groups(mesh, limit_s, ranks.heartbeat.wait_in))
    every = group.collect(world.launcher.starters)
    starters = tuple(dict.fromkeys(name for names in every for name in names))
    return replace(world, launcher=replace(world.launcher, starters=starters))


SHARED_WITHIN_S = 5.0  # network file systems show a new directory after a while


@dataclass(frozen=True)
class RunDirectory:
    """An open run directory. `evaluation` has the metrics that it already holds of this step.

    `is_shared` is True if each rank that has a part of the model can write it there.
    """

    directory: Path
    record: Record
    saver: Saver
    evaluation: dict[str, float]
    warnings: list[str]
    is_shared: bool = True

    def give_up(
        self, error: BaseException, step: int, beat: Callable[[], None] = lambda: None
    ) -> None:
        """Record the error of a failed start, and close everything, as at the end of a run."""
        self.record.exit(exit_code_of(error), describe(error), {"step": step})
        self.saver.close(beat)
        self.record.close()


class RunLock:
    """The right of this process to write a run: in its directory and in the store of its mirror.

    `before` has a line about the end of the session before. Raises ConfigError if another process
    has this right.
    """

    def __init__(self, config: Config, origin: Origin, step: int, launcher: Launcher):
        self.before: list[str] = []
        if origin.is_resumed and origin.directory is not None:
            self.before = startup.previous_end(read_exit(origin.used_copy or origin.directory))
        facts = resume.facts_of_launch(origin.launch, launcher)
        self.writer = open_writer(config.checkpoint.mirror, step, origin.reached, facts)
        try:
            directory, self.lease = take(config, origin, step, launcher)
            self.directory = directory.absolute()
        except BaseException:
            self._release_writer()
            raise

    def give_up(self, error: BaseException, step: int) -> None:
        """Record the error of a failed start, and let another process write there."""
        with suppress(OSError):
            write_exit(self.directory, exit_code_of(error), describe(error), step=step)
        self.lease.release()
        self._release_writer()

    def _release_writer(self) -> None:
        with suppress(StoreError):  # the next writer waits until it expires
            if self.writer is not None:
                self.writer.release()


def open_directory(parts: Parts, sampling: Sampling, origin: Origin, step: int) -> RunDirectory:
    """Create the run directory, or take over the resumed one. A collective.

    Raises ConfigError on every rank if the directory is in use or cannot be created, or is not
    shared by the ranks as checkpoint.sharded=true requires.
    """
    config, ranks, tensors = parts.config, parts.ranks, parts.strategy.tensors
    group = ranks.group
    lock: RunLock | None = None
    with ExitStack() as undo:
        with group.agreed("creating the run directory"):
            if group.world.rank == 0:
                lock = RunLock(config, origin, step, group.world.launcher)
                undo.push(_giving_up(lock, step))
        directory = Path(group.tell_all(str(lock.directory) if lock else ""))
        ranks.heartbeat.set_directory(str(directory))
        is_shared = _check_shared(config, group, directory, len(tensors.writers()) > 1)
        writers = tensors.writers() if is_shared else [0]
        mail = Mail(group.store, group.world.rank, writers, config.dist.timeout_s)
        opened: RunDirectory | None = None
        with group.agreed("opening the record"):
            if lock is not None:
                opened = _open(parts, sampling, origin.is_resumed, step, lock, mail)
                undo.pop_all()
                undo.push(_giving_up(opened, step))
        evaluation = group.tell_all(opened.evaluation if opened else {})
        undo.pop_all()
    if lock and opened:
        warnings = [*lock.before, *opened.warnings]
        return replace(opened, is_shared=is_shared, warnings=warnings)
    has_part = group.world.rank in writers
    saver = Saver(directory, mail if has_part else None)
    return RunDirectory(directory, Record(), saver, evaluation, [], is_shared)


def _giving_up(
    owner: RunLock | RunDirectory, step: int
) -> Callable[[object, BaseException | None, object], None]:
    """Return a function for an ExitStack, which gives a run up after an error."""

    def leave(kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            owner.give_up(error, step)

    return leave


def _check_shared(config: Config, group: Group, directory: Path, is_needed: bool) -> bool:
    """Return True if all ranks see the directory, or none has to. A collective."""
    if not is_needed or config.checkpoint.sharded is False:
        return not is_needed
    begun = time.monotonic()
    while not (is_seen := (directory / CONFIG).is_file()):
        if time.monotonic() - begun > SHARED_WITHIN_S:
            break
        time.sleep(0.05)
    (unseen,) = group.max(0 if is_seen else group.world.rank + 1)
    if unseen and config.checkpoint.sharded is True:
        raise ConfigError(f"""checkpoint.sharded=true: rank {unseen - 1:.0f}
            does not see {config.shown(directory)}; put run.dir on a shared disk, or set auto""")
    return not unseen


@uncollected()  # rich and TensorBoard
def _open(
    parts: Parts, sampling: Sampling, is_resumed: bool, step: int, lock: RunLock, mail: Mail
) -> RunDirectory:
    """Open the record and the saver. Raises ConfigError for a disk error."""
    config = parts.config
    directory = lock.directory
    console = Console()
    keep = replace(config.checkpoint, best_metric=config.best_metric, best_mode=config.best_mode)
    disk = Disk(directory, keep, console.say)
    settings = format_config(config.plain()) if is_resumed else ""
    sinks: list[Sink] = [console]
    with ExitStack() as undo, _disk_errors_named(config, directory):
        undo.callback(lambda: Record(sinks).close())
        if mixture.digest_of(sampling):
            replace_file(directory / mixture.SAMPLING_FILE, mixture.to_bytes(sampling))
        sinks.append(RecordFiles(directory, step, disk, lock.lease, console.say, settings))
        sinks += open_trackers(config, directory, step, console.say)
        if "tensorboard" in config.log.trackers:
            of_run = (directory, step, is_resumed)
            sinks.append(TensorBoard(*of_run, config.log, config.eval.splits, disk))
        record = Record(sinks)
        evaluation = read_evaluation(directory, step)
        num_checkpoints = config.checkpoint.keep_last + config.checkpoint.keep_best
        warnings = startup.lack_of_room(directory, parts.strategy.tensors.module, num_checkpoints)
        mirror = None
        if lock.writer is not None:
            events = Events(console.say, record.note, disk.fail)
            mirror = lock.writer.follow(keep, directory, events)
        check = lock.lease.check
        saver = Publisher(directory, keep, disk, check, record.flush, record.saved, mail, mirror)
        undo.pop_all()
    return RunDirectory(directory, record, saver, evaluation, warnings)


@contextmanager
def _disk_errors_named(config: Config, directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"""run.dir={config.run.dir}: {error.filename or directory}:
            {error.strerror}; make room or choose another""") from None
