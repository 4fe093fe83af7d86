"""Fixtures of the prediction tests."""

import pytest


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the pictures of structures in reports, which would take most of the time of these tests."""
    monkeypatch.setattr("warpfold.prediction.pages.DRAWN", 0)
