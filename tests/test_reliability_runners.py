"""Test the runners of docs/explanation/exactness.md: the faults that they plant, and that they report wrong results."""

import json

import torch

from benchmarks.reliability.disk import Trier
from tests.continued import differing


def test_a_bit_is_a_difference_and_rounding_is_none() -> None:
    one = {"log": [{"loss": 1.0}], "w": torch.ones(3)}
    other = {"log": [{"loss": 1.0 + 1e-7}], "w": torch.tensor([1.0, 1.0, 1.0 + 1e-6])}
    assert differing(one, one, exact=True) == []
    assert len(differing(one, other, exact=True)) == 2
    assert differing(one, other, exact=False) == []
    assert differing(one, {"log": []}, exact=False)


def test_each_failing_write_is_tried_once_whatever_was_before(tmp_path) -> None:
    trier = Trier.__new__(Trier)
    trier.log, trier.rows, trier.most = tmp_path / "disk.jsonl", [], None
    trier.tried = {("call", 2), ("from", 1)}
    assert trier.chosen("call", 1, 4) == [1, 3, 4]
    assert trier.chosen("from", 1, 1) == []
    trier.most = 2
    assert trier.chosen("size", 0, 9) == [0, 8]
    trier.note("call", 3, True, ["a", "b", "c", "d"])
    assert trier.figures() == {
        "tried": {"call": 1},
        "ended_with_an_error": {"call": 1},
        "trouble": ["call 3: a", "call 3: b", "call 3: c"],
    }
    assert json.loads(trier.log.read_text()) == trier.rows[0]
