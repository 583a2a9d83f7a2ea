"""The README's task of one's own works to the letter, from an installed wheel, beside a user's own tasks/ and conf/."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the wheel installed: nothing of the checkout is on the path."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT], check=True
    )
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", folder / "site", wheel], check=True)
    return folder / "site"


def run(command, folder, site):
    words = shlex.split(command)
    words[0:1] = (
        [sys.executable]
        if words[0] == "python"
        else [sys.executable, "-m", "torch.distributed.run"]
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def test_readme_task_runs_from_a_wheel_in_a_folder_with_its_own_tasks_and_conf(site, tmp_path):
    section = README.split("## A task of your own")[1].split("\n## ")[0]
    files = re.findall(r"`([\w./]+)`:\n\n```\w+\n(.*?)```", section, re.S)
    assert [name for name, _ in files] == ["tasks/spiral.py", "conf/task/spiral.yaml"]
    assert len(files[0][1].splitlines()) <= 40
    for name, text in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tasks/__init__.py").touch()
    (tmp_path / "conf/config.yaml").write_text("somebody: elses\n")
    commands = re.search(r"```sh\n(.*?)```", section, re.S)[1].splitlines()
    assert len(commands) == 3
    for command in commands:
        done = run(command, tmp_path, site)
        assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["eval/accuracy"] > 0.9
    one, two = (losses(tmp_path / "runs/spiral" / name) for name in ("one", "two"))
    assert len(one) == 30 and one == pytest.approx(two, rel=1e-3)


def losses(directory):
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def test_built_in_tasks_come_from_the_wheel_whatever_lies_around(site, tmp_path):
    for name in ("tasks/cifar.py", "tasks/__init__.py", "conf/task/cifar.yaml", "trainer_conf.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(
            "raise SystemExit('the wrong one')\n" if name.endswith(".py") else "wrong: one\n"
        )
    done = run(
        "python -m trainer task=cifar run.steps=1 task.options.widths=[8,8,8] task.options.data=bundled",
        tmp_path,
        site,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the bundled part of CIFAR-10" in done.stdout
