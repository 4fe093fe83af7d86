"""Read mmCIF files with SEQRES: names, numbers, notes, errors and choices of whole files, case by case."""

from collections.abc import Sequence
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from tests.data.entries import Atom, assembly_text, atom, backbone, entry, loop, random_chain
from tests.data.structure.test_pdb import told
from warpfold.data.structure import mmcif
from warpfold.data.structure.chain import Structure
from warpfold.data.structure.mmcif import parse_seq_id, parse_structure, read_release_date, read_structure
from warpfold.data.structure.write import write_mmcif
from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM_ORDER, ATOM_TYPES

GSAG = ["GLY", "SER", "ALA", "GLY"]


def peptide(sequence: Sequence[str] = GSAG, chain: str = "A", y: float = 1.0, **changes: object) -> list[Atom]:
    """Make the backbones of a chain that is extended along z."""
    return [
        row | {"Cartn_y": y, "auth_asym_id": chain}
        for i, name in enumerate(sequence)
        for row in backbone(name, i + 1, chain=chain, **changes)
    ]


def refusal(text: str, source: str = "x.cif") -> str:
    with pytest.raises(UserError) as caught:
        parse_structure(text, source)
    assert str(caught.value).startswith(f"{source}: ")
    return str(caught.value).removeprefix(f"{source}: ")


def read(text: str) -> list[str]:
    return told(parse_structure(text, "x.cif"))


def without(rows: list[Atom], *places: int) -> list[Atom]:
    return [row for row in rows if row["label_seq_id"] not in places]


def scheme(*rows: str) -> str:
    tags = ("asym_id", "seq_id", "pdb_seq_num", "pdb_strand_id", "pdb_ins_code")
    # A dot in quotes would be a code, not a missing one.
    return loop("pdbx_poly_seq_scheme", tags, [row.split() for row in rows]).replace("'", "")


