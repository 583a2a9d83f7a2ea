"""data.micro_batch=auto: the largest micro-batch that fits, found by all ranks before the run."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import CONF
from harness.launch import children_of, environment_of_a_command

from trainer.base.errors import ConfigError
from trainer.core.setup.capacity import find_largest

WORDS = [
    *("task=tiny", f"--config-dir={CONF}", "task.trainer=narrow_memory.Narrow", "run.name=found"),
    *("run.steps=4", "data.global_batch=24", "strategy.precision=fp64", "log.trackers=[]"),
    *("log.every_steps=1", "checkpoint.every_epochs=null"),
]


def losses(folder, name, task="tiny"):
    lines = (folder / f"runs/{task}/{name}/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["train/loss"] for row in rows if "train/loss" in row]


@pytest.mark.parametrize("room", range(1, 13))
def test_the_largest_that_fits_is_found(room):
    sizes = [12, 6, 4, 3, 2, 1]
    tried = []

    def fits(rows):
        assert rows not in tried
        tried.append(rows)
        return rows <= room

    assert find_largest(sizes, fits) == max(size for size in sizes if size <= room)


def test_nothing_fits():
    with pytest.raises(ConfigError, match="a micro-batch of 1 row does not fit into memory"):
        find_largest([4, 2, 1], lambda rows: False)


LAYOUTS = {  # ranks, rows that fit by rank, settings, size of the micro-batch
    "1": (0, "7", [], 6),
    "all fit": (2, "12", ["strategy=ddp"], 12),
    "2, one of them smaller": (2, "12 6", ["strategy=ddp"], 6),
    "3, uneven": (3, "5", ["strategy=ddp", "data.global_batch=25"], 5),
    "dp": (0, "9", ["strategy=dp"], 8),
    "fsdp 2": (2, "12 5", ["strategy=fsdp"], 4),
    "file": (2, "12 5", ["strategy=ddp", "dist.init=file", "dist.path=store"], 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_has_the_numbers_of_the_micro_batch_that_was_found(layout, command):
    ranks, room, words, rows = LAYOUTS[layout]
    environment = {"ROOM": room}
    words = [*WORDS, *words]
    done = command(*words, "data.micro_batch=auto", ranks=ranks, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    why = "all rows of a rank fit at once" if layout == "all fit" else "no larger one fits"
    assert f"data.micro_batch=auto: {rows}, because {why}" in done.stdout
    assert [path.name for path in command.folder.glob("runs/*/*")] == ["found"]  # no trial's run
    given = ["run.name=given", f"data.micro_batch={rows}"]
    assert command(*words, *given, ranks=ranks, environment=environment).returncode == 0
    assert losses(command.folder, "found") == losses(command.folder, "given")
    saved = (command.folder / "runs/tiny/found/config.json").read_text()
    assert f'"micro_batch": {rows},\n' in saved


@pytest.mark.slow
@pytest.mark.parametrize("room", [24, 12])
def test_syncbn_takes_the_rows_of_a_rank_whole(room, command):
    synced = ["strategy.sync_batchnorm=true", "task.options.norm=true"]
    done = command(*WORDS, *synced, "data.micro_batch=auto", environment={"ROOM": str(room)})
    if room == 24:
        assert done.returncode == 0, done.stdout + done.stderr
        assert "data.micro_batch=auto: 24, because all rows of a rank fit" in done.stdout
    else:
        assert done.returncode == 2
        line = (
            "error: strategy.sync_batchnorm=true: BatchNorm sees one of 2 micro-batches at a time"
        )
        assert f"{line} (data.micro_batch=12), so results depend on the layout" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [["strategy=tp"], ["strategy=cp"], ["strategy=pp"], ["strategy=pp", "strategy.schedule=gpipe"]],
    ids=" ".join,
)
def test_auto_on_a_mesh(words, command):
    task = ["task=meshed", f"--config-dir={CONF}", "task.trainer=narrow_memory.NarrowMesh"]
    words = [*task, *words, "run.steps=2", "data.global_batch=12", "data.micro_batch=auto"]
    done = command(*words, ranks=2, environment={"ROOM": "5"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data.micro_batch=auto: 4, because no larger one fits" in done.stdout


@pytest.mark.slow
def test_a_resume_keeps_the_number(command):
    words = [*WORDS, "data.micro_batch=auto", "run.steps=2"]
    assert command(*words, environment={"ROOM": "12"}).returncode == 0
    more = ["run.resume=auto", "run.steps=4"]
    done = command(*words, *more, environment={"ROOM": "24"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data.micro_batch=auto: 12, because the run to resume has 12" in done.stdout


@pytest.mark.slow
def test_a_resume_on_other_ranks_keeps_what_it_can(command):
    """12 rows do not divide the rows of three ranks evenly: these have 8."""
    words = [*WORDS, "data.micro_batch=auto", "run.steps=2"]
    assert command(*words, environment={"ROOM": "12"}).returncode == 0
    more = ["run.resume=auto", "run.steps=4", "strategy=ddp"]
    done = command(*words, *more, ranks=3, environment={"ROOM": "24"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data.micro_batch=auto: 8, because the run to resume has 12" in done.stdout


def test_memory_that_is_not_enough_is_one_line(command):
    words = [*WORDS, "data.micro_batch=10", "task.trainer=narrow_memory.Late"]
    done = command(*words, environment={"ROOM": "5"})
    assert done.returncode == 1
    line = "data.micro_batch=10: out of memory (CUDA out of memory. Tried to allocate 1 MiB)"
    assert done.stderr.splitlines() == [
        f"error: {line}; set data.micro_batch=5, or auto in a new run"
    ]
    reason = json.loads((command.folder / "runs/tiny/found/exit.json").read_text())["reason"]
    assert reason.startswith(f"RunError: {line}")


@pytest.mark.parametrize("rows", ["10", pytest.param("auto", marks=pytest.mark.slow)])
def test_memory_that_is_not_enough_for_evaluation_is_named(command, rows):
    words = [*WORDS, f"data.micro_batch={rows}", "eval.micro_batch=50"]
    done = command(*words, environment={"ROOM": "30"})
    assert done.returncode == 1
    line = "eval.micro_batch=50: out of memory (CUDA out of memory. Tried to allocate 1 MiB)"
    assert done.stderr.splitlines()[-1] == f"error: {line}; set a smaller one, or null"


@pytest.mark.slow
def test_one_row_does_not_fit(command):
    words = ["data.micro_batch=auto", "data.global_batch=2"]
    done = command(*WORDS, *words, environment={"ROOM": "0"})
    assert done.returncode == 2
    assert "data.micro_batch=auto: a micro-batch of 1 row does not fit into memory" in done.stderr


def test_auto_is_refused_under_exact(command):
    done = command(*WORDS, "data.micro_batch=auto", "strategy=exact", environment={"ROOM": "9"})
    assert done.returncode == 2
    assert done.stderr.startswith("error: data.micro_batch=auto: belongs to the run under")
    assert done.stderr.endswith("; set 3\n")


@pytest.mark.slow
def test_another_failure_is_shown_by_the_run_itself(command):
    words = ["data.micro_batch=auto", "task.trainer=narrow_memory.Failing"]
    done = command(*WORDS, *words, environment={"ROOM": "9"})
    assert done.returncode == 1
    assert "ValueError: the loss of this task is wrong" in done.stderr


SCRIPT = """
from trainer import load_config
from narrow_memory import Narrow

