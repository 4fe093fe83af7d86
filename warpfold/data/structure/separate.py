"""Separate the residues of a file into chains where its chain names do not: repeated or blank names, segments, models.

PDB files and mmCIF files without SEQRES identify a chain by a name that programs leave blank, give to two chains, or
interrupt. `separate_chains` works on the atoms in the order of the file and gives every chain a name of its own.
"""

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from gemmi import cif

from warpfold.geometry.residue import RESTYPE_3

LINKS = {"C": "N", "O3'": "P"}  # the atoms that join a residue to the next one, of proteins and nucleic acids
ANCHORS = ("CA", "C1'")  # one atom that every residue of a protein or nucleic acid has
LINKED_ATOMS = {*LINKS, *LINKS.values(), *ANCHORS}
BOND = 2.0  # angstrom; C to N of the next residue: nearer is bonded (1.33 in a peptide, more in poor models)
RESIDUE_SPAN = 4.0  # angstrom; consecutive CA are 3.8 apart, so n residues cannot span more than n times this
SAME_PLACE = 2.0  # angstrom; CA of different molecules are farther apart
RIGID_RMSD = 0.5  # angstrom; copies of an assembly are exact, while models of an ensemble differ by more

ResidueKey = tuple[int, str]  # number and insertion code

# Programs write 9999.0 to 9999.999, or 0, for each coordinate of an unobserved atom.
PLACEHOLDER = 9999


def is_placeholder(xyz: np.ndarray) -> np.ndarray:
    """Find placeholder positions [*, 3] of unobserved atoms: 0, 0, 0, or 9999 in each coordinate. Returns bool [*]."""
    return (xyz == 0).all(-1) | (np.floor(np.abs(xyz)) == PLACEHOLDER).all(-1)


@dataclass
class Reading:
    """A structure file with SEQRES and one model, and notes on how it was read, one sentence each."""

    block: cif.Block
    notes: list[str]
    copies: bool = False  # its models are copies of an assembly, so tables of assemblies do not apply
    derived: bool = False  # the file does not say which residues are polymers and which are ligands


# Names that force fields and protonation programs give to the twenty amino acids.
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
# AMBER's names of the residues at the ends of a chain: NALA, CALA, CCYX.
FORCE_FIELD_NAMES |= {
    end + name: FORCE_FIELD_NAMES.get(name, name)
    for end in "NC"
    for name in (*RESTYPE_3[:20], *(name for name in FORCE_FIELD_NAMES if len(name) == 3))
}


