"""Read PDB files and mmCIF files without SEQRES: chains, numbers, notes and errors of whole files, case by case."""

from datetime import date

import gemmi
import numpy as np
import pytest

from tests.data.structure.test_awkward_files import MMCIF, Atom, Written, models, pdb_chain, plain
from warpfold.data.structure import pdb
from warpfold.data.structure.chain import Structure
from warpfold.data.structure.mmcif import parse_structure
from warpfold.data.structure.separate import Residue, SeparatedChain
from warpfold.errors import UserError


def lines_of(sequence: str, name: str = "A", y: float = 0.5, first: int = 1, **options: dict[int, str]) -> str:
    """Return the ATOM lines of a chain of bonded residues, numbered from `first`."""
    numbers = tuple((i + first, "") for i in range(len(sequence)))
    return pdb_chain(Written(sequence, (0.5, y, 0.5), numbers), name, **options)  # type: ignore[arg-type]


def told(structure: Structure) -> list[str]:
    """Describe the chains, with "-" for residues without atoms, and all remarks."""
    chains = []
    for chain in structure.chains.values():
        seen = chain.mask.any(1)
        numbers = " ".join(number if here else "-" for number, here in zip(chain.author_numbers, seen))
        chains.append(f"{chain.id} {chain.sequence} {numbers}")
    dropped = [f"dropped {name}: {reason}" for name, reason in structure.dropped.items()]
    return [*chains, *dropped, *(f"unplaced {name}" for name in structure.unplaced), *structure.notes]


def read(text: str) -> list[str]:
    return told(parse_structure(text, "dir/file.pdb"))


