"""Read structures: the effect of each rule of mmCIF and PDB on a chain, and refused files."""

import gzip
import random
import re
import time
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from tests.data.entries import Atom, atom, backbone, entry, random_chain
from warpfold.data.structure.chain import Chain, Structure
from warpfold.data.structure.mmcif import parse_structure, read_structure
from warpfold.data.structure.write import write_mmcif, write_pdb
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM_ORDER

SEQUENCE = ["GLY", "SER", "ALA", "GLY"]
PEPTIDE = [row for i, name in enumerate(SEQUENCE) for row in backbone(name, i + 1)]


def only_chain(text: str) -> Chain:
    (chain,) = parse_structure(text).chains.values()
    return chain


def position(chain: Chain, place: int, name: str) -> list[float]:
    assert chain.mask[place, ATOM_ORDER[name]] == 1
    return chain.positions[place, ATOM_ORDER[name]].tolist()


def refusal(text: str | bytes) -> str:
    with pytest.raises(UserError) as caught:
        parse_structure(text, "x.cif")
    assert str(caught.value).startswith("x.cif: ")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_modified_residues_are_their_parents() -> None:
    """Nucleotides are no residues of proteins: DA is not alanine, and U is not cysteine."""
    sequence = ["MSE", "PTR", "SEC", "PYL", "XYZ9", "ALA", "DA", "U", "C"]
    atoms = [row for i, name in enumerate(sequence) for row in backbone(name, i + 1)]
    atoms += [atom("SE", "MSE", 1, 9.0, group_PDB="HETATM"), atom("OH", "PTR", 2), atom("P", "PTR", 2)]
    atoms += [atom("CB", "XYZ9", 5), atom("CG", "XYZ9", 5), atom("CG", "ALA", 6), atom("HA", "ALA", 6)]
    chain = only_chain(entry(atoms, sequence))
    assert chain.sequence == "MYCKXAXXX"
    assert position(chain, 0, "SD") == pytest.approx([9.0, 1.0, 3.8])
    assert chain.mask.sum(1).tolist() == [5, 5, 4, 4, 5, 4, 4, 4, 4]  # no P, no CG of X or of ALA, no hydrogen


def mixture(*residues: tuple[str, str, float], chain: str = "A") -> list[Atom]:
    """Write residue 2 in several forms (name, alternative, occupancy), each 10 angstrom from the one before."""
    return [
        row | {"Cartn_x": 10.0 * number + i}
        for number, (name, altloc, occupancy) in enumerate(residues)
        for i, row in enumerate(backbone(name, 2, altloc=altloc, occupancy=occupancy, chain=chain))
    ]


def test_of_a_mixture_the_residue_of_largest_occupancy_counts() -> None:
    """Supp. 1.2.1. Sequence and atoms are those of the same residue, chosen for each chain."""
    first, second = (("SER", "A", 0.4), ("THR", "B", 0.6)), (("SER", "A", 0.7), ("THR", "B", 0.3))
    atoms = backbone("GLY", 1) + mixture(*first) + [atom("OG1", "THR", 2, 7.0, altloc="B", occupancy=0.6)]
    atoms += [row | {"label_asym_id": "B", "auth_asym_id": "B"} for row in backbone("GLY", 1)]
    atoms += mixture(*second, chain="B") + [atom("OG1", "THR", 2, 7.0, altloc="B", occupancy=0.3, chain="B")]
    chains = parse_structure(entry(atoms, ["GLY", "SER/THR"])).chains
    assert {name: chain.sequence for name, chain in chains.items()} == {"A": "GT", "B": "GS"}
    assert position(chains["A"], 1, "N")[0] == 10.0
    assert position(chains["A"], 1, "OG1")[0] == 7.0
    assert position(chains["B"], 1, "N")[0] == 0.0
    assert chains["B"].mask[1].sum() == 4  # without OG1 of the other residue


