"""WarpFold against DeepMind's official code: the cases of tests/golden, and of ../shared/golden where it lies there."""

from pathlib import Path

import pytest

from warpfold import golden
from warpfold.golden import run_case
from warpfold.golden.read import CaseFiles, find

ROOT = Path(__file__).parents[2]
HERE, ALL = ROOT / "tests" / "golden", ROOT.parent / "shared" / "golden"
SELECTED = find(HERE)
OTHERS = [p for p in find(ALL) if p.name not in {s.name for s in SELECTED}] if ALL.is_dir() else []


def _check(files: CaseFiles) -> None:
    result = run_case(files)
    bad = "; ".join(f"{c.what}: {c.error:.3g} > {c.bound:.3g}" for c in golden.failures(result)[:5])
    assert result.verdict == golden.PASS, f"{result.case} {result.verdict}: {result.reason or bad}"


@pytest.mark.parametrize("files", SELECTED, ids=lambda files: files.name)
def test_selected_case(files: CaseFiles) -> None:
    _check(files)


@pytest.mark.parametrize("files", OTHERS or [None], ids=lambda files: getattr(files, "name", "none"))
def test_shared_case(files: CaseFiles | None) -> None:
    if files is None:
        pytest.skip("no ../shared/golden beside this checkout; tests/golden holds a selection of it")
    _check(files)
