"""The structure of the code: allowed imports, sizes of packages, and the names in a user's class.

A room is one level of the import order of the core: a package, or some modules.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from harness.code_lines import code_lines

from trainer import Trainer
from trainer.core import api
from trainer.core.engine.trial import TaskRun

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "trainer"
FILES = sorted(PACKAGE.rglob("*.py"))
TASKS = sorted((ROOT / "tasks").rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (*FILES, *TASKS)}

# The rooms of the core. A module imports only from its own room and the rooms to its left.
ROOMS = [
    "loose",  # extensions, micro_batch, blame, hook_calls
    "config",
    "distributed",
    "schedule",
    "rng",
    "state",  # Python state: kept around a block, copied, compared
    "data",
    "strategy",
    "engine",
    "checkpoints",
    "record",
    "task",
    "setup",
    "loop",  # loop/, trainer
    "api",  # what companions may import, and nothing in the core
]
LOOSE = ("extensions", "blame", "hook_calls", "micro_batch")
# Beside the core: each knows base/, the core, the face, and the others that stand here.
COMPANIONS: dict[str, tuple[str, ...]] = {
    "mesh": (),
    "startup_checks": (),
    "shards": (),
    "places": (),
    "hf": ("shards",),
    "pages": (),
    "prove": ("pages", "verify"),
    "verify": ("startup_checks",),
    "show": ("pages",),
    "use": ("hf",),
    "sweep": (),
    "new": (),
    "check": ("mesh", "places", "shards"),
    "list": ("new", "pages", "show"),
}
# Friends: they work inside the engine, and know the core's modules. How many of their names each
# imports; a number may only become smaller.
INTERFACE = "trainer.core.api"
FRIENDS = {
    "mesh": 80,  # strategies: a step runs through them
    "startup_checks": 56,  # they run parts of a step
    "check": 75,  # a plan builds a run on fake tensors
    "verify": 27,  # it records what a step does
}
MOST_NAMES_OF_THE_INTERFACE = 90  # including names used through the modules that it exports
FACE = ("__init__", "__main__", "cli", "notebook", "schedule", "tasks", "train", "verbs")
# Whose modules answer many requests without torch, so they import what loads it where it is used.
LAZY = (
    *("face", "check", "hf", "list", "new", "pages"),
    *("places", "prove", "show", "sweep", "use", "verify"),
)
# In code lines: without blanks, comments and docstrings.
MOST_OF_A_FUNCTION = 40
MOST_OF_A_COMPANION = 6_000
MOST_OF_THE_CORE = 18_000  # its aim is 17,700
SLACK = 150  # so that shrinking forces the ledger down, and growing shows as a changed line
MOST_METHODS = 14  # public ones of a class, without properties
OF_OTHERS = ("Task", "MpiGroup")  # whose methods are the user's hooks, or torch's interface
MOST_TUPLES = 10  # assignments of a tuple to a tuple, per thousand lines
# Words that say nothing of a value, and the functions with a variable or an argument of that name.
# A number may only become smaller.
VAGUE = {
    "found": 8,
    "given": 5,
    "place": 4,
    "number": 11,
    "kept": 1,
    "made": 4,
    "known": 4,
}
HEAVY = (
    *(
        "cloudpickle",
        "wandb",
        "mlflow",
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


def unit(path: Path) -> str:
    """Return "base", "core", "face" or the companion that a file belongs to."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "face" if len(parts) == 1 else parts[0]


def room(path: Path) -> str:
    """Return the room of a file of the core; its unit for others."""
    parts = path.relative_to(PACKAGE / "core").with_suffix("").parts if unit(path) == "core" else ()
    if not parts:
        return unit(path)
    if parts[0] in (*LOOSE, "__init__"):
        return "loose"
    return "loop" if parts[0] == "trainer" else parts[0]


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


def test_module_of_the_core_imports_only_from_rooms_to_its_left():
    for path in FILES:
        if unit(path) != "core":
            continue
        for name, line in imports(TREES[path]):
            if name in NAMES and unit(NAMES[name]) == "core":
                assert ROOMS.index(room(NAMES[name])) <= ROOMS.index(room(path)), f"{path}:{line}"