def refusal(text: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_structure(text, "x.pdb")
    return str(caught.value)


GAST = "A GAST 1 2 3 4"
LIGAND = Atom("C1", "", "HEM", "A", (200, ""), (5, 5, 5), "", "HETATM").line(99) + "\n"
WATER = Atom("O", "", "HOH", "A", (300, ""), (50, 50, 50), "", "HETATM").line(99) + "\n"
COPIES = "its 2 models are copies of an assembly, and all of them count"
RENAMED = "chains with blank or repeated names were renamed: "


def two_letters(text: str) -> str:
    """Write chain A as AA."""
    return "\n".join(f"{line[:20]}AA{line[22:]}" if line[21:22] == "A" else line for line in text.split("\n"))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (lines_of("GAST"), [GAST]),
        (lines_of("GAST") + "TER\n" + LIGAND + WATER + "END\n", [GAST]),
        (lines_of("GAST") + "END\n" + LIGAND + WATER + "END\n", [GAST]),
        (two_letters(lines_of("GAST")) + "END\n", ["AA GAST 1 2 3 4"]),
        (lines_of("GAST", first=-2), ["A GAST -2 -1 0 1"]),
        # Names of force fields, of three and four letters.
        (lines_of("GHST", residues={0: "NGLY", 1: "HSD"}), ["A GHST 1 2 3 4"]),
        (lines_of("GHST", residues={1: "HISE", 3: "CTHR"}), ["A GHST 1 2 3 4"]),
        ("SEQRES   1 A    5  GLY HIE SER THR ALA\n" + lines_of("GHST", residues={1: "HID"}) + "TER\nEND\n",
         ["A GHSTA 1 2 3 4 -"]),
        # Repeated names: without and with TER or END, with a free name in the file.
        (lines_of("GAST") + lines_of("VLK", y=40.5) + "END\n",
         [GAST, "A-2 VLK 1 2 3", RENAMED + "A-2 (residues 1 to 3)"]),
        (lines_of("GAST") + "END\n" + lines_of("VLK", y=40.5, first=7) + "END\n",
         [GAST, "A-2 VLK 7 8 9", RENAMED + "A-2 (residues 7 to 9)"]),
        (lines_of("GAST") + two_letters(lines_of("VLK", y=40.5)) + "TER\n" + lines_of("WY", y=80.5) + "END\n",
         [GAST, "AA VLK 1 2 3", "A-2 WY 1 2", RENAMED + "A-2 (residues 1 to 2)"]),
        ("".join(lines_of("GA", "", y=40.0 * i) + "TER\n" for i in range(8)),
         [*(f"{name} GA 1 2" for name in "ABCDEFGH"),
          RENAMED + ", ".join(f"{name} (residues 1 to 2)" for name in "ABCDEF") + ", and 2 more"]),
        # Models: copies, an ensemble, an NMR ensemble of one structure that moves, models separated by END.
        (models(lines_of("GAST"), lines_of("GAST", y=30.5)),
         [GAST, "A-2 GAST 1 2 3 4", COPIES, RENAMED + "A-2 (residues 1 to 4 of model 2)"]),
        (models(lines_of("GAST") + two_letters(lines_of("VLK", y=60.5)),
                lines_of("GAST", y=130.5) + two_letters(lines_of("VLK", y=190.5))),
         [GAST, "AA VLK 1 2 3", "A-2 GAST 1 2 3 4", "AA-2 VLK 1 2 3", COPIES,
          RENAMED + "A-2 (residues 1 to 4 of model 2), AA-2 (residues 1 to 3 of model 2)"]),
        (models(lines_of("GAST"), lines_of("GAST", y=1.0)),
         [GAST, "only the first of 2 models counts (conformations of one structure)"]),
        ("EXPDTA    NMR\n" + models(lines_of("GAST"), lines_of("GAST", y=30.5)),
         [GAST, "only the first of 2 models counts (an NMR ensemble)"]),
        ("EXPDTA    SOLUTION\nEXPDTA   2NMR, 20 MODELS\n" + models(lines_of("GAST"), lines_of("GAST", y=30.5)),
         [GAST, "only the first of 2 models counts (an NMR ensemble)"]),
        # Segments distinguish the CA of chains without names.
        (models(*(pdb_chain(plain("GAST", y), "", "PROA") + pdb_chain(plain("VLK", y + 20), "", "PROB")
                  for y in (0.5, 100.5))),
         ["A GAST 1 2 3 4", "B VLK 1 2 3", "C GAST 1 2 3 4", "D VLK 1 2 3", COPIES,
          RENAMED + "A (residues 1 to 4 of model 1), B (residues 1 to 3 of model 1), "
          "C (residues 1 to 4 of model 2), D (residues 1 to 3 of model 2)"]),
        # A model that does not count may have unreadable positions.
        ("EXPDTA    NMR\n" + models(lines_of("GAST"), lines_of("GAST", y=1.0).replace("   1.240", "********")),
         [GAST, "only the first of 2 models counts (an NMR ensemble)"]),
        # SEQRES: by name, in the order of the file, for copies in models, and unclear.
        ("SEQRES   1 A    5  GLY ALA SER THR TRP\n" + lines_of("GAST") + "END\n", ["A GASTW 1 2 3 4 -"]),
        ("SEQRES   1 A    5  GLY ALA SER THR TRP\n" + models(lines_of("GAST"), lines_of("GAST", y=30.5)),
         ["A GASTW 1 2 3 4 -", "A-2 GASTW 1 2 3 4 -", COPIES, RENAMED + "A-2 (residues 1 to 4 of model 2)"]),
        ("SEQRES   1 A    5  GLY ALA SER THR TRP\n" + lines_of("GAST") + lines_of("GAST", y=30.5) + "END\n",
         [GAST, "A-2 GAST 1 2 3 4", RENAMED + "A-2 (residues 1 to 4)",
          "SEQRES of chain A is left out: 2 chains have this name"]),
        ("SEQRES   1      5  GLY ALA SER THR TRP\n" + lines_of("GAST", "") + lines_of("GAST", "", y=30.5) + "END\n",
         [GAST, "B GAST 1 2 3 4", RENAMED + "A (residues 1 to 4), B (residues 1 to 4)",
          "SEQRES of chain without a name is left out: 2 chains have this name"]),
        ("SEQRES   1 A    5  GLY ALA SER THR TRP\nSEQRES   1 A    3  VAL LEU LYS\nSEQRES   1 B    3  VAL LEU LYS\n"
         + lines_of("GAST") + "TER\n" + lines_of("VLK", y=30.5) + "END\n",
         ["A GASTW 1 2 3 4 -", "A-2 VLK 1 2 3", RENAMED + "A-2 (residues 1 to 3)"]),
        ("SEQRES   1 A   15  GLY ALA SER THR GLY ALA SER THR GLY ALA SER THR GLY\nSEQRES   2 A   15  TRP TYR\n"
         + lines_of("GASTGASTGASTGWY") + "END\n", ["A GASTGASTGASTGWY " + " ".join(map(str, range(1, 16)))]),
        # Positions in the sequence: the author's numbers, with the smallest shift if they do not fit.
        ("SEQRES   1 A    4  GLY ALA GLY ALA\n" + lines_of("GA", first=3) + "END\n", ["A GAGA - - 3 4"]),
        ("SEQRES   1 A    4  GLY ALA GLY ALA\n" + lines_of("GA", first=1) + "END\n", ["A GAGA 1 2 - -"]),
        ("SEQRES   1 A    4  GLY ALA GLY ALA\n" + lines_of("GA", first=11) + "END\n", ["A GAGA 11 12 - -"]),
        ("SEQRES   1 A    4  GLY ALA GLY ALA\n" + lines_of("GA", first=-7) + "END\n", ["A GAGA -7 -6 - -"]),
        ("SEQRES   1 A    5  TRP GLY ALA GLY ALA\n" + lines_of("GAGA", first=5) + "END\n", ["A WGAGA - 5 6 7 8"]),
        # A ligand may have an atom called CA.
        (lines_of("GAST") + "TER\n" + Atom("CA", "", "XYZ", "A", (1, ""), (9, 60, 9), "", "HETATM").line(9) + "\nEND\n",
         [GAST]),
        # Bonded segments are one chain.
        (pdb_chain(plain("GAST"), "A", "X").replace(" X  ", " Y  ", 8), [GAST]),
        # A free amino acid after TER is a ligand.
        (lines_of("GAST") + "TER\n" + lines_of("G", y=60.5, first=90).replace("ATOM  ", "HETATM") + "END\n",
         [GAST, "amino acids outside of chains are read as ligands: GLY 90 of chain A"]),
        (lines_of("GAST") + "TER\n" + lines_of("G", "B", y=60.5).replace("ATOM  ", "HETATM") + "END\n",
         [GAST, "amino acids outside of chains are read as ligands: GLY 1 of chain B"]),
        # Residues beyond the sequence.
        ("SEQRES   1 A    4  GLY ALA SER THR\n" + lines_of("GASTW") + "TER\nEND\n",
         [GAST, "unplaced TRP 5 of chain A"]),
    ],
)  # fmt: skip
def test_pdb_files(text: str, wanted: list[str]) -> None:
    assert read(text) == wanted


