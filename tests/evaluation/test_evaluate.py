"""Test `warpfold evaluate`: its scores equal those of `score`, all omissions are reported, and sets are compared."""

import csv
import gzip
import hashlib
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import warpfold
from tests.evaluation.folders import LENGTHS, noisy, sets, truths, write
from tests.finetuning.test_relatives import store_of
from tests.report.browser import CHROMIUM, Browser
from tests.report.test_report_browser import prediction, write_page
from tests.scoring.complexes import disturbed, heterodimer, renamed
from tests.scoring.test_score import part, protein
from warpfold import cli
from warpfold.data.structure.write import write_mmcif, write_pdb
from warpfold.errors import UserError
from warpfold.evaluation import evaluate as evaluating
from warpfold.evaluation.evaluate import PredictionSet, evaluate
from warpfold.evaluation.measure import Comparison
from warpfold.evaluation.suite import read_suite
from warpfold.evaluation.tables import compare
from warpfold.scoring.chain_mapping import CA
from warpfold.scoring.intervals import paired_difference

REAL = Path(__file__).parents[2] / "../shared/realdata"
CLOSE = "mmcif/8keu.cif.gz"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return sets(tmp_path_factory.mktemp("evaluate"))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["evaluate", *map(str, arguments)])
    return int(stopped.value.code or 0), *capsys.readouterr()


def by_target(of_set: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["target"]: row for row in of_set["rows"]}


