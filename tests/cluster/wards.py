"""Processes for tests of the doctor: ranks on emulated nodes, some of which end early."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.ranks import FINE, Crew
from warpfold.cluster import folder, links
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import Team

QUICK: dict[Any, dict[str, Any]] = {
    links: {
        "PINGS": 6, "REPEATS": 2, "PAIR_SECONDS": 0.002, "RING_SECONDS": 0.002, "MAX_BYTES": {"cpu": 2**19}, "CALLS": 3,
    },
    folder: {"REPLACE_SECONDS": 0.1, "VISIBLE_SECONDS": 0.3},
}  # fmt: skip


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the doctor measure only briefly; the measured speeds are meaningless."""
    for module, values in QUICK.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)


def examine(
    function: Callable[[Team], Any],
    nodes: Sequence[int] = (2, 2),
    limit: float = 60.0,
    address: str = "127.0.0.1",
    enter: Callable[[int], None] | None = None,
    lost: Sequence[int] = (),
) -> list[Any]:
    """Run `function(team)` on each rank, and return the results, which must be JSON-compatible.

    If a rank fails, the result is its error, a string.  nodes, address, enter, lost: as in `Crew.run`.
    """
    with TemporaryDirectory() as name:
        place = Path(name)

        def note(team: Team) -> None:
            (place / f"{team.process.rank}.json").write_text(json.dumps(function(team)))

        plan = Plan(data=sum(nodes), time_limit=limit, start_limit=limit)
        more = {"lost": lost, "nodes": nodes, "address": address, "enter": enter}
        codes, said = Crew(place).run(note, plan, enter is not None, **more)
        return [
            json.loads((place / f"{rank}.json").read_text()) if code == FINE else said[rank]
            for rank, code in enumerate(codes)
        ]
