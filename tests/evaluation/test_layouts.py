"""Test that predictions and targets are recognised by the file names of several programs, and lists of targets."""

import json
from datetime import date
from pathlib import Path

import pytest

from tests.report.test_report_browser import prediction, write_page
from warpfold.errors import UserError
from warpfold.evaluation.confidence import alignment_rows
from warpfold.evaluation.layouts import find_predictions
from warpfold.evaluation.suite import Entry, read_suite, write_suite
from warpfold.evaluation.truths import Truths


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    return folder


# Files -> predictions: target, structure file, layout, PAE file.
LAYOUTS = {
    "plain": (["1abc_A.cif", "b/T9.pdb.gz", "notes.txt"], [("1abc_A", "1abc_A.cif", "plain files", None)]),
    "plain, both formats": (["x.pdb", "x.cif", "x_pae.json"], [("x", "x.cif", "plain files", "x_pae.json")]),
    "copies of ours": (["x_rank_2.cif", "x_rank_1.cif", "x_rank_1_scores.json"],
                       [("x", "x_rank_1.cif", "plain files", "x_rank_1_scores.json")]),
    "AlphaFold DB": (
        ["AF-P29373-F1-model_v3.cif", "AF-P29373-F1-model_v4.cif.gz", "AF-P29373-F1-predicted_aligned_error_v4.json"],
        [("P29373", "AF-P29373-F1-model_v4.cif.gz", "AlphaFold DB", "AF-P29373-F1-predicted_aligned_error_v4.json")],
    ),
    "ColabFold": (
        ["a_1_unrelaxed_rank_001_alphafold2_ptm_model_2_seed_000.pdb",
         "a_1_relaxed_rank_001_alphafold2_ptm_model_2_seed_000.pdb",
         "a_1_unrelaxed_rank_002_alphafold2_ptm_model_1_seed_000.pdb",
         "a_1_scores_rank_001_alphafold2_ptm_model_2_seed_000.json", "a_1.a3m"],
        [("a_1", "a_1_relaxed_rank_001_alphafold2_ptm_model_2_seed_000.pdb", "ColabFold",
          "a_1_scores_rank_001_alphafold2_ptm_model_2_seed_000.json")],
    ),
    "ColabFold, no names": (["q/unrelaxed_rank_001_x_model_3_seed_000.pdb", "q/unrelaxed_rank_002_x_model_1.pdb"],
                            [("q", "unrelaxed_rank_001_x_model_3_seed_000.pdb", "ColabFold", None)]),
    "ColabFold of 2021": (["q_unrelaxed_model_2_rank_1.pdb", "q_unrelaxed_model_1_rank_2.pdb"],
                          [("q", "q_unrelaxed_model_2_rank_1.pdb", "ColabFold", None)]),
    "AlphaFold 3": (
        ["q/q_model.cif", "q/q_confidences.json", "q/q_summary_confidences.json", "q/seed-1_sample-0/model.cif"],
        [("q", "q_model.cif", "AlphaFold 3", "q_confidences.json")],
    ),
    "AlphaFold Server": (
        ["fold_q_1_model_0.cif", "fold_q_1_model_1.cif", "fold_q_1_full_data_0.json"],
        [("q_1", "fold_q_1_model_0.cif", "AlphaFold Server", "fold_q_1_full_data_0.json")],
    ),
    "AlphaFold": (["q/ranked_1.pdb", "q/ranked_0.pdb", "q/unrelaxed_model_1_pred_0.pdb"],
                  [("q", "ranked_0.pdb", "AlphaFold", None)]),
    "OpenFold": (["6KWC_1_model_1_ptm_unrelaxed.pdb", "6KWC_1_model_1_ptm_relaxed.pdb"],
                 [("6KWC_1", "6KWC_1_model_1_ptm_relaxed.pdb", "OpenFold", None)]),
    "CASP": (["T1024TS427_1", "T1024TS427_2", "T1046s1TS427_1.pdb", "T1073TS427_1-D1.pdb", "H1106TS427_1o"],
             [("T1024", "T1024TS427_1", "CASP", None), ("T1046s1", "T1046s1TS427_1.pdb", "CASP", None),
              ("T1073-D1", "T1073TS427_1-D1.pdb", "CASP", None), ("H1106", "H1106TS427_1o", "CASP", None)]),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, tmp_path: Path) -> None:
    files, expected = LAYOUTS[name]
    found = find_predictions(fill(tmp_path / "p", *files))
    told = [(one.target, one.path.name, one.layout, one.pae and one.pae.name) for one in found.files]
    assert sorted(told, key=str)[: len(expected)] == sorted(expected, key=str)
    assert len(told) == len(expected) + (name == "plain")


