"""Every command in README and docs is run by a test, or needs hardware and the page says so."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from harness.launch import finished

ROOT = Path(__file__).resolve().parents[2]
# tests/project/test_migration_pages.py runs all commands of migrate.md.
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"),
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "migrate.md"),
]
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
COMMAND = re.compile(
    r"(?:    )?((?:make|pip|python|torchrun|lockstep|srun|sbatch|mpirun|kubectl|docker|source"
    r"|PIP_\w+=\S+) .*?)(?: +# .*)?"
)
# For commands that are not run here: the test that runs them, or the hardware that they need.
ELSEWHERE = {
    "make train": "CI",
    "make test": "CI",
    "make setup": "CI",
    "source .venv/bin/activate": "CI",
    "python -m trainer --config-dir conf task=spiral run.name=one": "test_new_task.py",
    "torchrun --nproc_per_node=2 -m trainer --config-dir conf task=spiral run.name=two": (
        "test_new_task.py"
    ),
    "python -m trainer.use runs/spiral/two": "test_new_task.py",
    "python -m trainer.show runs/text/first runs/text/second": "test_compare.py",
    "python -m trainer.show runs/spiral/one runs/spiral/two": "test_new_task.py",
    "python -m trainer.use runs/spiral/two split=test": "test_predict.py",
    "python -m trainer.use runs/spiral/two split=test out=test.parquet": ("test_predict.py"),
    "python -m trainer --config-dir conf task=spiral model=large": "test_new_project.py",
    "python -m trainer.sweep --config-dir conf task=spiral model=small,large": (
        "test_new_project.py"
    ),
    "python -m trainer.use runs/text/first out=model.onnx": "test_export.py",
    "pip install -c constraints.txt .": "test_packaging.py",
    "make train PIP_ARGS='--extra-index-url <URL>'": "needs an index of CPU wheels",
    "pip install -c constraints.txt --extra-index-url <URL> .": "needs an index of CPU wheels",
    "lockstep prove 'python train.py --batch-size 64' "
    "'torchrun --nproc_per_node=2 train.py --batch-size 32' steps=20": "test_ten_bugs.py",
    "lockstep prove 'python train.py {dir}' --resume 'python train.py {dir} --resume' "
    "kill=7": "test_ten_bugs.py",
    "torchrun --nproc_per_node=2 -m trainer task=lm task.options.model=Qwen/Qwen3-0.6B "
    "task.options.data=chat.jsonl task.options.lora=16 checkpoint.export=hf": "test_lm.py",
    "docker build -f scripts/deploy/Dockerfile -t lockstep:0.1.0 .": "test_packaging.py",
    "kubectl apply -f scripts/deploy/kubernetes.yaml -l lockstep=claim": "needs a cluster",
    "kubectl apply -f scripts/deploy/kubernetes.yaml -l lockstep=jobset": "needs a cluster",
    "kubectl logs -f -l jobset.sigs.k8s.io/jobset-name=lockstep-jobset": "needs a cluster",
}
OF_README = ("task=spiral strategy=exact run.name=one", "task=spiral strategy=exact run.name=two")
SMALL = {
    "task=text": [
        *("task.options.files=24", "task.options.context=16", "task.options.width=16"),
        *("task.options.layers=1", "task.options.heads=2", "eval.every_epochs=null"),
    ],
    "task=cifar": ["task.options.widths=[8,8,8]", "eval.every_epochs=null"],
}
SHORTER = {"run.steps=1000": "run.steps=12", "step=120": "step=3"}


def commands_of(text):
    """Return the command lines in blocks, without their comments."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    indented = re.findall(r"\n\n((?:    .+\n)+)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = "".join([*blocks, *indented]).splitlines()
    return [found[1] for line in lines if (found := COMMAND.fullmatch(line))]


# Commands of test_tutorial.py, which runs them in their order, and of test_ten_bugs.py
OF_A_FOLDER = ("tutorial.md", "five-tutorials.md", "ten-bugs.md")
HERE = [
    line
    for line in dict.fromkeys(
        line
        for name, text in TEXTS.items()
        if name not in OF_A_FOLDER
        for line in commands_of(text)
    )
    if line not in ELSEWHERE and not line.endswith(OF_README)  # run by test_new_task.py
]
OF_ONE_RUN = [line for line in HERE if re.search(r"runs/text/first|run\.name=first", line)]


def test_commands_are_found():
    assert len(commands_of(TEXTS["README.md"])) == 8 and len(HERE) >= 15
    assert set(ELSEWHERE) <= {line for text in TEXTS.values() for line in commands_of(text)}
    assert {line.split()[0] for line in HERE} == {"lockstep", "python", "torchrun"}


