"""The tutorials: commands print what the pages say, and the notebook runs in a kernel."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import free_port
from harness.launch import environment_of_a_command

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {"tutorial.md": 9, "five-tutorials.md": 4}  # at least so many blocks of commands
PORTS = ("29511", "29512")
NOTEBOOK = DOCS / "tutorial.ipynb"
TORCHRUN = "torchrun --standalone"  # a free port
BLOCK = re.compile(r"^```sh\n(.*?)^```\n(?:```\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)


@pytest.fixture
def environment():
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    return environment_of_a_command(PATH=path)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_commands_of_a_page_print_what_it_says(name, environment, tmp_path):
    """All in their order and in one folder, which the first command of the tutorial makes."""
    page = (DOCS / name).read_text(encoding="utf-8")
    ports = {port: str(free_port()) for port in PORTS}
    blocks = BLOCK.findall(page)
    assert len(blocks) == page.count("```sh\n") >= PAGES[name]
    for commands, output in blocks:
        script = commands.replace("torchrun --nproc", f"{TORCHRUN} --nproc")
        for port, free in ports.items():
            script = script.replace(port, free)
        folder = tmp_path / "first" if (tmp_path / "first").exists() else tmp_path
        words = ["bash", "-e", "-o", "pipefail", "-c", script]
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
        code = int("different: " in output)  # of a comparison
        assert done.returncode == code, commands + done.stdout + done.stderr
        rest = done.stdout
        for line in output.splitlines():
            _, is_there, rest = rest.partition(line)
            assert is_there, f"{commands}{line}\n{done.stdout}"


@pytest.mark.slow
def test_notebook_runs_from_top_to_bottom(environment, tmp_path):
    client = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    pytest.importorskip("cloudpickle")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(notebook, resources=place, timeout=300).execute(env=environment)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    said = "".join(output.get("text", "") for output in outputs)
    assert said.count("the same run up to rounding") == 2 and "the same bits" in said
    assert "saves agree with the recomputed order: nothing was repeated or skipped" in said
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_notebook_is_small_and_stores_no_outputs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code and not any(cell["outputs"] or cell["execution_count"] for cell in code)
    assert NOTEBOOK.stat().st_size < 10_000
