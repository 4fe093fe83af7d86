"""What the tests of other people's models share."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--installed", help="a package whose tests may not be skipped: `./dev adapters` has installed it")
