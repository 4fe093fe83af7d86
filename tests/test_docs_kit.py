"""The page of the training kit: every block runs, in the order of the page, in one process.

A block that begins with a line `# NAME.py` is a file of that name, which the later blocks import.
"""

import re
from pathlib import Path

import pytest

from tests.test_docs import ROOT, blocks

PAGE = ROOT / "docs" / "kit.md"


def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks(PAGE, "python")):
        if name := re.match(r"# (\w+\.py)\n", block):
            assert not (tmp_path / name[1]).exists(), name[1]
            (tmp_path / name[1]).write_text(block, encoding="utf-8")
        else:
            exec(compile(block, f"kit.md, block {number}", "exec"), names)
