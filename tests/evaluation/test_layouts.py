"""Test that predictions and targets are recognised by the file names of several programs, and lists of targets."""

import hashlib
import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.test_report_browser import prediction, write_page
from tests.scoring.test_score import protein
from warpfold.data.structure.chain import Structure
from warpfold.data.structure.write import write_mmcif
from warpfold.errors import UserError
from warpfold.evaluation import truths as truth_files
from warpfold.evaluation.confidence import alignment_rows
from warpfold.evaluation.layouts import PredictedFile, Predictions, find_predictions
from warpfold.evaluation.suite import Entry, Suite, read_suite, write_suite
from warpfold.evaluation.truths import Truth, Truths, target_key
from warpfold.scoring.chain_mapping import CA


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
    names = ("uniref90_hits.sto", "pdb_hits.sto", "bfd_uniref_hits.a3m", "uniprot_hits.sto")
    fill(folder, *(f"msas/{name}" for name in names))
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
    # Template hits and the alignment that serves pairing do not count.
    assert [path.name for path in best.alignments] == ["bfd_uniref_hits.a3m", "uniref90_hits.sto"]
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


def test_all_that_is_known_of_a_predicted_file(tmp_path: Path) -> None:
    """The rank, the model and the alignment come from the names of the files, and relaxed structures come first."""
    stem = "a_{}relaxed_rank_002_alphafold2_model_3_seed_000"
    names = (stem.format("un") + ".pdb", stem.format("") + ".pdb", "a_scores_rank_002_alphafold2_model_3_seed_000.json")
    folder = fill(tmp_path, *names, "a.a3m")
    (found,) = find_predictions(folder).files
    assert found == PredictedFile(
        target="a",
        path=folder / names[1],
        layout="ColabFold",
        names=("a",),
        rank=2,
        model="rank_002_alphafold2_model_3_seed_000",
        order=(0, False, False, True),
        pae=folder / names[2],
        alignments=(folder / "a.a3m",),
    )
    assert find_predictions(folder) == Predictions(folder, [found], {})


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["x_recycle_1.cif", "x.pdb"], "x.pdb"),  # the last pass
        (["x.cif", "x_relaxed.pdb"], "x_relaxed.pdb"),
        (["x.pdb", "x.cif.gz"], "x.cif.gz"),
        (["AF-P1-F1-model_v10.pdb", "AF-P1-F1-model_v9.cif"], "AF-P1-F1-model_v10.pdb"),
        (["ranked_0.pdb", "ranked_0.cif"], "ranked_0.cif"),
        (["1ABC_A.pdb", "b/1abc_A.cif"], "1abc_A.cif"),  # one target
    ],
)
def test_one_of_several_files_of_a_prediction_is_read(files: list[str], chosen: str, tmp_path: Path) -> None:
    (found,) = find_predictions(fill(tmp_path / "p", *files)).files
    assert (found.path.name, found.rank, found.alignments) == (chosen, 1, ())


def test_layouts_are_counted() -> None:
    files = [PredictedFile("x", Path("x"), layout, ("x",)) for layout in ("CASP", "OpenFold", "OpenFold")]
    assert Predictions(Path("p"), files).layouts == "OpenFold (2), CASP (1)"
    assert Predictions(Path("p"), files[1:]).layouts == "OpenFold"
    layouts = ("CASP", "plain files", "OpenFold", "WarpFold")
    assert [replace(files[0], layout=layout).writes_plddt for layout in layouts] == [False, False, True, True]
    assert (files[0].rank, files[0].depth, files[0].pae) == (1, None, None)


@pytest.mark.parametrize(
    ("files", "error"),
    [
        (["notes.txt"], "has no predicted structures (.cif, .pdb or .ent, optionally .gz). Check the path"),
        (["metrics.jsonl"], "is a training run. Fold its held-out proteins with `warpfold validate`"),
        (["b/x.cif", "x.cif"], "b/x.cif and x.cif are both predictions of x. Keep one of them"),
        (["T1024TS427_1", "T1025TS428_1"], "has models of 2 CASP groups (TS427, TS428). Keep those of one"),
    ],
)
def test_folders_without_usable_predictions(files: list[str], error: str, tmp_path: Path) -> None:
    folder = fill(tmp_path / "p", *files)
    with pytest.raises(UserError) as raised:
        find_predictions(folder)
    assert str(raised.value) == f"{folder}: {error}"