ASYMS = "loop_\n_struct_asym.id\n_struct_asym.entity_id\n"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (entry(peptide(), GSAG), ["A GSAG 1 2 3 4"]),
        # Numbers of residues without atoms are in the scheme. Positions outside of the sequence are ignored.
        (entry(without(peptide(), 4) + without(peptide(chain="B", y=9.0), 1), GSAG,
               more=scheme("A 0 70 x .", "A 4 74 x A", "A 5 75 x .", "B 1 81 x .", "C 1 91 x .")),
         ["A GSAG 1 2 3 -", "B GSAG - 2 3 4"]),
        # Names: of the author, else of the scheme, else label_asym_id. A name that is taken gets a suffix.
        (entry(peptide(auth_asym_id="?"), GSAG), ["A GSAG 1 2 3 4"]),
        (entry([row | {"auth_asym_id": "?"} for row in peptide()], GSAG, more=scheme("A 1 1 H .")), ["H GSAG 1 2 3 4"]),
        (entry([row | {"auth_asym_id": "."} for row in peptide()], GSAG), ["A GSAG 1 2 3 4"]),
        (entry([row | {"auth_asym_id": "H"} for row in peptide() + peptide(chain="B", y=9.0)], GSAG),
         ["H GSAG 1 2 3 4", "H-B GSAG 1 2 3 4"]),
        # Chains are in the order of struct_asym, then of the atoms.
        (entry(peptide() + peptide(chain="B", y=9.0) + peptide(chain="C", y=20.0), GSAG,
               more=ASYMS + "C 1\nB 1\nD 1\n#\n"),
         ["C GSAG 1 2 3 4", "B GSAG 1 2 3 4", "A GSAG 1 2 3 4", "dropped D: no residue has coordinates"]),
        # Chains that are dropped.
        (entry(peptide() + [row for row in peptide(chain="B", y=9.0) if row["label_atom_id"] != "C"], GSAG),
         ["A GSAG 1 2 3 4", "dropped B: no residue has N, CA and C, a CA-only chain"]),
        # Residues without a letter, if their backbone is whole.
        (entry(peptide(["ZZQ", "UNK", "YYQ", "ZZQ", "MSE", "XXQ"])[:-1] + peptide(["ZZQ"])[:0],
               ["ZZQ", "UNK", "YYQ", "ZZQ", "MSE", "XXQ"]),
         ["A XXXXMX 1 2 3 4 5 6", "chain A: unknown residues are read as X: ZZQ (2), YYQ (1), XXQ (1)"]),
        (entry([row for row in peptide(["GLY", "ZZQ"]) if row["label_comp_id"] == "GLY" or row["label_atom_id"] != "N"],
               ["GLY", "ZZQ"]),
         ["A GX 1 2"]),
        # Force fields.
        (entry(peptide(["GLY", "HIE"]), ["GLY", "HIS"]), ["A GH 1 2"]),
        (entry(peptide(["GLY", "HIS"]), ["GLY", "HIE"]), ["A GH 1 2"]),
        # Residues in no chain: without a position in the sequence, and of an undeclared chain.
        (entry(peptide() + backbone("TRP", 9, label_seq_id=".", code="B"), GSAG),
         ["A GSAG 1 2 3 4", "unplaced TRP 9B of chain A"]),
        (entry(peptide() + backbone("TRP", 9, label_seq_id="?")[:2], GSAG), ["A GSAG 1 2 3 4"]),
        (entry(peptide() + backbone("TRP", 9, chain="W", label_entity_id=2), GSAG),
         ["A GSAG 1 2 3 4", "unplaced TRP 9 of chain W"]),
        (entry(peptide() + [row | {"auth_asym_id": "?"} for row in backbone("TRP", 9, chain="W", label_entity_id=2)],
               GSAG),
         ["A GSAG 1 2 3 4", "unplaced TRP 9"]),
        # Declared ligands are no residues, and calcium is none either.
        (entry(peptide() + backbone("TRP", 9, chain="W", label_entity_id=2, group_PDB="HETATM"), GSAG,
               more=loop("entity", ["id", "type"], [("1", "polymer"), ("2", "non-polymer")])),
         ["A GSAG 1 2 3 4"]),
        (entry(backbone("TRP", 9, label_seq_id=".", label_entity_id=2) + peptide(), GSAG,
               more=loop("entity", ["id", "type"], [("1", "polymer"), ("2", "non-polymer")])),
         ["A GSAG 1 2 3 4", "unplaced TRP 9 of chain A"]),
        (entry(peptide() + [row | {"label_comp_id": "CA"} for row in backbone("CA", 9, label_seq_id=".")], GSAG),
         ["A GSAG 1 2 3 4"]),
        # Placeholders. A single atom at the origin is an atom.
        (entry([*peptide()[:5], peptide()[5] | dict.fromkeys(("Cartn_x", "Cartn_y", "Cartn_z"), 0), *peptide()[6:]],
               GSAG),
         ["A GSAG 1 2 3 4"]),
        (entry([*peptide()[:4], *(row | dict.fromkeys(("Cartn_x", "Cartn_y", "Cartn_z"), 0) for row in peptide()[4:9]),
                *peptide()[9:]], GSAG),
         ["A GSAG 1 - 3 4", "residues with placeholder coordinates (0, 0, 0 or 9999) are read as not observed: 2"]),
    ],
)  # fmt: skip
def test_mmcif_files(text: str, wanted: list[str]) -> None:
    assert read(text) == wanted


def test_numbers_of_residues_without_atoms() -> None:
    rows = without(peptide(), 4) + without(peptide(chain="B", y=9.0), 1)
    more = scheme("A 0 70 x .", "A 4 74 x A", "A 5 75 x .", "B 1 81 x .", "C 1 91 x .")
    chains = parse_structure(entry(rows, GSAG, more=more)).chains
    assert [chain.author_numbers for chain in chains.values()] == [("1", "2", "3", "74A"), ("81", "2", "3", "4")]


def test_chains_of_ca_atoms_need_an_option(tmp_path: Path) -> None:
    path = tmp_path / "x.cif"
    rows = [row for row in peptide() if row["label_atom_id"] == "CA"]
    path.write_text(entry(rows + backbone("TRP", 9, label_seq_id="."), GSAG))
    with pytest.raises(UserError, match="a CA-only chain"):
        read_structure(path)
    assert told(read_structure(path, ca_only=True)) == ["A GSAG 1 2 3 4", "unplaced TRP 9 of chain A"]


