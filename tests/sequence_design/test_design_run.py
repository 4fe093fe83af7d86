"""Test `warpfold design`: settings, design files, and errors."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.helpers import as_multimer, filled_model, tiny_config
from warpfold.cli import app
from warpfold.data.features.choose import SampleConfig
from warpfold.data.structure.mmcif import read_structure
from warpfold.data.structure.write import write_mmcif
from warpfold.errors import UserError
from warpfold.geometry.residue import RESTYPES
from warpfold.model.weights.files import save_params
from warpfold.prediction.predictor import Predictor
from warpfold.sequence_design.run import Problem, first_logits, one_hot, run_design, updated_logits
from warpfold.sequence_design.settings import PRESETS, DesignSettings, load_design
from warpfold.settings import to_dict

STAGES = [
    {"steps": 3, "soft": [0.0, 1.0]},
    {"steps": 2, "temperature": [1.0, 0.1]},
    {"steps": 3, "hard": 1.0, "temperature": [0.1, 0.1], "rate": 1.0, "weights": {"plddt": 2.0}},
]
VALUES = {"chains": {"A": 6}, "loss": {"plddt": 1.0, "contacts": 0.3}, "shape": {"contact_separation": 2}}
VALUES |= {"stages": STAGES, "spread": 1.0}
SAMPLE = SampleConfig(max_msa=4, max_extra=4, max_templates=0)


def predictor(multimer: bool = False) -> Predictor:
    config = tiny_config(templates=replace(tiny_config().templates, enabled=False))
    return Predictor(filled_model(as_multimer(config) if multimer else config), sample=SAMPLE)


def test_designs_are_written_the_best_first(tmp_path: Path) -> None:
    out = tmp_path / "out"
    told: list[tuple[int, int]] = []
    found = run_design(
        predictor(),
        load_design(VALUES),
        out,
        starts=2,
        seed=3,
        progress=lambda done, total, text: told.append((done, total)),
    )
    # Two starts of eight steps each
    assert [done for done, _ in told] == [*range(16), 16]
    assert {total for _, total in told} == {16}
    losses = [one["loss"] for one in found["designs"]]
    assert losses == sorted(losses)
    names = [one["name"] for one in found["designs"]]
    assert sorted(names) == ["design_0001", "design_0002"]
    fasta = (out / "designs.fasta").read_text().split()
    assert fasta == [word for one in found["designs"] for word in (f">{one['name']}", one["sequence"])]
    rows = [json.loads(line) for line in (out / "starts/design_0001.jsonl").read_text().splitlines()]
    assert [row["stage"] for row in rows] == [0, 0, 0, 1, 1, 2, 2, 2]
    assert [row["soft"] for row in rows[:4]] == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert rows[4]["temperature"] == pytest.approx(0.1)
    (one,) = (one for one in found["designs"] if one["name"] == "design_0001")
    hard = [row for row in rows if row["hard"] == 1.0]
    best = min(hard, key=lambda row: row["loss"])
    assert one["designed"] == best["letters"]
    assert one["loss"] == pytest.approx(best["loss"], abs=1e-5)
    structure = read_structure(out / "designs/design_0001.cif")
    assert structure.chains["A"].sequence == one["sequence"]
    alone = predictor().fold(one["sequence"], recycles=0)
    np.testing.assert_allclose(structure.chains["A"].positions, alone.positions, atol=2e-3)
    page = (out / "report.html").read_text()
    assert "sequence logo" in page
    assert one["sequence"] in page
    assert (out / "designs.csv").read_text().startswith("name,loss,mean_plddt,ptm,iptm,loss.plddt,loss.contacts,")


def test_more_starts_may_be_asked_for_and_another_run_is_refused(tmp_path: Path) -> None:
    settings, out = load_design(VALUES), tmp_path / "out"
    first = run_design(predictor(), settings, out, starts=1)["designs"][0]
    more = run_design(predictor(), settings, out, starts=2)["designs"]
    assert first in more
    assert len(more) == 2
    with pytest.raises(UserError, match=r"holds another run \(seed: 1, not 0\)"):
        run_design(predictor(), settings, out, seed=1)
    assert len(run_design(predictor(), settings, out, seed=1, force=True)["designs"]) == 1
    for mine in (tmp_path / "other/designs", out / "starts"):
        mine.mkdir(parents=True, exist_ok=True)
        (mine / "design_thesis.cif").write_text("mine")
        with pytest.raises(UserError, match=r"holds design_thesis\.cif, which WarpFold did not write"):
            run_design(predictor(), settings, mine.parent, force=True)
        assert (mine / "design_thesis.cif").read_text() == "mine"
        (mine / "design_thesis.cif").unlink()
    (tmp_path / "site").mkdir()
    (tmp_path / "site/report.html").write_text("mine")
    with pytest.raises(UserError, match=r"holds report\.html"):
        run_design(predictor(), settings, tmp_path / "site")
    (out / "thesis.txt").write_text("")
    with pytest.raises(UserError, match=r"holds thesis\.txt"):
        run_design(predictor(), settings, out, seed=1)


def test_a_folder_with_a_damaged_file_is_refused_in_a_line(tmp_path: Path) -> None:
    settings, out = load_design(VALUES), tmp_path / "out"
    run_design(predictor(), settings, out)
    infinite = json.dumps(json.loads((out / "designs/design_0001.json").read_text()) | {"seed": math.inf})
    infinite = infinite.replace("Infinity", "1e999")
    for name, data, said in (
        ("run.json", b'{"seed": 0', r"run\.json: damaged .*--force"),
        ("designs/design_0001.json", b'{"loss": 1e999}', r"design_0001\.json: damaged .*Remove it"),
        ("designs/design_0001.json", infinite.encode(), r"_0001\.json: damaged .*Remove it"),
        ("designs/design_0001.json", b"\xff", r"design_0001\.json: damaged .*Remove it"),
    ):
        whole = (out / name).read_bytes()
        (out / name).write_bytes(data)
        with pytest.raises(UserError, match=said):
            run_design(predictor(), settings, out)
        (out / name).write_bytes(whole)
    (out / "designs/design_0001.json").unlink()
    state, rows = (out / f"starts/design_0001{ending}" for ending in (".safetensors", ".jsonl"))
    whole = state.read_bytes()
    for path, data in (
        (state, whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]),  # a bit of the logits
        (rows, rows.read_bytes().replace(b'"step": 1', b'"step": 7')),
        (rows, rows.read_bytes().replace(b'"hard"', b'"lard"')),
        (rows, rows.read_bytes().replace(b'"plddt": ', b'"plddt": 1e999, "x": ', 1)),
        (rows, b"\xff\n"),
    ):
        before = path.read_bytes()
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"damaged .*to repeat this start"):
            run_design(predictor(), settings, out)
        path.write_bytes(before)
    assert len(run_design(predictor(), settings, out)["designs"]) == 1


def test_copies_and_fixed_letters_of_a_complex(tmp_path: Path) -> None:
    values = VALUES | {"chains": {"A": "MKVLA", "B,C": "--C---"}}
    values |= {"loss": {"iptm": 1.0, "interface_contacts": 0.1, "symmetry": 0.1}}
    values["stages"] = [{"steps": 2, "hard": 1.0}]
    (one,) = run_design(predictor(True), load_design(values), tmp_path / "out")["designs"]
    a, b, c = one["sequence"].split(":")
    assert (a, b) == ("MKVLA", c)
    assert b[2] == "C"
    assert one["designed"] == {"B,C": b}
    assert one["iptm"] is not None


def test_a_step_is_as_long_whatever_the_loss() -> None:
    x = first_logits({"A": 5}, 1.0, 0, "design_0001")["A"]
    assert x.std() == pytest.approx(1.0, abs=0.3)
    grad = np.random.default_rng(0).normal(size=(5, 20))
    grad[2] = 0  # a fixed letter
    for scale in (1e-3, 1.0, 1e3):
        assert np.linalg.norm(updated_logits(x, scale * grad, 0.1) - x) == pytest.approx(0.1 * 2, rel=1e-3)
    np.testing.assert_array_equal(updated_logits(x, 0 * grad, 0.1), x)
    assert "".join(RESTYPES[i] for i in one_hot("WKCA").argmax(-1)) == "WKCA"


def test_presets_are_whole_and_the_command_designs_a_backbone(tmp_path: Path) -> None:
    names = sorted(file.stem for folder in PRESETS for file in folder.glob("*.toml"))
    assert names == ["binder", "fixed_backbone", "hallucination"]
    assert all(load_design(name).steps == 125 for name in names)
    save_params(tmp_path / "tiny.safetensors", predictor().model, to_dict(SAMPLE))
    fold = predictor().fold("MKVLAGSTWE")
    target = tmp_path / "fold.cif"
    target.write_text(write_mmcif("fold", fold.chains()))
    short = ["--set", "stages=[{steps = 2}, {steps = 1, hard = 1.0}]", "--json", "-q"]
    command = ["design", "fixed_backbone", "--params", str(tmp_path / "tiny.safetensors"), "--target", str(target)]
    shown = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out"), *short])
    assert shown.exit_code == 0, shown.output
    (one,) = json.loads(shown.stdout)["designs"]
    assert len(one["sequence"]) == 10
    assert set(one["terms"]) == {"distogram", "plddt"}
    folded = CliRunner().invoke(
        app, ["predict", str(tmp_path / "out/designs.fasta"), "--params", str(tmp_path / "tiny.safetensors"),
              "--out", str(tmp_path / "folded"), "-q", "--json"])  # fmt: skip
    assert folded.exit_code == 0, folded.output
    assert json.loads(folded.stdout)["predictions"][0]["sequence"] == one["sequence"]


def test_parameters_for_single_chains_design_a_binder_with_a_chain_gap(tmp_path: Path) -> None:
    for multimer in (False, True):
        save_params(tmp_path / f"{multimer}.safetensors", predictor(multimer).model, to_dict(SAMPLE))
    (tmp_path / "own.toml").write_text(
        'chains = {A = "MKVLA", B = 4}\nloss.interface_contacts = 1.0\nstages = [{steps = 2, hard = 1.0}]\n'
    )

    def run(gap: int, params: str) -> Any:
        given = "--params", tmp_path / params, "--out", tmp_path / "out", "--chain-gap", gap, "-q", "--json"
        return CliRunner().invoke(app, ["design", str(tmp_path / "own.toml"), *map(str, given)])

    shown = run(200, "False.safetensors")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert found["chain_gap"] == 200
    assert found["designs"][0]["sequence"].startswith("MKVLA:")
    for gap, params, said in (
        (100, "False.safetensors", "holds another run"),
        (200, "True.safetensors", "True.safetensors is AlphaFold-Multimer's"),
    ):
        refused = run(gap, params).exception
        assert isinstance(refused, UserError)
        assert said in str(refused)


def test_a_complex_needs_a_multimer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a complex, but these parameters are for single chains"):
        run_design(predictor(), load_design(VALUES | {"chains": {"A": 4, "B": 4}}), tmp_path / "out")


def test_a_head_that_is_lacking_is_said_before_anything_is_written(tmp_path: Path) -> None:
    settings = replace(load_design(VALUES), loss=replace(load_design(VALUES).loss, pae=1.0))
    with pytest.raises(UserError, match=r"stage 1: loss\.pae = 1: these parameters have no head"):
        Problem.of(settings, pae=False)
    assert isinstance(settings, DesignSettings)
