"""The wheel in an environment of its own, in a folder that has another `trainer`."""

import os
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
    assert '"fits"' in run(place / "lockstep", "plan", "task=text", "--json")
    assert "task=cifar" in run(place / "lockstep", "completion", "--", "lockstep", "task=")
    code = "import trainer.config; print(trainer.__file__)"
    shown = run(place / "python", "-c", f"import sys; sys.path.remove(''); {code}")
    assert Path(shown.strip()).is_relative_to(place.parent)