def test_an_unknown_occupancy_is_one() -> None:
    mixed = [row | {"occupancy": "1.0", "label_alt_id": "A"} for row in backbone("SER", 1)]
    mixed += [row | {"occupancy": "?", "label_alt_id": "B"} for row in backbone("THR", 1)]
    assert read(entry(mixed + backbone("GLY", 2), ["SER/THR", "GLY"])) == ["A SG 1 2"]
    assert read(entry(mixed[4:] + mixed[:4] + backbone("GLY", 2), ["THR/SER", "GLY"])) == ["A TG 1 2"]


def moved(rows: list[Atom], model: int, y: float) -> list[Atom]:
    return [row | {"pdbx_PDB_model_num": model, "Cartn_y": float(str(row["Cartn_y"])) + y} for row in rows]


NMR = "_exptl.entry_id x\n_exptl.method 'SOLUTION NMR'\n#\n"
COPIES = "its 2 models are copies of an assembly, and all of them count"


def test_models_of_a_file_with_seqres() -> None:
    """Copies are suffixed, also without an author's name. Then the table of assemblies does not apply."""
    rows, ion = peptide(), [atom("CA", "CA", 9, label_seq_id=".", chain="Z", label_entity_id=2)]
    copies = rows + ion + moved(rows, 2, 50.0)
    assembly = assembly_text([("1", "1,2", "A")])
    structure = parse_structure(entry(copies, GSAG) + assembly, "x.cif")
    assert told(structure) == ["A GSAG 1 2 3 4", "A-2 GSAG 1 2 3 4", COPIES]
    assert structure.assembly().ids == ("A", "A-2")
    assert structure.chains["A-2"].positions[0, 1, 1] == 51.0
    unnamed = [row | {"auth_asym_id": "?"} for row in copies]
    assert read(entry(unnamed, GSAG)) == ["A GSAG 1 2 3 4", "A-2 GSAG 1 2 3 4", COPIES]
    for more, kind in ((NMR, "an NMR ensemble"), ("", "conformations of one structure")):
        ensemble = rows + moved(rows, 2, 50.0 if more else 0.5) + moved(rows, 3, 50.0 if more else 0.5)
        structure = parse_structure(entry(ensemble, GSAG, more=more) + assembly, "x.cif")
        assert told(structure) == ["A GSAG 1 2 3 4", f"only the first of 3 models counts ({kind})"]
        assert structure.chains["A"].positions[0, 1, 1] == 1.0
        assert len(structure.assembly().chains) == 2
    # The models may be mixed.
    mixed = [row for pair in zip(rows, moved(rows, 2, 0.5)) for row in pair]
    structure = parse_structure(entry(mixed, GSAG), "x.cif")
    np.testing.assert_array_equal(structure.chains["A"].positions[:, 1, 1], 1.0)
    longer = [*mixed, atom("OXT", "GLY", 4, pdbx_PDB_model_num=2)]
    np.testing.assert_array_equal(
        parse_structure(entry(longer, GSAG), "x.cif").chains["A"].mask, structure.chains["A"].mask
    )
    # Only CA of polymers counts for the comparison: the ions are in one place.
    far = rows + ion * 9 + moved(rows, 2, 50.0) + moved(ion * 9, 2, 0.0)
    assert told(parse_structure(entry(far, GSAG), "x.cif"))[-1] == COPIES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (entry(peptide(), GSAG, without=["label_comp_id", "label_atom_id"]),
         "atom_site has no column label_comp_id, label_atom_id. Pass a file with coordinates."),
        (entry(peptide(), ["GLY", "SER", "ALA", "GLY"], kind="polypeptide(D)"),
         "has no usable protein chain (A: polypeptide(d)). Pass a protein with all its atoms."),
        (entry([row for n in "ABCDE" for row in peptide(chain=n)], GSAG, kind="other"),
         "has no usable protein chain (A: other; B: other; C: other; D: other; and 1 more). "
         "Pass a protein with all its atoms."),
        (entry(backbone("HOH", 1, label_entity_id=2), GSAG),
         "has no usable protein chain. Pass a protein with all its atoms."),
        (entry(peptide() + backbone("TRP", 5), GSAG),
         "chain A has an atom of TRP at position 5 of its sequence, which has 1 to 4. "
         "The file contradicts itself: fetch it again."),
        (entry(peptide(["GLY", "TRP"]), GSAG),
         "chain A has an atom of TRP at position 2 of its sequence, which has SER. "
         "The file contradicts itself: fetch it again."),
        (entry(peptide(["GLY", "TRP"]), ["GLY", "SER/THR"]),
         "chain A has an atom of TRP at position 2 of its sequence, which has SER/THR. "
         "The file contradicts itself: fetch it again."),
        (entry(peptide() + backbone("GLY", 1, label_seq_id="0"), GSAG),
         "chain A has an atom of GLY at position 0 of its sequence, which has 1 to 4. "
         "The file contradicts itself: fetch it again."),
        (entry(peptide() + backbone("GLY", 1, label_seq_id="123456789012345678"), GSAG),
         "chain A has an atom of GLY at position 123456789012345678 of its sequence, which has 1 to 4. "
         "The file contradicts itself: fetch it again."),
        (entry(peptide() + backbone("GLY", 1, label_seq_id="1234567890123456789"), GSAG),
         "chain A has an atom of GLY at position 123456789012345678... of its sequence, which has 1 to 4. "
         "The file contradicts itself: fetch it again."),
        (entry(peptide(), GSAG).replace("1 3 ALA\n", "1 5 ALA\n"),
         "entity_poly_seq has residue 5 of entity 1 after 2 others. Fetch the file again."),
        (entry(peptide(), GSAG).replace("1 1 GLY\n", "1 0 GLY\n"),
         "entity_poly_seq has residue 0 of entity 1 after 0 others. Fetch the file again."),
        (entry([*peptide()[:5], peptide()[5] | {"Cartn_x": "nan"}, *peptide()[6:]], GSAG),
         "atom CA of residue 2 of chain A has a position that is not a number or far too large. "
         "Correct the file or remove the atom."),
        (entry([*peptide()[:8], peptide()[8] | {"Cartn_z": "1000000", "auth_seq_id": 77}, *peptide()[9:]], GSAG),
         "atom N of residue 77 of chain A has a position that is not a number or far too large. "
         "Correct the file or remove the atom."),
        (entry([*peptide()[:8], peptide()[8] | {"Cartn_y": "-1000000", "auth_seq_id": "?"}, *peptide()[9:]], GSAG),
         "atom N of residue 3 of chain A has a position that is not a number or far too large. "
         "Correct the file or remove the atom."),
        (entry(peptide(), GSAG) + entry(peptide(), GSAG).replace("data_TEST", "data_OTHER"),
         "has 2 data blocks with atoms (TEST, OTHER). Write one block to a file."),
        (entry(peptide(), GSAG).removesuffix("#\n") + "#\n#\n#\n" + "_a.b 1",
         "is truncated (it ends in the middle of a category). Fetch the file again."),
        ("data_X\n_atom_site.id 1\n", "has no atoms (_atom_site.Cartn_x). Pass a file with coordinates."),
        ("data_X\n_cell.length_a 3\n", "has no atoms. Pass an mmCIF or PDB file with coordinates."),
        ("text", "is not a structure file. Pass an mmCIF or PDB file with coordinates."),
    ],
)  # fmt: skip
def test_errors_of_mmcif_files(text: str, message: str) -> None:
    assert refusal(text) == message