def test_a_file_and_a_missing_folder_are_no_folder(tmp_path: Path) -> None:
    fill(tmp_path, "x.cif")
    texts = {
        "x.cif": "is a file. Compare two files with `warpfold score`, or pass a folder of predictions",
        "y": "no such folder. Pass a folder of predictions",
    }
    for name, text in texts.items():
        with pytest.raises(UserError) as raised:
            find_predictions(tmp_path / name)
        assert str(raised.value) == f"{tmp_path / name}: {text}"
    remedy = "Pass a folder of structures named by target: NAME.cif or NAME_CHAIN.cif"
    for name, text in {"x.cif": "is a file", "y": "no such folder"}.items():
        with pytest.raises(UserError) as raised:
            Truths(tmp_path / name)
        assert str(raised.value) == f"{tmp_path / name}: {text}. {remedy}"


def test_the_samples_of_alphafold_3_are_not_read(tmp_path: Path) -> None:
    """A folder with another name is read, also inside of a folder with samples."""
    files = ("q/seed-1_sample-0/q_seed-1_sample-0_model.cif", "q/seed-1_sample-0-old/r.cif", "q/q_model.cif")
    found = find_predictions(fill(tmp_path, *files, "q/q_summary_confidences.json")).files
    assert sorted(file.target for file in found) == ["q", "r"]


def test_ranked_models_of_alphafold(tmp_path: Path) -> None:
    """Other structures in the folder are skipped, and models without a name in the ranking are named by their file."""
    folder = fill(
        tmp_path / "T9", "ranked_0.pdb", "ranked_1.pdb", "unrelaxed_model_1.pdb", "other.cif", "x_ranked_3.pdb"
    )
    (folder / "ranking_debug.json").write_text('{"order": ["model_4"]}')
    found = find_predictions(tmp_path, all_models=True).files
    assert found == [
        PredictedFile("T9", folder / f"ranked_{n}.pdb", "AlphaFold", ("T9",), n + 1, model, (True,))
        for n, model in enumerate(("model_4", "ranked_1"))
    ]
    fill(folder, "msas/notes.txt")
    for text in ("[]", "{}"):
        (folder / "ranking_debug.json").write_text(text)
        assert [file.model for file in find_predictions(tmp_path).files] == ["ranked_0"]
    path = folder / "ranking_debug.json"
    path.write_text('{"order": "model_4"}')
    with pytest.raises(UserError) as raised:
        find_predictions(tmp_path)
    assert str(raised.value) == f"{path}: 'order' is not a list of models. Fetch the file again, or remove it"
    path.write_text('{"order": ')
    with pytest.raises(UserError, match=r"ranking_debug.json: not valid JSON .*\. Fetch the file again, or remove it"):
        find_predictions(tmp_path)


def summary(folder: Path, *entries: dict[str, Any], **changes: Any) -> Path:
    """Write the summary of `warpfold predict` with these predictions."""
    top = {"format": "warpfold-predictions-1", "predictions": entries, "failures": []}
    (folder / "summary.json").write_text(json.dumps(top | changes))
    return folder


