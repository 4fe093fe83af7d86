"""Test the entries of a cached trunk: their size, and a full disk."""

import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from warpfold.engine import trunk
from warpfold.engine.trunk import TrunkStore
from warpfold.errors import UserError


def test_an_entry_that_cannot_be_written_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file cannot be created, or cannot be completed."""
    store, entry = TrunkStore(tmp_path / "trunk"), {"single": torch.ones(3)}
    with pytest.raises(UserError, match=r"could not be written \(No such file or directory\)\. Make room, or"):
        store.write(store.path(0, "a", 0), entry)
    store.begin("a model")
    monkeypatch.setattr(trunk, "sealed_tensors", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(UserError, match=r"could not be written \(No space left on device\)"):
        store.write(store.path(0, "a", 0), entry)
    assert [path.name for path in store.folder.iterdir()] == [trunk.ABOUT]


def test_what_is_there_already_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TrunkStore(tmp_path / "trunk")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1_000, 900, 100))
    with pytest.raises(UserError, match=r"need up to 1\.1e-07 GB for 3 draws of examples, and 1e-07 GB are free"):
        store.check_room(110, 3)
    store.begin("a model")
    (store.folder / "one.safetensors").write_bytes(bytes(30))
    assert store.check_room(130, 3) == "up to 1.3e-07 GB for 3 draws of examples"
    with pytest.raises(UserError, match=r"Lower finetune\.draws or data\.crop, make room"):
        store.check_room(131, 3)
