"""Chats of functions of Python's standard library and their docstrings: no download."""

import ast
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

FUNCTION_PROMPT = "Describe this function in one sentence.\n\n"
MOST_CODE = 1200  # characters of a function
SUMMARY = range(20, 301)  # characters of its description


def describe_functions(texts: Iterable[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield chats: the code of a function is given, the answer is the start of its docstring.

    The answer's words are mostly in the code, so a small model learns to find them.
    """
    seen = set()
    for text in texts:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        lines = text.decode(errors="replace").splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            pair = _describe(node, lines)
            if pair is not None and pair not in seen:
                seen.add(pair)
                code, summary = pair
                asked = {"role": "user", "content": FUNCTION_PROMPT + code}
                answer = {"role": "assistant", "content": summary}
                yield f"function {node.name}", {"messages": [asked, answer]}


def make_pairs(
    read: Callable[[], Iterator[tuple[str, Any]]],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield pairs: a function's own description is chosen, that of the one before is rejected."""
    before = None
    for location, row in read():
        *asked, answer = row["messages"]
        if before is not None and before != answer:
            yield location, {"prompt": asked, "chosen": [answer], "rejected": [before]}
        before = answer


def _describe(
    node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]
) -> tuple[str, str] | None:
    """Return the code of a function without its docstring, and the docstring's first paragraph."""
    text = ast.get_docstring(node)
    if text is None or len(node.body) < 2:
        return None
    summary = " ".join(text.split("\n\n")[0].split())
    doc = node.body[0]
    code_lines = lines[node.lineno - 1 : doc.lineno - 1] + lines[doc.end_lineno : node.end_lineno]
    code = textwrap.dedent("\n".join(code_lines))
    is_short = len(code) <= MOST_CODE and len(summary) in SUMMARY
    return (code, summary) if is_short and doc.lineno > node.lineno else None