def test_the_header() -> None:
    header = (
        f"{'HEADER    HYDROLASE':<50}16-DEC-97   1ABC\nREVDAT   1   08-APR-98 1ABC    0\nEXPDTA    X-RAY DIFFRACTION\n"
        "REMARK   2 RESOLUTION.    2.07 ANGSTROMS.\n"
    )
    assembly = "REMARK 350 BIOMOLECULE: 1\nREMARK 350 APPLY THE FOLLOWING TO CHAINS: B\n" + "".join(
        f"REMARK 350   BIOMT{row + 1}   1  {'  '.join(f'{float(row == k):8.6f}' for k in range(3))}        0.00000\n"
        for row in range(3)
    )
    chains = lines_of("GAST") + "TER\n" + lines_of("VLK", "B", y=40.5) + "TER\nEND\n"
    structure = parse_structure(header + assembly + chains, "x.pdb")
    facts = (structure.id, structure.method, structure.resolution, structure.release_date)
    assert facts == ("1abc", "X-RAY DIFFRACTION", 2.07, date(1998, 4, 8))
    assert structure.assembly().ids == ("B",)
    # REMARK 350 refers to chains by names that are ambiguous here.
    repeated = parse_structure(header + assembly + chains + lines_of("VLK", "B", y=80.5) + "END\n", "x.pdb")
    assert repeated.assembly().ids == ("A", "B", "B-2")
    assert repeated.method == "X-RAY DIFFRACTION"
    unknown = header.replace("2.07", "0.00")
    assert parse_structure(unknown + chains, "x.pdb").resolution is None
    assert parse_structure(header.replace("2.07", "0.95") + chains, "x.pdb").resolution == 0.95


