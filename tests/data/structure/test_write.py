"""Write structures, compare their text with recorded files, and read them with gemmi and with our own reader."""

from pathlib import Path

import gemmi
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.entries import random_chain
from warpfold import __version__
from warpfold.data.structure import write as writing
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.mmcif import parse_structure
from warpfold.data.structure.write import PDB_CHAINS, Modelling, move_atoms, write_mmcif, write_pdb
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM_ORDER, RESTYPES

WRITTEN = Path(__file__).parent / "written"


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


def sparse_chain(
    name: str, sequence: str, atoms: list[tuple[int, str, tuple[float, float, float]]], numbers: tuple[str, ...] = ()
) -> Chain:
    """Make a chain with these atoms only: residue index, name and position."""
    positions, mask = np.zeros((len(sequence), 37, 3), np.float32), np.zeros((len(sequence), 37), np.float32)
    for i, atom, xyz in atoms:
        positions[i, ATOM_ORDER[atom]], mask[i, ATOM_ORDER[atom]] = xyz, 1.0
    return Chain(name, sequence, positions, mask, np.arange(len(sequence)), numbers or ("",) * len(sequence))


ALL = [
    sparse_chain(
        "A",
        "GXK",
        [(0, "N", (1.5, 0, 9.125)), (0, "CA", (2, -3, 4)), (2, "CA", (-100.5, 6, 7)), (2, "NZ", (8, 9, 10))],
        ("-1", "", "52A"),
    ),
    sparse_chain("B", "GXK", [(1, "CA", (1000, -999, 0.0625)), (1, "O", (1, 2, 3))], ("", "7", "")),
    sparse_chain("none", "W", []),
    sparse_chain("c", "W" * 14, [(13, "OXT", (1, 2, 3))]),
]
CONFIDENCES = [
    np.array([90.0, 0.0, 50.5]),
    np.arange(111.0).reshape(3, 37) / 2,
    np.array([30.0]),
    np.linspace(80.0, 12.25, 14),
]


def recorded(name: str) -> str:
    return (WRITTEN / name).read_text().replace("VERSION", __version__)


def test_a_predicted_model_is_written_as_recorded() -> None:
    how = Modelling("3 recycles, 'no' templates", {"pTM": 0.5, "ipTM": 0.25}, ("OpenMM", "8.1"))
    assert write_mmcif("my model", ALL, b_factors=CONFIDENCES, predicted=how) == recorded("model.cif")


def test_an_experiment_is_written_as_recorded() -> None:
    facts = {"method": "x-ray diffraction", "resolution": 1.5, "release_date": "2020-01-02"}
    assert write_mmcif("1abc", ALL[:2], **facts) == recorded("experiment.cif")


def test_a_pdb_file_is_written_as_recorded() -> None:
    chains = [*ALL[:2], sparse_chain("1", "W", []), ALL[3]]
    confidences = [*CONFIDENCES[:3], np.linspace(80.0, 1234.5, 14)]
    text = write_pdb("my mödel " * 9, chains, b_factors=confidences, remarks=["é ab" * 30, "second"])
    assert text == recorded("model.pdb")
    assert write_pdb("x", [ALL[1]]).splitlines()[2].endswith("  1.00  0.00           C")


@pytest.mark.parametrize(
    ("facts", "lines"),
    [
        ({}, []),
        ({"method": "SOLUTION NMR"}, ["_exptl.entry_id x", "_exptl.method 'SOLUTION NMR'"]),
        ({"resolution": 2.5}, ["_refine.entry_id x", "_refine.pdbx_refine_id ?", "_refine.ls_d_res_high 2.5"]),
        (
            {"method": "electron microscopy", "resolution": 2.5},
            [
                "_exptl.entry_id x",
                "_exptl.method 'electron microscopy'",
                "_em_3d_reconstruction.entry_id x",
                "_em_3d_reconstruction.id 1",
                "_em_3d_reconstruction.resolution 2.5",
            ],
        ),
    ],
)
def test_the_resolution_is_written_where_its_method_has_it(facts: dict, lines: list[str]) -> None:
    text = write_mmcif("x", [ALL[1]], **facts)
    assert text.startswith("data_x\n#\n_entry.id x\n#\n_struct.entry_id x\n_struct.title x\n#\n")
    head = text.partition("loop_\n")[0].splitlines()
    assert [line for line in head[6:] if line != "#"] == lines
    assert write_mmcif("", [ALL[1]]).startswith("data_structure\n#\n_entry.id structure\n")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "?"),
        (7, "7"),
        ("", "''"),
        ("a b", "'a b'"),
        ("tab\tbed", "'tab\tbed'"),
        ("it's", '"it\'s"'),
        ('say "no"', "'say \"no\"'"),
        ("""'both' "kinds\"""", "' both  \"kinds\"'"),
        ("two\nlines", "'two lines'"),
        ("_tag", "'_tag'"),
        ("#comment", "'#comment'"),
        ("$x", "'$x'"),
        ("[x", "'[x'"),
        ("]x", "']x'"),
        (";x", "';x'"),
        ("x;_#", "x;_#"),
        ("data_x", "'data_x'"),
        ("SAVE_", "'SAVE_'"),
        ("Loop_", "'Loop_'"),
        ("stop_", "'stop_'"),
        ("global_", "'global_'"),
        ("loop_x", "loop_x"),
        ("aé\x07~", "a__~"),
    ],
)
def test_a_value_is_quoted_if_the_syntax_requires_it(value: object, text: str) -> None:
    assert writing._value(value) == text
    if value not in (None, 7):
        back = gemmi.cif.read_string(f"data_x\n_a.b {text}\n").sole_block().find_value("_a.b")
        assert back == text


