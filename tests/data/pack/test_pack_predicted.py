"""Pack predictions: selection of files, masked residues, and reasons for dropping chains (Supp. 1.3)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.pack.pack_inputs import ONE, TWO, alignment, chain, run
from warpfold.data.example.raw_example import Assembly
from warpfold.data.features.choose import SampleConfig, select
from warpfold.data.features.make import make_features
from warpfold.data.pack import predicted
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.pack import pack
from warpfold.data.pack.report import PackReport, store_summary_text, summarize_store
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import StoredExample, read_assembly
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
    dropped = reasons(packed(tmp_path, max_pae=10.0))
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
