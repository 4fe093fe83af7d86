"""Separate residues into chains, case by case: bonds, gaps, repeated numbers, ligands, copies in models."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from warpfold.data.structure import separate
from warpfold.data.structure.separate import (
    FORCE_FIELD_NAMES,
    Residue,
    collect_alphas,
    count_models,
    is_placeholder,
    models_are_copies,
    separate_chains,
)
from warpfold.geometry.residue import RESTYPE_3

BACKBONE = {"N": -1.2, "CA": 0.0, "C": 1.2}


def residue(
    number: int,
    x: float | None = None,
    *,
    chain: str = "A",
    segment: str = "",
    model: int = 0,
    code: str = "",
    name: str = "ALA",
    atoms: str = "N CA C",
    altloc: str = " ",
    breaks: bool = False,
    hetero: bool = False,
) -> Residue:
    """Make a residue with its CA at x, by default 3.8 angstrom per number, so that consecutive numbers are bonded."""
    made = Residue(model, chain, segment, (number, code), name, breaks, hetero=True)
    for row, atom in enumerate(atoms.split()):
        if made.add_atom(row, atom, altloc, hetero):
            made.atoms[atom] = np.array([(3.8 * number if x is None else x) + BACKBONE.get(atom, 0.0), 0.0, 0.0])
    return made


def chains_of(residues: Sequence[Residue], segments_are_chains: bool = False) -> list[tuple[str, str, str]]:
    """Return name, name in the file, and residue numbers of each chain."""
    chains = separate_chains(residues, segments_are_chains)
    return [(c.name, c.source, " ".join(f"{r.key[0]}{r.key[1]}" for r in c.residues)) for c in chains]


def run(first: int, last: int, shift: float = 0.0, **options: object) -> list[Residue]:
    """Make bonded residues. `breaks` holds for the first one only."""
    made = [residue(i, 3.8 * i + shift, **options) for i in range(first, last + 1)]  # type: ignore[arg-type]
    for later in made[1:]:
        later.breaks = False
    return made


FAR = 1000.0


def water(number: int, chain: str = "A", breaks: bool = False) -> Residue:
    return residue(number, chain=chain, breaks=breaks, name="HOH", atoms="O", hetero=True)


def ion(number: int) -> Residue:
    return residue(number, FAR, name="CA", atoms="CA", hetero=True)


@pytest.mark.parametrize(
    ("residues", "chains"),
    [
        ([], []),
        (run(1, 3), [("A", "A", "1 2 3")]),
        # The name changes.
        (run(1, 2) + run(3, 4, chain="B") + run(3, 4), [("A", "A", "1 2 3 4"), ("B", "B", "3 4")]),
        # A number repeats, in the same fragment and in a later one.
        (run(1, 2) + run(1, 2, FAR), [("A", "A", "1 2"), ("A-2", "A", "1 2")]),
        (
            run(1, 2) + run(1, 1, chain="B") + run(2, 3, FAR) + run(1, 2, -FAR),
            [("A", "A", "1 2"), ("B", "B", "1"), ("A-2", "A", "2 3 1"), ("A-3", "A", "2")],
        ),
        # The same number with an insertion code is another residue.
        ([*run(1, 2), residue(2, code="A"), *run(3, 3)], [("A", "A", "1 2 2A 3")]),
        # Neither TER nor a segment intervenes: unused numbers are enough.
        (run(1, 2) + run(3, 3, FAR), [("A", "A", "1 2 3")]),
        (run(1, 2) + run(9, 9, chain="B") + run(3, 3, FAR), [("A", "A", "1 2 3"), ("B", "B", "9")]),
        # TER: the ends are bonded, or the missing residues can span the gap.
        (run(1, 2) + run(3, 4, breaks=True), [("A", "A", "1 2 3 4")]),
        (run(1, 2) + run(3, 4, FAR, breaks=True), [("A", "A", "1 2"), ("A-2", "A", "3 4")]),
        ([residue(2, 8.0), residue(5, 8.0 + 12.0, breaks=True)], [("A", "A", "2 5")]),
        ([residue(2, 8.0), residue(5, 8.0 + 12.1, breaks=True)], [("A", "A", "2"), ("A-2", "A", "5")]),
        (run(1, 2) + [residue(4, 7.6 + 7.9, breaks=True)], [("A", "A", "1 2 4")]),
        (run(1, 2) + [residue(4, 7.6 + 8.1, breaks=True)], [("A", "A", "1 2"), ("A-2", "A", "4")]),
        (run(1, 2) + [residue(3, 7.6 + 3.9, atoms="CA", breaks=True)], [("A", "A", "1 2"), ("A-2", "A", "3")]),
        (run(5, 6) + run(1, 2, breaks=True), [("A", "A", "5 6"), ("A-2", "A", "1 2")]),
        # Without an observed anchor, the distance is unknown.
        (
            [*run(1, 2), residue(3, FAR, atoms="P C1'", breaks=True), residue(9, -FAR, breaks=True)],
            [("A", "A", "1 2"), ("A-2", "A", "3"), ("A-3", "A", "9")],
        ),
        # A fragment that is bonded to an earlier chain of its name joins that one, the latest first.
        (
            run(1, 2) + run(1, 2, FAR, breaks=True) + run(3, 3, breaks=True) + run(3, 3, FAR, breaks=True),
            [("A", "A", "1 2 3"), ("A-2", "A", "1 2 3")],
        ),
        # Numbers that decrease are sorted, with ligands at the end.
        (
            [*run(5, 6), water(3), *run(9, 9, chain="B"), *run(1, 2), water(7)],
            [("A", "A", "1 2 5 6 3 7"), ("B", "B", "9")],
        ),
        # Ligands join the chain of their name, or form one.
        (
            [*run(1, 2), water(1, breaks=True), water(1, chain="W"), water(2, chain="W")],
            [("A", "A", "1 2 1"), ("W", "W", "1 2")],
        ),
        # Calcium is no residue. Its chain becomes that of a polymer with this name.
        ([ion(1), *run(1, 2, breaks=True)], [("A", "A", "1 1 2")]),
        ([*run(1, 2), ion(1)], [("A", "A", "1 2 1")]),
        # A free amino acid is a ligand, a bonded pair is a peptide.
        ([*run(1, 2), residue(1, FAR, breaks=True, hetero=True)], [("A", "A", "1 2 1")]),
        (run(1, 2) + run(1, 2, FAR, breaks=True, hetero=True), [("A", "A", "1 2"), ("A-2", "A", "1 2")]),
        ([residue(1, FAR, hetero=True)], [("A", "A", "1")]),
        (
            [*run(1, 2), residue(1, FAR, breaks=True), residue(2, -FAR, hetero=True)],
            [("A", "A", "1 2"), ("A-2", "A", "1 2")],
        ),
        # Blank names: the letters that are free, and a bond to continue.
        (
            run(1, 2, chain="") + run(1, 2, chain="A") + run(1, 2, FAR, chain=""),
            [("B", "", "1 2"), ("A", "A", "1 2"), ("C", "", "1 2")],
        ),
        (run(1, 2, chain="") + run(3, 4, chain="", breaks=True), [("A", "", "1 2 3 4")]),
        (run(1, 2, chain="") + run(5, 6, 1.0, chain="", breaks=True), [("A", "", "1 2"), ("B", "", "5 6")]),
        (run(1, 2, chain="", segment="X") + run(3, 4, chain="", segment="Y"), [("A", "", "1 2"), ("B", "", "3 4")]),
        # Segments: those of a named chain may be bonded, or span a gap.
        (run(1, 2, segment="X") + run(3, 4, segment="Y"), [("A", "A", "1 2 3 4")]),
        (run(1, 2, segment="X") + run(3, 4, FAR, segment="Y"), [("A", "A", "1 2"), ("A-2", "A", "3 4")]),
        # Models.
        (run(1, 2) + run(3, 4, model=1), [("A", "A", "1 2"), ("A-2", "A", "3 4")]),
        # A name that the file has already is not given to a copy.
        (
            run(1, 1) + run(1, 1, FAR) + run(1, 1, chain="A-2") + run(1, 1, -FAR),
            [("A", "A", "1"), ("A-3", "A", "1"), ("A-2", "A-2", "1"), ("A-4", "A", "1")],
        ),
        # Alternatives at a position.
        (
            [
                *run(1, 1),
                residue(2, name="SER", altloc="A"),
                residue(2, name="THR", altloc="B"),
                residue(2, name="CYS", altloc="C"),
                *run(3, 3),
            ],
            [("A", "A", "1 2 2 2 3")],
        ),
        (
            [residue(2, name="SER", altloc="A"), residue(2, name="THR"), *run(3, 3)],
            [("A", "A", "2"), ("A-2", "A", "2 3")],
        ),
        # Hydrogens at the end of the file belong to the residue. The same atoms are another residue.
        ([*run(1, 2), residue(1, atoms="CA H", altloc="B"), *run(9, 9)], [("A", "A", "1 2"), ("A-2", "A", "1 9")]),
        ([*run(1, 2), residue(1, atoms="H HA"), *run(3, 3)], [("A", "A", "1 2 1 3")]),
    ],
)  # fmt: skip
def test_chains(residues: list[Residue], chains: list[tuple[str, str, str]]) -> None:
    assert chains_of(residues) == chains


def test_segments_may_be_chains() -> None:
    """In mmCIF, label_asym_id separates chains although the author's name is the same."""
    residues = run(1, 2, segment="X") + run(3, 4, segment="Y") + run(5, 6, segment="X")
    assert chains_of(residues) == [("A", "A", "1 2 3 4 5 6")]
    assert chains_of(residues, segments_are_chains=True) == [("A", "A", "1 2 5 6"), ("A-2", "A", "3 4")]
    single = run(1, 1, segment="X") + run(3, 3, segment="Y") + run(5, 5, segment="X")
    assert chains_of(single, segments_are_chains=True) == [("A", "A", "1 5"), ("A-2", "A", "3")]