def test_the_core_imports_no_companion_and_companions_only_those_of_the_table():
    assert {unit(path) for path in FILES} == {"base", "core", "face", *COMPANIONS}
    assert {path.stem for path in FILES if unit(path) == "face"} == {*FACE}
    for path in FILES:
        own = unit(path)
        known = {own, "base", *COMPANIONS.get(own, ())}
        known |= {"base": set(), "core": set()}.get(own, {"core", "face"})
        for name, line in imports(TREES[path]):
            if name not in NAMES or name == "trainer" or unit(NAMES[name]) in known:
                continue
            is_public = own == "face" and name == "trainer.shards.dataset"  # ShardedDataset
            assert is_public, f"{path}:{line} imports {name}"


def names_of_the_core(companion: str) -> set[tuple[str, str]]:
    """Return (module, name) of all that the files of a companion import from the core."""
    return {
        (str(node.module), alias.name)
        for path in FILES
        if unit(path) == companion
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("trainer.core")
        for alias in node.names
    }


def test_companions_know_the_core_by_its_interface():
    for path in FILES:
        for name, line in imports(TREES[path]) if unit(path) in COMPANIONS.keys() - FRIENDS else ():
            is_inside = name.startswith("trainer.core") and name != INTERFACE
            assert not is_inside, f"{path}:{line}: import {name} from {INTERFACE}, or do without"


def test_the_interface_has_few_names_and_each_is_used():
    tree = TREES[NAMES[INTERFACE]]
    for_types = {
        alias.name: str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("trainer.core.")
        for alias in node.names
    }
    assert for_types == api._HOMES  # what is found at run time is what types are checked by
    used: set[tuple[str, str]] = set()
    for path in FILES:
        if unit(path) not in COMPANIONS:
            continue
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.ImportFrom) and node.module == INTERFACE:
                for alias in node.names:
                    used |= names_through(alias, TREES[path])
    missing = for_types.keys() - {name for name, _ in used}
    assert not missing, f"no companion uses {missing}"
    assert len({inner or name for name, inner in used}) <= MOST_NAMES_OF_THE_INTERFACE


