"""Test the card of trained parameters."""

from pathlib import Path

from warpfold.engine.checkpoint import RunFolder
from warpfold.training.card import SHOWN_SETTINGS, run_card


def test_the_first_the_best_and_the_last_validation_are_listed(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", score="lddt_ca") as run:
        run.open_log(0)
        for step, score in [(2, 0.2), (4, 0.3), (6, 0.5), (1_008, 0.4)]:
            row = {"kind": "step", "step": step, "examples": [1, 2], "samples_per_second": 0.5, "waiting": 0.25}
            run.log(row)
            run.log({"kind": "validation", "step": step, "lddt_ca": score, "examples": {"one": score}})
        settings = {section: {} for section in SHOWN_SETTINGS} | {"optim": {"accumulate": 2}}
        text = run_card(run.path, settings, (), held_out=1, init=None, device="cpu", ranks=1, command="",
                        best=run.best()[0])  # fmt: skip
    assert "lDDT-Cα of held-out entries 0.4000 after step 1,008, and at best 0.5000, after step 6." in text
    assert text.split("|---|---|---|---|\n")[1].split("\n\n")[0].splitlines() == [
        "| 2 | 0.2000 | 1 of 1 |  |",
        "| 6 | 0.5000 | 1 of 1 | the best |",
        "| 1,008 | 0.4000 | 1 of 1 |  |",
    ]
    assert "16 of steps, 25% of them waiting for examples" in text
