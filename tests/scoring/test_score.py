"""Test `warpfold score`: residues are paired despite different names, numbers and missing residues."""

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests.data.entries import assembly_text, random_chain
from tests.scoring.test_metrics import chain as walk
from tests.training.runs import helix
from warpfold.data.structure.chain import Chain, Structure
from warpfold.data.structure.mmcif import parse_structure
from warpfold.data.structure.write import write_mmcif, write_pdb
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.scoring.chain_mapping import CA, pair_residues
from warpfold.scoring.score import assembled, score, score_files

REAL = Path(__file__).parents[2] / "../shared/realdata"


def protein(name: str = "A", length: int = 40, seed: int = 0, first: int = 1) -> Chain:
    """Build a synthetic chain: a random walk of Ca atoms, with the other backbone atoms around them."""
    raw = helix(name, length, seed)
    assert raw.positions is not None
    assert raw.mask is not None
    local = raw.positions - raw.positions[:, [CA]]
    positions = (walk(length, seed)[:, None] + local) * raw.mask[..., None]
    numbers = tuple(str(first + i) for i in range(length))
    return Chain(
        name, raw.sequence, positions.astype(np.float32), raw.mask.astype(np.float32), np.arange(length), numbers
    )


def structure(*chains: Chain) -> Structure:
    return Structure("test", None, None, None, {c.id: c for c in chains})


def moved(chain: Chain, by: tuple[float, float, float] = (5, -3, 9), name: str | None = None) -> Chain:
    """Rotate a chain by 90 degrees, and shift it."""
    turn = np.array([[0, -1, 0], [1, 0, 0], [0, 0, 1]], np.float32)
    positions = (chain.positions @ turn.T + np.array(by, np.float32)) * chain.mask[..., None]
    return dataclasses.replace(chain, id=name or chain.id, positions=positions)


def part(chain: Chain, keep: slice) -> Chain:
    """Select residues, as in a file without SEQRES."""
    kept = {name: getattr(chain, name)[keep] for name in ("sequence", "positions", "mask", "author_numbers")}
    return dataclasses.replace(chain, **kept, residue_index=np.arange(len(kept["sequence"])))


def unseen(chain: Chain, residues: slice) -> Chain:
    mask = chain.mask.copy()
    mask[residues] = 0
    return dataclasses.replace(chain, mask=mask)


def test_a_moved_copy_is_perfect_whatever_its_name_and_numbers() -> None:
    truth = protein()
    other = dataclasses.replace(moved(truth, name="X"), author_numbers=("",) * 40)
    found = score(structure(other), structure(truth))
    assert (found.lddt, found.lddt_ca, found.gdt_ts, found.identity) == (1, 1, 1, 1)
    assert found.tm == pytest.approx(1)
    assert found.rmsd < 1e-4
    assert found.chains == {"X": "A"}


def test_what_the_prediction_lacks_counts_against_it() -> None:
    truth = protein()
    found = score(structure(part(moved(truth), slice(0, 20))), structure(truth))
    assert (found.paired, found.residues) == (20, 40)
    assert found.tm == pytest.approx(0.5, abs=0.01)
    assert found.lddt_ca < 0.6
    assert found.rmsd < 1e-4


def test_what_the_reference_lacks_does_not() -> None:
    truth = protein()
    found = score(structure(moved(truth)), structure(unseen(truth, slice(10, 15))))
    assert (found.paired, found.residues) == (35, 35)
    assert (found.lddt, found.tm) == (1, pytest.approx(1))
    # The reference is a shorter construct.
    found = score(structure(moved(truth)), structure(part(truth, slice(5, 30))))
    assert (found.paired, found.tm) == (25, pytest.approx(1))


def test_a_mutation_is_paired_all_the_same() -> None:
    truth = protein()
    letters = "".join("A" if i == 7 and x != "A" else ("W" if i == 7 else x) for i, x in enumerate(truth.sequence))
    found = score(structure(moved(dataclasses.replace(truth, sequence=letters))), structure(truth))
    assert found.paired == 40
    assert found.identity == pytest.approx(39 / 40)
    assert found.lddt_ca == 1


