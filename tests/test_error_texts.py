"""The texts of errors: a refusal names its subject, and what it must be or the next step.

The texts are read from the source, in all their branches. `{}` is a value known in a run only.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parent.parent / "trainer"
SOURCES = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
TREES = {path: ast.parse(text) for path, text in SOURCES.items() if "Error(" in text}
ERRORS = ("ConfigError", "CheckpointError", "RunError")
# The verbs with which a next step begins. A usage needs no subject: nothing was given.
VERBS = """add build call check choose compute convert copy correct define end fix freeze give
    install keep leave make move name override pad pass pip put quote raise read register remove
    rename repair restore return run save see set share start store sweep tie use wait
    write"""
STEP = rf"(always )?({'|'.join(VERBS.split())})\b"
ADVICE = re.compile(rf"[:;] (.*\bmust\b|did you mean|{STEP})|\A{STEP}.*: python -m")
# The last clause is written elsewhere: by a caller, in a table, or in a library.
UNKNOWN = re.compile(r"(.*[:;] )?[^a-z]*\{\}[^a-z]*")
MOST_UNKNOWN = 38


class Place(NamedTuple):
    module: ast.Module
    function: ast.AST
    statement: ast.AST


@cache
def assignments(scope: ast.AST) -> list[tuple[str, ast.Assign]]:
    """Return (name, node) of the assignments in a function or of a module's, the last first."""
    nodes = scope.body if isinstance(scope, ast.Module) else ast.walk(scope)
    found = [(ast.unparse(n.targets[0]), n) for n in nodes if isinstance(n, ast.Assign)]
    return sorted(found, key=lambda each: -each[1].lineno)


def values(name: str, place: Place) -> Iterator[tuple[ast.expr, Place]]:
    """Yield the values that a local name can have, then that of a constant."""
    for target, node in assignments(place.function):
        if target == name and node.lineno < place.statement.lineno:
            yield node.value, place._replace(statement=node)
            if node.col_offset <= place.statement.col_offset:
                return  # in no branch, so it replaces the earlier values
    for module in (place.module, *TREES.values()) if name.strip("_").isupper() else ():
        for target, node in assignments(module):
            if target == name:
                yield node.value, Place(module, module, node)
                return


def texts(node: ast.expr, place: Place) -> list[str]:
    """Return all texts that an expression can have."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.FormattedValue):
        return texts(node.value, place)
    if isinstance(node, ast.BoolOp):
        return texts(node.values[-1], place)
    if isinstance(node, ast.IfExp):
        return texts(node.body, place) + texts(node.orelse, place)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return ["", *texts(node.left, place)]
    if isinstance(node, (ast.BinOp, ast.JoinedStr)):
        parts = [node.left, node.right] if isinstance(node, ast.BinOp) else node.values
        return list(map("".join, product(*(texts(part, place) for part in parts))))
    if isinstance(node, ast.Name) and (known := list(values(node.id, place))):
        return [text for value, home in known for text in texts(value, home)]
    written = ast.unparse(node)
    if written.startswith(("suggest(", "translate(")):
        return ["; did you mean"]
    return ["an error of the system" if written.endswith(".strerror") else "{}"]


def refusals() -> Iterator[tuple[str, str, set[str]]]:
    """Yield (place, error, texts) of each error that is made, and of each rule for settings."""
    for path, tree in TREES.items():
        nodes = list(ast.walk(tree))
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        for node in nodes:
            made = getattr(node, "exc" if isinstance(node, ast.Raise) else "value", None)
            error = getattr(getattr(made, "func", None), "id", "")
            is_rule = isinstance(made, ast.Yield) and path.name == "rules.py"
            if is_rule or error in ERRORS:
                spans = {f: range(f.lineno, f.end_lineno + 1) for f in functions}
                place = Place(tree, next(f for f in functions if node.lineno in spans[f]), node)
                said = made.value.elts[1] if is_rule else made.args[0]
                found = {f"{{}}: {text}" if is_rule else text for text in texts(said, place)}
                yield f"{path}:{node.lineno}", "ConfigError" if is_rule else error, found


def test_refusal_names_what_must_be_or_the_next_step():
    silent = {}
    unknown = {}
    for place, error, possible in refusals():
        assert not [text for text in possible if text.endswith(".") or "\n" in text], place
        bare = {text for text in possible if not ADVICE.search(text)}
        if error == "ConfigError" and bare:
            (unknown if all(map(UNKNOWN.fullmatch, bare)) else silent)[place] = bare
    assert not silent, "no next step: must contain 'must', or a verb of VERBS after a semicolon"
    assert len(unknown) <= MOST_UNKNOWN, unknown
