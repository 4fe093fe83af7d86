"""docs/reference/algorithms.md leads from each algorithm to the code, and the code cites the algorithm's number."""

import ast
import re

from laws_source import ROOT, trees

ROW = re.compile(r"^\| *(\d+) *\| *(\w+) *\| *`([\w/.]+\.py)` *\| *`([\w.]+)`(?:, `([\w.]+)`)? *\|", re.MULTILINE)


def _rows() -> list[tuple[int, str, str]]:
    """Parse the table to (number, file, name). A row with two objects gives two entries."""
    text = (ROOT / "docs" / "reference" / "algorithms.md").read_text(encoding="utf-8")
    return [(int(row[1]), row[3], name) for row in ROW.finditer(text) for name in row.groups()[3:] if name]


def _find(file: str, name: str) -> ast.AST | None:
    """Find the function, class or Class.method in a file of the package."""
    body: list[ast.stmt] = next(tree.body for path, tree in trees().items() if path.as_posix() == f"warpfold/{file}")
    node: ast.AST | None = None
    for part in name.split("."):
        defined = {n.name: n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        node = defined.get(part)
        body = node.body if isinstance(node, ast.ClassDef) else []
    return node


def _cited(docstring: str) -> set[int]:
    """Parse the numbers of cited algorithms: "Algorithm 6", "Algorithms 11 and 12", "Algorithms 7-10"."""
    cited: set[int] = set()
    for group in re.findall(r"Algorithms?\s+(\d+(?:(?:,\s*|\s+and\s+|,\s+and\s+|\s*-\s*|\s+to\s+)\d+)*)", docstring):
        for first, last in re.findall(r"(\d+)(?:\s*(?:-|to)\s*(\d+))?", group):
            cited |= set(range(int(first), int(last or first) + 1))
    return cited


def test_every_algorithm_is_listed_once() -> None:
    text = (ROOT / "docs" / "reference" / "algorithms.md").read_text(encoding="utf-8")
    assert [int(row[1]) for row in ROW.finditer(text)] == list(range(1, 33))


def test_every_entry_exists_and_cites_its_number() -> None:
    wrong = []
    for number, file, name in _rows():
        node = _find(file, name) if (ROOT / "warpfold" / file).exists() else None
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            wrong.append(f"Algorithm {number}: warpfold/{file} has no {name}")
        elif number not in _cited(ast.get_docstring(node) or ""):
            wrong.append(f"Algorithm {number}: the docstring of warpfold/{file} {name} does not cite it")
    assert not wrong


def test_citations_are_read_in_every_form() -> None:
    assert _cited("Algorithms 3, 4, 5 and 32, and the MSA; Algorithm 6 line 2.") == {3, 4, 5, 6, 32}
    assert _cited("Algorithms 7-10 and 19") == {7, 8, 9, 10, 19}
    assert _cited("Algorithms 1 to 3") == {1, 2, 3}
    assert _cited("no number") == set()
