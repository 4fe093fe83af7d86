"""Test `warpfold score`: residues are paired despite different names, numbers and missing residues."""

import csv
import dataclasses
from pathlib import Path
from typing import Any

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
from warpfold.scoring.score import Score, assembled, chain_groups, join_chains, pair, score, score_files
from warpfold.scoring.score_complex import ComplexScore, InterfaceScore

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


def test_unplaced_residues_are_refused_unless_allowed(tmp_path: Path) -> None:
    truth, model = structure(protein()), dataclasses.replace(structure(moved(protein())), id="model")
    note = "residues with N, CA and C that are in no chain: 2 (ALA 41, GLY 42)"
    remedy = "correct the file, or pass --allow-unplaced to score without them"
    unplaced = dataclasses.replace(model, unplaced=("ALA 41", "GLY 42"), notes=("Read twice.", "Read slowly."))
    for sources in ((unplaced, truth), (truth, unplaced)):
        for options in ({}, {"allow_unplaced": False}):
            with pytest.raises(UserError) as error:
                score_files(*sources, **options)
            assert str(error.value) == f"model: has {note}; {remedy}"
        found = score_files(*sources, allow_unplaced=True)
        assert found.notes == ["model: Read twice.", "model: Read slowly.", f"model: {note}"]
        assert found.tm == pytest.approx(1)
    assert score_files(truth, model).notes == []
    (tmp_path / "other.pdb").write_text(write_pdb("other", [protein(seed=5)]))
    with pytest.raises(UserError) as error:
        score_files(tmp_path / "other.pdb", truth)
    assert str(error.value).startswith(f"{tmp_path / 'other.pdb'} against test: no predicted chain resembles")


def test_a_structure_of_ca_on_either_side_has_no_scores_of_atoms() -> None:
    dimer = structure(protein(), moved(protein("B", 30, seed=1), (3, 3, 3), "B"))
    ca = {}
    for name, chain in dimer.chains.items():
        mask = np.zeros_like(chain.mask)
        mask[:, CA] = chain.mask[:, CA]
        ca[name] = dataclasses.replace(chain, mask=mask)
    only = structure(*ca.values())
    for predicted, reference in ((only, dimer), (dimer, only), (only, only)):
        found = score(predicted, reference)
        assert (found.lddt, found.complex, found.lddt_ca, found.paired) == (None, None, 1, 70)
        assert found.rows()[-1] == ("interfaces", "- (Ca only)")
        single = score(structure(predicted.chains["A"]), structure(reference.chains["A"]))
        assert (single.lddt, single.complex, single.rows()[-1]) == (None, None, ("chains", "A → A"))
    whole = score(dimer, dimer)
    assert (whole.lddt, whole.complex is None) == (1, False)
    assert score(dimer, structure(dimer.chains["A"])).complex is None


def test_residues_are_counted_and_identified() -> None:
    truth = unseen(protein(), slice(0, 2))
    # The reference lacks two residues and a Ca. The prediction lacks these and two more, and has a mutation.
    truth.mask[10, CA] = 0
    model = dataclasses.replace(unseen(protein(), slice(0, 4)), sequence=changed_letter(truth.sequence, 20))
    model.mask[10, CA] = 0
    found = score(structure(model), structure(truth))
    assert (found.residues, found.paired, found.identity) == (37, 35, pytest.approx(34 / 35))
    paired = pair(structure(model), structure(truth))
    atoms = paired.atoms["A"]
    reference = [k for k in range(2, 40) if k != 10]
    assert atoms.reference_residue.tolist() == reference
    assert atoms.predicted_residue.tolist() == [-1, -1, *reference[2:]]
    assert atoms.equal == 34
    single = score(structure(part(protein(), slice(0, 1))), structure(part(protein(), slice(0, 1))))
    assert (single.residues, single.paired, single.identity) == (1, 1, 1.0)
    # Chains that share no residue with Ca have no RMSD.
    halves = [unseen(protein(), slice(*span)) for span in ((0, 20), (20, 40))]
    nothing = score(structure(halves[0]), structure(halves[1]), {"A": "A"})
    assert (nothing.paired, nothing.identity, nothing.tm, nothing.to_dict()["rmsd"]) == (0, 0.0, 0.0, None)


def changed_letter(sequence: str, place: int) -> str:
    return sequence[:place] + ("A" if sequence[place] != "A" else "S") + sequence[place + 1 :]


def test_lddt_of_each_residue_counts_what_the_prediction_lacks() -> None:
    truth = protein("A", 12)
    model = unseen(moved(truth), slice(3, 5))
    found = pair(structure(model), structure(truth)).lddt_ca_per_residue()
    ca = truth.positions[:, CA].astype(float)
    for i in range(12):
        others = [j for j in range(12) if j != i and np.linalg.norm(ca[i] - ca[j]) < 15]
        kept = [j for j in others if not {i, j} & {3, 4}]
        assert found[i] == pytest.approx(len(kept) / len(others))