@pytest.mark.parametrize("unseen", [0, 1])
def test_an_end_that_is_not_observed_may_be_anywhere(unseen: int) -> None:
    ends = [residue(1), residue(9, FAR, breaks=True)]
    assert len(chains_of(ends)) == 2
    ends[unseen].atoms.clear()
    assert chains_of(ends) == [("A", "A", "1 9")]


def test_letters_for_blank_names_are_letters_and_digits() -> None:
    blanks = [made for i in range(55) for made in run(1, 1, FAR * i, chain="", breaks=True)]
    names = [name for name, _, _ in chains_of(blanks + run(1, 1, chain="C"))]
    assert "".join(names) == "ABDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyzª²³µC"


@pytest.mark.parametrize(
    ("made", "polymer"),
    [
        (residue(1), True),
        (residue(1, atoms="CA"), True),
        (residue(1, atoms="N C O"), False),
        (residue(1, atoms="C1' P"), True),
        (residue(1, atoms="CA", hetero=True), False),
        (residue(1, atoms="CA N", hetero=True), False),
        (residue(1, atoms="CA C", hetero=True), True),
        (residue(1, atoms="C1' O3'", hetero=True), True),
        (residue(1, name="CA", atoms="CA"), False),
        (residue(1, name="CA", atoms="CA C", hetero=True), False),
    ],
)
def test_residues_of_polymers(made: Residue, polymer: bool) -> None:
    assert made.is_polymer == polymer


