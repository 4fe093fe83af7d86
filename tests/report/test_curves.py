"""Watching runs through their logs: what is read of them while they grow, as a few lines and as a page."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warpfold.engine.card import card_page
from warpfold.engine.checkpoint import RunFolder
from warpfold.errors import UserError
from warpfold.report.curves import RunLog, as_text, open_runs, page, write_page
from warpfold.report.report import render

BEGAN = 1_700_000_000.0


def step_row(step: int, loss: float | None, **more: Any) -> dict[str, Any]:
    return {
        "kind": "step", "step": step, "loss": loss, "lddt_ca": 0.3, "terms": {"fape": 0.5}, "grad_norm": 1.0,
        "learning_rate": 1e-3, "samples_per_second": 4.0, "waiting": 0.1, "waiting_so_far": 0.05,
        "time": BEGAN + step, **more,
    }  # fmt: skip


def validation(step: int, score: float, **more: Any) -> dict[str, Any]:
    return {"kind": "validation", "step": step, "lddt_ca": score, "examples": {"a": score}, "time": BEGAN + step} | more


def make_run(path: Path, steps: int = 40, of: int = 100, rate: float = 1e-3, name: str = "x") -> Path:
    """The folder of a run whose loss falls from 4 on."""
    path.mkdir()
    settings = (
        f'[train]\nsteps = {of}\nvalidation = 0.1\n\n[optim]\nlearning_rate = {rate}\n\n[data]\nname = "{name}"\n'
    )
    (path / "settings.toml").write_text(settings)
    rows = [validation(0, 0.1)]
    for number in range(1, steps + 1):
        rows.append(step_row(number, None if number == 7 else 4.0 - number / 20))
        rows += [validation(number, number / 100)] if number % 20 == 0 else []
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def test_a_run_is_read_as_it_grows(run: Path) -> None:
    log = RunLog(run)
    assert (log.step, log.steps, len(log.validations), log.is_finished) == (40, 100, 3, False)
    assert log.seconds_left() == pytest.approx(60.0)
    assert log.state(BEGAN + 41) == "ETA 60 s"
    assert log.state(BEGAN + 41 + 3600) == "no news for 60 min"
    row = json.dumps(step_row(41, 1.0)) + "\n"
    with open(run / "metrics.jsonl", "a") as file:
        file.write(row[:20])
        file.flush()
        log.read()
        assert log.step == 40  # half a line
        file.write(row[20:])
    log.read()
    assert log.step == 41
    assert len(log.curve("loss")) == 40  # one was not finite
    assert log.curve("terms/fape")[0] == (1, 0.5)


def test_a_run_that_was_continued_is_read_again(run: Path) -> None:
    log = RunLog(run)
    kept = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:10]
    (run / "draft").write_text("".join(kept))
    (run / "draft").replace(run / "metrics.jsonl")  # as `RunFolder.open_log`
    (run / "settings.toml").write_text("[train]\nsteps = 9\nvalidation = 0.0\n")
    log.read()
    assert (log.step, log.steps, len(log.validations), log.is_finished) == (9, 9, 1, True)
    assert log.state() == "finished"
    assert page([log], 5).reload is None


def test_a_part_of_a_validation_is_no_point_of_the_curve(run: Path) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(validation(40, 0.9, of=12)) + "\n")
    log = RunLog(run)
    assert log.held_out() == [(0, 0.1), (20, 0.2), (40, 0.4)]
    assert "held-out lDDT-Cα 0.900 (1 of 12 examples, step 40)" in as_text([log])


def test_how_runs_stand_is_said_in_a_few_lines(tmp_path: Path) -> None:
    runs = open_runs([make_run(tmp_path / "run"), make_run(tmp_path / "other", 30, rate=2e-3)])
    assert as_text(runs, now=BEGAN + 41).splitlines() == [
        "run  step 40 of 100  ETA 60 s",
        "loss 2.475  held-out lDDT-Cα 0.400 (step 40)  samples/s 4  waiting 5.0%",
        "other  step 30 of 100  ETA 70 s",
        "loss 2.975  held-out lDDT-Cα 0.200 (step 20)  samples/s 4  waiting 5.0%",
        "other: optim.learning_rate: 0.002, not 0.001",
    ]


def test_odd_rows_are_left_out_and_counted(run: Path) -> None:
    log = run / "metrics.jsonl"
    with open(log, "a") as file:
        file.write('{"kind": "step", "step": 41}\n[]\n{"kind": "step", "step": "x", "loss": []}\n')
        file.write(json.dumps(step_row(41, 1.0)) + "\n")
    found = RunLog(run)
    assert (found.step, found.odd) == (41, 3)
    for text in (as_text([found]), page([found], 5).lead):
        assert "run: 3 lines of metrics.jsonl are damaged, and left out" in text


def test_any_bytes_in_a_log_are_drawn_or_one_line(tmp_path: Path) -> None:
    """What `watch` draws, and what a run that continues reads again."""
    run = make_run(tmp_path / "run", steps=4)
    (run / ".lock").touch()
    log, rng = run / "metrics.jsonl", np.random.default_rng(0)
    whole = log.read_bytes()
    values = [None, -1, 10**400, 1e308, "x", [], {"a": {}}]
    rows = [json.loads(line) for line in whole.splitlines()]
    cases = [b"", b"\xff\n", b"[" * 100_000 + b"\n", whole + b"\0\n"]
    for row in (rows[1], rows[0], {**rows[0], "of": 3}):
        for key in row:
            cases += [whole + json.dumps({**row, key: value}).encode() + b"\n" for value in values]
            cases.append(whole + json.dumps({name: row[name] for name in row if name != key}).encode() + b"\n")
    for _ in range(40):
        data = bytearray(whole)
        for place in rng.integers(len(data), size=5):
            data[place : place + int(rng.integers(5))] = rng.integers(
                256, size=int(rng.integers(5)), dtype=np.uint8
            ).tobytes()
        cases.append(bytes(data))
    drawn = 0
    for number, case in enumerate(cases):
        log.write_bytes(case)
        try:
            found = RunLog(run)
        except UserError as error:
            assert "is not of a run's log" in str(error)  # noqa: PT017
            continue
        drawn += bool(as_text([found], now=BEGAN))
        if len(case) < len(whole) + 100 and number % 10 == 0:  # drawing takes a second
            assert "<svg" in render(page([found], 5)) or not found.rows
        with RunFolder(run, score="lddt_ca") as folder:
            last = folder.open_log(4)
            assert last is None or last["step"] <= 4
    assert drawn > len(cases) - 10


def test_what_is_no_run_is_said_in_a_line(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    wrong = {
        tmp_path / "nowhere": "no such folder; give the --out of `warpfold train`",
        run / "metrics.jsonl": "no such folder",
        tmp_path / "empty": "not the folder of a training run",
        tmp_path: "did you mean .*run?",
    }
    for path, said in wrong.items():
        with pytest.raises(UserError, match=said) as error:
            open_runs([run, path])
        assert "\n" not in str(error.value)
    (run / "metrics.jsonl").write_text('{"kind": "step"}\n')
    with pytest.raises(UserError, match="is not of a run's log"):
        RunLog(run)
    (run / "metrics.jsonl").unlink()
    assert RunLog(run).state() == "no steps yet"
    assert "no steps yet" in as_text([RunLog(run)])
    assert "no steps yet" in render(page([RunLog(run)], 5))
    (run / "settings.toml").write_text("[train\n")
    with pytest.raises(UserError, match="is damaged"):
        RunLog(run)


def test_a_page_is_whole_offline_and_escaped(tmp_path: Path) -> None:
    runs = open_runs([make_run(tmp_path / "a<b>", name="</script><b>"), make_run(tmp_path / "b", 30, rate=2e-3)])
    text = render(page(runs, 7))
    assert "a&lt;b&gt;" in text
    assert "<b>" not in text
    assert '<meta http-equiv="refresh" content="7">' in text
    assert text.count("<figure>") == 8  # six of steps, held out, a loss term
    assert "b differs from a&lt;b&gt;: " in text
    assert "optim.learning_rate: 0.002, not 0.001" in text


def test_the_card_of_a_finished_run_is_on_its_page(run: Path) -> None:
    assert "Card of" not in render(page([RunLog(run)], 5))
    facts, more = [("data", "`store`, 3 entries"), ("licence", "a | b")], ["## Validations", "", "| step | x |", ""]
    values: dict[str, dict[str, Any]] = {name: {} for name in ("data", "optim", "plan", "train")}
    (run / "card.md").write_text(card_page("Trained", "it did", facts, more, values, "warpfold train tiny <x>"))
    text = render(page([RunLog(run)], 5))
    for said in ("Card of run", "store, 3 entries", "a | b", "warpfold train tiny &lt;x&gt;"):
        assert said in text
    assert "<td>step</td>" not in text


def test_a_page_replaces_its_own_alone(run: Path, tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", [RunLog(run)], 5)
    write_page(tmp_path / "page.html", [RunLog(run)], 5)
    (tmp_path / "thesis.html").write_text("<!doctype html>\nyears of work")
    with pytest.raises(UserError, match="exists already, and is no page of `warpfold watch`; name another file"):
        write_page(tmp_path / "thesis.html", [RunLog(run)], 5)
    with pytest.raises(UserError):
        write_page(tmp_path, [RunLog(run)], 5)
