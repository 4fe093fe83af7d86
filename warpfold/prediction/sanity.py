"""Check that a predicted structure looks like a protein: chain breaks, clashes, mirrored residues, in NumPy."""

from dataclasses import asdict, dataclass

import numpy as np
import torch

from warpfold.geometry.residue import ATOM_ORDER
from warpfold.prediction.notices import Notice
from warpfold.scoring.interface import CLASH_OVERLAP, RADIUS

CA_CA_RANGE = (2.6, 4.2)  # angstrom: cis peptides 2.9 to 3.0, trans 3.8, with room for strain
# Number of residues up to which a low pTM causes no warning.  Errors of d0 = 1.24 (N - 15)^(1/3) - 1.8 angstrom halve
# pTM.  At 30 residues d0 is 1.3 angstrom, a third of the distance between neighbouring Cα, and at 19 or fewer it is
# clipped to 0.2.  There a low pTM means errors of about an angstrom, not a wrong fold.  At 100 residues d0 is 3.7.
SHORT = 30
BLOCK = 512  # atoms compared with all others at once
N, CA, C, CB, SG = (ATOM_ORDER[name] for name in ("N", "CA", "C", "CB", "SG"))


@dataclass(frozen=True)
class Geometry:
    """Counts of flaws that real proteins do not have."""

    chain_breaks: int  # neighbours whose Cα are not 2.6 to 4.2 angstrom apart
    clashes: int  # pairs of atoms of different residues that overlap by more than 1.5 angstrom
    mirrored: int  # residues with a Cβ on the wrong side (D instead of L)

    def notices(self) -> list[Notice]:
        """Return a notice for each kind of flaw that occurs."""
        return [Notice(kind, {"count": count}) for kind, count in asdict(self).items() if count]


def check_geometry(positions: np.ndarray, mask: np.ndarray, asym_id: np.ndarray | None = None) -> Geometry:
    """Check N residues: positions [N, 37, 3] in angstrom, mask [N, 37]; consecutive rows of one chain are bonded.

    asym_id: [N], each residue's chain; None: they are one chain.
    Errors: FloatingPointError if the position of an existing atom is not finite.
    """
    present = mask > 0
    if not np.isfinite(positions[present]).all():
        raise FloatingPointError("the predicted positions are not finite")
    chain = np.zeros(len(mask), np.int64) if asym_id is None else asym_id
    bonded = chain[1:] == chain[:-1]  # [N - 1], each residue to the next
    step = np.linalg.norm(positions[1:, CA] - positions[:-1, CA], axis=-1)
    broken = (step < CA_CA_RANGE[0]) | (step > CA_CA_RANGE[1])
    # From Cα, the triple product of N, C and Cβ is about +2.6 cubic angstrom for L residues.
    n, ca, c, cb = (positions[:, atom] for atom in (N, CA, C, CB))
    volume = np.einsum("id,id->i", np.cross(n - ca, c - ca), cb - ca)
    return Geometry(
        chain_breaks=int((broken & bonded & present[1:, CA] & present[:-1, CA]).sum()),
        clashes=len(find_clashes(positions, present, bonded)),
        mirrored=int((present[:, [N, CA, C, CB]].all(1) & (volume < 0)).sum()),
    )


def find_clashes(positions: np.ndarray, mask: np.ndarray, bonded: np.ndarray) -> np.ndarray:
    """Find pairs of atoms that overlap by more than 1.5 Å (Supp. 1.9.11, eq. 46); return their residues [K, 2].

    positions [R, 37, 3], mask [R, 37]; bonded [R - 1], whether a residue is bonded to the next.  The atoms of a pair
    are in different residues.  Peptide bonds and pairs of SG, as in disulfides, are exempt.  DeepMind's code compares
    only residues of different numbers; this finds clashes between all residues of all chains.
    """
    row, atom = np.nonzero(mask)
    atoms = torch.from_numpy(positions[row, atom].astype(np.float32))
    radius = RADIUS[atom]
    pairs = [np.zeros((0, 2), np.int64)]
    for start in range(0, len(row), BLOCK):
        rows = slice(start, start + BLOCK)
        # Atoms are sorted by residue, so each pair is in one block.
        distance = torch.cdist(atoms[rows], atoms[start:], compute_mode="donot_use_mm_for_euclid_dist").numpy()
        i, j = np.nonzero(distance < radius[rows, None] + radius[start:] - CLASH_OVERLAP)
        i, j = i + start, j + start
        is_other_residue = row[i] < row[j]
        i, j = i[is_other_residue], j[is_other_residue]
        peptide = (atom[i] == C) & (atom[j] == N) & (row[i] + 1 == row[j]) & bonded[row[i]]
        disulfide = (atom[i] == SG) & (atom[j] == SG)
        pairs.append(np.stack([row[i], row[j]], -1)[~(peptide | disulfide)])
    return np.concatenate(pairs)


def confidence_notices(plddt: np.ndarray, ptm: float | None = None, iptm: float | None = None) -> list[Notice]:
    """Return warnings about low confidence: pLDDT [N] 0..100, pTM and ipTM 0..1.

    The limits are those of EMBL-EBI's course on AlphaFold: pLDDT 70 and 50, pTM 0.5, ipTM 0.6 and 0.8.
    """
    mean, lowest = float(plddt.mean()), float((plddt < 50).mean())
    notices = []
    if mean < 70:
        notices.append(Notice("plddt_very_low" if mean < 50 else "plddt_low", {"mean_plddt": mean}))
    if mean >= 50 and lowest >= 0.25:
        notices.append(Notice("disorder", {"share": lowest}))
    if iptm is not None and iptm < 0.8:
        notices.append(Notice("iptm_low" if iptm < 0.6 else "iptm_unsure", {"iptm": iptm}))
    if iptm is None and ptm is not None and ptm < 0.5 and len(plddt) > SHORT:
        notices.append(Notice("ptm_low", {"ptm": ptm}))
    return notices
