"""The runners of docs/reliability.md: what they plant, and that they notice what is wrong."""

import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.reliability.damage import BYTES, TEXT, damage
from benchmarks.reliability.disk import Trier
from benchmarks.reliability.inputs import Cases, try_case
from benchmarks.reliability.kills import differing
from benchmarks.reliability.readers import Reader, plain
from benchmarks.reliability.soak import hours_of, judge, read_samples, watch
from warpfold.errors import UserError

TEXTS = b"id,sequence\na,MKV 1.5 -2\nb,AAA 0.25 7\n" * 3


def test_damage_follows_from_the_seed_and_changes_files() -> None:
    for mutation in {*BYTES, *TEXT}:
        results = {mutation(random.Random(seed), TEXTS) for seed in range(20)}
        assert results == {mutation(random.Random(seed), TEXTS) for seed in range(20)}
        assert results - {TEXTS}, mutation.__name__
    first, second = (damage(random.Random("0 7"), TEXTS, True, True) for _ in range(2))
    assert first == second


def numbers(place) -> np.ndarray:
    """A reader that believes everything, or refuses without a name, or fails."""
    text = (place / "x.txt").read_bytes()
    if b"7" not in text:
        raise UserError("somewhere: wrong")
    return np.array([float(word) for word in text.split() if word[:1].isdigit()])


def test_what_a_bad_reader_does_is_found(tmp_path) -> None:
    reader = Reader("numbers", [{"x.txt": b"1.5 2.5 7\n"}], numbers, sealed=True)
    cases, meanings = Cases([reader], 0), {("numbers", 0): plain(np.array([1.5, 2.5, 7.0]))}
    found = [try_case(cases, number, tmp_path / "case", meanings) for number in range(300)]
    said = " ".join(what for outcome, what in found if outcome == 3)
    for kind in ("names no file", "silent: a checksum covers this", "ValueError at"):
        assert kind in said
    assert {outcome for outcome, _ in found} >= {1, 3}


def test_growth_is_told_from_noise() -> None:
    draw, hours = np.random.default_rng(0), np.linspace(0, 2, 600)
    noise = draw.normal(0, 3, 600)
    still, grows = (judge(hours, 400 + slope * hours + noise, 2.0, 1.0) for slope in (0.0, 15.0))
    assert still["flat"]
    assert not grows["flat"]
    assert grows["slope"] == pytest.approx(15, abs=1.5)
    assert grows["interval"][0] < 15 < grows["interval"][1]
    assert judge(hours, np.full(600, 7.0), 2.0, 1.0)["interval"] == [0.0, 0.0]


def test_a_bit_is_a_difference_and_rounding_is_none() -> None:
    one = {"log": [{"loss": 1.0}], "w": torch.ones(3)}
    other = {"log": [{"loss": 1.0 + 1e-7}], "w": torch.tensor([1.0, 1.0, 1.0 + 1e-6])}
    assert differing(one, one, exact=True) == []
    assert len(differing(one, other, exact=True)) == 2
    assert differing(one, other, exact=False) == []
    assert differing(one, {"log": []}, exact=False)


def test_hours_of_all_beginnings_count_and_half_a_line_does_not(tmp_path) -> None:
    log = tmp_path / "samples.jsonl"
    assert hours_of(log) == 0.0
    rows = [json.dumps({"seconds": seconds, "processes": [{}]}) for seconds in (0.0, 1800.0, 3600.0, 0.0, 1800.0)]
    log.write_text("\n".join(rows) + '\n{"seconds": 7200.0, "processes": [{}')
    assert hours_of(log) == 1.5
    code = watch(["sleep", "0.2"], tmp_path, lambda: 7, lambda seconds: False)  # takes the half of a line away
    assert code == 0
    assert [row["done"] for row in read_samples(log)[5:]] == [7]


def test_what_is_watched_ends_with_its_watcher(tmp_path) -> None:
    watcher = os.fork()
    if not watcher:
        watch(["sleep", "600"], tmp_path, lambda: 0, lambda seconds: False)
        os._exit(0)
    log = tmp_path / "samples.jsonl"
    while not log.exists() or not (rows := [row for one in read_samples(log) for row in one["processes"]]):
        time.sleep(0.02)
    os.kill(watcher, signal.SIGKILL)
    os.waitpid(watcher, 0)
    status = Path(f"/proc/{rows[0]['pid']}/stat")
    until = time.monotonic() + 60
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until
        time.sleep(0.02)


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
