"""Tables of the residue types: atom names and orders, chi angles, rigid groups, distance bounds.

The tables are NumPy arrays whose first axis is the residue type in AF2's order, 0 to 19 and 20 = unknown (a residue
without atoms). The numbers come from `stereochemistry.py`. Lengths are in angstrom.
"""

import functools
import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from warpfold.geometry import stereochemistry

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

RESTYPES = "ARNDCQEGHILKMFPSTWYV"
# Codes after the 20 types: X in a sequence, gap and masked letter in an alignment.
UNKNOWN, GAP, MASK = 20, 21, 22
RESTYPE_ORDER: dict[str, int] = {letter: code for code, letter in enumerate(RESTYPES)}
RESTYPE_3: tuple[str, ...] = (
    *("ALA", "ARG", "ASN", "ASP", "CYS", "GLN", "GLU", "GLY", "HIS", "ILE"),
    *("LEU", "LYS", "MET", "PHE", "PRO", "SER", "THR", "TRP", "TYR", "VAL"),
    "UNK",
)

# The order of all heavy atom names, and the order of the (at most 14) atoms within each residue type.
ATOM_TYPES: tuple[str, ...] = (
    *("N", "CA", "C", "CB", "O", "CG", "CG1", "CG2", "OG", "OG1", "SG", "CD", "CD1", "CD2", "ND1", "ND2", "OD1", "OD2"),
    *("SD", "CE", "CE1", "CE2", "CE3", "NE", "NE1", "NE2", "OE1", "OE2", "CH2", "NH1", "NH2", "OH", "CZ", "CZ2"),
    *("CZ3", "NZ", "OXT"),
)
ATOM_ORDER: dict[str, int] = {name: index for index, name in enumerate(ATOM_TYPES)}


def _entries(text: str) -> Iterator[list[str]]:
    """Split a text into its comma-separated entries, and each entry into words."""
    return (entry.split() for entry in text.split(",") if entry.strip())


_IDEAL: list[list[list[str]]] = [list(_entries(stereochemistry.IDEAL_ATOMS[name])) for name in RESTYPE_3[:20]] + [[]]

ATOM14_NAMES: tuple[tuple[str, ...], ...] = tuple(  # [21][14], "" = none
    tuple(atom[0] for atom in atoms) + ("",) * (14 - len(atoms)) for atoms in _IDEAL
)
# (residue type, column of atom14, name) of every atom.
_SLOTS: list[tuple[int, int, str]] = [
    (restype, column, name) for restype, names in enumerate(ATOM14_NAMES) for column, name in enumerate(names) if name
]


def _atom_orders() -> tuple[IntArray, IntArray, FloatArray, FloatArray]:
    to37, to14 = np.zeros((21, 14), np.int64), np.zeros((21, 37), np.int64)
    mask14, mask37 = np.zeros((21, 14), np.float32), np.zeros((21, 37), np.float32)
    for restype, column, name in _SLOTS:
        atom = ATOM_ORDER[name]
        to37[restype, column], to14[restype, atom] = atom, column
        mask14[restype, column] = mask37[restype, atom] = 1.0
    return to37, to14, mask14, mask37


ATOM14_TO_ATOM37: IntArray  # [21, 14], 0 without atom
ATOM37_TO_ATOM14: IntArray  # [21, 37], 0 without atom
ATOM14_MASK: FloatArray  # [21, 14]
ATOM37_MASK: FloatArray  # [21, 37]
ATOM14_TO_ATOM37, ATOM37_TO_ATOM14, ATOM14_MASK, ATOM37_MASK = _atom_orders()


# By element.
VDW_RADIUS: dict[str, float] = stereochemistry.VDW_RADIUS


# 0 without atom.
ATOM14_VDW_RADIUS: FloatArray = np.zeros((21, 14), np.float32)
for _restype, _column, _name in _SLOTS:
    ATOM14_VDW_RADIUS[_restype, _column] = VDW_RADIUS[_name[0]]

# The names of the four atoms of each chi angle of each residue type.
CHI_ATOMS: tuple[tuple[tuple[str, ...], ...], ...] = tuple(
    tuple(tuple(path[k : k + 4]) for k in range(len(path) - 3))
    for path in [stereochemistry.CHI_PATH[name].split() for name in RESTYPE_3[:20]] + [[]]
)


def _chi_tables() -> tuple[IntArray, FloatArray, FloatArray]:
    atoms, mask = np.zeros((21, 4, 4), np.int64), np.zeros((21, 4), np.float32)
    periodic = np.zeros((21, 4), np.float32)
    for restype, chis in enumerate(CHI_ATOMS):
        for k, names in enumerate(chis):
            atoms[restype, k] = [ATOM_ORDER[name] for name in names]
            mask[restype, k] = 1.0
        if RESTYPE_3[restype] in stereochemistry.NAMING_SWAPS:
            # A half turn of the last chi swaps the ambiguous names.
            periodic[restype, len(chis) - 1] = 1.0
    return atoms, mask, periodic