@pytest.mark.parametrize(
    ("residues", "letter"),
    [
        ((("SER", "A", 0.5), ("THR", "B", 0.5)), "S"),  # the first among equals
        ((("SER", "A", 0.3), ("SER", "B", 0.3), ("THR", "C", 0.4)), "T"),  # the largest conformation, not the sum
        ((("THR", "A", 0.1),), "T"),  # the other is unresolved
        ((), "S"),  # both are unresolved
        ((("SER", "A", 0.2), ("MSE", "B", 0.8)), "S"),  # the sequence lacks MSE: see the refusal below
    ],
)
def test_mixtures_of_any_kind(residues: tuple[tuple[str, str, float], ...], letter: str) -> None:
    text = entry(backbone("GLY", 1) + mixture(*residues), ["GLY", "SER/THR"])
    if any(name == "MSE" for name, _, _ in residues):
        assert "MSE at position 2" in refusal(text)
    else:
        chain = only_chain(text)
        assert chain.sequence[1] == letter
        assert chain.mask[1].sum() == (4 if residues else 0)


@pytest.mark.parametrize("seqres", [True, False])
def test_mixtures_in_pdb_files(seqres: bool) -> None:
    """SEQRES names at most one of the residues. Such files used to be refused."""
    lines = "SEQRES   1 A    3  GLY SER ALA\n" if seqres else ""
    for place, residues in (
        (1, [("GLY", " ", 1.0)]),
        (2, [("SER", "A", 0.3), ("THR", "B", 0.7)]),
        (3, [("ALA", " ", 1.0)]),
    ):
        for name, altloc, occupancy in residues:
            for i, atom_name in enumerate(("N", "CA", "C", "O")):
                lines += f"ATOM  {i + 1:5d}  {atom_name:<3s}{altloc}{name} A{place:4d}    {1.2 * i:8.3f}{1.0:8.3f}"
                lines += f"{1.33 * place:8.3f}{occupancy:6.2f}{10.0:6.2f}          {atom_name[0]:>2s}\n"
    assert only_chain(lines + "END\n").sequence == "GTA"
    if seqres:
        other = lines.replace("SER A   2", "TRP A   2").replace("THR A   2", "CYS A   2")
        assert "has SER" in refusal(other + "END\n")


MOD = "loop_\n_pdbx_struct_mod_residue.label_comp_id\n_pdbx_struct_mod_residue.parent_comp_id\n{}\n#\n"
CHEM = "loop_\n_chem_comp.id\n_chem_comp.mon_nstd_parent_comp_id\n{}\n#\n"
CANONICAL = "_entity_poly.pdbx_seq_one_letter_code_can\n;{}\n;\n"


@pytest.mark.parametrize(
    ("name", "more", "canonical", "sequence"),
    [
        ("XYZ9", "", "", "GXA"),
        ("XYZ9", MOD.format("XYZ9 PHE"), "", "GFA"),
        ("XYZ9", CHEM.format("GLY ?\nXYZ9 VAL"), "", "GVA"),
        ("XYZ9", MOD.format("XYZ9 PHE") + CHEM.format("XYZ9 VAL"), "", "GFA"),
        ("XYZ9", CHEM.format("XYZ9 'SER,TYR,GLY'"), "", "GXA"),  # a chromophore
        ("XYZ9", CHEM.format("XYZ9 ABC"), "", "GXA"),
        ("MSE", CHEM.format("MSE ALA"), "", "GMA"),  # our table first
        ("UNK", CHEM.format("UNK ALA"), "", "GXA"),  # unknown stays unknown
        ("XYZ9", "", "GKA", "GKA"),
        ("XYZ9", "", "G\nKA", "GKA"),  # lines
        ("XYZ9", "", "GXA", "GXA"),
        ("XYZ9", "", "WKA", "GKA"),  # our table first
        ("XYZ9", "", "GTYGA", "GXA"),  # several letters for one residue: unknown
    ],
)
def test_parents_that_the_file_names(name: str, more: str, canonical: str, sequence: str) -> None:
    """Look a residue up in our table, then take the file's parent if it is one of the twenty, else X."""
    atoms = [*backbone("GLY", 1), *backbone(name, 2), atom("CG", name, 2), atom("NX", name, 2), *backbone("ALA", 3)]
    text = entry(atoms, ["GLY", name, "ALA"], more=more)
    tag = "_entity_poly.entity_id 1\n"
    chain = only_chain(text.replace(tag, tag + CANONICAL.format(canonical)) if canonical else text)
    assert chain.sequence == sequence
    assert chain.mask[1].sum() == (5 if sequence[1] in "FKM" else 4)