def test_atoms_of_a_residue() -> None:
    """All atoms must be HETATM for a hetero residue. Positions are stored once, for linking atoms."""
    made = Residue(0, "A", "", (1, ""), "ALA", breaks=False, hetero=True)
    names = ["CA", "CB", "N", "C", "O3'", "P", "C1'"]
    stored = [made.add_atom(row, atom, "A", True) for row, atom in enumerate(names)]
    assert stored == [name != "CB" for name in names]
    assert made.hetero
    made.atoms["CA"] = np.zeros(3)
    assert not made.add_atom(7, "CA", "B", False)
    assert not made.hetero
    assert not made.add_atom(8, "OXT", "A", True)
    assert not made.hetero
    assert made.altlocs["CA"] == "AB"
    assert made.rows == list(range(9))
    assert (made.ended, made.breaks) == (False, False)


@pytest.mark.parametrize(
    ("first", "second", "different"),
    [
        ({"CA": " "}, {"H": " "}, False),
        ({"CA": " "}, {"CA": " "}, True),
        ({"CA": "A"}, {"CA": "B"}, False),
        ({"CA": "A"}, {"CA": "A"}, True),
        ({"CA": "AB"}, {"CA": "BC"}, True),
        ({"CA": "A"}, {"CA": " "}, True),
        ({"CA": " "}, {"CA": "B"}, True),
        ({"CA": "A", "CB": "A"}, {"CA": "B", "CB": "A"}, True),
    ],
)
def test_records_of_one_number_may_be_one_residue(
    first: Mapping[str, str], second: Mapping[str, str], different: bool
) -> None:
    a, b = (Residue(0, "A", "", (1, ""), "ALA", False, False, altlocs=dict(each)) for each in (first, second))
    assert separate._are_different(a, b) == different
    b.name = "GLY"
    assert separate._are_different(a, b)


