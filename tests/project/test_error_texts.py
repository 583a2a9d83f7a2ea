"""The texts of errors: a refusal names its subject, and what it must be or the next step.

The texts are read from the source, in all their branches. `{}` is a value known in a run only.
Those over several lines are joined, as the errors do it.
"""

import ast
import pickle
import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from trainer.base.errors import INDENT, CheckpointError, ConfigError, RunError

PACKAGE = Path(__file__).resolve().parents[2] / "trainer"
SOURCES = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
TREES = {path: ast.parse(text) for path, text in SOURCES.items() if "Error(" in text}
ERRORS = ("ConfigError", "CheckpointError", "RunError")
# The verbs with which a next step begins. A usage needs no subject: nothing was given.
VERBS = """add build call check choose compute convert copy correct define end fix freeze give
    install keep leave make move name override pad pass pip put quote raise read register remove
    rename repair restore return run save see set share start store sweep take tie use wait
    write"""
STEP = rf"(always )?({'|'.join(VERBS.split())})\b"
ADVICE = re.compile(rf"[:;] (.*\bmust\b|did you mean|{STEP})|\A{STEP}.*: python -m")
# The last clause is written elsewhere: by a caller, in a table, or in a library.
UNKNOWN = re.compile(r"(.*[:;] )?[^a-z]*\{\}[^a-z]*")
MOST_UNKNOWN = 43
MOST_APART = 81  # in rooms whose errors have not been rewritten yet


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
        return [INDENT.sub(" ", str(node.value))]
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
    if written.startswith(("suggest(", "translate(", "did_you_mean(")):
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


def strings_for(block: list[ast.stmt], number: int) -> list[str]:
    """Return the names of strings that the statements before one give to its text alone."""
    found = []
    text = ast.unparse(block[number])
    for before in reversed(block[:number]):
        is_string = isinstance(getattr(before, "value", None), (ast.JoinedStr, ast.Constant))
        name = ast.unparse(before.targets[0]) if isinstance(before, ast.Assign) else ""
        if not is_string or f"{{{name}}}" not in text:
            break
        found.append(name)
    return found


def test_text_is_written_where_it_is_raised():
    """Not as `why = ...; advice = ...` above: a text has several lines where it needs them."""
    apart: list[str] = []
    for path, tree in TREES.items():
        for owner in ast.walk(tree):
            for block in (getattr(owner, name, None) for name in ("body", "orelse", "finalbody")):
                for number, node in enumerate(block if isinstance(block, list) else ()):
                    made = getattr(node, "exc", getattr(node, "value", None))
                    if getattr(getattr(made, "func", None), "id", "") in ERRORS:
                        apart += [f"{path}:{node.lineno} {n}" for n in strings_for(block, number)]
    assert len(apart) <= MOST_APART, apart


@pytest.mark.parametrize("error", [ConfigError, CheckpointError, RunError])
def test_text_over_several_lines_is_shown_in_one(error):
    steps = 0
    written = error(f"""run.steps={steps}: must be at least 1;
        give run.steps=100""")
    assert str(written) == "run.steps=0: must be at least 1; give run.steps=100"
    assert str(pickle.loads(pickle.dumps(written))) == str(written)


def test_line_break_of_a_value_is_kept():
    assert str(ConfigError("the file has: a\n  b")) == "the file has: a\n  b"
