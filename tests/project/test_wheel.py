"""The wheel in an environment of its own, in a folder that has another `trainer`."""

import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def place(tmp_path_factory, wheel):
    """Return the programs of an environment with the wheel; its dependencies are this one's."""
    folder = tmp_path_factory.mktemp("venv")
    pip = ["-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # without the .pth files of this environment, one of which names the checkout
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()))
    python = folder / "bin/python"
    subprocess.run([python, *pip, "install", "--no-deps", wheel], check=True, cwd=folder)
    return folder / "bin"


@pytest.mark.slow
def test_lockstep_works_beside_a_trainer_file_and_the_module_is_that_file(place, tmp_path):
    (tmp_path / "trainer.py").write_text("print('the file of this folder')\n")
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: object) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=own, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run(place / "python", "-m", "trainer") == "the file of this folder\n"
    assert run(place / "lockstep", "--version").startswith("Lockstep ")
    assert '"fits"' in run(place / "lockstep", "check", "task=text", "ranks=1", "--json")
    assert "cifar" in run(place / "lockstep", "list", "tasks")
    code = "import trainer.core.config; print(trainer.__file__)"
    shown = run(place / "python", "-c", f"import sys; sys.path.remove(''); {code}")
    assert Path(shown.strip()).is_relative_to(place.parent)


@pytest.mark.slow
def test_lockstep_names_the_package_that_has_overwritten_its_files(place, tmp_path):
    (packages,) = place.parent.glob("lib/python*/site-packages")
    about = packages / "coqui_tts_trainer-0.4.0.dist-info"
    init = packages / "trainer/__init__.py"
    original = init.read_text()
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def end(*words: object) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=own, capture_output=True, text=True)
        assert done.returncode and not done.stdout, done.stdout
        return f"{done.returncode} {done.stderr}"

    about.mkdir()
    (about / "METADATA").write_text("Name: coqui-tts-trainer\nVersion: 0.4.0\n")
    (about / "RECORD").write_text("trainer/__init__.py,,\n")
    repair = "pip install --force-reinstall --no-deps lockstep-trainer\n"
    try:
        init.write_text("from trainer.core.config import TrainerArgs, TrainerConfig\n")
        assert end(place / "lockstep", "task=text") == (
            "2 error: lockstep: coqui-tts-trainer installs a package trainer too, and has "
            "overwritten files of lockstep-trainer: give each an environment of its own; to "
            f"repair this one: pip uninstall coqui-tts-trainer, then {repair}"
        )
        last = end(place / "python", "-m", "trainer").splitlines()[-1]
        assert last.startswith("ImportError: trainer/__init__.py is missing, or overwritten by")
        (about / "RECORD").unlink()
        line = f"is not Lockstep's: take its folder out of PYTHONPATH, or {repair}"
        assert end(place / "lockstep") == f"2 error: lockstep: {init} {line}"
        init.unlink()
        line = "trainer/__init__.py is missing, as after the removal of another package"
        assert end(place / "lockstep") == f"2 error: lockstep: {line}: {repair}"
    finally:
        init.write_text(original)
        shutil.rmtree(about)