def test_equal_sequences_correspond_by_position() -> None:
    """In a repetitive sequence, the authors' numbers fit shifted residues equally well."""
    predicted, truth = random_chain("A", "GS" * 20), random_chain("X", "GS" * 20, missing=range(30, 40), first=5)
    pairs = pair_residues(predicted, truth)
    assert pairs.tolist() == [[i, i] for i in range(30)]


def test_numbers_decide_where_letters_cannot() -> None:
    """In a run of one letter, an alignment cannot determine which residues are missing."""
    truth = dataclasses.replace(protein(), sequence="MKV" + "A" * 34 + "WYF")
    keep = [*range(10), *range(20, 40)]
    kept = {name: getattr(truth, name)[keep] for name in ("positions", "mask")}
    numbers = tuple(truth.author_numbers[i] for i in keep)
    gapped = dataclasses.replace(
        truth, sequence="".join(truth.sequence[i] for i in keep), **kept, author_numbers=numbers
    )
    assert pair_residues(gapped, truth)[:, 1].tolist() == keep
    renumbered = dataclasses.replace(gapped, author_numbers=tuple(str(100 + i) for i in range(30)))
    assert len(pair_residues(renumbered, truth)) == 30


def test_numbers_pair_a_redesigned_sequence() -> None:
    """Numbers decide, although an alignment would find more identical letters in another register."""
    truth = protein()
    redesigned = dataclasses.replace(truth, sequence=truth.sequence[1:] + truth.sequence[0])
    assert sum(a == b for a, b in zip(redesigned.sequence, truth.sequence)) < 20
    # 39 of 40 letters are identical in the shifted register. Changing half of the letters makes the numbers decide.
    letters = "".join("A" if i % 2 and x != "A" else x for i, x in enumerate(redesigned.sequence))
    redesigned = dataclasses.replace(redesigned, sequence=letters)
    assert pair_residues(redesigned, truth).tolist() == [[i, i] for i in range(40)]


def test_equal_chains_are_paired_by_where_they_stand() -> None:
    one = protein("A")
    copies = [dataclasses.replace(one, id=name, positions=one.positions + x) for name, x in [("A", 0), ("B", 60)]]
    turned = one.positions @ np.diag([-1, -1, 1]).astype(np.float32)
    third = dataclasses.replace(one, id="C", positions=turned + [0, 80, 0])
    truth = structure(*copies, third)
    # The same complex, moved as a whole, with other chain names and another order.
    names = {"A": "Z", "B": "X", "C": "Y"}
    predicted = structure(*(moved(truth.chains[c], name=names[c]) for c in "CAB"))
    found = score(predicted, truth)
    assert found.chains == {"Y": "C", "Z": "A", "X": "B"}
    assert (found.tm, found.lddt) == (pytest.approx(1), 1)
    forced = score(predicted, truth, {"X": "A", "Y": "B", "Z": "C"})
    assert forced.tm < 0.9
    single = score(structure(moved(one)), truth)
    assert single.tm == pytest.approx(1)
    assert len(single.left_out) == 2


def test_twin_atoms_may_have_each_others_names() -> None:
    truth = dataclasses.replace(protein(), sequence="F" * 40)
    rng = np.random.default_rng(0)
    for name in ("CG", "CD1", "CD2", "CE1", "CE2", "CZ"):
        truth.positions[:, ATOM_ORDER[name]] = truth.positions[:, CA] + rng.normal(size=(40, 3)) * 3
        truth.mask[:, ATOM_ORDER[name]] = 1
    flipped = moved(truth)
    for a, b in [("CD1", "CD2"), ("CE1", "CE2")]:
        flipped.positions[::2, [ATOM_ORDER[a], ATOM_ORDER[b]]] = flipped.positions[::2, [ATOM_ORDER[b], ATOM_ORDER[a]]]
    assert score(structure(flipped), structure(truth)).lddt == 1
    flipped.positions[::2, ATOM_ORDER["CD1"]] += 5
    lower = score(structure(flipped), structure(truth)).lddt
    assert lower is not None
    assert lower < 0.99


