"""The structure of the code: allowed imports, size budgets, and the names in a user's class.

A room is one level of the import order: a package, or some modules of the top level.
"""

import ast
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "trainer"
FILES = sorted(PACKAGE.rglob("*.py"))
TASKS = sorted((ROOT / "tasks").glob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (*FILES, *TASKS)}

# A module imports only from its own room and the rooms to its left.
ROOMS = [
    "core",  # codec, errors, micro_batch, hook_errors, process/
    "config",
    "distributed",
    "schedule",
    "rng",
    "data",
    "strategy",
    "engine",
    "checkpoints",
    "record",
    "task",
    "setup",
    "run",  # run, run_checkpoints, trainer
    "package",  # __init__, tasks
    "verbs",
]
RUN = ("run_checkpoints", "run", "trainer")
CORE = ("codec", "errors", "hook_errors", "micro_batch")
TOP_LEVEL = {
    "schedule": "schedule",
    "task": "task",
    **dict.fromkeys(CORE, "core"),
    **dict.fromkeys(RUN, "run"),
    **dict.fromkeys(("__init__", "tasks"), "package"),
}
# In code lines: without blanks, comments and docstrings.
MOST_OF_A_FUNCTION = 40
MOST_OF_A_FILE = 300
MOST_OF_A_TASK = 170
MOST_IN_A_FOLDER = 15  # files
MOST_METHODS = 14  # public ones of a class, without properties
MOST_ATTRIBUTES = 12  # of an object
MOST_OF_A_STEP = 1_500  # lines that one reads to know how a step works
STEP = (
    *("task", "trainer", "run", "engine/engine", "engine/objective"),
    *("strategy/base", "strategy/ddp", "data/order", "data/batches"),
)
OF_OTHERS = ("Task", "MpiGroup")  # whose methods are the user's hooks, or torch's interface
MOST_TUPLES = 10  # assignments of a tuple to a tuple, per thousand lines
HEAVY = (
    *(
        "cloudpickle",
        "wandb",
        "mlflow",
        "hydra",
        "mpi4py",
        "omegaconf",
        "optuna",
        "rich",
        "safetensors",
        "submitit",
        "tensorboard",
    ),
    *(
        "tomli",
        "tomllib",
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.algorithms",
        "torch.distributed.device_mesh",
    ),
    *(
        "fsspec",
        "PIL",
        "pyarrow",
        "zstandard",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch.utils.tensorboard",
        "yaml",
    ),
)


