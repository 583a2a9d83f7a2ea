"""Static reading of a training script: its names, and the code that an expression needs."""

from __future__ import annotations

import ast
import builtins
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError, one_line

WRAPPERS = ("DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP", "DataParallel")
SAME = ("compile", "convert_sync_batchnorm")  # functions whose result stands for the argument
MOVES = ("to", "cuda", "cpu", "train")  # methods whose result stands for the object
HARMLESS = (*MOVES, "eval", "zero_grad", "set_epoch", "requires_grad_", "state_dict", "close")
BY_RANK = re.compile(r"\b(dist|(local_)?rank|world_size|get_rank|get_world_size|environ)\b")
# Losses that are the mean of what they return with reduction="none", given these arguments.
# A function that calls one of them sets up or trains: it is not copied.
WORK = {"backward", "DataLoader", "init_process_group", "parse_args", *WRAPPERS}
DTYPES = re.compile("float|double|half|int|long|dtype")
LOOP_WRAPPERS = ("enumerate", "tqdm")
Definition = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Assign


class UnclearError(Exception):
    """Says why a part cannot be taken from the script, and where that stands."""

    def __init__(self, why: str, *nodes: ast.AST):
        super().__init__(why)
        self.nodes = nodes


@dataclass
class Code:
    """An expression, the assignments that it needs, and what at the top of the script it uses."""

    expression: ast.expr
    before: list[ast.Assign] = field(default_factory=list)
    uses: set[str] = field(default_factory=set)