words = {words}
def main():
    Narrow(load_config(words, ["{conf}"])).fit()
{guard}
    main()
"""


@pytest.mark.slow
def test_a_script(tmp_path):
    """A script works with the guard that multiprocessing asks for, and without says so."""
    words = [word for word in WORDS if not word.startswith("--")] + ["data.micro_batch=auto"]
    for guard, code in {'if __name__ == "__main__":': 0, "if True:": 1}.items():
        path = tmp_path / str(code) / "script.py"
        path.parent.mkdir()
        path.write_text(SCRIPT.format(words=words, conf=CONF, guard=guard))
        environment = environment_of_a_command(ROOM="9")
        done = subprocess.run(
            [sys.executable, path], cwd=path.parent, capture_output=True, text=True, env=environment
        )
        assert done.returncode == code, done.stdout + done.stderr
    line = "a trial ended with exit code 1 before its first step; call fit below if __name__"
    assert f"ConfigError: data.micro_batch=auto: {line}" in done.stderr


@pytest.mark.slow
def test_real_memory_that_runs_out(command):
    """The kernel refuses memory beyond a limit, in trials and in the run."""
    words = [*WORDS, "task.trainer=narrow_memory.Hungry", "run.steps=1", "eval.micro_batch=1"]
    done = command(*words, "data.micro_batch=auto", limit_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"data.micro_batch=auto: (\d+), because no larger one fits", done.stdout)
    assert found, done.stdout
    assert 1 <= int(found[1]) < 24
    more = ["data.micro_batch=24", "run.name=large"]
    done = command(*words, *more, environment={"LIMITED": "1"})
    assert done.returncode == 1
    assert "error: data.micro_batch=24: out of memory (" in done.stderr
    assert "can't allocate memory" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_trials_too(number, command, tmp_path):
    words = [*WORDS, "task.trainer=narrow_memory.Stuck", "data.micro_batch=auto"]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    run = command.start(*words, environment={"ROOM": "9", "TMPDIR": str(scratch)}, is_fresh=True)
    try:
        deadline = time.monotonic() + 60
        while not (trials := trials_of(run.pid)):
            assert time.monotonic() < deadline, run.read()
            time.sleep(0.1)
        run.send_signal(number)
        assert run.wait(20) != 0
        if number == signal.SIGTERM:
            line = "data.micro_batch=auto: asked to stop (SIGTERM); nothing was started"
            assert run.read()[1] == f"error: {line}\n"
        while any(Path(f"/proc/{pid}/exe").exists() for pid in trials) or list(scratch.iterdir()):
            assert time.monotonic() < deadline, "a trial outlives the run"
            time.sleep(0.1)
    finally:
        run.kill()


def trials_of(pid):
    """Return the processes of a run's trials that have begun to build."""
    found = []
    for child in children_of(pid):
        words = Path(f"/proc/{child}/cmdline").read_bytes()
        if b"spawn_main" in words and (Path(f"/proc/{child}/cwd") / f"stuck-{child}").exists():
            found.append(child)
    return found