# [21, 4, 4], indices in atom37, 0 without such a chi.
CHI_ATOM37: IntArray
# [21, 4]
CHI_MASK: FloatArray
# [21, 4], 1 if chi and chi + pi are the same structure.
CHI_PI_PERIODIC: FloatArray
CHI_ATOM37, CHI_MASK, CHI_PI_PERIODIC = _chi_tables()


# [21, 14], the permutation to the other naming.
ATOM14_SWAP: IntArray = np.tile(np.arange(14, dtype=np.int64), (21, 1))
for _residue, _pairs in stereochemistry.NAMING_SWAPS.items():
    _restype = RESTYPE_3.index(_residue)
    for _pair in _pairs:
        _ij = [ATOM14_NAMES[_restype].index(_name) for _name in _pair]
        ATOM14_SWAP[_restype, _ij] = _ij[::-1]
ATOM14_AMBIGUOUS: FloatArray = (np.arange(14) != ATOM14_SWAP).astype(np.float32)  # [21, 14]
_columns = np.flatnonzero(ATOM14_AMBIGUOUS.any(axis=0))
# The columns of atom14 that contain all ambiguous atoms.
AMBIGUOUS_COLUMNS = slice(int(_columns[0]), int(_columns[-1]) + 1)

# The eight rigid groups: backbone, omega, phi, psi, chi1 to chi4 (Supp. table 2). Three atoms define a group's frame:
# one on the negative x axis, the origin, and one in the xy plane. The backbone's x axis points the other way (Algorithm
# 21), so atoms.atom37_to_frames flips it.
PSI = 3
CHI1 = 4


def _group_tables() -> tuple[IntArray, FloatArray, FloatArray]:
    atoms = np.zeros((21, 8, 3), np.int64)
    atoms[:, 0] = [ATOM_ORDER[name] for name in ("C", "CA", "N")]
    atoms[:, PSI] = [ATOM_ORDER[name] for name in ("CA", "C", "O")]
    atoms[:, CHI1:] = CHI_ATOM37[:, :, 1:]
    mask, ambiguous = np.zeros((21, 8), np.float32), np.zeros((21, 8), np.float32)
    # Includes the unknown residue, whose backbone may be resolved.
    mask[:, [0, PSI]] = 1.0
    mask[:, CHI1:] = CHI_MASK
    ambiguous[:, CHI1:] = CHI_PI_PERIODIC
    return atoms, mask, ambiguous


GROUP_ATOM37: IntArray  # [21, 8, 3]
GROUP_MASK: FloatArray  # [21, 8]
GROUP_AMBIGUOUS: FloatArray  # [21, 8]
GROUP_ATOM37, GROUP_MASK, GROUP_AMBIGUOUS = _group_tables()


def _ideal_atoms() -> tuple[IntArray, FloatArray]:
    group, positions = np.zeros((21, 14), np.int64), np.zeros((21, 14, 3), np.float32)
    for restype, atoms in enumerate(_IDEAL):
        for column, (_, number, *xyz) in enumerate(atoms):
            group[restype, column] = int(number)
            positions[restype, column] = [float(x) for x in xyz]
    return group, positions


# The rigid group of each atom [21, 14], and its position in the frame of this group [21, 14, 3].
ATOM14_GROUP: IntArray
ATOM14_GROUP_POSITIONS: FloatArray
ATOM14_GROUP, ATOM14_GROUP_POSITIONS = _ideal_atoms()


def _frame(x_axis: NDArray[np.float64], xy: NDArray[np.float64], origin: NDArray[np.float64]) -> NDArray[np.float64]:
    """Build the 4x4 transform of the frame at `origin` with x along `x_axis` and `xy` in the xy plane at positive y."""
    x = x_axis / np.linalg.norm(x_axis)
    y = xy - np.dot(xy, x) * x
    y /= np.linalg.norm(y)
    frame = np.eye(4)
    frame[:3] = np.stack([x, y, np.cross(x, y), origin], axis=1)
    return frame


def _group_frames() -> FloatArray:
    frames = np.zeros((21, 8, 4, 4))
    for restype, atoms in enumerate(_IDEAL[:UNKNOWN]):
        at = {name: np.array([float(x) for x in xyz]) for name, _, *xyz in atoms}
        n, ca, c = at["N"], at["CA"], at["C"]
        # Omega rotates no atom of this residue.
        frames[restype, 0] = frames[restype, 1] = np.eye(4)
        frames[restype, 2] = _frame(n - ca, np.array([1.0, 0.0, 0.0]), n)
        frames[restype, PSI] = _frame(c - ca, ca - n, c)
        for k, (first, second, third, _) in enumerate(CHI_ATOMS[restype]):
            if k == 0:
                frames[restype, CHI1] = _frame(at[third] - at[second], at[first] - at[second], at[third])
            else:
                # The axis starts at the origin of the previous group, and the atom before it is on -x.
                frames[restype, CHI1 + k] = _frame(at[third], np.array([-1.0, 0.0, 0.0]), at[third])
    return frames.astype(np.float32)


