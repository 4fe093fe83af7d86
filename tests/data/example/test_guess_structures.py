"""Convert initial guesses from files and arrays, match them to queries, and find them in folders."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.entries import SHIFT, TURN, assembly_text, random_chain
from tests.data.structure.test_awkward_files import pdb_chain, plain
from warpfold.arguments import WrongArgument
from warpfold.data.example.guess import (
    GuessFiles,
    GuessStructure,
    as_guess,
    guess_from_structure,
    guess_positions,
    own_template,
)
from warpfold.data.formats.alignment import encode
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.mmcif import parse_structure
from warpfold.data.structure.write import write_mmcif
from warpfold.errors import UserError
from warpfold.files import digest_of
from warpfold.geometry.residue import ATOM_ORDER

FIRST, SECOND = "MGTAYIAKQR", "GSHMLEE"
CA, CB = ATOM_ORDER["CA"], ATOM_ORDER["CB"]


def chains() -> tuple[Chain, Chain]:
    """Return two chains without residue 3 of the first."""
    return random_chain("L", FIRST, missing=[2]), random_chain("H", SECOND, seed=1)


def file_of(folder: Path, name: str = "x.cif", more: str = "", *used: Chain) -> Path:
    path = folder / name
    path.write_text(write_mmcif("1abc", used or chains()) + more)
    return path


def arrays() -> dict[str, tuple[Any, Any]]:
    return {chain.id: (chain.positions, chain.mask) for chain in chains()}


SEQUENCES = {"L": FIRST, "H": SECOND}


def assert_is(guess: GuessStructure, expected: dict[str, Chain]) -> None:
    assert dict(guess).keys() == expected.keys()
    assert (len(guess), list(guess), guess.names) == (len(expected), [*expected], (*expected,))
    for id, chain in expected.items():
        assert (guess[id].id, guess[id].sequence) == (id, chain.sequence)
        np.testing.assert_allclose(guess[id].positions, chain.positions, rtol=0, atol=1e-3)
        np.testing.assert_array_equal(guess[id].mask, chain.mask)
    assert guess.sequences == tuple(chain.sequence for chain in expected.values())
    for seen, chain in zip(guess.seen, expected.values(), strict=True):
        np.testing.assert_array_equal(seen, chain.mask[:, [CA, CB]] > 0)
    with pytest.raises(KeyError):
        guess["Z"]


def test_a_file_and_arrays_have_the_same_chains(tmp_path: Path) -> None:
    first, second = chains()
    path = file_of(tmp_path)
    from_file, from_arrays = as_guess(path, "q", SEQUENCES), as_guess(arrays(), "q", SEQUENCES)
    for guess in (from_file, from_arrays):
        assert_is(guess, {"L": first, "H": second})
    assert (from_file.source, from_file.digest, from_file.held) == (str(path), digest_of(path.read_bytes()), None)
    assert from_arrays.source == "initial_guess"
    assert from_arrays["L"].residue_index.tolist() == [*range(10)]
    assert from_arrays["H"].author_numbers == ("1", "2", "3", "4", "5", "6", "7")
    assert as_guess(from_file, "q", SEQUENCES).names == ("L", "H")
    expected = np.concatenate([second.positions, first.positions, second.positions])
    np.testing.assert_array_equal(guess_positions(from_arrays, ["H", "L", "H"]), expected)
    assert guess_positions(from_arrays, ["H"]).dtype == np.float32


def test_the_first_assembly_is_the_guess(tmp_path: Path) -> None:
    """Atoms of the copies are moved by their operators. Missing atoms stay at the origin."""
    more = assembly_text([("7", "2,3", "A"), ("8", "1", "A,B")])
    first = random_chain("A", FIRST, missing=[2])
    path = file_of(tmp_path, "x.cif", more, first, random_chain("B", SECOND, seed=1))
    guess = as_guess(path, "q", {"A": FIRST, "A-2": FIRST})
    expected = {}
    for id, operator in zip(("A", "A-2"), (TURN, SHIFT)):
        matrix = np.array(operator, np.float64).reshape(3, 4)
        moved = first.positions @ matrix[:, :3].T + matrix[:, 3]
        expected[id] = replace(first, positions=moved * first.mask[..., None])
    assert_is(guess, expected)
    for id in expected:
        assert not guess[id].positions[guess[id].mask == 0].any()


def test_a_structure_in_memory_keeps_its_chains(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    structure = parse_structure(path.read_bytes(), "piped")
    held = guess_from_structure(structure, path.read_bytes(), None, "piped")
    read = guess_from_structure(structure, path.read_bytes(), path, "piped")
    assert (held.source, read.source, read.held) == ("piped", str(path), None)
    assert held.held is not None
    assert held.digest == read.digest
    path.unlink()
    assert_is(held, dict(zip("LH", chains())))


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    guess = as_guess(str(path), "q", SEQUENCES)
    path.write_text(path.read_text() + "\n")
    with pytest.raises(UserError) as error:
        guess["L"]
    assert str(error.value) == (
        f"{path}: has changed since the run began. Restore the original file, or start a new run."
    )


def test_residues_in_no_chain_are_refused(tmp_path: Path) -> None:
    """SEQRES has four residues, and the atoms have a fifth."""
    path = tmp_path / "x.pdb"
    path.write_text(f"SEQRES   1 A    4  GLY ALA SER THR\n{pdb_chain(plain('GASTW'), 'A')}TER\nEND\n")
    with pytest.raises(UserError, match=r"x\.pdb: has residues .* in no chain: 1 \(TRP 5 of chain A\); correct"):
        as_guess(path, "q", {"A": "GAST"})


def test_a_single_chain_takes_the_name_of_the_query(tmp_path: Path) -> None:
    first, _ = chains()
    path = file_of(tmp_path, "x.cif", "", first)
    for guess in (path, {"L": arrays()["L"]}):
        assert_is(as_guess(guess, "q", {"X": FIRST}), {"X": replace(first, id="X")})


@pytest.mark.parametrize(
    ("sequences", "present", "expected"),
    [
        ({"L": FIRST, "H": SECOND + "A"}, "L (10), H (7)", "L (10), H (8)"),
        ({"L": FIRST, "B": SECOND}, "L (10), H (7)", "L (10), B (7)"),
        ({"L": FIRST}, "L (10), H (7)", "L (10)"),
    ],
)
def test_other_chains_or_lengths_are_refused(
    tmp_path: Path, sequences: dict[str, str], present: str, expected: str
) -> None:
    path = file_of(tmp_path)
    for guess, source in ((path, path), (arrays(), "initial_guess"), (as_guess(path, "q", SEQUENCES), path)):
        with pytest.raises(UserError) as error:
            as_guess(guess, "q", sequences)
        assert str(error.value) == (
            f"{source}: has other chains (residues) than q: {present}, not {expected}. Pass a structure of it."
        )


def test_many_chains_are_listed_in_part() -> None:
    mask = np.ones((1, 37))
    many = {f"c{n}": (np.zeros((1, 37, 3)), mask) for n in range(9)}
    with pytest.raises(UserError, match=r"c6 \(1\), c7 \(1\), and 1 more, not L \(10\), H \(7\)\. Pass"):
        as_guess(many, "q", SEQUENCES)


def test_other_residues_of_equal_number_are_accepted() -> None:
    """A guess of arrays has the query's sequence, or X if the length is another one and the query refuses it."""
    guess = as_guess(arrays(), "q", {"L": FIRST[::-1], "H": SECOND})
    assert guess.sequences == (FIRST[::-1], SECOND)