def test_documents_and_names_that_are_no_text_are_refused() -> None:
    with pytest.raises(UserError) as caught:
        parse_structure(b"%PDF-1.4 _atom_site.", "x.cif")
    assert str(caught.value) == "x.cif: is a PDF document, not a structure. Pass an mmCIF or PDB file."
    damaged = entry(peptide(chain="@"), GSAG).encode().replace(b"@", b"'\xff'")
    with pytest.raises(UserError) as caught:
        parse_structure(damaged, "x.cif")
    assert str(caught.value) == "x.cif: is damaged: it has names that are not text. Fetch the file again."


def test_what_is_within_the_limits_is_read() -> None:
    far = [*peptide()[:8], peptide()[8] | {"Cartn_z": "999999", "Cartn_y": "-999999"}, *peptide()[9:]]
    assert read(entry(far, GSAG)) == ["A GSAG 1 2 3 4"]
    # A file that does not write '#' after each category need not end with one.
    text = entry(peptide(), GSAG)
    assert text.count("\n#") == 5
    assert read(text.replace("\n#", "", 1).removesuffix("\n#\n") + "\n") == ["A GSAG 1 2 3 4"]
    # Other atoms are skipped: of ligands, hydrogens, and atoms that the residue type does not have.
    odd = [atom("CB", "GLY", 1), atom("OXT", "GLY", 4), atom("H", "GLY", 1), atom("XX", "SER", 2, "nan")]
    chain = parse_structure(entry(peptide() + odd, GSAG), "x.cif").chains["A"]
    assert chain.mask.sum(1).tolist() == [4, 4, 4, 5]
    assert chain.mask[3, ATOM_ORDER["OXT"]] == 1


