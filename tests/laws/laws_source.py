"""The package's source as syntax trees, for the tests that check it."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "warpfold"


@cache
def trees(folder: str = "warpfold") -> dict[Path, ast.Module]:
    """Map each Python file below a folder of the repository, as a path relative to the root, to its tree."""
    return {
        path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8"), str(path))
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """Return all nodes of a file. Cached, as walking through all files takes seconds, and many tests do so."""
    return list(ast.walk(tree))


def room(path: Path) -> str:
    """Return the part of the package that a file belongs to: warpfold/model/heads.py -> model."""
    return path.parts[1].removesuffix(".py")


def imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield every module imported anywhere in a file, and the line; `from a import b` gives a and a.b."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write it from warpfold on"
            yield node.module or "", node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def loaded_at_import(tree: ast.Module) -> set[str]:
    """Return the modules that are imported when the file is imported, that is, outside functions."""
    inside = {
        id(inner)
        for node in nodes(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(node)
        if inner is not node
    }
    kept = [node for node in nodes(tree) if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in inside]
    return {name for node in kept for name, _ in imports(ast.Module([node], []))}


def text(node: ast.expr) -> str:
    """Return the text of an expression, for a dotted name in a tenth of the time of `unparse`."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{text(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ast.unparse(node)


def calls(tree: ast.Module) -> Iterator[ast.Call]:
    """Return all calls in a file."""
    return (node for node in nodes(tree) if isinstance(node, ast.Call))


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return all functions and methods in a file."""
    return (node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
