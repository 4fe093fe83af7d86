"""Training from an address: the run from a folder; an outage stops it, and blames no entry."""

from datetime import timedelta
from pathlib import Path

import pytest

from tests.object_server import ObjectServer, objects
from tests.training.runs import equal_tensors, steps, tiny_run
from warpfold.cli.train import train
from warpfold.data.store import objects as room
from warpfold.data.store.store import Store
from warpfold.errors import StorageError

__all__ = ["objects"]  # a fixture


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_from_an_address_is_that_from_a_folder(
    store: Store, objects: ObjectServer, tmp_path: Path, workers: int
) -> None:
    objects.upload(Path(store.path), "store")
    config = tiny_run(steps=3, workers=workers)
    objects.fail("busy", 2, "GET", "shard")
    objects.fail("torn", 2, "GET", "shard")
    train(config, f"{objects.url}/store", tmp_path / "there")
    train(config, store.path, tmp_path / "here")
    examples = [[row["examples"] for row in steps(tmp_path / name)] for name in ("there", "here")]
    assert examples[0] == examples[1]
    assert equal_tensors(*(tmp_path / name / "params.safetensors" for name in ("there", "here")))
    assert not any(fault.count for fault in objects.faults)
    assert "of the examples, checksum of `store.json`" in (tmp_path / "there/card.md").read_text()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_outage_stops_a_run_and_blames_no_entry(
    store: Store, objects: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(room, "AT_ONCE", timedelta(seconds=0.1))
    monkeypatch.setattr(room, "PATIENCE", 0.2)
    objects.upload(Path(store.path), "store")
    opened = Store(f"{objects.url}/store")
    objects.fail("expired", 10_000, "GET", "shard")
    with pytest.raises(StorageError, match=r"shard-00000.wfs: ExpiredToken: .*get new ones"):
        train(tiny_run(steps=3, workers=workers, validation=0.3), opened, tmp_path / "run")
    assert not (tmp_path / "run/quarantine.jsonl").read_text()
    objects.faults.clear()
    train(tiny_run(steps=3, workers=workers, validation=0.3), opened, tmp_path / "run")
    assert len(steps(tmp_path / "run")) == 3
