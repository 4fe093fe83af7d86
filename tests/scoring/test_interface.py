"""Test scores of interfaces: published formulas, contacts, clashes, RMSD to a given complex, and memory."""

import itertools
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from tests.golden.of_pairs import LEFT_OUT, pair_arrays
from tests.golden.reference import CaseFiles, find, read
from warpfold.data.structure.chain import Chain
from warpfold.geometry.residue import ATOM_ORDER, ATOM_TYPES
from warpfold.scoring import interface
from warpfold.scoring.interface import (
    BLOCK,
    PairScore,
    beta_contacts,
    chain_pair_scores,
    ipsae,
    ipsae_d0,
    lis,
    pdockq,
    pdockq2,
    rmsd_to_given,
)
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


def plain_ipsae(errors: np.ndarray, cutoff: float, count: int | None) -> float:
    """Compute ipSAE with the d0 of `count` residues, by default those below the cutoff in each frame."""
    best = 0.0
    for row in errors.astype(float):
        near = [x for x in row if x < cutoff]
        d0 = max(1.0, 1.24 * float(np.cbrt((len(near) if count is None else count) - 15)) - 1.8)
        best = max(best, sum(1 / (1 + (x / d0) ** 2) for x in near) / max(len(near), 1))
    return best


def plain_scores(
    pae: np.ndarray, plddt: np.ndarray, positions: np.ndarray, mask: np.ndarray, a: range, b: range
) -> dict[str, float | None]:
    """Compute all scores of two chains of residues by their definitions."""
    radii = {"C": 1.7, "N": 1.55, "O": 1.52, "S": 1.8}
    pae = pae.astype(float)
    nearest, clashes = {}, 0
    beta = {}
    for i in (*a, *b):
        atom = CB if mask[i, CB] else CA
        beta[i] = positions[i, atom] if mask[i, atom] else np.full(3, np.nan)
    contacts = [(i, j) for i in a for j in b if np.linalg.norm(beta[i] - beta[j]) <= 8]
    for i, j in itertools.product(a, b):
        nearest[i, j] = np.inf
        for x, y in itertools.product(np.flatnonzero(mask[i]), np.flatnonzero(mask[j])):
            distance = float(np.linalg.norm(positions[i, x] - positions[j, y]))
            nearest[i, j] = min(nearest[i, j], distance)
            overlap = radii[ATOM_TYPES[x][0]] + radii[ATOM_TYPES[y][0]] - distance
            clashes += overlap > 1.5 and not x == y == SG
    near = [pair for pair, distance in nearest.items() if distance < 8]
    scores: dict[str, float | None] = {}
    blocks = pae[np.ix_(a, b)], pae[np.ix_(b, a)]
    of_contacts = sorted({i for pair in contacts for i in pair})
    confidence = float(np.mean(plddt[of_contacts])) if contacts else 0.0
    ways: dict[str, list[float]] = {name: [] for name in ("ipsae", "ipsae15", "pdockq2", "lis")}
    d0chn, d0dom = [], []
    for way, errors in enumerate(blocks):
        ways["ipsae"].append(plain_ipsae(errors, 10, None))
        ways["ipsae15"].append(plain_ipsae(errors, 15, None))
        d0chn.append(plain_ipsae(errors, 10, len(a) + len(b)))
        d0dom.append(plain_ipsae(errors, 10, int((errors < 10).any(0).sum() + (errors < 10).any(1).sum())))
        of_pairs = [pae[pair[way], pair[1 - way]] for pair in contacts]
        x = confidence * float(np.mean([1 / (1 + (x / 10) ** 2) for x in of_pairs])) if contacts else 0.0
        ways["pdockq2"].append(1.31 / (1 + np.exp(-0.075 * (x - 84.733))) + 0.005 if contacts else 0.0)
        below = errors[errors < 12].astype(float)
        ways["lis"].append(float(np.mean((12 - below) / 12)) if len(below) else 0.0)
    for name, values in ways.items():
        scores |= {f"{name}_ab": values[0], f"{name}_ba": values[1]}
        scores[name] = max(values) if name != "lis" else sum(values) / 2
    scores |= {"ipsae_d0chn": max(d0chn), "ipsae_d0dom": max(d0dom)}
    x = confidence * np.log10(len(contacts)) if contacts else 0.0
    scores["pdockq"] = 0.724 / (1 + np.exp(-0.052 * (x - 152.611))) + 0.018 if contacts else 0.0
    scores["pae_interaction"] = (float(np.mean(blocks[0])) + float(np.mean(blocks[1]))) / 2
    scores["interface_pae"] = float(np.mean([[pae[i, j], pae[j, i]] for i, j in near])) if near else None
    scores["interface_plddt"] = float(np.mean(plddt[sorted({i for pair in near for i in pair})])) if near else None
    scores["contacts"] = sum(distance < 5 for distance in nearest.values())
    return scores | {"clashes": clashes}


