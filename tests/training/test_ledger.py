"""The ledger records each example before it is used, and a run continues from its record."""

import json
from pathlib import Path

import pytest

from warpfold.data.load.schedule import Draw, State
from warpfold.errors import UserError
from warpfold.training.ledger import Ledger


def write(folder: Path, *draws: tuple[int, int], place: int = 0, state: State | None = None) -> None:
    with Ledger(folder, "data", place, state or State()) as ledger:
        for draw in draws:
            ledger.use(Draw(*draw))


def test_what_was_used_after_a_place_is_repeated(tmp_path: Path) -> None:
    write(tmp_path, (1, 0), (0, 0), (3, 2), (2, 0))
    assert (tmp_path / "order.txt").read_text().splitlines()[1:] == ["0 1 0", "1 0 0", "2 3 2", "3 2 0"]
    with Ledger(tmp_path, "data", 2, State(2)) as ledger:
        assert ledger.replay == [[Draw(3, 2), Draw(2)]]
        before = (tmp_path / "order.txt").read_bytes()
        ledger.use(Draw(3, 2))
        assert (tmp_path / "order.txt").read_bytes() == before  # recorded already
        ledger.use(Draw(2, 1))  # the last line counts
    with Ledger(tmp_path, "data", 2, State(2)) as ledger:
        assert ledger.replay == [[Draw(3, 2), Draw(2, 1)]]


def test_a_torn_line_is_as_good_as_none(tmp_path: Path) -> None:
    write(tmp_path, (1, 0), (0, 0))
    with open(tmp_path / "order.txt", "a") as file:
        file.write("2 3")
    with open(tmp_path / "quarantine.jsonl", "a") as file:
        file.write('{"name"')
    write(tmp_path, (5, 0), place=2, state=State(2))
    with Ledger(tmp_path, "data", 0, State()) as ledger:
        assert ledger.replay == [[Draw(1), Draw(0), Draw(5)]]
        assert ledger.quarantined == []


def test_what_was_set_aside_is_remembered(tmp_path: Path) -> None:
    with Ledger(tmp_path, "data", 0, State()) as ledger:
        ledger.set_aside("1abc_A", 7, "damaged")
    with Ledger(tmp_path, "data", 0, State()) as ledger:
        assert ledger.quarantined == ["1abc_A"]
    entry = json.loads((tmp_path / "quarantine.jsonl").read_text())
    assert entry == {"name": "1abc_A", "example": 7, "reason": "damaged"}
    (tmp_path / "quarantine.jsonl").write_text("nonsense\n")
    with pytest.raises(UserError, match=r"quarantine.jsonl: damaged. Remove it"):
        Ledger(tmp_path, "data", 0, State())


def test_another_runs_order_is_followed_if_it_fits(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    write(theirs, (1, 0), (0, 0), (2, 0))
    replay = theirs / "order.txt"
    with Ledger(ours, "data", 0, State(), replay) as ledger:
        assert ledger.replay == [[Draw(1), Draw(0), Draw(2)]]
    with pytest.raises(UserError, match="other data, another seed"):
        Ledger(ours, "other", 0, State(), replay)
    with pytest.raises(UserError, match="some that this run has used already"):
        Ledger(ours, "data", 1, State(1), replay)
    for text, message in (("", "not the order.txt"), ("# warpfold order 1 data\n0 x\n", "damaged")):
        replay.write_text(text)
        with pytest.raises(UserError, match=message):
            Ledger(ours, "data", 0, State(), replay)
    with pytest.raises(UserError, match="No such file"):
        Ledger(ours, "data", 0, State(), tmp_path / "none")
