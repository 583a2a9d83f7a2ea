"""Open a run directory: its record and saver on rank 0, silent ones on the other ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.checkpoints.disk import Disk
from trainer.checkpoints.files import replace_file
from trainer.checkpoints.saver import DiskSaver, Mail, PartSaver, Saver
from trainer.config.compose import to_yaml
from trainer.config.schema import Config
from trainer.data.sampling import saved
from trainer.data.sampling.base import Sampling
from trainer.distributed.group import Group
from trainer.engine.parts import Parts
from trainer.errors import ConfigError
from trainer.process.loading import uncollected
from trainer.record import startup
from trainer.record.files import CONFIG, read_evaluation, read_exit
from trainer.record.lease import Lease
from trainer.record.resume import Origin, take
from trainer.record.trackers.base import Record, Sink
from trainer.record.trackers.console import Console
from trainer.record.trackers.jsonl import RecordFiles
from trainer.record.trackers.services import open_services
from trainer.record.trackers.tensorboard import TensorBoard
from trainer.strategy.tensors import Tensors

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


def open_directory(parts: Parts, sampling: Sampling, origin: Origin, step: int) -> RunDirectory:
    """Create the run directory, or take over the resumed one. A collective.

    Raises ConfigError on every rank if the directory is in use or cannot be created, or is not
    shared by the ranks as checkpoint.sharded=true requires.
    """
    config, ranks, tensors = parts.config, parts.ranks, parts.strategy.tensors
    group = ranks.group
    directory = Path()
    lease: Lease | None = None
    before: list[str] = []
    with group.agreed("creating the run directory"):
        if group.world.rank == 0:
            if origin.is_resumed and origin.directory is not None:
                before = startup.previous_end(read_exit(origin.directory))
            directory, lease = take(config, origin, step, group.world.launcher)
    directory = Path(group.tell_all(str(directory.absolute())))
    ranks.heartbeat.set_directory(str(directory))
    is_shared = _check_shared(config, group, directory, len(tensors.writers()) > 1)
    writers = tensors.writers() if is_shared else [0]
    mail = Mail(group.store, group.world.rank, writers, config.dist.timeout_s)
    opened: RunDirectory | None = None
    with group.agreed("opening the record"):
        if lease is not None:
            try:
                if saved.digest_of(sampling):
                    replace_file(directory / saved.NAME, saved.to_bytes(sampling))
                opened = _open(config, directory, lease, origin, step, tensors, mail)
            except OSError as error:
                what = f"{error.filename or directory}: {error.strerror}"
                raise ConfigError(
                    f"run.dir={config.run.dir}: {what}; make room or choose another"
                ) from None
    evaluation = group.tell_all(opened.evaluation if opened else {})
    if opened:
        warnings = [*before, *opened.warnings]
        return replace(opened, is_shared=is_shared, warnings=warnings)
    has_part = group.world.rank in writers
    saver = PartSaver(directory, config.checkpoint, mail) if has_part else Saver(directory)
    return RunDirectory(directory, Record(), saver, evaluation, [], is_shared)


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
        why = f"rank {unseen - 1:.0f} does not see {config.shown(directory)}"
        advice = "put run.dir on a shared disk, or set auto"
        raise ConfigError(f"checkpoint.sharded=true: {why}; {advice}")
    return not unseen


@uncollected()  # rich and TensorBoard
def _open(
    config: Config,
    directory: Path,
    lease: Lease,
    origin: Origin,
    step: int,
    tensors: Tensors,
    mail: Mail,
) -> RunDirectory:
    console = Console()
    keep = replace(config.checkpoint, best_metric=config.best_metric, best_mode=config.best_mode)
    disk = Disk(directory, keep, console.say)
    settings = to_yaml(config) + "\n" if origin.is_resumed else ""
    files = RecordFiles(directory, step, disk, lease, console.say, settings)
    sinks: list[Sink] = [console, files, *open_services(config, directory, step, console.say)]
    if "tensorboard" in config.log.trackers:
        of_run = (directory, step, origin.is_resumed)
        sinks.append(TensorBoard(*of_run, config.log, config.eval.splits, disk))
    record = Record(sinks)
    saver = DiskSaver(directory, keep, disk, lease.check, record.flush, record.saved, mail)
    kept = config.checkpoint.keep_last + config.checkpoint.keep_best
    evaluation = read_evaluation(directory, step)
    warnings = startup.lack_of_room(directory, tensors.module, kept)
    return RunDirectory(directory, record, saver, evaluation, warnings)