def test_what_is_cut_is_refused() -> None:
    text = lines_of("GAST").rstrip("\n")
    assert len(text.rpartition("\n")[2]) > 60
    start = text.rindex("\n") + 1
    cut = "x.pdb: is truncated (it ends in the middle of an atom). Fetch the file again."
    assert refusal(text[: start + 53]) == refusal(text[: start + 53] + "\n\n") == cut
    assert refusal(text[: start + 40] + " " * 30) == cut
    assert read(text[: start + 54]) == [GAST]
    assert refusal(text.replace("ATOM  ", "HETATM")[: start + 50]) == cut
    assert read(text[: start - 1] + "\nTER") == ["A GAST 1 2 3 4"]
    seqres = "SEQRES   1 A    4  GLY ALA SER THR\n"
    message = "x.pdb: is truncated (it has SEQRES but no END). Fetch it again, or add END if it is complete."
    assert refusal(seqres + text) == refusal("REMARK\n" + seqres + text) == message
    assert read(seqres + text + "\nENDMDL\n") == [GAST]
    assert refusal("HEADER    X\nEND\n") == "x.pdb: has no atoms. Pass a file with coordinates."
    assert refusal("HEADER    X\nTER\nMODEL        1\nENDMDL\nEND\n") == (
        "x.pdb: has no atoms. Pass a file with coordinates."
    )


@pytest.mark.parametrize("column", [30, 38, 46])
def test_a_position_that_is_not_a_number_is_named(column: int) -> None:
    first, *others = lines_of("GAST").splitlines()
    bad = "\n".join([first[:column] + " " * 5 + "***" + first[column + 8 :], *others])
    assert refusal(bad) == (
        "x.pdb: atom 0  N   GLY A   1 has a position that is not a number. Correct the file or remove the atom."
    )


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("   7 ", (7, "")),
        ("   7AB", (7, "A")),
        ("  -7A", (-7, "A")),
        ("9999B", (9999, "B")),
        ("A000 ", (10_000, "")),
        ("A00Z ", (10_035, "")),
        ("ZZZZC", (1_223_055, "C")),
        ("a000 ", (1_223_056, "")),
        (" A00 ", (0, "")),
        ("1A00 ", (0, "")),
        ("A-00 ", (0, "")),
        ("Ä000 ", (0, "")),
        ("A0\u00b20 ", (0, "")),
        ("     ", (0, "")),
    ],
)
def test_residue_numbers(text: str, key: tuple[int, str]) -> None:
    assert pdb._residue_key("ATOM      1  CA  GLY A" + text) == key


@pytest.mark.parametrize(
    ("record", "day"),
    [
        *(
            (f"REVDAT   1   07-{month}-98 1ABC", f"1998-{i:02d}-07")
            for i, month in enumerate(
                ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"], 1
            )
        ),
        ("HEADER\nREVDAT   2   07-JAN-12\nREVDAT   1   31-DEC-71", "1971-12-31"),
        ("REVDAT   1   01-JAN-70", "2070-01-01"),
        ("REVDAT   1   01-JAN-00", "2000-01-01"),
        ("REVDAT   1   07-XYZ-98", None),
        ("REVDAT   1   07-ANF-98", None),
        ("REVDAT   1   07-NFE-98", None),
        ("REVDAT   2   07-JAN-98", None),
        ("", None),
    ],
)
def test_dates_of_release(record: str, day: str | None) -> None:
    assert pdb._parse_release_date(record.encode()) == day


def test_sections_end_where_a_model_may_end() -> None:
    lines = [
        "HEADER", "ATOM      1", "TER", "END", "HETATM", "ENDMDL", "MODEL 2", "TER", "ATOM  2", "ANISOU", "MODEL 3",
        "END", "ATOM  3", "TERMINUS",
    ]  # fmt: skip
    assert pdb._split_sections(lines) == [(0, [1, 2]), (0, [4]), (1, [7, 8]), (2, [12, 13])]
    assert pdb._split_sections(["ATOM", "END"]) == [(0, [0])]
    assert pdb._split_sections(["TER", "END"]) == []