@pytest.mark.parametrize(
    ("distance", "bonded"), [(0.0, False), (0.01, True), (1.99, True), (2.0, False), (2.01, False)]
)
def test_bonds(distance: float, bonded: bool) -> None:
    for link in (("C", "N"), ("O3'", "P")):
        before, after = residue(1, atoms=link[0]), residue(2, atoms=link[1])
        before.atoms[link[0]], after.atoms[link[1]] = np.zeros(3), np.array([0.0, distance, 0.0])
        assert separate._is_bonded(before, after) == bonded
        assert not separate._is_bonded(after, before)


@pytest.mark.parametrize(
    ("xyz", "placeholder"),
    [
        ((0, 0, 0), True),
        ((0, 0, 1), False),
        ((9999, 9999.999, 9999.5), True),
        ((-9999, -9999.5, 9999), True),
        ((9999, 9999, 0), False),
        ((9998.9, 9999, 9999), False),
        ((10000, 9999, 9999), False),
        ((9999, 0, 0), False),
    ],
)
def test_placeholder_positions(xyz: tuple[float, float, float], placeholder: bool) -> None:
    assert is_placeholder(np.array(xyz)) == placeholder
    assert is_placeholder(np.array([[1.0, 2, 3], xyz, [0, 0, 0]])).tolist() == [False, placeholder, True]


def test_names_of_force_fields() -> None:
    middle = {name for name in FORCE_FIELD_NAMES if len(name) == 3}
    assert len(middle) == 16
    ends = {end + name for end in "NC" for name in (*RESTYPE_3[:20], *middle)}
    assert len(FORCE_FIELD_NAMES) == 34 + len(ends)
    assert ends < FORCE_FIELD_NAMES.keys()
    examples = {"HIE": "HIS", "NHIE": "HIS", "CALA": "ALA", "NVAL": "VAL", "CYX": "CYS", "TYM": "TYR", "CYS2": "CYS"}
    assert {name: FORCE_FIELD_NAMES[name] for name in examples} == examples
    assert set(FORCE_FIELD_NAMES.values()) == set(RESTYPE_3[:20])


# ---- models


def alphas(points: np.ndarray, chain: str = "A") -> separate.Alphas:
    return {(chain, (i, "")): point for i, point in enumerate(points)}


