"""Read legal but unusual structure files: chains are read as written, or their lost residues are counted."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from warpfold.data.structure.chain import Structure, normal_entry_id
from warpfold.data.structure.mmcif import parse_structure
from warpfold.data.structure.separate import FORCE_FIELD_NAMES
from warpfold.errors import UserError
from warpfold.geometry.residue import RESTYPE_3, RESTYPES

THREE = dict(zip(RESTYPES, RESTYPE_3))
ALIASES = {three: [alias for alias, name in FORCE_FIELD_NAMES.items() if name == three] for three in RESTYPE_3[:20]}
# N, CA, C, O of a residue of an extended chain, in angstrom. The next is 3.8 further, so that C to N is 1.33.
BACKBONE = {"N": (0.0, 0.0, 0.5), "CA": (1.24, 0.77, 0.5), "C": (2.47, 0.0, 0.5), "O": (2.47, -1.23, 0.5)}


@dataclass(frozen=True)
class Written:
    """A chain of a file: sequence, start, number and insertion code of each residue."""

    sequence: str
    origin: tuple[float, float, float]
    numbers: tuple[tuple[int, str], ...]

    @property
    def ca(self) -> np.ndarray:
        steps = np.arange(len(self.sequence))[:, None] * np.array([3.8, 0, 0])
        return np.round(np.array(self.origin) + BACKBONE["CA"] + steps, 3)


@dataclass(frozen=True)
class Atom:
    """A line of a PDB file."""

    name: str
    altloc: str
    residue: str
    chain: str
    number: tuple[int, str]
    xyz: tuple[float, float, float]
    segment: str
    record: str = "ATOM"

    def line(self, serial: int) -> str:
        number, code = self.number
        residue = f"{self.residue:<4}" if len(self.residue) == 4 else f"{self.residue:>3} "
        position = "".join(f"{x:8.3f}" for x in self.xyz)
        text = f"{self.record:<6}{serial:>5}  {self.name:<3}{self.altloc or ' '}{residue}{self.chain or ' '}"
        return f"{text}{number:>4}{code or ' '}   {position}  1.00  0.00      {self.segment:<4}{self.name[0]:>2}"

    def row(self, model: int) -> str:
        """Return the row of mmCIF."""
        values = (self.record, 1, self.name[0], self.name, self.altloc or ".", self.residue,
                  self.segment or ".", self.chain or "?", self.number[0],
                  self.number[1] or "?", *self.xyz, model)  # fmt: skip
        return " ".join(map(str, values))


MMCIF = "data_x\nloop_\n" + "".join(
    f"_atom_site.{tag}\n"
    for tag in ("group_PDB", "id", "type_symbol", "label_atom_id", "label_alt_id", "label_comp_id", "label_asym_id",
                "auth_asym_id", "auth_seq_id", "pdbx_PDB_ins_code", "Cartn_x", "Cartn_y", "Cartn_z",
                "pdbx_PDB_model_num")
)  # fmt: skip


def atoms_of(chain: Written, name: str, segment: str, draw: st.DrawFn) -> list[list[Atom]]:
    """Return the atoms of each residue, some under a force field's name, some in two positions."""
    residues = []
    for i, (letter, number) in enumerate(zip(chain.sequence, chain.numbers)):
        three = THREE[letter]
        three = draw(st.sampled_from([three, *ALIASES[three]]))
        is_split = draw(st.integers(0, 5)) == 0
        atoms = []
        for atom, offset in BACKBONE.items():
            xyz = tuple(
                float(np.round(o + x + 3.8 * i * (k == 0), 3)) for k, (o, x) in enumerate(zip(chain.origin, offset))
            )
            made = Atom(atom, "A" if is_split else "", three, name, number, xyz, segment)  # type: ignore[arg-type]
            atoms.append(made)
            if is_split:
                atoms.append(replace(made, altloc="B", xyz=(xyz[0], xyz[1] + 0.3, xyz[2])))  # type: ignore[arg-type]
        residues.append(atoms)
    return residues