FULL = "ATOM  99999 HD11AVALXY1234C***1000.1252000.2503000.500***1.00***0.00****SEGI**"


def test_fields_fill_their_columns() -> None:
    """Each field is read to its last column, and not beyond."""
    alpha = FULL.replace(" HD11A", "  CA B")
    (residue,) = pdb._read_residues([FULL, alpha], [(3, [0, 1])], "x")
    assert (residue.model, residue.chain, residue.segment) == (3, "XY", "SEGI")
    assert (residue.key, residue.name, residue.rows) == ((1234, "C"), "VAL", [0, 1])
    assert residue.altlocs == {"HD11": "A", "CA": "B"}
    assert {name: xyz.tolist() for name, xyz in residue.atoms.items()} == {"CA": [1000.125, 2000.25, 3000.5]}
    (long,) = pdb._read_residues([FULL.replace("VALXY", "HISEY")], [(0, [0])], "x")
    assert (long.name, long.chain) == ("HISE", "Y")
    (blank,) = pdb._read_residues(["ATOM      1  CA" + " " * 15 + "   1.000" * 3], [(0, [0])], "x")
    assert (blank.altlocs, blank.name, blank.chain, blank.segment) == ({"CA": " "}, "", "", "")


@pytest.mark.parametrize(
    ("column", "letter", "same"),
    [
        (16, "B", True),
        *((column, "B", False) for column in range(17, 22)),
        *((column, "9", False) for column in range(22, 26)),
        (26, "B", False),
        (27, "B", True),
        (60, "9", True),
        (71, "B", True),
        *((column, "B", False) for column in range(72, 76)),
        (76, "B", True),
    ],
)
def test_columns_that_identify_a_residue(column: int, letter: str, same: bool) -> None:
    other = FULL.replace(" HD11A", " HD12A")
    other = other[:column] + letter + other[column + 1 :]
    assert len(pdb._read_residues([FULL, other], [(0, [0, 1])], "x")) == 2 - same


def test_alphas_of_models_are_read_from_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list] = []
    original = pdb.collect_alphas

    def collect(order: range, alphas: list) -> list:
        seen.append(alphas)
        return original(order, alphas)

    monkeypatch.setattr(pdb, "collect_alphas", collect)
    alpha = FULL.replace(" HD11A", "  CA  ")
    ion = FULL.replace(" HD11A", " CA   ")
    pdb.read("\n".join(["MODEL 1", FULL, alpha, ion, "ENDMDL", "MODEL 2", alpha, "END"]).encode(), "x")
    key = ("XYSEGI", (1234, "C"))
    assert seen == [[(number, key, (1000.125, 2000.25, 3000.5)) for number in (0, 1)]]


def test_seqres_fills_its_columns() -> None:
    """A set of records of a chain starts where the serial number does not grow."""
    lines = [
        "SEQRES 199 AB12345  GLY ALA",
        "SEQRES 200 AB12345  SER",
        "SEQRES   1  B    1  VAL",
        "SEQRES   1 AB    3  GLY ALA SER",
        "SEQRES   x  C    1  THR",
        "SEQRES   x  C    1  TRP",
    ]
    lines = [line.replace(" AB12345", "AB12345 ").replace("  B ", " B  ").replace(" AB ", "AB  ") for line in lines]
    lines = [line.replace("  C ", " C  ") for line in lines]
    chains = []
    for name in ("AB", "AB", "B", "C", "C"):
        chain = SeparatedChain(0, name, "", name)
        chain.add([Residue(0, name, "", (1, ""), "GLY", False, False, altlocs={"CA": " "})])
        chains.append(chain)
    notes: list[str] = []
    records = [
        (chain, [line[7:10].strip() for line in rows]) for chain, rows in pdb._assign_seqres(lines, chains, notes)
    ]
    assert [chain for chain, _ in records] == chains
    assert [serials for _, serials in records] == [["199", "200"], ["1"], ["1"], ["x"], ["x"]]
    assert notes == []
    # Old files have the entry and a line number in the last columns.
    full = "SEQRES   1 A   13  " + " ".join(["GLY"] * 13) + "A1ABC  99\n"
    assert len(full) > 71
    assert read(full + lines_of("G" * 13) + "END\n") == ["A " + "G" * 13 + " " + " ".join(map(str, range(1, 14)))]