def test_arrays_are_masked_and_counted_by_content() -> None:
    positions, mask = arrays()["H"]
    mask = mask.copy()
    mask[2, CB] = 0
    masked = positions * (mask[..., None] > 0)
    spoiled = np.where(mask[..., None] > 0, positions, np.nan).astype(np.float64)

    def guess_of(positions: Any, mask: Any) -> GuessStructure:
        return as_guess({"H": (positions, mask)}, "q", {"H": SECOND})

    guess = guess_of(spoiled, mask * 0.25)
    np.testing.assert_array_equal(guess["H"].positions, masked)
    np.testing.assert_array_equal(guess["H"].mask, mask)
    assert (guess["H"].positions.dtype, guess["H"].mask.dtype) == (np.float32, np.float32)
    assert guess.digest == guess_of(masked.tolist(), mask.tolist()).digest
    assert len({guess.digest, guess_of(masked + 1, mask).digest, guess_of(masked, np.ones_like(mask)).digest}) == 3
    assert len(guess.digest) == 32


@pytest.mark.parametrize(
    "value", [None, (np.zeros((7, 37, 3)),), (np.zeros((7, 37, 3)), np.zeros((7, 37)), 0), ("a", "b")]
)
def test_what_is_no_pair_of_arrays_is_refused(value: Any) -> None:
    with pytest.raises(WrongArgument, match=r"initial_guess\['H'\] = .*: positions and mask are needed"):
        as_guess({"H": value}, "q", {"H": SECOND})


