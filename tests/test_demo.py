"""Test the demo at a very small scale: it makes all its parts and does not touch other files."""

import json
from pathlib import Path

import pytest

from tests.test_cli import run
from warpfold import demo_run
from warpfold.demo_run import run_demo
from warpfold.errors import UserError

SMALL = (
    *("train.steps=2", "train.validate_every=1", "train.save_every=1", "optim.accumulate=1", "train.validation=0.3"),
    *("model.c_m=8", "model.c_z=8", "model.c_s=8", "model.c_e=8", "model.evoformer.blocks=1", "model.recycles=0"),
    *("model.structure.c=8", "model.structure.layers=1", "data.max_msa=4", "data.max_extra=4"),
)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, int, str]]]:
    """Run the demo.  Returns its folder and the reported progress."""
    out = tmp_path_factory.mktemp("demo") / "out"
    said: list[tuple[int, int, str]] = []
    run_demo(out, proteins=6, changes=SMALL, progress=lambda *news: said.append(news))
    return out, said


def test_everything_is_there(done: tuple[Path, list[tuple[int, int, str]]]) -> None:
    out, _ = done
    assert {p.name for p in out.iterdir()} == {*demo_run.PARTS, "summary.json"}
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["proteins"], summary["steps"]) == ("complete", 6, 2)
    for kind in ("training", "held_out"):
        assert summary[kind]["proteins"] > 0
        assert all(0 <= summary[kind][model] <= 1 for model in ("untrained", "trained"))
    for entry in summary["predictions"]:
        assert (out / "predictions" / entry["folder"] / entry["files"]["mmcif"]).is_file()
    page = (out / "report.html").read_text()
    assert summary["predictions"][0]["name"] in page
    assert "Expect low confidence" in page.split("</header>")[0]
    assert page.count('class="viewer"') == min(demo_run.MEASURED, len(summary["predictions"]))


def test_progress_rises_to_the_end(done: tuple[Path, list[tuple[int, int, str]]]) -> None:
    percents = [at for at, _, _ in done[1]]
    assert percents == sorted(percents)
    assert (percents[-1], done[1][-1][1]) == (100, 100)
    assert {what.split(",")[0] for _, _, what in done[1]} == {*demo_run.PERCENT, "done"}


def test_dimers_are_packed_folded_and_scored(tmp_path: Path) -> None:
    """A multimer's demo has the same parts, and also scores the interfaces of dimers."""
    out = tmp_path / "out"
    run_demo(out, multimer=True, proteins=6, changes=SMALL)
    assert {p.name for p in out.iterdir()} == {*demo_run.PARTS, "summary.json"}
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["proteins"], summary["steps"]) == ("complete", 6, 2)
    for score in ("dockq", "interface_lddt", "iptm"):
        assert all(0 <= summary["held_out"][score][model] <= 1 for model in ("untrained", "trained"))
    for entry in summary["predictions"]:
        assert [chain["id"] for chain in entry["chains"]] == ["A", "B"]
        text = (out / "predictions" / entry["folder"] / entry["files"]["mmcif"]).read_text()
        assert {line.split()[6] for line in text.splitlines() if line.startswith("ATOM")} == {"A", "B"}
    assert "DockQ" in (out / "report.html").read_text()


@pytest.mark.parametrize(("options", "changes"), [((), []), (("--steps", "50"), ["train.steps=50"])])
def test_the_command_may_train_for_fewer_steps(
    options: tuple[str, ...], changes: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_run, "run_demo", lambda out, **given: {"changes": given["changes"]})
    code, said, _ = run(capsys, "demo", "--json", *options)
    assert (code, json.loads(said)) == (0, {"changes": changes})


def test_other_settings_need_force(done: tuple[Path, list[tuple[int, int, str]]]) -> None:
    out, _ = done
    with pytest.raises(UserError, match="another run"):
        run_demo(out, proteins=5, changes=SMALL)
    assert run_demo(out, proteins=5, changes=SMALL, force=True)["proteins"] == 5


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    for force in (False, True):
        with pytest.raises(UserError, match="something else"):
            run_demo(tmp_path, proteins=5, changes=SMALL, force=force)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
