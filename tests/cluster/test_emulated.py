"""The doctor on two emulated nodes with a bad link between them, and beside a rank that is held up, for real."""

import importlib.util
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.cluster.wards import examine
from warpfold.cluster import doctor
from warpfold.cluster.judge_links import judge_links
from warpfold.cluster.links import measure_links
from warpfold.cluster.ranks import judge_ranks
from warpfold.cost.links import network
from warpfold.parallel.team import Team

CPU, NODES = torch.device("cpu"), [[0, 1], [2, 3]]
pytestmark = pytest.mark.slow


def emulator() -> ModuleType:
    """benchmarks/link.py, which is on nobody's path."""
    path = Path(__file__).parents[2] / "benchmarks" / "link.py"
    spec = importlib.util.spec_from_file_location("link_of_tests", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


LINK = emulator() if sys.platform == "linux" else None
REFUSED = LINK.refusal() if LINK else "network namespaces are of Linux"
needs_nodes = pytest.mark.skipif(REFUSED is not None, reason=str(REFUSED))


def of_links(team: Team) -> Any:
    measured, cluster = measure_links(NODES, team, CPU, "", time.time)
    assert cluster is not None
    said = [[one.check, one.outcome, one.says] for one in judge_links(measured, network("eth10", 2))]
    return {"said": said, "within": vars(cluster.within), "between": vars(cluster.between)}


def over(*shape: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """What is wrong with a link of this shape, and what was measured."""
    assert LINK is not None
    with LINK.linked(LINK.Shape(*shape)):
        found = examine(of_links, address="10.77.0.1", enter=LINK.enter)[0]
    assert isinstance(found, dict), found
    return {check: says for check, outcome, says in found["said"] if outcome == "wrong"}, found


@needs_nodes
def test_a_slow_link_is_named() -> None:
    """0.04 Gb/s, where 10 were promised and no machine is busy enough to make of it a hundredth."""
    wrong, found = over(0.04, 0.1)
    assert "slower than Gigabit Ethernet" in wrong["bandwidth of a node"]
    assert found["between"]["bandwidth"] < 0.2 * found["within"]["bandwidth"]


@needs_nodes
def test_a_delayed_link_is_named() -> None:
    wrong, found = over(10, 25)
    assert "more than within a node" in wrong["distance of nodes"]
    assert found["between"]["latency"] > 0.02


@needs_nodes
def test_a_lossy_link_is_named() -> None:
    wrong, _ = over(10, 0.1, 0.02)
    assert "were lost and sent again" in wrong["lost packets"]


@needs_nodes
def test_a_sound_link_loses_nothing_however_busy_the_machine() -> None:
    wrong, _ = over(10, 0.1)
    assert "lost packets" not in wrong


@needs_nodes
def test_a_link_that_is_slow_one_way_is_named() -> None:
    wrong, _ = over(2, 0.1, 0.0, 0.1)
    assert wrong["one way"].startswith("from node 1 to node 0")


def held_up(pid: int) -> None:
    """Let a process run for a tenth of the time."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.18)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.02)


def test_a_rank_that_is_held_up_is_named() -> None:
    def run(team: Team) -> Any:
        holder = None
        if team.process.rank == 1:
            holder = multiprocessing.get_context("fork").Process(target=held_up, args=(os.getpid(),))
            multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
            holder.start()
        try:
            rates = doctor.measure_ranks(team, CPU)
        finally:
            if holder is not None:
                holder.kill()
        return [[one.check, one.outcome, one.says] for one in judge_ranks(rates, [[0, 1, 2]], "cpu")]

    found = examine(run, nodes=1, per_node=3)[0]
    wrong = [says for check, outcome, says in found if outcome == "wrong" and check.startswith("products")]
    assert wrong
    assert all(says.startswith("rank 1 reaches") for says in wrong)