class TrainingScript:
    """The names of a script: definitions, assignments, arguments of its command line."""

    def __init__(self, path: Path):
        """Raise ConfigError for a file that is no Python, or trains nothing."""
        self.path = path
        try:
            self.text = path.read_text(encoding="utf-8")
            self.tree = ast.parse(self.text)
        except FileNotFoundError:
            raise ConfigError(f"--from {path}: is not there; give a training script") from None
        except (OSError, SyntaxError, ValueError) as error:
            raise ConfigError(f"--from {path}: must be Python: {one_line(error)}") from None
        self.lines = self.text.splitlines()
        self.parents = {c: node for node in ast.walk(self.tree) for c in ast.iter_child_nodes(node)}
        functions = {n.name: n for n in self.tree.body if isinstance(n, ast.FunctionDef)}
        self.called = {name: _called(function) for name, function in functions.items()}
        self.working = {n: functions[n] for n in functions if n == "main" or self.called[n] & WORK}
        self.nodes = list(self._walk(self.tree))
        self.definitions: dict[str, Definition] = {}
        self.assigned: dict[str, list[ast.Assign]] = {}
        self._name_all()
        self.backward = [c for c in self.calls("backward") if isinstance(c.func, ast.Attribute)]
        self.steps = [c for c in self.calls("step") if isinstance(c.func, ast.Attribute)]
        if not self.backward or not self.steps:
            raise ConfigError(f"""--from {path}:
                must be a training script, with loss.backward() and optimizer.step();
                python -m trainer.new NAME starts without one""")

    def _walk(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes of the code that runs: of the file, and of functions that train."""
        for child in ast.iter_child_nodes(node):
            is_own = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            if not is_own or child in self.working.values():
                yield child
                yield from self._walk(child)

    def _name_all(self) -> None:
        for each in self.tree.body:
            if isinstance(each, (ast.Import, ast.ImportFrom)):
                for alias in each.names:
                    self.definitions[alias.asname or alias.name.split(".")[0]] = each
            elif isinstance(each, (ast.FunctionDef, ast.ClassDef)):
                self.definitions[each.name] = each
        for node in self.nodes:
            if isinstance(node, (ast.AnnAssign, ast.AugAssign)) and node.value is not None:
                made = ast.Assign([node.target], node.value)  # x += 1 is a second place
                node = ast.copy_location(made, node)
            if isinstance(node, ast.Assign):
                for name in {n for t in node.targets for n in stored_names(t)}:
                    self.assigned.setdefault(name, []).append(node)

    def calls(self, *names: str) -> list[ast.Call]:
        """Return the calls of functions or methods whose last name is one of `names`."""
        return [n for n in self.nodes if isinstance(n, ast.Call) and last_name(n) in names]

    def source(self, node: ast.stmt) -> str:
        """Return the lines of a statement as they are, with its decorators."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        return "\n".join(self.lines[first - 1 : node.end_lineno])

    def quote(self, *nodes: ast.AST) -> list[str]:
        """Return the lines of the script at which the statements of these nodes stand."""
        numbers: set[int] = set()
        for node in nodes:
            while not isinstance(node, ast.stmt):
                node = self.parents[node]
            end = node.lineno if hasattr(node, "body") else node.end_lineno or node.lineno
            numbers |= {*range(node.lineno, end + 1)}
        return [f"line {n}: {self.lines[n - 1].strip()}" for n in sorted(numbers)]

    def enclosing(self, node: ast.AST) -> Iterator[ast.For]:
        """Yield the loops around a node, also those that call its function."""
        seen: set[ast.AST] = set()
        while node in self.parents and node not in seen:
            seen.add(node)
            node = self.parents[node]
            if isinstance(node, ast.For):
                yield node
            elif isinstance(node, ast.FunctionDef) and len(self.calls(node.name)) == 1:
                (node,) = self.calls(node.name)

    def passed(self, name: str, node: ast.AST) -> ast.expr | None:
        """Return the argument for the parameter `name` of the function in which a node stands."""
        while node in self.parents and not isinstance(node, ast.FunctionDef):
            node = self.parents[node]
        if not isinstance(node, ast.FunctionDef):
            return None
        names = [a.arg for a in node.args.args]
        if name not in names:
            return None
        sites = self.calls(node.name)
        if len(sites) != 1:
            raise UnclearError(f"{node.name} is called {len(sites)} times", *sites)
        by_name = {k.arg: k.value for k in sites[0].keywords}
        by_place = dict(zip(names, sites[0].args, strict=False))
        if name not in by_name | by_place:
            raise UnclearError(f"{node.name} is called without {name}", sites[0])
        return (by_name | by_place)[name]

    def resolve(self, node: ast.expr) -> ast.expr:
        """Return the expression whose value a name has, without wrappers and moves to a device."""
        node = strip(node)
        if not isinstance(node, ast.Name):
            return node
        given = self.passed(node.id, node)
        if given is not None:
            return self.resolve(given)
        every = [a for a in self.assigned.get(node.id, []) if not _keeps(a, node.id)]
        if not every and node.id in self.definitions:
            return node
        if len(every) != 1:
            raise UnclearError(f"{node.id} is set at {len(every)} places", *every, node)
        is_one = isinstance(every[0].targets[0], ast.Name)
        return self.resolve(every[0].value) if is_one else node

    def is_arguments(self, node: ast.expr) -> bool:
        """Return True for the name of what parse_args returned."""
        found = self.assigned.get(node.id, []) if isinstance(node, ast.Name) else []
        calls = [a.value for a in found if isinstance(a.value, ast.Call)]
        names = {"parse_args", *(n for n in self.working if "parse_args" in self.called[n])}
        return any(last_name(call) in names for call in calls)

    def default(self, name: str) -> Any:
        """Return the default of an argument of the command line. Raises UnclearError."""
        for call in self.calls("add_argument"):
            flags = [a.value for a in call.args if isinstance(a, ast.Constant)]
            keywords = {k.arg: k.value for k in call.keywords}
            names = {str(flag).lstrip("-").replace("-", "_") for flag in flags}
            if name not in names | {getattr(keywords.get("dest"), "value", None)}:
                continue
            if getattr(keywords.get("action"), "value", "") == "store_true":
                return False
            value = literal(keywords.get("default"))
            if value is not None:
                kind = ast.unparse(keywords["type"]) if "type" in keywords else ""
                return float(value) if kind == "float" else value
            raise UnclearError(f"the argument {name} has no default", call)
        raise UnclearError(f"the argument {name} is not found")

    def value(self, node: ast.expr) -> Any:
        """Return a number, text or truth value that an expression has. Raises UnclearError."""
        node = self.resolve(node)
        if isinstance(node, ast.Attribute) and self.is_arguments(node.value):
            return self.default(node.attr)
        found = literal(node)
        if found is None:
            raise UnclearError(f"{ast.unparse(node)} is not a plain value", node)
        return found

    def gather(self, node: ast.expr) -> Code:
        """Return an expression with all that it needs. Raises UnclearError."""
        code = Code(node)
        self._add(node, code, [])
        for part in (*(a.value for a in code.before), node):
            if found := BY_RANK.search(ast.unparse(part)):
                raise UnclearError(f"it depends on the process: {found[0]}", part)
        return code

    def _add(self, node: ast.AST, code: Code, path: list[str]) -> None:
        for name in free_names(node):
            if self.is_arguments(ast.Name(name)) or name in path or hasattr(builtins, name):
                continue
            given = self.passed(name, node)
            if given is not None:
                if not (isinstance(given, ast.Name) and given.id == name):
                    raise UnclearError(f"{name} is {ast.unparse(given)} of the caller", node)
                node = given
            found = self.assigned.get(name, [])
            if name in self.working:
                raise UnclearError(f"{name} also sets up or trains", self.working[name])
            if not found and name in self.definitions:
                self._use(name, code)
            elif len(found) != 1:
                raise UnclearError(f"{name} is set at {len(found)} places", *found, node)
            elif literal(found[0].value) is not None and found[0] in self.tree.body:
                self.definitions[name] = found[0]
                code.uses.add(name)
            elif found[0] not in code.before:
                self._add(found[0].value, code, [*path, name])
                code.before.append(found[0])

    def _use(self, name: str, code: Code) -> None:
        """Add a definition at the top of the script, and those that it uses."""
        if name in code.uses:
            return
        code.uses.add(name)
        definition = self.definitions[name]
        if isinstance(definition, (ast.FunctionDef, ast.ClassDef)):
            inside = {n.id for n in ast.walk(definition) if isinstance(n, ast.Name)}
            for each in sorted(inside & (self.definitions.keys() | self.assigned.keys())):
                found = self.assigned.get(each, [])
                if each in self.definitions and not found:
                    self._use(each, code)
                elif (
                    len(found) == 1
                    and found[0] in self.tree.body
                    and not _is_local(each, definition)
                ):
                    self.definitions[each] = found[0]
                    self._use(each, code)


def last_name(call: ast.Call) -> str:
    node = call.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def strip(node: ast.expr) -> ast.expr:
    """Return an expression without DDP, compile and moves to a device around it."""
    while isinstance(node, ast.Call):
        if last_name(node) in (*WRAPPERS, *SAME) and node.args:
            node = node.args[0]
        elif isinstance(node.func, ast.Attribute) and node.func.attr in MOVES:
            if any(DTYPES.search(ast.unparse(each)) for each in (*node.args, *node.keywords)):
                break
            node = node.func.value
        else:
            break
    return node


ARITHMETIC: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.USub: operator.neg,
}


