"""The custom task of the README works exactly as printed, from an installed wheel, next to a user's
own tasks/ and conf/."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ended, launch

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory, wheel):
    """Return a folder with the wheel installed; the checkout is not on the path."""
    folder = tmp_path_factory.mktemp("installed") / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "install", "--no-deps", "--target", folder, wheel], check=True)
    return folder


def run(line, site, command, is_real):
    """Run a command line of the README; return (exit code, stdout, stderr)."""
    program, *words = shlex.split(line)
    at = words.index("-m")
    launcher, verb, rest = words[:at], words[at + 1], words[at + 2 :]
    if is_real:
        agent = ("-m", "torch.distributed.run", *launcher) if program == "torchrun" else ()
        paths = {"PYTHONPATH": str(site)}
        return ended(launch(command.folder, *rest, launcher=agent, verb=verb, **paths))
    ranks = int(launcher[-1].split("=")[1]) if program == "torchrun" else 0
    environment = {"PYTHONPATH": str(site)}
    return command(*rest, ranks=ranks, verb=verb, environment=environment, is_fresh=True)


@pytest.mark.slow
@pytest.mark.parametrize("is_real", [False, True])
def test_readme_task_runs_from_a_wheel_in_a_folder_with_its_own_tasks_and_conf(
    is_real, site, command, tmp_path
):
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
    for line in commands:
        code, out, err = run(line, site, command, is_real)
        assert code == 0, out + err
    assert out.startswith(re.findall(r"```\w*\n(.*?)```", section, re.S)[-1])
    one, two = (losses(tmp_path / "runs/spiral" / name) for name in ("one", "two"))
    assert len(one) == 30 and one == two


def losses(directory):
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("is_real", [False, True])
def test_built_in_tasks_come_from_the_wheel_in_any_folder(is_real, site, command, tmp_path):
    for name in ("tasks/cifar.py", "tasks/__init__.py", "conf/task/cifar.yaml", "trainer_conf.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(
            "raise SystemExit('the wrong one')\n" if name.endswith(".py") else "wrong: one\n"
        )
    words = "task=cifar run.steps=1 task.options.widths=[8,8,8] task.options.data=bundled"
    code, out, err = run(f"python -m trainer {words}", site, command, is_real)
    assert code == 0, out + err
    assert "the bundled part of CIFAR-10" in out