def test_entries_of_our_summary(tmp_path: Path) -> None:
    entry = {"name": "q", "folder": "q", "model": "m", "seed": 3, "msa_depth": 7}
    ranked = entry | {"files": {"pdb": "q.pdb", "mmcif": "q.cif", "pae": "pae.json", "arrays": "q.npz"}, "rank": 2}
    plain = entry | {"name": "r", "files": {"pdb": "r.pdb", "pae": "pae.json"}, "msa_depth": None}
    bare = entry | {"name": "s", "files": {"mmcif": "s.cif"}}
    removed = entry | {"name": "t", "files": {}}
    found = find_predictions(summary(tmp_path, ranked, plain, bare, removed)).files
    folder, model = tmp_path / "q", "m, seed 3"
    assert found == [
        PredictedFile("q", folder / "q.cif", "WarpFold", ("q",), 2, model, pae=folder / "q.npz", depth=7),
        PredictedFile("r", folder / "r.pdb", "WarpFold", ("r",), 1, model, pae=folder / "pae.json"),
        PredictedFile("s", folder / "s.cif", "WarpFold", ("s",), 1, model, depth=7),
    ]
    failures = [{"name": "u", "error": "too long"}]
    alone = find_predictions(summary(tmp_path, failures=failures))
    assert (alone.files, alone.failures) == ([], {"u": "too long"})
    # The summary of another program says nothing about the files.
    fill(tmp_path, "x.cif")
    assert [file.target for file in find_predictions(summary(tmp_path, format="other-1")).files] == ["x"]
    (tmp_path / "summary.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"summary.json: damaged, or not a summary of `warpfold predict`"):
        find_predictions(tmp_path)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("1ABC", "1abc"),
        ("1ABC_A", "1abc_A"),
        ("1abc_a", "1abc_a"),
        ("pdb_00001abc_A", "1abc_A"),
        ("PDB_00001ABC", "1abc"),
        ("T1024-D1", "T1024-D1"),
        ("Design_A", "Design_A"),
    ],
)
def test_keys_of_targets(name: str, key: str) -> None:
    assert target_key(name) == key


def test_names_of_structures(tmp_path: Path) -> None:
    """The first file of a name counts, and a name in another case is found if there is only one."""
    fill(
        tmp_path, "Design.cif", "b/Design.pdb", "pdb4def.ent", "pdbs.cif", "UP.cif", "up.cif", "notes.txt", "7abc_B.cif"
    )
    truths = Truths(tmp_path)
    assert {truth.name: truth.path.name for truth in truths.by_name.values()} == {
        "Design": "Design.cif",
        "4def": "pdb4def.ent",
        "pdbs": "pdbs.cif",
        "UP": "UP.cif",
        "up": "up.cif",
        "7abc_B": "7abc_B.cif",
    }
    assert truths.by_name["Design"].path == tmp_path / "Design.cif"
    names = {"DESIGN": "Design.cif", "up": "up.cif", "UP": "UP.cif", "Up": None, "7ABC_B": "7abc_B.cif"}
    assert {name: (found := truths.find([name])) and found.path.name for name in names} == names
    # All names are tried as they are before one of them is split into an entry and a chain.
    assert truths.find(["4def_X", "Design"]) == Truth("Design", tmp_path / "Design.cif")
    assert truths.find(["4def_X"]) == Truth("4def_X", tmp_path / "pdb4def.ent", ("X",))
    assert truths.find(["4def_"]) is None
    assert truths.find([]) is None


def test_structures_that_are_not_used(tmp_path: Path) -> None:
    """A structure is used if any of its chains is, unless its name or a suite selects chains."""
    fill(tmp_path, "1abc.cif", "2abc.cif", "3abc.cif")
    truths = Truths(tmp_path)
    used = [Truth("1abc_A", tmp_path / "1abc.cif", ("A",)), Truth("2abc", tmp_path / "2abc.cif")]
    assert truths.without(used) == ["3abc"]
    assert truths.without([]) == ["1abc", "2abc", "3abc"]
    entries = {"1abc": Entry(chains=("A",)), "first": Entry()}
    for name in entries:
        (tmp_path / f"{name}.cif").write_text(write_mmcif(name, [protein("A", 5)]))
    truths = Truths(tmp_path)
    truths.keep(Suite(Path("s.toml"), "0", "", "", entries))
    assert truths.find(["1ABC"]) == Truth("1abc", tmp_path / "1abc.cif", ("A",))
    assert truths.without([Truth("1abc_B", tmp_path / "1abc.cif", ("B",))]) == ["1abc", "first"]
    assert truths.find(["2abc"]) is None