def test_alphas_are_the_first_observed_ones_of_each_model() -> None:
    key, other = ("A", (1, "")), ("A", (2, ""))
    atoms = [("x", key, (0.0, 0, 0)), ("x", key, (1.0, 2, 3)), ("x", key, (4.0, 5, 6)), ("y", other, (7.0, 8, 9))]
    first, second, empty = collect_alphas(["x", "y", "z"], atoms)
    assert [*first] == [key]
    assert first[key].tolist() == [1, 2, 3]
    assert [*second] == [other]
    assert empty == {}


RNG = np.random.default_rng(0)
POINTS = RNG.uniform(-15, 15, (40, 3))
TURN = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])
MIRROR = np.diag([1.0, 1, -1])


def noise(rmsd: float) -> np.ndarray:
    """Return displacements that no rigid motion removes, of this root mean square."""
    signs = np.where(np.arange(40) % 2, 1.0, -1.0)[:, None] * np.array([0.0, 0, 1])
    return rmsd * signs


@pytest.mark.parametrize(
    ("others", "copies"),
    [
        ([POINTS + [50, 0, 0]], True),
        ([POINTS @ TURN.T + [50, 9, 0]], True),
        ([POINTS @ TURN.T + [50, 9, 0], POINTS - [50, 0, 0]], True),
        ([POINTS @ MIRROR + [50, 0, 0]], False),
        ([POINTS + noise(0.4995) + [50, 0, 0]], True),
        ([POINTS + noise(0.503) + [50, 0, 0]], False),
        ([POINTS + [50, 0, 0], POINTS + noise(3.0) - [50, 0, 0]], False),
        ([POINTS + [0.5, 0, 0]], False),
        # Other residues need not superpose.
        ([POINTS[:7] * 2 + [80, 0, 0]], True),
        ([], False),
    ],
)
def test_copies_are_rigid_and_apart(others: list[np.ndarray], copies: bool) -> None:
    models = [alphas(POINTS), *map(alphas, others)]
    assert models_are_copies(models) == copies
    count = len(models)
    if count > 1:
        note = (
            f"its {count} models are copies of an assembly, and all of them count"
            if copies
            else f"only the first of {count} models counts (conformations of one structure)"
        )
        assert count_models(models, is_nmr=False) == (copies, [note])
        nmr = f"only the first of {count} models counts (an NMR ensemble)"
        assert count_models(models, is_nmr=True) == (False, [nmr])


@pytest.mark.parametrize(("close", "copies"), [(0, True), (1, True), (2, True), (3, False)])
@pytest.mark.parametrize(("shift", "counts"), [(1.99, True), (2.01, False)])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("sign", [-1, 1])
def test_at_most_one_in_twenty_is_close(
    close: int, copies: bool, shift: float, counts: bool, axis: int, sign: int
) -> None:
    """Copies are apart, but for some of 40 points at this distance from a point of the first or the second copy.

    Another point is next to each of these, but not close.
    """
    grid = np.stack(np.meshgrid(*[np.arange(4)] * 3), -1).reshape(-1, 3)[:40] * 10.0 + 1.0
    move = sign * shift * np.eye(3)[axis]
    second, third = grid + [500.0, 0, 0], grid + [0, 500.0, 0]
    beside = 2.5 * np.eye(3)[axis - 1]
    models = [alphas(np.concatenate([each, each + beside]), name) for each, name in ((grid, "A"), (second, "B"))]
    for target in (grid, second):
        moved = third.copy()
        moved[:close] = target[:close] + move
        assert models_are_copies([*models, alphas(moved, "C")]) == (copies or not counts)


def test_models_without_alphas() -> None:
    """A file with one model that has CA is read as a whole: the others are ligands, or parts of the file."""
    assert count_models([alphas(POINTS)], is_nmr=False) == (False, [])
    assert count_models([], is_nmr=False) == (False, [])
    assert count_models([{}, alphas(POINTS)], is_nmr=True) == (True, [])
    assert count_models([{}, {}], is_nmr=False) == (True, [])
    apart = [{}, alphas(POINTS), alphas(POINTS + [50, 0, 0])]
    assert count_models(apart, is_nmr=False) == (
        True,
        ["its 3 models are copies of an assembly, and all of them count"],
    )
