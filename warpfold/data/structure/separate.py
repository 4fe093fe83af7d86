"""Separate the residues of a file into chains if its chain names are ambiguous: blank, repeated, or split.

PDB files and mmCIF files without SEQRES identify a chain only by its name. Some programs leave the name blank, use it
for two chains, or write a chain in several sections. `separate_chains` reads the residues in file order and gives every
chain a unique name.
"""

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from gemmi import cif

from warpfold.geometry.residue import RESTYPE_3

# Atoms that bond a residue to the next one, in proteins and nucleic acids.
LINKS = {"C": "N", "O3'": "P"}
# An atom that every residue of a protein or a nucleic acid has.
ANCHORS = ("CA", "C1'")
LINKED_ATOMS = {*LINKS, *LINKS.values(), *ANCHORS}
# Distances are in angstrom.
# Linked atoms nearer than this are bonded (1.33 in a peptide bond, longer in poor models).
BOND = 2.0
# Consecutive CA are 3.8 apart, so n residues span at most n times this.
RESIDUE_SPAN = 4.0
# CA of different molecules are farther apart than this.
SAME_PLACE = 2.0
# Copies of an assembly are exact. Models of an ensemble differ by more than this.
RIGID_RMSD = 0.5

ResidueKey = tuple[int, str]  # number and insertion code

# Programs write 9999.0 to 9999.999, or 0, as each coordinate of an unobserved atom.
PLACEHOLDER = 9999


def is_placeholder(xyz: np.ndarray) -> np.ndarray:
    """Find placeholder positions [*, 3] of unobserved atoms: 0, 0, 0, or 9999 in each coordinate. Returns bool [*]."""
    return (xyz == 0).all(-1) | (np.floor(np.abs(xyz)) == PLACEHOLDER).all(-1)


@dataclass
class Reading:
    """A structure file as a complete mmCIF block with SEQRES.

    notes: sentences for the user about decisions of the reader. copies: the models are copies of an assembly, so the
    table of assemblies does not apply. derived: the file does not declare which residues are polymers and which are
    ligands.
    """

    block: cif.Block
    notes: list[str]
    copies: bool = False
    derived: bool = False


# Names of the twenty amino acids in force fields and protonation programs.
FORCE_FIELD_NAMES: dict[str, str] = {
    **dict.fromkeys(
        ("HID", "HIE", "HIP", "HSD", "HSE", "HSP", "HISA", "HISB", "HISD", "HISE", "HISH", "HISP", "HIS1", "HIS2"),
        "HIS",
    ),
    **dict.fromkeys(("CYX", "CYM", "CYN", "CYS2", "CYSH", "CYS1"), "CYS"),
    **dict.fromkeys(("ASH", "ASPH", "ASPP"), "ASP"),
    **dict.fromkeys(("GLH", "GLUH", "GLUP"), "GLU"),
    **dict.fromkeys(("LYN", "LYP", "LSN", "LYSH", "LYSN"), "LYS"),
    **dict.fromkeys(("ARN", "ARGN"), "ARG"),
    "TYM": "TYR",
}
# AMBER's names of terminal residues: NALA, CALA, CCYX.
FORCE_FIELD_NAMES |= {
    end + name: FORCE_FIELD_NAMES.get(name, name)
    for end in "NC"
    for name in (*RESTYPE_3[:20], *(name for name in FORCE_FIELD_NAMES if len(name) == 3))
}


@dataclass
class Residue:
    """Consecutive atoms of a residue, in file order.

    rows: the atoms' rows in the file. altlocs: the alternative locations of each atom, one letter each, " " for none.
    atoms: positions in angstrom of the atoms in `LINKS` and `ANCHORS`, from their first location. breaks: TER or END
    precedes this residue. hetero: all atoms are HETATM. ended: TER follows.
    """

    model: int
    chain: str
    segment: str
    key: ResidueKey
    name: str
    breaks: bool
    hetero: bool
    ended: bool = False
    rows: list[int] = field(default_factory=list)
    altlocs: dict[str, str] = field(default_factory=dict)
    atoms: dict[str, np.ndarray] = field(default_factory=dict)

    def add_atom(self, row: int, atom: str, altloc: str, is_hetero: bool) -> bool:
        """Add an atom. Returns True if the caller must store its position in `atoms`."""
        self.rows.append(row)
        self.hetero &= is_hetero
        self.altlocs[atom] = self.altlocs.get(atom, "") + altloc
        return atom in LINKED_ATOMS and atom not in self.atoms

    @property
    def is_polymer(self) -> bool:
        """Return whether the residue has the backbone of a protein or a nucleic acid.

        Calcium and some ligand atoms are named CA too, so a HETATM residue also needs an atom that bonds to the next
        residue.
        """
        anchored = any(anchor in self.altlocs for anchor in ANCHORS) and self.name != "CA"
        return anchored and (not self.hetero or any(link in self.altlocs for link in LINKS))


