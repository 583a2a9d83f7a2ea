"""Odd behaviour of tasks and machines: each is reported in one line."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest
from harness import CONF, wait_for
from harness.launch import environment_of_a_command

from trainer import ConfigError, load_config
from trainer.core.checkpoints.disk import Disk

ODD = ("--config-dir", CONF, "task=odd", "run.name=a", "log.every_steps=1", "run.steps=12")
SAVES = ("checkpoint.every_steps=3", "checkpoint.every_epochs=null")
DETACH = "it is a tensor that requires a gradient; return tensor.detach()"
EXAMPLES = {
    "sys.exit": "train example 100 cannot be read: SystemExit: 0 (",
    "None": "train example 100 cannot be read: it is NoneType and the others are ((4,), ())",
    "gradient": f"train example 100 cannot be read: {DETACH}",
    "gradient of all": f"cannot be read: {DETACH}",
    "None of all": "cannot be read: no batch can be collated from NoneType; return tensors",
    "text of all": "is 'a': must be a tensor; convert it in the dataset, in split_batch or",
    "sys.exit in build_dataset": "sys.exit(0) was called at ",
    "sys.exit in train_step": "sys.exit(0) was called at ",
}
IN_A_WORKER = ("sys.exit", "gradient of all")


def how(what: str) -> str:
    return f"task.options.how='{what}'"


def the_error(err: str) -> str:
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


def ending(folder) -> dict:
    return json.loads((folder / "runs/tiny/a/exit.json").read_text())


def losses(folder) -> list:
    lines = (folder / "runs/tiny/a/metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return [(e["step"], e["train/loss"]) for e in entries if "train/loss" in e]


@pytest.mark.parametrize(
    ("what", "workers"),
    [*((what, 0) for what in EXAMPLES), *((what, 1) for what in IN_A_WORKER)],
)
def test_odd_example_is_one_line(what, workers, command, tmp_path):
    code, _, err = command(*ODD, how(what), f"data.workers={workers}")
    assert code in (1, 2)
    assert EXAMPLES[what] in the_error(err)


def test_tensors_that_require_a_gradient_are_no_dataset(command, tmp_path):
    task = """from odd_task import *
from tiny import *
class Learned(Odd):
    def build_dataset(self, split):
        inputs, targets = points(203, split)
        return ResidentDataset(inputs.requires_grad_(), targets)
"""
    (tmp_path / "learned.py").write_text(task)
    code, _, err = command(*ODD, "task.trainer=learned.Learned")
    assert code == 2
    given = "build_dataset('train') returned a tensor that requires a gradient"
    assert the_error(err) == f"error: {given}; return tensor.detach()"


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_process_that_ends_without_an_error_is_named(ranks, command, tmp_path):
    """Exit code 0 is included, which no launcher treats as a failure."""
    words = (how("os._exit"), "dist.hang_timeout_s=60", "data.micro_batch=11")
    process = command.start(*ODD, *words, ranks=ranks)
    process.wait()
    wait_for(
        lambda: "ended without an error message in the data loader, at step" in process.read()[1]
    )
    (line,) = [one for one in process.read()[1].splitlines() if "without an error" in one]
    assert line.endswith(
        "it was killed (by a launcher, a second signal, the kernel) or called os._exit"
    )
    process.communicate()


@pytest.mark.parametrize(
    ("child", "ranks"),
    [
        ("sys.exit", 0),
        *(pytest.param(child, 0, marks=pytest.mark.slow) for child in ("goes on", "raises")),
        pytest.param("os._exit", 0, marks=pytest.mark.slow),
        pytest.param("goes on", 2, marks=pytest.mark.slow),
    ],
)
def test_child_that_a_step_forks_writes_nothing(child, ranks, command, tmp_path):
    words = (*SAVES, "data.micro_batch=11")
    others = tmp_path / "undisturbed"
    others.mkdir()
    assert command.start(*ODD, *words, ranks=ranks, folder=others).wait() == 0
    process = command.start(*ODD, how(f"forks: {child}"), *words, ranks=ranks)
    assert process.wait() == 0
    _, err = process.communicate()
    said = [line for line in err.splitlines() if "which the task forked, continued as if" in line]
    assert len(said) == (max(1, ranks) if child != "os._exit" else 0), err
    assert child != "raises" or "(ValueError: in a child, " in said[0]
    assert losses(tmp_path) == losses(others)
    assert ending(tmp_path) == ending(others)


# Limits of the machine ----------------------------------------------------------------------------


def test_file_that_may_not_be_as_large_names_the_limit(command):
    most = (4_000, 4_000)
    code, _, err = command(
        *ODD, *SAVES, before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, most)
    )
    assert code == 1
    limit = "; ulimit -f allows 4,000 bytes a file; raise ulimit -f and resume with run.resume"
    assert "File too large while " in the_error(err) and limit in the_error(err)


def test_a_limit_below_what_a_start_needs_is_named(command):
    most = (100_000, 100_000)
    words = [*ODD, *SAVES, "dist.hang_timeout_s=60"]
    code, _, err = command(*words, before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, most))
    line = "ulimit -f: a file may have at most 100,000 bytes, and a run needs 266,240 and room for "
    assert code == 2 and line in the_error(err)


def test_run_directory_that_is_moved_ends_the_run_in_a_line(command):
    code, _, err = command(*ODD, *SAVES, how("moves its directory"))
    assert code != 0
    assert "the run directory was removed or moved; nothing" in the_error(err)


def test_workers_need_open_files(command, tmp_path):
    """A soft limit is raised; a hard limit is named."""

    def limit(hard: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, hard))

    words = ("task.options.how=''", "data.workers=1")
    code, _, err = command(*ODD, *words, "run.steps=2", before=lambda: limit(1000))
    assert code == 0, err
    shutil.rmtree(tmp_path / "runs")
    code, _, err = command(*ODD, *words, before=lambda: limit(60))
    assert code == 2
    assert the_error(err).endswith("ulimit -Hn allows 60; raise it, or set fewer workers")


def test_workers_need_a_short_path_for_sockets(command, tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    told = {"TMPDIR": str(folder)}
    code, _, err = command(*ODD, "data.workers=1", environment=told, before=forget_folder)
    assert code == 2
    assert the_error(err).endswith(" characters; must be at most 75; set TMPDIR=/tmp")


def forget_folder() -> None:
    """Reset `tempfile`, which caches the first folder that it found."""
    import tempfile

    tempfile.tempdir = None


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a /dev/shm of its own: needs root")
def test_full_shared_memory_is_named(tmp_path):
    task = """import torch