@st.composite
def awkward_file(draw: st.DrawFn) -> tuple[str, list[Written]]:
    """Draw a PDB file of one to three chains, and the chains."""
    count = draw(st.integers(1, 3))
    names = draw(st.sampled_from(["different", "blank", "repeated", "case"]))
    has_segments = draw(st.booleans())
    separator = draw(st.sampled_from(["TER", "END", "TER\nEND", "MODEL", ""]))
    restarts = draw(st.booleans())
    chains, first = [], draw(st.integers(-5, 50))
    for k in range(count):
        sequence = draw(st.text("ARNDCEGHKLPSTVY", min_size=3, max_size=9))
        numbers, n = [], first
        for _ in sequence:
            code = draw(st.sampled_from(["", "", "", "A"])) if numbers and not numbers[-1][1] else ""
            numbers.append((numbers[-1][0], code) if code else (n, ""))
            n = numbers[-1][0] + 1
        first = first if restarts else n
        chains.append(Written(sequence, (0.5, 0.5 + 40.0 * k, 0.5), tuple(numbers)))
    chain_names = {"different": "ABC", "blank": "   ", "repeated": "AAA", "case": "aAb"}[names]
    # The end of a chain must be seen from its name, TER, its segment, or residue numbers that start again.
    is_told_apart = names in ("different", "case") or separator or has_segments or restarts
    assume(is_told_apart or count == 1)
    residues = [
        atoms_of(chain, chain_names[k].strip(), f"SEG{k}" if has_segments else "", draw)
        for k, chain in enumerate(chains)
    ]
    pieces = residues
    if count > 1 and names in ("different", "case") and separator != "MODEL" and draw(st.booleans()):
        # The first chain is split in the file.
        cut = draw(st.integers(1, len(residues[0]) - 1))
        pieces = [residues[0][:cut], residues[1], residues[0][cut:], *residues[2:]]
    lines, rows, serial = [], [], 0
    for model, piece in enumerate(pieces, 1):
        lines += [f"MODEL     {model:>4}"] if separator == "MODEL" else []
        for atom in (atom for atoms in piece for atom in atoms):
            serial += 1
            lines.append(atom.line(serial))
            rows.append(atom.row(model if separator == "MODEL" else 1))
        lines += ["ENDMDL"] if separator == "MODEL" else separator.split("\n") if separator else []
    water = Atom("O", "", "HOH", chain_names[0].strip(), (900, ""), (60.0, 60.0, 60.0), "", "HETATM")
    if draw(st.booleans()) and separator != "MODEL":
        lines.append(water.line(serial + 1))
        rows.append(water.row(1))
    # mmCIF has neither TER nor END.
    if draw(st.booleans()) and (count == 1 or names in ("different", "case") or has_segments or restarts):
        return MMCIF + "\n".join(rows) + "\n#\n", chains
    return "\n".join([*lines, "END"]) + "\n", chains


def as_read(structure: Structure) -> list[tuple[str, tuple[str, ...], bytes]]:
    """Return sequence without gaps, residue numbers and CA of each chain."""
    chains = []
    for chain in structure.chains.values():
        seen = chain.mask[:, 1] > 0
        letters = "".join(letter for letter, here in zip(chain.sequence, seen) if here)
        numbers = tuple(number for number, here in zip(chain.author_numbers, seen) if here)
        chains.append((letters, numbers, np.round(chain.positions[seen, 1], 3).tobytes()))
    return sorted(chains)


@given(awkward_file())
@settings(max_examples=200, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink))
def test_the_chains_that_were_written_are_read(file: tuple[str, list[Written]]) -> None:
    text, chains = file
    structure = parse_structure(text, "complex", ca_only=True)
    wanted = sorted(
        (
            chain.sequence,
            tuple(f"{n}{code}" for n, code in chain.numbers),
            np.round(chain.ca, 3).astype(np.float32).tobytes(),
        )
        for chain in chains
    )
    assert as_read(structure) == wanted, text
    assert structure.unplaced == ()
    assert len(set(structure.chains)) == len(chains)


def pdb_chain(chain: Written, name: str, segment: str = "", residues: dict[int, str] | None = None) -> str:
    """Return the lines of a chain. residues: position -> another residue name."""
    lines = []
    for i, (letter, number) in enumerate(zip(chain.sequence, chain.numbers)):
        for atom, offset in BACKBONE.items():
            xyz = tuple(o + x + 3.8 * i * (k == 0) for k, (o, x) in enumerate(zip(chain.origin, offset)))
            residue = (residues or {}).get(i, THREE[letter])
            lines.append(Atom(atom, "", residue, name, number, xyz, segment).line(i))  # type: ignore[arg-type]
    return "\n".join(lines) + "\n"


def plain(sequence: str, y: float = 0.5, z: float = 0.5) -> Written:
    return Written(sequence, (0.5, y, z), tuple((i + 1, "") for i in range(len(sequence))))


def models(*texts: str) -> str:
    return "".join(f"MODEL     {i:>4}\n{text}TER\nENDMDL\n" for i, text in enumerate(texts, 1)) + "END\n"


def test_copies_in_models_are_an_assembly() -> None:
    structure = parse_structure(models(*(pdb_chain(plain("GASTGAST", y), "A") for y in (0.5, 20.5, 40.5))))
    assert [*structure.chains] == ["A", "A-2", "A-3"]
    assert "3 models are copies of an assembly" in structure.notes[0]
    assert [name for name, _ in structure.assembly().chains] == ["A", "A-2", "A-3"]


