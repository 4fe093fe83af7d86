"""Fixtures and test ordering shared by all test folders."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers import tiny_model
from warpfold.model.template import TemplateConfig
from warpfold.model.weights.files import save_params

# Files that take a minute or more; some spend most of it waiting. They run first because each worker process takes
# the next file, and a long file that starts last would run alone.
LONG = (
    *("test_team", "test_plans", "test_interpreted", "test_front_end", "test_compile", "test_spare", "test_elastic"),
    *("test_kills", "test_train_ranks", "test_slicing", "test_planned", "test_predict_ranks", "test_train"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move long files to the front, in the order of `LONG`."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))


def pytest_collection_finish() -> None:
    """Collect garbage less often, and exclude the objects that exist after collection.

    Each worker process holds millions of these objects. Scanning them took up to a fifth of a file's time and copied
    their memory in every fork.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(scope="session")
def tiny_params(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write random parameters of the tiny model, which has one recycle, a PAE head and no templates."""
    path = tmp_path_factory.mktemp("params") / "tiny.safetensors"
    save_params(path, tiny_model(templates=TemplateConfig(enabled=False)))
    return path


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread, like a test's other processes: the number of threads changes the rounding of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
