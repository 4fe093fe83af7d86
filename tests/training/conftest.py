"""Fixtures: a store of six helices, and an uninterrupted reference run."""

from pathlib import Path

import pytest

from tests.training.runs import make_store, tiny_run
from warpfold.data.store.store import Store
from warpfold.training.train import train


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("training") / "store")


@pytest.fixture(scope="session")
def unbroken(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("training") / "run"
    train(tiny_run(), store, out)
    return out
