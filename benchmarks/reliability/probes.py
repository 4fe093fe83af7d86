"""Which statements a test runs: a copy of the package in which each statement says that it ran.

They say so in a file that all processes map, so that ranks, workers and whatever else a test starts are counted, killed
ones too.  Kernels that Triton compiles are left as they are: whatever calls a function of their file counts as theirs.
"""

import ast
from collections.abc import Iterable
from pathlib import Path

from benchmarks.reliability.forks import PROBES
from benchmarks.reliability.mutants import is_kernel, room_files

MODULE = """
import mmap, os
_file = os.open({path!r}, os.O_RDWR)
ran = mmap.mmap(_file, {size})
os.close(_file)
"""


class _Prober(ast.NodeTransformer):
    """Puts a probe before each statement of a file."""

    def __init__(self, path: str, lines: list[tuple[str, int, bool]]) -> None:
        self.path, self.lines, self._inside = path, lines, False

    def _with_probes(self, body: list[ast.stmt]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for place, statement in enumerate(body):
            docstring = place == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
            if not docstring and not future:
                made += ast.parse(f"_ran_[{len(self.lines)}] = 1").body
                self.lines.append((self.path, statement.lineno, self._inside))
            made.append(self.visit(statement))
        return made

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if is_kernel(node):
            return node
        outer = self._inside
        self._inside |= isinstance(node, ast.FunctionDef)
        for name in ("body", "orelse", "finalbody"):
            if isinstance(getattr(node, name, None), list):
                setattr(node, name, self._with_probes(getattr(node, name)))
        for handler in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
            handler.body = self._with_probes(handler.body)
        self._inside = outer
        return node


def put_probes(copy: Path, folders: Iterable[str]) -> list[tuple[str, int, bool]]:
    """Insert probes into these folders of the package in a copy of the checkout.

    Returns (file, line of the statement, whether it is in a function) for each probe.
    """
    lines: list[tuple[str, int, bool]] = []
    for path in sorted({path for folder in folders for path in room_files(copy / "warpfold", folder)}):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        name = path.relative_to(copy / "warpfold").as_posix()
        tree = ast.fix_missing_locations(_Prober(name, lines).visit(tree))
        at = 1 if tree.body and ast.get_docstring(tree) is not None else 0
        while (
            at < len(tree.body) and isinstance(tree.body[at], ast.ImportFrom) and tree.body[at].module == "__future__"
        ):
            at += 1
        tree.body[at:at] = ast.parse(f"from {PROBES} import ran as _ran_").body
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)) + "\n", encoding="utf-8")
    shared = copy / "probes"
    shared.write_bytes(bytes(len(lines)))
    (copy / f"{PROBES}.py").write_text(MODULE.format(path=str(shared), size=len(lines)), encoding="utf-8")
    return lines