INTERFACE = InterfaceScore(
    chains=("A", "B"), predicted=("X", "Y"), contacts=12, dockq=0.51236, fnat=0.5, fnonnat=0.25, irmsd=1.23456,
    lrmsd=2.0, receptor="A", ilddt=0.75,
)  # fmt: skip
LOST = dataclasses.replace(
    INTERFACE, chains=("A", "C"), predicted=None, dockq=0.0, fnat=0.0, fnonnat=None, irmsd=None, lrmsd=None, ilddt=None
)
COMPLEX = ComplexScore(
    dockq=0.25618, dockq_present=0.51236, ilddt=0.7, qs_global=0.4, qs_best=0.5, ics=0.6, ips=None,
    interfaces=(INTERFACE, LOST),
)  # fmt: skip
SCORE = Score(
    lddt_ca=0.91239, lddt=0.81239, tm=0.71239, gdt_ts=0.61239, gdt_ha=0.51239, rmsd=1.23449, residues=200, paired=150,
    identity=0.996, chains={"X": "A", "Y": "B"}, left_out=["C"], extra=["P", "Q"], dropped=["x N: DNA"],
    notes=["x: Read twice.", "y: Read slowly."], complex=COMPLEX,
)  # fmt: skip
SINGLE: list[tuple[str, str]] = [
    ("lDDT-Ca", "0.9124"),
    ("lDDT, all atoms", "0.8124"),
    ("TM-score", "0.7124"),
    ("GDT-TS", "0.6124"),
    ("GDT-HA", "0.5124"),
    ("RMSD of Ca", "1.234 Å"),
    ("residues paired", "150 of 200, 100% identical"),
    ("chains", "X → A, Y → B"),
]


def test_scores_are_printed_in_rows() -> None:
    assert SCORE.rows() == [
        *SINGLE,
        ("left out", "C"),
        ("not in reference", "P, Q"),
        ("dropped", "x N: DNA"),
        ("note", "x: Read twice."),
        ("note", "y: Read slowly."),
        ("interfaces", "2 in the reference; the prediction lacks chains of A-C"),
        ("DockQ", "0.256; 0.512 over the 1 whose chains are predicted"),
        ("interface lDDT", "0.700"),
        ("QS-score", "0.400 of all contacts, 0.500 of common residues"),
        ("contacts", "ICS 0.600, IPS -"),
    ]
    none: dict[str, Any] = {"left_out": [], "extra": [], "dropped": [], "notes": [], "complex": None}
    alone = dataclasses.replace(SCORE, **none)
    assert alone.rows() == SINGLE
    assert dataclasses.replace(alone, lddt=None, chains={"X": "A"}).rows() == [
        ("lDDT-Ca", "0.9124"), ("lDDT, all atoms", "- (Ca only)"), *SINGLE[2:7], ("chains", "X → A"),
    ]  # fmt: skip
    for one in ({"chains": {"X": "A"}, "left_out": ["B"]}, {}):
        assert dataclasses.replace(alone, lddt=None, **one).rows()[-1] == ("interfaces", "- (Ca only)")
    assert repr(SCORE) == "<Score: lDDT-Ca 0.9124, TM 0.7124, RMSD 1.234 over 150 of 200 residues>"


def test_scores_of_a_complex_are_printed_in_rows_and_a_table() -> None:
    assert COMPLEX.table() == [
        ("A-B", "X-Y", "12", "0.512", "0.500", "1.235", "2.000", "0.750"),
        ("A-C", "missing", "12", "0.000", "0.000", "-", "-", "-"),
    ]
    for interfaces, expected in (
        ((), [("interfaces", "none: no two chains of the reference touch")]),
        ((INTERFACE,), [("interfaces", "1 in the reference"), ("DockQ", "0.256")]),
        (
            (LOST, dataclasses.replace(LOST, chains=("B", "C"))),
            [("interfaces", "2 in the reference; the prediction lacks chains of A-C, B-C"), ("DockQ", "0.256")],
        ),
        (
            (INTERFACE, INTERFACE, LOST, LOST),
            [
                ("interfaces", "4 in the reference; the prediction lacks chains of A-C, A-C"),
                ("DockQ", "0.256; 0.512 over the 2 whose chains are predicted"),
            ],
        ),
    ):
        assert dataclasses.replace(COMPLEX, interfaces=interfaces).rows()[:2] == expected
    assert COMPLEX.missing == [LOST]


def test_scores_convert_to_json_with_null_for_nan() -> None:
    found = dataclasses.replace(SCORE, rmsd=float("nan"), lddt=None).to_dict()
    expected = {one.name: getattr(SCORE, one.name) for one in dataclasses.fields(Score)}
    assert found == expected | {"rmsd": None, "lddt": None, "complex": COMPLEX.to_dict()}
    assert COMPLEX.to_dict()["interfaces"][1] == dataclasses.asdict(LOST)