def test_different_proteins_are_refused() -> None:
    with pytest.raises(UserError, match="no predicted chain resembles a reference chain"):
        score(structure(protein(seed=1)), structure(protein(seed=2)))
    with pytest.raises(UserError, match="test has no protein chain Q; it has A"):
        score(structure(protein()), structure(protein()), {"A": "Q"})


def test_files_in_either_format(tmp_path: Path) -> None:
    truth = protein()
    (tmp_path / "truth.cif").write_text(write_mmcif("truth", [truth]))
    (tmp_path / "moved.pdb").write_text(write_pdb("moved", [moved(truth)]))
    found = score_files(tmp_path / "moved.pdb", tmp_path / "truth.cif")
    assert found.rmsd < 0.002
    assert found.tm == pytest.approx(1)
    assert ("TM-score", "1.0000") in found.rows()
    ca = dataclasses.replace(truth, mask=np.zeros_like(truth.mask))
    ca.mask[:, CA] = 1
    (tmp_path / "ca.pdb").write_text(write_pdb("ca", [ca]))
    found = score_files(tmp_path / "ca.pdb", tmp_path / "truth.cif")
    assert found.lddt is None
    assert found.lddt_ca > 0.999
    (tmp_path / "other.pdb").write_text(write_pdb("other", [protein(seed=5)]))
    with pytest.raises(UserError, match=r"other.pdb against .*truth.cif: no predicted chain"):
        score_files(tmp_path / "other.pdb", tmp_path / "truth.cif")


@pytest.mark.skipif(not REAL.is_dir(), reason="needs shared/realdata beside the repository")
def test_a_partial_dimer_against_openstructure() -> None:
    """Score a test case of OpenStructure with partial chains and ligands.

    OpenStructure's lDDT also checks the stereochemistry.
    """
    with open(REAL / "metrics/REFERENCE_VALUES.tsv") as lines:
        rows = [row for row in csv.DictReader(lines, delimiter="\t") if "1eud" in row["model"]]
    theirs = {row["metric"]: float(row["value"]) for row in rows}
    predicted, reference = (next(REAL.glob(rows[0][side] + "*")) for side in ("model", "reference"))
    found = score_files(predicted, reference)
    assert found.lddt_ca == pytest.approx(theirs["bb_lddt"], abs=0.001)
    assert found.rmsd == pytest.approx(theirs["rmsd"], abs=0.001)
    assert found.lddt == pytest.approx(theirs["lddt(all-atom,multi-chain)"], abs=0.005)
    assert found.gdt_ts == pytest.approx(theirs["gdt_ts(fraction)"], abs=0.01)


def test_the_assembly_of_the_reference_instead_of_its_file(tmp_path: Path) -> None:
    chains = [random_chain("L", "AGWHKAGWHK"), random_chain("H", "GGSTAGGSTA", seed=1)]  # A and B for mmCIF
    reference = write_mmcif("1abc", chains) + assembly_text([("1", "1,3", "A")])
    (tmp_path / "truth.cif").write_text(reference)
    copies = list(assembled(parse_structure(reference)).chains.values())
    assert [chain.id for chain in copies] == ["L", "L-2"]
    np.testing.assert_allclose(
        copies[1].positions[copies[1].mask > 0], (chains[0].positions + [0, 0, 7])[chains[0].mask > 0], atol=2e-3
    )
    # Atoms that are absent stay at the origin.
    assert not copies[1].positions[copies[1].mask == 0].any()
    (tmp_path / "predicted.cif").write_text(write_mmcif("x", copies))
    found = score_files(tmp_path / "predicted.cif", tmp_path / "truth.cif", assembly=True)
    assert sorted(found.chains.values()) == ["L", "L-2"]
    assert found.lddt_ca == 1
    assert score_files(tmp_path / "predicted.cif", tmp_path / "truth.cif").lddt_ca < 1
