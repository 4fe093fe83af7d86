"""Write structures and read them with gemmi and with our own reader."""

import gemmi
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.entries import random_chain
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.mmcif import parse_structure
from warpfold.data.structure.write import PDB_CHAINS, Modelling, write_mmcif, write_pdb
from warpfold.geometry.residue import RESTYPES


def assert_same(actual: Chain, wanted: Chain) -> None:
    assert (actual.id, actual.sequence, actual.author_numbers) == (wanted.id, wanted.sequence, wanted.author_numbers)
    assert np.array_equal(actual.mask, wanted.mask)
    assert np.abs(actual.positions - wanted.positions).max() < 6e-4
    assert np.array_equal(actual.residue_index, wanted.residue_index)


@given(
    sequence=st.text(st.sampled_from(RESTYPES), min_size=1, max_size=30),
    missing=st.sets(st.integers(0, 29), max_size=10),
    first=st.integers(-5, 3000),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_mmcif_round_trip(sequence: str, missing: set[int], first: int, seed: int) -> None:
    absent = [i for i in missing if i < len(sequence) - 1]
    chains = [random_chain("A", sequence, seed, absent, first), random_chain("b1", sequence + "W", seed + 1)]
    facts = {"method": "ELECTRON MICROSCOPY", "resolution": 2.75, "release_date": "2021-07-15"}
    back = parse_structure(write_mmcif("1abc", chains, **facts))
    assert list(back.chains) == ["A", "b1"]
    for chain in chains:
        assert_same(back.chains[chain.id], chain)
    assert (back.id, back.method, back.resolution, str(back.release_date)) == ("1abc", *facts.values())


def test_any_number_of_chains_is_read_back() -> None:
    ids = ["A", "AA", "b", "chain-7", "B'", *(f"x{i}" for i in range(65))]
    chains, small = (
        [random_chain(n, ("GAS", "WHGK")[i % 2], i) for i, n in enumerate(names)] for names in (ids, PDB_CHAINS)
    )
    text = write_mmcif("1abc", chains)
    back, of_pdb = parse_structure(text), parse_structure(write_pdb("1abc", small))  # the most of a PDB file
    assert (list(back.chains), list(of_pdb.chains)) == (ids, list(PDB_CHAINS))
    for actual, written in ((back, chains), (of_pdb, small)):
        for chain in written:
            assert_same(actual.chains[chain.id], chain)
    assert len({chain.entity for chain in back.chains.values()}) == 2  # one for each sequence
    assert [chain for chain, _ in back.assembly().chains] == ids
    assert len(gemmi.make_structure_from_block(gemmi.cif.read_string(text)[0])[0]) == len(ids)


def test_insertion_codes_and_unknown_residues_survive() -> None:
    chain = random_chain("A", "GSAG")
    chain = Chain("A", "GSXG", chain.positions, chain.mask, chain.residue_index, ("52", "52A", "52B", "-3"))
    chain.mask[2] = 0
    chain.mask[2, :3] = 1
    chain.positions[2] *= chain.mask[2, :, None]
    for back in (write_mmcif("x", [chain]), write_pdb("x", [chain])):
        assert_same(parse_structure(back).chains["A"], chain)


@pytest.mark.parametrize("write", [write_mmcif, write_pdb])
def test_gemmi_reads_every_atom_and_its_b_factor(write) -> None:
    chains = [random_chain("A", "MKRW", missing=[1]), random_chain("B", "GG", 1)]
    bs = [np.array([90.5, 0.0, 70.25, 12.0]), np.full((2, 37), 33.0)]
    text = write("x", chains, b_factors=bs)
    if write is write_mmcif:
        structure = gemmi.make_structure_from_block(gemmi.cif.read_string(text).sole_block())
    else:
        structure = gemmi.read_pdb_string(text)
    structure.setup_entities()
    assert [len(chain) for chain in structure[0]] == [3, 2]
    assert {atom.b_iso for atom in structure[0]["A"][0]} == {90.5}
    assert {atom.b_iso for atom in structure[0]["B"][1]} == {33.0}
    assert sum(len(residue) for chain in structure[0] for residue in chain) == sum(int(c.mask.sum()) for c in chains)
    assert len(structure.get_entity_of(structure[0]["A"].get_polymer()).full_sequence) == 4


def test_predictions_carry_their_confidence() -> None:
    text = write_mmcif(
        "model 'one'", [random_chain("A", "MK")], b_factors=[np.array([90.0, 50.0])], predicted=Modelling()
    )
    block = gemmi.cif.read_string(text).sole_block()
    assert list(block.find_values("_ma_qa_metric_local.metric_value")) == ["90.00", "50.00"]
    assert list(block.find_values("_ma_qa_metric_local.label_seq_id")) == ["1", "2"]
    assert gemmi.cif.as_number(block.find_values("_ma_qa_metric_global.metric_value")[0]) == 70
    assert gemmi.cif.as_string(block.find_value("_struct.title")) == "model 'one'"


def test_what_would_be_written_wrong_is_an_error() -> None:
    chain = random_chain("A", "GG")
    chain.positions[0, 0] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        write_mmcif("x", [chain])
    with pytest.raises(ValueError, match="one name"):
        write_mmcif("x", [random_chain("A", "G"), random_chain("A", "G")])
    with pytest.raises(ValueError, match="B factors"):
        write_mmcif("x", [random_chain("A", "G")], b_factors=[])


def test_what_is_not_ascii_does_not_make_it_unreadable() -> None:
    chain = random_chain("A", "GWK")
    text = write_mmcif("Hämo\x07globin β", [chain])
    assert "H_mo_globin _" in text
    assert text.isascii()
    assert parse_structure(text).chains["A"].sequence == "GWK"


def test_a_model_without_atoms_is_cif_all_the_same() -> None:
    chain = random_chain("A", "MK")
    text = write_mmcif("x", [Chain("A", "XX", chain.positions, 0 * chain.mask, chain.residue_index, ("1", "2"))])
    assert not gemmi.cif.read_string(text).sole_block().find_mmcif_category("_atom_site.")
