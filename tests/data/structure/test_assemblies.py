"""Read biological assemblies: their chains, and the motions of the chains."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

import gemmi
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.entries import ONE, OPERATORS, SHIFT, TURN, assembly_text, loop, random_chain
from warpfold.data.structure import assemblies
from warpfold.data.structure.assemblies import (
    IDENTITY,
    AssemblyTable,
    PlacedChain,
    PlacedChains,
    apply_operator,
    is_rigid,
)
from warpfold.data.structure.chain import Structure
from warpfold.data.structure.mmcif import parse_structure
from warpfold.data.structure.write import write_mmcif, write_pdb
from warpfold.errors import UserError


def entry(generators: Sequence[tuple[str, str, str]], more: str = "", **options: Mapping) -> Structure:
    chains = [random_chain("L", "AGWHK"), random_chain("H", "GGSTA", seed=1)]  # label_asym_id A and B
    return parse_structure(write_mmcif("1abc", chains) + assembly_text(generators, **options) + more, "1abc.cif")


def placed(structure: Structure, name: str | None = None) -> list[tuple[str, list[float]]]:
    return [(chain, operator.ravel().tolist()) for chain, operator in structure.assembly(name).chains]


@pytest.mark.parametrize(
    ("expression", "operators"),
    [("1", [ONE]), ("3,1", [SHIFT, ONE]), ("(1-3)", [ONE, TURN, SHIFT]), ("(1,3)", [ONE, SHIFT]), ("X0", [TURN])],
)
def test_chains_are_put_where_the_operators_move_them(expression: str, operators: list[tuple[float, ...]]) -> None:
    chains = placed(entry([("1", expression, "A,B")]))
    assert chains == [(chain, list(operator)) for operator in operators for chain in "LH"]


def test_of_a_product_the_right_operator_comes_first() -> None:
    ((_, operator),) = entry([("1", "(X0)(3)", "A")]).assembly().chains
    x = np.array([1.0, 2.0, 3.0])
    moved = operator[:, :3] @ x + operator[:, 3]
    np.testing.assert_allclose(moved, [5 - 2, 1, 3 + 7])  # shifted along z, then turned
    both = entry([("1", "(1,X0)(1-3)", "A")]).assembly().chains
    assert len(both) == 5  # (1)(2) and (X0)(1) are the same motion


def test_the_first_assembly_is_the_default_and_others_have_names() -> None:
    structure = entry([("1", "1", "B"), ("PAU", "1", "A,B"), ("1", "2", "A")])
    assert structure.assemblies.ids == ["1", "PAU"]
    assert placed(structure) == placed(structure, "1") == [("H", list(ONE)), ("L", list(TURN))]
    assert [chain for chain, _ in placed(structure, "PAU")] == ["L", "H"]
    with pytest.raises(KeyError):
        structure.assembly("2")


def test_copies_get_names_of_their_own() -> None:
    chains = PlacedChains(tuple(PlacedChain(name, IDENTITY) for name in ("A", "B", "A", "A-2", "A")), {})
    assert chains.ids == ("A", "B", "A-2", "A-2-2", "A-3")


def test_an_assembly_is_not_longer_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemblies, "MAX_CHAINS", 4)
    assert len(entry([("1", "1,2", "A,B")]).assembly().chains) == 4
    with pytest.raises(UserError, match=r"1abc\.cif: assembly 1 has more than 4 chains. Correct the file"):
        entry([("1", "1,2", "A,B"), ("1", "3", "A")]).assembly()


def test_other_molecules_are_left_out_and_named() -> None:
    structure = entry([("1", "1", "A,B,C,D,E,Z")])
    text = write_mmcif("1abc", [random_chain("L", "AGWHK"), random_chain("H", "GGSTA", seed=1)])
    text = text.replace("2 polypeptide(L)", "2 polyribonucleotide")
    text = text.replace("B 2\n#\n", "B 2\nC 3\nD 4\nE 5\n#\n", 1)
    text += loop("pdbx_entity_nonpoly", ["entity_id", "comp_id"], [["3", "HEM"], ["4", "HOH"]])
    structure = parse_structure(text + assembly_text([("1", "1", "A,B,C,D,E,Z")]))
    assembly = structure.assembly()
    assert [chain for chain, _ in assembly.chains] == ["L"]
    left_out = {"H": "polyribonucleotide", "HEM": "not a polymer", "a branched molecule": "not a polymer"}
    assert assembly.left_out == left_out | {"Z": "is not in the file"}


@pytest.mark.parametrize(
    ("expression", "operators", "message"),
    [
        ("1,9", OPERATORS, "needs operator 9, which is missing"),
        ("(1-3", OPERATORS, "names no operators"),
        ("1,,2", OPERATORS, "names no operators"),
        ("", OPERATORS, "names no operators"),
        ("(1-99999)", OPERATORS, "more than 10000"),
        ("(1-3)" * 9, OPERATORS, "more than 10000"),
        (",".join(["(1-3)"] * 100_000), OPERATORS, "more than 10000"),
        (",".join(["1-9999"] * 100_000).join("()"), OPERATORS, "more than 10000"),  # at once, and in a short line
        ("9" * 100_000, OPERATORS, r"needs operator 9{40}, which is missing"),
        ("1", {"1": (2, *ONE[1:])}, "operator 1 of an assembly is no rigid motion"),
        ("1", {"1": (-1, *ONE[1:])}, "no rigid motion"),  # a reflection
        ("1", {"1": ("x", *ONE[1:])}, "no rigid motion"),
        ("1", {"1": ("nan", *ONE[1:])}, "no rigid motion"),
        ("1", {"1": (*ONE[:3], "1e300", *ONE[4:])}, "no rigid motion"),
    ],
)
def test_operators_that_make_no_sense_are_refused(expression: str, operators: Mapping, message: str) -> None:
    structure = entry([("1", expression, "A")], operators=operators)
    assert list(structure.chains) == ["L", "H"]  # without assemblies, the file is read
    with pytest.raises(UserError, match=rf"1abc\.cif: .*{message}") as error:
        structure.assembly()
    assert len(str(error.value)) < 200


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("0123,-()XA "), max_size=20))
def test_any_expression_is_read_or_refused(expression: str) -> None:
    table = AssemblyTable("x", (("1", expression, "A"),), {"1": ONE, "2": TURN, "A": SHIFT}, {"A": "A"}, {"A": "1"})
    with suppress(UserError):
        assert table.place("1", {"A": None}, {}).chains


def test_a_pdb_file_has_those_of_its_remarks() -> None:
    text = write_pdb("1abc", [random_chain("A", "AGWHK"), random_chain("B", "GGSTA", seed=1)])
    assert [chain for chain, _ in placed(parse_structure(text))] == ["A", "B"]
    remarks = ["BIOMOLECULE: 1", "APPLY THE FOLLOWING TO CHAINS: B"]
    for number, operator in ((1, ONE), (2, TURN)):
        for row in range(3):
            a, b, c, shift = operator[4 * row : 4 * row + 4]
            remarks.append(f"  BIOMT{row + 1} {number:3d}{a:10.6f}{b:10.6f}{c:10.6f}{shift:15.5f}")
    text = "".join(f"REMARK 350 {line}\n" for line in remarks) + text
    assert len(gemmi.read_pdb_string(text).assemblies) == 1
    assert placed(parse_structure(text)) == [("B", list(ONE)), ("B", list(TURN))]


def test_an_operator_turns_before_it_moves() -> None:
    """It is a quarter turn about z. Its transpose would turn the other way."""
    operator = np.array([[0.0, -1, 0, 1], [1, 0, 0, 2], [0, 0, 1, 3]])
    assert apply_operator(operator, np.array([[1.0, 0, 0]], np.float32)).tolist() == [[1, 3, 3]]


SMALL = AssemblyTable("x", (), {"1": ONE, "2": TURN, "3": SHIFT, "4-5": SHIFT, "-0": (1, -0.0, *ONE[2:])})


def operators_of(expression: str) -> list[list[float]]:
    """Return the operators of an expression."""
    table = AssemblyTable("x", (("1", expression, "A"),), SMALL.operators, {"A": "A"}, {"A": "1"})
    return [operator.ravel().tolist() for _, operator in table.place("1", {"A": None}, {}).chains]


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("(1-3)(1)", ["1", "2", "3"]),
        ("(1)(2,3)", ["2", "3"]),
        (" 2 , 1 ", ["2", "1"]),
        ("(2-2)", ["2"]),
        ("(3,1-2)", ["3", "1", "2"]),
        ("4-5", ["4-5"]),
        ("1,-0", ["1"]),
        ("-0,1", ["-0"]),
    ],
)
def test_an_expression_lists_operators(expression: str, names: list[str]) -> None:
    assert operators_of(expression) == [list(map(float, SMALL.operators[name])) for name in names]


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1" * 39 + ",,2", f"'{'1' * 39},' names no operators of an assembly. Correct the file."),
        ("(3-2)", "'(3-2)' names no operators of assemblies. Correct the file."),
        (f"({'9-8,' * 20}1)", None),
        (f"(9-8)({'1' * 50})", f"'(9-8)({'1' * 34}' names no operators of assemblies. Correct the file."),
        ("x" * 50, f"an assembly needs operator {'x' * 40}, which is missing. Fetch the file again."),
        ("1,(1-3)(1-2)", "1,(1-3)(1-2) are more than 6 operators. Correct the file."),
        ("1,2,3,1,2,3,1", "1,2,3,1,2,3,1 are more than 6 operators. Correct the file."),
        ("(1-3)(1-3)", "(1-3)(1-3) are more than 6 operators. Correct the file."),
        ("(1-7)" + "(1)" * 20, f"(1-7){'(1)' * 11}(1 are more than 6 operators. Correct the file."),
        ("(1-3)(1-2)", None),
        ("1,2,3,1,2,3", None),
        ("1,2,3,(1-3)", None),
    ],
)
def test_an_expression_has_few_operators(expression: str, message: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (assemblies.MAX_OPERATORS, assemblies.MAX_CHAINS) == (10_000, 100_000)
    monkeypatch.setattr(assemblies, "MAX_OPERATORS", 6)
    if message is None:
        assert operators_of(expression)
    else:
        with pytest.raises(UserError) as caught:
            operators_of(expression)
        assert str(caught.value) == f"x: {message}"


def test_labels_may_have_blanks_and_the_reason_of_a_dropped_chain_is_given() -> None:
    names = {"A": "A", "B": "B", "C": "C"}
    table = AssemblyTable("x", (("1", "1", " A,, B ,C,"), ("2", "9", "B")), SMALL.operators, names)
    placed = table.place("1", {"A": None}, {"B": "no polypeptide"})
    assert [chain for chain, _ in placed.chains] == ["A"]
    assert placed.left_out == {"B": "no polypeptide", "C": "was dropped"}
    # The missing operator 9 would place no protein.
    assert table.place("2", {"A": None}, {}) == PlacedChains((), {"B": "was dropped"})
    assert table.ids == ["1", "2"]
    with pytest.raises(KeyError, match="3"):
        table.place("3", {}, {})
    assert SMALL.ids == ["1"]
    whole = SMALL.place("1", {"A": None, "B": None}, {"C": "no polypeptide"})
    assert whole.ids == ("A", "B")
    assert whole.left_out == {"C": "no polypeptide"}
    assert [operator.tolist() for _, operator in whole.chains] == [[[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]] * 2


@pytest.mark.parametrize(
    ("changes", "rigid"),
    [
        ({}, True),
        ({(0, 0): 1.0099**0.5}, True),
        ({(0, 0): 1.0101**0.5}, False),
        ({(1, 1): 0.9901**0.5}, True),
        ({(1, 1): 0.9899**0.5}, False),
        ({(0, 1): 0.0099}, True),
        ({(0, 1): 0.0101}, False),
        ({(2, 3): 999_999.0}, True),
        ({(2, 3): -999_999.0}, True),
        ({(2, 3): 1_000_000.0}, False),
        ({(2, 3): -1_000_001.0}, False),
        ({(1, 1): -1.0}, False),
        ({(1, 1): -1.0, (0, 0): -1.0}, True),
        ({(1, 2): np.nan}, False),
        ({(0, 3): np.inf}, False),
    ],
)
def test_rigid_motions(changes: dict[tuple[int, int], float], rigid: bool) -> None:
    operator = np.eye(3, 4)
    for index, value in changes.items():
        operator[index] = value
    assert is_rigid(operator) == rigid
    # All of several operators must be.
    assert is_rigid(np.stack([np.eye(3, 4), operator])) == is_rigid(np.stack([operator, np.eye(3, 4)])) == rigid


def test_residues_in_no_chain_are_counted() -> None:
    structure = Structure("x", None, None, None, {}, unplaced=tuple(f"ALA {i}" for i in range(1, 7)))
    note = "residues with N, CA and C that are in no chain: 6 (ALA 1, ALA 2, ALA 3, ALA 4, and 2 more)"
    assert structure.unplaced_note == note
    for arguments, remedy in (((), "correct the file"), (("remove it",), "remove it")):
        with pytest.raises(UserError) as caught:
            structure.check_placed("x.cif", *arguments)
        assert str(caught.value) == f"x.cif: has {note}; {remedy}"
    empty = Structure("x", None, None, None, {})
    empty.check_placed("x.cif")
    assert empty.unplaced_note == ""
    assert empty.assembly() == PlacedChains((), {})