@pytest.mark.parametrize("method", ["", "EXPDTA    SOLUTION NMR\n"])
def test_of_an_ensemble_the_first_model_counts(method: str) -> None:
    structure = parse_structure(method + models(*(pdb_chain(plain("GASTGAST", y), "A") for y in (0.5, 1.0, 1.5))))
    assert [*structure.chains] == ["A"]
    assert "only the first of 3 models counts" in structure.notes[0]
    assert ("NMR" in structure.notes[0]) == bool(method)


def test_nmr_models_far_from_each_other_are_no_assembly() -> None:
    far = models(*(pdb_chain(plain("GASTGAST", y), "A") for y in (0.5, 90.5)))
    assert [*parse_structure("EXPDTA    SOLUTION NMR\n" + far).chains] == ["A"]


def test_frames_of_a_trajectory_that_moved_away_are_no_assembly() -> None:
    bent = Written("GASTGAST", (0.5, 60.5, 0.5), plain("GASTGAST").numbers)
    lines = pdb_chain(bent, "A").splitlines()
    moved = [line[:46] + f"{float(line[46:54]) + (i // 4) ** 2 / 3:8.3f}" + line[54:] for i, line in enumerate(lines)]
    structure = parse_structure(models(pdb_chain(plain("GASTGAST"), "A"), "\n".join(moved) + "\n"))
    assert [*structure.chains] == ["A"]


def test_segments_separate_chains_without_names() -> None:
    text = pdb_chain(plain("GASTG"), "", "PROA") + pdb_chain(plain("VLKEV", 40.5), "", "PROB") + "END\n"
    assert [chain.sequence for chain in parse_structure(text).chains.values()] == ["GASTG", "VLKEV"]


def test_two_data_blocks_are_refused() -> None:
    block = MMCIF + Atom("CA", "", "GLY", "A", (1, ""), (1, 1, 1), "").row(1) + "\n"
    with pytest.raises(UserError, match="2 data blocks with atoms"):
        parse_structure(block + block.replace("data_x", "data_y"))


@pytest.mark.parametrize("x", [0.0, 9999.0, -9999.0, 9999.999])
def test_placeholders_are_not_observed(x: float) -> None:
    lines = pdb_chain(plain("GASTG"), "A").splitlines()
    lines[4:8] = [line[:30] + (f"{x:8.3f}" if x >= 0 else f"{x:8.2f}") * 3 + line[54:] for line in lines[4:8]]
    structure = parse_structure("\n".join(lines) + "\nEND\n")
    (chain,) = structure.chains.values()
    assert chain.mask[:, 1].tolist() == [1, 0, 1, 1, 1]
    assert any("placeholder coordinates" in note and note.endswith(": 1") for note in structure.notes)


def test_unknown_residues_are_named() -> None:
    (note,) = parse_structure(pdb_chain(plain("GASTG"), "A", residues={2: "ZZQ"}) + "END\n").notes
    assert "ZZQ (1)" in note


def test_residues_outside_the_sequence_are_counted() -> None:
    """SEQRES has four residues, and the atoms have a fifth."""
    seqres = "SEQRES   1 A    4  GLY ALA SER THR\n"
    structure = parse_structure(seqres + pdb_chain(plain("GASTW"), "A") + "TER\nEND\n")
    assert structure.unplaced == ("TRP 5 of chain A",)
    with pytest.raises(UserError, match=r"x.pdb: has residues with N, CA and C that are in no chain: 1 \(TRP 5"):
        structure.check_placed("x.pdb")


def test_seqres_of_a_repeated_name_goes_to_the_chain_in_the_same_order() -> None:
    seqres = "SEQRES   1 A    6  GLY ALA SER THR GLY GLY\nSEQRES   1 A    4  VAL LEU LYS VAL\n"
    chains = pdb_chain(plain("GAST"), "A") + "TER\n" + pdb_chain(plain("VLKV", 40.5), "A") + "TER\nEND\n"
    assert [chain.sequence for chain in parse_structure(seqres + chains).chains.values()] == ["GASTGG", "VLKV"]


@pytest.mark.parametrize(
    ("text", "normal"),
    [("1ABC", "1abc"), ("pdb_00001abc", "1abc"), ("PDB_00001ABC", "1abc"), ("pdb_12341abc", "pdb_12341abc"),
     ("AF-P12345-F1", "AF-P12345-F1"), ("my_design", "my_design")],
)  # fmt: skip
def test_an_entry_has_one_spelling(text: str, normal: str) -> None:
    assert normal_entry_id(text) == normal_entry_id(normal) == normal
