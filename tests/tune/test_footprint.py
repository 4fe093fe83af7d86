"""What a worker takes is measured on real workers."""

from pathlib import Path

import pytest

from tests.run.runs import make_store
from warpfold.data.features.choose import SampleConfig
from warpfold.tune.footprint import footprint


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")
def test_a_worker_shares_its_libraries(tmp_path: Path) -> None:
    found = footprint(make_store(tmp_path / "store"), SampleConfig(crop=8), workers=2, examples=6)
    assert found["workers"] == 2
    assert 0 < found["private_mib"] <= found["proportional_mib"] < 200
