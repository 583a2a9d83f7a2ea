"""Every step is in both records once per name, also after a resume; only rank 0 writes."""

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.stored import content_of
from harness.training import keep_rules
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.core.checkpoints import transaction as checkpoint
from trainer.core.checkpoints.disk import Disk
from trainer.core.checkpoints.run_directory import Lease
from trainer.core.checkpoints.saver import Mail, Publisher, Saver, Snapshot
from trainer.core.config.schema import LogSettings
from trainer.core.record.trackers import Record
from trainer.core.record.trackers.console import Console
from trainer.core.record.trackers.jsonl import RecordFiles
from trainer.core.record.trackers.tensorboard import TensorBoard
from trainer.core.strategy.tensor_shards import Shard

LOG = LogSettings("short", 1, ["tensorboard"], [], False, 0, None, None)
KEEP = replace(keep_rules(1, 0), background=False)


def open_record(
    directory: Path, begin: int = 0, is_resumed: bool = False
) -> tuple[Record, Publisher]:
    """Return rank 0's record and saver, in a directory that exists already."""
    lease = Lease(directory)
    console = Console()
    disk = Disk(directory, KEEP, console.say)
    files = RecordFiles(directory, begin, disk, lease, console.say)
    board = TensorBoard(directory, begin, is_resumed, LOG, ["eval"], disk)
    record = Record([console, board, files])
    mail = Mail(dist.HashStore(), 0, [0], limit_s=60)
    return record, Publisher(directory, KEEP, disk, lease.check, record.flush, record.saved, mail)


def snapshot(step: int) -> Snapshot:
    weight = Shard.whole(torch.full((3,), float(step)), is_written=True)
    return Snapshot(step, {"model": {"weight": weight}}, {"seen": step}, {"ledger": ""}, None)


def write(directory: Path, steps, value=float, begin: int = 0, is_resumed: bool = False) -> None:
    record, _ = open_record(directory, begin, is_resumed)
    for step in steps:
        record.scalars(step, {"train/loss": value(step), "optim/lr": 0.1})
    record.close()


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def read_board(directory: Path, name: str) -> list[tuple[int, float]]:
    board = EventAccumulator(str(directory / "tensorboard"))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(name)]