# ---- sequences from coordinates


def peptide(numbers: list[int], distances: list[float], icodes: str = "", labels: list[int] = []) -> gemmi.Chain:  # noqa: B006
    """Make GLY of these numbers. distances: of C to the next N."""
    chain, z = gemmi.Chain("A"), 0.0
    for i, number in enumerate(numbers):
        residue = gemmi.Residue()
        residue.name = ("GLY", "ALA", "SER", "THR")[i % 4]
        residue.seqid = gemmi.SeqId(number, icodes[i] if icodes else " ")
        if labels:
            residue.label_seq = labels[i]
        for name, shift in (("N", 0.0), ("CA", 1.0), ("C", 2.0)):
            atom = gemmi.Atom()
            atom.name, atom.pos = name, gemmi.Position(0, 0, z + shift)
            residue.add_atom(atom)
        z += 2.0 + (distances[i] if i < len(distances) else 0.0)
        chain.add_residue(residue)
    return chain


@pytest.mark.parametrize(
    ("numbers", "distance", "gap"),
    [
        ([1, 2], 3.0, 0),
        ([1, 3], 3.0, 1),
        ([1, 3], 1.99, 0),
        ([1, 3], 2.01, 1),
        ([-1, 200], 3.0, 200),
        ([-1, 201], 3.0, 0),
        ([5, 4], 3.0, 0),
        ([5, 5], 3.0, 0),
    ],
)
def test_gaps_of_the_numbers_are_unknown_residues(numbers: list[int], distance: float, gap: int) -> None:
    residues = list(peptide(numbers, [distance]))
    sequence = ["GLY", *["UNK"] * gap, "ALA"]
    assert pdb._derive_sequence(residues) == (sequence, [1, gap + 2])
    # Numbers of label_seq_id come first, if all residues have one.
    labelled = list(peptide([7, 8], [distance], labels=numbers))
    assert pdb._derive_sequence(labelled) == (sequence, [1, gap + 2])
    labelled[0].label_seq = None
    assert pdb._derive_sequence(labelled) == (["GLY", "ALA"], [1, 2])


@pytest.mark.parametrize(
    ("numbers", "icodes", "seq_ids"),
    [
        ([1, 2, 3, 4], "", [1, 2, 3, 4]),
        ([2, 3, 4, 5], "", [1, 2, 3, 4]),
        ([6, 7, 8, 9], "", [1, 2, 3, 4]),
        ([5, 6, 7, 8], "", [5, 6, 7, 8]),
        ([0, 1, 2, 3], "", [1, 2, 3, 4]),
        ([-9, -8, -7, -6], "", [1, 2, 3, 4]),
        ([1, 2, 3, 8], "", [1, 2, 3, 8]),
        ([101, 102, 103, 108], "", [1, 2, 3, 8]),
        ([1, 2, 3, 5], "", None),
        ([1, 2, 3, 12], "", None),
        ([1, 2, 3, 4], "   A", None),
    ],
)
def test_numbers_that_fit_the_sequence(numbers: list[int], icodes: str, seq_ids: list[int] | None) -> None:
    residues = list(peptide(numbers, [], icodes))
    assert pdb._number_by_author(residues, ["GLY", "ALA", "SER", "THR"] * 2) == seq_ids
    assert pdb._number_by_author(residues[:1], ["ALA", "GLY"]) == [2]


# ---- mmCIF without SEQRES


def rows_of(sequence: str, chain: str = "A", y: float = 0.5, model: int = 1, first: int = 1, **changes: str) -> str:
    """Convert the rows of `lines_of` to mmCIF. changes: values of fields of `Atom`."""
    text = ""
    for line in lines_of(sequence, chain, y, first).splitlines():
        xyz = tuple(float(line[k : k + 8]) for k in (30, 38, 46))
        fields = {"name": line[12:16].strip(), "altloc": "", "residue": line[17:20], "segment": chain} | changes
        text += Atom(chain=chain, number=(int(line[22:26]), ""), xyz=xyz, **fields).row(model) + "\n"  # type: ignore[arg-type]
    return text