@dataclass
class SeparatedChain:
    """A chain being collected. source: its name in the file. name: its unique name, equal to `source` if possible."""

    model: int
    source: str
    segment: str
    name: str = ""
    residues: list[Residue] = field(default_factory=list)
    by_key: dict[ResidueKey, list[Residue]] = field(default_factory=dict)

    @property
    def polymer(self) -> list[Residue]:
        """Return the residues that belong to a protein or a nucleic acid."""
        return [residue for residue in self.residues if residue.is_polymer]

    def add(self, residues: Sequence[Residue]) -> None:
        """Append residues."""
        self.residues += residues
        for residue in residues:
            self.by_key.setdefault(residue.key, []).append(residue)

    def has_room_for(self, residues: Iterable[Residue]) -> bool:
        """Return whether no polymer residue of `residues` has the number of a different residue of this chain."""
        return not any(
            _are_different(residue, other)
            for residue in residues
            if residue.is_polymer
            for other in self.by_key.get(residue.key, ())
            if other.is_polymer
        )


def _are_different(a: Residue, b: Residue) -> bool:
    """Return whether two records of one residue number are different residues.

    A residue that is split over a file (hydrogens at its end) has different atom names or locations in each record.
    """
    if a.name != b.name:
        return True
    shared = ((a.altlocs[atom], b.altlocs[atom]) for atom in a.altlocs.keys() & b.altlocs.keys())
    return any(" " in ours + theirs or set(ours) & set(theirs) for ours, theirs in shared)


def separate_chains(residues: Sequence[Residue], segments_are_chains: bool) -> list[SeparatedChain]:
    """Collect the residues of each chain in file order, and name the chains.

    A fragment of a chain ends where the name, the segment or the model changes, at TER and END, and where a residue
    number repeats. A later fragment of the same name is appended to the chain if `_continues` accepts it. Residues that
    are not part of a polymer join the chain of their name.

    segments_are_chains: a different segment is always a different chain (mmCIF's label_asym_id).
    """
    fragments: list[list[Residue]] = []
    current: SeparatedChain | None = None
    for residue in residues:
        location = residue.model, residue.chain, residue.segment
        is_continued = False
        if current and not residue.breaks and location == (current.model, current.source, current.segment):
            before = current.residues[-1]
            altlocs = [*before.altlocs.values(), *residue.altlocs.values()]
            # Alternatives at one position (microheterogeneity).
            is_alternative = before.key == residue.key and not any(" " in text for text in altlocs)
            is_continued = is_alternative or current.has_room_for([residue])
        if not current or not is_continued:
            current = SeparatedChain(*location)
            fragments.append(current.residues)
        current.add([residue])
    chains: list[SeparatedChain] = []
    for fragment in fragments:
        first, polymer = fragment[0], [residue for residue in fragment if residue.is_polymer]
        same = [
            chain
            for chain in reversed(chains)
            if (chain.model, chain.source) == (first.model, first.chain)
            and (bool(first.chain) or chain.segment == first.segment)
        ]
        bonds = itertools.starmap(_is_bonded, itertools.pairwise(polymer))
        is_ligand = not polymer or (all(r.hetero for r in polymer) and same and not any(bonds))
        if is_ligand:
            target = same[0] if same else None
        else:
            target = next((chain for chain in same if _continues(chain, polymer, segments_are_chains)), None)
        if target is None:
            target = SeparatedChain(first.model, first.chain, first.segment)
            chains.append(target)
        is_out_of_order = not is_ligand and target.polymer and polymer[0].key < target.polymer[-1].key
        target.add(fragment)
        if is_out_of_order:
            target.residues.sort(key=lambda residue: (not residue.is_polymer, residue.key))
    # The second A becomes A-2, and chains without a name get the next free letter.
    source_names = {chain.source for chain in chains}
    used: set[str] = set()
    letters = (
        letter for letter in map(chr, range(ord("A"), 0x10000)) if letter not in source_names and letter.isalnum()
    )
    for chain in chains:
        if not chain.source:
            chain.name = next(letters)
            continue
        name, count = chain.source, 1
        while name in used or (count > 1 and name in source_names):
            count += 1
            name = f"{chain.source}-{count}"
        chain.name = name
        used.add(name)
    return chains


