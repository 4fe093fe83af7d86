"""Pack predictions: selection of files, masked residues, and reasons for dropping chains (Supp. 1.3)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.pack.pack_inputs import ONE, TWO, alignment, chain, run
from warpfold.data.example.raw_example import Assembly
from warpfold.data.features.choose import SampleConfig, select
from warpfold.data.features.make import make_features
from warpfold.data.formats.input_files import InputFile
from warpfold.data.pack import predicted
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.pack import pack
from warpfold.data.pack.report import PackReport, store_summary_text, summarize_store
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import StoredExample, read_assembly
from warpfold.data.structure.chain import Structure
from warpfold.data.structure.write import Modelling, write_mmcif, write_pdb
from warpfold.errors import UserError

REAL = Path(__file__).parents[4] / "shared/realdata/predictions"
SAME = predicted.SAME
PLDDT = np.array([90.0] * 20 + [49.0, 50.0] + [30.0] * 8)  # of 30 residues; 9 are masked


def prediction(path: Path, sequence: str, plddt: np.ndarray = PLDDT) -> Path:
    """Write a structure with pLDDT as B factors, in the format of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name, chains = path.name.split(".")[0], [chain("A", sequence)]
    if path.suffix == ".pdb":
        path.write_text(write_pdb(name, chains, b_factors=[plddt]))
    else:
        path.write_text(write_mmcif(name, chains, b_factors=[plddt], predicted=Modelling()))
    return path


def packed(folder: Path, **options: Any) -> PackReport:
    return pack([folder / "p"], [], folder / "store", PackOptions(**options), predicted=True)


def reasons(report: PackReport) -> dict[str, str]:
    return {Path(entry.file).name: entry.reason for entry in report.dropped}


def test_the_best_file_of_each_prediction_is_packed_and_the_others_say_why_not(tmp_path: Path) -> None:
    p = tmp_path / "p"
    prediction(p / "AF-P29373-F1-model_v4.cif", ONE)
    prediction(p / "AF-P29373-F1-model_v4.pdb", ONE)
    (p / "AF-P29373-F1-predicted_aligned_error_v4.json").write_text(
        json.dumps([{"predicted_aligned_error": np.full((30, 30), 3).tolist(), "max_predicted_aligned_error": 31.75}])
    )
    tail = "alphafold2_ptm_model_3_seed_000"
    for kind in ("relaxed", "unrelaxed"):
        prediction(p / f"cf/query_{kind}_rank_001_{tail}.pdb", TWO)
    prediction(p / f"cf/query_unrelaxed_rank_002_{tail}.pdb", TWO)
    (p / f"cf/query_scores_rank_001_{tail}.json").write_text(json.dumps({"pae": np.full((30, 30), 7.5).tolist()}))
    prediction(p / "old/test_unrelaxed_model_3_rank_1.pdb", ONE[::-1])
    for name in ("own.cif", "own.pdb", "own_relaxed.cif", "own_recycle_0.cif"):
        prediction(p / "ours/own" / name, TWO[::-1])
    for name in ("two_rank_1.cif", "two_rank_2.cif", "m_seed_0/two.cif"):
        prediction(p / "ours/two" / name, ONE[:15] + TWO[:15])
    report = packed(tmp_path)
    assert {entry.name: (Path(entry.file).name, entry.pae) for entry in report.kept} == {
        "P29373_A": ("AF-P29373-F1-model_v4.cif", 3.0),
        "query_A": (f"query_unrelaxed_rank_001_{tail}.pdb", 7.5),
        "test_A": ("test_unrelaxed_model_3_rank_1.pdb", None),
        "own_A": ("own.cif", None),
        "two_A": ("two_rank_1.cif", None),
    }
    assert reasons(report) == {
        "AF-P29373-F1-model_v4.pdb": SAME,
        f"query_relaxed_rank_001_{tail}.pdb": SAME,
        f"query_unrelaxed_rank_002_{tail}.pdb": predicted.LATER,
        "own.pdb": SAME,
        "own_relaxed.cif": SAME,
        "own_recycle_0.cif": "the result of an earlier recycling pass",
        "two_rank_2.cif": predicted.LATER,
        "two.cif": SAME,
    }
    assert report.summary().endswith(
        "mean pLDDT 71.3, 30% of the residues masked, no KL filter (too few have distograms)"
    )
    assert {(entry.plddt, entry.masked) for entry in report.kept} == {(71.3, 9)}
    data = json.loads((tmp_path / "store/pack.json").read_text())
    assert data == report.to_json()
    assert PackReport.from_json(data).entries == report.entries
    summary = summarize_store(Store(tmp_path / "store"))
    assert summary["packed"]["inputs"]["predicted"]["files"] == 15  # 13 structures and 2 PAE
    assert summary["resolution"] is None
    assert "15 predicted" in store_summary_text(summary)