NMR = "_exptl.entry_id x\n_exptl.method 'SOLUTION NMR'\n"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (MMCIF + rows_of("GAST"), [GAST]),
        (MMCIF + rows_of("GAST") + rows_of("VLK", "B", 40.5, first=7), [GAST, "B VLK 7 8 9"]),
        (MMCIF + rows_of("GAST") + rows_of("VLK", "B", 40.5).replace(" B B ", " B A "),
         [GAST, "A-2 VLK 1 2 3", RENAMED + "A-2 (residues 1 to 3)"]),
        (MMCIF + rows_of("GAST") + rows_of("VLK", "B", 40.5, first=5).replace(" B B ", " B A "),
         [GAST, "A-2 VLK 5 6 7", RENAMED + "A-2 (residues 5 to 7)"]),
        # Without the author's names, label_asym_id counts.
        (MMCIF + rows_of("GAST").replace(" A A ", " A ? ") + rows_of("VL", "B", 40.5).replace(" B B ", " B . "),
         [GAST, "B VL 1 2"]),
        (MMCIF + rows_of("GAST").replace(" A A ", " . ? "),
         [GAST, RENAMED + "A (residues 1 to 4)"]),
        # Names of force fields, quoted names.
        (MMCIF + rows_of("GHST").replace(" HIS ", " HSD "), ["A GHST 1 2 3 4"]),
        (MMCIF + rows_of("GAST").replace(" A A ", " 'A x' 'A x' "), ["A x GAST 1 2 3 4"]),
        (MMCIF + rows_of("GAST").replace(" A A ", """ "A'" "A'" """), ["A' GAST 1 2 3 4"]),
        # Models.
        (MMCIF + rows_of("GAST") + rows_of("GAST", y=30.5, model=2),
         [GAST, "A-2 GAST 1 2 3 4", COPIES, RENAMED + "A-2 (residues 1 to 4 of model 2)"]),
        (MMCIF + rows_of("GAST", model=7) + rows_of("GAST", y=1.0, model=3),
         [GAST, "only the first of 2 models counts (conformations of one structure)"]),
        (MMCIF.replace("loop_", NMR + "loop_", 1) + rows_of("GAST") + rows_of("GAST", y=30.5, model=2),
         [GAST, "only the first of 2 models counts (an NMR ensemble)"]),
        # Ligands, and atoms that are not observed.
        (MMCIF + rows_of("GAST") + rows_of("G", "L", 60.5, record="HETATM"),
         [GAST, "amino acids outside of chains are read as ligands: GLY 1 of chain L"]),
        (MMCIF + rows_of("GAST") + rows_of("G", "L", 60.5, residue="HOH", name="O", record="HETATM"), [GAST]),
        (MMCIF + rows_of("GAST") + rows_of("GAST", y=1.0, model=2, residue="CA", name="CA", record="HETATM"), [GAST]),
        (MMCIF + rows_of("GAST") + rows_of("VLK", "B", 8.5, first=8).replace(" B B ", " B A "),
         [GAST, "A-2 VLK 8 9 10", RENAMED + "A-2 (residues 8 to 10)"]),
        (MMCIF + rows_of("GASC").replace(" CYS ", " CYN "), ["A GASC 1 2 3 4"]),
        # A bonded peptide of HETATM is a chain.
        (
            MMCIF + rows_of("GAST") + rows_of("GA", "B", 60.5, record="HETATM").replace(" B B ", " B A "),
            [GAST, "A-2 GA 1 2", RENAMED + "A-2 (residues 1 to 2)"],
        ),
        # A peptide of D-amino acids is none of L-amino acids.
        (
            MMCIF + rows_of("GAST") + rows_of("AAAA", "D", 60.5, residue="DAL"),
            [GAST, "dropped D: polypeptide(d)"],
        ),
        (
            MMCIF
            + rows_of("GAST").replace(" A A ", " A 'A x' ")
            + rows_of("VLK", "B", 40.5).replace(" B B ", " B 'A x' "),
            ["A x GAST 1 2 3 4", "A x-2 VLK 1 2 3", RENAMED + "A x-2 (residues 1 to 3)"],
        ),
        # The last row of the file is a CA that has moved, so the models are no copies.
        (
            MMCIF + rows_of("GAST") + rows_of("GAST", y=40.5, model=2).replace(" 41.27 ", " 61.27 ", 1)
            + "ATOM 1 C CA . GLY A A 1 ? 1.74 41.27 0.5 2\n",
            [GAST, "only the first of 2 models counts (conformations of one structure)"],
        ),
        # A gap in the numbers of residues that are not bonded.
        (MMCIF + rows_of("GA") + rows_of("ST", y=9.5, first=5), ["A GAXXST 1 2 - - 5 6"]),
    ],
)  # fmt: skip
def test_mmcif_files_without_seqres(text: str, wanted: list[str]) -> None:
    assert read(text + "#\n") == wanted


