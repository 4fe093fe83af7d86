"""Compare the confidence of a model, pLDDT and PAE, with the measured errors.

Values are summed over residues or pairs of residues in bins of the confidence, so the sums of targets can be added.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.data.structure.chain import Chain
from warpfold.files import read_file
from warpfold.geometry.residue import ATOM_ORDER
from warpfold.scoring.score import Paired

PLDDT_BINS = np.linspace(0, 100, 21)
# In angstrom. AlphaFold2's largest PAE is 31.75, so larger true errors are clipped to it.
PAE_BINS = np.arange(33.0)
MAX_PAE = 31.75
N, CA, C = (ATOM_ORDER[name] for name in ("N", "CA", "C"))
Array = np.ndarray


@dataclass(frozen=True)
class Sums:
    """Sums of expected and true values in B bins of the expected value.

    count, expected, true: [B]. squares: [3], the sums of expected**2, true**2 and expected * true over all values.
    """

    count: Array
    expected: Array
    true: Array
    squares: Array

    @classmethod
    def from_values(cls, expected: Array, true: Array, bins: Array) -> "Sums":
        """Sum values [N] in the bins between the limits `bins` [B + 1]; values outside count in the nearest bin."""
        index = np.clip(np.searchsorted(bins, expected, "right") - 1, 0, len(bins) - 2)
        count, *sums = (np.bincount(index, weights, len(bins) - 1) for weights in (None, expected, true))
        return cls(count, sums[0], sums[1], np.array([expected @ expected, true @ true, expected @ true], float))

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def to_dict(self) -> dict[str, Any]:
        """Compute calibration error, bias and correlation, for JSON.

        error: the expected calibration error, the mean over all values of |mean expected - mean true| of their bin.
        bias: mean expected - mean true; positive for an overconfident pLDDT and for an underconfident PAE.
        """
        n = float(self.count.sum())
        filled = self.count > 0
        expected, true = (sums[filled] / self.count[filled] for sums in (self.expected, self.true))
        means = np.array([self.expected.sum(), self.true.sum()]) / n
        variances = self.squares[:2] / n - means**2
        deviations = float(np.sqrt(np.prod(np.maximum(variances, 0))))
        covariance = float(self.squares[2] / n - np.prod(means))
        return {
            "count": int(n),
            "error": float(np.sum(self.count[filled] * np.abs(expected - true)) / n),
            "bias": float(means[0] - means[1]),
            "correlation": covariance / deviations if deviations > 1e-12 else None,
            "bins": [
                {"count": int(count), "expected": float(x), "true": float(y)}
                for count, x, y in zip(self.count[filled], expected, true)
            ],
        }


def read_plddt(chains: Mapping[str, Chain], written: bool = True) -> tuple[dict[str, Array] | None, str]:
    """Read pLDDT from the B column: [N] per chain, 0 to 100, NaN without atoms; or None and the reason.

    written: the program is known to write pLDDT. Otherwise a constant column counts as missing.
    """
    b_factors = {name: chain.b_factors for name, chain in chains.items() if chain.b_factors is not None}
    values = np.concatenate([b[chains[name].mask[:, CA] > 0] for name, b in b_factors.items()] or [np.zeros(0)])
    if not len(values) or not np.isfinite(values).all():
        return None, "its file has no B column"
    low, high = float(values.min()), float(values.max())
    if low < 0 or high > 100 or (low == high and not written):
        problem = f"is {low:g} throughout" if low == high else f"ranges from {low:g} to {high:g}, not from 0 to 100"
        return None, f"its B column {problem}"
    # Some programs write pLDDT from 0 to 1.
    scale = 100 if high <= 1 else 1
    return {name: scale * b.astype(np.float64) for name, b in b_factors.items()}, ""


def alignment_rows(alignments: Sequence[Path]) -> int | None:
    """Count the rows of all alignments together, in A3M or Stockholm format; None if there are no files."""
    if not alignments:
        return None
    rows = 0
    for data in map(read_file, alignments):
        if data.startswith(b"# STOCKHOLM"):
            rows += len(set(re.findall(rb"^([^\s#/]\S*) +\S", data, re.MULTILINE)))
        else:
            rows += len(re.findall(rb"^>", data, re.MULTILINE))
    return rows


def plddt_sums(paired: Paired, plddt: Mapping[str, Array]) -> Sums:
    """Sum pLDDT and lDDT-Ca, both 0 to 100, over the residues of both structures."""
    lddt = 100 * paired.lddt_ca_per_residue()
    # Unpaired residues have the index -1, which `in_both` leaves out.
    expected = np.concatenate([plddt[name][atoms.predicted_residue] for name, atoms in paired.atoms.items()])
    in_both = np.isfinite(lddt) & paired.arrays[1][:, CA]
    return Sums.from_values(expected[in_both], lddt[in_both], PLDDT_BINS)


def pae_sums(paired: Paired, pae: Array) -> Sums:
    """Sum PAE and the true aligned errors over all pairs of residues of both structures (Supp. 1.9.7).

    The aligned error of residue j in frame i is the distance between the predicted and the true Ca of j after the
    backbone frames (N, Ca, C) of i are superposed. pae: [N, N], all residues of the prediction in the file's order.
    """
    starts, start = {}, 0
    for name, chain in paired.predicted.chains.items():
        starts[name] = start
        start += len(chain.sequence)
    # The row of each reference residue in `pae`. Residues without a counterpart have no atoms in `predicted_mask`.
    row = np.concatenate([atoms.predicted_residue + starts[name] for name, atoms in paired.atoms.items()])
    positions, predicted_mask, truth, mask, _ = paired.arrays
    scored = predicted_mask[:, CA]
    aligned = (predicted_mask & mask)[:, [N, CA, C]].all(-1)
    # The scored Ca in the coordinates of each frame, [K, M, 3].
    local = []
    for x in (positions, truth):
        axes, origins = _backbone_frames(x[aligned])
        local.append((x[scored, CA].astype(np.float64)[None] - origins[:, None]) @ axes)
    error = np.minimum(np.linalg.norm(local[0] - local[1], axis=-1), MAX_PAE)
    expected = pae[np.ix_(row[aligned], row[scored])]
    # The error of a residue in its own frame is always 0 and says nothing about calibration.
    different = row[aligned][:, None] != row[scored]
    return Sums.from_values(expected[different].astype(np.float64), error[different], PAE_BINS)


def _backbone_frames(positions: Array) -> tuple[Array, Array]:
    """Compute the axes [K, 3, 3], as columns, and the origins [K, 3] of backbones [K, 37, 3] (Algorithm 21)."""
    n, ca, c = (positions[:, atom].astype(np.float64) for atom in (N, CA, C))
    first = (c - ca) / np.linalg.norm(c - ca, axis=-1, keepdims=True)
    second = n - ca - first * np.sum(first * (n - ca), -1, keepdims=True)
    second /= np.linalg.norm(second, axis=-1, keepdims=True)
    return np.stack([first, second, np.cross(first, second)], -1), ca