def test_labels_continue_after_z() -> None:
    chains = [sparse_chain(f"c{i}", "G", [(0, "CA", (1, 2, 3))]) for i in range(29)]
    block = gemmi.cif.read_string(write_mmcif("x", chains)).sole_block()
    labels = list(block.find_values("_struct_asym.id"))
    assert labels == [*"ABCDEFGHIJKLMNOPQRSTUVWXYZ", "AA", "AB", "AC"]


def test_what_a_pdb_file_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(*chains: Chain) -> str:
        with pytest.raises(UserError) as caught:
            write_pdb("x", chains)
        return str(caught.value)

    def atom(*xyz: float, name: str = "A", number: str = "") -> Chain:
        return sparse_chain(name, "G", [(0, "CA", xyz)], (number,))

    remedy = "; the PDB format cannot hold it. Write mmCIF."
    sixty_two = [sparse_chain(name, "G", []) for name in PDB_CHAINS]
    assert write_pdb("x", sixty_two).count("SEQRES") == 62
    assert refusal(*sixty_two, atom(1, 2, 3, name="AA")) == f"x: 63 chains, more than 62{remedy}"
    assert refusal(atom(1, 2, 3, name="AB")) == f"x: chain name 'AB' is not one letter or digit{remedy}"
    assert refusal(atom(1, 2, 3, name="")) == f"x: chain name '' is not one letter or digit{remedy}"
    assert refusal(atom(1, 2, 3, name="-")) == f"x: chain name '-' is not one letter or digit{remedy}"
    beyond = f"x: chain A has coordinates beyond eight columns{remedy}"
    for xyz in ((10050, 0, 0), (0, -1005, 0)):
        assert refusal(atom(*xyz)) == beyond
    assert "9999.900-999.900   0.000" in write_pdb("x", [atom(9999.9, -999.9, 0)])
    for number in ("-999", "9999"):
        assert f"A{number:>4}" in write_pdb("x", [atom(1, 2, 3, number=number)])
    for number in ("-1000", "10000"):
        message = f"x: residue number {number} of chain A is beyond four columns{remedy}"
        assert refusal(atom(1, 2, 3, number=number)) == message
    assert writing.ATOM_LIMIT == 99_999
    monkeypatch.setattr(writing, "ATOM_LIMIT", 8)
    assert write_pdb("x", ALL[:2]).count("\nATOM") == 6
    monkeypatch.setattr(writing, "ATOM_LIMIT", 7)
    assert refusal(*ALL[:2]) == f"x: 6 atoms, more than 7{remedy}"


def test_arrays_that_do_not_fit_are_refused() -> None:
    chain = random_chain("A", "GG")
    for positions, mask in ((chain.positions[:1], chain.mask), (chain.positions, chain.mask[:1])):
        with pytest.raises(ValueError, match=r"^chain A: positions or mask do not fit its 2 residues$"):
            write_pdb("x", [Chain("A", "GG", positions, mask, chain.residue_index, chain.author_numbers)])
    with pytest.raises(ValueError, match=r"^1 arrays of B factors for 2 chains$"):
        write_pdb("x", [chain, random_chain("B", "G")], b_factors=[np.zeros(2)])
    # Masked positions and B factors do not matter.
    chain.positions[0, ATOM_ORDER["CG"]] = np.nan
    assert write_pdb("x", [chain]) == write_pdb("x", [random_chain("A", "GG")])


def test_moved_atoms_are_those_of_the_moved_chain() -> None:
    rotation, translation = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]]), np.array([10.0, -20.0, 0.5])
    moved = [
        sparse_chain("A", "GXK", [(0, "N", (10, -18.5, 9.625)), (2, "NZ", (1, -12, 10.5))], ("-1", "", "52A")),
        ALL[1],
    ]
    first = sparse_chain("A", "GXK", [(0, "N", (1.5, 0, 9.125)), (2, "NZ", (8, 9, 10))], ("-1", "", "52A"))
    for write in (write_mmcif, write_pdb):
        assert move_atoms(write("x", [first]), rotation, translation) == write("x", moved[:1])
    wide, turned = (
        sparse_chain("A", "G", [(0, "CA", xyz)]) for xyz in ((1000.125, -200.25, 3000.5), (200.25, 1000.125, 3000.5))
    )
    assert "1000.125-200.2503000.500" in write_pdb("x", [wide])
    assert move_atoms(write_pdb("x", [wide]), rotation, np.zeros(3)) == write_pdb("x", [turned])
    with pytest.raises(UserError) as caught:
        move_atoms(write_pdb("x", [first]), rotation, np.array([0.0, 0, 9995]))
    assert str(caught.value) == ("a moved atom is beyond eight columns; the PDB format cannot hold it. Write mmCIF.")
    with pytest.raises(UserError, match="beyond eight columns"):
        move_atoms(write_pdb("x", [first]), rotation, np.array([0.0, -1010, 0]))
    assert "9999.1" in move_atoms(write_mmcif("x", [first]), rotation, np.array([0.0, 0, 9990]))
