"""Test training from an address: equal to a local run; an outage stops it without blaming an entry."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.downloads import FileServer, serving
from tests.training.runs import equal_tensors, steps, tiny_run
from warpfold.cli.train import train
from warpfold.data.store import remote
from warpfold.data.store.store import Store
from warpfold.errors import StorageError

pytest.importorskip("aiohttp", reason="needs pip install '.[remote]'")


@pytest.fixture
def server(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("WARPFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(remote, "PAUSES", (0.01, 0.02))
    with serving({f"store/{file.name}": file.read_bytes() for file in Path(store.path).iterdir()}) as found:
        yield found


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_from_an_address_is_that_from_a_folder(
    store: Store, server: FileServer, tmp_path: Path, workers: int
) -> None:
    config = tiny_run(steps=3, workers=workers)
    server.faults, server.faulty = [(503, {}), "cut 100"], "shard"
    train(config, f"{server.url}/store", tmp_path / "there")
    train(config, store.path, tmp_path / "here")
    examples = [[row["examples"] for row in steps(tmp_path / name)] for name in ("there", "here")]
    assert examples[0] == examples[1]
    assert equal_tensors(*(tmp_path / name / "params.safetensors" for name in ("there", "here")))
    assert not server.faults
    assert "of the examples, checksum of `store.json`" in (tmp_path / "there/card.md").read_text()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_outage_stops_a_run_and_blames_no_entry(
    store: Store, server: FileServer, tmp_path: Path, workers: int
) -> None:
    opened = Store(f"{server.url}/store")
    server.faults, server.faulty = [(403, {})] * 10_000, "shard"
    with pytest.raises(StorageError, match=r"shard-00000.wfs: 403, .*Check the credentials"):
        train(tiny_run(steps=3, workers=workers, validation=0.3), opened, tmp_path / "run")
    assert not (tmp_path / "run/quarantine.jsonl").read_text()
    server.faults.clear()
    train(tiny_run(steps=3, workers=workers, validation=0.3), opened, tmp_path / "run")
    assert len(steps(tmp_path / "run")) == 3