def literal(node: ast.expr | None) -> Any:
    """Return the value of a literal, or of arithmetic with numbers; None for anything else."""
    try:
        return _compute(node)
    except (ArithmeticError, TypeError, ValueError):
        return None


def _compute(node: ast.expr | None) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp):
        return ARITHMETIC[type(node.op)](_number(node.operand)) if _is_known(node.op) else None
    if isinstance(node, ast.BinOp) and _is_known(node.op):
        return ARITHMETIC[type(node.op)](_number(node.left), _number(node.right))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, power = _number(node.left), _number(node.right)
        return base**power if abs(power) < 64 else None
    return None


def _is_known(kind: ast.AST) -> bool:
    return type(kind) in ARITHMETIC


def _number(node: ast.expr) -> int | float:
    value = _compute(node)
    if type(value) not in (int, float):
        raise ValueError
    return value


def free_names(node: ast.AST) -> list[str]:
    """Return the names that a node reads and does not set itself, sorted."""
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - stored_names(node)
    return sorted(names - {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)})


def stored_names(node: ast.AST) -> set[str]:
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    return {n.id for n in names if isinstance(n.ctx, ast.Store)}


def _is_local(name: str, definition: ast.AST) -> bool:
    return name not in free_names(definition)


def _keeps(assignment: ast.Assign, name: str) -> bool:
    """Return True for model = DDP(model), x = x.to(device), loss = loss / 4."""
    node = strip(assignment.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        node = node.left
    return isinstance(node, ast.Name) and node.id == name


def _called(function: ast.FunctionDef) -> set[str]:
    return {last_name(n) for n in ast.walk(function) if isinstance(n, ast.Call)}


def identifier(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def root_name(node: ast.AST) -> str:
    """Return the name at the start of model.module.parameters() or x.to(device)."""
    while isinstance(node, (ast.Attribute, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", "")
