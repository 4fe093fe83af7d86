"""Test `predict` on complexes: chains in the output, ranking over models and seeds, warnings, templates."""

import html
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gemmi
import numpy as np
import pytest

from tests.helpers import tiny_config, tiny_model
from tests.prediction.runs import run_cli, write_entry
from warpfold import predict
from warpfold.data.formats.alignment import decode, parse_a3m
from warpfold.errors import UserError
from warpfold.model.embed import MultimerConfig
from warpfold.model.weights.files import save_params
from warpfold.prediction import notices
from warpfold.prediction.notices import Notice, noted
from warpfold.prediction.pages import warnings_of
from warpfold.prediction.params import read_params
from warpfold.prediction.predictor import Predictor, Prepared, load
from warpfold.prediction.queries import query_of, read_queries, with_templates
from warpfold.prediction.templates import TemplateSources, files_of_chains
from warpfold.relaxation import files as relax_files
from warpfold.report.report import Warned

TABLES = {"scores.csv", "scores_pairs.csv"}
ONE, TWO = "MKTAYIAKQRQISFVKSH", "GSHMLEERLGL"
RECORDS = f">H heavy\n{ONE}\n>L\n{TWO}\n>x\n{ONE}\n"  # two entities, three chains
PAIRED = (
    f">one\n{ONE}\n>tr|A0A000|A0A000_HUMAN/1-18\n-KTAYLAKQRQISFVRSH\n>tr|A0A001|A0A001_MOUSE/1-18\nMKTAYIAKQRQISF----\n"
)
PARTNER = f">two\n{TWO}\n>tr|A0A002|A0A002_MOUSE/1-11\nGSHMLEERLG-\n"


def multimer(seed: int = 0, **changes: Any) -> Any:
    heads = replace(tiny_config().heads, msa_classes=22)
    return tiny_model(seed=seed, **{"multimer": MultimerConfig(), "heads": heads} | changes)