def test_what_is_dropped(tmp_path: Path) -> None:
    p = tmp_path / "p"
    prediction(p / "good.cif", ONE)
    prediction(p / "low.cif", TWO, np.linspace(10, 60, 30))
    prediction(p / "crystal.cif", ONE, np.linspace(10, 120, 30))
    prediction(p / "share.cif", ONE, np.linspace(0.1, 0.9, 30))
    prediction(p / "flat.cif", ONE, np.full(30, 70.0))
    for name, pae in (("kept", np.ones((30, 30))), ("wide", np.full((30, 30), 20.0)), ("small", np.zeros((29, 29)))):
        prediction(p / f"{name}/{name}.cif", TWO[::-1])
        (p / f"{name}/{name}_pae.json").write_text(json.dumps({"pae": pae.tolist()}))
    prediction(p / "damaged/damaged.cif", TWO)
    (p / "damaged/damaged_scores.json").write_text('{"plddt": [')
    report = packed(tmp_path, max_pae=10.0)
    low = next(entry for entry in report.dropped if "low" in entry.file)
    assert (low.name, low.plddt, low.masked, low.length, low.method) == ("low_A", 35.0, 24, 30, "PREDICTED")
    dropped = reasons(report)
    assert dropped.pop("damaged.cif").startswith("damaged_scores.json: no PAE in a supported layout")
    assert dropped == {
        "good.cif": "no file with its PAE",
        "low.cif": "mean pLDDT 35.0, below 50",
        "crystal.cif": "p/crystal.cif: its B column holds numbers from 10 to 120, not pLDDT (0 to 100). "
        "Pass predicted structures.",
        "share.cif": "p/share.cif: its B column holds numbers from 0.1 to 0.9, not pLDDT (0 to 100). "
        "Pass predicted structures.",
        "flat.cif": "p/flat.cif: its B column holds numbers from 70 to 70, not pLDDT (0 to 100). "
        "Pass predicted structures.",
        "wide.cif": "mean PAE 20.0 Å, over 10",
        "small.cif": "small_pae.json: has PAE of shape [29, 29], but the structure has 30 residues. Remove one.",
    }


def test_unsure_residues_are_masked_in_every_label_and_crops_of_alignments_are_drawn(tmp_path: Path) -> None:
    prediction(tmp_path / "p/one.cif", ONE)
    pack([tmp_path / "p"], [], tmp_path / "store", PackOptions(assemblies=True), predicted=True)
    store = Store(tmp_path / "store")
    example = StoredExample(store, "one_A")
    assert example.is_predicted
    np.testing.assert_array_equal(example.take(slice(18, 23)).confidence, PLDDT[18:23])
    sure = PLDDT >= 50
    features = make_features(example, SampleConfig(), 0, ("x",))
    for name in ("all_atom_mask", "backbone_affine_mask", "pseudo_beta_mask", "atom14_gt_exists", "chi_mask"):
        array = features[name].reshape(30, -1)
        assert not array[~sure].any(), name
        assert array[sure].any(), name
    assert features["resolution"] == 0  # so that the confidence heads do not learn from it
    every = make_features(example, SampleConfig(min_confidence=0), 0, ("x",))
    assert every["backbone_affine_mask"].all()
    assembly = make_features(read_assembly(store, "one-assembly1"), SampleConfig(), 0, ("x",))
    np.testing.assert_array_equal(assembly["copy_atom_mask"][0].any(1), sure)
    assert isinstance(read_assembly(store, "one-assembly1"), Assembly)


def test_alignments_of_predictions_are_sampled_in_training() -> None:
    sizes = 50, 5000, SampleConfig(block_fraction=0.0), 0, ("x",)
    rows = select(*sizes, train=True, predicted=True).rows
    assert (len(rows), rows[0], len(np.unique(rows))) == (1000, 0, 1000)
    assert abs(rows.mean() - 2500) < 200
    assert len(select(*sizes, train=True).rows) == len(select(*sizes, train=False, predicted=True).rows) == 5000


