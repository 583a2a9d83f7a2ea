"""trainer.new: projects that train, and whose tests pass; recipes."""

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from harness.launch import environment_of_a_command

import trainer
from trainer import load_config
from trainer.new import CLUSTERS, RECIPES

WIDTH = "task.options.width=9"
ROOT = Path(__file__).resolve().parents[2]
WORD = r"__[A-Z]+__"  # of a template


@pytest.fixture
def project(command):
    done = command("my-spiral", verb="trainer.new")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "written: my-spiral/, 13 files; its README.md says what each is for\n"
        "begin with: cd my-spiral && python -m trainer task=my-spiral\n"
    )
    return command.folder / "my-spiral"


def run(project, *words):
    environment = environment_of_a_command()
    done = subprocess.run(words, cwd=project, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_nothing_of_the_template_is_left(project):
    files = {path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file()}
    assert {"my_spiral.py", "conf/task/my-spiral.yaml", "tests/test_my_spiral.py"} <= files
    for name in files:
        text = (project / name).read_text()
        assert not re.search(WORD, text), name
    required = (project / "requirements.txt").read_text().splitlines()
    assert f"lockstep-trainer[export,report]=={trainer.__version__}" in required


def test_commands_for_agents_are_commands(project, command):
    """Those of AGENTS.md are understood as they stand; training and proofs run in other tests."""
    text = (project / "AGENTS.md").read_text()
    lines = re.findall(r"`python -m (trainer[^`]*)`", text)
    assert {line.split()[0] for line in lines} >= {"trainer", "trainer.prove", "trainer.check"}
    for line in lines:
        verb, *words = line.split()
        if verb == "trainer.show":
            words = [word.replace("/one", "/try").replace("/other", "/try") for word in words]
        if verb != "trainer.prove":
            done = command(*words, verb=verb, folder=project)
            assert done.returncode == 0, (line, done.stderr)
    assert re.search(r"^## |^# Notes", text) and len(text.split()) < 450


@pytest.mark.slow
def test_its_requirements_are_met_by_the_wheel_in_wheels(project, wheel, tmp_path):
    (project / "wheels").mkdir()
    (project / "wheels" / wheel.name).write_bytes(wheel.read_bytes())
    lines = (project / "requirements.txt").read_text().splitlines(keepends=True)
    own = [line for line in lines if not line.startswith("pytest")]  # no index is asked
    (project / "requirements.txt").write_text("".join(own))
    options = ["--dry-run", "--no-index", "--no-deps", "--force-reinstall", "-q"]
    words = ["install", *options, "--report", str(tmp_path / "report.json"), "-r"]
    run(tmp_path, sys.executable, "-m", "pip", *words, str(project / "requirements.txt"))
    (chosen,) = json.loads((tmp_path / "report.json").read_text())["install"]
    assert chosen["download_info"]["url"].endswith(f"wheels/{wheel.name}")


@pytest.mark.parametrize("name", ["resident-dataset", "trainer-task"])
def test_a_name_that_the_template_uses_is_a_task_too(name, command):
    assert command(name, verb="trainer.new").returncode == 0
    done = command(f"task={name}", "run.steps=1", folder=command.folder / name)
    assert done.returncode == 0, done.stderr


def test_a_folder_nearby_is_no_module(command, monkeypatch):
    (command.folder / "other").mkdir()
    done = command("place/other", verb="trainer.new")
    assert done.returncode == 0, done.stderr
    done = command("other", verb="trainer.new")
    assert done.stderr == "error: other: already exists; choose another name\n"


def test_a_path_and_capitals_are_names_too(command):
    done = command("some/MyTask2", verb="trainer.new")
    assert done.returncode == 0, done.stderr
    text = (command.folder / "some/MyTask2/MyTask2.py").read_text()
    assert "class MyTask2(Trainer):" in text
    words = ["task=MyTask2", "run.epochs=1"]
    assert command(*words, folder=command.folder / "some/MyTask2").returncode == 0


@pytest.mark.slow
def test_its_own_test_passes(project):
    output = run(project, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert "2 passed" in output


def test_its_config_group(project, command):
    words = ["task=my-spiral", "run.steps=2", "eval.every_epochs=null"]
    sizes = {"small": 1251, "large": 50307}
    for model, size in {"": sizes["small"], **sizes}.items():
        more = [f"model={model}"] if model else []
        done = command(*words, *more, f"run.name=m-{model}", folder=project)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"model   Sequential, {size:,} parameters" in done.stdout
    saved = (project / "runs/my-spiral/m-large/config.json").read_text()
    assert '"width": 128' in saved and '"layers": 4' in saved
    resumed = command("run.resume=runs/my-spiral/m-large", "run.steps=3", folder=project)
    assert resumed.returncode == 0 and "model   Sequential, 50,307 parameters" in resumed.stdout


def test_a_choice_on_the_command_line_wins_over_the_tasks_own_values(project):
    text = (project / "conf/task/my-spiral.yaml").read_text()
    assert "  options: {}\n" in text
    fixed = text.replace("  options: {}\n", "  options: {width: 7, layers: 3}\n")
    (project / "conf/task/fixed.yaml").write_text(fixed)
    for words, width in ([], 7), (["model=large"], 128), (["model=large", WIDTH], 9):
        config = load_config(["task=fixed", *words], [str(project / "conf")])
        assert config.task.options["width"] == width


@pytest.mark.parametrize(
    "words, line",
    [
        (
            ["task=my-spiral", "model=huge"],
            "model=huge: must be one of large, small; your own is <folder>/model/huge.yaml, with "
            "--config-dir <folder>",
        ),
        (["task=my-spiral", "modle=large"], "modle is not a setting; did you mean model?"),
        (
            ["task=cifar", "model=large"],
            "model=large: the task does not use this group; "
            "add '- /model: <name>' to the defaults in the task's file",
        ),
    ],
)
def test_mistakes_with_a_group_are_one_line(words, line, project, command):
    done = command(*words, folder=project)
    assert done.returncode == 2 and done.stderr == f"error: {line}\n"


@pytest.mark.slow
def test_help_and_sweeps_know_the_group(project, command):
    assert "  model      large, small" in command("--help", folder=project).stdout
    words = ["task=my-spiral", "model=small,large", "run.epochs=1", "launch=inline"]
    done = command(*words, verb="trainer.sweep", folder=project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"compare with: python -m trainer.show runs/sweeps/\S+ ", done.stdout)


@pytest.mark.slow
def test_cell_of_a_notebook(project, command):
    cell = re.search(r"```python\n(.*?)```", (project / "README.md").read_text(), re.DOTALL)[1]
    (project / "cell.py").write_text(cell + "\nprint(summary.step)\n")
    assert run(project, sys.executable, "cell.py").endswith("\n60\n")


def test_code_and_files_pass_the_linters(project):
    python = sorted(str(path) for path in project.rglob("*.py"))
    ruff = Path(sys.executable).parent / "ruff"
    if ruff.is_file():
        options = ["--isolated", "--line-length=100"]
        run(project, str(ruff), "check", "--select=E,F,B,UP", *options, *python)
        run(project, str(ruff), "format", "--check", *options, *python)
    run(project, "bash", "-n", "train.sbatch")
    linter = Path(sys.executable).parent / "hadolint"
    if linter.is_file():
        run(project, str(linter), "--no-color", "Dockerfile")


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_recipe_for_a_cluster_has_its_file(cluster, command):
    done = command("My_run", "--recipe", "gan", "--cluster", cluster, verb="trainer.new")
    own, folder = CLUSTERS[cluster], command.folder / "My_run"
    assert done.returncode == 0, done.stderr
    assert f"on the cluster: {own.command}; {own.place} says what to change" in done.stdout
    assert f"On the cluster: `{own.command}`; " in (folder / "README.md").read_text()
    text = (folder / own.place).read_text()
    assert "task=My_run" in text and own.place in text
    assert "cifar" not in text and "scripts/deploy" not in text and "lockstep-runs" not in text
    assert "tests/" not in text and "docs/" not in text
    extras = (folder / "requirements.txt").read_text()
    assert f"lockstep-trainer[{','.join(filter(None, ['report', own.extras]))}]" in extras
    assert (folder / "Dockerfile").exists() is (cluster == "kubernetes")
    if own.place.endswith(".yaml"):
        assert [*yaml.safe_load_all(text)]
    else:
        run(folder, "bash", "-n", own.place)


def test_a_starter_can_be_for_a_cluster(command):
    done = command("one", "--cluster=skypilot", verb="trainer.new")
    assert done.returncode == 0, done.stderr
    assert "on the cluster: sky jobs launch skypilot.yaml; " in done.stdout
    assert "task=one " in (command.folder / "one/skypilot.yaml").read_text()
    assert "wheels" in (command.folder / "one/.gitignore").read_text()
    assert "wheels" not in (command.folder / "one/.skyignore").read_text()


def test_a_notebook_for_a_cluster_is_refused(command):
    done = command("x", "--recipe", "notebook", "--cluster", "slurm", verb="trainer.new")
    said = "error: --recipe notebook: starts no ranks on a cluster; leave out --cluster\n"
    assert (done.returncode, done.stderr) == (2, said)
    assert not (command.folder / "x").exists()


@pytest.mark.parametrize(
    "name, line",
    [
        ("torch", "torch: Python has a module torch already; choose another name"),
        ("class", "class: means something else to Python or YAML; choose another name"),
        ("no", "no: means something else to Python or YAML; choose another name"),
        ("nan", "nan: means something else to Python or YAML; choose another name"),
        ("A b", "'A b': must be letters, digits, - and _, at most 40, as in my-task"),
        ("..", "'..': must be letters, digits, - and _, at most 40, as in my-task"),
        ("text", "text: is a built-in task; choose another name"),
        ("my-spiral", "my-spiral: already exists; choose another name"),
    ],
)
def test_names_that_cannot_be(name, line, project, command):
    done = command(name, verb="trainer.new")
    assert done.returncode == 2 and done.stderr == f"error: {line}\n"


def test_printed_commands_can_be_pasted_for_any_folder(command):
    """All folders of the other tests have plain names."""
    done = command("a;touch x $(id)/my-task", "--json", verb="trainer.new")
    assert done.returncode == 0, done.stderr
    words = shlex.split(json.loads(done.stdout)["command"])
    assert words[:3] == ["cd", "a;touch x $(id)/my-task", "&&"]
    again = command("a;touch x $(id)/my-task", verb="trainer.new")
    assert again.returncode == 2 and "already exists" in again.stderr
    line = command("b c/my-task", verb="trainer.new").stdout.splitlines()[1]
    assert line == "begin with: cd 'b c/my-task' && python -m trainer task=my-task"


def test_a_folder_with_a_tilde_is_in_the_home(command, tmp_path):
    home = {"HOME": str(tmp_path / "home")}
    done = command("~/my-task", verb="trainer.new", environment=home)
    assert f"cd {tmp_path}/home/my-task &&" in done.stdout, done.stderr
    assert (tmp_path / "home/my-task/README.md").is_file() and not (tmp_path / "~").exists()
    done = command("~nobody-of-this-name/my-task", verb="trainer.new")
    line = "~nobody-of-this-name/my-task: has no home directory; give another folder"
    assert (done.returncode, done.stderr) == (2, f"error: {line}\n")


def no_room_at(file_number):
    """Return a function after which writing the file of this number fails as on a full disk."""

    def before():
        write, written = Path.write_text, []

        def write_some(path, *arguments, **options):
            written.append(path)
            if len(written) == file_number:
                write(path, "half")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return write(path, *arguments, **options)

        Path.write_text = write_some

    return before


def test_a_full_disk_leaves_no_part_of_a_project(command, tmp_path):
    """Half of it stayed, and the name then "already exists"."""
    (tmp_path / "there").mkdir()
    for folder in ("my-task", "there/my-task", "new/deep/my-task"):
        for number in (1, 7, 13):
            done = command(folder, verb="trainer.new", before=no_room_at(number))
            line = f"error: {folder}: No space left on device; start in another directory\n"
            assert (done.returncode, done.stderr) == (2, line)
            assert [*tmp_path.rglob("*")] == [tmp_path / "there"]
    assert command("new/deep/my-task", verb="trainer.new").returncode == 0
    assert [path.name for path in (tmp_path / "new/deep").iterdir()] == ["my-task"]


def test_a_link_to_nowhere_is_a_name_that_exists(command, tmp_path):
    (tmp_path / "my-task").symlink_to("nowhere")
    done = command("my-task", verb="trainer.new")
    assert done.stderr == "error: my-task: already exists; choose another name\n"


@pytest.mark.slow
def test_in_a_notebook(project):
    """A real kernel runs the cell."""
    pytest.importorskip("ipykernel")
    client = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    cell = re.search(r"```python\n(.*?)```", (project / "README.md").read_text(), re.DOTALL)[1]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    client.NotebookClient(notebook, resources={"metadata": {"path": str(project)}}).execute()
    assert "eval/accuracy" in str(notebook.cells[0].outputs)


OF_A_CELL = """
import torch
from torch import nn
from trainer import ResidentDataset, Trainer, load_config

torch.ones(3, requires_grad=True).sum().backward()  # the kernel has used torch

class Toy(Trainer):
    def build_dataset(self, split):
        inputs = torch.randn(200, 4, generator=torch.Generator().manual_seed(len(split)))
        return ResidentDataset(inputs, (inputs[:, 0] > 0).long())

    def build_model(self):
        return nn.Linear(4, 2)

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

Toy(load_config(["run.epochs=2", "data.global_batch=50", "run.name=nb"], task=Toy)).fit()
"""


@pytest.mark.slow
def test_task_of_a_cell_needs_no_file(tmp_path):
    client = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    longer = 'Toy(load_config(["run.resume=runs/toy/nb", "run.epochs=4"], task=Toy)).fit()'
    cells = [OF_A_CELL, "load_config(['run.epohcs=4'], task=Toy)", longer + ".step"]
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
    place = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(notebook, resources=place, allow_errors=True).execute()
    first, wrong, last = (cell.outputs for cell in notebook.cells)
    said = "".join(output.get("text", "") for output in first)
    assert f"train longer with: {longer}" in said and "step 8/8" in said
    assert "\rstep 8/8  loss" in said  # over the line before
    line = "error: run.epohcs is not a setting; did you mean run.epochs?"
    assert [output["traceback"] for output in wrong] == [[line]]
    assert last[-1]["data"]["text/plain"] == "16"


@pytest.mark.slow
def test_several_ranks_from_a_cell(tmp_path):
    """The kernel has used autograd: a fork of it could hang. Evaluation and resume find the run."""
    client = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    pytest.importorskip("cloudpickle")
    define, _, _ = OF_A_CELL.rpartition("\n\nToy(")
    words = '["run.epochs=2", "data.global_batch=50", "run.name=two", "strategy=exact"]'
    alone = words.replace("two", "one")
    cells = [
        define + "\nclass Wrong(Toy):\n    def loss(self, outputs, targets): return targets.gone",
        f"toy = Toy(load_config({words}, task=Toy))\ntoy.launch(ranks=2).metrics == toy.evaluate()",
        f"Toy(load_config({alone}, task=Toy)).fit().metrics == toy.evaluate()",
        'Toy(load_config(["run.resume=runs/toy/two", "run.epochs=4"], task=Toy)).launch(3).step',
        f"Toy(load_config({words}, task=Toy)).launch(2)",
        f"Wrong(load_config({words.replace('two', 'bad')}, task=Wrong)).launch(2)",
    ]
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
    place = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(notebook, resources=place, allow_errors=True).execute()
    _, both, one, longer, used, wrong = (cell.outputs for cell in notebook.cells)
    said = "".join(output.get("text", "") for output in both)
    assert "2 ranks on 1 node" in said and "step 8/8" in said
    assert 'train longer with: Toy(load_config(["run.resume=runs/toy/two", ' in said
    assert "task=Toy)).launch(2)" in said
    for outputs, text in ((both, "True"), (one, "True"), (longer, "16")):
        assert outputs[-1]["data"]["text/plain"] == text
    assert "runs/toy/two exists and is not being resumed" in used[-1]["traceback"][0]
    assert "has no attribute 'gone'" in str(wrong)


@pytest.mark.slow
def test_interrupted_cell_saves_and_names_the_next_call(tmp_path):
    """Ctrl-C reaches the ranks once, as a stop request."""
    pytest.importorskip("cloudpickle")
    define, _, _ = OF_A_CELL.rpartition("\n\nToy(")
    call = 'Toy(load_config(["run.steps=100000", "run.name=long"], task=Toy)).launch(2).exit_code'
    script = f"{define}\nprint('code', {call}, flush=True)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.startswith("step "):
            os.kill(process.pid, signal.SIGINT)
            break
    rest = process.communicate(timeout=60)[0]
    assert "stopped by SIGTERM" in rest and "code 75" in rest and process.returncode == 0
    assert 'resume with: Toy(load_config(["run.resume=runs/toy/long"], task=Toy)).launch(2)' in rest


OF_A_RECIPE = {
    "finetune": ["transformers", "datasets"],
    "images": ["PIL"],
    "lora": ["transformers", "peft"],
    "chat": ["transformers"],
}


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_recipe_is_a_small_project_with_a_test_and_what_it_reaches(recipe, command):
    done = command("own", "--recipe", recipe, verb="trainer.new")
    assert done.returncode == 0, done.stderr
    begin = f"begin with: cd own && {' && '.join((*RECIPES[recipe].before, RECIPES[recipe].train))}"
    assert done.stdout.splitlines()[-1] == begin.replace("__NAME__", "own")
    files = [path for path in (command.folder / "own").rglob("*") if path.is_file()]
    assert len(files) <= 9
    for path in files:
        assert not re.search(WORD, path.read_text()), path
    readme = (command.folder / "own/README.md").read_text()
    assert RECIPES[recipe].reaches in readme and len(readme.splitlines()) <= 25
    assert re.search(r"\d.* within \d+ minutes? on 2 busy CPU cores$", RECIPES[recipe].reaches)
    python = [str(path) for path in files if path.suffix == ".py"]
    ruff = Path(sys.executable).parent / "ruff"
    if ruff.is_file():
        options = ["--isolated", "--line-length=100"]
        run(command.folder, str(ruff), "check", "--select=E,F,B,UP", *options, *python)
        run(command.folder, str(ruff), "format", "--check", *options, *python)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_recipe_trains_and_its_test_passes(recipe, command):
    for name in OF_A_RECIPE.get(recipe, []):
        pytest.importorskip(name)
    command(f"my-{recipe}", f"--recipe={recipe}", verb="trainer.new")
    project = command.folder / f"my-{recipe}"
    recipe_of = RECIPES[recipe]
    commands = [*recipe_of.before, recipe_of.train] if recipe != "notebook" else []
    for line in commands:
        program, *words = shlex.split(line.replace("__NAME__", project.name))
        words = ["run.steps=2" if word.startswith("run.steps=") else word for word in words]
        more = ["run.steps=2"] if line == recipe_of.train else []
        assert program == "python"
        run(project, sys.executable, *words, *more)
    output = run(project, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert "2 passed" in output


def test_a_recipe_without_a_name_is_named_after_it(command):
    done = command("--recipe", "gan", verb="trainer.new")
    assert done.stdout.endswith("begin with: cd my-gan && python -m trainer task=my-gan -n 2\n")


ALL = ", ".join(RECIPES)


@pytest.mark.parametrize(
    "words, line",
    [
        (["x", "--recipe", "gtp"], f"--recipe gtp: must be one of {ALL}; did you mean gpt?"),
        (["x", "--recipe=image"], f"--recipe image: must be one of {ALL}; did you mean images?"),
        (
            ["x", "--recipe"],
            "--recipe: its value is missing; give one name: python -m trainer.new NAME "
            "[--recipe RECIPE] [--cluster CLUSTER]",
        ),
        (
            ["x", "--recipes", "gpt"],
            "--recipes is not a flag: allowed are --recipe, --cluster; did you mean --recipe?",
        ),
        (
            ["x", "recipe=gpt"],
            "recipe=gpt is not a flag: allowed are --recipe, --cluster; did you mean --recipe?",
        ),
        (
            ["x", "--cluster", "slrum"],
            "--cluster slrum: must be one of ray, slurm, kubernetes, skypilot; did you mean slurm?",
        ),
        (
            ["draw-pictures", "--recipe=images"],
            "draw-pictures: a file of the recipe has this name; choose another name",
        ),
    ],
)
def test_wrong_flags_are_one_line(words, line, command):
    done = command(*words, verb="trainer.new")
    assert done.returncode == 2 and done.stderr == f"error: {line}\n"