def test_author_numbers_and_insertion_codes() -> None:
    scheme = (
        "loop_\n_pdbx_poly_seq_scheme.asym_id\n_pdbx_poly_seq_scheme.seq_id\n_pdbx_poly_seq_scheme.pdb_seq_num\n"
        "_pdbx_poly_seq_scheme.pdb_ins_code\nA 1 -1 .\nA 2 52 .\nA 3 52 A\nA 4 53 .\n#\n"
    )
    atoms = backbone("SER", 2, author=52) + backbone("ALA", 3, author=52, code="A") + backbone("GLY", 4, author=53)
    assert only_chain(entry(atoms, SEQUENCE, more=scheme)).author_numbers == ("-1", "52", "52A", "53")
    assert only_chain(entry(atoms, SEQUENCE)).author_numbers == ("", "52", "52A", "53")


def test_the_conformation_of_higher_occupancy_is_taken_whole() -> None:
    serine = backbone("SER", 2)[:3] + [
        atom("O", "SER", 2, 5.0, altloc="A", occupancy=0.4),
        atom("O", "SER", 2, 6.0, altloc="B", occupancy=0.6),
        atom("CB", "SER", 2, 5.0, altloc="A", occupancy=0.4),
        atom("CB", "SER", 2, 6.0, altloc="B", occupancy=0.6),
        atom("OG", "SER", 2, 5.0, altloc="A", occupancy=0.4),  # B has no OG, which is better than no atoms
    ]
    chain = only_chain(entry(backbone("GLY", 1) + serine, ["GLY", "SER"]))
    assert [position(chain, 1, name)[0] for name in ("O", "CB", "OG")] == [6.0, 6.0, 5.0]


def test_of_equal_occupancies_the_first_is_taken_residue_by_residue() -> None:
    atoms = []
    for place, first in ((1, 0.7), (2, 0.3), (3, 0.5)):
        atoms += backbone("GLY", place, altloc="A", occupancy=first)
        atoms += [row | {"Cartn_x": 50.0} for row in backbone("GLY", place, altloc="B", occupancy=1 - first)]
    for rows, expected in ((atoms, [1.0, 50.0, 1.0]), (atoms[::-1], [1.0, 50.0, 50.0])):
        chain = only_chain(entry(rows, ["GLY"] * 3))
        assert [position(chain, i, "CA")[0] for i in range(3)] == expected


def test_arginine_nitrogens_are_named_by_their_distance_to_cd() -> None:
    atoms = backbone("ARG", 1) + [atom("CD", "ARG", 1, 0.0), atom("NH1", "ARG", 1, 4.0), atom("NH2", "ARG", 1, 3.0)]
    chain = only_chain(entry(atoms, ["ARG"]))
    assert [position(chain, 0, name)[0] for name in ("NH1", "NH2")] == [3.0, 4.0]


def test_only_the_first_model_is_read_and_paid_for() -> None:
    models = [row | {"pdbx_PDB_model_num": m, "Cartn_y": float(m)} for m in range(3, 23) for row in PEPTIDE]
    chain = only_chain(entry(models, SEQUENCE))
    assert set(chain.positions[chain.mask > 0][:, 1].tolist()) == {3.0}
    mixed = [row | {"pdbx_PDB_model_num": m, "Cartn_y": float(m)} for row in PEPTIDE for m in (1, 2)]
    assert np.array_equal(only_chain(entry(mixed, SEQUENCE)).mask, chain.mask)
    twenty, single = (_seconds(entry(models[: count * len(PEPTIDE)], SEQUENCE)) for count in (20, 1))
    assert twenty < 20 * single


def _seconds(text: str) -> float:
    start = time.process_time()
    for _ in range(50):
        parse_structure(text)
    return time.process_time() - start


def test_optional_columns_may_be_absent() -> None:
    without = ["occupancy", "label_alt_id", "pdbx_PDB_ins_code", "pdbx_PDB_model_num", "label_entity_id", "group_PDB"]
    more = "_struct_asym.id A\n_struct_asym.entity_id 1\n#\n"
    assert np.array_equal(
        only_chain(entry(PEPTIDE, SEQUENCE, without=without, more=more)).positions,
        only_chain(entry(PEPTIDE, SEQUENCE)).positions,
    )