def test_scores_are_those_of_score_and_hashes_those_of_the_files(folders: tuple[Path, Path, Path]) -> None:
    good, _, truth = folders
    found = warpfold.evaluate(good, truth)
    (one,) = found["sets"]
    rows = by_target(one)
    assert (one["layout"], one["targets"], sorted(rows)) == ("plain files", 3, ["Beta", "alpha", "gamma"])
    for name, row in rows.items():
        score = warpfold.score(good / f"{name}.cif", truth / f"{name}.cif")
        for key in ("lddt", "lddt_ca", "gdt_ts", "gdt_ha", "tm", "rmsd"):
            assert row[key] == getattr(score, key)
        assert (row["residues"], row["coverage"], row["plddt"]) == (LENGTHS[name], 1, pytest.approx(80, abs=0.01))
        for kind, file in (("prediction", good / f"{name}.cif"), ("truth", truth / f"{name}.cif")):
            assert row[f"{kind}_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    values = [row["lddt_ca"] for row in rows.values()]
    mean = one["means"]["lddt_ca"]
    assert mean["mean"] == pytest.approx(np.mean(values))
    assert min(values) <= mean["interval"][0] < mean["mean"] < mean["interval"][1] <= max(values)
    lengths = {group["to"]: group for group in one["groups"]["residues"]}
    assert {to: group["targets"] for to, group in lengths.items()} == {100: 2, 200: 1}
    assert lengths[200]["mean"]["tm"] == rows["gamma"]["tm"]
    assert one["calibration"]["plddt"]["count"] == sum(LENGTHS.values())
    assert "15 A" in found["definitions"]["lddt"]
    assert "no stereochemical checks" in found["definitions"]["lddt"]


def test_sets_are_compared_on_the_targets_that_both_have(
    folders: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, worse, truth = folders
    other = tmp_path / "other"
    other.mkdir()
    for name in ("alpha", "gamma"):
        (other / f"{name.upper()}.cif").write_bytes((worse / f"{name}.cif").read_bytes())
    code, said, warned = run(capsys, good, truth, "--against", worse, other, "--out", tmp_path / "out", "--seed", 3)
    assert code == 0
    found = json.loads((tmp_path / "out/evaluation.json").read_text())
    first, second = found["comparisons"]
    assert (first["a"], first["b"], first["common"], second["common"]) == ("good", "worse", 3, 2)
    rows = [by_target(one) for one in found["sets"]]
    for key, sign in (("lddt_ca", 1), ("rmsd", -1)):
        a, b = ([sign * rows[k][name][key] for name in rows[0]] for k in (0, 1))
        expected = paired_difference(a, b)
        assert first["metrics"][key]["difference"] == pytest.approx(expected.difference)
        assert expected.difference > 0
        assert (first["metrics"][key]["clusters"], first["metrics"][key]["interval"]) == (3, None)
        assert (first["metrics"][key]["wins"], first["metrics"][key]["losses"]) == (3, 0)
    assert "good against worse, 3 targets that both have:" in said
    assert "other: 1 structures have no prediction and are in no mean: Beta" in warned
    table = list(csv.DictReader((tmp_path / "out/targets.csv").open()))
    assert [(row["set"], row["target"]) for row in table].count(("other", "ALPHA")) == 1
    assert len(table) == 8
    page = (tmp_path / "out/report.html").read_text()
    for text in (
        "Accuracy of the predictions",
        "good against other",
        "By length",
        "Calibration of the confidence",
        "<svg",
    ):
        assert text in page
    # A second run replaces the files of the first.
    assert run(capsys, good, truth, "--out", tmp_path / "out")[0] == 0
    assert len(json.loads((tmp_path / "out/evaluation.json").read_text())["sets"]) == 1


def test_copies_of_a_target_are_one_cluster() -> None:
    random = np.random.default_rng(0)
    sequences = ["".join(random.choice(list("ACDEFGHIKLMNPQRSTVWY"), 80)) for _ in range(9)]
    similar = "W" + sequences[0][1:]  # a point mutant
    rows = [{"lddt_ca": 0.5, "sequences": [x]} for x in (*sequences, sequences[1], similar)]
    ours = {str(i): defaultdict(lambda: None, row) for i, row in enumerate(rows)}
    theirs = {name: defaultdict(lambda: None, row, lddt_ca=0.4) for name, row in ours.items()}
    found = compare(ours, theirs)["metrics"]["lddt_ca"]
    assert (found["targets"], found["clusters"], found["verdict"]) == (11, 9, "better")
    few = compare({name: ours[name] for name in "1789"}, theirs)["metrics"]["lddt_ca"]
    assert (few["targets"], few["clusters"], few["verdict"]) == (4, 3, None)


def test_numbers_missing_residues_and_formats_are_said(tmp_path: Path) -> None:
    known = truths()
    shifted = replace(known["alpha"], author_numbers=tuple(str(i + 101) for i in range(40)))
    cut = part(noisy(known["Beta"], 0.2), slice(10, 60))
    letters = "".join("A" if i in (3, 4) and x != "A" else x for i, x in enumerate(known["gamma"].sequence))
    mutated = noisy(replace(known["gamma"], sequence=letters), 0.2)
    write(tmp_path / "truth", {"alpha": shifted, "gamma": known["gamma"]})
    (tmp_path / "truth/Beta.pdb.gz").write_bytes(gzip.compress(write_pdb("b", [known["Beta"]]).encode()))
    write(tmp_path / "p", {"alpha": noisy(known["alpha"], 0.2), "Beta": cut, "gamma": mutated})
    rows = by_target(warpfold.evaluate(tmp_path / "p", tmp_path / "truth")["sets"][0])
    assert rows["alpha"]["notes"] == ["the truth's residues are numbered 100 higher"]
    assert rows["alpha"]["lddt_ca"] > 0.9
    assert rows["Beta"]["notes"][0] == "residues of the truth that the prediction lacks: 10 of 60"
    assert rows["Beta"]["coverage"] == pytest.approx(50 / 60)
    assert rows["gamma"]["notes"][0].startswith("other amino acids than in the truth: ")
    one = by_target(warpfold.evaluate(tmp_path / "truth", tmp_path / "p")["sets"][0])
    assert one["Beta"]["notes"][0] == "predicted residues that the truth lacks, not scored: 10"


def test_a_chain_of_an_entry_and_an_assembly(tmp_path: Path) -> None:
    """NAME_CHAIN is compared with that chain of NAME.cif, and a complex with the whole entry."""
    complex_ = heterodimer()
    (tmp_path / "truth").mkdir()
    (tmp_path / "truth/9abc.cif").write_text(write_mmcif("9abc", list(complex_.values()), release_date="2024-05-01"))
    (tmp_path / "p").mkdir()
    (tmp_path / "p/9ABC_b.cif").write_text(write_mmcif("x", [noisy(complex_["B"], 0.1)]))
    predicted = renamed(disturbed(complex_, 0.2, 1.0, 0.2), "CD")
    (tmp_path / "p/9abc.cif").write_text(write_mmcif("x", list(predicted.values())))
    rows = by_target(warpfold.evaluate(tmp_path / "p", tmp_path / "truth")["sets"][0])
    assert (rows["9ABC_b"]["truth_chains"], rows["9ABC_b"]["dockq"]) == (["B"], None)
    score = warpfold.score(tmp_path / "p/9abc.cif", tmp_path / "truth/9abc.cif")
    assert score.complex is not None
    assert rows["9abc"]["dockq"] == score.complex.dockq
    assert rows["9abc"]["ics"] == score.complex.ics
    (interface,) = rows["9abc"]["interfaces"]
    assert (interface["chains"], interface["dockq"]) == (("A", "B"), score.complex.dockq)
    assert rows["9abc"]["released"] == "2024-05-01"
    assert rows["9abc"]["chains"] == {"C": "A", "D": "B"}


def test_predictions_of_ours_with_pae_depth_and_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reference is the prediction itself, so all true errors are 0."""
    out = tmp_path / "folded"
    several = [prediction("one", {"A": 30}, 1), prediction("two", {"H": 24, "x": 16}, 2)]
    entries = write_page(out, several)
    failed = [{"name": "three", "error": "out of memory"}]
    top = {"format": "warpfold-predictions-1", "predictions": entries, "failures": failed}
    (out / "summary.json").write_text(json.dumps(top))
    (tmp_path / "truth").mkdir()
    for name in ("one", "two", "three"):
        made = several[0] if name == "three" else several[("one", "two").index(name)]
        (tmp_path / f"truth/{name}.cif").write_text(write_mmcif(name, made.chains()))
    code, said, warned = run(capsys, out, tmp_path / "truth", "--json")
    assert code == 1
    assert "failed three: out of memory" in warned
    (one,) = json.loads(said)["sets"]
    assert [failure["target"] for failure in one["failures"]] == ["three"]
    assert one["without_prediction"] == []
    row = by_target(one)["one"]
    assert (row["lddt_ca"], row["depth"], row["model"]) == (1, 90, "m, seed 1")
    assert one["groups"]["depth"] == [{"above": 30, "to": 100, "targets": 2, "mean": one["groups"]["depth"][0]["mean"]}]
    pae = one["calibration"]["pae"]
    assert pae["count"] == 30 * 29 + 40 * 39
    assert pae["bias"] == pytest.approx(np.concatenate([_off_diagonal(p.pae) for p in several]).mean(), abs=0.01)
    plddt = one["calibration"]["plddt"]
    assert plddt["bias"] == pytest.approx(np.concatenate([p.plddt for p in several]).mean() - 100, abs=0.01)


def _off_diagonal(pae: np.ndarray | None) -> np.ndarray:
    assert pae is not None
    return pae[~np.eye(len(pae), dtype=bool)]


def test_all_models_are_listed_and_the_best_ranked_counts(tmp_path: Path, folders: tuple[Path, Path, Path]) -> None:
    good, worse, truth = folders
    (tmp_path / "p").mkdir()
    for rank, folder in ((1, worse), (2, good)):
        (tmp_path / f"p/alpha_rank_{rank}.cif").write_bytes((folder / "alpha.cif").read_bytes())
    (one,) = warpfold.evaluate(tmp_path / "p", truth, all_models=True)["sets"]
    first, second = one["rows"]
    assert (first["rank"], second["rank"], one["targets"]) == (1, 2, 1)
    assert first["lddt_ca"] < second["lddt_ca"]
    assert one["means"]["lddt_ca"]["mean"] == first["lddt_ca"]


def scored(*folders: Path, truth: Path, **options: Any) -> tuple[list[PredictionSet], list[tuple[int, int, str]]]:
    """Score folders in this process.  Returns the sets, and the progress."""
    told: list[tuple[int, int, str]] = []
    settings: dict[str, Any] = {"suite": None, "train_sequences": None, "all_models": False, "options": Comparison()}
    sets, _ = evaluate(folders, truth, **{**settings, **options}, workers=1, progress=lambda *given: told.append(given))
    return sets, told


def test_a_failure_of_the_best_model_is_one_of_its_target(tmp_path: Path, folders: tuple[Path, Path, Path]) -> None:
    """A failure of another model leaves the best one in the means."""
    good, _, truth = folders
    p = tmp_path / "p"
    p.mkdir()
    for name, has_atoms in {
        "alpha": True,
        "Beta_rank_1": False,
        "Beta_rank_2": True,
        "Beta_rank_3": False,
        "gamma_rank_1": True,
        "gamma_rank_2": False,
        "zeta": True,
    }.items():
        text = (good / f"{name.partition('_')[0].replace('zeta', 'alpha')}.cif").read_text()
        (p / f"{name}.cif").write_text(text if has_atoms else f"data_{name}\n")
    (one,), told = scored(p, truth=truth, all_models=True)
    assert [(result.row["target"], result.row["rank"]) for result in one.measured] == [("alpha", 1), ("gamma", 1)]
    assert [row["target"] for row in one.by_target().values()] == ["alpha", "gamma"]
    failed = {"Beta": "Beta_rank_1.cif", "gamma": "gamma_rank_2.cif"}
    assert {target: error.partition(": has no atoms")[0] for target, error in one.failures.items()} == {
        target: str(p / name) for target, name in failed.items()
    }
    assert (one.without_truth, one.without_prediction) == (["zeta"], [])
    # The number of finished jobs before the job, the number of jobs, and the target.
    targets = ["Beta", "Beta", "Beta", "alpha", "gamma", "gamma"]
    assert told == [(done, 6, f"scored {target}") for done, target in enumerate(targets)]
    (best,), _ = scored(p, truth=truth)
    assert (len(best.jobs), best.without_prediction) == (3, [])


def test_folders_of_one_name_are_named_by_their_path(tmp_path: Path, folders: tuple[Path, Path, Path]) -> None:
    good, worse, truth = folders
    for folder, source in (("a/p", good), ("b/p", good), ("c", worse)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "alpha.cif").write_bytes((source / "alpha.cif").read_bytes())
    paths = [tmp_path / folder for folder in ("a/p", "b/p", "c")]
    found, _ = scored(*paths, truth=truth)
    assert [one.name for one in found] == [str(paths[0]), str(paths[1]), "c"]
    assert [one.without_prediction for one in found] == [["Beta", "gamma"]] * 3
    assert found[0].measured[0].row["lddt_ca"] > found[2].measured[0].row["lddt_ca"]


def test_folders_that_cannot_be_scored(tmp_path: Path, folders: tuple[Path, Path, Path]) -> None:
    good, _, truth = folders
    p, others = tmp_path / "p", tmp_path / "others"
    p.mkdir()
    others.mkdir()
    for name in "vwxyz":
        (p / f"{name}.cif").write_bytes((good / "alpha.cif").read_bytes())
        (others / f"other_{name}.cif").write_text("")
    with pytest.raises(UserError) as raised:
        scored(p, truth=others)
    available = "other_v, other_w, other_x, and 2 more"
    assert str(raised.value) == (
        f"{p}: none of its targets (v, w, x, and 2 more) is among those of {others} ({available})"
    )
    (p / "alpha.cif").write_text("data_x\n")
    with pytest.raises(UserError) as raised:
        scored(p, truth=truth)
    assert str(raised.value).startswith(f"{p / 'alpha.cif'}: has no atoms")
    (p / "Beta.cif").write_text("data_x\n")
    with pytest.raises(UserError) as raised:
        scored(p, truth=truth)
    assert str(raised.value).startswith(f"{p}: none of 2 targets could be scored: {p / 'Beta.cif'}: has no atoms")
    # A file of failures alone is refused by the names of its targets.
    for name in "vwxyz":
        (p / f"{name}.cif").unlink()
    failures = [{"name": name, "error": "too long"} for name in ("one", "alpha")]
    top = {"format": "warpfold-predictions-1", "predictions": [], "failures": failures}
    (p / "summary.json").write_text(json.dumps(top))
    with pytest.raises(UserError, match=r"none of its targets \(one, alpha\) is among those of"):
        scored(p, truth=truth)


def test_the_nearest_training_sequence_of_any_chain_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training sequences come from a FASTA file or the chains of a store, and the targets may be complexes."""
    monkeypatch.setattr(evaluating, "entry_keys", lambda store, assemblies: [] if assemblies else store.keys)
    complex_ = heterodimer()
    for folder in ("p", "truth"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "9abc.cif").write_text(write_mmcif("9abc", list(complex_.values())))
        write(tmp_path / folder, {"alpha": truths()["alpha"]})
    sequence = complex_["B"].sequence
    (tmp_path / "train.fasta").write_text(f">a\n{sequence}\n")
    store_of(tmp_path / "store", {"b_A": sequence})
    for source in ("train.fasta", "store"):
        (one,), _ = scored(tmp_path / "p", truth=tmp_path / "truth", train_sequences=tmp_path / source)
        rows = one.by_target()
        assert rows["9abc"]["train_identity"] == 1
        assert rows["alpha"]["train_identity"] < 1
    (one,), _ = scored(tmp_path / "p", truth=tmp_path / "truth")
    assert [row["train_identity"] for row in one.by_target().values()] == [None, None]


def test_similarity_to_what_was_trained_on(tmp_path: Path, folders: tuple[Path, Path, Path]) -> None:
    good, _, truth = folders
    known = truths()
    (tmp_path / "train.fasta").write_text(f">a\n{known['gamma'].sequence}:{known['alpha'].sequence[:20]}\n")
    (one,) = warpfold.evaluate(good, truth, train_sequences=tmp_path / "train.fasta")["sets"]
    rows = by_target(one)
    assert rows["gamma"]["train_identity"] == 1
    assert rows["Beta"]["train_identity"] < 0.5
    assert {group["targets"] for group in one["groups"]["train_identity"]} <= {1, 2}
    assert one["groups"]["train_identity"][-1]["mean"]["tm"] == rows["gamma"]["tm"]


def test_a_suite_names_targets_chains_dates_and_hashes(
    tmp_path: Path, folders: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    good, _, _ = folders
    chains = {name: replace(chain, id="Q") for name, chain in truths().items()}
    truth = tmp_path / "truth"
    truth.mkdir()
    for name, chain in chains.items():
        (truth / f"{name}.cif").write_text(write_mmcif(name, [chain, protein("Z", 20, 9)], release_date="2024-05-01"))
    assert run(capsys, good, truth, "--write-suite", tmp_path / "suite.toml")[0] == 0
    suite = read_suite(tmp_path / "suite.toml")
    digest = hashlib.sha256((truth / "alpha.cif").read_bytes()).hexdigest()
    assert (suite.targets["alpha"].sha256, suite.targets["alpha"].chains) == (digest, ("Q", "Z"))
    assert str(suite.targets["alpha"].released) == "2024-05-01"

    # Edit the suite: remove one target, and a chain of the others.
    text = (tmp_path / "suite.toml").read_text().replace('chains = ["Q", "Z"]', 'chains = ["Q"]')
    lines = [line for line in text.splitlines() if not line.startswith("gamma")]
    (tmp_path / "suite.toml").write_text("\n".join(lines))
    code, said, _ = run(capsys, good, truth, "--suite", tmp_path / "suite.toml", "--json")
    found = json.loads(said)
    assert (code, sorted(by_target(found["sets"][0]))) == (0, ["Beta", "alpha"])
    assert by_target(found["sets"][0])["alpha"]["truth_chains"] == ["Q"]
    assert found["suite"]["sha256"] == hashlib.sha256((tmp_path / "suite.toml").read_bytes()).hexdigest()
    assert found["sets"][0]["without_truth"] == ["gamma"]

    # A target of the suite without a prediction is reported as missing. A changed reference file is an error.
    (tmp_path / "some").mkdir()
    (tmp_path / "some/alpha.cif").write_bytes((good / "alpha.cif").read_bytes())
    code, _, warned = run(capsys, tmp_path / "some", truth, "--suite", tmp_path / "suite.toml")
    assert (code, "1 structures have no prediction and are in no mean: Beta" in warned) == (1, True)
    (truth / "alpha.cif").write_text((truth / "alpha.cif").read_text() + "\n#\n")
    code, _, error = run(capsys, good, truth, "--suite", tmp_path / "suite.toml", "--out", tmp_path / "out")
    assert (code, error.count("\n")) == (2, 1)
    assert "1 of 2 targets cannot be used: alpha: " in error
    assert "alpha.cif: SHA-256 is " in error
    assert not (tmp_path / "out").exists()


def test_the_list_that_comes_along_is_a_suite(tmp_path: Path, folders: tuple[Path, Path, Path]) -> None:
    with pytest.raises(UserError, match=r"183 of 183 targets cannot be used: 7dz2_C: no file in"):
        warpfold.evaluate(folders[0], folders[2], suite="cameo2022")


def test_what_cannot_be_scored_is_named_and_the_others_go_on(
    tmp_path: Path, folders: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    good, _, truth = folders
    p = tmp_path / "p"
    p.mkdir()
    (p / "alpha.cif").write_bytes((good / "alpha.cif").read_bytes())
    (p / "Beta.cif").write_text((good / "Beta.cif").read_text()[:4000])
    write(p, {"gamma": protein("A", 130, 77)})
    (p / "delta.cif").write_bytes((good / "alpha.cif").read_bytes())
    code, _, warned = run(capsys, p, truth, "--csv", tmp_path / "t.csv", "--workers", 2)
    assert code == 1
    for said in (
        "failed Beta: ",
        "p/gamma.cif against ",
        "no predicted chain resembles a reference chain",
        "2 targets failed and are in no mean: Beta, gamma",
        "1 predictions have no reference structure: delta",
    ):
        assert said in warned
    table = {row["target"]: row for row in csv.DictReader((tmp_path / "t.csv").open())}
    assert table["alpha"]["error"] == ""
    assert "no predicted chain resembles" in table["gamma"]["error"]
    assert table["gamma"]["lddt_ca"] == ""


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("empty", "has no predicted structures"),
        ("no truths", "no structures found"),
        ("other names", "none of its targets (zeta) is among those of "),
        ("all fail", "none of 2 targets could be scored: "),
        ("thesis", "holds thesis.tex, which WarpFold did not write"),
        ("pae", "no PAE in a supported layout"),
    ],
)
def test_bad_input_is_one_line(
    case: str, said: str, tmp_path: Path, folders: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    good, _, truth = folders
    for name in ("p", "t", "out"):
        (tmp_path / name).mkdir()
    p, options = tmp_path / "p", ["--out", tmp_path / "out"]
    if case == "no truths":
        p, truth = good, tmp_path / "t"
    elif case == "other names":
        (p / "zeta.cif").write_bytes((good / "alpha.cif").read_bytes())
    elif case == "all fail":
        write(p, {name: protein("A", 50, 99) for name in ("alpha", "Beta")})
    elif case == "thesis":
        p = good
        (tmp_path / "out/thesis.tex").write_text("")
    elif case == "pae":
        (p / "alpha.cif").write_bytes((good / "alpha.cif").read_bytes())
        (p / "alpha_pae.json").write_text('[{"pae": "none"}]')
        found = warpfold.evaluate(p, truth)
        assert said in by_target(found["sets"][0])["alpha"]["notes"][-1]
        return
    code, _, error = run(capsys, p, truth, *options)
    assert (code, error.count("\n")) == (2, 1)
    assert said in error
    assert not [file for file in (tmp_path / "out").iterdir() if file.name != "thesis.tex"]


def test_predictions_of_ca_alone(tmp_path: Path, folders: tuple[Path, Path, Path]) -> None:
    """Predictions of Ca atoms have no all-atom lDDT. They have no frames either, so there is no true aligned error."""
    chain = noisy(truths()["alpha"], 0.3)
    mask = np.zeros_like(chain.mask)
    mask[:, CA] = 1
    p = write(tmp_path / "p", {"alpha": replace(chain, mask=mask, positions=chain.positions * mask[..., None])})
    (p / "alpha_pae.json").write_text(json.dumps({"pae": np.ones((40, 40)).tolist()}))
    (one,) = warpfold.evaluate(p, folders[2], out=tmp_path / "out")["sets"]
    row = by_target(one)["alpha"]
    assert row["lddt"] is None
    assert row["lddt_ca"] > 0.9
    assert list(one["calibration"]) == ["plddt"]


@pytest.mark.skipif(not REAL.is_dir(), reason="needs shared/realdata beside the repository")
def test_files_of_colabfold_openfold_and_alphafold_db(tmp_path: Path) -> None:
    """Evaluate PIGK in 7W72, where ColabFold's pLDDT and PAE are accurate, and a homologue of 6KWC's model."""
    (tmp_path / "truth").mkdir()
    for name, file in (("PIGK.pdb.gz", "predictions/PIGK/7w72_chainK_experimental.pdb.gz"), ("6KWC_1.cif.gz", CLOSE)):
        (tmp_path / "truth" / name).write_bytes((REAL / file).read_bytes())
    (tmp_path / "p").mkdir()
    for folder in ("PIGK", "6KWC", "afdb_P29373"):
        (tmp_path / "p" / folder).symlink_to(REAL.resolve() / "predictions" / folder)
    (one,) = warpfold.evaluate(tmp_path / "p", tmp_path / "truth")["sets"]
    assert one["layout"] == "OpenFold (1), plain files (1), ColabFold (1), AlphaFold DB (1)"
    assert one["without_truth"] == ["7w72_chainK_experimental", "P29373"]
    rows = by_target(one)
    assert rows["PIGK"]["lddt_ca"] == pytest.approx(0.913, abs=0.001)
    assert rows["6KWC_1"]["notes"][1:] == [
        "other amino acids than in the truth: 4",
        "the truth's residues are numbered 2 lower",
    ]
    assert one["calibration"]["plddt"]["error"] < 6
    assert one["calibration"]["pae"]["error"] < 2
    assert one["calibration"]["pae"]["correlation"] > 0.85


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
def test_the_page_opens_in_a_browser(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    good, worse, truth = folders
    warpfold.evaluate(good, truth, against=worse, out=tmp_path / "out")
    with Browser(tmp_path) as browser:
        browser.open(tmp_path / "out/report.html")
        assert browser.run("document.querySelectorAll('article').length") == 3
        assert browser.run("document.querySelectorAll('figure svg').length") >= 8
        assert not browser.errors
