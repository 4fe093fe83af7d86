"""What tests of several rooms share."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers import tiny_model
from warpfold.model.template import TemplateConfig
from warpfold.model.weights.files import save_params

# Files that take a minute or more of a process, most of it waiting in some: first, so that none of them is left alone
# at the end of a suite of which each process takes the next file.
LONG = (
    *("test_team", "test_plans", "test_interpreted", "test_front_end", "test_compile", "test_spare", "test_elastic"),
    *("test_train_ranks", "test_slicing", "test_planned", "test_predict_ranks", "test_train"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first, in the order of `LONG`."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))


def pytest_collection_finish() -> None:
    """Look for garbage less often, and not in what is loaded, which stays: in each process of the suite these are some
    millions of objects, and looking through them took up to a fifth of a file's time, and copied them in each fork."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(scope="session")
def tiny_params(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of random parameters of the tiny model: one recycle, a PAE head, no templates."""
    path = tmp_path_factory.mktemp("params") / "tiny.safetensors"
    save_params(path, tiny_model(templates=TemplateConfig(enabled=False)))
    return path


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread, as other processes of a test do: sums of another number are rounded otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
