"""WarpFold against DeepMind's official code: the cases beside this file, and in ../shared/golden if that is there."""

from pathlib import Path

import pytest

from tests.golden.reference import CaseFiles, find
from tests.golden.run import PASS, run_case

HERE = Path(__file__).parent
ALL = HERE.parents[2] / "shared" / "golden"
SELECTED = find(HERE)
OTHERS = [p for p in find(ALL) if p.name not in {s.name for s in SELECTED}] if ALL.is_dir() else []


def _check(files: CaseFiles) -> None:
    result = run_case(files)
    bad = "; ".join(f"{c.what}: {c.error:.3g} > {c.bound:.3g}" for c in result.worst_first[:5] if not c.ok)
    assert result.verdict == PASS, f"{result.case} {result.verdict}: {result.reason or bad}"


@pytest.mark.parametrize("files", SELECTED, ids=lambda files: files.name)
def test_selected_case(files: CaseFiles) -> None:
    _check(files)


@pytest.mark.parametrize("files", OTHERS or [None], ids=lambda files: getattr(files, "name", "none"))
def test_shared_case(files: CaseFiles | None) -> None:
    if files is None:
        pytest.skip("no ../shared/golden beside this checkout; tests/golden holds a selection of it")
    _check(files)