def test_tests_that_run_the_other_commands_are_there():
    for how in ELSEWHERE.values():
        for name in re.findall(r"test_\w+\.py", how):
            assert len([*(ROOT / "tests").glob(f"*/{name}")]) == 1, name


def test_each_image_is_on_a_page():
    images = {path.name for path in (ROOT / "docs/images").iterdir()}
    shown = {name for text in TEXTS.values() for name in re.findall(r"images/([\w-]+\.\w+)", text)}
    assert images == shown - {"open-in-kaggle.svg"}  # a badge on Kaggle's server


def test_what_never_ran_is_in_the_tables_of_one_page():
    tables = TEXTS["gpu.md"].partition("\n## What it cannot show\n")[2].partition("\n## ")[0]
    rows = "\n".join(re.findall(r"^\|(.*?)\|", tables, re.MULTILINE))
    assert all(word in rows for word in ("nccl", "TensorRT", "Kubernetes", "InfiniBand", "MPICH"))
    said = re.compile(r"\bnever\s+(been\s+)?run\b", re.IGNORECASE)
    assert [name for name, text in TEXTS.items() if said.search(text)] == ["gpu.md"]
    headings = re.findall(r"^##+ (.*)", TEXTS["gpu.md"], re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    for name, text in TEXTS.items():
        links = set(re.findall(r"gpu\.md#([\w-]+)", text))
        assert links <= anchors, f"{name} links to {links - anchors}"
        is_marked = "what-it-cannot-show" in links
        needs_cluster = "needs a cluster" in {ELSEWHERE.get(line) for line in commands_of(text)}
        assert is_marked or not needs_cluster, f"{name} does not mark its commands"


def test_scripts_targets_and_pages_that_docs_name_are_there():
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in PAGES:
        text = TEXTS[page.name]
        for name in re.findall(r"(?<![\w/])scripts/[\w/]+\.\w+", text):
            assert (ROOT / name).is_file(), f"{page.name} names {name}"
        for name in re.findall(r"`make ([a-z-]+)", text):
            assert name in targets, f"{page.name} names make {name}"
        for name in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (page.parent / name).exists(), f"{page.name} links to {name}"
        for name in re.findall(r'(?:src|srcset)="([^"]+)"', text):
            assert (page.parent / name).is_file(), f"{page.name} shows {name}"


def shortened(line):
    """Return the command line for a small model and few steps."""
    program, *words = [SHORTER.get(word, word) for word in shlex.split(line)]
    for task, small in SMALL.items():
        if task in words:
            words += small
            is_verify = "prove" in words
            if not is_verify and not any(word.startswith("run.steps=") for word in words):
                words.append("run.steps=3")
            if is_verify:
                words.append("steps=5")
    if program == "lockstep":
        return [str(Path(sys.executable).with_name("lockstep")), *words]
    if program == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
    return [sys.executable, *words]


def check(line, folder):
    code, text = finished(shortened(line), folder, folder / "log")
    assert code == 0, f"{line}\n{text[-4000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("line", sorted({*HERE} - {*OF_ONE_RUN}))
def test_command_runs(line, tmp_path):
    # verify and sweeps compare precisions and layouts: the page's arguments, on a small model
    check(line, tmp_path)


@pytest.mark.slow
def test_commands_about_one_run_work_in_the_order_of_the_pages(tmp_path):
    for line in OF_ONE_RUN:
        check(line, tmp_path)


def test_code_named_by_the_laws_is_there():
    """A function that moved to another file stayed on the page under its old one."""
    rows = re.findall(r"^\|\d+\. .*\|(.*)\|$", TEXTS["laws.md"], re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(rows) == 18 and len(named) > 30
    for name in named:
        path, _, function = name.partition("::")
        place = ROOT / "trainer" / path
        assert place.exists(), name
        assert not function or f"\ndef {function}(" in place.read_text(), name


def test_files_named_by_contributing_are_there():
    text = TEXTS["CONTRIBUTING.md"]
    files = re.findall(r"`([\w.]+(?:/[\w.]+)+)`", text)
    recipes = text.partition("## Recipes")[2].partition("## Limits")[0]
    assert len(re.findall(r"^\| an? ", recipes, re.MULTILINE)) == 9 and len(files) > 20
    places = (ROOT, ROOT / "trainer")
    missing = [name for name in files if not any((place / name).exists() for place in places)]
    assert not missing
    written = "\n".join(path.read_text() for path in [*(ROOT / "trainer").rglob("*.py")])
    names = re.findall(r"`(?:\w+\.)?([A-Za-z_]\w+)(?:\(\w*\)\S*)?`", recipes)
    code = [name for name in names if not re.search(rf"\b{name}\b", written)]
    assert not code
