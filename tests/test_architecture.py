"""The shape of the code: who may import whom, and how large it may grow."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = [
    ["errors", "typed", "config", "guard", "targets"],
    ["distributed"],
    [
        "data",
        "means",
        "precision",
        "schedule",
        "checkpoint",
        "packing",
        "rundir",
        "writers",
        "report",
        "ema",
        "lease",
    ],
    ["strategy"],
    ["task", "fingerprint", "session", "scoring", "diagnosis", "trainer"],
    ["__init__", "tasks"],
    [
        *(
            "__main__",
            "evaluate",
            "audit",
            "checkpoints",
            "recording",
            "verify",
            "replay",
            "submit",
            "search",
            "sweep",
        ),
        "doctor",
    ],
]
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
FILES = sorted((ROOT / "trainer").rglob("*.py"))
HEAVY = {
    "hydra",
    "mpi4py",
    "omegaconf",
    "yaml",
    "rich",
    "safetensors",
    "submitit",
    "tensorboard",
    "numpy",
} | {"torch.utils.tensorboard"}
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def room(path: Path) -> str:
    parts = path.relative_to(ROOT / "trainer").with_suffix("").parts
    return parts[0]


def imports(tree: ast.AST) -> list[tuple[str, int]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [
                (n, node.lineno)
                for n in (submodules if node.module == "trainer" else [node.module])
            ]
    return found


def test_every_room_has_its_layer():
    assert {room(path) for path in FILES} == set(LAYER)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_room_imports_only_from_its_layer_or_above(path):
    for name, line in imports(TREES[path]):
        if name.startswith("trainer."):
            other = name.split(".")[1]
            if other in LAYER:
                assert LAYER[other] <= LAYER[room(path)], f"{path}:{line} imports {name}"


def test_there_are_no_cycles():
    graph = {
        p: {n for n, _ in imports(t) if n.startswith("trainer.")}
        for p, t in TREES.items()
        if p.stem != "__init__"
    }
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in graph}
    done: set[str] = set()

    def visit(name, trail):
        assert name not in trail, f"{' -> '.join([*trail, name])}"
        if name not in done and name in names:
            for other in graph[names[name]]:
                visit(other, [*trail, name])
            done.add(name)

    for name in names:
        visit(name, [])


def test_only_config_and_the_verbs_know_hydra():
    for path, tree in TREES.items():
        if room(path) not in ("config", "guard", "__main__", "search", "submit"):
            assert not [n for n, _ in imports(tree) if n.split(".")[0] in ("hydra", "omegaconf")], (
                path
            )


def test_imports_inside_functions_are_of_heavy_packages_only():
    """Two verbs answer much without torch: there what loads it is imported where it is used."""
    for path, tree in TREES.items():
        inside = [imports(f) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
        for name, line in (pair for pairs in inside for pair in pairs):
            is_heavy = any(name == heavy or name.startswith(f"{heavy}.") for heavy in HEAVY)
            assert is_heavy or room(path) in ("__main__", "checkpoints"), f"{path}:{line}"


def test_what_can_be_told_without_torch_is_told_without_it():
    code = """if True:
        import sys
        import trainer, trainer.checkpoints
        from trainer import load_config
        from trainer.distributed.launchers import find_launcher
        from trainer.record.gate import check_soon
        check_soon(load_config(["task=cifar"]), find_launcher())
        print("torch" in sys.modules)"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "False"


def code_lines(tree: ast.Module, text: str) -> set[int]:
    lines = {
        i
        for i, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#")
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node, clean=False
        ):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def test_code_stays_within_its_budgets():
    total = 0
    for path, tree in TREES.items():
        lines = code_lines(tree, path.read_text(encoding="utf-8"))
        assert len(lines) <= 350, path
        total += len(lines) if LAYER[room(path)] <= 5 else 0
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                size = len([line for line in lines if node.lineno <= line <= node.end_lineno])
                assert size <= 40, f"{path}:{node.lineno} {node.name}: {size} code lines"
    assert total <= 4900, total
    for task in (ROOT / "tasks").glob("*.py"):
        assert len(task.read_text(encoding="utf-8").splitlines()) <= 150, task


def test_every_value_of_a_closed_group_stands_in_one_yaml():
    """A dataclass of the config has no defaults: values are in conf/."""
    for node in ast.walk(TREES[ROOT / "trainer/config.py"]):
        if isinstance(node, ast.ClassDef):
            assert not [
                s for s in node.body if isinstance(s, ast.AnnAssign) and s.value is not None
            ], node.name
