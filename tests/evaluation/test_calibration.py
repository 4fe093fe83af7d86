"""Test pLDDT and PAE: read from the files of several programs, and compared with the true errors."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.scoring.test_score import part, protein, structure, unseen
from warpfold.data.formats.predictions import read_pae
from warpfold.data.structure.chain import Chain
from warpfold.evaluation.confidence import (
    MAX_PAE,
    PAE_BINS,
    PLDDT_BINS,
    Sums,
    alignment_rows,
    pae_sums,
    plddt_sums,
    read_plddt,
)
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.scoring import metrics
from warpfold.scoring.score import pair

N, CA, C = (ATOM_ORDER[name] for name in ("N", "CA", "C"))


def test_sums_of_parts_are_those_of_the_whole() -> None:
    random = np.random.default_rng(0)
    expected = random.uniform(0, 100, 500)
    true = np.clip(expected + random.normal(5, 10, 500), 0, 100)
    whole, parts = Sums.from_values(expected, true, PLDDT_BINS), Sums.from_values(expected[:99], true[:99], PLDDT_BINS)
    parts = parts + Sums.from_values(expected[99:], true[99:], PLDDT_BINS)
    found = whole.to_dict()
    assert parts.to_dict()["error"] == pytest.approx(found["error"])
    assert found["count"] == 500
    assert found["bias"] == pytest.approx((expected - true).mean())
    assert found["correlation"] == pytest.approx(np.corrcoef(expected, true)[0, 1])
    gaps = []
    for low, high in itertools.pairwise(PLDDT_BINS):
        within = (expected >= low) & (expected < high)
        gaps.append(within.sum() / 500 * abs(expected[within].mean() - true[within].mean()))
    assert found["error"] == pytest.approx(sum(gaps))
    assert Sums.from_values(expected, np.full(500, 50.0), PLDDT_BINS).to_dict()["correlation"] is None


def test_pae_is_compared_with_the_true_error_of_every_pair() -> None:
    """Compare with a plain implementation.

    The prediction has two chains, with residues before, between and after those of the truth.
    """
    truth = structure(replace(part(protein("A", 30, 1), slice(4, 26)), id="X"), protein("B", 25, 2))
    random = np.random.default_rng(3)
    chains = []
    for seed, length, name in ((1, 30, "A"), (2, 25, "B")):
        chain = protein(name, length, seed)
        errors = random.normal(0, 2, chain.positions.shape)
        chains.append(replace(chain, positions=((chain.positions + errors) * chain.mask[..., None]).astype(np.float32)))
    # Residue 12 of the first chain is not predicted.
    chains[0].mask[12] = chains[0].positions[12] = 0
    pae = random.uniform(0.5, 31, (55, 55)).astype(np.float32)
    paired = pair(structure(*chains), truth)
    assert paired.chains == {"A": "X", "B": "B"}
    place = [*range(4, 26), *range(30, 55)]
    predicted = np.concatenate([chain.positions for chain in chains])[place].astype(np.float64)
    known = np.concatenate([chain.positions for chain in truth.chains.values()]).astype(np.float64)

    def local(atoms: np.ndarray, i: int, j: int) -> np.ndarray:
        first = atoms[i, C] - atoms[i, CA]
        first = first / np.linalg.norm(first)
        second = atoms[i, N] - atoms[i, CA]
        second = second - first * (first @ second)
        second = second / np.linalg.norm(second)
        frame = np.stack([first, second, np.cross(first, second)])
        return frame @ (atoms[j, CA] - atoms[i, CA])

    expected, true = [], []
    seen = [i for i in range(len(place)) if place[i] != 12]
    for i in seen:
        for j in seen:
            if i != j:
                expected.append(pae[place[i], place[j]])
                true.append(min(MAX_PAE, float(np.linalg.norm(local(predicted, i, j) - local(known, i, j)))))
    found = pae_sums(paired, pae).to_dict()
    assert found["count"] == len(seen) * (len(seen) - 1)
    assert found["bias"] == pytest.approx(np.mean(expected) - np.mean(true), abs=1e-5)
    assert found["correlation"] == pytest.approx(np.corrcoef(expected, true)[0, 1], abs=1e-6)


def test_residues_without_a_backbone_frame_in_the_truth_align_nothing() -> None:
    """Residues without N in the truth are scored, but have no frame."""
    truth, prediction = protein("A", 30, 1), protein("A", 30, 1)
    mask = truth.mask.copy()
    mask[5:8, N] = 0
    truth = replace(truth, mask=mask, positions=truth.positions * mask[..., None])
    sums = pae_sums(pair(structure(prediction), structure(truth)), np.full((30, 30), 2.0, np.float32)).to_dict()
    assert sums["count"] == 27 * 29
    assert sums["bias"] == pytest.approx(2.0, abs=1e-4)


def test_plddt_is_compared_with_lddt_of_residues_that_both_have() -> None:
    truth = unseen(protein("A", 40, 1), slice(10, 15))
    chain = part(protein("A", 40, 1), slice(2, 40))
    plddt = {"A": np.linspace(50, 90, 38)}
    paired = pair(structure(chain), structure(truth))
    found = plddt_sums(paired, plddt).to_dict()
    both = [i for i in range(2, 40) if not 10 <= i < 15]
    assert found["count"] == len(both)
    mask = truth.mask[:, [CA]] > 0
    known = mask & (np.arange(40) >= 2)[:, None]
    lddt = metrics.lddt_per_residue(truth.positions[:, [CA]], truth.positions[:, [CA]], mask, known)
    assert found["bias"] == pytest.approx(np.mean([plddt["A"][i - 2] for i in both]) - 100 * lddt[both].mean())


def with_b(values: np.ndarray | None) -> dict[str, Chain]:
    return {"A": replace(protein("A", 10), b_factors=values)}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.zeros(10), "its B column is 0 throughout"),
        (np.linspace(-1, 50, 10), "its B column ranges from -1 to 50, not from 0 to 100"),
        (np.linspace(5, 150, 10), "its B column ranges from 5 to 150, not from 0 to 100"),
        (np.full(10, np.nan), "its file has no B column"),
        (None, "its file has no B column"),
    ],
)
def test_a_b_column_that_is_no_plddt(values: np.ndarray | None, said: str) -> None:
    assert read_plddt(with_b(values), written=False) == (None, said)


def test_plddt_may_be_a_share() -> None:
    found, _ = read_plddt(with_b(np.linspace(0.2, 0.9, 10)))
    assert found is not None
    np.testing.assert_allclose(found["A"], np.linspace(20, 90, 10))
    # A constant column is accepted, because `written` is true by default.
    assert read_plddt(with_b(np.full(10, 50.0)))[0] is not None


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        (np.linspace(0, 100, 10), 1),
        (np.linspace(0, 1, 10), 100),
        (np.linspace(0, 1.5, 10), 1),
        (np.zeros(10), 100),
        (np.full(10, 100.0), 1),
    ],
)
def test_limits_of_plddt(values: np.ndarray, scale: int) -> None:
    found, reason = read_plddt(with_b(values))
    assert reason == ""
    assert found is not None
    np.testing.assert_array_equal(found["A"], scale * values)


def test_plddt_of_several_chains() -> None:
    """Only residues with Ca need a value, and a chain without a B column is left out."""
    values = np.linspace(20, 90, 10)
    values[3] = np.nan
    chain = unseen(protein("A", 10), slice(3, 4))
    chains = {"A": replace(chain, b_factors=values), "B": protein("B", 10), "C": with_b(np.full(10, 95.0))["A"]}
    found, reason = read_plddt(chains, written=False)
    assert (reason, found and list(found)) == ("", ["A", "C"])
    assert found is not None
    np.testing.assert_array_equal(found["A"], values)
    some = values.copy()
    some[4] = np.nan
    assert read_plddt({"A": replace(chain, b_factors=some)}) == (None, "its file has no B column")
    assert read_plddt(with_b(np.full(10, 101.0))) == (None, "its B column is 101 throughout")


def test_rows_of_alignments(tmp_path: Path) -> None:
    (tmp_path / "a.a3m").write_text(">q\nAC\n>r >s\nA>\n")
    (tmp_path / "b.sto").write_text("# STOCKHOLM 1.0\n#=GS q DE x\nq  AC\nr1 AC\n\nq  DE\nr1 DE\n//\n")
    assert alignment_rows([tmp_path / "a.a3m"]) == 2
    assert alignment_rows([tmp_path / "a.a3m", tmp_path / "b.sto"]) == 4
    assert alignment_rows([]) is None


def test_errors_are_clipped_to_the_largest_pae() -> None:
    """The prediction has its second chain 50 angstrom away, and the confidence is the largest."""
    truth = [protein("A", 20, 1), protein("B", 20, 2)]
    far = replace(truth[1], positions=truth[1].positions + np.float32([50, 0, 0]) * truth[1].mask[..., None])
    paired = pair(structure(truth[0], far), structure(*truth))
    (last,) = [row for row in pae_sums(paired, np.full((40, 40), 31.5)).to_dict()["bins"] if row["count"]]
    assert last["expected"] == 31.5
    # Half of the pairs are in one chain, except for pairs of a residue with itself.
    assert last["true"] == pytest.approx(31.75 * 800 / (40 * 39), abs=1e-3)


def test_values_outside_the_bins_are_in_the_nearest_bin() -> None:
    expected, true = np.array([-5, 0, 9.5, 10, 20, 25.0]), np.array([1, 2, 3, 4, 5, 6.0])
    found = Sums.from_values(expected, true, np.array([0, 10, 20.0]))
    assert [found.count.tolist(), found.expected.tolist(), found.true.tolist()] == [[3, 3], [4.5, 55], [6, 15]]
    assert found.squares.tolist() == [expected @ expected, true @ true, expected @ true]
    assert Sums.from_values(expected[:1], true[:1], np.array([0, 10, 20, 30.0])).count.tolist() == [1, 0, 0]
    both = found + found
    for name in ("count", "expected", "true", "squares"):
        np.testing.assert_array_equal(getattr(both, name), 2 * getattr(found, name))


def test_calibration_of_a_few_values() -> None:
    """Empty bins are left out, and the correlation is that of all values."""
    expected, true = np.array([0.25, 0.5, 2.25]), np.array([0.5, 0.125, 1.0])
    found = Sums.from_values(expected, true, np.array([0, 1, 2, 3.0])).to_dict()
    assert found == {
        "count": 3,
        "error": pytest.approx((2 * (0.375 - 0.3125) + 1.25) / 3),
        "bias": pytest.approx(1.0 - 1.625 / 3),
        "correlation": pytest.approx(np.corrcoef(expected, true)[0, 1]),
        "bins": [{"count": 2, "expected": 0.375, "true": 0.3125}, {"count": 1, "expected": 2.25, "true": 1.0}],
    }
    assert list(map(type, found.values())) == [int, float, float, float, list]


@pytest.mark.parametrize(("spread", "correlation"), [(6e-6, pytest.approx(1.0)), (1e-6, None)])
def test_equal_values_have_no_correlation(spread: float, correlation: float | None) -> None:
    values = np.array([0, spread])
    assert Sums.from_values(values, values, PLDDT_BINS).to_dict()["correlation"] == correlation


def test_bins_of_plddt_and_pae() -> None:
    values = np.arange(0, 100.5, 0.5)
    assert [row["count"] for row in Sums.from_values(values, values, PLDDT_BINS).to_dict()["bins"]] == [10] * 19 + [11]
    rows = Sums.from_values(values, values, PAE_BINS).to_dict()["bins"]
    assert [row["count"] for row in rows] == [2] * 31 + [139]


PAE = np.random.default_rng(0).uniform(0, 31, (4, 4)).round(2)
LAYOUTS = {
    "AlphaFold DB": [{"predicted_aligned_error": PAE.tolist(), "max_predicted_aligned_error": 31.75}],
    "AlphaFold DB until 2022": [{"residue1": [1], "residue2": [1], "distance": PAE.ravel().tolist()}],
    "ColabFold": {"plddt": [90.0] * 4, "pae": PAE.tolist(), "ptm": 0.5},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pae_of_other_programs(layout: str, tmp_path: Path) -> None:
    (tmp_path / "pae.json").write_text(json.dumps(LAYOUTS[layout]))
    np.testing.assert_allclose(read_pae(tmp_path / "pae.json", np.ones(4, bool)), PAE, atol=1e-5)


def test_pae_of_residues_that_have_atoms(tmp_path: Path) -> None:
    """A gap in the numbers of a PDB file becomes residues that the prediction does not contain."""
    (tmp_path / "pae.json").write_text(json.dumps(LAYOUTS["ColabFold"]))
    seen = np.array([True, True, False, True, False, True])
    found = read_pae(tmp_path / "pae.json", seen)
    np.testing.assert_allclose(found[np.ix_(seen, seen)], PAE, atol=1e-5)
    assert np.isnan(found[2]).all()