def test_files_that_are_not_those_of_the_suite(tmp_path: Path) -> None:
    text = write_mmcif("d", [protein("A", 5)], release_date="2024-05-01")
    for name in "abcd":
        (tmp_path / f"{name}.cif").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    targets = {
        "a": Entry(sha256=digest),
        "b": Entry(sha256="0f"),
        "d": Entry(released=date(2024, 5, 2)),
        "e": Entry(),
    }
    truths = Truths(tmp_path)
    with pytest.raises(UserError) as raised:
        truths.keep(Suite(Path("s.toml"), "0", "", "", targets))
    assert str(raised.value) == (
        f"s.toml: 3 of 4 targets cannot be used: b: {tmp_path / 'b.cif'}: SHA-256 is {digest}, not that of the suite. "
        f"Fetch that version; d: {tmp_path / 'd.cif'}: released on 2024-05-01, not on 2024-05-02 as in the suite; "
        f"e: no file in {tmp_path}. Name it e.cif"
    )
    truths.keep(Suite(Path("s.toml"), "0", "", "", {"d": Entry(date(2024, 5, 1)), "A": Entry(sha256=digest)}))
    assert list(truths.by_name.values()) == [Truth("d", tmp_path / "d.cif"), Truth("A", tmp_path / "a.cif")]


def test_chains_of_a_reference_structure() -> None:
    chains = [replace(protein("A", 10 + n, n), id=name) for n, name in enumerate(("A", "a", "C"))]
    data = write_mmcif("t", chains).encode()
    path = Path("t.cif")
    assert [*Truth("t", path).parse(data).chains] == ["A", "a", "C"]
    assert [*Truth("t", path, ("c", "a")).parse(data).chains] == ["C", "a"]
    for chain in ("D", "AA"):
        with pytest.raises(UserError) as raised:
            Truth("t", path, (chain,)).parse(data)
        assert str(raised.value) == f"t.cif: no protein chain {chain}. Its author chain ids are A, a, C"
    upper = write_mmcif("t", [chains[0], chains[1], replace(chains[2], id="b")]).encode()
    assert [*Truth("t", path, ("B",)).parse(upper).chains] == ["b"]
    mask = np.zeros_like(chains[0].mask)
    mask[:, CA] = 1
    alone = write_mmcif("t", [replace(chains[0], mask=mask)]).encode()
    assert [*Truth("t", path).parse(alone).chains] == ["A"]


def test_a_chain_that_is_no_protein_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Structure("t", None, None, None, {"A": protein("A", 10)}, dropped={"N": "it is DNA"})
    monkeypatch.setattr(truth_files, "parse_structure", lambda *given, **options: read)
    assert Truth("t", Path("t.cif"), ("A",)).parse(b"") == replace(read, dropped={})
    with pytest.raises(UserError) as raised:
        Truth("t", Path("t.cif"), ("A", "N")).parse(b"")
    assert str(raised.value) == "t.cif: chain N cannot be scored: it is DNA. Its author chain ids are A"


def test_files_that_are_no_suite(tmp_path: Path) -> None:
    path = tmp_path / "suite.toml"
    texts = {
        "title = ": "not valid TOML: ",
        "title = 'x'": "has no targets. Name them under [targets], one per line: 7abc_A = {}",
        "[targets]\nx = {}\nX = {}": "X and x differ only in case. Keep one of them",
    }
    for text, error in texts.items():
        path.write_text(text)
        with pytest.raises(UserError) as raised:
            read_suite(path)
        assert str(raised.value).startswith(f"{path}: {error}")
    path.write_bytes(b"title = '\xff'")
    with pytest.raises(UserError, match="not valid TOML"):
        read_suite(path)
    path.write_text("source = 'here'\n[targets]\nx = {}\n")
    assert read_suite(path) == Suite(path, hashlib.sha256(path.read_bytes()).hexdigest(), "", "here", {"x": Entry()})


def test_a_file_takes_precedence_over_a_bundled_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cameo2022").write_text("[targets]\nx = {}\n")
    assert list(read_suite(Path("cameo2022")).targets) == ["x"]


def test_a_suite_is_written_without_empty_values() -> None:
    targets = {"a": Entry(), "b": Entry(date(2024, 5, 1), None, ("A",)), "7abc_A": Entry(None, "0f")}
    assert write_suite("t", targets).splitlines() == [
        'title = "t"',
        'source = ""',
        "",
        "[targets]",
        "a = {}",
        'b = {released = 2024-05-01, chains = ["A"]}',
        '7abc_A = {sha256 = "0f"}',
    ]