@dataclass
class Residue:
    """Consecutive atoms of one residue, as the file has them.

    rows: the atoms' rows in the file. altlocs: the alternative locations of each atom, one letter each, " " for none.
    atoms: positions in angstrom of `LINKS` and `ANCHORS`, of the first location. breaks: TER or END stands between
    this residue and the one before. hetero: all its atoms are HETATM. ended: TER follows.
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
        """Add the atom in a row of the file; return whether its position is to be put into `atoms`."""
        self.rows.append(row)
        self.hetero &= is_hetero
        self.altlocs[atom] = self.altlocs.get(atom, "") + altloc
        return atom in LINKED_ATOMS and atom not in self.atoms

    @property
    def is_polymer(self) -> bool:
        """Return whether the residue has the backbone of a protein or a nucleic acid.

        Calcium is called CA, too, and so are atoms of ligands: a HETATM residue needs an atom that bonds to the next.
        """
        anchored = any(anchor in self.altlocs for anchor in ANCHORS) and self.name != "CA"
        return anchored and (not self.hetero or any(link in self.altlocs for link in LINKS))


@dataclass
class SeparatedChain:
    """A chain, and the name that it gets: its name in the file where that is unique.

    source: its name in the file.
    """

    model: int
    source: str
    segment: str
    residues: list[Residue]
    name: str = ""

    def __post_init__(self) -> None:
        self.by_key: dict[ResidueKey, list[Residue]] = {}
        for residue in self.residues:
            self.by_key.setdefault(residue.key, []).append(residue)

    @property
    def polymer(self) -> list[Residue]:
        """Return the residues of proteins and nucleic acids."""
        return [residue for residue in self.residues if residue.is_polymer]

    def add(self, residues: Sequence[Residue]) -> None:
        """Append residues."""
        self.residues += residues
        for residue in residues:
            self.by_key.setdefault(residue.key, []).append(residue)

    def has_room_for(self, residues: Iterable[Residue]) -> bool:
        """Return whether no residue of `residues` has the number of another residue that is here already."""
        return not any(
            _contradict(residue, other)
            for residue in residues
            if residue.is_polymer
            for other in self.by_key.get(residue.key, ())
            if other.is_polymer
        )


def _contradict(a: Residue, b: Residue) -> bool:
    """Return whether two residues of one number are two, rather than parts of one.

    The atoms of one residue in two places of a file (hydrogens at its end) have different names or locations.
    """
    if a.name != b.name:
        return True
    shared = ((a.altlocs[atom], b.altlocs[atom]) for atom in a.altlocs.keys() & b.altlocs.keys())
    return any(" " in ours + theirs or set(ours) & set(theirs) for ours, theirs in shared)


def separate_chains(residues: Sequence[Residue], segments_are_chains: bool) -> list[SeparatedChain]:
    """Join the residues of each chain, in the order of the file, and name the chains.

    A chain ends where the name, the segment or the model changes, at TER and END, and where a residue number repeats.
    What follows under the same name is part of the same chain if its numbers are free and nothing says otherwise: see
    `_continues`. Residues that are no polymer go to the chain of their name.

    segments_are_chains: a different segment is always a different chain (mmCIF's label_asym_id).
    """
    chains: list[SeparatedChain] = []
    for piece in _pieces(residues):
        first, polymer = piece[0], [residue for residue in piece if residue.is_polymer]
        same = [
            chain
            for chain in reversed(chains)
            if (chain.model, chain.source) == (first.model, first.chain)
            and (bool(first.chain) or chain.segment == first.segment)
        ]
        is_ligand = not polymer or (all(r.hetero for r in polymer) and same and not any(_bonds(polymer)))
        if is_ligand:
            target = same[0] if same else None
        else:
            target = next((chain for chain in same if _continues(chain, polymer, segments_are_chains)), None)
        if target is None:
            chains.append(SeparatedChain(first.model, first.chain, first.segment, list(piece)))
        else:
            is_out_of_order = not is_ligand and target.polymer and polymer[0].key < target.polymer[-1].key
            target.add(piece)
            if is_out_of_order:
                target.residues.sort(key=lambda residue: (not residue.is_polymer, residue.key))
    _name(chains)
    return chains


def _pieces(residues: Iterable[Residue]) -> list[list[Residue]]:
    """Cut the residues where the model, the name or the segment changes, at TER, and where a number repeats."""
    pieces: list[list[Residue]] = []
    current: SeparatedChain | None = None
    for residue in residues:
        where = residue.model, residue.chain, residue.segment
        if (
            current is None
            or residue.breaks
            or where != (current.model, current.source, current.segment)
            or not (_is_alternative(current.residues[-1], residue) or current.has_room_for([residue]))
        ):
            current = SeparatedChain(*where, [])
            pieces.append(current.residues)
        current.add([residue])
    return pieces


def _is_alternative(before: Residue, residue: Residue) -> bool:
    """Return whether two consecutive residues are alternatives at one place (microheterogeneity)."""
    return before.key == residue.key and not any(
        " " in places for r in (before, residue) for places in r.altlocs.values()
    )


def _continues(chain: SeparatedChain, polymer: Sequence[Residue], segments_are_chains: bool) -> bool:
    """Return whether `polymer`, later in the file, is part of a chain of the same name.

    Numbers that the chain has already are another chain's. Without TER or another segment between, free numbers are
    enough: a chain may come in two places. After TER, or in another segment, a named chain continues if the two ends
    are bonded or leave a gap that the missing residues can span; a chain without a name only if they are bonded.
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
    # Two placeholders have the same position.
    return any(
        a in before.atoms and b in after.atoms and 0 < float(np.linalg.norm(before.atoms[a] - after.atoms[b])) < BOND
        for a, b in LINKS.items()
    )


def _bonds(polymer: Sequence[Residue]) -> Iterable[bool]:
    return (_is_bonded(a, b) for a, b in itertools.pairwise(polymer))


def _name(chains: Sequence[SeparatedChain]) -> None:
    """Name the chains: as in the file, A-2 for the second A, and the next free letter for those without a name."""
    taken = {chain.source for chain in chains}
    used: set[str] = set()
    letters = (letter for letter in map(chr, range(ord("A"), 0x10000)) if letter not in taken and letter.isalnum())
    for chain in chains:
        if not chain.source:
            chain.name = next(letters)
            continue
        name, count = chain.source, 1
        while name in used or (count > 1 and name in taken):
            count += 1
            name = f"{chain.source}-{count}"
        chain.name = name
        used.add(name)


Alphas = dict[tuple[str, ResidueKey], np.ndarray]  # positions of CA, float [3] in angstrom, by chain and residue


def collect_alphas(
    models: Iterable[Hashable], atoms: Iterable[tuple[Hashable, tuple[str, ResidueKey], Sequence[float] | np.ndarray]]
) -> list[Alphas]:
    """Collect the observed CA of each model, the first of each residue.

    models: all models of the file, in its order.  atoms: model, residue and position of each CA.
    """
    found: dict[Hashable, Alphas] = {model: {} for model in models}
    for model, residue, position in atoms:
        xyz = np.array(position)
        if not is_placeholder(xyz):
            found[model].setdefault(residue, xyz)
    return list(found.values())


def count_models(models: Sequence[Alphas], is_nmr: bool) -> tuple[bool, list[str]]:
    """Decide whether all models of a file count or the first alone; return that and a note on them."""
    count = len(models)
    models = [model for model in models if model]
    if len(models) < 2:
        return count > 1, []
    if not is_nmr and models_are_copies(models):
        return True, [f"its {count} models are copies of an assembly, and all of them count"]
    what = "an NMR ensemble" if is_nmr else "conformations of one structure"
    return False, [f"only the first of {count} models counts ({what})"]


def models_are_copies(models: Sequence[Alphas]) -> bool:
    """Return whether the models of a file are copies in different places, as in a biological unit.

    Models of an ensemble or a trajectory lie on top of each other, or differ in conformation. Copies do neither: at
    most one CA in twenty is within 2 angstrom of one of another model, and models of the same residues superpose
    within 0.5 angstrom.
    """
    occupied: dict[tuple[int, ...], list[np.ndarray]] = {}
    for model in models:
        points = np.stack(list(model.values()))
        cells = np.floor(points / SAME_PLACE).astype(np.int64)
        close = 0
        if occupied:
            for point, cell in zip(points, cells):
                others = [x for shift in _NEIGHBOURS for x in occupied.get((*(cell + shift),), ())]
                close += bool(others) and bool((np.linalg.norm(np.stack(others) - point, axis=-1) < SAME_PLACE).any())
        if 20 * close > len(points):
            return False
        if model is not models[0] and model.keys() == models[0].keys():
            reference = np.stack([models[0][key] for key in model])
            if _superposed_rmsd(reference, points) > RIGID_RMSD:
                return False
        for point, cell in zip(points, cells):
            occupied.setdefault((*cell.tolist(),), []).append(point)
    return len(models) > 1


_NEIGHBOURS = np.array(list(itertools.product((-1, 0, 1), repeat=3)))


def _superposed_rmsd(a: np.ndarray, b: np.ndarray) -> float:
    """Compute the RMSD of two sets of points [N, 3] after the best rigid superposition (Kabsch)."""
    a, b = a - a.mean(0), b - b.mean(0)
    u, s, vt = np.linalg.svd(a.T @ b)
    s[-1] *= np.sign(np.linalg.det(u @ vt))
    return float(np.sqrt(max((a**2).sum() + (b**2).sum() - 2 * s.sum(), 0.0) / len(a)))
