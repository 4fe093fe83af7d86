"""What the tests of other people's models share."""

import pytest

from warpfold.adapt import accelerate
from warpfold.adapt.report import LayerSpeed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--installed", help="a package whose tests may not be skipped: `./dev adapters` has installed it")


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find every layer of ours faster at a glance, so that what is swapped does not depend on the machine."""
    monkeypatch.setattr(accelerate, "glanced_speed", lambda *of: LayerSpeed(1.5, 1.5, None))