def test_alphafolds_ranking_names_the_model_and_its_pae(tmp_path: Path) -> None:
    folder = tmp_path / "out/T9"
    fill(folder, "ranked_0.pdb", "ranked_1.pdb", "relaxed_model_1_pred_0.pdb", "pae_model_2_pred_0.json")
    (folder / "ranking_debug.json").write_text(json.dumps({"order": ["model_2_pred_0", "model_1_pred_0"]}))
    fill(folder, "msas/uniref90_hits.sto", "msas/pdb_hits.sto", "msas/bfd_uniref_hits.a3m")
    (folder / "msas/uniref90_hits.sto").write_text("# STOCKHOLM 1.0\nq  AC\nr  AC\n\nq  DE\nr  DE\n//\n")
    (folder / "msas/bfd_uniref_hits.a3m").write_text(">q\nACDE\n>s\nACDE\n>t\nACDE\n")
    (best,) = find_predictions(tmp_path / "out").files
    assert (best.target, best.path.name, best.model, best.layout) == (
        "T9",
        "ranked_0.pdb",
        "model_2_pred_0",
        "AlphaFold",
    )
    assert best.pae == folder / "pae_model_2_pred_0.json"
    assert alignment_rows(best.alignments) == 5
    both = find_predictions(tmp_path / "out", all_models=True).files
    assert [(one.rank, one.path.name) for one in both] == [(1, "ranked_0.pdb"), (2, "ranked_1.pdb")]


def test_our_summary_says_what_is_what(tmp_path: Path) -> None:
    entries = write_page(tmp_path, [prediction("one", {"A": 20}, 1), prediction("one", {"A": 20}, 2)])
    failure = {"name": "two", "error": "too long"}
    top = {"format": "warpfold-predictions-1", "predictions": entries, "failures": [failure]}
    (tmp_path / "summary.json").write_text(json.dumps(top))
    found = find_predictions(tmp_path)
    (best,) = found.files
    assert (best.target, best.rank, best.layout, best.depth) == ("one", 1, "WarpFold", 90)
    assert best.path.is_file()
    assert best.pae is not None
    assert best.pae.suffix == ".npz"
    assert found.failures == {"two": "too long"}
    assert len(find_predictions(tmp_path, all_models=True).files) == 2
    for change in ({"name": {}}, {"rank": {}}, {"msa_depth": "9"}):
        (tmp_path / "summary.json").write_text(json.dumps(top | {"predictions": [entries[0] | change]}))
        with pytest.raises(UserError, match=rf"summary.json: damaged.*\({next(iter(change))} of a prediction is"):
            find_predictions(tmp_path)
    (tmp_path / "summary.json").write_text('{"format": "warpfold-predictions-1"}')
    with pytest.raises(UserError, match=r"summary.json: damaged"):
        find_predictions(tmp_path)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["1ABC"], ("1abc.cif", ())),
        (["1abc_B"], ("1abc.cif", ("B",))),
        (["2xyz_A"], ("2xyz_A.pdb", ())),
        (["2xyz"], ("2xyz_A.pdb", ())),
        (["3uvw"], None),  # two chains, one per file
        (["3uvw_B"], ("3uvw_B.cif", ())),
        (["4def"], ("pdb4def.ent", ())),
        (["T9-D1", "T9"], ("T9.cif", ())),
        (["other"], None),
    ],
)
def test_truths_are_found_by_name(names: list[str], found: tuple[str, tuple[str, ...]] | None, tmp_path: Path) -> None:
    fill(tmp_path, "ab/1abc.cif", "2xyz_A.pdb", "3uvw_A.cif", "3uvw_B.cif", "pdb4def.ent", "T9.cif")
    truth = Truths(tmp_path).find(names)
    assert (truth and (truth.path.name, truth.chains)) == found


def test_a_suite_is_read_as_it_was_written(tmp_path: Path) -> None:
    targets = {"T1": Entry(), "7abc_A": Entry(date(2021, 10, 20), "0f", ("A", "B"))}
    (tmp_path / "suite.toml").write_text(write_suite('a "title"', targets))
    suite = read_suite(tmp_path / "suite.toml")
    assert (suite.title, suite.targets) == ('a "title"', targets)


def test_the_bundled_list_is_whole() -> None:
    suite = read_suite(Path("cameo2022"))
    assert len(suite.targets) == 183
    assert suite.targets["7whf_G"] == Entry()
