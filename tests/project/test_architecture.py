"""The structure of the code: allowed imports, size budgets, and the names in a user's class.

A room is one level of the import order: a package, or some modules of the top level.
"""

import ast
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from harness.code_lines import code_lines

from trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "trainer"
FILES = sorted(PACKAGE.rglob("*.py"))
TASKS = sorted((ROOT / "tasks").rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (*FILES, *TASKS)}

# A module imports only from its own room and the rooms to its left.
ROOMS = [
    "core",  # codec, errors, micro_batch, blame, hook_calls, process/
    "config",
    "distributed",
    "schedule",
    "rng",
    "sandbox",  # run a block and leave no trace
    "data",
    "shards",
    "same",  # how far results are apart, and what is rounding
    "strategy",
    "engine",
    "checkpoints",
    "record",
    "task",
    "setup",
    "loop",  # loop/, trainer
    "package",  # __init__, tasks
    "verbs",
]
CORE = ("codec", "errors", "blame", "hook_calls", "micro_batch")
TOP_LEVEL = {
    "schedule": "schedule",
    "task": "task",
    **dict.fromkeys(CORE, "core"),
    "trainer": "loop",
    **dict.fromkeys(("__init__", "tasks"), "package"),
}
# In code lines: without blanks, comments and docstrings.
MOST_OF_A_FUNCTION = 40
MOST_OF_A_FILE = 300
MOST_OF_A_TASK = 170
MOST_IN_A_FOLDER = 15  # files
MOST_FILES = 250
SIZE = int((ROOT / "tests" / "size.txt").read_text().split()[0])  # code lines of trainer/
SLACK = 150  # so that shrinking forces the number down, and growing shows as a changed one
MOST_METHODS = 14  # public ones of a class, without properties
MOST_ATTRIBUTES = 12  # of an object
OF_OTHERS = ("Task", "MpiGroup")  # whose methods are the user's hooks, or torch's interface
MOST_TUPLES = 10  # assignments of a tuple to a tuple, per thousand lines
HEAVY = (
    *(
        "cloudpickle",
        "wandb",
        "mlflow",
        "trackio",
        "swanlab",
        "ray",
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
        "diffusers",
        "peft",
        "transformers",
        "torch.distributed.algorithms",
        "torch.distributed.device_mesh",
    ),
    *(
        "fsspec",
        "obstore",
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


def imports(tree: ast.AST) -> list[tuple[str, int]]:
    """Return (module, line) of each import, those for types included; `from trainer.x import y`
    counts as y if y is a module."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                found.append((below if below in NAMES else node.module, node.lineno))
    return found


LINES = {path: code_lines(path.read_text(encoding="utf-8"), tree) for path, tree in TREES.items()}


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
        is_free = place.startswith(("config/compose.py", "sweep/"))
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
        import trainer, trainer.show.__main__
        from trainer.config.compose import load_config
        from trainer.distributed.launchers import find_launcher
        from trainer.setup import check_soon
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


def test_the_house_has_the_size_that_is_written_down():
    size = sum(len(LINES[path]) for path in FILES)
    assert len(FILES) <= MOST_FILES, (
        "a new file takes the place of one: join two that belong together"
    )
    why = "write the number into tests/size.txt, and why it grew into docs/decisions.md"
    assert SIZE - SLACK <= size <= SIZE, f"{size} code lines: {why}"


def test_no_module_name_is_there_twice():
    """`base` stands beside its kind in several rooms; `__main__` and `command` answer a verb's
    command."""
    places: dict[str, list[str]] = {}
    for name in NAMES:
        places.setdefault(name.rpartition(".")[2], []).append(name)
    twice = {stem: found for stem, found in places.items() if len(found) > 1}
    assert not twice.keys() - {"base", "command", "__main__", "trainer", "engine", "shards"}, twice


def test_prove_serves_scripts_that_have_never_heard_of_lockstep():
    """It imports errors, the terminal, hints, pages and process/, and nothing that knows a run; its
    verb proves tasks too (verify/). pages/ imports errors and what replaces files."""
    known = {
        "prove": ("prove", "errors", "cli", "config.typed", "process", "pages"),
        "pages": ("pages", "errors", "checkpoints.disk"),
    }
    for room_name, allowed in known.items():
        for path in (PACKAGE / room_name).rglob("*.py"):
            for name, line in imports(TREES[path]):
                below = name.removeprefix("trainer.")
                # same.distance loads torch
                is_ours = name.startswith("trainer.") and below != "same"
                if path.stem == "__main__" and below.startswith("verify."):
                    continue
                is_known = any(f"{below}.".startswith(f"{each}.") for each in allowed)
                assert is_known or not is_ours, f"{path}:{line} imports {name}"


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


# torch's and Python's private names, which classes of ours bear too
TORCHS = {"_apply", "_exit", "_modules", "_parameters", "_shapes"}


def test_no_room_reaches_for_a_private_attribute_of_another_rooms_class():
    def room_of(path: Path) -> str:  # each verb is a room
        parts = path.relative_to(PACKAGE).parts
        return parts[0] if len(parts) > 1 and room(path) == "verbs" else room(path)

    homes: dict[str, set[str]] = {}
    for path in FILES:
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.ClassDef):
                names = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                assigned = [each for each in node.body if isinstance(each, ast.Assign)]
                targets = [target for each in assigned for target in each.targets]
                targets += [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
                for name in names | attributes_of(node):
                    homes.setdefault(name, set()).add(room_of(path))
    for path in FILES:
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.Attribute) and node.attr[0] == "_" and node.attr[:2] != "__":
                known = homes.get(node.attr, set())
                is_foreign = known and room_of(path) not in known and node.attr not in TORCHS
                assert not is_foreign, f"{path}:{node.lineno} {ast.unparse(node)}: of {known}"


KNOWN = {
    "BaseContainer._resolvers",  # OmegaConf's registry, restored afterwards
    *("layer.__class__", "layer.groups", "layer.process_group"),  # BatchNorm is converted in place
    "metric.process_group",  # torchmetrics' own attribute
    "group.post_backward",  # of FSDP2's units
    *("optimizer.step", "inner.state"),  # gathered around, and shared with what wraps it
    *("block.forward", "made._axis", "made._length", "made._dim"),  # of a tensor being made
    *("task._run", "task.config", "task.world"),  # by functions beside Trainer
    "parameter.data",  # put back after a pass has replaced it
    "made._metadata",  # of a state_dict that is copied
    "tempfile.tempdir",  # restored afterwards
    "mpi4py.rc.thread_level",
    "utils.set_sigterm_handler",  # of Ray, which would replace our handler of SIGTERM
    "report.has_weight",  # of a report that is being built
    "report.is_stop_requested",
    "report.is_skipped",
    "self._extras.grad",
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
    "tensor.data",  # of one that a pass has cast in place
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
    *("collate", "prepare", "predict", "samples"),
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