def test_what_is_in_one_structure_only_is_listed() -> None:
    one, other = protein("A", 30), moved(protein("B", 30, seed=1), (2, 2, 2), "B")
    truth = dataclasses.replace(structure(one, other), dropped={"N": "DNA", "M": "RNA"}, notes=("Read twice.",))
    model = dataclasses.replace(structure(moved(one, name="P"), protein("Q", 30, seed=2)), id="model")
    found = score(dataclasses.replace(model, dropped={"Z": "D-peptide"}, notes=("Read slowly.",)), truth)
    assert (found.chains, found.left_out, found.extra) == ({"P": "A"}, ["B"], ["Q"])
    assert found.dropped == ["model Z: D-peptide", "test N: DNA", "test M: RNA"]
    assert found.notes == ["model: Read slowly.", "test: Read twice."]


def test_groups_of_chains_are_named_by_letters_or_with_plus() -> None:
    chains = {name: protein(name, 3) for name in ("A", "H", "L", "M", "AB")}
    for text, expected in (
        (("A", "HL"), (("A",), ("H", "L"))),
        (("H+L", "A"), (("H", "L"), ("A",))),
        (("AB+A", "HLM"), (("AB", "A"), ("H", "L", "M"))),
        (("A", "HQ"), None),
        (("Q", "HL"), None),
        (("A", "H"), None),
        (("AB", "A"), None),
    ):
        assert chain_groups(dict([text]), chains, chains) == expected
    assert chain_groups({"A": "HL", "H": "L"}, chains, chains) is None
    # Chains that the prediction lacks are groups of one.
    assert chain_groups({"A": "H"}, {"X": chains["A"]}, chains) == (("A",), ("H",))
    for text, name in ((("H", "HL"), "H"), (("HH", "A"), "H"), (("A+L", "L+H"), "L")):
        with pytest.raises(UserError) as error:
            chain_groups(dict([text]), chains, chains)
        assert str(error.value) == f"chains {text[0]}:{text[1]}: chain {name} is named twice. Name each chain once"


def test_joined_chains_follow_each_other() -> None:
    one, other = protein("A", 5), protein("B", 3, seed=1, first=7)
    joined = join_chains("A+B", [one, other])
    assert (joined.id, joined.sequence, joined.entity) == ("A+B", one.sequence + other.sequence, "")
    assert joined.author_numbers == ("1", "2", "3", "4", "5", "7", "8", "9")
    assert (joined.residue_index.tolist(), joined.residue_index.dtype) == ([*range(8)], np.int64)
    np.testing.assert_array_equal(joined.positions, [*one.positions, *other.positions])
    np.testing.assert_array_equal(joined.mask, [*one.mask, *other.mask])


@pytest.mark.parametrize("lost", ["", "A", "B", "C", "D"])
def test_groups_are_scored_as_joined_chains_are(lost: str) -> None:
    """The prediction lacks a chain and the start of the others, and has other names in another order."""
    chains = {
        name: moved(protein(name, 12 + 2 * k, seed=k, first=100 * k), (3 * k, 2 * k % 3, k), name)
        for k, name in enumerate("ABCD")
    }
    names = {"A": "Z", "B": "W", "C": "Y", "D": "X"}
    model = {names[name]: dataclasses.replace(part(x, slice(2, None)), id=names[name]) for name, x in chains.items()}
    model.pop(names.get(lost, ""), None)
    noise = np.random.default_rng(0)
    for x in model.values():
        x.positions[x.mask > 0] += noise.normal(0, 0.6, (int(x.mask.sum()), 3))
    found = pair(structure(*dict(sorted(model.items())).values()), structure(*chains.values()), {"B+A": "CD"})
    groups = [["B", "A"], ["C", "D"]]
    kept = [[name for name in group if name != lost] for group in groups]
    assert found.chains == {
        "+".join(names[x] for x in some): "+".join(group) for some, group in zip(kept, groups, strict=True)
    }
    joined = [join_chains("+".join(group), [chains[name] for name in group]) for group in groups]
    ours = [join_chains("+".join(names[x] for x in some), [model[names[x]] for x in some]) for some in kept]
    assert [*found.reference.chains] == [chain.id for chain in joined]
    assert [*found.predicted.chains] == [chain.id for chain in ours]
    for p, r, group, some in zip(ours, joined, groups, kept, strict=True):
        lengths = [len(chains[name].sequence) for name in group]
        starts = dict(zip(group, (0, lengths[0])))
        expected = [
            number for name in some for number in range(starts[name] + 2, starts[name] + len(chains[name].sequence))
        ]
        assert found.similar[p.id, r.id].tolist() == [[i, j] for i, j in enumerate(expected)]
    direct = score(structure(*ours), structure(*joined), {p.id: r.id for p, r in zip(ours, joined)})
    whole = found.score()
    assert whole.complex is not None
    assert direct.complex is not None
    (one,), (other,) = whole.complex.interfaces, direct.complex.interfaces
    assert dataclasses.asdict(one) == dataclasses.asdict(other)
    assert (whole.tm, whole.lddt, whole.paired) == pytest.approx((direct.tm, direct.lddt, direct.paired))


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