def test_quoted_values_and_uncertainties() -> None:
    atoms = [row | {"label_atom_id": f'"{row["label_atom_id"]}"', "Cartn_y": "1.250(12)"} for row in PEPTIDE]
    assert position(only_chain(entry(atoms, SEQUENCE)), 0, "CA")[1] == 1.25


def read(more: str) -> Structure:
    return parse_structure(entry(PEPTIDE, SEQUENCE, more=more))


HISTORY = "loop_\n_pdbx_audit_revision_history.ordinal\n_pdbx_audit_revision_history.revision_date\n{}#\n"
OLD = "loop_\n_database_PDB_rev.num\n_database_PDB_rev.date\n_database_PDB_rev.date_original\n{}#\n"


@pytest.mark.parametrize(
    ("text", "released"),
    [
        (entry(PEPTIDE, SEQUENCE), None),
        (entry(PEPTIDE, SEQUENCE, more=HISTORY.format("2 2011-07-13\n1 1998-04-08\n")), date(1998, 4, 8)),
        (entry(PEPTIDE, SEQUENCE, more=OLD.format("1 1998-04-08 1997-12-16\n2 2009-02-24 ?\n")), date(1998, 4, 8)),
        (entry(PEPTIDE, [], more=OLD.format("1 1998-04-08 ?\n")), date(1998, 4, 8)),  # without SEQRES
        (entry(PEPTIDE, SEQUENCE, more=HISTORY.format("1 2011-02-30\n2 soon\n")), None),
        (entry(PEPTIDE, SEQUENCE, more=HISTORY.format("1 ?\n2 2011-7-3\n3 20120101\n")), date(2011, 7, 3)),
        ("REVDAT   1   31-FEB-98 1ABC    0\n" + write_pdb("x", [random_chain("A", "MKV")]), None),
    ],
)
def test_the_release_is_the_first_revision_that_has_a_date(text: str, released: date | None) -> None:
    assert parse_structure(text).release_date == released


@pytest.mark.parametrize(
    ("more", "resolution"),
    [
        ("_refine.ls_d_res_high 1.85\n_reflns.d_resolution_high 1.80\n#\n", 1.85),
        ("_refine.ls_d_res_high ?\n_em_3d_reconstruction.resolution 3.2\n#\n", 3.2),
        ("_refine.ls_d_res_high .\n_reflns.d_resolution_high 2.0\n#\n", 2.0),
        ("_refine.ls_d_res_high 0.0\n#\n", None),
        ("", None),
    ],
)
def test_resolution(more: str, resolution: float | None) -> None:
    assert read(more).resolution == resolution


def test_polymers_that_are_no_l_proteins_are_dropped_by_name() -> None:
    protein = entry(PEPTIDE, SEQUENCE)
    assert "A: polypeptide(d)" in refusal(entry(PEPTIDE, SEQUENCE, kind="polypeptide(D)"))
    dna = [row | {"label_entity_id": 2} for row in backbone("DA", 1, chain="B")]
    both = protein.replace("1 4 GLY\n#", "1 4 GLY\n2 1 DA\n2 2 DG\n#").removesuffix("#\n")
    both += "".join(" ".join(str(value) for value in row.values()) + "\n" for row in dna) + "#\n"
    structure = parse_structure(both)
    assert list(structure.chains) == ["A"]
    assert structure.dropped == {"B": "no polypeptide"}


def test_ca_only_chains_are_refused_unless_asked_for() -> None:
    text = entry([row for row in PEPTIDE if row["label_atom_id"] == "CA"], SEQUENCE)
    assert "CA-only" in refusal(text)
    assert parse_structure(text, ca_only=True).chains["A"].mask.sum() == 4
    other = [row | {"label_asym_id": "B", "auth_asym_id": "B"} for row in PEPTIDE]
    structure = parse_structure(entry([row for row in PEPTIDE if row["label_atom_id"] == "CA"] + other, SEQUENCE))
    assert list(structure.chains) == ["B"]
    assert "CA-only" in structure.dropped["A"]