def _continues(chain: SeparatedChain, polymer: Sequence[Residue], segments_are_chains: bool) -> bool:
    """Return whether `polymer`, a later fragment of the same name, continues a chain.

    Residue numbers that the chain has already belong to another chain. Unused numbers are enough if neither TER nor
    another segment intervenes. Otherwise a named chain continues if the two ends are bonded, or if the missing residues
    can span the gap. A chain without a name continues only if the ends are bonded.
    """
    if not chain.has_room_for(polymer):
        return False
    if not chain.polymer:
        return True
    if segments_are_chains and chain.segment != polymer[0].segment:
        return False
    last, first = chain.polymer[-1], polymer[0]
    if not (first.breaks or chain.segment != first.segment):
        return True
    if _is_bonded(last, first):
        return True
    missing = first.key[0] - last.key[0]
    if not chain.source or missing <= 1:
        return False
    ends = [next((r.atoms[a] for a in ANCHORS if a in r.atoms), None) for r in (last, first)]
    return ends[0] is None or ends[1] is None or float(np.linalg.norm(ends[0] - ends[1])) <= RESIDUE_SPAN * missing


def _is_bonded(before: Residue, after: Residue) -> bool:
    """Return whether two consecutive residues are bonded."""
    # A distance of 0 means that both positions are placeholders.
    return any(
        a in before.atoms and b in after.atoms and 0 < float(np.linalg.norm(before.atoms[a] - after.atoms[b])) < BOND
        for a, b in LINKS.items()
    )


# Positions of CA, float [3] in angstrom, by chain and residue.
Alphas = dict[tuple[str, ResidueKey], np.ndarray]


def collect_alphas(
    models: Iterable[Hashable], atoms: Iterable[tuple[Hashable, tuple[str, ResidueKey], Sequence[float] | np.ndarray]]
) -> list[Alphas]:
    """Collect the observed CA of each model, the first of each residue.

    models: all models in file order. atoms: model, residue and position of each CA.
    """
    alphas: dict[Hashable, Alphas] = {model: {} for model in models}
    for model, residue, position in atoms:
        xyz = np.array(position)
        if not is_placeholder(xyz):
            alphas[model].setdefault(residue, xyz)
    return list(alphas.values())


def count_models(models: Sequence[Alphas], is_nmr: bool) -> tuple[bool, list[str]]:
    """Decide whether all models of a file count or only the first one. Returns the decision and notes for the user."""
    count = len(models)
    models = [model for model in models if model]
    if len(models) < 2:
        return count > 1, []
    if not is_nmr and models_are_copies(models):
        return True, [f"its {count} models are copies of an assembly, and all of them count"]
    kind = "an NMR ensemble" if is_nmr else "conformations of one structure"
    return False, [f"only the first of {count} models counts ({kind})"]


def models_are_copies(models: Sequence[Alphas]) -> bool:
    """Return whether the models of a file are displaced copies of one structure, as in a biological unit.

    Models of an ensemble or a trajectory overlap or differ in conformation. Models are copies if at most 5 % of the CA
    are within 2 angstrom of a CA of another model, and if models of the same residues superpose within 0.5 angstrom.
    """
    occupied: dict[tuple[int, ...], list[np.ndarray]] = {}
    neighbours = np.array(list(itertools.product((-1, 0, 1), repeat=3)))
    for model in models:
        points = np.stack(list(model.values()))
        cells = np.floor(points / SAME_PLACE).astype(np.int64)
        close = 0
        if occupied:
            for point, cell in zip(points, cells):
                neighbour_points = [x for shift in neighbours for x in occupied.get((*(cell + shift),), ())]
                close += bool(neighbour_points) and bool(
                    (np.linalg.norm(np.stack(neighbour_points) - point, axis=-1) < SAME_PLACE).any()
                )
        if 20 * close > len(points):
            return False
        if model is not models[0] and model.keys() == models[0].keys():
            # The RMSD after the best rigid superposition (Kabsch).
            reference = np.stack([models[0][key] for key in model])
            a, b = reference - reference.mean(0), points - points.mean(0)
            u, s, vt = np.linalg.svd(a.T @ b)
            s[-1] *= np.sign(np.linalg.det(u @ vt))
            if np.sqrt(max((a**2).sum() + (b**2).sum() - 2 * s.sum(), 0.0) / len(a)) > RIGID_RMSD:
                return False
        for point, cell in zip(points, cells):
            occupied.setdefault((*cell.tolist(),), []).append(point)
    return len(models) > 1
