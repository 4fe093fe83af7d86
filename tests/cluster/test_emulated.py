"""The probe of links on two emulated nodes with a slow or a delayed link between them."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.cluster.wards import examine
from warpfold.cluster.links import measure_links
from warpfold.cluster.rules import judge
from warpfold.cluster.subjects import link_subjects
from warpfold.cost.links import network
from warpfold.parallel.team import Team

CPU, NODES = torch.device("cpu"), [[0, 1], [2, 3]]
pytestmark = pytest.mark.slow


def emulator() -> ModuleType:
    """Import benchmarks/link.py, which is not on the import path."""
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
    links = measure_links(NODES, team, CPU)
    cluster = links.cluster()
    assert cluster is not None
    findings = judge({"ranks": [], "gpus": [], **link_subjects(links, network("eth10", 2), ["a", "b"])})
    wrong = {one.check: one.says for one in findings if one.outcome == "wrong"}
    return {"wrong": wrong, "within": vars(cluster.within), "between": vars(cluster.between)}


def over(*shape: float) -> dict[str, Any]:
    """Measure a link of this latency and bandwidth."""
    assert LINK is not None
    with LINK.linked(LINK.Shape(*shape)):
        measured = examine(of_links, address="10.77.0.1", enter=LINK.enter)[0]
    assert isinstance(measured, dict), measured
    return measured


@needs_nodes
def test_a_slow_link_is_named() -> None:
    """A link of 0.04 Gb/s is reported if 10 are expected, a difference that no busy machine causes."""
    measured = over(0.04, 0.1)
    assert measured["wrong"]["bandwidth of a node"].endswith("slower than Gigabit Ethernet")
    assert measured["between"]["bandwidth"] < 0.2 * measured["within"]["bandwidth"]
    assert measured["between"]["bandwidth"] == pytest.approx(5e6, rel=0.3)


@needs_nodes
def test_a_delayed_link_is_measured() -> None:
    measured = over(10, 25)
    assert measured["between"]["latency"] == pytest.approx(0.025, rel=0.3)
    assert measured["within"]["latency"] < 0.01
