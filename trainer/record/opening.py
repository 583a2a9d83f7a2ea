"""Opening a run directory: its record and saver, on rank 0; silent ones elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from trainer.checkpoints.disk import Disk
from trainer.checkpoints.saver import DiskSaver, Saver
from trainer.config.schema import Config
from trainer.distributed.launchers import Launcher
from trainer.distributed.ranks import Ranks
from trainer.loading import uncollected
from trainer.record import startup
from trainer.record.console import Console
from trainer.record.directory import read_evaluation
from trainer.record.metrics import RecordFiles
from trainer.record.record import Record
from trainer.record.resume import Origin, take
from trainer.record.trackers import TensorBoard


@dataclass(frozen=True)
class Opened:
    """An open run directory. `evaluation` is what it already holds of this step."""

    directory: Path
    record: Record
    saver: Saver
    evaluation: dict[str, float]
    warnings: list[str]


def open_directory(
    config: Config, launcher: Launcher, ranks: Ranks, origin: Origin, step: int, model: nn.Module
) -> Opened:
    """Make the run directory or take the resumed one. A collective.

    Raises ConfigError, alike on every rank, where it is taken or cannot be made.
    """
    group = ranks.group
    opened: Opened | None = None
    with group.agreed("making the run directory"):
        if group.world.rank == 0:
            opened = _open(config, launcher, origin, step, model)
    facts = [str(opened.directory), opened.evaluation] if opened else []
    name, evaluation = group.tell_all(facts)
    directory = Path(name)
    ranks.heartbeat.set_directory(str(directory.absolute()))
    return opened or Opened(directory, Record(), Saver(directory), evaluation, [])


@uncollected()  # rich and TensorBoard
def _open(
    config: Config, launcher: Launcher, origin: Origin, step: int, model: nn.Module
) -> Opened:
    directory, lease = take(config, origin, step, launcher)
    console = Console(step)
    disk = Disk(directory, config.checkpoint, console.say)
    files = RecordFiles(directory, step, disk, lease, console.say)
    board = TensorBoard(directory, step, origin.is_resumed, config.log, disk)
    record = Record([console, board, files])
    saver = DiskSaver(directory, config.checkpoint, disk, lease.check, record.flush)
    kept = config.checkpoint.keep_last + config.checkpoint.keep_best
    evaluation = read_evaluation(directory, step)
    warnings = startup.lack_of_room(directory, model, kept)
    return Opened(directory, record, saver, evaluation, warnings)