def test_the_kl_filter_is_the_papers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of each protein is as uncertain as the reference; the other half has precise distances."""
    monkeypatch.setattr(predicted, "MIN_REFERENCE", 4)
    rng = np.random.default_rng(0)
    n, bins = 30, 8
    for number in range(4):
        peaked = np.eye(bins)[rng.integers(bins, size=(n, n))] * 0.99 + 0.01 / bins
        distogram = np.full((n, n, bins), 1 / bins)
        distogram[:20, :20] = ((peaked + peaked.swapaxes(0, 1)) / 2)[:20, :20]
        letters = "".join(rng.permutation(list(ONE)))
        prediction(tmp_path / f"p/{number}/p{number}.cif", letters, np.where(np.arange(n) < 28, 90.0, 80.0))
        np.save(tmp_path / f"p/{number}/p{number}_distogram.npy", distogram.astype(np.float16))
    report = packed(tmp_path)
    assert "KL filter on 4 of them" in report.summary()
    paths = sorted((tmp_path / "p").rglob("*.npy"))
    reference = predicted.reference_distribution(paths)
    assert reference is not None
    first = np.load(paths[0], allow_pickle=False).astype(np.float64)
    by_hand = np.zeros(n)
    for i in range(n):
        pairs = [(j, reference[abs(i - j) - 1]) for j in range(n) if j != i]
        by_hand[i] = np.mean([(q * np.log(q / first[i, j])).sum() for j, q in pairs])
    np.testing.assert_allclose(
        predicted.divergences(np.load(paths[0], allow_pickle=False), reference), by_hand, atol=1e-3
    )
    assert report.kept[0].kl == pytest.approx(by_hand.mean(), abs=1e-3)
    masked = StoredExample(Store(tmp_path / "store"), "p0_A").take(slice(None)).confidence == 0
    np.testing.assert_array_equal(masked, by_hand < 0.5)
    assert masked[20:].all()
    assert not masked[:20].any()
    without = pack([tmp_path / "p"], [], tmp_path / "plain", PackOptions(min_kl=0), predicted=True)
    assert {entry.masked for entry in without.kept} == {0}
    np.save(tmp_path / "p/1/p1_distogram.npy", np.zeros((3, 3, bins)))
    broken = pack([tmp_path / "p"], [], tmp_path / "broken", PackOptions(), predicted=True)
    assert reasons(broken) == {"p1.cif": "p1_distogram.npy: a distogram of shape [3, 3, 8]. Predict it again."}


def test_a_stopped_run_is_of_its_pae_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prediction(tmp_path / "p/one/one.cif", ONE)
    pae = tmp_path / "p/one/one_pae.json"
    pae.write_text(json.dumps({"pae": np.ones((30, 30)).tolist()}))
    with monkeypatch.context() as patch:
        patch.setattr("warpfold.data.pack.pack.merge_parts", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            packed(tmp_path)
    pae.write_text(json.dumps({"pae": np.full((30, 30), 2.5).tolist()}))
    with pytest.raises(UserError, match=r"packed from other inputs or options \(predicted files\)"):
        packed(tmp_path)


def test_the_depth_of_alignments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prediction(tmp_path / "p/one.cif", ONE)
    prediction(tmp_path / "p/two.cif", TWO)
    alignment(tmp_path / "m/a.a3m", ONE, ONE[:15] + "-" * 15, "A" * 30)
    inputs = "--predicted", tmp_path / "p", "--msas", tmp_path / "m"
    code, out, _ = run(capsys, "pack", *inputs, "--out", tmp_path / "store", "--min-depth", 3)
    assert code == 0
    assert "dropped two_A: 1 alignment rows, fewer than 3" in out
    assert Store(tmp_path / "store").column("plddt") == [71.3]


# ---- files of a prediction


def test_the_first_of_several_files_is_that_of_the_best_rank(tmp_path: Path) -> None:
    names = [
        "a_rank_2.cif", "a_rank_1.pdb", "a.cif", "a_relaxed.cif", "a_recycle_1.cif",
        "b_relaxed.cif", "b.pdb", "b.ent.gz", "c.pdb", "c.cif.gz", "d_rank_3.cif", "e_recycle_0.cif",
        "AF-P1-F1-model_v3.cif", "AF-P1-F1-model_v4.pdb", "deep/c.cif",
    ]  # fmt: skip
    for name in (
        *names,
        "a_rank_1_distogram.npy",
        "c_distogram.npy",
        "c_pae.json.gz",
        "b_scores.json",
        "c.cif_distogram.npy",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = predicted.find_predictions([InputFile(name, tmp_path / name) for name in names], 0.5)
    assert {name: one.why_not for name, one in found.items()} == {
        "a_rank_1.pdb": "", "a.cif": SAME, "a_relaxed.cif": SAME, "a_rank_2.cif": predicted.LATER,
        "a_recycle_1.cif": predicted.EARLIER, "b.ent.gz": "", "b.pdb": SAME, "b_relaxed.cif": SAME, "c.cif.gz": "",
        "c.pdb": SAME, "deep/c.cif": SAME, "d_rank_3.cif": predicted.LATER, "e_recycle_0.cif": predicted.EARLIER,
        "AF-P1-F1-model_v4.pdb": "", "AF-P1-F1-model_v3.cif": SAME,
    }  # fmt: skip
    assert {name: one.name for name, one in found.items()} == {
        name: "P1" if name[0] == "A" else name.removeprefix("deep/")[0] for name in names
    }
    paths = {name: (one.pae and one.pae.name, one.distogram and one.distogram.name) for name, one in found.items()}
    assert {name: pair for name, pair in paths.items() if any(pair)} == {
        "a_rank_1.pdb": (None, "a_rank_1_distogram.npy"), "b.pdb": ("b_scores.json", None),
        "b.ent.gz": ("b_scores.json", None), "c.pdb": ("c_pae.json.gz", "c_distogram.npy"),
        "c.cif.gz": ("c_pae.json.gz", "c_distogram.npy"),
    }  # fmt: skip
    assert all(one.reference is None for one in found.values())
    files = predicted.confidence_files(found)
    assert [file.path.name for file in files] == [
        "a_rank_1_distogram.npy", "b_scores.json", "c_distogram.npy", "c_pae.json.gz",
    ]  # fmt: skip
    assert predicted.confidence_files({}) == []


@pytest.mark.parametrize(("count", "min_kl", "is_used"), [(30, 0.5, True), (29, 0.5, False), (30, 0.0, False)])
def test_thirty_distograms_are_a_reference(tmp_path: Path, count: int, min_kl: float, is_used: bool) -> None:
    files = []
    for number in range(count + 1):
        # The last file is not packed, and does not count.
        name = f"p{number}" if number < count else "p0_rank_2"
        (tmp_path / f"{name}.cif").touch()
        np.save(tmp_path / f"{name}_distogram.npy", np.full((3, 3, 2), 0.5 if number < count else 1.0))
        files.append(InputFile(f"{name}.cif", tmp_path / f"{name}.cif"))
    found = predicted.find_predictions(files, min_kl)
    assert len(found) == count + 1
    for one in found.values():
        assert (one.reference is not None) is is_used
        if one.reference is not None:
            np.testing.assert_allclose(one.reference, np.full((128, 2), 0.5))


# ---- confidence


def test_the_reference_is_the_mean_of_each_separation(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths, bins, smallest = (2, 5, 131, 140), 3, 2.0**-24
    distograms = [rng.dirichlet(np.ones(bins), (n, n)) for n in lengths]
    paths = []
    for number, array in enumerate((*distograms, np.full((4, 4, 2), 0.5), np.full((4, 4), 0.5))):
        paths.append(tmp_path / f"{number}.npy")
        np.save(paths[-1], array)
    # The files are taken in the order of hashes, and the first one decides the number of bins.
    order = sorted(paths, key=lambda path: predicted.blake2b(path.name.encode()).digest())
    assert order.index(paths[4]) > 0
    sums = np.full((128, bins), smallest)
    for array in distograms:
        for i in range(len(array)):
            for j in range(i + 1, min(i + 129, len(array))):
                sums[j - i - 1] += array[i, j]
    reference = predicted.reference_distribution(paths)
    assert reference is not None
    np.testing.assert_allclose(reference, sums / sums.sum(1, keepdims=True), rtol=1e-12)
    # Separations that do not occur.
    short = predicted.reference_distribution(paths[:1])
    assert short is not None
    np.testing.assert_allclose(short[1:], np.full((127, bins), 1 / 3))
    assert predicted.reference_distribution([]) is None
    assert predicted.reference_distribution(paths[5:]) is None
    for distogram in (distograms[3], distograms[0], distograms[1].astype(np.float16), distograms[1][:1, :1]):
        n = len(distogram)
        upper = np.triu(np.ones((n, n), bool))[..., None]
        symmetric = np.where(upper, distogram, distogram.swapaxes(0, 1))
        p = symmetric.astype(np.float64) + smallest
        p /= p.sum(-1, keepdims=True)
        expected = []
        for i in range(n):
            others = [j for j in range(max(0, i - 128), min(n, i + 129)) if j != i]
            apart = [abs(i - j) - 1 for j in others]
            pairs = [(reference[a] * np.log(reference[a] / p[i, j])).sum() for a, j in zip(apart, others)]
            expected.append(float(np.mean(pairs)) if pairs else 0.0)
        np.testing.assert_allclose(predicted.divergences(distogram, reference), expected, rtol=1e-9, atol=1e-12)


def test_a_thousand_distograms_are_enough(tmp_path: Path) -> None:
    names = sorted(("a.npy", "b.npy"), key=lambda name: predicted.blake2b(name.encode()).digest())
    first, last = (tmp_path / name for name in names)
    np.save(first, np.full((2, 2, 2), 0.5))
    np.save(last, np.full((2, 2, 2), [0.0, 1.0]))
    for count, share in ((1000, 0.5), (999, 499.5 / 1000)):
        reference = predicted.reference_distribution([last] + [first] * count)
        assert reference is not None
        np.testing.assert_allclose(reference[0], [share, 1 - share], atol=1e-9)


def test_other_arrays_are_no_distograms(tmp_path: Path) -> None:
    path = tmp_path / "x_distogram.npy"
    for array, message in (
        (np.full((3, 3, 2), 1.5), "a distogram with values that are not probabilities"),
        (np.full((3, 3, 2), [0.5, 1.5]), "a distogram with values that are not probabilities"),
        (np.full((3, 3, 2), [-0.1, 0.5]), "a distogram with values that are not probabilities"),
        (np.full((3, 3, 2), np.nan), "a distogram with values that are not probabilities"),
        (np.full((3, 3, 2), 1), r"a distogram of shape \[3, 3, 2\]"),
        (np.full((3, 3), 0.5), r"a distogram of shape \[3, 3\]"),
        (np.full((3, 4, 2), 0.5), r"a distogram of shape \[3, 4, 2\]"),
        (np.full((4, 4, 2), 0.5), r"a distogram of shape \[4, 4, 2\]"),
    ):
        np.save(path, array)
        with pytest.raises(UserError, match=rf"^x_distogram\.npy: {message}\. Predict it again\.$"):
            predicted.read_distogram(path, 3)
        if array.shape != (4, 4, 2):
            with pytest.raises(UserError, match=message):
                predicted.read_distogram(path)
    for array in (np.full((3, 3, 2), [0.0, 1.0]), np.zeros((3, 3, 0))):
        np.save(path, array)
        for length in (3, None):
            np.testing.assert_array_equal(predicted.read_distogram(path, length), array)
    # The second one is a pickle of None.
    for data in (b"\x93NUMPY and more", b"\x80\x04N."):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"^x_distogram\.npy: not a distogram \(.*\)\. Predict it again\.$"):
            predicted.read_distogram(path)


def confident(
    tmp_path: Path, *factors: list[float] | None, **fields: Any
) -> tuple[Structure, dict[str, dict[str, float]]]:
    """Return the result for chains with these values in their B column."""
    chains = {}
    for name, values in zip("ABC", factors):
        one = chain(name, "A" * len(values or [0]))
        chains[name] = replace(one, b_factors=None if values is None else np.array(values, np.float32))
    structure = Structure("1abc", "X-RAY DIFFRACTION", 2.0, None, chains)
    options = PackOptions(**fields.pop("options", {}))
    one_file = predicted.PredictedFile("target", **fields)
    return predicted.with_confidence(structure, InputFile("p/x.cif", tmp_path / "x.cif"), one_file, options)


def test_the_confidence_of_residues_and_chains(tmp_path: Path) -> None:
    nan = float("nan")
    structure, by_chain = confident(tmp_path, [90.0, 49.99, 50.0], [nan, 20.0])
    assert (structure.id, structure.method, structure.resolution) == ("target", "PREDICTED", None)
    factors = {name: one.b_factors.tolist() for name, one in structure.chains.items() if one.b_factors is not None}
    assert factors == {"A": [90.0, pytest.approx(49.99), 50.0], "B": [0.0, 20.0]}
    assert by_chain == {"A": {"plddt": 63.33, "masked": 1}, "B": {"plddt": 20.0, "masked": 2}}
    pae = np.arange(25.0).reshape(5, 5) / 7
    (tmp_path / "pae.json").write_text(json.dumps({"pae": pae.tolist()}))
    np.save(tmp_path / "d.npy", np.full((5, 5, 2), 0.5))
    reference = np.full((128, 2), [0.25, 0.75])
    kl = 0.25 * np.log(0.5) + 0.75 * np.log(1.5)
    files = {"pae": tmp_path / "pae.json", "distogram": tmp_path / "d.npy"}
    for min_kl, masked in ((0.13, {"A": 1, "B": 2}), (0.131, {"A": 3, "B": 2})):
        options = {"min_kl": min_kl}
        structure, by_chain = confident(
            tmp_path, [90.0, 49.99, 50.0], [nan, 20.0], reference=reference, options=options, **files
        )
        assert {name: one["masked"] for name, one in by_chain.items()} == masked
        assert {one["pae"] for one in by_chain.values()} == {1.71}
        assert {one["kl"] for one in by_chain.values()} == {round(kl, 3)}
        assert (structure.chains["A"].b_factors == 0).all() == (masked["A"] == 3)
    # A residue at the limit is kept.
    even = np.full((128, 2), 0.5)
    structure, by_chain = confident(
        tmp_path,
        [90.0, 60.0],
        [70.0, 80.0, 90.0],
        reference=even,
        options={"min_kl": 0.0},
        distogram=files["distogram"],
    )
    assert {(one["masked"], one["kl"]) for one in by_chain.values()} == {(0, 0.0)}
    # Without a reference, distograms are not read. Residues without a pLDDT have no PAE.
    pae[4] = 99.0
    (tmp_path / "pae.json").write_text(json.dumps({"pae": pae[:4, :4].tolist()}))
    (tmp_path / "d.npy").unlink()
    _, by_chain = confident(tmp_path, [90.0, 60.0, 50.0], [nan, 20.0], **files)
    assert by_chain["B"] == {"plddt": 20.0, "masked": 2, "pae": round(float(pae[:4, :4].mean()), 2)}
    np.save(tmp_path / "d.npy", np.full((5, 5, 3), 0.3))
    with pytest.raises(UserError, match=r"^p/x\.cif: its distogram has 3 bins, others 2\. Use one model for all\.$"):
        confident(tmp_path, [90.0, 60.0, 50.0], [20.0, 30.0], reference=reference, distogram=files["distogram"])


@pytest.mark.parametrize(
    ("factors", "content"),
    [
        ([[0.0, 100.0]], None),
        ([[0.5, 1.01]], None),
        ([[70.0], [71.0]], None),
        ([[0.0, 1.0]], "numbers from 0 to 1"),
        ([[0.0, 100.5]], "numbers from 0 to 100.5"),
        ([[-0.5, 99.0]], "numbers from -0.5 to 99"),
        ([[70.0, 70.0]], "numbers from 70 to 70"),
        ([[float("nan")], [float("nan")]], "nothing"),
    ],
)
def test_a_b_column_of_other_numbers_is_refused(
    tmp_path: Path, factors: list[list[float]], content: str | None
) -> None:
    if content is None:
        assert len(confident(tmp_path, *factors)[1]) == len(factors)
        return
    with pytest.raises(UserError) as caught:
        confident(tmp_path, *factors)
    text = f"p/x.cif: its B column holds {content}, not pLDDT (0 to 100). Pass predicted structures."
    assert str(caught.value) == text


@pytest.mark.skipif(not REAL.exists(), reason="../shared is not there")
def test_real_files(tmp_path: Path) -> None:
    folders = [REAL / "afdb_P29373", REAL / "PIGK", REAL / "afdb_Q5VSL9"]
    report = pack(folders, [], tmp_path / "store", predicted=True)
    kept = {entry.name: entry for entry in report.kept}
    assert {"P29373_A", "PIGK_A", "Q5VSL9_A"} == kept.keys()
    assert kept["P29373_A"].plddt == pytest.approx(94, abs=3)
    assert kept["P29373_A"].pae is not None
    assert kept["PIGK_A"].pae is not None
    assert kept["Q5VSL9_A"].masked > 100
    assert "experimental" in " ".join(reasons(report))  # its B factors are no pLDDT
