"""Conversion of a training script: the parts found in it, and a TODO for each part that is not."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.new.script import (
    HARMLESS,
    WRAPPERS,
    Code,
    TrainingScript,
    UnclearError,
    identifier,
    last_name,
    root_name,
    strip,
)

PATH = re.compile(r"[\w./-]{3,200}")
TODO = "TODO: "
# Methods of a task, and what they are given; comments alone have no arguments.
ARGUMENTS = {
    "build_dataset": "self, split",
    "sampling": "self, split",
    "collate": "self, rows",
    "build_model": "self",
    "loss": "self, outputs, targets",
    "build_optimizer": "self, model",
    "build_schedule": None,
    "metrics": None,
    "train_step": None,
}


@dataclass
class Conversion:
    """The parts of a task by name, its settings, and lines that say what is left to do."""

    script: TrainingScript
    methods: dict[str, list[str]] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    uses: set[str] = field(default_factory=set)
    order: str = ""  # arguments of ScriptOrder, if the script's order can be followed
    left: list[str] = field(default_factory=list)  # TODOs of settings

    def attempt(self, name: str, part: Callable[[], list[str]], must: str) -> None:
        """Write a method, or a TODO that says what it must do."""
        try:
            self.methods[name] = part()
        except UnclearError as error:
            todo = comment(f"{must}; here {error}.", self.script.quote(*error.nodes))
            self.methods[name] = [*todo, "raise NotImplementedError"]

    def set_one(self, key: str, part: Callable[[], Any]) -> None:
        """Write a setting, or a TODO."""
        try:
            self.settings[key] = part()
        except UnclearError as error:
            self.left += comment(f"{key}: {error}.", self.script.quote(*error.nodes))

    def task(self, class_name: str) -> str:
        """Return the module of the task."""
        body = self._class_body()
        imports, copied = self._copied(body)
        imports.append("from trainer import Trainer")
        if self.order:
            imports += ["", "from script_order import ScriptOrder"]
        head = f'"""A task made of {self.script.path.name} by `python -m trainer.new --from`."""'
        lines = [head, "", "from dataclasses import dataclass", "", *imports, *copied]
        lines += ["", "", f"class {class_name}(Trainer):", *body]
        return "\n".join(line.rstrip() for line in lines) + "\n"

    def _class_body(self) -> list[str]:
        options = {name: type(value).__name__ for name, value in self.options.items()}
        options |= {"script_order": "bool"} if self.order else {}
        lines: list[str] = []
        if options:
            fields = [f"        {name}: {kind}" for name, kind in options.items()]
            lines += ["    @dataclass", "    class Options:", *fields, ""]
        for name, arguments in ARGUMENTS.items():
            if name in self.methods:
                is_method = arguments is not None
                lines += [f"    def {name}({arguments}):"] * is_method
                lines += [" " * (4 + 4 * is_method) + line for line in self.methods[name]]
                lines.append("")
        return lines[:-1]

    def _copied(self, body: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return (imports, definitions) of the script that the task uses, in its own words."""
        used = {self.script.definitions[name] for name in self.uses}
        own = [node for node in self.script.tree.body if node in used]
        own = [node for node in own if not isinstance(node, (ast.Import, ast.ImportFrom))]
        copied = [*map(self.script.source, own)]
        names = {*re.findall(r"\w+", "\n".join([*copied, *body])), "torch"}
        imports = []
        for node in self.script.tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                every = [n for n in node.names if (n.asname or n.name).split(".")[0] in names]
                if every:
                    node.names = every
                    imports.append(ast.unparse(node))
        lines = []
        for node, text in zip(own, copied, strict=True):
            gap = 1 if isinstance(node, ast.Assign) else 2
            lines += [*[""] * gap, *text.splitlines()]
        return imports, lines

    def config(self, name: str, module: str, class_name: str) -> str:
        """Return the task's file of settings."""
        groups: dict[str, list[str]] = {}
        for key, value in self.settings.items():
            group, _, leaf = key.partition(".")
            groups.setdefault(group, []).append(f"  {leaf}: {value}")
        options = {**self.options, **({"script_order": "false"} if self.order else {})}
        lines = ["# @package _global_", *self.left]
        if "data.global_batch" in self.settings:
            lines.append(
                "# data.global_batch is the batch of one process of the script: multiply it"
            )
            lines.append("# by the number of processes that you started it with.")
        lines += ["task:", f"  name: {name}", f"  trainer: {module}.{class_name}"]
        lines += ["  options:"] * bool(options)
        lines += [
            f"    {key}: {json.dumps(v) if v != 'false' else v}" for key, v in options.items()
        ]
        for group, values in groups.items():
            lines += ["", f"{group}:", *values]
        return "\n".join(lines) + "\n"

    def local_files(self) -> dict[str, str]:
        """Return the modules beside the script that the task imports, with those they import."""
        found: dict[str, str] = {}
        trees = [self.script.tree]
        while trees:
            for node in ast.walk(trees.pop()):
                names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                for name in names:
                    path = self.script.path.with_name(f"{name}.py")
                    if path.is_file() and path.name not in found:
                        found[path.name] = path.read_text(encoding="utf-8")
                        trees.append(ast.parse(found[path.name]))
        return found

    def proof(self, name: str, script: str) -> str:
        """Return the command that compares the task with the script, in the project's folder."""
        is_distributed = self.script.calls("init_process_group")
        launcher = "torchrun --standalone --nproc_per_node=1" if is_distributed else "python"
        words = ["python -m trainer", f"task={name}"]
        words += ["task.options.script_order=true"] * bool(self.order)
        return f"python -m trainer.prove '{launcher} {script}' '{' '.join(words)}' dtype=native"

    def notes(self) -> list[str]:
        """Return lines about what the proof cannot follow."""
        notes: list[str] = []
        if not self.order:
            notes.append("the script's order of examples is drawn from a global generator, or is")
            notes[0] += " not found: for the proof give its DataLoader a DistributedSampler"
        if not self.script.calls("manual_seed"):
            notes.append("the script sets no seed: each start has other initial weights")
        if places := sorted(self._find_files()):
            notes.append(f"the script names files: {', '.join(places)}; make them found from there")
        return notes

    def _find_files(self) -> set[str]:
        """Return the strings of the script that are files beside it."""
        strings = [n.value for n in ast.walk(self.script.tree) if isinstance(n, ast.Constant)]
        names = {each for each in strings if isinstance(each, str) and PATH.fullmatch(each)}
        return {name for name in names if (self.script.path.parent / name).is_file()}

    @property
    def num_todos(self) -> int:
        lines = [*self.left, *(line for lines in self.methods.values() for line in lines)]
        return sum(TODO in line for line in lines)

    def write(self, code: Code) -> list[str]:
        """Return statements that compute an expression and return it."""
        self.uses |= code.uses
        lines = [self.text(statement) for statement in code.before]
        return [line for each in lines for line in each.splitlines()] + [
            f"return {self.text(code.expression)}"
        ]

    def text(self, node: ast.AST) -> str:
        """Return code with the arguments of the command line as options of the task."""
        copy = ast.parse(ast.unparse(node)).body[0]
        for each in ast.walk(copy):
            if isinstance(each, ast.Attribute) and self.script.is_arguments(each.value):
                self.options[each.attr] = self.script.default(each.attr)
        for each in ast.walk(copy):
            if isinstance(each, ast.Name) and self.script.is_arguments(each):
                each.id = "self.options"
        return ast.unparse(copy)


