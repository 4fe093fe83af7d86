"""Test scores of complexes: DockQ against the published program, other scores against definitions, chain mapping."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.scoring.complexes import CASES, disturbed, heterodimer, named, placed, renamed, ring, two_and_two
from tests.scoring.test_score import REAL, protein, structure
from warpfold import cli
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.write import write_mmcif
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.scoring import chain_mapping
from warpfold.scoring.dockq import contacts
from warpfold.scoring.score import Score, score, score_files
from warpfold.scoring.score_complex import ComplexScore

# Results of DockQ 2.1.3 (PyPI) on the complexes of CASES, written as PDB files, so positions have three decimals.
# Interface -> DockQ, fnat, fnonnat, iRMSD, LRMSD. "A chain less" is the best of all mappings with the reference's
# chains in their order. This order decides which of two identical chains LRMSD superposes.
PUBLISHED = {
    "heterodimer": {"AB": (0.76257, 0.6, 0.3077, 0.8848, 2.0343)},
    "far": {"AB": (0.19054, 0, 0, 3.5979, 9.9167)},
    "lossy": {"AB": (0.79186, 0.5333, 0.2727, 0.5837, 1.3949)},
    "lossy truth": {"AB": (0.81921, 0.6154, 0.2727, 0.5837, 1.3949)},
    "trimer": {
        "AB": (0.79726, 0.6667, 0.1429, 0.8482, 1.5607),
        "AC": (0.83271, 0.8333, 0.4231, 0.9907, 1.5324),
        "BC": (0.92488, 0.8889, 0.1111, 0.528, 0.5382),
    },
    "ring of five": {
        "AB": (0.64613, 0.3333, 0, 1.0181, 2.4992),
        "AE": (0.64434, 0.5, 0.25, 1.4564, 2.5356),
        "BC": (0.75913, 1.0, 0.8235, 1.4958, 4.5668),
        "CD": (0.52398, 0.1667, 0.6667, 1.5242, 2.6196),
        "DE": (0.90744, 0.8333, 0, 0.5183, 0.5613),
    },
    "two and two": {
        "AB": (0.9013, 0.9, 0.3333, 0.6909, 1.248),
        "AC": (0.96268, 1.0, 0, 0.522, 0.5343),
        "CD": (0.85767, 0.75, 0.1667, 0.6454, 1.2384),
    },
    "a chain less": {
        "AC": (0.9569, 1.0, 0.5556, 0.5259, 1.2132),
        "AD": (0.9695, 1.0, 0.3103, 0.4541, 0.7467),
        "CD": (0.9216, 0.85, 0.0, 0.4332, 0.7695),
    },
}
# Rounding positions to 0.001 changes an RMSD by at most 0.001, and DockQ's steepest term by 0.15 times as much.
ROUNDING = 0.001


def compared(predicted: dict[str, Chain], truth: dict[str, Chain], **more: Any) -> tuple[Score, ComplexScore]:
    found = score(structure(*predicted.values()), structure(*truth.values()), **more)
    assert found.complex is not None
    return found, found.complex


def dockq(predicted: dict[str, Chain], truth: dict[str, Chain], chains: dict[str, str] | None = None) -> float:
    found = compared(predicted, truth, chains=chains)[1].dockq
    assert found is not None
    return found


@pytest.mark.parametrize("case", CASES)
def test_dockq_is_that_of_the_published_program(case: str) -> None:
    truth, predicted = CASES[case]
    _, found = compared(predicted, truth)
    ours = {"".join(one.chains): one for one in found.interfaces}
    for pair, theirs in PUBLISHED[case].items():
        one = ours[pair]
        assert one.irmsd is not None
        assert one.lrmsd is not None
        assert one.fnonnat is not None
        values = (one.dockq, one.fnat, one.fnonnat, one.irmsd, one.lrmsd)
        assert values == pytest.approx(theirs, abs=ROUNDING)
    assert {pair for pair, one in ours.items() if one.predicted} == PUBLISHED[case].keys()
    assert found.dockq_present == pytest.approx(np.mean([v[0] for v in PUBLISHED[case].values()]), abs=ROUNDING)


def test_a_complex_that_was_moved_and_renamed_is_perfect() -> None:
    for truth, names in ((ring(5, radius=13.0), "DBEAC"), (two_and_two(), "BDAC"), (heterodimer(), "XY")):
        turned = named(*(dataclasses.replace(c, positions=c.positions[..., [2, 0, 1]] + 20) for c in truth.values()))
        result, found = compared(renamed(turned, names), truth)
        assert len(found.interfaces) > 0
        scores = (found.dockq, found.dockq_present, found.ilddt, found.qs_global, found.qs_best, found.ics, found.ips)
        assert scores == pytest.approx((1,) * 7, abs=1e-4)
        assert not found.missing
        assert result.tm == pytest.approx(1, abs=1e-4)


def test_chains_pulled_apart_share_nothing() -> None:
    truth = heterodimer()
    apart = named(truth["A"], placed(truth["B"], "B", shift=(90, 0, 0)))
    result, found = compared(apart, truth)
    (one,) = found.interfaces
    scores = (one.fnat, one.fnonnat, one.ilddt, found.qs_global, found.qs_best, found.ics, found.ips)
    assert scores == (0,) * 7
    assert one.dockq < 0.05
    assert found.ilddt == 0
    assert result.lddt is not None
    assert result.lddt > 0.5  # the chains themselves are right


def test_what_the_prediction_lacks_counts_as_wrong_and_is_said() -> None:
    truth = ring(4, radius=10.0)
    less = named(*list(truth.values())[:3])
    result, found = compared(less, truth)
    pairs = {"".join(one.chains): one for one in found.interfaces}
    assert sorted("".join(one.chains) for one in found.missing) == ["AD", "BD", "CD"]
    assert found.dockq_present == pytest.approx(1)
    assert found.dockq == pytest.approx((len(pairs) - 3) / len(pairs))
    assert (pairs["AD"].dockq, pairs["AD"].irmsd, pairs["AD"].ilddt) == (0, None, 0)
    assert found.qs_best == pytest.approx(1)
    assert found.qs_global is not None
    assert found.qs_global < 0.8
    rows = dict(result.rows())
    assert rows["left out"] == "D"
    assert "the prediction lacks chains of A-D" in rows["interfaces"]
    assert "over the 3 whose chains are predicted" in rows["DockQ"]
    single, alone = compared(named(truth["B"]), truth)
    assert (alone.dockq, alone.dockq_present, alone.ilddt) == (0, None, 0)
    assert single.tm == pytest.approx(1)
    more, _ = compared(truth, less)
    assert more.extra == ["D"]
    assert dict(more.rows())["not in reference"] == "D"


def test_a_reference_of_one_chain_or_of_ca_has_no_interfaces() -> None:
    truth = heterodimer()
    assert score(structure(*truth.values()), structure(truth["A"])).complex is None
    ca = named(*(dataclasses.replace(c, mask=c.mask * (np.arange(37) == ATOM_ORDER["CA"])) for c in truth.values()))
    result = score(structure(*ca.values()), structure(*truth.values()))
    assert result.complex is None
    assert ("interfaces", "- (Ca only)") in result.rows()
    dropped = dataclasses.replace(structure(*truth.values()), dropped={"N": "polydeoxyribonucleotide"})
    assert dict(score(dropped, dropped).rows())["dropped"].startswith("test N: polydeoxyribonucleotide, test N")
    far = named(truth["A"], placed(truth["B"], "B", shift=(0, 200, 0)))
    result, found = compared(far, far)
    assert (found.interfaces, found.dockq, found.ilddt, found.qs_global) == ((), None, None, None)
    assert ("interfaces", "none: no two chains of the reference touch") in result.rows()


def test_the_mapping_is_the_best_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for truth in (ring(4, radius=10.0), two_and_two()):
        predicted = renamed(disturbed(truth, 0.4, 2.0, 0.4), "BDCA")
        best = max(
            dockq(predicted, truth, dict(zip(names, truth)))
            for names in itertools.permutations(predicted)
            if all(predicted[p].sequence == truth[r].sequence for p, r in zip(names, truth))
        )
        assert dockq(predicted, truth) == pytest.approx(best, abs=1e-9)
        with monkeypatch.context() as few:
            few.setattr(chain_mapping, "MAX_EXHAUSTIVE", 0)
            assert dockq(predicted, truth) == pytest.approx(best, abs=1e-9)


def test_many_copies_are_mapped_though_the_ring_is_bent() -> None:
    """No single superposition fits, so the mapping grows from neighbour to neighbour."""
    truth = ring(16, radius=40.0)
    assert len(contacts(truth)) == 16
    bent = [placed(c, c.id, shift=(0, 0, 0.3 * k * k)) for k, c in enumerate(truth.values())]
    names = "PACEGIKMOBDFHJLN"
    as_made = dockq(named(*bent), truth, {r: r for r in truth})
    assert as_made < 0.99
    # A mapping that is rotated by one copy is almost as good.
    assert dockq(renamed(named(*bent), names), truth) > as_made - 0.01


def test_scores_of_contacts_are_their_definitions() -> None:
    truth = heterodimer()
    predicted = disturbed(truth, 0.3, 1.5, 0.3)
    _, found = compared(predicted, truth)
    sides = [(side["A"], side["B"]) for side in (truth, predicted)]
    beta = [[_beta(chain) for chain in side] for side in sides]
    score_, weights, lost, kept, pairs, shared = 0.0, 0.0, 0.0, 0.0, 0, [0, 0, 0]
    residues: list[set[tuple[str, int]]] = [set(), set()]
    for i, j in itertools.product(range(40), range(30)):
        d = [float(np.linalg.norm(a[i] - b[j])) for a, b in beta]
        weight = [np.exp(-2 * (max(x - 5, 0) / 4.28) ** 2) if x < 12 else 0.0 for x in d]
        if max(d) < 12:
            weights += max(weight)
            score_ += max(weight) * (1 - abs(d[0] - d[1]) / 12)
        else:
            lost += sum(weight)
        touch = [min_distance(a, i, b, j) < 5 for a, b in sides]
        shared = [shared[0] + touch[0], shared[1] + touch[1], shared[2] + all(touch)]
        for side in (0, 1):
            residues[side] |= {("A", i), ("B", j)} if touch[side] else set()
        for x, y in itertools.product(*(np.flatnonzero(c.mask[k]) for c, k in zip(sides[0], (i, j)))):
            d = [float(np.linalg.norm(a.positions[i, x].astype(float) - b.positions[j, y])) for a, b in sides]
            if d[0] < 15:
                pairs += 1
                kept += np.mean([abs(d[0] - d[1]) < t for t in (0.5, 1, 2, 4)])
    assert found.qs_global == found.qs_best == pytest.approx(score_ / (weights + lost))
    assert found.ics == pytest.approx(2 * shared[2] / (shared[0] + shared[1]))
    assert found.ips == pytest.approx(len(residues[0] & residues[1]) / len(residues[0] | residues[1]))
    assert found.ilddt == found.interfaces[0].ilddt == pytest.approx(kept / pairs)


def _beta(chain: Chain) -> np.ndarray:
    atoms = [ATOM_ORDER["CA" if letter == "G" else "CB"] for letter in chain.sequence]
    return chain.positions[np.arange(len(atoms)), atoms].astype(float)


def min_distance(a: Chain, i: int, b: Chain, j: int) -> float:
    left, right = a.positions[i][a.mask[i] > 0], b.positions[j][b.mask[j] > 0]
    return float(np.linalg.norm(left[:, None].astype(float) - right, axis=-1).min())


def test_a_mutation_is_not_a_shared_contact() -> None:
    """As in the published program, contacts are shared only between identical amino acids."""
    truth = heterodimer()
    i, _ = contacts(truth)["A", "B"].within(5)[0]
    letters = truth["A"].sequence
    other = "A" if letters[i] != "A" else "S"
    mutated = {**truth, "A": dataclasses.replace(truth["A"], sequence=letters[:i] + other + letters[i + 1 :])}
    _, found = compared(mutated, truth)
    of_i = np.mean(contacts(truth)["A", "B"].within(5)[:, 0] == i)
    assert found.interfaces[0].fnat == pytest.approx(1 - of_i)
    assert found.ics == 1  # the residues are still paired


def test_chains_named_by_the_user() -> None:
    truth = ring(3, radius=9.0)
    _, forced = compared(truth, truth, chains={"A": "B", "B": "A", "C": "C"})
    assert forced.dockq is not None
    assert forced.dockq < 0.9
    _, two = compared(truth, truth, chains={"A": "A", "B": "B"})
    assert two.dockq == pytest.approx(1 / 3)
    with pytest.raises(UserError, match="chain A of test is named twice"):
        compared(truth, truth, chains={"A": "A", "B": "A"})
    with pytest.raises(UserError, match="no predicted chain resembles a reference chain"):
        dockq(named(protein("A", 40, 8)), truth)


def test_the_command_prints_interfaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truth, predicted = CASES["two and two"]
    for name, chains in (("truth", truth), ("predicted", predicted)):
        (tmp_path / f"{name}.cif").write_text(write_mmcif(name, list(chains.values())))
    files = [str(tmp_path / name) for name in ("predicted.cif", "truth.cif")]
    with pytest.raises(SystemExit, match="0"):
        cli.main(["score", *files])
    text = capsys.readouterr().out
    assert "DockQ              0.907" in text
    assert ["C-D", "C-B", "20", "0.858"] in [line.split()[:4] for line in text.splitlines()]
    with pytest.raises(SystemExit, match="0"):
        cli.main(["score", *files, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["complex"]["interfaces"][0]["predicted"] == ["A", "D"]
    assert found["complex"]["dockq"] == pytest.approx(0.907, abs=0.001)


@pytest.mark.skipif(not REAL.is_dir(), reason="needs shared/realdata beside the repository")
def test_a_partial_dimer_against_openstructure() -> None:
    """Score a test case of OpenStructure.  Its iRMSD uses other residues (docs/howto/score.md)."""
    folder = REAL / "metrics/ost_1eud"
    found = score_files(folder / "1eud_mdl_partial-dimer.pdb.gz", folder / "1eud_ref.pdb.gz").complex
    assert found is not None
    (one,) = found.interfaces
    values = (one.fnat, found.qs_global, found.qs_best, found.ics, found.ips)
    assert values == pytest.approx((0.279, 0.321, 0.932, 0.415, 0.342), abs=0.0005)
    # OpenStructure also checks the stereochemistry.
    assert found.ilddt == pytest.approx(0.282, abs=0.005)