@pytest.fixture(scope="module")
def params(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save random parameters of two multimer models and a monomer model."""
    folder = tmp_path_factory.mktemp("params")
    models = {"first": multimer(0), "second": multimer(1), "monomer": tiny_model()}
    for name, model in models.items():
        save_params(folder / f"{name}.safetensors", model)
    return {name: folder / f"{name}.safetensors" for name in models}


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    path = tmp_path / "trio.fasta"
    path.write_text(RECORDS)
    return path


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory, params: dict[str, Path]) -> tuple[Path, Path, dict[str, Any]]:
    """Fold a complex with two models and two seeds each. Return the folders of input and output, and the summary."""
    folder = tmp_path_factory.mktemp("ranked")
    (folder / "trio.fasta").write_text(RECORDS)
    (folder / "h.a3m").write_text(PAIRED)
    (folder / "l.a3m").write_text(PARTNER)
    return folder, folder / "out", fold_ranked(folder, params)


def fold_ranked(folder: Path, params: dict[str, Path], **options: Any) -> dict[str, Any]:
    msas, models = [folder / "h.a3m", folder / "l.a3m"], [params["first"], params["second"]]
    given: dict[str, Any] = {"seed": 7, "seeds": 2, "recycles": 0} | options
    return predict(folder / "trio.fasta", models, folder / "out", msa=msas, **given)


def written(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def test_the_users_chains_in_their_order_are_in_every_file(ranked: tuple[Path, Path, dict[str, Any]]) -> None:
    _, out, summary = ranked
    entry = summary["predictions"][0]
    assert (entry["name"], entry["length"], entry["sequence"]) == ("trio", 47, f"{ONE}:{TWO}:{ONE}")
    assert [(c["id"], c["length"], c["msa_depth"]) for c in entry["chains"]] == [
        ("H", 18, 3),
        ("L", 11, 2),
        ("x", 18, 3),
    ]
    assert (entry["msa_depth"], entry["msa_given"]) == (3, 5)
    # All three chains have a row of MOUSE; only the copies of H have one of HUMAN.
    assert entry["paired_rows"] == 1
    assert re.fullmatch(r"chain breaks \(neighbouring Cα too near or too far\): \d+", entry["warnings"][0]["text"])
    folder = out / entry["folder"]
    for kind in ("mmcif", "pdb"):
        model = gemmi.read_structure(str(folder / entry["files"][kind]))[0]
        assert [chain.name for chain in model] == ["H", "L", "x"]
        assert [[residue.seqid.num for residue in chain] for chain in model] == [
            [*range(1, n + 1)] for n in (18, 11, 18)
        ]
    block = gemmi.cif.read(str(folder / entry["files"]["mmcif"])).sole_block()
    assert list(block.find_values("_struct_asym.entity_id")) == ["1", "2", "1"]
    with np.load(folder / entry["files"]["arrays"], allow_pickle=False) as arrays:
        assert np.bincount(arrays["asym_id"]).tolist() == [0, 18, 11, 18]
        pairs = arrays["chain_pair_iptm"]
        np.testing.assert_allclose(pairs, entry["chain_pair_iptm"], atol=1e-4)
        assert arrays["pae"].shape == (47, 47)
    assert (pairs == pairs.T).all()
    np.testing.assert_allclose(pairs.diagonal(), [chain["ptm"] for chain in entry["chains"]], atol=1e-4)
    scores = json.loads((folder / entry["files"]["scores"]).read_text())
    np.testing.assert_allclose(scores["chain_pair_iptm"], pairs, atol=0.0051)
    np.testing.assert_allclose(scores["chain_ptm"], pairs.diagonal(), atol=0.0051)
    assert pairs.diagonal().all()
    assert "pTM of each chain" in (out / "report.html").read_text()
    plddt = json.loads((folder / entry["files"]["plddt"]).read_text())
    assert plddt["chainId"] == list("H" * 18 + "L" * 11 + "x" * 18)
    assert plddt["residueNumber"] == [*range(1, 19), *range(1, 12), *range(1, 19)]
    names = {tuple(one["chains"]) for one in entry["interfaces"]}
    assert names <= {("H", "L"), ("H", "x"), ("L", "x")}


def test_predictions_are_ranked_best_first(ranked: tuple[Path, Path, dict[str, Any]]) -> None:
    _, out, summary = ranked
    assert summary == json.loads((out / "summary.json").read_text())
    entries, ranking = summary["predictions"], summary["ranking"]["trio"]
    assert ranking["by"] == "0.8 ipTM + 0.2 pTM"
    assert [entry["rank"] for entry in entries] == [1, 2, 3, 4]
    assert {(entry["model"], entry["seed"]) for entry in entries} == {
        (m, s) for m in ("first", "second") for s in (7, 8)
    }
    scores = [entry["ranking_confidence"] for entry in entries]
    assert scores == sorted(scores, reverse=True)
    for entry in entries:
        assert entry["ranking_confidence"] == pytest.approx(0.8 * entry["iptm"] + 0.2 * entry["ptm"], abs=1e-4)
        assert entry["folder"] == f"trio/{entry['model']}_seed_{entry['seed']}"
        for kind, copy in entry["ranked"].items():
            same = (out / copy).read_bytes() == (out / entry["folder"] / entry["files"][kind]).read_bytes()
            # The structures are superposed on the best one.
            assert same == (entry["rank"] == 1 or kind not in ("mmcif", "pdb"))
        assert entry["ranked"]["mmcif"] == f"trio/trio_rank_{entry['rank']}.cif"
    assert [one["folder"] for one in ranking["order"]] == [entry["folder"] for entry in entries]
    assert [(model["name"], model["file"]) for model in summary["models"]] == [
        ("first", "first.safetensors"),
        ("second", "second.safetensors"),
    ]
    page = (out / "report.html").read_text()
    for text in ("Ranking", "trio, rank 4", "colour by chain", "H-L", "seeds 7 to 8", "interface pLDDT"):
        assert text in page


def test_a_ranked_run_continues_where_it_was_stopped(
    ranked: tuple[Path, Path, dict[str, Any]], params: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out, summary = ranked
    before, one, lost = written(out), Predictor.compute, summary["predictions"][2]
    (out / lost["folder"] / lost["files"]["mmcif"]).unlink()
    folded = []

    def counted(predictor: Predictor, prepared: Prepared, *args: Any) -> Any:
        folded.append(prepared.seed)
        return one(predictor, prepared, *args)

    monkeypatch.setattr(Predictor, "compute", counted)
    again = fold_ranked(folder, params)
    assert folded == [lost["seed"]]
    assert [entry["folder"] for entry in again["predictions"]] == [entry["folder"] for entry in summary["predictions"]]
    kept = [name for name in before if "_seed_" in name and lost["folder"] not in name]
    assert {name: written(out)[name] for name in kept} == {name: before[name] for name in kept}


def test_force_takes_away_all_that_a_ranked_run_made(tmp_path: Path, fasta: Path, params: dict[str, Path]) -> None:
    predict(fasta, params["first"], tmp_path / "out", recycles=0, seeds=2)
    (tmp_path / "out/trio/notes.txt").write_text("mine")
    with pytest.raises(UserError, match="another run"):
        predict(fasta, params["first"], tmp_path / "out", recycles=0)
    predict(fasta, params["first"], tmp_path / "out", recycles=0, force=True)
    stem = {f"trio/trio{end}" for end in (".cif", ".pdb", ".npz", "_plddt.json", "_pae.json", "_scores.json")}
    stem |= {f"trio/trio_{name}.{form}" for name in ("plddt", "pae", "coverage") for form in ("png", "svg")}
    assert set(written(tmp_path / "out")) - {"scores.parquet"} == {
        "summary.json",
        "report.html",
        "cite.bibtex",
        "predict.log",
        *TABLES,
        "trio/notes.txt",
        *stem,
    }


def test_one_prediction_failing_leaves_the_others_ranked(
    tmp_path: Path, fasta: Path, params: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    fold = Predictor.compute

    def failing(self: Predictor, prepared: Prepared, *args: Any) -> Any:
        if prepared.seed == 1:
            raise RuntimeError("out of memory")
        return fold(self, prepared, *args)

    monkeypatch.setattr(Predictor, "compute", failing)
    arguments = [fasta, "--params", params["first"], "--seeds", 2, "--recycles", 0, "--out", tmp_path / "out"]
    code, out, err = run_cli(capsys, *arguments, "--batch", 1)
    assert code == 1
    assert re.match(r"trio \(47 residues, 3 chains, [\d of]+ alignment rows?\), rank 1: mean pLDDT ", out)
    assert "ipTM" in out
    assert "trio: no alignment for chains H, L, x: folded by the sequence alone\n" in err
    assert err.endswith("\nfailed trio (first, seed 1): RuntimeError: out of memory\n")


def test_a_homodimer_uses_rows_that_are_named_as_serving_to_pair(tmp_path: Path, params: dict[str, Path]) -> None:
    (tmp_path / "q.fasta").write_text(f">dimer\n{ONE}:{ONE}\n")
    folded = {}
    for name in ("", "mine", "uniprot_hits", "x_paired"):
        msas = [tmp_path / f"{name}.a3m"] if name else []
        for path in msas:
            path.write_text(PAIRED)
        summary = predict(tmp_path / "q.fasta", params["first"], tmp_path / f"out{name}", msa=msas, recycles=0)
        (entry,) = summary["predictions"]
        with np.load(
            tmp_path / f"out{name}" / entry["folder"] / entry["files"]["arrays"], allow_pickle=False
        ) as arrays:
            folded[name] = arrays["positions"]
        assert entry["msa_depth"] == entry["chains"][0]["msa_depth"] == (3 if name else 1)
        assert sum("folded by the sequence alone" in warning["text"] for warning in entry["warnings"]) == (not name)
    assert not np.array_equal(folded["mine"], folded[""])
    for name in ("uniprot_hits", "x_paired"):
        np.testing.assert_array_equal(folded[name], folded["mine"])


def test_rows_that_serve_pairing_alone_are_in_no_alignment_of_one_chain(tmp_path: Path) -> None:
    def rows(**names: str) -> list[str]:
        folder = tmp_path / "-".join(names)
        folder.mkdir()
        for name, row in names.items():
            (folder / f"{name}.a3m").write_text(f">q\n{ONE}\n>tr|A0A000|A0A000_RAT/1-9\n{row}\n")
        (tmp_path / "q.fasta").write_text(f">one\n{ONE}\n")
        (one,) = read_queries(tmp_path / "q.fasta", [folder])
        assert [notice.kind for notice in one.notices] == ["pairing_rows"] * (len(names) - 1)
        return [decode(row) for row in one.chains[0].msa[1:]]

    pair, other = "W" * len(ONE), "G" * len(ONE)
    assert rows(uniprot_hits=pair, uniref90_hits=other) == [other]
    assert rows(uniprot_hits=pair) == [pair]  # better than nothing


def test_files_that_python_gives_and_nothing_uses_are_said(tmp_path: Path) -> None:
    (tmp_path / "h.a3m").write_text(PAIRED)
    (tmp_path / "other.a3m").write_text(">q\nMKV\n")
    for sequence, given in ((ONE, tmp_path), ([ONE, TWO], tmp_path), ([ONE, TWO], [tmp_path, PARTNER.split()[3:4]])):
        said = query_of(sequence, given, "query").notices
        assert sum(one.kind == "unused_alignments" and "other.a3m" in one.text for one in said) == 1


def test_every_warning_is_on_the_terminal_and_in_the_report(
    tmp_path: Path, params: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Warnings concern the run, an input or a prediction, also of failed proteins. Each is shown once."""
    (tmp_path / "q.fasta").write_text(f">one\nMKUOBZ{ONE}\n>two\nMKUOBZ{ONE}\n")
    arguments = [tmp_path / "q.fasta", "--params", params["first"], "--no-complex", "--recycles", 0, "--seeds", 2]
    _, _, err = run_cli(capsys, *arguments, "--out", tmp_path / "out")
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    best = [entry for entry in summary["predictions"] if entry["rank"] == 1]
    wanted = {warning["text"] for entry in best for warning in entry["warnings"]}
    assert any("not one of the twenty amino acids" in warning for warning in wanted)
    page = (tmp_path / "out/report.html").read_text().replace("&#x27;", "'")
    for warning in wanted:
        assert err.count(f": {warning}\n") == 1, warning
        assert f": {html.escape(warning)}<" in page, warning
    # The header has no mean over different proteins.
    assert "mean pLDDT</dt>" not in page.split("</header>")[0]
    given = summary | {"predictions": [], "warnings": [{"text": "of the run"}]}
    given["input_warnings"] = {"lost": [Notice("input", {"text": "as given"}).record()]}
    assert warnings_of(given) == [Warned("of the run"), Warned("as given", {"lost": ""})]


def test_warnings_of_a_kind_are_one() -> None:
    """Numbers that differ become ranges, and details that differ are dropped from the common text.

    A different text makes another kind. Each protein is listed with its own values.
    """
    low, missing = partial(Notice, "plddt_very_low"), partial(Notice, "templates_missing")
    counts = {"used": 0, "offered": 1024, "missing": 2, "folder": "x", "detail": "1abc, 2xyz"}
    said = {
        "one": [low({"mean_plddt": 49.0}), missing(counts), *noted(["the alignment of chain A1 has one row"])],
        "two": [low({"mean_plddt": 9.5}), missing({**counts, "offered": 30, "detail": "3abc"}), Notice("one_row")],
        "six": [low({"mean_plddt": 9.5}), missing({**counts, "folder": "y"}), Notice("one_row")],
    }
    entries = [{"name": name, "warnings": [one.record() for one in every]} for name, every in said.items()]
    given = json.loads(json.dumps({"input_warnings": {"one": entries[0]["warnings"][:1]}, "predictions": entries}))
    found = {one.said: dict(one.about) for one in warnings_of(given)}
    assert found == {
        "very low confidence: mean pLDDT 9.5 to 49.0, below 50; the structure should not be interpreted": {
            "one": "49.0", "two": "9.5", "six": "9.5",
        },
        "0 of 30 to 1,024 templates used: 2 without a structure in x": {"one": "1,024, 1abc, 2xyz", "two": "30, 3abc"},
        "0 of 1,024 templates used: 2 without a structure in y (1abc, 2xyz)": {"six": ""},
        "the alignment of chain A1 has one row": {"one": ""},
        "its alignment has one row, its own: folded by the sequence alone": {"two": "", "six": ""},
    }  # fmt: skip


def test_warnings_of_many_take_time_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing each notice with all notices of its kind made the report of 10,000 designs take an hour."""
    looked, parts = [0], notices._parts

    def counted(some: Sequence[Notice]) -> Any:
        looked[0] += len(some)
        return parts(some)

    monkeypatch.setattr(notices, "_parts", counted)
    (warned,) = notices.each_kind_once((f"d{i}", Notice("plddt_very_low", {"mean_plddt": i / 10})) for i in range(200))
    assert len(warned.about) == 200
    assert looked[0] <= 5 * 200


def test_the_report_shows_what_was_relaxed(
    tmp_path: Path, fasta: Path, params: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    relaxed = {
        "violations_before": {"residues": 76},
        "violations_after": {"residues": 3},
        "energy_before": None,
        "energy_after": -1027.25,
        "ca_rmsd": 0.1,
    }
    monkeypatch.setattr(relax_files, "require_openmm", lambda: None)
    monkeypatch.setattr(relax_files, "relax_file", lambda *_: relaxed)
    out = tmp_path / "out"
    predict(fasta, params["first"], out, recycles=0)
    (done,) = relax_files.relax_paths([out])["relaxed"]
    assert done["violations_after"]["residues"] == 3
    page = (out / "report.html").read_text()
    for shown in ("76 → 3", "infinite → -1027", "0.10"):
        assert shown in page
    # Without its arrays, the report cannot be written again.
    (out / "trio/trio.npz").unlink()
    relax_files.relax_paths([out])
    assert (out / "report.html").read_text() == page


# ---- records that form a complex


def test_records_are_chains_with_a_multimers_parameters_and_proteins_otherwise(tmp_path: Path, fasta: Path) -> None:
    (complex,) = read_queries(fasta, [], together=True)
    assert (complex.name, complex.ids) == ("trio", ("H", "L", "x"))
    assert complex.assembly.entity_id.tolist() == [1, 2, 1]
    fasta.write_text(f">H\n{ONE}\n>L\n{TWO}:{TWO}\n")
    # A record A:B is a complex by itself.
    for together in (False, True):
        single, pair = read_queries(fasta, [], together)
        assert (single.name, pair.name) == ("H", "L")
        assert pair.ids == ("A", "B")


def test_a_multimer_folds_one_sequence_as_chain_a(tmp_path: Path, params: dict[str, Path]) -> None:
    """With `complex=False`, several records are folded separately."""
    (tmp_path / "q.fasta").write_text(f">one\n{ONE}\n>two\n{TWO}\n")
    options: dict[str, Any] = {"recycles": 0, "complex": False}
    entry, other = predict(tmp_path / "q.fasta", params["first"], tmp_path / "o", **options)["predictions"]
    assert other["name"] == "two"
    assert (entry["folder"], entry["rank"]) == ("one", 1)
    assert not {"iptm", "chains", "interfaces", "ranked"} & set(entry)
    assert entry["ranking_confidence"] == pytest.approx(entry["mean_plddt"], abs=0.01)
    model = gemmi.read_structure(str(tmp_path / "o/one/one.cif"))[0]
    assert [chain.name for chain in model] == ["A"]


def test_parameters_have_names_of_their_own(tmp_path: Path, params: dict[str, Path]) -> None:
    paths = []
    for run, source in (("run_a", "first"), ("run_b", "second")):
        (tmp_path / run).mkdir()
        paths.append(tmp_path / run / "params.safetensors")
        paths[-1].write_bytes(params[source].read_bytes())
    assert [one.name for one in read_params(paths)] == ["run_a_params", "run_b_params"]
    assert [one.name for one in read_params([paths[0], params["monomer"]])] == ["params", "monomer"]
    assert [one.multimer for one in read_params([paths[0], params["monomer"]])] == [True, False]
    with pytest.raises(UserError, match=r"the same parameters as .*. Pass each file once"):
        read_params([paths[0], params["first"]])


# ---- from Python


def test_folding_chains_in_memory(
    tmp_path: Path, ranked: tuple[Path, Path, dict[str, Any]], params: dict[str, Path]
) -> None:
    _, out, summary = ranked
    entry = next(e for e in summary["predictions"] if (e["model"], e["seed"]) == ("first", 8))
    predictor = load(params["first"], device="cpu")
    chains = {"H": ONE, "L": TWO, "x": ONE}
    alignments = {"H": parse_a3m(PAIRED), "L": parse_a3m(PARTNER)}
    p = predictor.fold(chains, alignments, name="trio", seed=8, recycles=0)
    with np.load(out / entry["folder"] / entry["files"]["arrays"], allow_pickle=False) as arrays:
        # Here the seeds shared a pass, so the rounding differs.
        np.testing.assert_allclose(p.positions, arrays["positions"], atol=1e-4)
    assert p.spans == {"H": slice(0, 18), "L": slice(18, 29), "x": slice(29, 47)}
    assert p.iptm is not None
    assert p.ptm is not None
    assert p.ranking_confidence == pytest.approx(0.8 * p.iptm + 0.2 * p.ptm)
    by_place = predictor.fold([ONE, TWO.lower()], [["-KTAYLAKQRQISFVRSH"], []], recycles=0, representations=False)
    assert by_place.chain_ids == ("A", "B")
    assert by_place.details["chain_depths"] == {"A": 2, "B": 1}


# ---- templates


@pytest.fixture
def structure(tmp_path: Path) -> Path:
    """Write an entry whose chain A resembles ONE and whose chain B is TWO."""
    chains = {"A": ONE[:9] + "WWW" + ONE[12:], "B": TWO}
    return write_entry(tmp_path / "1abc.cif", chains, "2010-01-01")


def test_a_template_goes_to_the_chains_that_it_fits(structure: Path) -> None:
    chains = {"H": ONE, "L": TWO, "x": ONE}
    for file, one, two in (
        (f"{structure}", [str(structure)], [str(structure)]),
        (f"{structure}:A", [f"{structure}:A"], []),
        (f"{structure}:B", [], [f"{structure}:B"]),
        # The user assigns the template to chain x, although chain B does not resemble it.
        (f"x={structure}:B", [f"{structure}:B"], []),
        # Q is a chain of another complex.
        (f"Q={structure}", [], []),
    ):
        assert files_of_chains([file], chains) == {ONE: one, TWO: two}
    with pytest.raises(UserError, match="no such file"):
        files_of_chains([f"{structure}x"], chains)


def test_templates_of_complexes_are_found_used_and_reported(
    tmp_path: Path, fasta: Path, structure: Path, params: dict[str, Path]
) -> None:
    (tmp_path / "L.a3m").write_text(f">1abc_B/1-11 mol:protein\n{TWO}\n")
    sources: dict[str, Any] = {
        "template": f"{structure}:A",
        "hits": tmp_path / "L.a3m",
        "template_structures": tmp_path,
    }
    entry = predict(fasta, params["first"], tmp_path / "out", recycles=0, **sources)["predictions"][0]
    # The hit is not used because its sequence is that of the query.
    assert (entry["templates"], entry["templates_unused"]) == (["1abc_A"], 1)
    outcomes = json.loads((tmp_path / "out/trio" / entry["files"]["templates"]).read_text())
    assert [(one["name"], one["chains"], one["used"]) for one in outcomes] == [
        ("1abc_A", ["H", "x"], True),
        ("1abc_B", ["L"], False),
    ]
    assert "1abc_A on H, x" in (tmp_path / "out/report.html").read_text()
    without = predict(fasta, params["first"], tmp_path / "without", recycles=0)["predictions"][0]
    assert without["folder"] == entry["folder"]
    assert (tmp_path / "out/trio/trio.cif").read_bytes() != (tmp_path / "without/trio/trio.cif").read_bytes()
    p = load(params["first"], device="cpu").fold(
        {"H": ONE, "L": TWO, "x": ONE}, templates=[f"H={structure}:A"], name="trio", recycles=0
    )
    with np.load(tmp_path / "out/trio/trio.npz", allow_pickle=False) as arrays:
        np.testing.assert_array_equal(p.positions, arrays["positions"])


def test_hits_are_known_by_the_folders_that_a_search_makes(
    tmp_path: Path, structure: Path, params: dict[str, Path]
) -> None:
    (tmp_path / "q.fasta").write_text(f">sp|P1|H\n{ONE}\n>L\n{TWO}\n")
    queries, models = read_queries(tmp_path / "q.fasta", [], together=True), read_params([params["first"]])
    for folder in ("sp_P1_H", "q_sp_P1_H"):
        hits = tmp_path / folder / "templates.a3m"
        hits.parent.mkdir()
        hits.write_text(f">1abc_A/1-{len(ONE)} mol:protein\n{ONE}\n")
        (found,) = with_templates(queries, TemplateSources(hits=[hits], structures=tmp_path), models)
        assert [one.chains for one in found.outcomes] == [("sp|P1|H",)]
