"""The page of the Python interface, and the notebook: every block and every cell runs, in order, in one process."""

import ast
import html
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.test_docs import ROOT, blocks

PAGE = ROOT / "docs" / "python.md"


def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for number, block in enumerate(blocks(PAGE, "python")):
        exec(compile(block, f"python.md, block {number}", "exec"), names)
    assert (tmp_path / "folded" / "query.cif").exists()


def run_cell(source: str, number: int, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does; return the value of its last line, if that is an expression."""
    tree, last = ast.parse(source), None
    if isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
    exec(compile(tree, f"fold.ipynb, cell {number}", "exec"), names)
    return None if last is None else eval(compile(last, f"fold.ipynb, cell {number}", "eval"), names)


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = json.loads((ROOT / "docs" / "fold.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)  # nobody's results are kept
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it is installed already"))
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = [run_cell("".join(cell["source"]), number, names) for number, cell in enumerate(cells)]
    page = next(value for value in shown if hasattr(value, "_repr_html_"))._repr_html_()
    assert page.startswith("<iframe srcdoc=")
    assert "3Dmol" in page
    assert "predicted aligned error" in page.lower()
    assert [bool(result.prediction) for result in shown[-1]] == [True, True, False]
    assert (names["folder"] / "example.cif").exists()


def test_a_page_in_a_frame_cannot_leave_it() -> None:
    """What a user named goes into the page, and the page into its frame, as text."""
    inner = made('x"><script>alert(1)</script>')._repr_html_().removeprefix('<iframe srcdoc="')
    page, _, rest = inner.partition('"')
    assert rest.startswith(' title="')
    assert "<script>alert" not in html.unescape(page)
    assert "&lt;script&gt;alert" in html.unescape(page)


def made(name: str) -> Any:
    import numpy as np

    from warpfold.prediction.outputs import Prediction

    return Prediction(name, "GGG", np.zeros((3, 37, 3)), np.zeros((3, 37)), np.full(3, 50.0), None, None, None)
