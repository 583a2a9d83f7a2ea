"""The core without its companions: it trains, and names what is missing in one line."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A tree of the core, the face, conf/ and tasks/, from which the companions were deleted."""
    tree = tmp_path_factory.mktemp("alone")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("trainer/base", "trainer/core", "conf", "tasks"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for path in (ROOT / "trainer").glob("*.py"):
        shutil.copy(path, tree / "trainer")
    return tree


def start(tree, folder, *words, launcher=()):
    """Train in the tree; `-P` keeps the working directory out of sys.path."""
    command = [sys.executable, "-P", *launcher, "-m", "trainer", "task=cifar", "run.steps=2"]
    given = [*command, f"run.dir={folder}", *words]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(tree)}
    return subprocess.run(
        given, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_two_ranks_train_without_companions_and_say_that_the_checks_are_missing(alone, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    done = start(alone, tmp_path, launcher=launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    line = "proof   none: the startup checks (trainer/startup_checks) are not installed"
    assert done.stdout.splitlines().count(line) == 1
    assert "step 2/2  eval/accuracy" in done.stdout
    manifests = [*tmp_path.glob("cifar/*/checkpoints/step-00000002/manifest.json")]
    assert len(manifests) == 1


@pytest.mark.parametrize(
    ("word", "module"),
    {
        "strategy=fsdp": "trainer.mesh.fsdp",
        "checkpoint.mirror=s3://data/first": "trainer.places.bucket_store",
        "launch=ray": "trainer.places.ray_ranks",
        "--cfg=job": "trainer.sweep.__main__",
    }.items(),
)
def test_a_missing_companion_is_named_in_one_line(word, module, alone, tmp_path):
    done = start(alone, tmp_path, word)
    why = f"error: {module}: is not part of this installation; install lockstep-trainer as a whole"
    assert (done.returncode, done.stderr.strip()) == (2, why)