@pytest.mark.parametrize(
    ("change", "source", "name"),
    [
        (("_entry.id TEST", "_entry.id 1ABC"), "x.cif", "1abc"),
        (("_entry.id TEST", "_entry.id longer-ID"), "x.cif", "longer-ID"),
        (("_entry.id TEST", "_entry.id XXXX"), "dir/name.of.file.cif", "name"),
        (("_entry.id TEST", "_entry.id model"), "dir/name.cif.gz", "name"),
        (("_entry.id TEST", "_entry.id ?"), "x.cif", "test"),
        (("_entry.id TEST", "_entry.id ''"), "x.cif", "test"),
        (("data_TEST\n#\n_entry.id TEST", "data_model\n_entry.id ."), "x.cif", "x"),
    ],
)
def test_ids(change: tuple[str, str], source: str, name: str) -> None:
    assert parse_structure(entry(peptide(), GSAG).replace(*change), source).id == name


@pytest.mark.parametrize(
    ("more", "method"),
    [
        ("", None),
        ("_exptl.method ?\n", None),
        ("_exptl.method 'X-ray diffraction'\n", "X-RAY DIFFRACTION"),
        (
            "loop_\n_exptl.method\n'X-ray diffraction'\n'neutron diffraction'\n",
            "X-RAY DIFFRACTION; NEUTRON DIFFRACTION",
        ),
    ],
)
def test_methods(more: str, method: str | None) -> None:
    assert parse_structure(entry(peptide(), GSAG, more=more)).method == method


@pytest.mark.parametrize(
    ("values", "resolution"),
    [
        (("?", "?", "?"), None),
        (("0.0", "0", "-1"), None),
        (("0.0", "3.5", "2.5"), 3.5),
        (("-1", "?", "2.5"), 2.5),
        (("1.5(2)", "3.5", "2.5"), 1.5),
        (("x", ".", "2.5"), 2.5),
    ],
)
def test_resolutions(values: tuple[str, str, str], resolution: float | None) -> None:
    tags = ("_refine.ls_d_res_high", "_em_3d_reconstruction.resolution", "_reflns.d_resolution_high")
    more = "".join(f"{tag} {value}\n" for tag, value in zip(tags, values))
    assert parse_structure(entry(peptide(), GSAG, more=more)).resolution == resolution


