"""trainer.new: projects that train, and whose tests pass; recipes; a script that becomes a task."""

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
from trainer.new.from_script import convert

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


def test_a_start_and_a_converted_script_can_be_for_a_cluster(command):
    (command.folder / "train.py").write_bytes((SCRIPTS / "plain_ddp.py").read_bytes())
    for name, words in {"one": [], "two": ["--from", "train.py"]}.items():
        done = command(name, *words, "--cluster=skypilot", verb="trainer.new")
        assert done.returncode == 0, done.stderr
        assert "on the cluster: sky jobs launch skypilot.yaml; " in done.stdout
        assert f"task={name} " in (command.folder / name / "skypilot.yaml").read_text()
        assert "wheels" in (command.folder / name / ".gitignore").read_text()
        assert "wheels" not in (command.folder / name / ".skyignore").read_text()


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


SCRIPTS = Path(__file__).with_name("scripts_to_convert")
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
            "[--recipe RECIPE | --from SCRIPT] [--cluster CLUSTER]",
        ),
        (
            ["x", "--recipes", "gpt"],
            "--recipes is not a flag: allowed are --recipe, --from, --cluster; "
            "did you mean --recipe?",
        ),
        (
            ["x", "recipe=gpt"],
            "recipe=gpt is not a flag: allowed are --recipe, --from, --cluster; "
            "did you mean --recipe?",
        ),
        (
            ["x", "--cluster", "slrum"],
            "--cluster slrum: must be one of ray, slurm, kubernetes, skypilot; did you mean slurm?",
        ),
        (["x", "--recipe=gpt", "--from=a.py"], "--recipe and --from: give only one of them"),
        (
            ["draw-pictures", "--recipe=images"],
            "draw-pictures: a file of the recipe has this name; choose another name",
        ),
        (
            ["x", "--from", "gone.py"],
            "--from gone.py: is not there; give a training script",
        ),
        (
            ["x", "--from", "none.py"],
            "--from none.py: must be a training script, with loss.backward() and optimizer.step(); "
            "python -m trainer.new NAME starts without one",
        ),
    ],
)
def test_wrong_flags_are_one_line(words, line, command):
    (command.folder / "none.py").write_text("print('it does not train')\n")
    done = command(*words, verb="trainer.new")
    assert done.returncode == 2 and done.stderr == f"error: {line}\n"


def test_a_script_that_is_clear_becomes_a_task_without_todos():
    made = convert(SCRIPTS / "plain_ddp.py")
    assert made.num_todos == 0 and made.notes() == []
    assert made.methods["build_model"] == ["return Net()"]
    assert made.methods["build_dataset"][1] == "    return rings(1024, 0)"
    assert made.settings == {
        "optim.lr": 0.01,
        "data.global_batch": 32,
        "run.epochs": 4,
        "run.seed": 0,
    }
    assert made.order == "seed=0, is_shuffled=True, advances=True"


def test_arguments_become_options_and_accumulation_a_global_batch():
    made = convert(SCRIPTS / "accumulated.py")
    assert made.methods["build_model"] == ["return build(self.options.length, self.options.hidden)"]
    assert made.options == {"length": 32, "hidden": 48}
    settings = {"data.global_batch": 32, "data.micro_batch": 16, "run.clip_norm": 1.0}
    assert settings.items() <= made.settings.items()
    assert made.settings["strategy.precision"] == "amp_bf16"
    assert made.methods["loss"] == [
        "return F.cross_entropy(outputs, targets, label_smoothing=0.1, reduction='none')"
    ]


def test_what_is_not_clear_is_a_todo_with_the_lines_of_the_script():
    made = convert(SCRIPTS / "odd.py")
    assert made.num_todos == 7
    for name in ("build_model", "build_dataset", "loss", "build_optimizer"):
        assert made.methods[name][-1] == "raise NotImplementedError"
    assert made.methods["build_model"] == [
        "# TODO: return the model, without DDP; here net is set at 2 places.",
        "#   line 14: net = nn.Linear(3, 1)",
        "#   line 16: net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))",
        "#   line 18: net = DDP(net)",
        "raise NotImplementedError",
    ]


CALL = "criterion(model(points), ring)"
ZERO = "nn.init.zeros_(model.module.layers[0].bias)"
CHANGES = [
    (CALL, f"{CALL} / 3", "loss", "not divided"),
    (CALL, "criterion(model(2 * points), ring)", "loss", "model(inputs)"),
    ("nn.CrossEntropyLoss()", "nn.CrossEntropyLoss(ignore_index=1)", "loss", "change its mean"),
    ("loss.backward()", "loss += 1\n            loss.backward()", "loss", "set at 2 places"),
    ("DDP(Net())", "DDP(Net(rank))", "build_model", "depends on the process"),
    ("rings(1024, 0)", "rings(1024, rank)", "build_dataset", "depends on the process"),
    ("optimizer.zero_grad()", "points = points.flip(1)", "train_step", "points.flip(1)"),
    ("train_set = ", f"{ZERO}\n    train_set = ", "build_model", ZERO),
]


@pytest.mark.parametrize("old, new, part, why", CHANGES)
def test_a_change_that_would_be_lost_is_a_todo(old, new, part, why, tmp_path):
    text = (SCRIPTS / "plain_ddp.py").read_text()
    assert text.count(old) == 1
    (tmp_path / "train.py").write_text(text.replace(old, new))
    lines = convert(tmp_path / "train.py").methods[part]
    assert any("TODO" in line for line in lines) and why in "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain_ddp", "accumulated"])
def test_the_task_of_a_script_is_proved_against_it_by_the_command_that_new_prints(name, command):
    (command.folder / "train.py").write_bytes((SCRIPTS / f"{name}.py").read_bytes())
    done = command("made", "--from", "train.py", verb="trainer.new")
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1].removeprefix("prove it with: cd made && python ")
    output = run(command.folder / "made", sys.executable, *shlex.split(line))
    assert "proved: both commands learned the same" in output
