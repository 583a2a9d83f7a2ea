"""The lines of a file that are code: neither empty, nor a comment, nor of a docstring."""

import ast


def code_lines(text: str, tree: ast.AST | None = None) -> set[int]:
    """Return their numbers, from 1. `tree` is the text's, where it is parsed already."""
    lines = {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#")
    }
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree or ast.parse(text)):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            doc = node.body[0]
            lines -= set(range(doc.lineno, (doc.end_lineno or doc.lineno) + 1))
    return lines