def room(path: Path) -> str:
    """Return the room of a file: its package, or at the top level that of its name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    first = parts[0] if len(parts) > 1 else TOP_LEVEL.get(parts[0], "verbs")
    if parts[-1] == "__main__":
        return "verbs"
    if first == "process":
        return "core"
    return first if first in ROOMS else "verbs"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path): path for path in FILES}


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports(tree: ast.AST, is_typing_counted: bool = False) -> list[tuple[str, int]]:
    """Return (module, line) of each import; `from trainer.x import y` counts as y if y is a
    module."""
    skipped = set()
    for node in ast.walk(tree):
        if is_for_types(node) and not is_typing_counted:
            skipped |= {id(below) for below in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                found.append((below if below in NAMES else node.module, node.lineno))
    return found


def code_lines(tree: ast.AST, text: str) -> set[int]:
    lines = {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#")
    }
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            doc = node.body[0]
            lines -= set(range(doc.lineno, (doc.end_lineno or doc.lineno) + 1))
    return lines


LINES = {path: code_lines(tree, path.read_text(encoding="utf-8")) for path, tree in TREES.items()}


def test_module_imports_only_from_rooms_to_its_left():
    for path in FILES:
        for name, line in imports(TREES[path]):
            if name in NAMES and name != "trainer":
                own = ROOMS.index(room(path))
                assert ROOMS.index(room(NAMES[name])) <= own, f"{path}:{line} imports {name}"


def test_there_are_no_cycles():
    graph = {name: {n for n, _ in imports(TREES[path])} for name, path in NAMES.items()}
    graph["trainer"] = set()  # the names that a task may import are loaded lazily
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        assert name not in trail, " -> ".join([*trail, name])
        if name not in done:
            for other in graph[name] & graph.keys():
                visit(other, [*trail, name])
            done.add(name)

    for name in graph:
        visit(name, [])


def test_only_composition_and_sweeps_know_hydra():
    for path in FILES:
        known = {n.split(".")[0] for n, _ in imports(TREES[path])} & {"hydra", "omegaconf"}
        place = path.relative_to(PACKAGE).as_posix()
        is_free = place.startswith(("config/compose.py", "config/yaml_source.py", "sweep/"))
        assert is_free or not known, place


def test_config_imports_no_torch_and_names_no_strategy():
    files = (PACKAGE / "strategy").glob("*.py")
    strategies = {path.stem for path in files if "\nSTRATEGY = " in path.read_text("utf-8")}
    for path in FILES:
        if room(path) != "config":
            continue
        assert not [n for n, _ in imports(TREES[path]) if n.split(".")[0] == "torch"], path
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in strategies - {"dp"}, f"{path}:{node.lineno}"


def test_imports_inside_functions_are_of_heavy_packages_or_in_verbs():
    """Verbs answer many requests without torch, so they import what loads it where it is used."""
    for path in FILES:
        for function in ast.walk(TREES[path]):
            if not isinstance(function, ast.FunctionDef) or room(path) == "verbs":
                continue
            for name, line in imports(function):
                assert name.startswith(HEAVY), f"{path}:{line} imports {name}"


def test_early_checks_do_not_import_torch():
    code = """if True:
        import sys
        import trainer, trainer.checkpoints.__main__
        from trainer.config.compose import load_config
        from trainer.distributed.launchers import find_launcher
        from trainer.setup.early_checks import check_soon
        check_soon(load_config(["task=cifar"]), find_launcher())
        print("torch" in sys.modules)"""
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"


def test_functions_and_files_keep_their_budgets():
    for path, tree in TREES.items():
        assert len(LINES[path]) <= (MOST_OF_A_FILE if path in FILES else MOST_OF_A_TASK), path
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inside = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                size = len(LINES[path] & set(inside))
                assert size <= MOST_OF_A_FUNCTION, f"{path}:{node.lineno} {node.name}: {size}"


def test_no_budget_is_met_by_squeezing():
    text = {
        f"{path}:{number}": line
        for path in TREES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    }
    assert not [place for place, line in text.items() if len(line) > 100]
    tuples = 0
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                tuples += isinstance(node.value, ast.Tuple)
    assert 1000 * tuples / len(text) <= MOST_TUPLES


def test_no_two_modules_differ_by_an_s():
    names = sorted({path.stem for path in FILES} | {path.parent.name for path in FILES})
    pairs = [(a, b) for a, b in pairwise(names) if f"{a}s" == b]
    assert pairs == [("task", "tasks")]  # saved configurations name trainer.tasks


def test_no_class_name_is_there_twice():
    classes: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(module_name(path))
    twice = {name: places for name, places in classes.items() if len(places) > 1}
    assert not {name: places for name, places in twice.items() if not name.startswith("_")}


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Return the names of the attributes that a class's methods set on `self`."""
    return {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and ast.unparse(target.value) == "self"
    }


def test_a_class_has_few_methods_and_attributes():
    for path in FILES:
        for node in ast.walk(TREES[path]):
            if not isinstance(node, ast.ClassDef) or node.name in OF_OTHERS:
                continue
            functions = [f for f in node.body if isinstance(f, ast.FunctionDef)]
            public = [
                f.name
                for f in functions
                if f.name[0] != "_"
                and not any("property" in ast.unparse(d) for d in f.decorator_list)
            ]
            assert len(public) <= MOST_METHODS, f"{path}: {node.name}: {public}"
            attributes = attributes_of(node)
            assert len(attributes) <= MOST_ATTRIBUTES, f"{path}: {node.name}: {sorted(attributes)}"


def test_a_step_is_read_in_an_hour():
    assert sum(len(LINES[PACKAGE / f"{name}.py"]) for name in STEP) <= MOST_OF_A_STEP


def test_a_folder_has_few_files():
    folders = {path.parent for path in FILES}
    counts = {f: len([path for path in f.glob("*.py") if path.stem[0] != "_"]) for f in folders}
    full = {str(folder): count for folder, count in counts.items() if count > MOST_IN_A_FOLDER}
    assert not full, f"more than {MOST_IN_A_FOLDER}: make a folder of one of them (f/__main__.py)"