@pytest.mark.parametrize(
    ("kind", "sequence", "wanted"),
    [
        ("polypeptide(L)", GSAG, "kept"),
        ("POLYPEPTIDE(L)", GSAG, "kept"),
        ("?", GSAG, "kept"),
        ("?", ["GLY", "SER", "DA"], "kept"),
        ("?", ["GLY", "DA", "DA", "SER"], "no polypeptide"),
        ("?", ["DA", "DA", "DA", "SER"], "no polypeptide"),
        ("polydeoxyribonucleotide", GSAG, "polydeoxyribonucleotide"),
    ],
)
def test_kinds_of_polymers(kind: str, sequence: list[str], wanted: str) -> None:
    """Without a declared type, more than half of the residues must be amino acids."""
    text = write_mmcif("x", [random_chain("P", "GSAG", seed=3)])
    assert "1 polypeptide(L) GSAG P\n" in text
    rows = [row | {"label_entity_id": 2} for row in peptide(sequence, chain="Q")]
    other = entry(rows, [], without=["B_iso_or_equiv"])
    table = other[other.index("loop_") :]
    both = entry(peptide(chain="P", y=90.0), GSAG)
    both = both.replace("_entity_poly.entity_id 1\n_entity_poly.type 'polypeptide(L)'\n", "")
    both = both.replace(
        "loop_\n_entity_poly_seq",
        f"loop_\n_entity_poly.entity_id\n_entity_poly.type\n1 'polypeptide(L)'\n2 '{kind}'\n#\nloop_\n_entity_poly_seq",
        1,
    ).replace("'?'", "?")
    both = both.replace(
        "1 4 GLY\n#", "1 4 GLY\n" + "".join(f"2 {i} {name}\n" for i, name in enumerate(sequence, 1)) + "#"
    )
    both = both.removesuffix("#\n") + table[table.index("ATOM ") :]
    structure = parse_structure(both, "x.cif")
    assert ("Q" in structure.chains) == (wanted == "kept")
    assert structure.dropped == ({} if wanted == "kept" else {"Q": wanted})
    assert {chain.id: chain.entity for chain in structure.chains.values()}.items() <= {"P": "1", "Q": "2"}.items()


def test_b_factors_are_those_of_ca() -> None:
    chain = random_chain("A", "GSKW", missing=[1])
    chain.mask[2, ATOM_ORDER["CA"]] = 0
    values = np.arange(4 * 37, dtype=np.float64).reshape(4, 37)
    text = write_mmcif("x", [chain], b_factors=[values])
    b_factors = parse_structure(text).chains["A"].b_factors
    ca = ATOM_ORDER["CA"]
    np.testing.assert_array_equal(b_factors, [values[0, ca], np.nan, np.nan, values[3, ca]])
    # A file without the column has none.
    none = parse_structure(entry(peptide(), GSAG)).chains["A"].b_factors
    assert np.isnan(none).all()


def test_assemblies_are_in_the_order_of_their_list() -> None:
    rows = [("3", "1", "A"), ("1", "2", "A"), ("2", "1", "A"), ("4", "1", "A")]
    listing = loop("pdbx_struct_assembly", ["id"], [["1"], ["2"], ["3"]])
    text = assembly_text(rows)
    structure = parse_structure(entry(peptide(), GSAG) + listing + text[text.index("#\n") + 2 :], "x.cif")
    table = structure.assemblies
    assert table.ids == ["1", "2", "3", "4"]
    assert table.generators == (rows[1], rows[2], rows[0], rows[3])
    assert (table.source, table.names, table.entities) == ("x.cif", {"A": "A"}, {"A": "1"})
    assert table.operators["3"] == ("1", "0", "0", "0", "0", "1", "0", "0", "0", "0", "1", "7")
    assert set(table.operators) == {"1", "2", "3", "X0"}


# ---- dates


HISTORY = "loop_\n_pdbx_audit_revision_history.ordinal\n_pdbx_audit_revision_history.revision_date\n1 2011-07-13\n#\n"


def test_the_date_needs_the_header_only(tmp_path: Path) -> None:
    path = tmp_path / "x.cif"
    text = entry(peptide(), GSAG, more=HISTORY)
    path.write_text(text)
    assert read_release_date(path) == date(2011, 7, 13)
    # The loop of the atoms is damaged.
    path.write_text(text[: text.index("ATOM") + 30])
    assert read_release_date(path) == date(2011, 7, 13)
    with pytest.raises(UserError):
        parse_structure(path.read_bytes())
    # The date is after the atoms.
    path.write_text(entry(peptide(), GSAG) + HISTORY)
    assert read_release_date(path) == date(2011, 7, 13)
    path.write_text(entry(peptide(), GSAG))
    assert read_release_date(path) is None
    with pytest.raises(UserError, match=r"x\.cif"):
        read_release_date(path, limit=100)
    path.write_text("_pdbx_audit_revision_history.revision_date 2011-07-13\nloop_\n_atom_site.id\n")
    with pytest.raises(UserError, match="is truncated, or not valid mmCIF"):
        read_release_date(path)