@pytest.mark.parametrize("block", [BLOCK, 3])
@pytest.mark.parametrize("seed", range(4))
def test_all_scores_of_three_chains_are_their_definitions(
    seed: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Residues lack atoms, and aligned errors are whole numbers, so some are exactly at the cutoffs."""
    monkeypatch.setattr(interface, "BLOCK", block)
    rng = np.random.default_rng(seed)
    n, lengths = 20, (7, 5, 8)
    positions = rng.uniform(0, (25, 8, 8), (n, 1, 3)) + rng.uniform(-1.5, 1.5, (n, 37, 3))
    mask = np.zeros((n, 37), np.float32)
    mask[:, [ATOM_ORDER[name] for name in ("N", "CA", "C", "O", "CB", "SG")]] = rng.random((n, 6)) < 0.6
    pae = rng.integers(4, 20, (n, n)).astype(np.float32)
    # The first chain predicts the others better than they predict it.
    pae[:7, 7:] -= 3
    # No error of one pair of chains is below a cutoff.
    pae[7:12, 12:] = 20
    plddt, ptm = rng.uniform(30, 90, n), rng.random((3, 3))
    asym_id, spans = np.repeat([1, 2, 3], lengths), (range(7), range(7, 12), range(12, 20))
    found = chain_pair_scores(pae, plddt, positions, mask, asym_id, ("A", "B", "C"), ptm)
    assert [one.chains for one in found] == [("A", "B"), ("A", "C"), ("B", "C")]
    without = chain_pair_scores(None, plddt, positions, mask, asym_id, ("A", "B", "C"))
    for one, other, (i, j) in zip(found, without, itertools.combinations(range(3), 2), strict=True):
        values = asdict(one)
        assert values.pop("iptm") == ptm[i, j]
        del values["chains"]
        expected = plain_scores(pae, plddt, positions, mask, spans[i], spans[j])
        assert values == pytest.approx(expected, rel=1e-9)
        geometry = ("pdockq", "interface_plddt", "contacts", "clashes")
        assert asdict(other) == dict.fromkeys(values) | {
            "chains": one.chains, "iptm": None, **{name: values[name] for name in geometry}
        }  # fmt: skip


def test_scores_at_their_limits() -> None:
    assert ipsae_d0(np.array([0, 1, 15, 26, 27, 50])) == pytest.approx(
        [1, 1, 1, 1, 1.24 * 12 ** (1 / 3) - 1.8, 1.24 * 35 ** (1 / 3) - 1.8]
    )
    assert (pdockq(0, 90.0), pdockq2(np.zeros(0), 90.0), lis(np.full((2, 3), 12.0)), lis(np.zeros((0, 3)))) == (0,) * 4
    assert lis(np.array([[0.0, 12.0], [6.0, 13.0]])) == pytest.approx(0.75)
    none = ipsae(np.full((2, 3), 10.0), 10.0)
    assert (none.per_frame.tolist(), none.counted.tolist(), none.residues) == ([0, 0], [0, 0], 0)
    assert (none.best, none.d0chn, none.d0dom) == (0, 0, 0)


def test_distances_at_their_limits() -> None:
    """Beta carbons in contact are at most 8 angstrom apart. All other limits exclude the limit itself."""
    positions, mask = np.zeros((2, 37, 3)), np.zeros((2, 37))
    mask[:, CB] = 1
    asym_id = np.array([1, 2])
    for distance, betas, contacts, is_near in (
        (8.0, 1, 0, False),
        (7.999, 1, 0, True),
        (5.0, 1, 0, True),
        (4.999, 1, 1, True),
    ):
        positions[1, CB, 0] = distance
        one = score(positions, mask, asym_id)
        assert (one.contacts, one.interface_plddt is not None) == (contacts, is_near)
        assert [len(x) for x in beta_contacts(positions, mask, slice(0, 1), slice(1, 2))] == [betas, betas]
    positions[1, CB, 0] = 8.001
    assert [len(x) for x in beta_contacts(positions, mask, slice(0, 1), slice(1, 2))] == [0, 0]
    # Two nitrogens of radius 1.55 overlap by exactly 1.5.
    nitrogen = ATOM_ORDER["N"]
    mask[:], mask[:, nitrogen] = 0, 1
    for distance, clashes in ((1.6, 0), (1.599, 1)):
        positions[1, nitrogen, 0] = distance
        assert score(positions, mask, asym_id).clashes == clashes
    # A sulfur clashes with a carbon, but not with a sulfur.
    mask[:] = 0
    mask[0, SG] = mask[1, [SG, CB]] = 1
    positions[1, SG, 0], positions[1, CB, 0] = 1.9, 1.9
    assert score(positions, mask, asym_id).clashes == 1


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
    for chains, name in ((["T"], "target_rmsd"), (["B"], "binder_rmsd")):
        single = rmsd_to_given(off, {id: given[id] for id in chains}, ["T"], ["B"])
        assert single == {"rmsd": None, "binder_rmsd": None, "target_rmsd": None} | {name: found[name]}


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
