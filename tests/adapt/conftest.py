"""Options and fixtures of the tests of models of other packages."""

import pytest

from warpfold.adapt import accelerate
from warpfold.adapt.report import LayerSpeed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--installed", help="a package whose tests may not be skipped: `./dev adapters` has installed it")


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the brief timing find every layer faster, so that the swapped layers do not depend on the machine."""
    monkeypatch.setattr(accelerate, "brief_speed", lambda *of: LayerSpeed(1.5, 1.5, None))