# [21, 8, 4, 4], from a group at torsion 0 to its parent: the backbone, or for chi2 to chi4 the previous chi. As in AF2,
# groups that a residue type lacks have zeros, which are not a rigid motion (see GROUP_MASK).
RIGID_GROUP_FRAMES: FloatArray = _group_frames()


def _linear_group_frames() -> tuple[FloatArray, FloatArray]:
    """Split the frame of a group, RIGID_GROUP_FRAMES times makeRotX, into a constant and coefficients of sin and cos.

    A rotation about x mixes the second and third column. The backbone does not rotate.
    """
    constant, coefficients = RIGID_GROUP_FRAMES.copy(), np.zeros((21, 7, 2, 4, 4), np.float32)
    y, z = constant[:, 1:, :, 1].copy(), constant[:, 1:, :, 2].copy()
    constant[:, 1:, :, 1:3] = 0.0
    # A group that the residue type lacks gets the origin of its parent.
    constant[..., 3, 3] = 1.0
    coefficients[..., 0, :, 1], coefficients[..., 0, :, 2] = z, -y
    coefficients[..., 1, :, 1], coefficients[..., 1, :, 2] = y, z
    return constant, coefficients


# [21, 8, 4, 4], and [21, 7, 2, 4, 4] of all groups but the backbone.
GROUP_CONSTANT: FloatArray
GROUP_SIN_COS: FloatArray
GROUP_CONSTANT, GROUP_SIN_COS = _linear_group_frames()


# x y z 1 of each atom in its own group, and zeros in all other groups.
ATOM14_IN_GROUPS: FloatArray = np.zeros((21, 14, 8, 4), np.float32)
for _restype, _column, _ in _SLOTS:
    ATOM14_IN_GROUPS[_restype, _column, ATOM14_GROUP[_restype, _column]] = [
        *ATOM14_GROUP_POSITIONS[_restype, _column],
        1.0,
    ]


# The peptide bond: its length and standard deviation, (before other residues, before proline), and the cosines of its
# angles, (mean, standard deviation).
C_N_LENGTH, C_N_LENGTH_STD = stereochemistry.C_N_LENGTH, stereochemistry.C_N_LENGTH_STD
CA_C_N_COS, C_N_CA_COS = stereochemistry.CA_C_N_COS, stereochemistry.C_N_CA_COS


def _bonds(restype: int) -> dict[frozenset[str], tuple[float, float]]:
    """Compute mean and standard deviation of the bonds of a residue type and of the distances across bond angles."""
    residue = RESTYPE_3[restype]
    bonds = {
        frozenset(pair.split("-")): (float(length), float(sd))
        for pair, length, sd in _entries(stereochemistry.BONDS[residue])
    }
    sides: dict[frozenset[str], tuple[float, float]] = {}
    for triple, degrees, sd_degrees in _entries(stereochemistry.ANGLES[residue]):
        first, middle, last = triple.split("-")
        (a, sd_a), (b, sd_b) = bonds[frozenset((first, middle))], bonds[frozenset((middle, last))]
        angle, sd_angle = np.radians(float(degrees)), np.radians(float(sd_degrees))
        side = np.sqrt(a * a + b * b - 2 * a * b * np.cos(angle))
        # Propagation of uncorrelated errors through the law of cosines.
        by_angle = a * b * np.sin(angle) / side
        by_a, by_b = (a - b * np.cos(angle)) / side, (b - a * np.cos(angle)) / side
        sd = np.sqrt((by_angle * sd_angle) ** 2 + (by_a * sd_a) ** 2 + (by_b * sd_b) ** 2)
        sides[frozenset((first, last))] = (float(side), float(sd))
    return bonds | sides


@functools.cache
def distance_bounds(overlap_tolerance: float = 1.5, tolerance_factor: float = 12.0) -> tuple[FloatArray, FloatArray]:
    """Compute the allowed distances between the atoms of one residue for the violation loss (Supp. 1.9.11, eq. 44-47).

    For bonded atoms and atoms one bond angle apart: mean -+ factor x standard deviation. For other pairs: at least the
    sum of the van der Waals radii minus the tolerance, and at most 1e10. Returns lower and upper, float32 [21, 14, 14],
    angstrom, zero on the diagonal and for missing atoms. The arrays are cached; do not write to them.
    """
    lower, upper = np.zeros((21, 14, 14), np.float32), np.zeros((21, 14, 14), np.float32)
    for restype, names in enumerate(ATOM14_NAMES[:UNKNOWN]):
        bonds = _bonds(restype)
        count = sum(map(bool, names))
        for i, j in itertools.permutations(range(count), 2):
            pair = frozenset((names[i], names[j]))
            if pair in bonds:
                mean, sd = bonds[pair]
                slack = tolerance_factor * sd
                lower[restype, i, j], upper[restype, i, j] = mean - slack, mean + slack
            else:
                contact = VDW_RADIUS[names[i][0]] + VDW_RADIUS[names[j][0]]
                lower[restype, i, j], upper[restype, i, j] = contact - overlap_tolerance, 1e10
    return lower, upper