def test_every_value_of_a_closed_group_is_in_a_yaml():
    """A dataclass of the schema has no defaults: values are in conf/."""
    for node in ast.walk(TREES[PACKAGE / "config/schema.py"]):
        if isinstance(node, ast.ClassDef):
            annotated = [s for s in node.body if isinstance(s, ast.AnnAssign)]
            values = [s for s in annotated if s.value and "NO_SETTING" not in ast.unparse(s.value)]
            assert not values, node.name


def test_no_object_sets_the_attributes_of_another():
    """Exceptions are `self`, `ctx` of an autograd function, and attributes that configure torch."""
    told = ("os.environ", "optimizer.grad_scale", "optimizer.found_inf", "parameter.grad")
    for path in FILES:
        for node in ast.walk(TREES[path]):
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets += [node.target] if isinstance(node, ast.AugAssign) else []
            for target in targets:
                if isinstance(target, ast.Attribute) and room(path) not in ("verbs", "package"):
                    written = ast.unparse(target)
                    owner = written.split(".")[0]
                    is_own = owner in ("self", "cls", "ctx", "signal", "threading", "socket")
                    is_torch = written.startswith(("torch.", "mpi4py.", *told))
                    is_foreign = not (is_own and written.count(".") == 1) and not is_torch
                    assert not is_foreign or written in KNOWN, f"{path}:{node.lineno} {written}"


KNOWN = {
    "BaseContainer._resolvers",  # OmegaConf's registry, restored afterwards
    *("layer.__class__", "layer.groups", "layer.process_group"),  # BatchNorm is converted in place
    "metric.process_group",  # torchmetrics' own attribute
    "group.post_backward",  # of FSDP2's units
    *("optimizer.step", "inner.state"),  # gathered around, and shared with what wraps it
    *("block.forward", "made._axis", "made._length", "made._dim"),  # of a tensor being made
    *("task._run", "task.config", "task.world"),  # by examine, a function beside Trainer
    "made._metadata",  # of a state_dict that is copied
    "mpi4py.rc.thread_level",
    "report.has_weight",  # of a report that is being built
    "report.is_stop_requested",
    "report.is_skipped",
    "self._ride.grad",
    "saved.run.name",  # of a configuration that is being composed
    "saved.run.resume",
    "module.forward",  # recomputed
    *(
        "local.grad",
        "whole.grad",
        "leaf.grad",
    ),  # of a shard of FSDP, and of the whole that its owner steps
    "worker.terminate",  # of a process of Lockstep's own context
    "context.Process",
    *("sys.excepthook", "os._exit", "builtins.open", "io.open"),  # replaced while they are watched
    *("sys.argv", "sys.stdout"),
    "parser.exit_on_error",
    "cell.cell_contents",  # of a closure, restored after a trial
}

FACE = {
    *("fit", "launch", "evaluate", "update", "optimizers", "save_checkpoint", "load_checkpoint"),
    *("config", "options", "Options", "world", "model", "step", "_run"),
    *("record", "stop", "gather_rows"),
}
HOOKS = {
    *("blocks", "sampling"),
    *("build_model", "build_dataset", "loss", "metrics", "summarize", "build_metrics"),
    *("tensor_plan", "augment", "split_batch", "build_optimizer", "build_schedule", "train_step"),
    *("collate", "prepare", "predict"),
}


def test_user_class_has_only_the_names_of_the_public_interface():
    names = {name for base in Trainer.__mro__[:-1] for name in vars(base)}
    ours = {name for name in names if not (name.startswith("__") and name.endswith("__"))}
    assert ours <= FACE | HOOKS
    written = {
        target.attr
        for path in (PACKAGE / "task.py", PACKAGE / "trainer.py")
        for node in ast.walk(TREES[path])
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
    }
    assert written <= FACE


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_module_and_public_functions_begin_with_a_plain_docstring(path):
    tree = TREES[path]
    doc = ast.get_docstring(tree)
    assert doc, path
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(tree):
        text = (ast.get_docstring(node) or "") if isinstance(node, kinds) else ""
        assert not text.startswith(("What ", "Whether ", "Of ")), f"{path}: {text[:60]}"
