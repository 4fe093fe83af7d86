"""The simulated ranks run the real loader, and what a worker takes is measured on real workers."""

from pathlib import Path

import pytest

from tests.training.runs import make_store
from warpfold.bench.data import Simulation, epoch_gap, footprint, simulate, straggler
from warpfold.data.features.choose import SampleConfig

CASE = Simulation(ranks=2, steps=6, step=0.002, making=0.002, slow_share=0.3, workers=1, ahead=2, window=4, examples=5)


def test_every_step_is_timed_and_takes_at_least_what_it_computes() -> None:
    seconds = simulate(CASE)
    assert len(seconds) == 6
    assert min(seconds) >= 0.002


def test_a_run_is_compared_with_itself_without_slow_examples_and_in_order() -> None:
    found = straggler(CASE)
    assert found["case"]["ranks"] == 2
    assert set(found["results"]) == {"without slow examples", "window", "in order"}
    assert found["results"]["without slow examples"]["against_without"] == 1


def test_beginning_anew_waits_for_processes() -> None:
    assert epoch_gap(CASE)["anew"] > 0


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")
def test_a_worker_shares_its_libraries(tmp_path: Path) -> None:
    found = footprint(make_store(tmp_path / "store"), SampleConfig(crop=8), workers=2, examples=6)
    assert found["workers"] == 2
    assert 0 < found["private_mib"] <= found["proportional_mib"] < 200