from odd_task import *
class Wide(Odd):
    def build_dataset(self, split):
        return WideItems(split)
    def augment(self, inputs, targets, random, train):
        return inputs[:, :4], targets
class WideItems(Items):
    def __getitem__(self, index):
        return torch.zeros(50_000), self.targets[index]
"""
    (tmp_path / "wide.py").write_text(task)
    words = " ".join([sys.executable, "-m", "trainer", *ODD, "task.trainer=wide.Wide"])
    shell = f"mount -t tmpfs -o size=1m tmpfs /dev/shm && {words} data.workers=2"
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", shell],
        cwd=tmp_path,
        env=environment_of_a_command(),
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.splitlines()[0]}")
    assert done.returncode == 1, done.stderr
    assert "error: shared memory (/dev/shm), which workers use to send batches" in done.stderr


# Disks and paths ----------------------------------------------------------------------------------

LONG = "a" * 300
LINES = {
    "run.name='x\ny'": "run.name=x\ny: must be one folder name, without '/' and not starting with "
    "'.', of printable characters and less than 200 bytes",
    "run.dir='x\ny'": "run.dir=x\ny: must have printable characters only, and no line breaks",
    f"run.dir={LONG}": f"run.dir={'a' * 100}...{'a' * 20}: must have names of at most 255 bytes, "
    "and one has 300",
    f"run.resume=/{'a/' * 2500}": f"run.resume=/{'a/' * 49}a...{'a/' * 10}: must be at most 3,500 "
    "bytes, and is 5,000",
    f"run.init_from={LONG}": f"run.init_from={'a' * 100}...{'a' * 20}: must have names of at most "
    "255 bytes, and one has 300",
}


@pytest.mark.parametrize("word", LINES, ids=range(len(LINES)))
def test_path_that_no_disk_can_have_is_refused(word):
    with pytest.raises(ConfigError) as told:
        load_config(["task=odd", word], [CONF])
    assert str(told.value) == LINES[word]


def test_config_folder_with_a_long_name_is_refused(command):
    code, _, err = command("--config-dir", LONG)
    assert code == 2 and "--config-dir=" in the_error(err)
    assert the_error(err).endswith(": must have names of at most 255 bytes, and one has 300")


@contextmanager
def mounted(place, *options):
    """Mount something for the block, or skip the test."""
    place.mkdir()
    if subprocess.run(["mount", *options, place], capture_output=True).returncode:
        pytest.skip("mount needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.parametrize(("inodes", "code"), [(5, 2), (14, 1)])
def test_disk_without_inodes_names_them(inodes, code, command, tmp_path):
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", f"nr_inodes={inodes}", "tmpfs"):
        done = command(*ODD, *SAVES, "run.dir=small", "log.trackers=[]")
    assert done.returncode == code and "No space left on device" in the_error(done.stderr)
    lacks = "the file system has no inode for another file (df -i); remove files and resume with"
    assert code == 2 or lacks in the_error(done.stderr)
    newest = "the newest checkpoint is of step 3; resume with: python -m trainer run.resume=small/"
    assert code == 2 or newest in done.stdout


def test_quota_that_is_used_up_is_named(tmp_path):
    settings = load_config(["task=odd"], [CONF]).checkpoint
    disk = Disk(tmp_path, settings, print)
    disk.report(OSError(errno.EDQUOT, "Disk quota exceeded"), "saving step 3")
    why = "the quota of this user or project is used up; free some of it (quota -s) and resume with"
    assert why in str(disk.failure)


def test_checkpoint_that_cannot_be_removed_is_a_warning(command, tmp_path):
    """A mount on it keeps it from being renamed, even by root."""
    task = """import subprocess
from tiny import Tiny
class Busy(Tiny):
    def train_step(self, batch):
        if self.step == 5:
            place = "runs/tiny/a/checkpoints/step-00000003"
            subprocess.run(["mount", "--bind", place, place], check=True)
        return super().train_step(batch)
"""
    (tmp_path / "busy.py").write_text(task)
    with mounted(tmp_path / "probe", "-t", "tmpfs", "tmpfs"):
        pass
    words = ["--config-dir", CONF, "task=tiny", "run.name=a", "run.steps=12", "log.trackers=[]"]
    keep = ["checkpoint.keep_last=1", "checkpoint.keep_best=0", "checkpoint.background=false"]
    folder = tmp_path / "runs/tiny/a/checkpoints"
    try:
        done = command(*words, *keep, *SAVES, "task.trainer=busy.Busy")
    finally:
        subprocess.run(["umount", folder / "step-00000003"], capture_output=True)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("warning: ")]
    why = "Device or resource busy while removing older checkpoints; the run continues without it"
    assert len(said) == 1 and said[0].endswith(f"/step-00000003: {why}")
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000003", "step-00000012"]