def test_optional_columns_get_their_defaults() -> None:
    """Without B factors they are 20, as in gemmi, and without the author's numbers those of label_seq_id count."""
    tags = ["group_PDB", "id", "type_symbol", "label_alt_id"]
    tags += ["label_atom_id", "label_comp_id", "label_asym_id", "label_seq_id", "Cartn_x", "Cartn_y", "Cartn_z"]
    rows = [
        f"ATOM 1 C . {line[12:16].strip()} {line[17:20]} A {int(line[22:26]) + 4} {line[30:54]}"
        for line in lines_of("GAST").splitlines()
    ]
    text = "data_x\nloop_\n" + "".join(f"_atom_site.{tag}\n" for tag in tags) + "\n".join(rows) + "\n#\n"
    structure = parse_structure(text, "x.cif")
    assert told(structure) == ["A GAST 5 6 7 8"]
    b_factors = structure.chains["A"].b_factors
    assert b_factors is not None
    np.testing.assert_array_equal(b_factors, 20.0)


def test_gemmi_needs_some_columns() -> None:
    text = MMCIF.replace("_atom_site.label_alt_id\n", "") + rows_of("GAST").replace(" . ", " ") + "#\n"
    assert refusal(text) == "x.pdb: has no atoms. Pass a file with coordinates."


def test_the_facts_of_a_file_without_seqres_are_kept() -> None:
    facts = (
        "_exptl.entry_id x\n_exptl.method 'X-RAY DIFFRACTION'\n_refine.entry_id x\n_refine.ls_d_res_high 1.75\n"
        "_pdbx_audit_revision_history.ordinal 1\n_pdbx_audit_revision_history.revision_date 2015-03-04\n"
        "_pdbx_struct_mod_residue.id 1\n_pdbx_struct_mod_residue.label_comp_id XYZ9\n"
        "_pdbx_struct_mod_residue.parent_comp_id PHE\n"
    )
    rows = rows_of("GA") + rows_of("S", first=3).replace("SER", "XYZ9") + rows_of("T", first=4)
    structure = parse_structure(MMCIF.replace("loop_", facts + "loop_", 1) + rows + "#\n", "1xyz.cif")
    assert (structure.method, structure.resolution, structure.release_date) == (
        "X-RAY DIFFRACTION",
        1.75,
        date(2015, 3, 4),
    )
    assert structure.chains["A"].sequence == "GAFT"


def test_alternative_residues_are_added_to_the_sequence() -> None:
    """At one number, SER and THR are alternatives. The first is read if their occupancies are equal."""
    split = rows_of("S", first=3, altloc="A") + rows_of("T", first=3, altloc="B").replace("0.5 0.5", "0.5 0.9")
    assert read(MMCIF + rows_of("GA") + split + rows_of("V", first=4) + "#\n") == ["A GASV 1 2 3 4"]
    # Without locations, they are residues of two chains.
    bare = split.replace(" A SER", " . SER").replace(" B THR", " . THR")
    assert read(MMCIF + rows_of("GA") + bare + rows_of("V", first=4) + "#\n") == [
        "A GAS 1 2 3",
        "A-2 TV 3 4",
        RENAMED + "A-2 (residues 3 to 4)",
    ]