def test_every_chain_has_a_name_and_those_without_coordinates_are_named() -> None:
    other = [row | {"label_asym_id": "B"} for row in PEPTIDE]
    assert list(parse_structure(entry(PEPTIDE + other, SEQUENCE)).chains) == ["A", "A-B"]
    more = "loop_\n_struct_asym.id\n_struct_asym.entity_id\nA 1\nB 1\n#\n"
    assert parse_structure(entry(PEPTIDE, SEQUENCE, more=more)).dropped == {"B": "no residue has coordinates"}


def test_sequence_from_coordinates_with_gaps_as_unknown() -> None:
    # Residues are 3.8 angstrom apart along z, so C and N are too far apart for a bond.
    atoms = backbone("SER", 5) + backbone("ALA", 6) + backbone("GLY", 9)
    chain = only_chain(entry(atoms, []))
    assert chain.sequence == "SAXXG"
    assert chain.mask.sum(1).tolist() == [4, 4, 0, 0, 4]
    assert chain.author_numbers == ("5", "6", "", "", "9")
    bare = entry(atoms, [], without=["occupancy", "auth_seq_id"])  # as PyMOL writes; gemmi 0.6 wants both
    assert only_chain(bare).author_numbers == ("5", "6", "", "", "9")


def test_bonded_residues_have_no_gap_whatever_their_numbers() -> None:
    atoms = backbone("SER", 5) + backbone("ALA", 6)
    atoms += [row | {"Cartn_x": 2.0 + i, "Cartn_z": 6 * 3.8 + 1.33} for i, row in enumerate(backbone("GLY", 40))]
    assert only_chain(entry(atoms, [])).sequence == "SAG"
    far = backbone("SER", 5) + backbone("ALA", 6) + backbone("GLY", 1006)
    assert only_chain(entry(far, [])).sequence == "SAG"


def test_pdb_models_and_repeats() -> None:
    """The first of several models is read, and residues are placed by number, not by alignment."""
    chain = random_chain("A", "GGGGSGGGGSGGGG", missing=[0, 1, 5, 9, 13])
    head, *body, end = re.split(r"(?=^ATOM|^TER)", write_pdb("x", [chain]), flags=re.MULTILINE)
    moved = "".join(f"{line[:30]}{500.0:8.3f}{line[38:]}" for line in body)
    read = only_chain(f"{head}MODEL        1\n{''.join(body)}ENDMDL\nMODEL        2\n{moved}ENDMDL\n{end}")
    assert np.array_equal(read.mask, chain.mask)
    assert read.positions.max() < 100


def test_pdb_with_seqres_numbers_and_header() -> None:
    chain = random_chain("B", "MKRVLA", missing=[0, 3], first=1)
    text = write_pdb("x", [chain])
    header = (
        f"{'HEADER    HYDROLASE':<50}16-DEC-97   {'1ABC':<14}\nREVDAT   2   24-FEB-09 1ABC    1\n"
        "REVDAT   1   08-APR-98 1ABC    0\nEXPDTA    X-RAY DIFFRACTION\nREMARK   2\n"
        "REMARK   2 RESOLUTION.    2.07 ANGSTROMS.\n"
    )
    structure = parse_structure(header + text)
    assert (structure.id, structure.method) == ("1abc", "X-RAY DIFFRACTION")
    assert (structure.release_date, structure.resolution) == (date(1998, 4, 8), 2.07)
    assert structure.chains["B"].sequence == "MKRVLA"
    assert np.array_equal(structure.chains["B"].mask, chain.mask)


def test_pdb_without_seqres_names_or_end() -> None:
    lines = write_pdb("x", [random_chain("A", "MKRVLAGS")]).splitlines()
    lines = [line[:21] + " " + line[22:] for line in lines if line.startswith("ATOM")]
    structure = parse_structure("\n".join(lines), "/somewhere/T0900.pdb")
    assert structure.id == "T0900"
    assert structure.chains["A"].sequence == "MKRVLAGS"