def names_through(alias: ast.alias, tree: ast.Module) -> set[tuple[str, str]]:
    """Return (name, "") of an import, or (module, name) of all that a file uses of a module."""
    if alias.name not in api._MODULES:
        return {(alias.name, "")}
    own = alias.asname or alias.name
    return {
        (alias.name, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == own
    }


def test_friends_know_fewer_and_fewer_names_of_the_core():
    counts = {friend: len(names_of_the_core(friend)) for friend in FRIENDS}
    assert all(count <= FRIENDS[who] for who, count in counts.items()), counts
    assert counts == FRIENDS, "write the smaller number into FRIENDS"


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
        homes = ("core/config/compose.py", "core/config/expansion.py", "sweep/")
        is_free = place.startswith(homes)
        assert is_free or not known, place


def test_config_imports_no_torch_and_names_no_strategy():
    files = [*(PACKAGE / "core/strategy").glob("*.py"), *(PACKAGE / "mesh").glob("*.py")]
    strategies = {path.stem for path in files if "\nSTRATEGY = " in path.read_text("utf-8")}
    for path in FILES:
        if room(path) != "config":
            continue
        assert not [n for n, _ in imports(TREES[path]) if n.split(".")[0] == "torch"], path
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in strategies - {"dp"}, f"{path}:{node.lineno}"


def test_imports_inside_functions_are_of_heavy_packages():
    for path in FILES:
        for function in ast.walk(TREES[path]):
            if not isinstance(function, ast.FunctionDef) or unit(path) in LAZY:
                continue
            for name, line in imports(function):
                assert name.startswith(HEAVY), f"{path}:{line} imports {name}"


def test_early_checks_do_not_import_torch():
    code = """if True:
        import sys
        import trainer, trainer.show.__main__
        from trainer.core.config.compose import load_config
        from trainer.core.distributed.launchers import find_launcher
        from trainer.core.setup import check_soon
        check_soon(load_config(["task=cifar"]), find_launcher())
        print("torch" in sys.modules)"""
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"


def test_functions_are_short():
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inside = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                size = len(LINES[path] & set(inside))
                assert size <= MOST_OF_A_FUNCTION, f"{path}:{node.lineno} {node.name}: {size}"


def test_vague_names_become_fewer():
    counts = dict.fromkeys(VAGUE, 0)
    for tree in TREES.values():
        for function in ast.walk(tree):
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            arguments = function.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            names = {argument.arg for argument in every}
            nodes = (node for node in ast.walk(function) if isinstance(node, ast.Name))
            names |= {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
            for word in names & VAGUE.keys():
                counts[word] += 1
    assert all(counts[word] <= most for word, most in VAGUE.items()), counts
    assert counts == VAGUE, "write the smaller number into VAGUE"


def test_lines_are_short_and_hold_one_statement():
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
    names = {path.stem for path in FILES} | {path.parent.name for path in FILES}
    pairs = sorted(name for name in names if f"{name}s" in names)
    assert pairs == ["task"]  # saved configurations name trainer.tasks


def test_packages_have_the_sizes_that_are_written_down():
    """tests/size.txt has a line for each package: its code lines, and why it grew last."""
    sizes: dict[str, int] = {}
    around = [path for folder in ("tests", "scripts") for path in (ROOT / folder).rglob("*.py")]
    lines_around = {path: code_lines(path.read_text(encoding="utf-8")) for path in around}
    for path, lines in (LINES | lines_around).items():
        parts = path.relative_to(ROOT).parts
        package = "/".join(parts[:2]) if len(parts) > 2 and parts[0] == "trainer" else parts[0]
        sizes[package] = sizes.get(package, 0) + len(lines)
    ledger = [line.split(maxsplit=2) for line in (ROOT / "tests/size.txt").read_text().splitlines()]
    written = {package: int(size) for package, size, *_ in ledger}
    assert sizes.keys() == written.keys()
    for package, size in sizes.items():
        most = written[package]
        why = f"{package} has {size} code lines: write that into tests/size.txt, and why it grew"
        assert most - SLACK <= size <= most, why
        if package.startswith("trainer/"):
            limit = MOST_OF_THE_CORE if package == "trainer/core" else MOST_OF_A_COMPANION
            assert size <= limit, package


def test_no_module_name_is_there_twice():
    """`base` stands beside its kind in several rooms; `__main__` and `command` answer a verb's
    command; `schedule` has the names of settings."""
    places: dict[str, list[str]] = {}
    for name in NAMES:
        places.setdefault(name.rpartition(".")[2], []).append(name)
    twice = {stem: found for stem, found in places.items() if len(found) > 1}
    known = {"base", "command", "__main__", "trainer", "engine", "shards", "schedule"}
    assert not twice.keys() - known, twice


def test_prove_serves_scripts_that_have_never_heard_of_lockstep():
    """It imports base/, the terminal and pages, and nothing that knows a run; its verb proves tasks
    too (verify/). Neither loads torch in the process that starts the commands."""
    allowed = {"prove": {"prove", "base", "pages"}, "pages": {"pages", "base"}}
    for unit_name, known in allowed.items():
        for path in (PACKAGE / unit_name).rglob("*.py"):
            for name, line in imports(TREES[path]):
                if name not in NAMES or name in ("trainer", "trainer.cli"):
                    continue
                is_verb = path.stem == "__main__" and name.startswith("trainer.verify.")
                loads_torch = name in ("trainer.base.codec", "trainer.base.same.distance")
                is_known = unit(NAMES[name]) in known and not loads_torch
                assert is_known or is_verb, f"{path}:{line} imports {name}"


def test_no_class_name_is_there_twice():
    classes: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(module_name(path))
    twice = {name: places for name, places in classes.items() if len(places) > 1}
    assert not {name: places for name, places in twice.items() if not name.startswith("_")}


# Constants of several modules with one meaning each: what a verb says, and what a table finds.
OF_EACH = {"HELP", "USAGE", "STRATEGY", "TRACKER", "SUFFIXES", "_HOMES"}


def test_a_constant_has_one_value_wherever_it_is():
    values: dict[str, set[str]] = {}
    for path in FILES:
        for node in TREES[path].body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                targets = [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and target.id.lstrip("_").isupper():
                    values.setdefault(target.id, set()).add(ast.unparse(node.value))
    several = {name: written for name, written in values.items() if len(written) > 1}
    assert several.keys() <= OF_EACH, "say in each name what it is of"


def is_condition(node: ast.expr) -> bool:
    is_bool = isinstance(node, ast.Call) and ast.unparse(node.func) == "bool"
    is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    name = ast.unparse(node).rpartition(".")[2].lstrip("_")
    is_flag = isinstance(node, (ast.Name, ast.Attribute)) and name.startswith(("is_", "has_"))
    return is_bool or is_not or is_flag or isinstance(node, (ast.Compare, ast.BoolOp))


def is_written_out(node: ast.expr) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text or isinstance(node, (ast.List, ast.JoinedStr))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_text_or_list_is_multiplied_by_a_condition(path):
    """An `if` says it. In an f-string a plural is `{'s' * (n > 1)}`."""
    inside = {
        id(each)
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.JoinedStr)
        for each in ast.walk(node)
        if each is not node
    }
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and id(node) not in inside:
            sides = (node.left, node.right)
            is_one = any(map(is_written_out, sides)) and any(map(is_condition, sides))
            assert not is_one, f"{path}:{node.lineno} {ast.unparse(node)}"


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Return the names of the attributes that a class's methods set on `self`."""
    return {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and ast.unparse(target.value) == "self"
    }


def test_a_class_has_few_public_methods():
    """Those of an interface that it implements, `TaskRun`, count there."""
    interface = {name for name in vars(TaskRun) if name[0] != "_"}
    for path in FILES:
        for node in ast.walk(TREES[path]):
            if not isinstance(node, ast.ClassDef) or node.name in OF_OTHERS:
                continue
            functions = [f for f in node.body if isinstance(f, ast.FunctionDef)]
            public = [
                f.name
                for f in functions
                if f.name[0] != "_"
                and not (f.name in interface and node.bases)
                and not any("property" in ast.unparse(d) for d in f.decorator_list)
            ]
            assert len(public) <= MOST_METHODS, f"{path}: {node.name}: {public}"


def test_every_value_of_a_closed_group_is_in_a_yaml():
    """A dataclass of the schema has no defaults: values are in conf/."""
    for node in ast.walk(TREES[PACKAGE / "core/config/schema.py"]):
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
                if isinstance(target, ast.Attribute) and unit(path) not in LAZY:
                    written = ast.unparse(target)
                    owner = written.split(".")[0]
                    is_own = owner in ("self", "cls", "ctx", "signal", "threading", "socket")
                    is_torch = written.startswith(("torch.", "mpi4py.", *told))
                    is_foreign = not (is_own and written.count(".") == 1) and not is_torch
                    assert not is_foreign or written in KNOWN, f"{path}:{node.lineno} {written}"


# torch's and Python's private names, which classes of ours bear too
TORCHS = {"_apply", "_exit", "_modules", "_parameters", "_shapes"}


def test_no_room_reaches_for_a_private_attribute_of_another_rooms_class():
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
                    homes.setdefault(name, set()).add(room(path))
    for path in FILES:
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.Attribute) and node.attr[0] == "_" and node.attr[:2] != "__":
                known = homes.get(node.attr, set())
                is_foreign = known and room(path) not in known and node.attr not in TORCHS
                is_foreign = is_foreign and ast.unparse(node.value) != "self"  # inherited
                assert not is_foreign, f"{path}:{node.lineno} {ast.unparse(node)}: of {known}"


KNOWN = {
    "BaseContainer._resolvers",  # OmegaConf's registry, restored afterwards
    "Container._resolve_interpolation_from_parse_tree",  # OmegaConf's: counts in a block of ours
    *("layer.__class__", "layer.groups", "layer.process_group"),  # BatchNorm is converted in place
    "metric.process_group",  # torchmetrics' own attribute
    "group.post_backward",  # of FSDP2's units
    *("optimizer.step", "inner.state"),  # gathered around, and shared with what wraps it
    *("block.forward", "scores._axis", "scores._length", "scores._dim"),  # of a tensor being made
    *("task._run", "task.config", "task.world"),  # by functions beside Trainer
    "parameter.data",  # put back after a pass has replaced it
    "made._metadata",  # of a state_dict that is copied
    "tempfile.tempdir",  # restored afterwards
    "mpi4py.rc.thread_level",
    "PContext.close",  # of torchrun's agent, whose 30 s no option changes; restored afterwards
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
    "value.data",  # of one that a pass has cast in place
    *("sys.excepthook", "os._exit", "builtins.open", "io.open"),  # replaced while they are watched
    *("sys.argv", "sys.stdout"),
    "parser.exit_on_error",
    "self._cells[key].cell_contents",  # of a closure, restored after a trial
}

OWN_NAMES = {
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
    assert ours <= OWN_NAMES | HOOKS
    written = {
        target.attr
        for path in (PACKAGE / "core/task.py", PACKAGE / "core/trainer.py")
        for node in ast.walk(TREES[path])
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
    }
    assert written <= OWN_NAMES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_module_and_public_functions_begin_with_a_plain_docstring(path):
    tree = TREES[path]
    doc = ast.get_docstring(tree)
    assert doc, path
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(tree):
        text = (ast.get_docstring(node) or "") if isinstance(node, kinds) else ""
        assert not text.startswith(("What ", "Whether ", "Of ")), f"{path}: {text[:60]}"
