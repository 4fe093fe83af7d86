"""Test scores of interfaces: published formulas, contacts, clashes, RMSD to a given complex, and memory."""

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.golden.of_pairs import LEFT_OUT, pair_arrays
from tests.golden.reference import CaseFiles, find, read
from warpfold.data.structure.chain import Chain
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.scoring.interface import BLOCK, PairScore, chain_pair_scores, ipsae, rmsd_to_given
from warpfold.scoring.metrics import superpose

GOLDEN = Path(__file__).parents[1] / "golden" / "confidences"
CA, CB, SG = (ATOM_ORDER[name] for name in ("CA", "CB", "SG"))


@pytest.mark.parametrize("files", find(GOLDEN), ids=lambda files: files.name)
def test_scores_of_given_errors_are_those_of_the_papers_to_fp64(files: CaseFiles) -> None:
    case = read(files)
    expected = {name.removeprefix("out/"): x for name, x in case.expected.items() if name not in LEFT_OUT}
    found = pair_arrays(case, expected["pae"], expected["plddt"])
    assert len(found) == 28
    for name, ours in found.items():
        np.testing.assert_allclose(ours, expected[name], rtol=0, atol=1e-13, err_msg=name)


def test_residues_that_count_are_collected_over_all_blocks_of_frames() -> None:
    """Compare a chain of more than one block with the definition over all frames."""
    errors = np.full((BLOCK + 40, 40), 20.0, np.float32)
    errors[:10, :30] = 2.0
    errors[-1, 30:] = 4.0
    found = ipsae(errors, 10.0)
    assert found.residues == 10 + 1 + 40
    d0 = 1.24 * np.cbrt(found.residues - 15) - 1.8
    near = errors < 10
    score = (near / (1 + (errors.astype(np.float64) / d0) ** 2)).sum(1) / np.maximum(near.sum(1), 1)
    assert found.d0dom == pytest.approx(score.max(), abs=1e-12)


def two_chains(n: int, m: int, apart: float = 6.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Build two parallel straight chains of Cα and Cβ.  Returns positions, mask and asym_id."""
    positions, mask = np.zeros((n + m, 37, 3), np.float32), np.zeros((n + m, 37), np.float32)
    mask[:, [CA, CB]] = 1
    positions[:, CA, 0] = positions[:, CB, 0] = 3.8 * np.concatenate([np.arange(n), np.arange(m)])
    positions[n:, [CA, CB], 1] = apart
    positions[:, CB, 2] = 1.5
    return positions, mask, np.repeat([1, 2], [n, m])


def score(positions: np.ndarray, mask: np.ndarray, asym_id: np.ndarray, pae: np.ndarray | None = None) -> PairScore:
    plddt = np.linspace(50, 90, len(mask), dtype=np.float32)
    [one] = chain_pair_scores(pae, plddt, positions, mask, asym_id, ("A", "B"))
    return one


def test_an_interface_is_what_is_near() -> None:
    n, m = 5, 3
    positions, mask, asym_id = two_chains(n, m)
    pae = np.arange((n + m) ** 2, dtype=np.float32).reshape(n + m, n + m) / 10
    one = score(positions, mask, asym_id, pae)
    pairs = [(i, j) for i in range(n) for j in range(m) if np.hypot(3.8 * (i - j), 6) < 8]
    assert (one.contacts, one.clashes) == (0, 0)
    assert one.interface_pae == pytest.approx(np.mean([[pae[i, n + j], pae[n + j, i]] for i, j in pairs]))
    assert one.interface_plddt == pytest.approx(np.linspace(50, 90, n + m)[[0, 1, 2, 3, 5, 6, 7]].mean())
    assert one.pae_interaction == pytest.approx((pae[:n, n:].mean() + pae[n:, :n].mean()) / 2)
    assert score(*two_chains(n, m, 4.9)).contacts == 3
    apart = score(*two_chains(n, m, 50.0), pae)
    assert (apart.contacts, apart.interface_pae, apart.interface_plddt, apart.pdockq) == (0, None, None, 0.0)


def test_without_aligned_errors_there_are_no_scores_of_them() -> None:
    one = score(*two_chains(5, 5))
    known = {name for name, value in vars(one).items() if value is not None}
    assert known == {"chains", "pdockq", "interface_plddt", "contacts", "clashes"}


def test_atoms_that_overlap_clash_but_disulfides_do_not() -> None:
    positions, mask, asym_id = two_chains(4, 4, 1.5)
    # Carbons closer than 1.9 angstrom clash.
    assert score(positions, mask, asym_id).clashes == 8
    bonded, with_sulfur = (one.copy() for one in two_chains(4, 4, 6.0)[:2])
    with_sulfur[[0, 4], SG] = 1
    bonded[0, SG], bonded[4, SG] = (0, 2.0, -3), (0, 4.03, -3)
    assert score(bonded, with_sulfur, asym_id).clashes == 0


def test_rmsd_is_of_the_binder_when_the_target_is_superposed() -> None:
    rng = np.random.default_rng(0)

    def chain(id: str, n: int) -> Chain:
        return Chain(
            id, "A" * n, rng.normal(0, 9, (n, 37, 3)).astype(np.float32), np.ones((n, 37), np.float32),
            np.arange(n), ("",) * n,
        )  # fmt: skip

    given = {"T": chain("T", 30), "B": chain("B", 12)}
    turn = superpose(rng.normal(size=(5, 3)), rng.normal(size=(5, 3)))[0]
    moved = {id: replace(one, positions=(one.positions @ turn.T + 40).astype(np.float32)) for id, one in given.items()}
    exact = rmsd_to_given(moved, given, ["T"], ["B"])
    assert max(value for value in exact.values() if value is not None) < 1e-4
    off = moved | {"B": replace(moved["B"], positions=moved["B"].positions + np.float32([3, 4, 0]))}
    found = rmsd_to_given(off, given, ["T"], ["B"])
    assert found["rmsd"] == pytest.approx(5, abs=1e-4)
    assert found["binder_rmsd"] == pytest.approx(0, abs=1e-4)
    missing = given["T"].mask.copy()
    # Residues that the given target lacks do not count.
    missing[:25] = 0
    wild = off["T"].positions.copy()
    wild[:25] = 1e3
    ours, theirs = off | {"T": replace(off["T"], positions=wild)}, given | {"T": replace(given["T"], mask=missing)}
    partly = rmsd_to_given(ours, theirs, ["T"], ["B"])
    assert partly == pytest.approx(found, abs=1e-3)
    # The same holds for residues that the prediction lacks.
    lacking = off | {"T": replace(off["T"], positions=wild, mask=missing)}
    assert rmsd_to_given(lacking, given, ["T"], ["B"]) == pytest.approx(found, abs=1e-3)
    alone = rmsd_to_given(off, given, [], ["B"])
    assert (alone["rmsd"], alone["target_rmsd"]) == (alone["binder_rmsd"], None)
    assert set(rmsd_to_given(off, {}, ["T"], ["B"]).values()) == {None}


def test_five_thousand_residues_make_no_second_array_of_all_pairs() -> None:
    positions, mask, asym_id = two_chains(2500, 2500)
    pae = np.random.default_rng(0).uniform(0, 30, (5000, 5000)).astype(np.float32)
    tracemalloc.start()
    one = score(positions, mask, asym_id, pae)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < pae.nbytes / 2
    assert one.ipsae is not None
    assert 0 < one.ipsae < 1
