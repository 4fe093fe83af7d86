"""The page of the Python interface, and the notebook: every block and every cell runs, in order, in one process."""

from pathlib import Path

import pytest

from tests.test_docs import ROOT, blocks

PAGE = ROOT / "docs" / "python.md"


def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for number, block in enumerate(blocks(PAGE, "python")):
        exec(compile(block, f"python.md, block {number}", "exec"), names)
    assert (tmp_path / "folded" / "query.cif").exists()