PDB = write_pdb("x", [random_chain("A", "MKV")])
ROW = PDB.index("ATOM")
TRP = PEPTIDE[:4] + [row | {"label_seq_id": "9" * 5000} for row in PEPTIDE[4:]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *(
            (PDB[: ROW + 38] + bad + PDB[ROW + 46 :], "not a number")
            for bad in ("*" * 8, " " * 8, "     nan", "  12.5x7")
        ),
        (PDB.removesuffix("END\n"), "no END"),
        ("\n".join(line for line in PDB.splitlines() if line.startswith("ATOM"))[:-40], "middle of an atom"),
        ("HEADER    HYDROLASE\nEND\n", "has no atoms"),
        *(
            (
                entry([*PEPTIDE[:5], PEPTIDE[5] | {"Cartn_x": bad}, *PEPTIDE[6:]], SEQUENCE),
                "atom CA of residue 2 of chain A",
            )
            for bad in ("nan", "NaN", "?", ".", "inf", "abc", "1e30")
        ),
        (entry(PEPTIDE[:4] + backbone("TRP", 2), SEQUENCE), "TRP at position 2"),
        (entry(TRP, SEQUENCE), "at position 999999999999999999... of its sequence"),
        (entry(PEPTIDE + backbone("TRP", 9), SEQUENCE), "position 9"),
        (entry(PEPTIDE, SEQUENCE).replace("1 3 ALA\n", ""), "entity_poly_seq has residue 4"),
        ("", "not a structure file"),
        (">fasta\nMKV\n", "not a structure file"),
        ("data_X\n_cell.length_a 3\n", "has no atoms"),
        ("data_X\nloop_\n_atom_site.id\n1\n", "has no atoms"),
        (write_pdb("x", [random_chain("A", "GS")]).replace("GLY", " ' "), "a quote"),
        (entry(PEPTIDE, SEQUENCE, without=["label_comp_id"]), "no column label_comp_id"),
        (entry([], SEQUENCE), "has no atoms"),
        (b"data_X\n_atom_site.id \xff\xfe\0", "valid mmCIF"),
        (entry(backbone("HOH", 1), []), "no usable protein chain"),
    ],
    ids=map(str, range(30)),
)
def test_what_is_damaged_or_no_structure(text: str | bytes, said: str) -> None:
    assert said in refusal(text)


def test_files(tmp_path: Path) -> None:
    text = entry(PEPTIDE, SEQUENCE).encode()
    (tmp_path / "a.cif.gz").write_bytes(gzip.compress(text))
    (tmp_path / "b.cif").write_bytes(text.replace(b"\n", b"\r\n"))
    (tmp_path / "cut.cif.gz").write_bytes(gzip.compress(text)[:-30])
    (tmp_path / "empty.cif").touch()
    assert read_structure(tmp_path / "a.cif.gz").chains["A"].sequence == "GSAG"
    assert read_structure(tmp_path / "b.cif").chains["A"].sequence == "GSAG"
    for name, said in (("cut.cif.gz", "cut short"), ("empty.cif", "empty"), ("none.cif", "no such"), ("", "folder")):
        with pytest.raises(UserError, match=said):
            read_structure(tmp_path / name)


def test_every_cut_of_an_mmcif_file_is_refused() -> None:
    text = write_mmcif("x", [random_chain("A", "MKRVLAGS")], method="X-RAY DIFFRACTION", resolution=2.0)
    assert "A" in parse_structure(text).chains
    for cut in range(0, len(text.rstrip("#\n")), 7):
        refusal(text[:cut])


def test_damage_of_any_kind_is_a_user_error_or_read() -> None:
    rng = random.Random(0)
    chain = random_chain("A", "MKRVLAGS", missing=[2])
    files = [write_mmcif("x", [chain]), write_pdb("x", [chain]), entry(PEPTIDE, []), entry(PEPTIDE, SEQUENCE)]
    for data in map(str.encode, files):
        for _ in range(120):
            damaged = bytearray(data)
            for _ in range(rng.choice([1, 3, 20])):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            start = rng.randrange(len(damaged))
            del damaged[start : start + rng.choice([0, 1, 30, 300])]
            said = ""
            try:
                parse_structure(bytes(damaged))
            except UserError as error:
                said = str(error)
            assert "\n" not in said
