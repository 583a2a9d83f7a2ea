"""The console script `lockstep` in a folder whose own `trainer.py` would be run by -m trainer."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from harness import CONF, wait_for
from harness.launch import environment_of_a_command

import trainer
from trainer.train import describe
from trainer.verbs import VERBS

tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
ROOT = Path(__file__).resolve().parents[2]
# pip writes such a script for `[project.scripts]`.
SCRIPT = """#!{python}
import sys
from lockstep_trainer import main
if __name__ == "__main__":
    sys.exit(main())
"""
HOSTILE = "raise SystemExit('the trainer.py of this folder was run')\n"
TINY = ["task=tiny", f"--config-dir={CONF}", "run.steps=20", "log.every_steps=1"]


@pytest.fixture
def folder(tmp_path):
    """Return a folder with its own trainer.py and task; the script is outside of it."""
    place = tmp_path / "project"
    place.mkdir()
    (place / "trainer.py").write_text(HOSTILE)
    (place / "tiny.py").write_text((Path(__file__).parents[1] / "tiny.py").read_text())
    script = tmp_path / "bin" / "lockstep"
    script.parent.mkdir()
    script.write_text(SCRIPT.format(python=sys.executable))
    script.chmod(0o755)
    return place


def run_in(folder, *words):
    """Run a command line; `lockstep` is found through PATH."""
    home = [folder.parent / "bin", Path(sys.executable).parent, "/usr/bin", "/bin"]
    environment = environment_of_a_command(PATH=":".join(map(str, home)), PYTHONPATH=str(ROOT))
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trainer.py of this folder" not in done.stdout + done.stderr
    return done.stdout


def test_project_names_the_script_and_all_verbs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"lockstep": "lockstep_trainer:main"}
    package = Path(trainer.__file__).parent
    runnable = [p for p in package.rglob("*.py") if '__name__ == "__main__"' in p.read_text()]
    verbs = {p.parent.name if p.stem == "__main__" else p.stem for p in runnable}
    of_processes = {"end_view", "enter_view", "notebook", "ray_cluster", "recorded_run", "reload"}
    assert verbs - of_processes - {"watcher"} == {*VERBS, "trainer"}
    listed = re.findall(r"^  [a-z ]{7}(\w+)  ", describe([]), re.MULTILINE)
    assert listed[: len(VERBS)] == [*VERBS]


@pytest.mark.slow
def test_module_is_shadowed_by_the_folders_trainer_and_the_script_is_not(folder):
    words = [sys.executable, "-m", "trainer", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder)
    assert "the trainer.py of this folder was run" in done.stderr
    assert "usage: lockstep VERB" in run_in(folder, "lockstep", "--help")
    assert "usage: lockstep prove" in run_in(folder, "lockstep", "prove", "--help")


@pytest.mark.parametrize("word", ["evalute", "verify.findings"])
def test_unknown_verb_is_one_line(word, folder):
    script = folder.parent / "bin" / "lockstep"
    environment = environment_of_a_command(PYTHONPATH=str(ROOT))
    done = subprocess.run([script, word], capture_output=True, text=True, env=environment)
    line = {"evalute": "evalute: use use: lockstep use --help"}
    assert done.returncode == 2
    assert done.stderr.startswith("error: " + line.get(word, f"'{word}': must be key=value or"))


@pytest.mark.slow
def test_script_trains_and_prints_a_command_that_resumes(folder):
    out = run_in(folder, "lockstep", *TINY, "run.name=a")
    (command,) = re.findall("^train longer with: (.*)$", out, re.MULTILINE)
    assert command == "lockstep run.resume=runs/tiny/a task.trainer=tiny.Tiny run.steps=40"
    assert "resumed at step 20" in run_in(folder, *shlex.split(command))
    assert '"eval/loss"' in run_in(folder, "lockstep", "use", "runs/tiny/a", TINY[1])


@pytest.mark.slow
def test_script_under_torchrun_prints_a_command_that_resumes(folder):
    torchrun = ["torchrun", "--standalone", "--nproc_per_node=2", "--no-python"]
    out = run_in(folder, *torchrun, "lockstep", *TINY, "run.name=a")
    (command,) = re.findall("^train longer with: (.*)$", out, re.MULTILINE)
    assert command.startswith("torchrun --nproc_per_node=2 --no-python lockstep run.resume=")
    assert "resumed at step 20" in run_in(folder, *shlex.split(command))


STARTS = {
    "elastic": ["launch=elastic", "launch.nproc_per_node=2"],
    "spawn": ["launch=spawn", "launch.nproc_per_node=2"],
    "sweep": ["optim.lr=0.1,0.2"],
    "sweep of groups": ["optim.lr=0.1,0.2", *("launch=elastic", "launch.nproc_per_node=2")],
    "submitit": ["optim.lr=0.1,0.2", "hydra/launcher=submitit_local"],
}


@pytest.mark.slow
@pytest.mark.parametrize("way", STARTS)
def test_processes_that_the_script_starts_are_not_shadowed(way, folder):
    is_sweep = "optim.lr=0.1,0.2" in STARTS[way]
    run_in(folder, "lockstep", "sweep" if is_sweep else "train", *TINY, *STARTS[way])
    num_runs = 2 if is_sweep else 1

    def have_ended():
        return len(list(folder.glob("runs/tiny/*/exit.json"))) == num_runs

    wait_for(have_ended)  # submitit's jobs are not waited for
    ends = [json.loads(path.read_text()) for path in folder.glob("runs/tiny/*/exit.json")]
    assert [end["code"] for end in ends] == [0] * num_runs


@pytest.mark.slow
@pytest.mark.parametrize("words", [["layouts=ranks-2"], ["--resume", "kills=1"]], ids=str)
def test_prove_of_the_script_is_not_shadowed(words, folder):
    out = run_in(folder, "lockstep", "prove", *TINY[:2], "steps=5", *words)
    assert "proved" in out
