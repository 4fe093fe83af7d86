"""Check that a predicted structure looks like a protein: chain breaks, clashes, mirrored residues, in NumPy."""

from dataclasses import dataclass

import numpy as np

from warpfold.geometry.residue import ATOM_ORDER, ATOM_TYPES, VDW_RADIUS

CA_CA_RANGE = (2.6, 4.2)  # angstrom: cis peptides 2.9 to 3.0, trans 3.8, with room for strain
CLASH_OVERLAP = 1.5  # angstrom that two atoms may overlap before it counts (Supp. 1.9.11, eq. 46)
DISULFIDE = 2.5  # angstrom: two SG nearer than this are bonded, not clashing
BLOCK = 256  # atoms compared with all others at once


@dataclass(frozen=True)
class Geometry:
    """Counts of flaws that a real protein does not have."""

    chain_breaks: int  # neighbours whose Cα are not 2.6 to 4.2 angstrom apart
    clashes: int  # pairs of atoms of different residues that overlap by more than 1.5 angstrom
    mirrored: int  # residues with a Cβ on the wrong side (D instead of L)

    def warnings(self) -> list[str]:
        """Return one sentence for each kind of flaw that occurs."""
        found = (
            (self.chain_breaks, "chain break(s): neighbouring Cα too near or too far"),
            (self.clashes, "clash(es) between atoms of different residues"),
            (self.mirrored, "residue(s) with mirrored Cα"),
        )
        return [f"{count} {what}" for count, what in found if count]


def check_geometry(positions: np.ndarray, mask: np.ndarray, asym_id: np.ndarray | None = None) -> Geometry:
    """Check N residues: positions [N, 37, 3] in angstrom, mask [N, 37]; consecutive rows of one chain are bonded.

    asym_id: [N], each residue's chain; None: they are one chain.
    Errors: FloatingPointError when a position that counts is not finite.
    """
    present = mask > 0
    if not np.isfinite(positions[present]).all():
        raise FloatingPointError("the predicted positions are not finite")
    chain = np.zeros(len(mask), np.int64) if asym_id is None else asym_id
    bonded = chain[1:] == chain[:-1]  # [N - 1], each residue to the next
    return Geometry(
        _chain_breaks(positions, present, bonded), _clashes(positions, present, bonded), _mirrored(positions, present)
    )


def _chain_breaks(positions: np.ndarray, present: np.ndarray, bonded: np.ndarray) -> int:
    ca = ATOM_ORDER["CA"]
    step = np.linalg.norm(positions[1:, ca] - positions[:-1, ca], axis=-1)
    outside = (step < CA_CA_RANGE[0]) | (step > CA_CA_RANGE[1])
    return int((outside & bonded & present[1:, ca] & present[:-1, ca]).sum())


def _mirrored(positions: np.ndarray, present: np.ndarray) -> int:
    """Count D residues: from Cα, the triple product of N, C and Cβ is about +2.6 cubic angstrom for L residues."""
    n, ca, c, cb = (positions[:, ATOM_ORDER[name]] for name in ("N", "CA", "C", "CB"))
    volume = np.einsum("id,id->i", np.cross(n - ca, c - ca), cb - ca)
    whole = present[:, [ATOM_ORDER[name] for name in ("N", "CA", "C", "CB")]].all(1)
    return int((whole & (volume < 0)).sum())


def _clashes(positions: np.ndarray, present: np.ndarray, bonded: np.ndarray) -> int:
    """Count overlaps of atoms, but of peptide bonds and disulfides."""
    residue, atom = np.nonzero(present)
    xyz = positions[residue, atom].astype(np.float32)
    radius = np.array([VDW_RADIUS[name[0]] for name in ATOM_TYPES], np.float32)[atom]
    sulfur = atom == ATOM_ORDER["SG"]
    peptide_n = atom == ATOM_ORDER["N"]
    peptide_c = (atom == ATOM_ORDER["C"]) & np.append(bonded, False)[residue]  # bonded to the next residue's N
    count = 0
    for start in range(0, len(xyz), BLOCK):
        rows = slice(start, start + BLOCK)
        later = residue[None, :] > residue[rows, None]
        peptide = (residue[None, :] == residue[rows, None] + 1) & peptide_c[rows, None] & peptide_n[None, :]
        distance = np.linalg.norm(xyz[rows, None] - xyz[None, :], axis=-1)
        disulfide = sulfur[rows, None] & sulfur[None, :] & (distance < DISULFIDE)
        near = distance < radius[rows, None] + radius[None, :] - CLASH_OVERLAP
        count += int((near & later & ~peptide & ~disulfide).sum())
    return count
