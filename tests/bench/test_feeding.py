"""Whether a store is fast enough for GPUs: emulated storage is slow, waiting times are measured, and the arithmetic."""

import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest

from tests.data.examples import example
from warpfold.bench.data import INITIAL
from warpfold.bench.feeding import Emulation, Feeding, SlowFolder, SlowStore, feeding
from warpfold.data.store.remote import parse_place
from warpfold.data.store.store import StoreWriter, pack_record
from warpfold.data.store.stored_example import example_arrays, example_notes
from warpfold.errors import UserError


@pytest.fixture
def slow(tmp_path: Path) -> SlowStore:
    with StoreWriter(tmp_path / "store") as writer:
        for number in range(3):
            raw = example(300, 50, seed=number)
            writer.add(f"e{number}", pack_record(example_arrays(raw), example_notes(raw)), {"length": 300})
        writer.finish()
    return SlowStore(tmp_path / "store", Emulation.of("10ms,4MB/s", tmp_path / "link"))


def test_reads_share_the_rate_and_wait_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(200_000))
    # The bytes take 100 ms.
    emulation = Emulation.of("50 ms, 2MB/s", tmp_path / "link")
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        ask = [pool.submit(SlowFolder(tmp_path, emulation).read, "x", [(0, 100_000), (100_000, 200_000)]) for _ in "ab"]
        assert [len(part) for one in ask for part in one.result()] == [100_000] * 4
    assert 0.25 <= time.monotonic() - began < 1.0, "twice the bytes, and one latency"


def test_an_address_is_not_emulated(tmp_path: Path) -> None:
    emulation = Emulation.of("20ms,100MB/s", tmp_path / "link")
    with pytest.raises(UserError, match="s3://bucket/store: --storage needs a folder of this machine"):
        SlowStore(parse_place("s3://bucket/store"), emulation)


def test_what_an_example_waits_for_is_seen(slow: SlowStore) -> None:
    found = feeding(slow, INITIAL, 4, gpus=8, cores=16, step=0.5)
    assert 3 <= found["reads of an example"]["mean"] <= found["reads of an example"]["most"] == 4
    assert found["storage, ms"]["mean"] >= 10 * found["reads of an example"]["mean"]
    assert 0 < found["decompression, ms"]["mean"] < found["features, ms"]["mean"]
    assert 1 < found["bandwidth, MB/s"] <= 4
    assert found["needed"] == 16
    assert isinstance(slow.storage, SlowFolder), "what was put in its place is gone"


def test_the_emulation_goes_where_the_store_goes(slow: SlowStore) -> None:
    # Worker processes receive the store in this form.
    there = ForkingPickler.loads(ForkingPickler.dumps(slow))
    began = time.monotonic()
    read = there.record("e1").read("aatype")
    assert time.monotonic() - began >= 0.02, "its header and the array"
    np.testing.assert_array_equal(read, example(300, 50, seed=1).aatype)


@pytest.mark.parametrize(
    ("parts", "cores", "given", "limit", "says"),
    [
        ((0.01, 0.02, 0.37), 16, 40.0, "features", "feeds 8 GPUs from 16 cores: 40.0 examples a second, 20.0 needed"),
        ((0.01, 0.37, 0.02), 4, 10.0, "decompression", "decompression; 8 cores would"),
        ((0.75, 0.02, 0.03), 8, 10.0, "storage latency", "storage latency; train.workers=2 for each GPU would"),
        ((0.75, 0.25, 0.00), 4, 4.0, "storage latency", "storage latency; 20 cores would"),
        ((0.01, 0.01, 0.02), 16, 50.0, "storage bandwidth", "feeds 8 GPUs from 16 cores: 50.0"),
    ],
)
def test_arithmetic(parts: tuple[float, float, float], cores: int, given: float, limit: str, says: str) -> None:
    found = Feeding(*parts, size=2e6, bandwidth=100e6, gpus=8, cores=cores, step=0.4)
    assert (round(found.given, 9), found.needed, found.limit) == (given, 20.0, limit)
    assert says in found.verdict()
    assert found.verdict().startswith("feeds" if given >= 20 else "does not feed 8 GPUs")


def test_too_little_bandwidth_is_not_mended_by_cores() -> None:
    found = Feeding(0.01, 0.01, 0.02, size=10e6, bandwidth=100e6, gpus=8, cores=16, step=0.4)
    assert "10.0 examples a second" in found.verdict()
    assert "storage of 200 MB/s would" in found.verdict()
    assert "WARPFOLD_CACHE_GB" not in found.verdict()
    assert "WARPFOLD_CACHE_GB" in found.verdict(cached=True)