@pytest.mark.parametrize(
    ("positions", "mask"), [((7, 37, 3), (7, 36)), ((6, 37, 3), (7, 37)), ((7, 36, 3), (7, 37)), ((7, 37), (7, 37))]
)
def test_arrays_of_other_shapes_are_refused(positions: tuple[int, ...], mask: tuple[int, ...]) -> None:
    with pytest.raises(WrongArgument) as error:
        as_guess({"H": (np.zeros(positions), np.ones(mask))}, "q", {"H": SECOND})
    assert str(error.value) == (
        f"initial_guess['H']: positions {list(positions)} and mask {list(mask)}; [N, 37, 3] and [N, 37] are needed"
    )


def test_observed_atoms_need_finite_positions() -> None:
    positions, mask = arrays()["H"]
    positions = positions.copy()
    positions[3, CA, 1] = np.inf
    with pytest.raises(UserError) as error:
        as_guess({"H": (positions, mask)}, "q", {"H": SECOND})
    assert str(error.value) == "initial_guess['H']: has positions that are not finite. Mask these atoms."


def test_residues_without_the_atom_that_counts() -> None:
    """CB counts, but CA of a residue that is glycine in the query."""
    first, second = chains()
    first.mask[4, CB] = first.mask[0, CA] = second.mask[0, CA] = second.mask[6, CB] = 0
    guess = as_guess({c.id: (c.positions, c.mask) for c in (first, second)}, "q", SEQUENCES)
    assert guess.without_beta(SEQUENCES) == ["L 3", "L 5", "H 1", "H 7"]
    assert guess.without_beta({"L": "G" * 10, "H": "A" * 7}) == ["L 1", "L 3", "H 1", "H 7"]


def test_a_chain_is_its_own_template() -> None:
    first, _ = chains()
    first.mask[5] = 0
    template = own_template(replace(first, mask=first.mask * 0.5), "/x/design.v2.cif.gz")
    assert (template.names, template.sum_probs.tolist(), template.sum_probs.dtype) == (("design_L",), [8.0], "float32")
    np.testing.assert_array_equal(template.aatype, encode(FIRST)[None])
    np.testing.assert_array_equal(template.positions, first.positions[None])
    np.testing.assert_array_equal(template.mask, first.mask[None] > 0)
    assert template.mask.dtype == np.uint8


def test_a_folder_has_a_structure_for_each_name(tmp_path: Path) -> None:
    folder = tmp_path / "designs"
    folder.mkdir()
    for name in ("a.cif", "b.v2.PDB", "c.ent.gz", "notes.txt", "d.json"):
        (folder / name).touch()
    (folder / "e.cif").mkdir()
    files = GuessFiles(folder)
    assert [files.of(name).name for name in "abc"] == ["a.cif", "b.v2.PDB", "c.ent.gz"]
    for name in "de":
        with pytest.raises(UserError) as error:
            files.of(name)
        assert str(error.value) == f"{folder}: has no structure of {name}. Add {name}.pdb or {name}.cif."
    assert GuessFiles(folder / "a.cif").of("anything") == folder / "a.cif"
    (folder / "a.pdb").touch()
    with pytest.raises(UserError) as error:
        GuessFiles(folder)
    assert str(error.value) == f"{folder}/a.pdb: is a structure of a, as a.cif is. Remove one of them."
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as error:
        GuessFiles(tmp_path / "empty")
    assert str(error.value) == f"{tmp_path}/empty: has no structures. Pass a folder of NAME.pdb or NAME.cif."
