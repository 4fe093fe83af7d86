"""What tests of predictions share."""

import pytest


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Structures are not drawn in reports: that takes longer than all else here."""
    monkeypatch.setattr("warpfold.prediction.pages.DRAWN", 0)
