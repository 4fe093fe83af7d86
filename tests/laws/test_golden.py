"""WarpFold against DeepMind's official code: the cases of tests/golden, and of ../shared/golden where it lies there."""

from pathlib import Path

import pytest

from warpfold import golden
from warpfold.golden.read import Place, find
from warpfold.golden.runner import run_case

ROOT = Path(__file__).parents[2]
HERE, ALL = ROOT / "tests" / "golden", ROOT.parent / "shared" / "golden"
SELECTED = find(HERE)
OTHERS = [p for p in find(ALL) if p.name not in {s.name for s in SELECTED}] if ALL.is_dir() else []


def _check(place: Place) -> None:
    result = run_case(place)
    if result.verdict == golden.NOT_IMPLEMENTED:
        assert "multimer" in result.case, f"{result.case}: {result.reason}"
        pytest.skip(f"{result.case}: {result.reason}")
    bad = "; ".join(f"{c.what}: {c.error:.3g} > {c.bound:.3g}" for c in golden.failures(result)[:5])
    assert result.verdict == golden.PASS, f"{result.case} {result.verdict}: {result.reason or bad}"


@pytest.mark.parametrize("place", SELECTED, ids=lambda place: place.name)
def test_selected_case(place: Place) -> None:
    _check(place)


@pytest.mark.parametrize("place", OTHERS or [None], ids=lambda place: getattr(place, "name", "none"))
def test_shared_case(place: Place | None) -> None:
    if place is None:
        pytest.skip("no ../shared/golden beside this checkout; tests/golden holds a selection of it")
    _check(place)