def begin_later(monkeypatch) -> None:
    """Let files that are opened from now on look like those of a later process: event files are
    read in the order of the times in their names."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 5)


def test_scalars_are_one_line_with_the_names_of_tensorboard(tmp_path):
    write(tmp_path, [1, 2])
    assert lines(tmp_path) == [
        {"step": step, "train/loss": float(step), "optim/lr": 0.1} for step in (1, 2)
    ]
    assert read_board(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0)]


def test_line_can_be_read_as_soon_as_it_is_written(tmp_path):
    record, _ = open_record(tmp_path)
    record.scalars(1, {"train/loss": 0.5})
    assert lines(tmp_path) == [{"step": 1, "train/loss": 0.5}]
    record.close()


def test_resume_drops_lines_beyond_its_step(tmp_path):
    write(tmp_path, range(1, 6))
    write(tmp_path, range(4, 7), lambda step: 10.0 * step, begin=3, is_resumed=True)
    assert [(line["step"], line["train/loss"]) for line in lines(tmp_path)] == [
        *[(1, 1.0), (2, 2.0), (3, 3.0)],
        *[(4, 40.0), (5, 50.0), (6, 60.0)],
    ]


@pytest.mark.parametrize(
    "half", ['{"step": 3, "train/lo', "{", "7", "null", '{"step": null}', '{"train/loss": 1.0}']
)
def test_resume_drops_an_incomplete_line(half, tmp_path):
    write(tmp_path, [1, 2])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(half)
    write(tmp_path, [3], begin=2, is_resumed=True)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_resume_completes_a_line_that_lacks_its_newline(tmp_path):
    write(tmp_path, [1, 2])
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().rstrip("\n"))
    write(tmp_path, [3], begin=2, is_resumed=True)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_resume_leaves_kept_lines_as_they_were(tmp_path):
    write(tmp_path, [1, 2], lambda step: 0.1 + step)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    write(tmp_path, [], begin=2, is_resumed=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".writer", "metrics.jsonl", "tensorboard"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_value_becomes_null(value, tmp_path):
    write(tmp_path, [1], lambda step: value)
    assert (
        tmp_path / "metrics.jsonl"
    ).read_text() == '{"step": 1, "train/loss": null, "optim/lr": 0.1}\n'


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path, monkeypatch):
    write(tmp_path, range(1, 6))
    begin_later(monkeypatch)
    write(tmp_path, range(4, 7), lambda step: 10.0 * step, begin=3, is_resumed=True)
    expected = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0), (6, 60.0)]
    assert read_board(tmp_path, "train/loss") == expected
    begin_later(monkeypatch)
    write(tmp_path, [5], lambda step: 100.0 * step, begin=4, is_resumed=True)
    assert read_board(tmp_path, "train/loss") == [*expected[:4], (5, 500.0)]
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5]


def test_resume_at_the_first_save_drops_nothing_before_it(tmp_path, monkeypatch):
    write(tmp_path, [0, 1])
    begin_later(monkeypatch)
    write(tmp_path, [1], lambda step: 7.0, begin=0, is_resumed=True)
    assert read_board(tmp_path, "train/loss") == [(0, 0.0), (1, 7.0)]


def test_tensorboard_continues_after_a_truncated_record(tmp_path, monkeypatch):
    write(tmp_path, range(1, 6))
    (file,) = (tmp_path / "tensorboard").iterdir()
    os.truncate(file, file.stat().st_size - 3)
    begin_later(monkeypatch)
    write(tmp_path, [4, 5], lambda step: 10.0 * step, begin=3, is_resumed=True)
    assert read_board(tmp_path, "train/loss") == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
        (5, 50.0),
    ]


def test_tensorboard_that_cannot_open_is_a_warning(tmp_path, capsys):
    (tmp_path / "tensorboard").write_text("a file")
    write(tmp_path, (1, 2))
    said = capsys.readouterr().out
    assert said.count("warning: ") == 1 and "opening TensorBoard's events" in said
    assert "the run continues without it" in said
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_save_publishes_with_the_record_on_the_disk_and_prunes(tmp_path):
    record, saver = open_record(tmp_path)
    for step in (1, 2):
        record.scalars(step, {"train/loss": 0.5})
        saver.save(saver.stage(step), snapshot(step), False)
        read = [number for number, _ in read_board(tmp_path, "train/loss")]
        assert read == list(range(1, step + 1))
    saver.close()
    record.close()
    loaded, skipped = checkpoint.find_newest(tmp_path / "checkpoints", checkpoint.load)
    assert list(checkpoint.steps(tmp_path / "checkpoints")) == [2] and not skipped
    assert loaded is not None
    content = content_of(loaded)
    assert content["training"] == {"seen": 2}
    assert content["model"].keys() == {"weight"}
    assert content["model"]["weight"].tolist() == [2.0, 2.0, 2.0]
    assert content["optimizer"] == content["ema"] == {}


def test_exit_file_records_how_the_run_ended(tmp_path):
    record, _ = open_record(tmp_path)
    record.exit(75, "stopped by SIGTERM", {"step": 4})
    record.close()
    assert json.loads((tmp_path / "exit.json").read_text()) == {
        "code": 75,
        "reason": "stopped by SIGTERM",
        "step": 4,
    }


def test_failure_that_a_watcher_has_reported_is_not_reported_again(tmp_path):
    """The watcher that ends a rank knows more than the ranks that lose it."""
    record, _ = open_record(tmp_path)
    told = '{"code": 1, "reason": "hang detected: rank 1", "step": 4}'
    (tmp_path / "exit.json").write_text(told)
    record.exit(1, "RunError: rank 1 is gone", {"step": 4})
    record.close()
    assert (tmp_path / "exit.json").read_text() == told


def test_record_without_sinks_and_saver_without_disk_write_nothing(tmp_path, capsys):
    record = Record()
    record.scalars(1, {"train/loss": 1.0})
    record.say("said")
    record.table(["a"], [["b"]])
    record.progress(1, 1)
    record.hyper_parameters({"run.seed": 0})
    record.exit(0, "done", {})
    record.close()
    saver = Saver(tmp_path)
    assert saver.stage(1) == ""
    saver.save("", snapshot(1), False)
    saver.wait(1)
    saver.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")