def comment(text: str, lines: Sequence[str]) -> list[str]:
    """Return a TODO as comments, with lines of the script."""
    return [f"# {TODO}{text}", *(f"#   {line}" for line in lines)]


class ModelUse:
    """The model of a script: its expression and its names."""

    def __init__(self, script: TrainingScript):
        self.script = script
        wrapped = script.calls(*WRAPPERS)
        trained = [
            c.func.value for c in script.calls("parameters") if isinstance(c.func, ast.Attribute)
        ]
        self.given = [call.args[0] for call in wrapped if call.args] or trained
        self.names = {identifier(strip(each)) for each in (*self.given, *trained)} - {""}
        for _ in range(3):  # model = Net(); ddp_model = DDP(model)
            for name, found in script.assigned.items():
                if any(identifier(strip(each.value)) in self.names for each in found):
                    self.names.add(name)

    def write(self, made: Conversion) -> list[str]:
        if not self.given:
            raise UnclearError("no DDP(model) and no model.parameters() are found")
        found = {ast.unparse(node): node for node in map(self.script.resolve, self.given)}
        if len(found) != 1:
            raise UnclearError(f"{len(found)} models are found", *found.values())
        (node,) = found.values()
        lines = made.write(self.script.gather(node))
        if changes := list(self._find_changes()):
            why = "the script then changes the model; do it here if it belongs to the model."
            lines = [*comment(why, self.script.quote(*changes)), *lines]
        return lines

    def _find_changes(self) -> Iterator[ast.stmt]:
        """Yield statements outside the training loop that may change the model."""
        for node in self.script.nodes:
            if any(
                node in ast.walk(loop) for loop in self.script.enclosing(self.script.backward[0])
            ):
                continue
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                if root_name(node.targets[0]) in self.names:
                    yield node
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                call = node.value
                names = {n.id for a in call.args for n in ast.walk(a) if isinstance(n, ast.Name)}
                is_method = root_name(call.func) in self.names and last_name(call) not in HARMLESS
                is_given = bool(names & self.names) and last_name(call) not in (
                    *HARMLESS,
                    *self.script.working,
                    "print",
                    "save",
                )
                if is_method or is_given:
                    yield node