# ---- parts


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1),
        ("0", 0),
        ("007", 7),
        ("9" * 18, int("9" * 18)),
        ("9" * 19, 0),
        ("-1", 0),
        ("?", 0),
        ("1.0", 0),
        ("", 0),
    ],
)
def test_positions_in_a_sequence(text: str, number: int) -> None:
    assert parse_seq_id(text) == number


def choose_by_loops(altlocs: list[str], occupancies: list[str], residues: list[int], atoms: list[int]) -> list[int]:
    """Apply the rules of `_choose_conformations` residue by residue."""
    values = [1.0 if text in ".?" else float(text) for text in occupancies]
    chosen = []
    for residue in sorted(set(residues)):
        rows = [i for i, other in enumerate(residues) if other == residue]
        places = list(dict.fromkeys(altlocs[i] for i in rows if altlocs[i] not in ".?"))
        # Equal means are decided by the order in the file.
        order = list(dict.fromkeys(altlocs))
        places.sort(key=order.index)
        means = {p: np.mean([values[i] for i in rows if altlocs[i] == p]) for p in places}
        best = max(places, key=lambda place: means[place], default=None)
        for name in sorted({atoms[i] for i in rows}):
            candidates = [i for i in rows if atoms[i] == name]
            preferred = [i for i in candidates if altlocs[i] in (".", "?", best)]
            chosen.append(max(preferred or candidates, key=lambda i: values[i]))
    return sorted(chosen)


def test_conformations_are_chosen_residue_by_residue() -> None:
    rng = np.random.default_rng(0)
    for _ in range(400):
        count = int(rng.integers(1, 14))
        residues, atoms = rng.integers(0, 3, count), rng.integers(0, 3, count)
        altlocs = rng.choice(list(".?ABC" if rng.random() < 0.8 else ".?"), count).tolist()
        occupancies = rng.choice(["0.0", "0.25", "0.5", "?"], count).tolist()
        # Rows of other molecules precede.
        columns = {"label_alt_id": ["A", *altlocs], "occupancy": ["0.9", *occupancies]}
        picked = mmcif._choose_conformations(columns, np.arange(1, count + 1), residues, atoms)
        assert picked.tolist() == choose_by_loops(altlocs, occupancies, residues.tolist(), atoms.tolist())


def test_nitrogens_of_each_arginine_are_swapped_on_their_own() -> None:
    atoms = []
    for place, (first, second) in enumerate(((4.0, 3.0), (3.0, 4.0), (3.0, 3.0), (4.0, None), (None, 4.0)), 1):
        atoms += backbone("ARG", place) + [atom("CD", "ARG", place, 0.0)]
        atoms += [atom("NH1", "ARG", place, first)] if first is not None else []
        atoms += [atom("NH2", "ARG", place, second)] if second is not None else []
    # Without CD, the distances are unknown.
    atoms += backbone("ARG", 6) + [atom("NH1", "ARG", 6, 40.0), atom("NH2", "ARG", 6, 30.0)]
    chain = parse_structure(entry(atoms + backbone("LYS", 7), ["ARG"] * 6 + ["LYS"])).chains["A"]
    columns = [ATOM_ORDER["NH1"], ATOM_ORDER["NH2"]]
    assert chain.positions[:, columns, 0].tolist() == [[3, 4], [3, 4], [3, 3], [4, 0], [0, 4], [40, 30], [0, 0]]
    assert chain.mask[:, columns].tolist() == [[1, 1], [1, 1], [1, 1], [1, 0], [0, 1], [1, 1], [0, 0]]


def test_every_atom_gets_its_own_column() -> None:
    chain = random_chain("A", "ARNDCQEGHILKMFPSTWYV")
    structure: Structure = parse_structure(write_mmcif("x", [chain]))
    np.testing.assert_allclose(structure.chains["A"].positions, chain.positions, atol=6e-4)
    assert len(ATOM_TYPES) == chain.mask.shape[1]
    assert structure.chains["A"].residue_index.tolist() == list(range(20))
    assert structure.chains["A"].positions.dtype == structure.chains["A"].mask.dtype == np.float32
