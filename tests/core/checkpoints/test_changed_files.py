"""Files of a run directory that somebody replaces, shortens or removes while the run writes."""

import json
import os
import shutil

import pytest
from harness import fit_on, newest
from harness.internals import rundir
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import Tiny

from trainer.base.errors import CheckpointError
from trainer.core.checkpoints.run_directory import Lease
from trainer.core.record.trackers.jsonl import MetricsFile
from trainer.core.trainer import active_run

WORDS = ["task=tiny", "run.steps=9", "log.every_steps=1", "eval.every_epochs=null"]
SAVES = ["checkpoint.every_steps=3", "checkpoint.every_epochs=null", "checkpoint.keep_last=9"]


def rename(path, text):
    """Replace a file by another one with this text, as sed -i and editors do."""
    path.with_name("new").write_text(text)
    path.with_name("new").replace(path)


def line(step):
    return json.dumps({"step": step, "train/loss": 0.5}) + "\n"


def append_note(path):
    with path.open("a") as file:
        file.write("# a note\n")


CHANGES = {  # -> what is said, and the steps that the file has in the end
    "nothing": (lambda path: None, "", range(1, 10)),
    "removed": (lambda path: path.unlink(), "was removed", range(1, 10)),
    "edited": (lambda path: rename(path, path.read_text()), "was replaced", range(1, 10)),
    "edited late": (lambda path: rename(path, line(1) + line(2)), "was replaced", range(1, 10)),
    "edited to nothing": (lambda path: rename(path, ""), "was replaced", range(1, 10)),
    "moved": (lambda path: path.rename(path.with_name("old")), "was moved", range(5, 10)),
    "rotated": (
        lambda path: (path.rename(path.with_name("old")), path.touch()),
        "was moved",
        range(5, 10),
    ),
    "emptied": (lambda path: os.truncate(path, 0), "another program changed its", range(1, 10)),
    "cut": (lambda path: os.truncate(path, 50), "another program changed its", range(1, 10)),
    "made longer": (
        lambda path: os.truncate(path, 999),
        "another program changed its",
        range(1, 10),
    ),
    "cut, then made longer": (
        lambda path: (os.truncate(path, 50), os.truncate(path, 999)),
        "another program changed its",
        range(1, 10),
    ),
    "rewritten": (
        lambda path: path.write_text(line(1) + "# a note" * 99),
        "another program changed its",
        range(1, 10),
    ),
    "appended to": (append_note, "", range(1, 10)),
    "a folder": (
        lambda path: (path.unlink(), path.mkdir()),
        "is not a file any more: the lines are kept until it is removed",
        [],
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_no_line_is_lost_if_the_metrics_are(what, tmp_path):
    change, said, steps = CHANGES[what]
    path = tmp_path / "metrics.jsonl"
    warnings = []
    metrics = MetricsFile(path, lambda: None, warnings.append)
    for step in range(1, 10):
        metrics.write(line(step))
        if step == 4:
            change(path)
        if step == 7:
            metrics.sync()
    metrics.close()
    if what == "a folder":
        assert warnings.pop() == f"{path}: is not a file, its lines are in kept-metrics.jsonl"
        path = tmp_path / "kept-metrics.jsonl"
        steps = range(1, 10)
    assert [entry["step"] for _, entry in rundir.read_entries(path)] == [*steps]
    is_short = "cut" in what or "longer" in what
    assert not is_short or path.read_text() == "".join(map(line, steps))
    assert len(warnings) == bool(said) and all(said in one for one in warnings), warnings


def test_lines_return_when_a_folder_in_their_place_is_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    warnings = []
    metrics = MetricsFile(path, lambda: None, warnings.append)
    metrics.write(line(1))
    path.unlink()
    path.mkdir()
    metrics.write(line(2))
    path.rmdir()
    metrics.write(line(3))
    metrics.close()
    assert path.read_text() == line(1) + line(2) + line(3)
    assert [one.partition(": ")[2][:13] for one in warnings] == ["is not a file", "was removed; "]


class Meddled(Tiny):
    """Task in which somebody changes the run directory in step 5."""

    what = ""

    def train_step(self, batch):
        if self.step == 5 and self.world.rank == 0:
            active_run(self).checkpoints.wait()
            self.meddle(active_run(self).directory)
        return super().train_step(batch)

    def meddle(self, directory):
        if self.what == "all":
            aside = (directory / "tensorboard").rename(directory.with_name("aside"))
            shutil.rmtree(aside)  # in two steps: a thread writes there
            for name in ("metrics.jsonl", ".writer", "config.json"):
                (directory / name).unlink()
            for name in ("config.json", "exit.json"):
                (directory / name).mkdir()
        elif self.what == "a copy":
            shutil.copytree(directory, directory.with_name("copy"))
            shutil.rmtree(directory)
            directory.with_name("copy").rename(directory)
        else:
            shutil.rmtree(directory)


class All(Meddled):
    what = "all"


class Copied(Meddled):
    what = "a copy"


class Removed(Meddled):
    what = "the directory"


def curve(directory):
    board = EventAccumulator(str(directory / "tensorboard"))
    board.Reload()
    return [event.step for event in board.Scalars("train/loss")]


@pytest.mark.parametrize("task", [All, Copied, Removed], ids=lambda task: task.what)
def test_a_run_goes_on_though_its_directory_is_meddled_with(task, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("trainer.core.record.trackers.jsonl.CHECK_S", 0.0)
    run = fit_on(2, tmp_path, *WORDS, *SAVES, task=task)
    out = capfd.readouterr().out
    directory = run["directory"]
    assert run["step"] == 9 and sorted(run["losses"]) == [*range(1, 10)]
    assert curve(directory) == [*range(1, 10)]
    kept = (["step-00000003"] if task is not Removed else []) + ["step-00000006", "step-00000009"]
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == kept
    said = [one for one in out.splitlines() if one.startswith("warning: ")]
    assert len(said) == len({*said}) and len(said) in (2, 3, 4), said
    assert any("nobody else writes there, so the run continues" in one for one in said)
    assert (directory / "config.json").is_file() == (task is not All)
    assert task is All or json.loads((directory / "exit.json").read_text())["code"] == 0


class Planted(Meddled):
    def meddle(self, directory):
        (directory / "checkpoints/step-00000006").mkdir()
        (directory / "checkpoints/step-00000009").touch()


def test_entries_with_the_name_of_a_checkpoint_are_renamed_and_it_is_saved(tmp_path, capfd):
    run = fit_on(1, tmp_path, *WORDS, *SAVES, task=Planted)
    assert newest(run["directory"]).manifest["step"] == 9
    names = sorted(path.name[:21] for path in (run["directory"] / "checkpoints").iterdir())
    assert names[:2] == ["invalid-step-00000006", "invalid-step-00000009"]
    assert [name for name in names if name.startswith("step-")] == [
        f"step-{step:08d}" for step in (3, 6, 9)
    ]
    assert capfd.readouterr().out.count("was no checkpoint of this run, and is invalid-step-") == 2


def test_a_directory_that_is_made_anew_where_another_was_moved_is_not_taken(tmp_path):
    """TensorBoard's writer makes the folders of a moved run again, before anybody else looks."""
    directory = tmp_path / "runs/a"
    directory.mkdir(parents=True)
    lease = Lease(directory)
    (tmp_path / "runs").rename(tmp_path / "moved")
    (directory / "tensorboard").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="the run directory was removed or moved; nothing"):
        lease.check()
    lease.release()
